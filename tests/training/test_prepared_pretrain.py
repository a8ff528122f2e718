"""Pre-training on a prepared corpus works with all objectives, in phases, and when resumed."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from fastbert.io import safetensors_file
from fastbert.jobs import prepare
from fastbert.modules import BertForMaskedLM
from fastbert.training import checkpoints, pretraining
from fastbert.training.log import read_log
from fastbert.training.pretraining_run import PretrainingRun

CUT = KeyboardInterrupt


@pytest.fixture(scope="session")
def folder(documents, tmp_path_factory):
    home = tmp_path_factory.mktemp("corpus")
    text = "".join(json.dumps({"text": " ".join(d)}) + "\n" for d in documents)
    (home / "a.jsonl").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "PIECE_BYTES", 9000)
        options = prepare.PrepareOptions(
            home / "a.jsonl", home / "prepared", vocab_size=300, workers=1
        )
        assert prepare.prepare(options)["shards"] > 2
    return home / "prepared"


@pytest.fixture
def settings(options, folder):
    def make(**changes):
        return options(corpus=folder, **changes)

    return make


def run(options):
    console = Console(file=io.StringIO(), width=500)
    return pretraining.pretrain(options, console=console), console.file.getvalue()


def cut(monkeypatch, options, step):
    original = PretrainingRun.train_step

    def train_step(self, batch):
        if self.step == step:
            raise CUT
        return original(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(PretrainingRun, "train_step", train_step)
        with pytest.raises(CUT):
            run(options)


def weights(options):
    newest = checkpoints.newest(options.folder, pytest.fail)
    return {f"{p}.{n}": t for p in ("weights", "processes") for n, t in newest.tensors(p).items()}


def watch_batches(monkeypatch):
    """Return a list that collects the epoch and the longest sequence of each step of each run."""
    seen = []
    original = PretrainingRun.train_step

    def train_step(self, batch):
        seen.append((self.epoch, max(part["max_seqlen"] for part in batch)))
        return original(self, batch)

    monkeypatch.setattr(PretrainingRun, "train_step", train_step)
    return seen


def test_a_prepared_corpus_trains_with_its_own_tokenizer(settings, folder):
    result, text = run(settings(steps=6))
    assert "48 documents to train on, 12 held out" in text
    tokenizer = result.checkpoint / "tokenizer.json"
    assert tokenizer.read_text(encoding="utf-8") == (
        folder / "tokenizer" / "tokenizer.json"
    ).read_text(encoding="utf-8")
    assert result.evaluation.keys() >= {"mlm_loss", "nsp_accuracy"}


def test_sentence_order_is_learnt_by_the_head_of_pairs(settings):
    result, _ = run(settings(steps=3, objective="sop"))
    assert result.evaluation["nsp_loss"] > 0


def test_without_pairs_a_masked_lm_is_trained(settings):
    result, text = run(settings(steps=4, objective="none", tokens_per_batch=192))
    assert "nsp" not in text
    (rows, evaluation) = (
        [r for r in read_log(result.log) if r["event"] == e] for e in ("train", "evaluation")
    )
    assert rows
    assert all(row["loss"] == row["mlm_loss"] for row in rows)
    assert not any(name.startswith("nsp") for row in [*rows, *evaluation] for name in row)
    model = BertForMaskedLM.from_pretrained(result.checkpoint)
    assert not [name for name, _ in model.named_parameters() if "pooler" in name]
    names = safetensors_file.read(result.checkpoint / "model.safetensors").keys()
    assert not any("pooler" in name or "seq_relationship" in name for name in names)


@pytest.mark.parametrize(
    ("changes", "cuts"), [({}, [3]), ({"short_steps": 0.5, "short_length": 24}, [4, 5])]
)
def test_cuts_anywhere_change_no_bit(settings, monkeypatch, tmp_path, changes, cuts):
    steps = {"steps": 8, "save_every": 1, "whole_word": True, **changes}
    whole = settings(output=tmp_path / "whole", **steps)
    run(whole)
    expected = weights(whole)
    for step in cuts:
        options = settings(output=tmp_path / str(step), **steps)
        # A resumed run may have another number of processes that prepare batches.
        changed = settings(output=options.output, workers=int(step == 3), **steps)
        cut(monkeypatch, changed, step)
        _, text = run(options)
        assert f"resumed after step {step} of 8" in text
        actual = weights(options)
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_the_first_steps_have_short_examples(settings, monkeypatch):
    seen = watch_batches(monkeypatch)
    run(settings(steps=10, short_steps=0.6, short_length=20))
    lengths = [length for _, length in seen]
    assert max(lengths[:6]) <= 20
    assert min(lengths[6:]) > 20
    # The second phase begins with the first batch of a new epoch.
    assert seen[6][0] == seen[5][0] + 1


def test_text_has_short_steps_too(options, documents, monkeypatch):
    seen = watch_batches(monkeypatch)
    settings = options(steps=4, short_steps=0.5, short_length=20)
    pretraining.pretrain(settings, documents=documents, console=Console(file=io.StringIO()))
    assert [length <= 20 for _, length in seen] == [True, True, False, False]


def test_an_epoch_of_steps_takes_every_example_once(settings, monkeypatch):
    taken = []
    original = PretrainingRun.train_step

    def train_step(self, batch):
        taken.extend(len(part["cu_seqlens"]) - 1 for part in batch)
        return original(self, batch)

    monkeypatch.setattr(PretrainingRun, "train_step", train_step)
    result, _ = run(settings(steps=None, epochs=1, accumulate=3, held_out=0.0))
    assert len(taken) == 3 * result.steps
    # All steps together have as many examples as one epoch of the corpus.
    options = settings(held_out=0.0)
    corpus = pretraining.gather_documents(options, None)
    prepared = pretraining.prepare(options, corpus, lambda line: None)
    assert sum(taken) == len(prepared.train.examples.epoch(0))


@pytest.mark.parametrize("part", ["tokens", "sentences", "documents"])
def test_a_flipped_bit_is_named_before_anything_is_written(settings, folder, tmp_path, part):
    copy = shutil.copytree(folder, tmp_path / "copy")
    options = dataclasses.replace(settings(steps=2), corpus=copy)
    _, text = run(options)
    assert re.search(r"\d+ shards of [\d.]+ MB verified in [\d.]+ s", text)
    path = copy / "shards" / f"00001.{part}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)
    for changes in ({}, {"output": tmp_path / "new"}):
        with pytest.raises(ValueError, match=rf"^{path}: its SHA-256 is not the one in the mani"):
            run(dataclasses.replace(options, **changes))
    assert not (tmp_path / "new").exists()


def test_another_corpus_is_refused(settings, folder, tmp_path, documents):
    run(settings(steps=2))
    (tmp_path / "b.txt").write_text("\n\n".join("\n".join(d) for d in documents[:40]))
    other = prepare.PrepareOptions(tmp_path / "b.txt", tmp_path / "b", vocab_size=300, workers=1)
    prepare.prepare(other)
    with pytest.raises(ValueError, match="text of the corpus, by its SHA-256: got"):
        run(dataclasses.replace(settings(steps=2), corpus=tmp_path / "b"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "clm"}, "objective: got 'clm', allowed: nsp, sop, none"),
        ({"short_steps": 1.0}, r"short_steps: got 1.0, allowed: a number in \[0, 1\)"),
        ({"short_steps": 0.5}, "short_length: got 128, allowed: an integer from 8 to max_length"),
        ({"short_steps": 0.5, "short_length": 7}, "short_length: got 7"),
        ({"tokenizer": "x"}, "tokenizer: got 'x' with a prepared corpus, allowed: None"),
        ({"held_out": 0.99}, "held_out: got 0.99 of 60 documents"),
    ],
)
def test_bad_options_write_nothing(settings, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(settings(**changes))
    assert not (tmp_path / "out").exists()


def test_other_objectives_need_a_prepared_corpus(options, documents):
    with pytest.raises(ValueError, match="objective: got 'sop' with text, allowed: nsp, or a corp"):
        pretraining.pretrain(options(objective="sop"), documents=documents)


SCRIPT = """
import sys
import torch
from fastbert.training import PretrainOptions, pretrain

torch.set_num_threads(1)
pretrain(PretrainOptions(
    output=sys.argv[2], corpus=sys.argv[1], preset="tiny", max_length=48, tokens_per_batch=384,
    config={"hidden_size": 32, "intermediate_size": 64}, epochs=1, log_every=1, held_out=0.2,
    objective="none",
))
"""


@pytest.mark.every_case
def test_two_processes_share_one_epoch(settings, folder, tmp_path):
    """Two processes take as many tokens together as one process, in half as many steps."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [*("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"), script]
    done = subprocess.run(
        [sys.executable, *command, folder, tmp_path / "two"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    alone, _ = run(settings(steps=None, epochs=1, objective="none", log_every=1))
    content = checkpoints.newest(tmp_path / "two", pytest.fail).content
    assert content["tokens"] == alone.tokens
    assert content["step"] == -(-alone.steps // 2)
