"""Time ``encode`` of sentence-transformers on the real MiniLM checkpoint, with different encoders.

    python -m benchmarks.sentences [--out out/sentences] [--texts 1000] [--rounds 3] [--threads N]

Every contender is the same SentenceTransformer with the same tokenizer, batches of 32 sorted by
length, and pooling; only the encoder differs. The contenders take turns in one process, with pauses
for threads that spin. OpenVINO and ONNX Runtime get the exported encoder with dynamic shapes, as
``backend=`` of sentence-transformers does through optimum, which does not support transformers
5.23. A contender is refused if its embeddings are not near those of stock fp32.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastbert
from benchmarks.cpu.export import to_onnx, to_openvino
from benchmarks.cpu.runtimes import BF16, FP32, onnx_session, openvino_options
from fastbert import json_file
from fastbert.bench.quantized_accuracy import model_folder, real_sentences
from fastbert.bench.timing import alternate
from fastbert.machine import describe

PAUSE_S = 0.05
# Largest accepted difference between two embeddings of length 1 in one element. The difference of
# bf16 is a few thousandths.
NEAR = 2e-2


def spreads(count: int) -> dict[str, list[str]]:
    """Return lists of texts for several distributions of lengths, by a description of each."""
    sentences = real_sentences(count)
    generator = random.Random(0)
    shuffled = generator.sample(sentences, len(sentences))

    def joined(words: int) -> str:
        pieces: list[str] = []
        while sum(len(piece.split()) for piece in pieces) < words:
            pieces.append(generator.choice(shuffled))
        return " ".join(" ".join(pieces).split()[:words])

    mixed = [
        joined(int(min(180, generator.lognormvariate(3.3, 0.9)) + 3)) for _ in range(count // 2)
    ]
    return {
        f"{count} real sentences": sentences,
        f"{len(mixed)} texts of 3 to 180 words": mixed,
        f"{count // 8} passages cut at 256 tokens": [joined(300) for _ in range(count // 8)],
        "50 single sentences, one by one": sentences[:: max(1, count // 50)][:50],
    }


def stock(**options: Any) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(model_folder()), device="cpu", **options)


def with_engine(make: Callable[[nn.Module], Callable[[dict[str, Any]], Any]]) -> Any:
    """Return the stock model with another implementation in place of the encoder's forward."""
    from transformers.modeling_outputs import BaseModelOutput

    model = stock(model_kwargs={"attn_implementation": "eager"})
    run = make(model[0].model)

    def forward(input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        hidden = run({"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()})
        return BaseModelOutput(last_hidden_state=torch.from_numpy(hidden))

    model[0].model.forward = forward
    return model


def openvino(form: str, encoder: nn.Module) -> Callable[[dict[str, Any]], Any]:
    import openvino as ov

    model = to_openvino(encoder, encoder.config.vocab_size)
    options = openvino_options(form, torch.get_num_threads())
    request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
    return lambda batch: next(iter(request.infer(batch).values())).copy()


def onnxruntime(encoder: nn.Module) -> Callable[[dict[str, Any]], Any]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        to_onnx(encoder, encoder.config.vocab_size, path)
        session = onnx_session(path, torch.get_num_threads(), spin=False)
    return lambda batch: session.run(None, batch)[0]


def contenders() -> Iterator[tuple[str, Callable[[], Any]]]:
    bf16 = {"dtype": torch.bfloat16}
    yield "stock fp32", stock
    yield "stock bf16", lambda: stock(model_kwargs=bf16)
    yield (
        'fp32, attn_implementation="fastbert"',
        lambda: stock(model_kwargs={"attn_implementation": "fastbert"}),
    )
    yield "OpenVINO fp32", lambda: with_engine(functools.partial(openvino, FP32))
    yield "OpenVINO bf16", lambda: with_engine(functools.partial(openvino, BF16))
    yield "ONNX Runtime fp32", lambda: with_engine(onnxruntime)
    yield "fastbert.accelerate fp32", lambda: fastbert.accelerate(stock())
    yield "fastbert.accelerate bf16", lambda: fastbert.accelerate(stock(model_kwargs=bf16))


def encode(model: Any, name: str, texts: list[str]) -> Tensor:
    if "one by one" in name:
        return torch.stack([model.encode(text, convert_to_tensor=True) for text in texts]).float()
    return model.encode(texts, batch_size=32, convert_to_tensor=True).float()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/sentences"), help="folder that receives the results"
    )
    parser.add_argument("--texts", type=int, default=1000, help="number of real sentences")
    parser.add_argument("--rounds", type=int, default=3, help="samples of each contender")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads of every contender"
    )
    options = parser.parse_args()
    import fastbert.integrations.attention_interface  # noqa: F401  registers attn_implementation

    torch.set_num_threads(options.threads)
    models, rows = {}, []
    for name, make in contenders():
        print(f"building {name}", flush=True)
        try:
            models[name] = make()
        except (ImportError, RuntimeError, ValueError) as error:
            rows.append({"contender": name, "left out": f"{type(error).__name__}: {error}"})
    for spread, texts in spreads(options.texts).items():
        rows += contest(spread, texts, models, options.rounds)
    for row in rows:
        print(line(row))
    machine = describe()
    json_file.write(
        options.out / "sentences.json", {"machine": machine, "rows": rows}, json_file.record
    )
    print(f"written: {options.out}/sentences.json; {options.threads} threads, {machine.cpu}")


def contest(
    spread: str, texts: list[str], models: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
    """Time the contenders in turns; a contender whose embeddings differ too much has no rate."""
    embeddings: dict[str, Tensor] = {}

    def run(name: str, _: int) -> None:
        embeddings[name] = encode(models[name], spread, texts)

    calls = {name: functools.partial(run, name) for name in models}
    times = alternate(calls, seconds=0.0, min_samples=rounds, max_samples=rounds, settle=PAUSE_S)
    rows = []
    for name in models:
        difference = float((embeddings[name] - embeddings["stock fp32"]).abs().max())
        seconds = times[name].median if difference <= NEAR else None
        rows.append(
            {
                "spread": spread,
                "contender": name,
                "texts_per_second": seconds and len(texts) / seconds,
                "to_stock_fp32": seconds and times["stock fp32"].median / seconds,
                "largest_difference": difference,
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text; the speed is relative to stock fp32."""
    if "left out" in row:
        return f"{row['contender']}: {row['left out']}"
    text = f"{row['spread']:<42} {row['contender']:<40}"
    speed, ratio = row["texts_per_second"], row["to_stock_fp32"]
    text += " refused" if speed is None else f" {speed:>8,.0f} texts/s {ratio:>6.2f}×"
    return f"{text}  largest difference {row['largest_difference']:.1e}"


if __name__ == "__main__":
    main()
