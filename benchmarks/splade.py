"""Time and peak memory of a SPLADE model of sentence-transformers, accelerated and stock.

    python -m benchmarks.splade --out FOLDER [--threads 2] [--rounds 3]

The model is a ``SparseEncoder`` with a DistilBERT of real size and random weights. The bias of the
head makes about one percent of the embedding's elements positive, as in trained models. The time is
that of ``SparseEncoder.encode`` with its default batch size of 32. The texts are real sentences,
and texts of 3 to 183 words that are joined from them. Stock and accelerated model take turns, and
the table has the shortest of their times. Before they are timed, the embeddings are compared with
those of stock fp32. The memory is the peak of the resident memory in a process of its own, less the
resident memory with the loaded model. A training step is forward and backward of the sum of the
embeddings of 16 texts of 256 tokens, without dropout.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastbert
from benchmarks.beside import FORMATS, in_turns, parser, peak_of_process, require_error, write
from benchmarks.cpu.tasks import mixed
from fastbert.bench.quantized_accuracy import model_folder, real_sentences

# The largest error of an element of an embedding against stock fp32. The elements are below 2.
ERRORS = {"fp32": 1e-4, "bf16": 0.1}
# With this bias, about one percent of the largest logits of a text are positive.
BIAS = -1.9
SIZE, LENGTH = 16, 256
CALLS = ("inference", "training")
HEADER = """| texts | format | fastbert, ms | sentence-transformers, ms | speed-up |
|---|---|---:|---:|---:|"""
MEMORY_HEADER = """| call | format | fastbert, MiB | sentence-transformers, MiB | ratio |
|---|---|---:|---:|---:|"""


def build(form: str, layers: int = 6) -> Any:
    """Return a ``SparseEncoder`` with random weights and a real tokenizer, without dropout."""
    import transformers
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    torch.manual_seed(0)
    config = transformers.DistilBertConfig(n_layers=layers, dropout=0.0, attention_dropout=0.0)
    model = transformers.DistilBertForMaskedLM(config)
    torch.nn.init.constant_(model.vocab_projector.bias, BIAS)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(str(model_folder())).save_pretrained(folder)
        options = {"dtype": FORMATS[form]}
        transformer = Transformer(folder, transformer_task="fill-mask", model_kwargs=options)
    transformer.max_seq_length = 512
    return SparseEncoder(modules=[transformer, SpladePooling()], device="cpu").eval()


def texts_of(quick: bool) -> dict[str, list[str]]:
    """Return lists of texts by their description."""
    count = 16 if quick else 128
    sentences = real_sentences(count)
    return {
        f"{count} sentences": sentences,
        f"{count // 2} texts of 3 to 183 words": mixed(sentences, count // 2, random.Random(0)),
        f"{count // 8} sentences one by one": sentences[:: count // (count // 8)],
    }


def encode(texts: list[str], size: int, model: Any) -> None:
    """Encode texts in batches of a size."""
    model.encode(texts, batch_size=size)


def contest(form: str, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Return a row for each list of texts, in one format.

    Args:
        form: Format of the weights, a key of `FORMATS`.
        rounds: Number of timed calls of each side.
        quick: Whether the model has one layer and there are few texts, so that the times are no
            result.

    Raises:
        RuntimeError: If the accelerated model does not agree with stock fp32.
    """
    layers = 1 if quick else 6
    exact = build("fp32", layers)
    sides = {"stock": build(form, layers), "fastbert": fastbert.accelerate(build(form, layers))}
    rows = []
    for label, texts in texts_of(quick).items():
        size = 1 if "one by one" in label else 32
        expected = exact.encode(texts, convert_to_sparse_tensor=False)
        given = sides["fastbert"].encode(texts, convert_to_sparse_tensor=False)
        error = float((given.float() - expected).abs().max())
        require_error(f"{label} {form}", error, ERRORS[form])
        times = in_turns(sides, functools.partial(encode, texts, size), rounds)
        rows.append(
            {
                "texts": label,
                "format": form,
                "error": error,
                "positive": float((expected > 0).float().mean()),
                **times,
            }
        )
        print(row_of(rows[-1]), flush=True)
    return rows


def row_of(row: dict[str, Any]) -> str:
    """Return a row of the table of times."""
    own, stock = row["fastbert seconds"], row["stock seconds"]
    times = f"{1e3 * own:,.0f} | {1e3 * stock:,.0f} | {stock / own:.2f} ×"
    return f"| {row['texts']} | {row['format']} | {times} |"


def peak(form: str, engine: str, call: str, layers: int) -> int:
    """Return the bytes that a call needs beyond the loaded model; runs in its own process."""
    model = build(form, layers)
    if engine == "fastbert":
        fastbert.accelerate(model)
    model.train(call == "training")
    ids = torch.randint(1000, 30000, (SIZE, LENGTH), generator=torch.Generator().manual_seed(1))

    def embeddings(size: int, length: int) -> Tensor:
        given = ids[:size, :length]
        features = {"input_ids": given, "attention_mask": torch.ones_like(given)}
        return model(features)["sentence_embedding"]

    with torch.inference_mode():
        embeddings(1, 16)
    # Linux then counts the peak of the resident memory from its present size.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = peak_of_process()
    if call == "training":
        embeddings(SIZE, LENGTH).sum().backward()
    else:
        with torch.inference_mode():
            embeddings(SIZE, LENGTH)
    return peak_of_process() - before


def memory(form: str, threads: int, quick: bool) -> list[dict[str, Any]]:
    """Return a row for each call, with the peak memory of both sides in bytes."""
    rows = []
    for call in CALLS:
        row: dict[str, Any] = {"call": f"{call} {SIZE}×{LENGTH}", "format": form}
        for engine in ("fastbert", "stock"):
            arguments = json.dumps([form, engine, call, 1 if quick else 6])
            command = [sys.executable, "-m", "benchmarks.splade", "--peak", arguments]
            done = subprocess.run(
                [*command, "--threads", str(threads)], capture_output=True, text=True, check=True
            )
            row[engine] = int(done.stdout.split()[-1])
        rows.append(row)
        print(memory_row(row), flush=True)
    return rows


def memory_row(row: dict[str, Any]) -> str:
    """Return a row of the table of memory."""
    own, stock = row["fastbert"], row["stock"]
    shown = f"{own / 2**20:,.0f} | {stock / 2**20:,.0f} | {stock / own:.1f} ×"
    return f"| {row['call']} | {row['format']} | {shown} |"


def page(content: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    times = [HEADER, *map(row_of, content["rows"])]
    needs = [MEMORY_HEADER, *map(memory_row, content["memory"])]
    return "\n".join([*times, "", *needs, ""])


def main() -> None:
    """Measure both formats, and write ``splade.json`` and ``splade.md``."""
    arguments = parser(__doc__, "splade", 3)
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
        for form in (() if options.no_times else FORMATS)
        for row in contest(form, options.rounds, options.quick)
    ]
    needs = [
        row
        for form in (() if options.no_memory else FORMATS)
        for row in memory(form, options.threads, options.quick)
    ]
    content = {"rows": rows, "memory": needs}
    write(options.out, "splade", options.threads, content, page(content))


if __name__ == "__main__":
    main()
