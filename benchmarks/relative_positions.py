"""Time and peak memory of DeBERTa-base and XLNet-base, beside transformers and BERT-base.

    python -m benchmarks.relative_positions --out FOLDER [--threads 2] [--rounds 5]

The models have random weights and real sizes. The time is that of a call of the encoder in eval
mode: stock transformers, the same model after ``fastbert.accelerate``, and fastbert's BERT-base of
the same shape. The three take turns, and the table has the shortest of their times. Before a shape
is timed, the accelerated model is compared with stock fp32. The memory is the peak of the resident
memory in a process of its own, less the resident memory with the loaded model; a training step is
forward and backward of the mean square of the hidden states, in fp32 and without dropout.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import subprocess
import sys
from typing import Any

import torch

import fastbert
from benchmarks.beside import FORMATS, batch, compare_encoders, parser, peak_of_process, write
from fastbert.bench.encoder import half_padded

SHAPES = {
    "1×128": (128,),
    "8×128 full": (128,) * 8,
    "8×128 half padded": half_padded(8, 128),
    "4×512 full": (512,) * 4,
    "4×512 half padded": half_padded(4, 512),
}
MODELS = ("DeBERTa-base", "XLNet-base")
MEMORY = ((16, 512, "forward"), (16, 512, "training"))
# The largest size of a process whose memory is measured, with code and model.
LIMIT = 20 << 30
HEADER = """| model | format | shape | fastbert, ms | transformers | BERT-base | × BERT | speed-up |
|---|---|---|---:|---:|---:|---:|---:|"""
MEMORY_HEADER = """| model | call | fastbert, MiB | transformers, MiB | ratio |
|---|---|---:|---:|---:|"""


def build(name: str, layers: int = 12) -> Any:
    """Return an encoder of transformers with random weights and without dropout, in eval mode."""
    import transformers

    torch.manual_seed(0)
    config: Any
    if name == "DeBERTa-base":
        config = transformers.DebertaV2Config(
            vocab_size=128100, hidden_size=768, num_hidden_layers=layers, num_attention_heads=12,
            intermediate_size=3072, relative_attention=True, position_buckets=256,
            norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type="p2c|c2p",
            position_biased_input=False, type_vocab_size=0, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return transformers.DebertaV2Model(config).eval()
    if name == "XLNet-base":
        config = transformers.XLNetConfig(
            d_model=768, n_layer=layers, n_head=12, d_inner=3072, dropout=0.0, use_mems_eval=False
        )
        return transformers.XLNetModel(config).eval()
    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def contest(name: str, form: str, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Return a row for each shape of a model in one format.

    Args:
        name: Name of the model.
        form: Format of the weights, a key of `FORMATS`.
        rounds: Number of calls of each implementation.
        quick: Whether the model has one layer, so that the times are no result.

    Raises:
        RuntimeError: If the accelerated model does not agree with stock fp32.
    """
    layers = 1 if quick else 12
    exact = build(name, layers)
    sides = {
        "transformers": copy.deepcopy(exact).to(FORMATS[form]),
        "fastbert": fastbert.accelerate(copy.deepcopy(exact)).to(FORMATS[form]),
        "BERT": fastbert.accelerate(build("BERT-base", layers)).to(FORMATS[form]),
    }
    rows = []
    for shape, lengths in SHAPES.items():
        result = compare_encoders(f"{name} {form} {shape}", exact, sides, lengths, form, rounds)
        rows.append({"model": name, "format": form, "shape": shape, **result})
        print(row_of(rows[-1]), flush=True)
    return rows


def row_of(row: dict[str, Any]) -> str:
    """Return a row of the table of times."""
    own, stock, bert = (row[f"{side} seconds"] for side in ("fastbert", "transformers", "BERT"))
    return (
        f"| {row['model']} | {row['format']} | {row['shape']} | {1e3 * own:,.1f} | "
        f"{1e3 * stock:,.1f} | {1e3 * bert:,.1f} | {own / bert:.2f} | {stock / own:.2f} × |"
    )


def peak(name: str, engine: str, size: int, length: int, call: str, layers: int) -> int:
    """Return the bytes that a call needs beyond the loaded model; runs in its own process."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    model = build(name, layers)
    if engine == "fastbert":
        fastbert.accelerate(model)
    model.requires_grad_(call == "training")
    given = batch((length,) * size)
    with torch.inference_mode():
        model(**batch((16,)))
    before = peak_of_process()
    if call == "training":
        model(**given).last_hidden_state.square().mean().backward()
    else:
        with torch.inference_mode():
            model(**given)
    return peak_of_process() - before


def memory(name: str, threads: int, quick: bool) -> list[dict[str, Any]]:
    """Return a row for each call of a model, with the peak memory of both implementations."""
    rows = []
    for size, length, call in MEMORY:
        row: dict[str, Any] = {"model": name, "call": f"{call} {size}×{length} fp32"}
        for engine in ("fastbert", "transformers"):
            arguments = [name, engine, size, length, call, 1 if quick else 12]
            command = [sys.executable, "-m", "benchmarks.relative_positions", "--peak"]
            done = subprocess.run(
                [*command, json.dumps(arguments), "--threads", str(threads)],
                capture_output=True, text=True,
            )  # fmt: skip
            row[engine] = int(done.stdout) if done.returncode == 0 else None
        rows.append(row)
        print(memory_row(row), flush=True)
    return rows


def memory_row(row: dict[str, Any]) -> str:
    """Return a row of the table of memory."""
    own, stock = row["fastbert"], row["transformers"]
    shown = [
        f"more than {LIMIT >> 30} GiB" if x is None else f"{x / 2**20:,.0f}" for x in (own, stock)
    ]
    ratio = "–" if None in (own, stock) else f"{stock / own:.1f} ×"
    return f"| {row['model']} | {row['call']} | {shown[0]} | {shown[1]} | {ratio} |"


def page(content: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    times = [HEADER, *map(row_of, content["rows"])]
    needs = [MEMORY_HEADER, *map(memory_row, content["memory"])]
    return "\n".join([*times, "", *needs, ""])


def main() -> None:
    """Measure all models, and write ``relative_positions.json`` and ``.md``."""
    arguments = parser(__doc__, "relative_positions", 5)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument("--no-memory", action="store_true", help="measure the times only")
    arguments.add_argument("--no-times", action="store_true", help="measure the memory only")
    arguments.add_argument("--peak", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak(*json.loads(options.peak)))
        return
    print(HEADER)
    rows = [
        row
        for name in (() if options.no_times else options.models)
        for form in FORMATS
        for row in contest(name, form, options.rounds, options.quick)
    ]
    needs = [
        row
        for name in (() if options.no_memory else options.models)
        for row in memory(name, options.threads, options.quick)
    ]
    content = {"rows": rows, "memory": needs}
    write(options.out, "relative_positions", options.threads, content, page(content))


if __name__ == "__main__":
    main()
