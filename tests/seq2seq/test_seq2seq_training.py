"""A run writes a model that transformers opens, its figures, its log and its curves."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from seq2seq_problems import SIZES, run

from fastbert.modules.transformer import Transformer
from fastbert.seq2seq import Writer
from fastbert.seq2seq.tokenizer import PieceTokenizer
from fastbert.training.log import read_log


def read_metrics(result) -> dict:
    return json.loads(result.metrics.read_text(encoding="utf-8"))


def test_the_results_of_a_run(options_of):
    options = options_of()
    result, text = run(options)
    assert "pairs: 51 pairs to train on, 13 held out; 258 different pieces" in text
    assert "8 steps of 14 pairs in 2 epochs on 1 process(es)" in text
    assert "step 4, after epoch 1: held-out loss" in text
    assert result.steps == 8
    assert result.pairs == {"train": 51, "validation": 13}
    assert {path.name for path in options.folder.iterdir()} == {
        *("model", "checkpoints", "metrics.json", "log.jsonl", "curves.png"),
    }
    metrics = read_metrics(result)
    assert metrics["held_out"] == result.figures
    assert metrics["mistakes"] == result.mistakes
    assert metrics["options"]["config"] == SIZES
    rows = read_log(result.log)
    assert [row["step"] for row in rows if row["event"] == "train"] == [3, 6, 8]
    evaluations = [row for row in rows if row["event"] == "evaluation"]
    assert [row["step"] for row in evaluations] == [4, 8]
    assert {name: evaluations[-1][name] for name in ("loss", "exact_match")} == result.figures


def test_the_curves_are_drawn(options_of, drawn):
    result, _ = run(options_of(epochs=1))
    assert result.curves.read_bytes().startswith(b"\x89PNG")
    assert result.curves.stat().st_size > 10_000


def test_the_exact_match_is_that_of_the_saved_model_in_transformers(options_of):
    transformers = pytest.importorskip("transformers")
    result, _ = run(options_of(epochs=20, learning_rate=8e-3))
    stock = transformers.AutoModelForSeq2SeqLM.from_pretrained(result.model).eval()
    assert type(stock).__name__ == "MarianMTModel"
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.model)
    held_out = held_out_words(result)
    encoded = tokenizer(held_out, return_tensors="pt", padding=True)
    with torch.no_grad():
        outputs = stock.generate(**encoded, num_beams=1)
    written = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    assert written == Writer(result.model)(held_out)
    exact = sum(word[::-1] == out for word, out in zip(held_out, written, strict=True))
    assert result.figures["exact_match"] == exact / 13
    # The test says something only if the model is neither always right nor always wrong.
    mistakes = {row["source"]: row["output"] for row in result.mistakes}
    assert 0 < len(mistakes) < 13
    assert mistakes == {
        word: out for word, out in zip(held_out, written, strict=True) if out != word[::-1]
    }


def held_out_words(result) -> list[str]:
    """Return the held-out words of a run, whose first pairs are in the result."""
    from fastbert.seq2seq import Seq2SeqOptions
    from fastbert.seq2seq.preparation import read_parts

    options = read_metrics(result)["options"]
    pairs = result.model.parent.parent / "pairs.tsv"
    parts = read_parts(Seq2SeqOptions(output="unused", pairs=pairs, held_out=options["held_out"]))
    held_out = [pair.source for pair in parts["validation"]]
    assert [row["source"] for row in result.examples] == held_out[:5]
    return held_out


def test_the_loss_is_the_smoothed_cross_entropy_of_the_saved_model(options_of):
    result, _ = run(options_of())
    model = Transformer.from_pretrained(result.model)
    tokenizer = PieceTokenizer.load(result.model)
    held_out = held_out_words(result)
    sources = torch.tensor(tokenizer.encode(held_out))
    labels = torch.tensor(tokenizer.encode([word[::-1] for word in held_out]))
    logits = model(sources, labels=labels, output_logits=True).logits.double()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    assert result.figures["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_the_same_seed_gives_the_same_log(options_of, tmp_path):
    def rows(**changes):
        result, _ = run(options_of(**changes))
        times = ("tokens_per_second",)
        return [{k: v for k, v in row.items() if k not in times} for row in read_log(result.log)]

    first = rows(output=tmp_path / "first")
    assert rows(output=tmp_path / "second") == first
    assert rows(output=tmp_path / "third", seed=1) != first


def test_the_learning_rate_rises_and_falls(options_of):
    result, _ = run(options_of(epochs=5, warmup=0.3, log_every=1))
    rates = [row["learning_rate"] for row in read_log(result.log) if row["event"] == "train"]
    peak = rates.index(max(rates))
    assert peak == 5
    assert max(rates) == pytest.approx(options_of().learning_rate)
    assert all(a < b for a, b in pairwise(rates[:peak]))
    assert all(a > b for a, b in pairwise(rates[peak + 1 :]))


def test_layer_norms_before_the_blocks_are_for_fastbert_alone(options_of):
    result, _ = run(options_of(config={**SIZES, "normalize_before": True}))
    assert Writer(result.model)(["abc"])
    content = json.loads((result.model / "config.json").read_text(encoding="utf-8"))
    assert content["model_type"] == "fastbert_transformer"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_learns(options_of, precision):
    config = {**SIZES, "dropout": 0.0}
    result, _ = run(
        options_of(config=config, epochs=25, learning_rate=8e-3, precision=precision, eval_every=99)
    )
    assert result.figures["exact_match"] > 0.9
