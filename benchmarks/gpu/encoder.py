"""Comparisons of the whole model: inference, a pre-training step, and the latency of a sequence.

``fastbert.bench.encoder`` checks two layers of each model in each dtype by the tolerance rule. An
implementation that fails the check is not timed. Rates count real tokens only.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fastbert
from benchmarks.gpu.contenders import OURS, compiler
from benchmarks.gpu.match import Contender, Match
from fastbert.bench import encoder
from fastbert.bench.attention_peers import Prepared
from fastbert.bench.encoder import BASE, MINILM, SMALL, EncoderShape, half_padded
from fastbert.bench.limits import GOALS, INFERENCE, LATENCY, RATIO_GOALS, TRAINING, Work
from fastbert.bench.training_step import training_step
from fastbert.config import BertConfig
from fastbert.integrations import stock_models
from fastbert.ops.backend import dtype_name
from fastbert.testing.cases import Inputs

LARGE = BertConfig.preset("large")
BF16, FP16 = torch.bfloat16, torch.float16
ROTATED_BATCHES = 4
STOCK = encoder.STOCK


@dataclass(frozen=True)
class Scale:
    """Sizes of the matches: models, tokens of a padded batch, lengths, and training batch size."""

    models: dict[str, BertConfig]
    tokens: int
    lengths: tuple[int, ...]
    training_batch: int


FULL = Scale({"BERT-base": BASE, "BERT-large": LARGE, "MiniLM": MINILM}, 32768, (128, 512), 48)
TOY = Scale({"BERT-base": SMALL}, 64, (16,), 2)


def inference(scale: Scale, device: str) -> Iterator[Match]:
    """Yield full and half padded batches of every model; on a GPU also a batch of mixed lengths."""
    for dtype in (BF16, FP16):
        for name, config in scale.models.items():
            for length in scale.lengths:
                batch = scale.tokens // length
                for kind, lengths in (
                    ("full", (length,) * batch),
                    ("half padded", half_padded(batch, length)),
                ):
                    shape = EncoderShape(f"{name} {batch}×{length} {kind}", config, lengths)
                    goal = None
                    if kind == "full" and dtype == BF16:
                        goal = GOALS.get(f"{name} s{length}")
                    # A compilation takes half a minute, so few matches have a compiled peer.
                    compiled = kind == "full" and dtype == BF16
                    yield _inference(shape, dtype, device, goal, compiled=compiled)
    name = "BERT-base 16×512, 60 % real"
    mixed = tuple(round(512 * (0.2 + 0.8 * i / 15)) for i in range(16))
    if device == "cuda":
        shape = EncoderShape(name, BASE, mixed)
        yield _inference(shape, FP16, device, None, compiled=False, ratio=RATIO_GOALS[name])


def _inference(shape, dtype, device, goal, *, compiled, ratio=None) -> Match:
    contenders = [
        Contender(name, functools.partial(prepared_pass, name, shape, dtype, device), ours=True)
        for name in own_engines(device)
    ]
    for path in transformers_paths():
        prepare = functools.partial(prepared_pass, STOCK + path, shape, dtype, device)
        contenders.append(Contender(STOCK + path, prepare))
    if compiled:
        prepare = functools.partial(
            prepared_pass, f"{STOCK}sdpa", shape, dtype, device, change=compiler(device)
        )
        contenders.append(Contender(f"{STOCK}sdpa compiled", prepare))
    return _match(INFERENCE, shape, dtype, contenders, "tokens/s", shape.tokens, goal, ratio)


def _match(direction, shape, dtype, contenders, unit, amount, goal=None, ratio=None) -> Match:
    passes = 3 if direction == TRAINING else 1
    return Match(
        series=f"{direction}, {dtype_name(dtype)}",
        label=shape.name,
        op="encoder",
        dtype=dtype,
        direction=direction,
        contenders=contenders,
        work=Work(flops=passes * shape.flops),
        unit=unit,
        amount=amount,
        goal=goal,
        ratio_goal=ratio,
        batches=[Inputs({"seed": seed}) for seed in range(ROTATED_BATCHES)],
        # Callers run the model without CUDA graphs, so a time includes the CPU's work and waits.
        graphs=False,
    )


def own_engines(device: str) -> list[str]:
    """Return the names of fastbert's implementations; the reference only if it is the only one."""
    names = list(encoder.requests(device))
    return [name for name in names if name != f"{OURS}reference"] or names


def transformers_paths() -> tuple[str, ...]:
    """Return the attention implementations of transformers; empty if it is not installed."""
    if not stock_models.installed():
        return ()
    flash = ("flash_attention_2",) if importlib.util.find_spec("flash_attn") else ()
    return (*encoder.TRANSFORMERS_PATHS, *flash)


# Inference


@functools.lru_cache(maxsize=2)
def weights_of(config: BertConfig) -> dict[str, Tensor]:
    return encoder.random_weights(config)


def prepared_pass(
    engine: str,
    shape: EncoderShape,
    dtype: torch.dtype,
    device: str,
    inputs: Inputs,
    change: Callable[[nn.Module], Callable] | None = None,
) -> Prepared:
    """Prepare a forward pass of ``engine`` on the batch whose seed is in ``inputs``."""
    if reason := encoder.refusals(shape.config, dtype, device).get(engine):
        raise ValueError(reason)
    model = model_of(engine, shape.config, dtype, device)
    batch = encoder.random_batch(shape, inputs.positional["seed"], device)
    call = change(model) if change else model
    return Prepared(lambda: call(**batch).last_hidden_state, [])


@functools.lru_cache(maxsize=8)
def model_of(engine: str, config: BertConfig, dtype: torch.dtype, device: str) -> nn.Module:
    """Return the encoder of ``engine``; all implementations have the same weights."""
    return encoder.encoder_of(engine, config, weights_of(config), dtype, device)


# Training


def training(scale: Scale, device: str) -> Iterator[Match]:
    """Yield pre-training steps with dropout and AdamW, in bf16 autocast with fp32 weights.

    The sequences of a batch that is half padded to 512 tokens have about the mean length of MLPerf,
    254 tokens. About 15 % of the tokens have labels.
    """
    longest = max(scale.lengths)
    for name in ("BERT-large", "BERT-base", "MiniLM"):
        if (config := scale.models.get(name)) is None:
            continue
        for kind, lengths in (
            ("half padded", half_padded(scale.training_batch, longest)),
            ("full", (longest,) * scale.training_batch),
        ):
            shape = EncoderShape(f"{name} {len(lengths)}×{longest} {kind}", config, lengths)
            goal = GOALS.get(f"{name} training") if kind == "half padded" else None
            contenders = [
                Contender(
                    engine,
                    functools.partial(_step, engine, shape, device),
                    engine.startswith(OURS),
                )
                for engine in (
                    *own_engines(device),
                    *(STOCK + path for path in transformers_paths()),
                )
            ]
            yield _match(TRAINING, shape, BF16, contenders, "sequences/s", len(shape.lengths), goal)


def _step(engine: str, shape: EncoderShape, device: str, inputs: Inputs) -> Prepared:
    """Prepare a training step on the batch whose seed is in ``inputs``."""
    return Prepared(training_step(engine, shape, inputs.positional["seed"], device), [])


# Latency


def latency(scale: Scale, device: str) -> Iterator[Match]:
    """Yield matches of single sequences; some contenders replay CUDA graphs of their own."""
    for name, config in scale.models.items():
        for length in scale.lengths:
            for dtype in (FP16, BF16):
                shape = EncoderShape(f"{name} 1×{length}", config, (length,))
                goal = GOALS.get(f"{name} batch 1") if length == 128 and dtype == FP16 else None
                yield _latency(shape, dtype, device, goal)


def _latency(shape, dtype, device, goal) -> Match:
    contenders = []
    for engine in own_engines(device):
        prepare = functools.partial(prepared_pass, engine, shape, dtype, device)
        contenders.append(Contender(engine, prepare, ours=True))
    if device == "cuda":
        # A call of ``fastbert.graphed`` also copies the inputs and chooses a bucket.
        prepare = functools.partial(_graphed, shape, dtype, device)
        contenders.append(Contender(f"{OURS}graphed", prepare, ours=True))
    for path in transformers_paths():
        prepare = functools.partial(prepared_pass, STOCK + path, shape, dtype, device)
        contenders.append(Contender(STOCK + path, prepare))
    if stock_models.installed() and device == "cuda":
        change = compiler(device, mode="reduce-overhead")
        prepare = functools.partial(
            prepared_pass, f"{STOCK}sdpa", shape, dtype, device, change=change
        )
        contenders.append(Contender(f"{STOCK}sdpa compiled, CUDA graph", prepare))
    return _match(LATENCY, shape, dtype, contenders, "ms", 1.0, goal)


def _graphed(shape: EncoderShape, dtype: torch.dtype, device: str, inputs: Inputs) -> Prepared:
    """Prepare ``fastbert.graphed`` of the model, whose calls replay a CUDA graph."""
    model = _wrapped(shape.config, dtype, device)
    batch = encoder.random_batch(shape, inputs.positional["seed"], device)
    return Prepared(lambda: model(**batch).last_hidden_state, [])


@functools.lru_cache(maxsize=2)
def _wrapped(config: BertConfig, dtype: torch.dtype, device: str) -> Callable:
    return fastbert.graphed(model_of(f"{OURS}auto", config, dtype, device))
