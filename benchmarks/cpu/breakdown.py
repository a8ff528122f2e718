"""The time of each operation of fastbert's encoder, with its fraction of the roofline.

The operations are timed one at a time. Successive calls use the weights of successive layers, as
in a forward pass. The entry "rest" is the time of the whole forward pass minus the sum of the
operations. It is negative if one call for a whole layer is faster than separate calls. The roofline
time is the larger of two times on this machine: FLOPs over the rate of matrix products, and bytes
over the rate of copies. The bytes count every weight, input and result once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cpu.contest import Setting
from benchmarks.cpu.encoder import Scale, matches, prepare
from benchmarks.cpu.remote import Failed, Remote
from benchmarks.cpu.runtimes import BF16, BY_NAME, FP32, Built
from fastbert.bench.limits import Work

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastbert.modules.inputs import EncoderInput

NAMES = ("fastbert bf16", "fastbert fp32")
SIZES = {BF16: 2, FP32: 4}
WHOLE, REST = "whole", "rest"


# Functions of the worker


def operations(
    built: Built, engine: str, lengths: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    """Return the calls of each operation in a forward pass, and their seconds, FLOPs and bytes."""
    import torch

    from benchmarks.cpu.batches import batches
    from fastbert.bench.timing import alternate
    from fastbert.modules.inputs import enter

    model, config = built.model, built.model.config
    batch = built.inputs(batches(config.vocab_size, lengths)[0])

    def check_input() -> EncoderInput:
        return enter(config, batch["input_ids"], batch["attention_mask"], *[None] * 5)

    with torch.inference_mode():
        tokens = check_input()
        hidden = model.embeddings(tokens)
        calls = _calls(model, tokens, hidden)
        calls["input and padding"] = lambda _: (check_input(), tokens.layout.given(hidden))
        calls["embedding"] = lambda _: model.embeddings(tokens)
        calls[WHOLE] = lambda _: built.call(batch)
        timings = alternate(calls, seconds=seconds, min_samples=3)
    amounts = work(config, lengths, SIZES[BY_NAME[engine].form])
    rows = []
    for name, timing in timings.items():
        count, amount = amounts[name]
        taken = {"operation": name, "count": count, "seconds": count * timing.median}
        rows.append({**taken, "flops": count * amount.flops, "bytes": count * amount.bytes})
    return rows


def _calls(
    model: nn.Module, tokens: EncoderInput, hidden: Tensor
) -> dict[str, Callable[[int], object]]:
    """Return the operations of a layer by name; the argument of each is the index of the layer."""
    import torch

    from fastbert import ops
    from fastbert.activations import of_config
    from fastbert.ops import backend

    layers, layout, heads = model.encoder.layer, tokens.layout, model.config.num_attention_heads
    gelu = of_config(gated=False)[model.config.hidden_act]
    activation, approximate = gelu.name, gelu.approximate
    linear = torch.ops.fastbert_C.linear
    rows = (layout.batch, layout.length) if layout.cu_seqlens is None else (hidden.shape[0],)
    packed = layers[0].attention.self.qkv(hidden).view(*rows, 3, heads, -1)

    def attention(index: int) -> Tensor:
        return ops.attention_qkvpacked(
            packed, layout.cu_seqlens, layout.max_seqlen, mask=layout.mask, bias=layout.bias
        )

    def first(index: int) -> Tensor:
        dense = layers[index % len(layers)].intermediate.dense
        if backend.EXTENSION is None:
            return ops.linear_gelu(hidden, dense.weight, dense.bias, approximate=approximate)
        return linear(hidden, dense.weight, dense.bias, None, activation, False)[0]

    def qkv(index: int) -> Tensor:
        dense = layers[index % len(layers)].attention.self.qkv
        if backend.EXTENSION is None:
            return dense(hidden)
        return linear(hidden, dense.weight, dense.bias, None, "none", False)[0]

    attended, inner = attention(0).reshape(hidden.shape), first(0)
    return {
        "QKV": qkv,
        "attention": attention,
        "projection + layer norm": _projected(
            [layer.attention.output for layer in layers], attended, hidden
        ),
        "feed-forward 1 + GELU": first,
        "feed-forward 2 + layer norm": _projected(
            [layer.output for layer in layers], inner, hidden
        ),
    }


def _projected(
    modules: Sequence[nn.Module], x: Tensor, residual: Tensor
) -> Callable[[int], Tensor]:
    """Return a function of a module's index, which computes LN(residual + dense(x)).

    The function is one call of the extension, or two operators if there is no extension.
    """
    import torch

    from fastbert import ops
    from fastbert.ops import backend

    def fused(index: int) -> Tensor:
        module = modules[index % len(modules)]
        dense, norm = module.dense, module.LayerNorm
        return torch.ops.fastbert_C.linear_layer_norm(
            x, dense.weight, dense.bias, residual, norm.weight, norm.bias, norm.eps
        )

    def apart(index: int) -> Tensor:
        module = modules[index % len(modules)]
        projected = ops.linear(x, module.dense.weight, None)
        return module.LayerNorm(projected, residual=residual, x_bias=module.dense.bias)

    return apart if backend.EXTENSION is None else fused


def work(config, lengths: Sequence[int], size: int) -> dict[str, tuple[int, Work]]:
    """Return for each operation the number of calls in a forward pass and the work of one call.

    The parameter ``size`` is the size of an element in bytes.
    """
    tokens, padded = sum(lengths), len(lengths) * max(lengths)
    hidden, inner, layers = (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
    )

    def linear(inputs: int, outputs: int, residual: int = 0) -> tuple[int, Work]:
        numbers = inputs * outputs + tokens * (inputs + outputs + residual)
        return layers, Work(2.0 * tokens * inputs * outputs, float(size * numbers))

    pairs = 4.0 * hidden * sum(length**2 for length in lengths)
    rows = float(size * tokens * hidden)
    amounts = {
        "QKV": linear(hidden, 3 * hidden),
        "attention": (layers, Work(pairs, 4 * rows)),
        "projection + layer norm": linear(hidden, hidden, hidden),
        "feed-forward 1 + GELU": linear(hidden, inner),
        "feed-forward 2 + layer norm": linear(inner, hidden, hidden),
        "input and padding": (1, Work(0.0, 16.0 * padded + rows + size * padded * hidden)),
        "embedding": (1, Work(0.0, 2 * rows)),
    }
    amounts[WHOLE] = (1, Work(sum(count * one.flops for count, one in amounts.values())))
    return amounts


# Functions of the driver


def run(scale: Scale, setting: Setting, threads: int) -> list[dict[str, Any]]:
    """Return an entry for each shape and number format, with the operations and their rooflines."""
    entries = []
    engines = [BY_NAME[name] for name in NAMES]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), scale, engines, setting, lambda engine, setting: None)
        for engine in engines:
            with Remote(engine.name, Path(folder), threads) as worker:
                for match in matches(scale):
                    entry: dict[str, Any] = {"label": match.shape.name, "engine": engine.name}
                    try:
                        if not entries or entries[-1]["engine"] != engine.name:
                            worker.ask("load")
                        answer = worker.ask(
                            "breakdown", lengths=list(match.shape.lengths), seconds=setting.seconds
                        )
                        limits = setting.ceilings.limits(engine.form)
                        entry["operations"] = with_roofline(answer["operations"], limits)
                    except Failed as failure:
                        entry["refused"] = str(failure)
                    entries.append(entry)
                    for text in lines([entry]):
                        setting.notify(text)
    return entries


def with_roofline(operations: Sequence[Mapping[str, Any]], limits) -> list[dict[str, Any]]:
    """Add to each operation its share of the whole time and of the roofline; append the rest."""
    whole = next(o["seconds"] for o in operations if o["operation"] == WHOLE)
    named = sum(o["seconds"] for o in operations if o["operation"] != WHOLE)
    rows = []
    for operation in operations:
        amount = Work(operation["flops"], operation["bytes"])
        rows.append(
            {
                **operation,
                "share": operation["seconds"] / whole,
                "gflops": operation["flops"] / operation["seconds"] / 1e9,
                "of_roofline": amount.floor(limits) / operation["seconds"],
                "bound_by": amount.bound_by(limits),
            }
        )
    rest = whole - named
    return [*rows, {"operation": REST, "seconds": rest, "share": rest / whole}]


def lines(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a Markdown table with a row for each shape and format, and a column per operation."""
    text = []
    measured = [entry for entry in entries if "operations" in entry]
    if measured:
        names = [operation["operation"] for operation in measured[0]["operations"]]
        text += [
            "",
            "Milliseconds (share of the whole, share of the roofline):",
            "",
            f"| shape | engine | {' | '.join(names)} |",
            "|---" * (2 + len(names)) + "|",
        ]
    for entry in measured:
        cells = " | ".join(map(_cell, entry["operations"]))
        text.append(f"| {entry['label']} | {entry['engine']} | {cells} |")
    if refused := [entry for entry in entries if "refused" in entry]:
        text.append("")
    for entry in refused:
        text.append(f"- {entry['label']}, {entry['engine']}: not measured: {entry['refused']}")
    return text


def _cell(operation: Mapping[str, Any]) -> str:
    shares = [operation[key] for key in ("share", "of_roofline") if key in operation]
    percent = ", ".join(f"{100 * share:.0f} %" for share in shares)
    return f"{1e3 * operation['seconds']:.2f} ({percent})"
