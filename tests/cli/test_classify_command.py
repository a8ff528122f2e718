"""``fastbert classify``."""

from __future__ import annotations

import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from fastbert.data import WordPieceTokenizer
from fastbert.inference import DynamicBatcher
from fastbert.inference.text_batches import pack
from fastbert.jobs.classify import Classifier
from fastbert.modules import BertForMaskedLM, BertForSequenceClassification
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

TEXTS = ["the dog ran.", "", "anna went to the garden and saw a bird in the tree.", "a", "the cat."]
# No second text is empty, because the pipeline takes a pair with an empty text as a single text.
SECONDS = [
    "a dog.",
    "she saw it.",
    "the tree and the garden and anna and the bird.",
    "the",
    "cats.",
]
PAIRS = [{"text": text, "text_pair": other} for text, other in zip(TEXTS, SECONDS, strict=True)]
NAMES = ["contradiction", "[neutral]", "entailment"]


@pytest.fixture
def classifier(model_folder, tmp_path):
    """Return a function that writes a classifier's folder; ``names=None`` leaves out id2label."""

    def make(names: list[str] | None = NAMES, num_labels: int = 3, **fields: object) -> Path:
        folder = tmp_path / "classifier"
        config = BertForMaskedLM.from_pretrained(model_folder).config
        config = config.replace(num_labels=len(names) if names else num_labels, **fields)
        torch.manual_seed(2)
        model = BertForSequenceClassification(config)
        model.classifier.bias.data.normal_()
        model.save_pretrained(folder)
        WordPieceTokenizer.load(model_folder).save(folder, max_length=40)
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        del content["id2label"], content["label2id"]
        if names is not None:
            content["id2label"] = {str(index): name for index, name in enumerate(names)}
            content["label2id"] = {name: index for index, name in enumerate(names)}
        else:
            content["num_labels"] = num_labels
        (folder / "config.json").write_text(json.dumps(content))
        return folder

    return make


def write(path: Path, records: list[dict[str, str]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(record["text"] + "\n" for record in records), encoding="utf-8")
    return path


def read(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def exact_scores(folder: Path, inputs: list, function: str) -> torch.Tensor:
    """Return the scores of the transformers model in float64, computed with one text per call."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [one if isinstance(one, dict) else {"text": one} for one in inputs]
    with torch.no_grad():
        rows = [
            model(**tokenizer(**one, truncation=True, return_tensors="pt")).logits[0]
            for one in texts
        ]
    logits = torch.stack(rows)
    return {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "none": logits}[function]


@pytest.mark.parametrize(
    ("fields", "function"),
    [
        ({}, "softmax"),
        ({"problem_type": "single_label_classification"}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"names": None, "num_labels": 4}, "softmax"),
        ({"names": ["relevant"]}, "sigmoid"),
        ({"names": ["stars"], "problem_type": "regression"}, "none"),
    ],
)
@pytest.mark.parametrize("pair", [False, True])
def test_agrees_with_the_pipeline_of_transformers(
    run, classifier, tmp_path, fields, function, pair
):
    transformers = pytest.importorskip("transformers")
    folder = classifier(**fields)
    source, target = write(tmp_path / "in.jsonl", PAIRS), tmp_path / "out.jsonl"
    options = ("--pair-field", "text_pair") if pair else ()
    result = run("classify", folder, source, target, "--tokens-per-batch", 16, *options)
    assert result.exit_code == 0, result.output
    ours = read(target)
    inputs = PAIRS if pair else TEXTS
    pipeline = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    labels = list(ours[0]["scores"])

    def stock_scores() -> torch.Tensor:
        rows = pipeline(inputs, top_k=None, truncation=True)
        by_label = [{one["label"]: one["score"] for one in row} for row in rows]
        return torch.tensor([[row[label] for label in labels] for row in by_label])

    exact, yardstick = exact_scores(folder, inputs, function), Yardstick(stock_scores)
    scores = torch.tensor([[row["scores"][label] for label in labels] for row in ours])
    assert_close("scores", scores, exact, yardstick)
    best = [labels[i] for i in yardstick.library.argmax(-1)]
    assert [row["label"] for row in ours] == best
    assert [row["score"] for row in ours] == [max(row["scores"].values()) for row in ours]


def test_the_same_results_from_every_format_into_every_format(run, classifier, tmp_path):
    folder = classifier()
    plain = []
    for kind in ("txt", "jsonl", "parquet"):
        records = [{"id": "x", "text": text} for text in TEXTS]
        source = write(tmp_path / f"in.{kind}", records)
        for out in ("jsonl", "parquet"):
            target = tmp_path / f"{kind}.{out}"
            result = run("classify", folder, source, target)
            assert result.exit_code == 0, result.output
            plain = plain or read(target)
            assert read(target) == plain
    schema = parquet.read_schema(tmp_path / "txt.parquet")
    scores = pa.struct({name: pa.float32() for name in NAMES})
    assert schema == pa.schema({"label": pa.string(), "score": pa.float32(), "scores": scores})
    assert len(plain) == len(TEXTS)
    assert len(list(tmp_path.iterdir())) == 1 + 3 + 6


def test_one_text_is_the_line_of_a_file(run, classifier, tmp_path):
    folder = classifier()
    source, target = write(tmp_path / "in.txt", PAIRS[:1]), tmp_path / "out.jsonl"
    assert run("classify", folder, source, target).exit_code == 0
    result = run("classify", folder, "--text", TEXTS[0], "--json")
    assert json.loads(result.stdout) == {"text": TEXTS[0], **read(target)[0]}
    table = run("classify", folder, "--text", TEXTS[0]).stdout
    rows = [line.split() for line in table.splitlines() if line.strip()][2:]
    assert {row[0] for row in rows} == set(NAMES)
    shown = [float(row[1]) for row in rows]
    assert shown == sorted(shown, reverse=True)


def test_summary(run, classifier, tmp_path):
    source = write(tmp_path / "in.jsonl", PAIRS)
    options = ("--pair-field", "text_pair", "--max-length", 8, "--json")
    result = run("classify", classifier(), source, tmp_path / "out.parquet", *options)
    summary = json.loads(result.stdout[result.stdout.index("{") :])
    assert summary["labels"] == NAMES
    assert summary["function"] == "softmax"
    assert summary["texts"] == len(PAIRS)
    assert summary["truncated"] >= 1
    assert summary["max_length"] == 8


def test_resumes(run, classifier, tmp_path, monkeypatch):
    module = importlib.import_module("fastbert.jobs.classify")
    folder, options = classifier(), ("--tokens-per-batch", 8, "--pair-field", "text_pair")
    source, target = write(tmp_path / "in.jsonl", PAIRS * 8), tmp_path / "out.jsonl"
    assert run("classify", folder, source, tmp_path / "whole.jsonl", *options).exit_code == 0
    calls, call = [], module.Classifier.forward

    def failing(self, batch):
        calls.append(1)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return call(self, batch)

    monkeypatch.setattr(module.Classifier, "forward", failing)
    assert run("classify", folder, source, target, *options).exit_code == 130
    assert not target.exists()
    monkeypatch.undo()
    assert "resuming after" in run("classify", folder, source, target, *options).output
    assert target.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_user_errors(refused, run, classifier, model_folder, tmp_path):
    folder, source = classifier(), write(tmp_path / "in.jsonl", PAIRS)
    target = tmp_path / "out" / "labels.jsonl"
    assert "INPUT: got none, allowed: INPUT and OUT, or --text" in refused("classify", folder)
    assert "OUT: got none" in refused("classify", folder, source)
    both = "--text: got a text and INPUT, allowed: --text, or INPUT and OUT"
    assert both in refused("classify", folder, source, "--text", "a")
    assert "--text: got a text and --pair-field, allowed: --text, or INPUT and OUT" in refused(
        "classify", folder, "--text", "a", "--pair-field", "b"
    )
    assert "a name in .jsonl or .parquet" in refused("classify", folder, source, tmp_path / "o.npy")
    assert "line 1: expected an object with a string field second" in refused(
        "classify", folder, source, target, "--pair-field", "second"
    )
    assert "the classification head is incomplete" in refused(
        "classify", model_folder, source, target
    )
    assert "got 'rocm'" in refused("classify", folder, source, target, "--backend", "rocm")
    assert not target.parent.exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"0": "a", "1": "b", "3": "c"}, "a name for each of 0 … 2"),
        (["a", "b", "c"], "a name for each of 0 … 2"),
        ({"0": "a", "1": "b", "2": "a"}, "allowed: different names"),
    ],
)
def test_labels_without_names(refused, classifier, names, message):
    folder = classifier()
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**content, "id2label": names}))
    assert message in refused("classify", folder, "--text", "a")


def test_a_full_disk_names_the_file(run, classifier, tmp_path):
    """When the disk is full, which a limit on the file size simulates, the error names the file."""
    resource = pytest.importorskip("resource")
    source, target = tmp_path / "texts.txt", tmp_path / "labels.jsonl"
    source.write_text("the dog ran.\n" * 300)
    folder, before = classifier(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        result = run("classify", folder, source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == 2
    error = result.output.strip().splitlines()[-1]
    assert error.startswith("error: [Errno 27]")
    assert error.endswith(f": '{target}.partial/whole.jsonl'")
    assert not target.exists()
    assert "resuming after 300 of 300 rows" in run("classify", folder, source, target).output


@pytest.mark.parametrize("target", ["labels.jsonl", "labels.parquet"])
def test_a_csv_with_ids(run, refused, classifier, tmp_path, target):
    folder, source = classifier(), tmp_path / "texts.csv"
    rows = zip(TEXTS, SECONDS, strict=True)
    lines = (f'{i}0,"{text}","{second}"\n' for i, (text, second) in enumerate(rows))
    source.write_text("key,text,text_pair\n" + "".join(lines))
    options = ("--pair-field", "text_pair")
    result = run("classify", folder, source, tmp_path / target, *options, "--id-field", "key")
    assert result.exit_code == 0, result.output
    plain = write(tmp_path / "texts.jsonl", PAIRS)
    assert run("classify", folder, plain, tmp_path / f"plain_{target}", *options).exit_code == 0
    actual, expected = (
        parquet.read_table(path).to_pylist()
        if path.suffix == ".parquet"
        else [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (tmp_path / target, tmp_path / f"plain_{target}")
    )
    assert actual == [{"id": f"{i}0", **row} for i, row in enumerate(expected)]
    assert [next(iter(row)) for row in actual] == ["id"] * len(TEXTS)
    message = refused("classify", folder, "--text", "the dog", "--id-field", "key")
    assert message == "error: --text: got a text and --id-field, allowed: --text, or INPUT and OUT"


@pytest.mark.parametrize("pair", [False, True])
def test_merged_calls_of_a_classifier_have_the_bits_of_single_calls(classifier, pair):
    model = Classifier(str(classifier()))
    inputs = [
        (one["text"], one["text_pair"]) if pair else one for one in (PAIRS if pair else TEXTS)
    ]
    with torch.inference_mode():
        alone = [
            model.forward(pack([model.tokenizer(one if pair else (one,))], model.device))[0]
            for one in inputs
        ]
    with DynamicBatcher(model) as batcher, ThreadPoolExecutor(8) as pool:
        merged = list(pool.map(batcher, inputs * 5))
    assert all(torch.equal(a, b) for a, b in zip(merged, alone * 5, strict=True))
