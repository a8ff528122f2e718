"""A run that is interrupted at any step and resumed has the bits of an uninterrupted run."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import shutil

import pytest
import torch
from _cut_runs import assert_same
from quick_cases import long_case
from rich.console import Console

from fastbert.io import safetensors_file
from fastbert.training import checkpoints, pretraining_run
from fastbert.training import loop as training_run
from fastbert.training.log import read_log
from fastbert.training.pretraining import pretrain

STEPS = 14
CUT = KeyboardInterrupt
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


@pytest.fixture
def settings(options):
    """Return a function that makes options: dropout, several epochs, a checkpoint every 3 steps."""

    def make(**changes):
        fields = {"steps": STEPS, "save_every": 3, "eval_every": 4, "config": DROPOUT, **changes}
        return options(**fields)

    return make


def run(options, documents):
    console = Console(file=io.StringIO(), width=500)
    result = pretrain(options, documents=documents, console=console)
    return result, console.file.getvalue()


def cut_at(monkeypatch, step):
    """Interrupt the next run at the beginning of `step`; with None, interrupt no run."""
    original = pretraining_run.PretrainingRun.train_step

    def train_step(self, batch):
        if self.step == step:
            raise CUT
        return original(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(pretraining_run.PretrainingRun, "train_step", train_step)
        yield


def cut(monkeypatch, options, documents, step):
    for _ in cut_at(monkeypatch, step):
        with pytest.raises(CUT):
            run(options, documents)


def final(options):
    """Return all tensors of the last checkpoint, and the log without times."""
    newest = checkpoints.newest(options.folder, pytest.fail)
    tensors = {
        f"{part}.{name}": tensor
        for part in ("weights", "optimizer", "processes", "average")
        if (newest.folder / f"{part}.safetensors").exists()
        for name, tensor in newest.tensors(part).items()
    }
    rows = [
        {k: v for k, v in row.items() if k != "tokens_per_second"}
        for row in read_log(options.folder / "log.jsonl")
    ]
    return tensors, rows


@pytest.fixture
def corpus(documents):
    # The corpus is so small that some epochs end within the run.
    return documents[:24]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tmp_path_factory.mktemp("seven")


@pytest.fixture
def seven(made, settings, corpus, monkeypatch, tmp_path):
    """Return options of a run of 7 steps interrupted after step 6, and of an uninterrupted run."""
    if not (made / "whole").exists():
        cut(monkeypatch, settings(steps=7, output=made / "cut"), corpus, 6)
        run(settings(steps=7, output=made / "whole"), corpus)
    shutil.copytree(made / "cut", tmp_path / "out")
    return settings(steps=7), settings(steps=7, output=made / "whole")


# With these options, a checkpoint must contain additional state.
RICH = {"optimizer": "lamb", "schedule": "cosine", "accumulate": 2, "ema": 0.95}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        long_case({}, 5, id="fp32"),
        long_case({"precision": "bf16"}, 3, id="bf16"),
        pytest.param({**RICH, "save_every": 2, "steps": 10}, 2, id="lamb-cosine-accumulate-ema"),
    ],
)
def test_cuts_anywhere_change_no_bit(settings, corpus, monkeypatch, tmp_path, changes, parts):
    whole = settings(output=tmp_path / "whole", **changes)
    assert run(whole, corpus)[0].epochs > 1
    expected = final(whole)
    assert any(name.startswith("average.") for name in expected[0]) == ("ema" in changes)
    draw = random.Random(str(changes))
    for number in range(parts):
        options = settings(output=tmp_path / f"cut{number}", **changes)
        steps = sorted(draw.sample(range(1, whole.steps), 2))
        for step in steps:
            # A resumed run may have another number of processes that prepare batches.
            changed = settings(output=options.output, workers=int(number == 0), **changes)
            cut(monkeypatch, changed, corpus, step)
        result, text = run(options, corpus)
        assert result.steps == whole.steps
        last = steps[-1] // whole.save_every * whole.save_every
        if last:
            assert f"resumed after step {last} of {whole.steps}, from {options.folder}" in text
        assert_same(final(options), expected)
        weights = safetensors_file.read(options.folder / "model" / "model.safetensors")
        given = safetensors_file.read(whole.folder / "model" / "model.safetensors")
        assert all(torch.equal(weights[name], given[name]) for name in given)


def test_a_finished_run_stays_as_it_is(settings, corpus):
    options = settings()
    first, _ = run(options, corpus)
    expected = final(options)
    again, text = run(settings(workers=1), corpus)
    assert f"resumed after step {STEPS} of {STEPS}" in text
    assert_same(final(options), expected)
    assert (again.steps, again.tokens, again.seconds) == (STEPS, first.tokens, first.seconds)
    assert again.evaluation == first.evaluation


@pytest.mark.parametrize("ending", [KeyboardInterrupt, OSError])
def test_a_run_that_ends_between_its_last_checkpoint_and_its_model_is_completed(
    settings, corpus, monkeypatch, tmp_path, ending
):
    whole, options = settings(output=tmp_path / "whole", ema=0.9), settings(ema=0.9)
    run(whole, corpus)
    write = training_run.save_checkpoint

    def end(folder, model, tokenizer):
        if (folder.parent / "checkpoints" / f"step-{STEPS:08d}").exists():
            raise ending("no space")
        write(folder, model, tokenizer)

    with monkeypatch.context() as patch:
        patch.setattr(training_run, "save_checkpoint", end)
        with pytest.raises(ending) as failure:
            run(options, corpus)
    if ending is OSError:
        told = "the model: no space; kept: log.jsonl, curves.png, the checkpoint of step 14"
        assert str(failure.value).endswith(told)
    names = ("model/model.safetensors", "model/config.json", "model/tokenizer.json")
    assert (options.folder / names[0]).read_bytes() != (whole.folder / names[0]).read_bytes()
    (options.folder / "model" / "notes.txt").write_text("mine")
    assert "resumed after step 14 of 14" in run(options, corpus)[1]
    for name in names:
        assert (options.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    # A resumed run does not write a model that is already complete.
    (options.folder / "model" / "notes.txt").write_text("mine")
    run(options, corpus)
    assert (options.folder / "model" / "notes.txt").exists()


def test_overwrite_starts_anew(settings, corpus, monkeypatch):
    run(settings(seed=5), corpus)
    options = settings(overwrite=True)
    cut(monkeypatch, options, corpus, 1)
    # The interrupted run wrote no checkpoint, and deleted the checkpoints of the earlier run.
    assert not checkpoints.exists(options.folder)
    run(options, corpus)
    rows = read_log(options.folder / "log.jsonl")
    assert [row["step"] for row in rows if row["event"] == "train"] == list(range(2, STEPS + 1, 2))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"steps": 15}, "steps"),
        ({"learning_rate": 1e-3}, "learning_rate"),
        ({"config": {**DROPOUT, "hidden_size": 48}}, "config"),
        ({"backend": "reference"}, "backend"),
        ({"accumulate": 2}, "processes × accumulate"),
        ({"optimizer": "lamb"}, "optimizer"),
        ({"ema": 0.9}, "ema"),
    ],
)
def test_other_options_are_refused_by_name(settings, corpus, changes, name):
    run(settings(steps=3), corpus)
    expected = final(settings())
    with pytest.raises(ValueError, match=rf"^{name}: got .*, but the run in .* has .*; allowed:"):
        run(settings(**{"steps": 3, **changes}), corpus)
    assert_same(final(settings()), expected)


def test_another_text_is_refused(settings, corpus):
    run(settings(steps=3), corpus)
    with pytest.raises(ValueError, match="text of the corpus, by its SHA-256: got"):
        run(settings(steps=3), [*corpus[:-1], ["Another sentence."]])


def damage(path):
    """Change one bit in the middle of the file `path`."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "weights.safetensors", "optimizer.safetensors", "processes.safetensors", "state.json",
        "tokenizer.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", [damage, lambda path: path.unlink()])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(seven, corpus, name, how):
    options, whole = seven
    assert sorted(path.name for path in (options.folder / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000006",
    ]
    broken = checkpoints.folder_of(options.folder, 6) / name
    how(broken)
    _, text = run(options, corpus)
    assert "damaged checkpoint, an earlier one is tried: " in text
    assert str(broken) in text
    assert f"resumed after step 3 of 7, from {checkpoints.folder_of(options.folder, 3)}" in text
    assert_same(final(options), final(whole))


def test_a_damaged_checkpoint_is_none_of_those_that_are_kept(seven, corpus, monkeypatch):
    options, _ = seven
    damage(checkpoints.folder_of(options.folder, 6) / "weights.safetensors")
    # The run continues after step 3, saves after step 4, and is interrupted again.
    minutes = dataclasses.replace(options, save_every=2, keep_checkpoints=1)
    cut(monkeypatch, minutes, corpus, 5)
    kept = [path.name for path in (options.folder / "checkpoints").iterdir()]
    assert kept == ["step-00000004"]
    assert "resumed after step 4 of 7" in run(minutes, corpus)[1]


def test_without_a_sound_checkpoint_nothing_is_overwritten(settings, corpus):
    options = settings(steps=3, keep_checkpoints=1)
    run(options, corpus)
    damage(checkpoints.folder_of(options.folder, 3) / "weights.safetensors")
    before = {p: p.read_bytes() for p in options.folder.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=r"all checkpoints of .* are damaged, allowed"):
        run(options, corpus)
    assert {p: p.read_bytes() for p in options.folder.rglob("*") if p.is_file()} == before


def test_only_the_last_checkpoints_stay(settings, corpus):
    options = settings(steps=9, save_every=2, keep_checkpoints=3)
    run(options, corpus)
    kept = sorted(path.name for path in (options.folder / "checkpoints").iterdir())
    assert kept == ["step-00000006", "step-00000008", "step-00000009"]


def test_a_last_line_of_the_log_that_is_cut_off_is_written_again(seven, corpus):
    options, whole = seven
    with open(options.folder / "log.jsonl", "a", encoding="utf-8") as log:
        log.write('{"event": "train", "st')
    run(options, corpus)
    assert_same(final(options), final(whole))


@pytest.mark.parametrize("line", [b"\x00" * 40, b"[1, 2]", b'{"event": "train"}', b"\xff", b""])
def test_a_damaged_line_of_the_log_is_named_and_nothing_is_lost(seven, corpus, line):
    options, whole = seven
    log = options.folder / "log.jsonl"
    lines = log.read_bytes().split(b"\n")
    log.write_bytes(b"\n".join([lines[0], line, *lines[1:]]))
    before = {p: p.read_bytes() for p in options.folder.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=rf"^{log}, line 2: got b.*, allowed: a row of the log"):
        run(options, corpus)
    assert {p: p.read_bytes() for p in options.folder.rglob("*") if p.is_file()} == before
    log.write_bytes(b"\n".join(lines))
    run(options, corpus)
    assert_same(final(options), final(whole))


def test_a_checkpoint_of_another_layout_is_refused(settings, corpus, monkeypatch):
    options = settings(steps=3, keep_checkpoints=1)
    monkeypatch.setattr(checkpoints, "LAYOUT", 0)
    run(options, corpus)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"checkpoint"):
        run(options, corpus)


def test_a_model_without_a_checkpoint_is_not_overwritten(settings, corpus):
    options = settings(steps=3)
    run(options, corpus)
    shutil.rmtree(options.folder / "checkpoints")
    with pytest.raises(ValueError, match="holds a model already, and no checkpoint to resume"):
        run(options, corpus)
    run(settings(steps=3, overwrite=True), corpus)


def test_a_gradient_that_is_not_finite_changes_no_weight(settings, corpus, monkeypatch):
    options = settings(save_every=2)
    original = pretraining_run.PretrainingRun.update

    def update(self, batch):
        if self.step == 4:
            # Infinite logits make the loss infinite.
            with torch.no_grad():
                self.model.get_parameter("cls.seq_relationship.bias").fill_(float("inf"))
        try:
            return original(self, batch)
        finally:
            if self.step == 4:
                weights.update(checkpoints.weights_of(self.model))

    weights: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(pretraining_run.PretrainingRun, "update", update)
    with pytest.raises(RuntimeError, match=r"batch \d+ of epoch \d+ is not finite at step 5: tr"):
        run(options, corpus)
    newest = checkpoints.newest(options.folder, pytest.fail)
    assert newest.content["step"] == 4
    for name, tensor in newest.tensors("weights").items():
        if name != "cls.seq_relationship.bias":
            assert torch.equal(weights[name], tensor), name
    content = json.loads((newest.folder / "state.json").read_text(encoding="utf-8"))
    assert content["position"] == 4 or content["epoch"] > 0


def test_a_checkpoint_of_an_earlier_release_is_continued(seven, corpus):
    options, whole = seven
    path = checkpoints.folder_of(options.folder, 6) / "state.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for name in ("task", "flops", "accumulate", "checksum"):
        del content[name]
    for name in ("optimizer", "schedule", "ema"):
        del content["options"][name]
    path.write_text(json.dumps({**content, "checksum": checkpoints._checksum_of(content)}))
    _, text = run(options, corpus)
    assert "resumed after step 6 of 7" in text
    assert_same(final(options), final(whole))


def test_checkpoints_are_written_by_time(settings, corpus, monkeypatch):
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr(training_run.time, "monotonic", lambda: next(clock))
    options = settings(save_every=None, save_minutes=1, keep_checkpoints=20, workers=0, steps=9)
    run(options, corpus)
    kept = sorted(int(p.name[5:]) for p in (options.folder / "checkpoints").iterdir())
    # The clock advances by 25 s when a step or a finished save reads it, so every third step saves.
    assert kept == [3, 6, 9]


def test_an_infinite_gradient_names_all_batches_of_its_step(settings, corpus, monkeypatch):
    original = pretraining_run.PretrainingRun.update

    def update(self, batch):
        if self.step == 1:
            with torch.no_grad():
                self.model.get_parameter("cls.seq_relationship.bias").fill_(float("inf"))
        return original(self, batch)

    monkeypatch.setattr(pretraining_run.PretrainingRun, "update", update)
    with pytest.raises(RuntimeError, match="batches 2 to 3 of epoch 0 is not finite at step 2: tr"):
        run(settings(accumulate=2, optimizer="lamb"), corpus)
