"""The benchmarks that train models on real text and on reviews run at the smallest sizes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for imports from benchmarks/

from benchmarks import docstrings, training_step, transfer
from benchmarks.attention_classifiers import OPINIONS, write_reviews
from benchmarks.cpu.runtimes import FP32
from fastbert import BertConfig, BertModel
from fastbert.bench.encoder import SMALL, half_padded
from fastbert.data import stories, train_tokenizer
from fastbert.modules import BertForPreTraining

ROOT = Path(__file__).resolve().parents[2]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="compares with transformers"
)


def run(*arguments: object) -> str:
    command = [sys.executable, "-m", *map(str, arguments), "--threads", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Create two packages of eight modules each, one about birds and one about fish."""
    for package, words in (("birdwords", "The birds sing"), ("fishwords", "The fish swim")):
        folder = tmp_path / package
        (folder / "tests").mkdir(parents=True)
        for name in ("__init__", "a", "b", "c", "d", "e", "f", "g"):
            prose = [
                f"{words} in the {name} morning and {' '.join(['they like it'] * n)}."
                for n in range(5, 8)
            ]
            example = ">>> print(1)\n1"
            code = f"x : int\n    Number of {package}."
            body = "\n\n".join([*prose, example, code])
            (folder / f"{name}.py").write_text(f'"""{body}\n"""\n')
        (folder / "tests" / "test_a.py").write_text('"""A test is no documentation."""\n')
        (folder / "broken.py").write_text('"""A broken module."""\n(')
    monkeypatch.syspath_prepend(tmp_path)
    return ["birdwords", "fishwords"]


def test_docstrings_have_only_prose(packages):
    documents = list(docstrings.documents(packages))
    assert [d.package for d in documents] == ["birdwords"] * 8 + ["fishwords"] * 8
    assert {d.module for d in documents} == {f"{n}.py" for n in ("__init__", *"abcdefg")}
    for document in documents:
        assert len(document.paragraphs) == 3
        assert all(text.endswith("they like it.") for text in document.paragraphs)


def test_docstrings_refuse_a_package_that_is_not_installed():
    assert docstrings.installed(["json", "no_such_package"]) == ["json"]
    with pytest.raises(ValueError, match="packages: got no_such_package, allowed: "):
        list(docstrings.documents(["no_such_package"]))


def test_labelled_passages_are_split_by_module(packages):
    parts = transfer.labelled(packages, 20)
    assert {part: len(rows) for part, rows in parts.items()} == {
        "train": 24,
        "validation": 6,
        "test": 10,
    }
    modules = {
        part: {(row["label"], row["text"].split(" in the ")[1].split()[0]) for row in rows}
        for part, rows in parts.items()
    }
    assert not modules["train"] & modules["test"]
    assert not modules["train"] & modules["validation"]
    assert not modules["validation"] & modules["test"]
    with pytest.raises(ValueError, match="count: got 100, allowed: 24 for birdwords"):
        transfer.labelled(packages, 100)


def test_passages_that_name_a_label_are_left_out(packages):
    document = next(iter(docstrings.documents(["birdwords"])))
    assert len(transfer._passages(document, re.compile("fish", re.I))) == 3
    assert transfer._passages(document, re.compile("fish|BIRDS", re.I)) == []


@needs_transformers
@pytest.mark.every_case
def test_both_engines_train_alike_on_real_text(tmp_path):
    options = ["--packages", "json", "email", "asyncio", "--preset", "tiny", "--vocab-size", 300]
    options += ["--steps", 12, "--evaluations", 2, "--max-length", 32, "--tokens-per-batch", 256]
    output = run("benchmarks.real_text", "--out", tmp_path, *options)
    assert "| 12 | transformers |" in output
    record = json.loads((tmp_path / "real_text.json").read_text(encoding="utf-8"))
    assert [row["step"] for row in record["held_out"]] == [0, 0, 6, 6, 12, 12]
    losses = record["losses"]
    assert len(losses["fastbert"]) == 12
    assert losses["fastbert"] == pytest.approx(losses["transformers"], rel=1e-4)
    assert record["held_out"][-1]["mlm_loss"] < record["held_out"][0]["mlm_loss"] - 0.05
    for ours, stock in zip(record["held_out"][::2], record["held_out"][1::2], strict=True):
        for name in ("mlm_loss", "nsp_loss"):
            assert ours[name] == pytest.approx(stock[name], rel=1e-4)
    assert record["ratio_of_total_times"] == pytest.approx(
        sum(record["seconds"]["transformers"]) / sum(record["seconds"]["fastbert"])
    )
    assert (tmp_path / "real_text.png").read_bytes()[:4] == b"\x89PNG"


@needs_transformers
@pytest.mark.every_case
def test_a_training_step_has_times_and_memory_of_both_engines(tmp_path, monkeypatch, capsys):
    engines = ("fastbert fp32", "transformers sdpa fp32")
    monkeypatch.setattr(training_step, "NAMES", {FP32: engines})
    monkeypatch.setattr(training_step, "MODELS", {"tiny": SMALL})
    monkeypatch.setattr(training_step, "LENGTHS", half_padded(2, 16))
    arguments = ["training_step", "--out", str(tmp_path), "--steps", "3", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    training_step.main()
    record = json.loads((tmp_path / "training_step.json").read_text(encoding="utf-8"))
    assert record["lengths"] == [16, 1]
    assert [row["engine"] for row in record["rows"]] == list(engines)
    for row in record["rows"]:
        assert len(row["all_seconds"]) == 3
        assert row["seconds"] == sorted(row["all_seconds"])[1]
        assert row["tokens_per_second"] == pytest.approx(sum(record["lengths"]) / row["seconds"])
        # fp32 weights, gradients and two moments need at least 16 bytes per parameter.
        assert row["peak_bytes"] > 16 * parameters(SMALL)
    text = (tmp_path / "training_step.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    lines = text.splitlines()
    assert lines[2].startswith("| tiny | fp32 | fastbert fp32 | ")
    assert lines[2].endswith("| 1.00 × | 1.00 × |")
    ratio = record["rows"][1]["peak_bytes"] / record["rows"][0]["peak_bytes"]
    assert lines[3].endswith(f"| {ratio:.2f} × |")


def parameters(config: BertConfig) -> int:
    return sum(weight.numel() for weight in BertForPreTraining(config).parameters())


@pytest.mark.every_case
def test_transfer_compares_with_the_same_architecture(tmp_path):
    model = tmp_path / "model"
    torch.manual_seed(5)
    tokenizer = train_tokenizer(stories(30, seed=0), 300)
    tokenizer.save(model)
    BertModel(BertConfig.preset("tiny", vocab_size=tokenizer.vocab_size)).save_pretrained(model)
    options = ["--model", model, "--packages", "email", "asyncio", "--count", 16, "--epochs", 2]
    options += ["--scratch-rates", "1e-3", "--scratch-epochs", 3, "--precision", "fp32"]
    run("benchmarks.transfer", "--out", tmp_path / "out", *options)
    record = json.loads((tmp_path / "out" / "transfer.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in record["rows"]] == ["pre-trained", "from scratch"]
    assert [len(row["per_epoch"]) for row in record["rows"]] == [2, 3]
    for row in record["rows"]:
        assert row["examples"] == {"train": 20, "validation": 4, "test": 8}
        assert row["per_epoch"][-1] == row["accuracy"]["validation"]
    scratch = BertModel.from_pretrained(tmp_path / "out" / "untrained")
    given = BertModel.from_pretrained(model)
    assert scratch.config == given.config
    name = "embeddings.word_embeddings.weight"
    assert not scratch.state_dict()[name].equal(given.state_dict()[name])
    assert set(record["changed_labels"]) == {"bf16", "int8"}
    assert all(0.0 <= share <= 1.0 for share in record["changed_labels"].values())
    assert (tmp_path / "out" / "transfer.png").exists()


def test_generated_reviews_have_the_opinion_of_their_label(tmp_path):
    write_reviews(tmp_path, 40)
    good = {pair[0] for pair in OPINIONS}
    words = good | {pair[1] for pair in OPINIONS}
    for label in ("pos", "neg"):
        paths = list(tmp_path.glob(f"*/{label}/*.txt"))
        assert len(paths) == 40
        for path in paths:
            opinions = [
                s
                for s in path.read_text(encoding="utf-8").split(". ")
                if s.strip(".").split()[-1] in words
            ]
            assert len(opinions) == 2
            for opinion in opinions:
                is_good = opinion.strip(".").split()[-1] in good
                assert (is_good != (" not " in opinion)) == (label == "pos")


@pytest.mark.every_case
def test_attention_classifiers_on_a_given_folder(tmp_path):
    reviews = tmp_path / "reviews"
    write_reviews(reviews, 20)
    small = ["--heads", 2, 4, "--layers", 1, "--hidden-size", 16, "--epochs", 2]
    small += ["--pretrained-epochs", 1, "--max-length", 64, "--vocab-size", 300]
    small += ["--learning-rate", 1e-3, "--pretrained-rate", 1e-3]
    generated = run(
        *("benchmarks.attention_classifiers", "--out", tmp_path / "a", "--count", 20),
        *("--pretrain-steps", 2, *small),
    )
    assert "| pre-trained, fine-tuned |" in generated
    model = tmp_path / "a" / "pretrained" / "run" / "model"
    run(
        *("benchmarks.attention_classifiers", "--out", tmp_path / "b", "--reviews", reviews),
        *("--pretrained", model, *small),
    )
    first, second = (
        json.loads((tmp_path / name / "attention_classifiers.json").read_text(encoding="utf-8"))
        for name in "ab"
    )
    # The folder has the reviews that the generator makes, so the accuracies of both runs are equal.
    assert [r["accuracy"] for r in first["rows"]] == [r["accuracy"] for r in second["rows"]]
    assert [len(row["per_epoch"]) for row in first["rows"]] == [2, 2, 1]
    assert first["rows"][0]["examples"] == {"train": 18, "validation": 2, "test": 20}
    heads = [
        BertConfig.from_json(tmp_path / "a" / f"untrained-1-{count}" / "config.json")
        for count in (2, 4)
    ]
    assert [config.num_attention_heads for config in heads] == [2, 4]


def test_the_page_of_fine_tuning_has_the_figures_of_the_record():
    record = ROOT / "benchmarks" / "results" / "2026-11-23-real-text" / "transfer.json"
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    scratch = max(rows[1:], key=lambda row: row["accuracy"]["validation"])
    page = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    for name, row in (("pre-trained", rows[0]), ("from scratch", scratch)):
        cells = [f"{100 * row['accuracy'][part]:.1f} %" for part in ("train", "test")]
        assert f"{name} | {' | '.join(cells)} |" in page
