"""The tasks of the CPU benchmark and the exactness of embeddings: rules and tiny runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for imports from benchmarks/

from benchmarks.cpu import __main__ as cpu
from benchmarks.cpu import contest, exactness, jobs, report, runtimes, tasks
from benchmarks.cpu.ceilings import Ceilings
from benchmarks.cpu.contest import LEFT_OUT, CpuRow, Setting
from fastbert.bench.contest import to_dict

STOCK, OURS, OTHER = tasks.STOCK, "fastbert fp32", "fastbert bf16"


def ceilings(torch_bf16: float = 2e10, unit: str = "widened to fp32") -> Ceilings:
    units = {"fp32": "FMA", "bf16": unit, "int8": "pairs"}
    return Ceilings(2, {"fp32": 2e11, "bf16": 2e11, "int8": 3e11}, units, 2e10, 1.3e11, torch_bf16)


def setting(section: str, **options) -> Setting:
    return Setting(section, 0.0, lambda text: None, ceilings=ceilings(**options))


class Fake:
    """A fake worker whose calls take `seconds` and give `sample`."""

    def __init__(self, seconds: float, sample) -> None:
        self.seconds, self.sample, self.asked = seconds, sample, []

    def ask(self, do: str, **work) -> dict:
        self.asked.append(do)
        answer = {"seconds": self.seconds, "sample": [self.sample], "note": "a note"}
        return {"task": answer, "peak": {"peak": 1 << 20}}.get(do, {})

    def measure(self, first: int, calls: int) -> float:
        return self.seconds


def played(
    section: str, workers: dict, refused: dict | None = None, place: int = 0, rates=()
) -> dict[str, CpuRow]:
    task, given = tasks.TASKS[section], setting(section)
    given.rates.update(rates)
    match = task.matches(True)[place]
    rows = tasks.play(task, match, workers, refused or {}, given)
    return {row.contender: row for row in rows}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(contest, "SETTLE_S", 0.0)


def unit_rows(count: int, width: int = 8, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(count, width))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


# The exactness of embeddings


def test_batches_of_sentences_are_padded_in_their_order():
    ids = [[5] * (1 + k % 7) for k in range(40)]
    made = list(exactness.padded(ids))
    assert [len(batch["input_ids"]) for batch in made] == [32, 8]
    found = [
        row[mask.astype(bool)].tolist()
        for batch in made
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert found == ids
    assert all(not batch["input_ids"][batch["attention_mask"] == 0].any() for batch in made)


def test_an_embedding_is_the_mean_at_real_tokens_with_length_1():
    hidden = np.array([[[3.0, 0.0], [3.0, 8.0], [np.nan, 7.0]]])
    vectors = exactness.pooled(hidden, {"attention_mask": np.array([[1, 1, 0]])})
    assert vectors.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]


def test_the_fields_of_exactness():
    right = unit_rows(12)
    assert exactness.fields(right.tolist(), right.tolist()) == {
        "embedding_error": 0.0,
        "rank_correlation": pytest.approx(1.0),
        "same_nearest": 1.0,
    }
    wrong = exactness.fields(unit_rows(12, seed=1).tolist(), right.tolist())
    assert wrong["embedding_error"] > 0.1
    assert wrong["rank_correlation"] < 0.5
    assert wrong["same_nearest"] < 1.0


@pytest.mark.every_case
def test_the_exact_embeddings_are_those_of_the_published_model(monkeypatch):
    import torch

    from fastbert.bench.quantized_accuracy import model_folder
    from fastbert.modules import BertModel

    monkeypatch.setattr(exactness, "SENTENCES", 12)
    exact, vectors = exactness.Exactness(), []
    assert sorted(map(len, exact.ids)) == pytest.approx(list(map(len, exact.ids)), abs=20)
    model = BertModel.from_pretrained(model_folder()).eval()
    for batch in exactness.padded(exact.ids):
        with torch.inference_mode():
            given = {name: torch.from_numpy(array) for name, array in batch.items()}
            hidden = model(**given).last_hidden_state.numpy()
        vectors += exactness.pooled(hidden, batch).tolist()
    found = exact.errors(vectors)
    assert 0.0 < found["embedding_error"] < 1e-5
    assert found["same_nearest"] == 1.0


# The work of the tasks


@pytest.mark.parametrize("section", tasks.TASKS)
@pytest.mark.parametrize("quick", [True, False])
def test_the_matches_of_a_task(section, quick):
    matches = tasks.TASKS[section].matches(quick)
    assert len({match.label for match in matches}) == len(matches)
    for match in matches:
        assert match.flops > 0
        assert min(match.lengths) > 0
        json.dumps(match.work)  # The work is sent to the worker.
    if not quick:
        expected = {
            "encode": [1000, 500, 50],
            "rerank": [32, 128],
            "embedder": [32, 32],
            "documents": [128, 1024, 4096, 2048, 8192],
            "translate": [32, 32, 512, 512],
        }
        assert [match.amount for match in matches] == expected[section]


def test_the_texts_have_the_lengths_that_their_labels_say():
    encode = tasks.texts_to_encode(False)
    words = [[len(text.split()) for text in match.work["texts"]] for match in encode]
    assert 3 <= min(words[1]) < 10
    assert 150 < max(words[1]) <= 183
    assert max(encode[1].lengths) <= 256
    assert [match.work["one_by_one"] for match in encode] == [False, False, True]
    assert set(encode[2].work["texts"]) < set(encode[0].work["texts"])
    drawn = tasks.pairs(8)
    assert len({query for query, _ in drawn}) == 8
    assert not any(passage.startswith(query) for query, passage in drawn)


def test_the_flops_of_modernbert():
    from transformers import ModernBertConfig

    config = ModernBertConfig()
    assert config.num_hidden_layers == tasks.LAYERS
    assert config.layer_types.count("full_attention") == tasks.GLOBAL
    assert (config.hidden_size, config.intermediate_size) == (tasks.WIDTH, tasks.INNER)
    assert 2 * (config.local_attention // 2) + 1 == tasks.WINDOW
    # Short sequences are read by all layers in the same way.
    dense = 22 * (2 * 64 * (4 * 768**2 + 3 * 768 * 1152) + 4 * 768 * 64**2)
    assert tasks.flops_of_modernbert(64, 64) == dense
    assert tasks.flops_of_modernbert(8192, 8192) > 64 * tasks.flops_of_modernbert(128, 128)


# The rules of the tasks


def test_tolerances_follow_the_roundings_of_the_format():
    assert tasks.tolerance("fp32", 6) == pytest.approx(1.65e-6, rel=0.01)
    assert tasks.tolerance("bf16", 22) == pytest.approx(0.104, rel=0.01)
    assert tasks.tolerance("int8", 6) == contest.CLOSE
    assert tasks.loss_tolerance("fp32", 6) == pytest.approx(3.6e-6, rel=0.02)
    assert tasks.loss_tolerance("bf16", 6) == pytest.approx(0.117, rel=0.02)


def test_embeddings_are_compared_with_stock_fp32():
    right = unit_rows(24)
    near, far = right + 1e-9, right + 1e-3
    workers = {
        OURS: Fake(1.0, near.tolist()),
        OTHER: Fake(0.5, far.tolist()),
        STOCK: Fake(3.0, right.tolist()),
        "OpenVINO fp32": Fake(2.0, far.tolist()),
    }
    rows = played("encode", workers, {"fastbert int8": "TypeError: quantize: got X"})
    assert list(rows) == [n for n in tasks.TASKS["encode"].engines if n in rows]
    assert rows[OURS].stock_ratio == 3.0
    assert rows[OURS].rate == 24.0
    assert rows[OURS].embedding_error == pytest.approx(1e-9)
    assert rows[OURS].same_nearest == 1.0
    assert rows[OURS].ratio == 3.0  # The faster peer was refused.
    assert "of the RMS of fp32" in rows["OpenVINO fp32"].refused
    assert rows[OTHER].embedding_error == pytest.approx(1e-3)
    assert rows[OTHER].best_ratio == 6.0
    # Stock fp32 takes turns although it is slow, because every row shows the ratio to it.
    assert rows[STOCK].samples == contest.MIN_SAMPLES
    assert rows["fastbert int8"].seconds is None
    dicts = [to_dict(row) for row in rows.values()]
    lines = list(report.contest_lines(dicts))
    (head,) = (text for text in lines if text.startswith("| shape | engine |"))
    assert "ratio to stock fp32 | peak MiB | largest error of an embedding | rank" in head
    assert "score" not in head
    assert {text.count("|") for text in lines if text.startswith("| 24 sent")} == {head.count("|")}
    assert "- fastbert int8: TypeError: quantize: got X" in lines


def test_scores_are_compared_with_stock_fp32():
    workers = {OTHER: Fake(1.0, [0.5, 0.502]), STOCK: Fake(2.0, [0.5, 0.5])}
    rows = played("rerank", workers)
    assert rows[OTHER].score_error == pytest.approx(0.002)
    assert rows[STOCK].score_error == 0.0


@pytest.mark.parametrize(
    ("name", "loss", "is_right"),
    [
        (OURS, 4.000001, True),
        (OURS, 4.00001, False),
        ("fastbert bf16 autocast", 4.05, True),
        ("fastbert bf16 autocast", 4.2, False),
    ],
)
def test_a_training_with_other_losses_is_refused(name, loss, is_right):
    workers = {name: Fake(1.0, loss), STOCK: Fake(2.0, 4.0)}
    row = played("embedder", workers)[name]
    assert row.loss_error == pytest.approx(loss - 4.0)
    assert (row.seconds is not None) == is_right
    if not is_right:
        assert "stock fp32, allowed" in row.refused
    # With dropout, the losses are random.
    with_dropout = played("embedder", workers, place=1)[name]
    assert with_dropout.loss_error is None
    assert with_dropout.seconds == 1.0


def test_calls_that_take_too_long_are_left_out_and_no_fault():
    workers = {OURS: Fake(1.0, [1.0, 2.0]), STOCK: Fake(1.0, [1.0, 2.0])}
    flops = tasks.TASKS["documents"].matches(True)[0].flops
    row = played("documents", workers, rates={OURS: 20 / flops})[OURS]
    assert row.refused == f"{LEFT_OUT}about 20 s a call, by its last shape"
    assert workers[OURS].asked == []
    assert not cpu.is_fault(row)


def test_a_missing_feature_is_no_fault():
    row = CpuRow("s", "s", "l", "encode", "int8", "inference", "fastbert int8", ours=True)
    for reason, is_fault in (
        (None, False),
        ("NotImplementedError: no kernel", False),
        ("TypeError: quantize: got SentenceTransformer, allowed: a model of fastbert", True),
        ("its result is not finite", True),
    ):
        row.refused = reason
        assert cpu.is_fault(row) is is_fault


def test_who_is_left_out_of_a_task(monkeypatch):
    stock_bf16 = runtimes.BY_NAME["transformers sdpa bf16"]
    assert "bf16 products of torch reach 20" in tasks.left_out(stock_bf16, setting("encode"))
    assert tasks.left_out(stock_bf16, setting("encode", torch_bf16=4e11)) is None
    assert tasks.left_out(runtimes.BY_NAME[OTHER], setting("encode")) is None
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    missing = tasks.left_out(runtimes.BY_NAME[OURS], setting("encode"))
    assert missing == f"{LEFT_OUT}not installed: sentence_transformers"


# Tiny runs


@pytest.mark.every_case
@pytest.mark.parametrize("section", ["encode", "rerank", "embedder", "documents"])
def test_a_task_leaves_table_json_and_plot(section, tmp_path):
    said: list[str] = []
    status = cpu.run([section], tmp_path, 1, (OURS, STOCK), quick=True, notify=said.append)
    assert status == 0, "\n".join(said)
    rows = json.loads((tmp_path / f"{section}.json").read_text("utf-8"))["rows"]
    labels = [match.label for match in tasks.TASKS[section].matches(True)]
    assert [row["label"] for row in rows] == [label for label in labels for _ in range(2)]
    assert all(row["seconds"] > 0 and row["stock_ratio"] > 0 for row in rows)
    key = {"encode": "embedding_error", "rerank": "score_error", "embedder": "loss_error"}
    errors = [row.get(key.get(section, "difference")) for row in rows if row["ours"]]
    assert errors[0] < 1e-5
    assert (tmp_path / f"{section}.png").stat().st_size > 1000
    assert f"# {section}" in (tmp_path / f"{section}.md").read_text("utf-8")


@pytest.mark.every_case
def test_a_learner_with_dropout_differs_from_one_without(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    batches = tasks.pairs_to_learn(True)[0].work["batches"]
    first = [
        float(jobs.begin("embedder", OURS, tmp_path, 1, batches=batches, dropout=on).call(0))
        for on in (False, True)
    ]
    assert abs(first[0] - first[1]) > 1e-3
