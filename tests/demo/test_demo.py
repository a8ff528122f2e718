"""The demo in miniature: every phase runs, and the report has the results and the targets."""

import io
import json
from functools import partial

import pytest
import torch
from rich.console import Console

from fastbert.bench.encoder import EncoderShape
from fastbert.config import BertConfig
from fastbert.demo import demo
from fastbert.demo.demo import DemoSize, run_demo
from fastbert.demo.report import TITLE
from fastbert.jobs.fill_mask import predict

MINIATURE = DemoSize(
    documents=60,
    training={
        "preset": "tiny",
        "config": {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 64},
        "vocab_size": 300,
        "max_length": 48,
        "tokens_per_batch": 384,
        "steps": 4,
        "held_out": 0.2,
        "log_every": 2,
    },
    speed=(EncoderShape("small", BertConfig.preset("tiny", vocab_size=99), (16, 8)),),
    speed_seconds=0.2,
    speed_dtypes=(torch.float32,),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    torch.set_num_threads(1)
    console = Console(file=io.StringIO(), width=200)
    folder = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        # Other tests cover all operations of the tables; one is enough to show that tables are
        # made.
        patch.setattr(demo.parity, "check", partial(demo.parity.check, "linear_gelu"))
        patch.setattr(demo, "check_model", lambda: ())
        report = run_demo(folder, seed=1, size=MINIATURE, console=console)
    return report, console.file.getvalue()


def test_every_phase_is_announced(finished):
    report, text = finished
    assert len(report.seconds) == 6
    for number, name in enumerate(report.seconds, start=1):
        assert f"{number}/6 {name}" in text


def test_the_guesses_are_the_candidates_of_fill_mask(finished):
    report, _ = finished
    assert report.examples
    for example in report.examples:
        (mask,) = predict(str(report.training.checkpoint), example.text, top_k=3, backend=None)
        assert example.guesses == [candidate["token"] for candidate in mask["candidates"]]


def test_four_steps_are_too_few_and_the_demo_says_so(finished):
    passed = {target.name: target.passed for target in finished[0].targets}
    assert passed.pop("held-out masked-LM accuracy") is False
    assert passed.pop("held-out next-sentence accuracy") is False
    assert len(passed) == 3
    assert all(passed.values()), passed
    assert not finished[0].passed
    assert "**missed**" in finished[0].report.read_text(encoding="utf-8")


def test_the_reopened_checkpoint_is_judged_by_the_rule(finished):
    reopened = finished[0].reopened
    assert reopened.same_ids
    assert {"masked-LM logits", "next-sentence logits", "hidden state 2"} <= {
        tensor.name for tensor in reopened.tensors
    }
    assert all(tensor.passed for tensor in reopened.tensors)


def test_the_folder_holds_report_plots_log_and_model(finished):
    report = finished[0]
    names = {path.name for path in report.folder.iterdir()}
    assert names == {
        "report.md", "report.json", "checkpoints", "curves.png", "speed.png", "log.jsonl", "model",
    }  # fmt: skip
    text = report.report.read_text(encoding="utf-8")
    assert text.startswith(TITLE)
    for heading in ("Targets", "Pre-training", "The checkpoint in transformers", "Parity", "Speed"):
        assert f"## {heading}" in text
    content = json.loads((report.folder / "report.json").read_text(encoding="utf-8"))
    assert content["passed"] is False
    assert content["training"]["steps"] == 4


def test_a_second_demo_replaces_the_first_but_no_other_checkpoint(finished, tmp_path):
    demo._refuse_foreign(finished[0].folder)
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="holds a checkpoint that no demo wrote"):
        run_demo(tmp_path, size=MINIATURE)


def test_the_users_corpus_has_no_accuracy_targets(tmp_path, monkeypatch):
    # The phases after the training do not depend on the corpus.
    monkeypatch.setattr(demo, "_measure", lambda size, phase: ([], []))
    monkeypatch.setattr(demo, "_look", lambda *arguments: ([], None))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(
        "\n\n".join("The sea was calm. Anna rowed home. It was late." for _ in "12345678")
    )
    console = Console(quiet=True)
    report = run_demo(tmp_path / "out", corpus=corpus, size=MINIATURE, console=console)
    assert [target.name for target in report.targets] == [
        "parity of every operation, and of a training step",
        "every backend's encoder is exact enough to be timed",
    ]
    assert report.corpus == str(corpus)


def test_a_demo_that_was_stopped_begins_again_in_the_same_folder(tmp_path, monkeypatch):
    def stopped(options, **_):
        (options.folder / "model").mkdir(parents=True)
        raise SystemExit(143)

    monkeypatch.setattr(demo, "pretrain", stopped)
    with pytest.raises(SystemExit):
        run_demo(tmp_path / "out", size=MINIATURE, console=Console(quiet=True))
    demo._refuse_foreign(tmp_path / "out")
    assert "has not finished" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_a_demo_that_cannot_train_leaves_nothing(tmp_path, monkeypatch):
    def refused(options, **_):
        raise ValueError("corpus: unusable")

    monkeypatch.setattr(demo, "pretrain", refused)
    with pytest.raises(ValueError, match="corpus: unusable"):
        run_demo(tmp_path / "out", size=MINIATURE, console=Console(quiet=True))
    assert not (tmp_path / "out").exists()
