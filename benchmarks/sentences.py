"""Time ``encode`` of sentence-transformers on the real MiniLM checkpoint, with different encoders.

    python -m benchmarks.sentences [--out out/sentences] [--texts 1000] [--rounds 3] [--threads N]

Every contender is the same SentenceTransformer with the same tokenizer, batches of 32 sorted by
length, and pooling; only the encoder differs. The contenders take turns in one process, with pauses
for threads that spin. This script exports the encoder for OpenVINO and ONNX Runtime with dynamic
shapes, as ``backend=`` of sentence-transformers does through optimum, which does not support
transformers 5.23. A contender is refused if its embeddings are not near those of stock fp32.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastbert
from benchmarks.cpu.export import Hidden
from fastbert import json_file
from fastbert.bench.machine import describe
from fastbert.bench.quantized_accuracy import model_folder, real_sentences
from fastbert.cli.common import new_table, out

PAUSE_S = 0.05
# Largest difference of an element of two embeddings of length 1; bf16 makes a few thousandths.
NEAR = 2e-2


def spreads(count: int) -> dict[str, list[str]]:
    """Return lists of texts with different lengths, by their description."""
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


class Replaced(nn.Module):
    """Another engine in the place of the encoder's forward."""

    def __init__(self, run: Callable[[dict[str, Tensor]], Any]) -> None:
        super().__init__()
        self.run = run

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        hidden = self.run({"input_ids": input_ids, "attention_mask": attention_mask})
        return BaseModelOutput(last_hidden_state=torch.from_numpy(hidden))


def with_engine(make: Callable[[nn.Module], Callable[[dict[str, Tensor]], Any]]) -> Any:
    model = stock(model_kwargs={"attn_implementation": "eager"})
    encoder = model[0].model
    run = make(encoder)
    encoder.forward = Replaced(run).__call__
    return model


def example() -> tuple[Tensor, Tensor]:
    ids = torch.randint(1000, 2000, (2, 16))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return ids, mask


def openvino(hint: str) -> Callable[[nn.Module], Callable[[dict[str, Tensor]], Any]]:
    def make(encoder: nn.Module) -> Callable[[dict[str, Tensor]], Any]:
        import openvino as ov

        ids, mask = example()
        model = ov.convert_model(
            Hidden(encoder), example_input={"input_ids": ids, "attention_mask": mask}
        )
        options = {
            "INFERENCE_PRECISION_HINT": hint,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
        }
        request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
        return lambda batch: next(
            iter(request.infer({name: x.numpy() for name, x in batch.items()}).values())
        ).copy()

    return make


def onnxruntime(encoder: nn.Module) -> Callable[[dict[str, Tensor]], Any]:
    import onnxruntime as ort

    names = ["input_ids", "attention_mask"]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = str(Path(folder) / "model.onnx")
        torch.onnx.export(
            Hidden(encoder),
            example(),
            path,
            input_names=names,
            output_names=["hidden"],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in (*names, "hidden")},
            opset_version=17,
            dynamo=False,
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, {name: x.numpy() for name, x in batch.items()})[0]


def contenders() -> Iterator[tuple[str, Callable[[], Any]]]:
    bf16 = {"dtype": torch.bfloat16}
    yield "stock fp32", stock
    yield "stock bf16", lambda: stock(model_kwargs=bf16)
    yield (
        'fp32, attn_implementation="fastbert"',
        lambda: stock(model_kwargs={"attn_implementation": "fastbert"}),
    )
    yield "OpenVINO fp32", lambda: with_engine(openvino("f32"))
    yield "OpenVINO bf16", lambda: with_engine(openvino("bf16"))
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
        out.print(f"building {name}", highlight=False)
        try:
            models[name] = make()
        except (ImportError, RuntimeError, ValueError) as error:
            rows.append({"contender": name, "left out": f"{type(error).__name__}: {error}"})
    for spread, texts in spreads(options.texts).items():
        rows += contest(spread, texts, models, options.rounds)
    for spread in dict.fromkeys(row["spread"] for row in rows if "spread" in row):
        out.print(table([row for row in rows if row.get("spread") == spread], spread))
    for row in rows:
        if "left out" in row:
            out.print(f"{row['contender']}: {row['left out']}", highlight=False)
    machine = describe()
    json_file.write(options.out / "sentences.json", {"machine": machine, "rows": rows})
    out.print(f"written: {options.out}/sentences.json; {options.threads} threads, {machine.cpu}")


def contest(
    spread: str, texts: list[str], models: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
    """Time the contenders in turns, in an order that rotates by one each round; keep medians."""
    exact = encode(models["stock fp32"], spread, texts)
    differences, times = {}, {name: [] for name in models}
    for name, model in models.items():
        differences[name] = float((encode(model, spread, texts) - exact).abs().max())
    names = [name for name in models if differences[name] <= NEAR]
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            encode(models[name], spread, texts)
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[name]) for name in names}
    return [
        {
            "spread": spread,
            "contender": name,
            "texts_per_second": len(texts) / medians[name] if name in medians else None,
            "to_stock_fp32": medians["stock fp32"] / medians[name] if name in medians else None,
            "largest_difference": differences[name],
        }
        for name in models
    ]


def table(rows: list[dict[str, Any]], title: str) -> Any:
    drawn = new_table(title)
    for heading in ("encoder", "texts/s", "speed over stock fp32", "largest difference"):
        drawn.add_column(heading, justify="left" if heading == "encoder" else "right")
    for row in rows:
        speed, ratio = row["texts_per_second"], row["to_stock_fp32"]
        shown = ("refused", "") if speed is None else (f"{speed:,.0f}", f"{ratio:.2f}")
        drawn.add_row(row["contender"], *shown, f"{row['largest_difference']:.1e}")
    return drawn


if __name__ == "__main__":
    main()
