"""A save is one commit: after a kill at any call, the folder has one whole model, old or new."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from killing import child, end_of, killed_at_every_call
from quick_cases import long_case

from fastbert import modules
from fastbert.config import BertConfig
from fastbert.data import WordPieceTokenizer, stories, train_tokenizer
from fastbert.io import checkpoint, commit
from fastbert.training.model_folder import save_checkpoint

CONFIG = BertConfig(
    vocab_size=101,
    hidden_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=36,
    max_position_embeddings=16,
)


@pytest.fixture(scope="module")
def models() -> tuple[modules.BertModel, modules.BertModel]:
    torch.manual_seed(0)
    return modules.BertModel(CONFIG), modules.BertModel(CONFIG.replace(num_hidden_layers=2))


@pytest.fixture
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip flushes to the disk, because a killed process loses no bytes that it has written."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def which(folder: Path, models: tuple[modules.BertModel, ...]) -> int:
    """Return the index of the model in the folder; a mixture of models fails the test."""
    loaded = modules.BertModel.from_pretrained(folder)
    numbers = [n for n, model in enumerate(models) if model.config == loaded.config]
    assert len(numbers) == 1
    expected = models[numbers[0]].state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    return numbers[0]


def assert_visible_files_are_of_one_model(
    folder: Path, models: tuple[modules.BertModel, ...]
) -> None:
    """Check that a reader that ignores commits sees one whole model, or misses a file."""
    if not all((folder / name).exists() for name in (checkpoint.CONFIG, checkpoint.WEIGHTS)):
        return
    layers = json.loads((folder / checkpoint.CONFIG).read_text(encoding="utf-8"))[
        "num_hidden_layers"
    ]
    stored = safetensors.torch.load_file(folder / checkpoint.WEIGHTS)
    expected = models[layers - 1].state_dict()
    assert stored.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored.items())


def visible(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_save_killed_at_any_call_leaves_one_of_the_two_models(models, no_flush, tmp_path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    (folder / "1_Pooling").mkdir()
    models[0].save_pretrained(folder)
    results = []
    for _ in killed_at_every_call(lambda: models[1].save_pretrained(folder)):
        assert_visible_files_are_of_one_model(folder, models)
        results.append(which(folder, models))
        models[0].save_pretrained(folder)
        names = {path.name for path in folder.iterdir()}
        assert names == {"README.md", "1_Pooling", checkpoint.CONFIG, checkpoint.WEIGHTS}
    assert which(folder, models) == 1
    assert results == sorted(results), "once committed, a save stays committed"
    assert set(results) == {0, 1}
    assert (folder / "README.md").read_text(encoding="utf-8") == "mine"


def test_a_first_save_killed_at_any_call_leaves_a_whole_model_or_no_folder(
    models, no_flush, tmp_path
) -> None:
    folder = tmp_path / "new" / "model"
    for _ in killed_at_every_call(lambda: models[1].save_pretrained(folder)):
        if folder.exists():
            assert which(folder, models) == 1
            shutil.rmtree(folder)
    assert which(folder, models) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.every_case
def test_a_reader_killed_while_it_finishes_a_dead_writers_commit(
    models, no_flush, tmp_path
) -> None:
    folder, state, tried = tmp_path / "model", tmp_path / "state", 0
    states = set()
    models[0].save_pretrained(folder)
    for _ in killed_at_every_call(lambda: models[1].save_pretrained(folder)):
        files = frozenset(str(path.relative_to(folder)) for path in folder.rglob("*"))
        if (folder / commit.COMMITTED).exists() and files not in states:
            states.add(files)
            shutil.copytree(folder, state, symlinks=True)
            for _ in killed_at_every_call(lambda: modules.BertModel.from_pretrained(folder)):
                assert_visible_files_are_of_one_model(folder, models)
                assert which(folder, models) == 1
                shutil.rmtree(folder)
                shutil.copytree(state, folder, symlinks=True)
                tried += 1
            shutil.rmtree(state)
        models[0].save_pretrained(folder)
    assert len(states) == 5
    assert tried > 50


@pytest.mark.every_case
@pytest.mark.parametrize("place", ["folder", "link"])
def test_saves_killed_at_random_moments_leave_one_of_the_two_models(
    models, tmp_path, place
) -> None:
    folder = tmp_path / place
    if place == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to("elsewhere")
    started = time.perf_counter()
    for model in models:
        model.save_pretrained(folder)
    twice = time.perf_counter() - started

    def save_for_ever() -> None:
        while True:
            for model in models:
                model.save_pretrained(folder)

    # Every child first saves the first model. The time before a kill grows, because a child may
    # start too late to reach the second model.
    generator, result, kills = random.Random(0), set(), 0
    while kills < 25 or (kills < 150 and len(result) < 2):
        kills += 1
        number = child(save_for_ever)
        time.sleep(generator.uniform(0.0, 2 * twice * (1 + kills / 10)))
        os.kill(number, signal.SIGKILL)
        assert end_of(number) == -signal.SIGKILL
        assert_visible_files_are_of_one_model(folder, models)
        result.add(which(folder, models))
    assert result == {0, 1}
    models[0].save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == {checkpoint.CONFIG, checkpoint.WEIGHTS}
    assert folder.is_symlink() == (place == "link")


def test_a_reader_beside_a_living_writer_reads_one_of_the_two_models(models, tmp_path) -> None:
    models[0].save_pretrained(tmp_path)

    def save_for_ever() -> None:
        while True:
            for model in models:
                model.save_pretrained(tmp_path)
                time.sleep(0.002)

    number = child(save_for_ever)
    try:
        results = {which(tmp_path, models) for _ in range(60)}
    finally:
        os.kill(number, signal.SIGKILL)
        end_of(number)
    assert results == {0, 1}


def test_two_writers_into_one_folder_leave_one_of_the_two_models(models, tmp_path) -> None:
    def save_often(model: modules.BertModel) -> None:
        for _ in range(20):
            model.save_pretrained(tmp_path / "model")

    numbers = [child(lambda m=model: save_often(m)) for model in models]
    assert [end_of(number) for number in numbers] == [0, 0]
    which(tmp_path / "model", models)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert len(list((tmp_path / "model").iterdir())) == 2


@pytest.mark.every_case
@pytest.mark.parametrize("stride", [3, long_case(1)])
def test_a_checkpoint_of_a_run_killed_at_any_call_has_its_own_tokenizer(
    no_flush, tmp_path, stride
) -> None:
    """Weights, configuration and the tokenizer's four files are saved in one commit."""
    torch.manual_seed(1)
    folder, sides = tmp_path / "model", []
    for size in (100, 120):
        tokenizer = train_tokenizer(stories(20, 0), size)
        config = CONFIG.replace(vocab_size=tokenizer.vocab_size, num_hidden_layers=size // 60)
        sides.append((modules.BertForPreTraining(config), tokenizer))
    files = []
    for side in reversed(sides):
        save_checkpoint(folder, *side)
        files.append(visible(folder))
    new, old = files
    results = []
    for _ in killed_at_every_call(lambda: save_checkpoint(folder, *sides[1]), stride):
        # A reader that ignores commits finds files of only one of the two checkpoints.
        seen = visible(folder)
        assert seen.items() <= old.items() or seen.items() <= new.items()
        model = modules.BertForPreTraining.from_pretrained(folder)
        assert model.config.vocab_size == WordPieceTokenizer.load(folder).vocab_size
        results.append(visible(folder) == new)
        assert results[-1] or visible(folder) == old
        save_checkpoint(folder, *sides[0])
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert visible(folder) == old
        assert len(list(folder.iterdir())) == len(old)
    assert set(results) == {False, True}
    assert visible(folder) == new


def test_everything_is_flushed_before_the_commit_and_the_commit_before_the_moves(
    models, tmp_path, monkeypatch
) -> None:
    models[0].save_pretrained(tmp_path / "model")
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def name_of(path: object) -> str:
        staged = re.sub(r"\.fastbert-staged-\w+", "STAGED", os.fspath(path))
        return staged.replace(f"{tmp_path}/", "")

    def flush(handle: int) -> None:
        events.append(f"flush {name_of(os.readlink(f'/proc/self/fd/{handle}'))}")
        fsync(handle)

    def move(source: object, target: object) -> None:
        events.append(f"{name_of(source)} -> {name_of(target)}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", move)
    models[1].save_pretrained(tmp_path / "model")
    assert sorted(events[:2]) == [
        "flush model/STAGED/new/config.json",
        "flush model/STAGED/new/model.safetensors",
    ]
    done = "model/.fastbert-committed"
    assert events[2:] == [
        "flush model/STAGED/new",
        "flush model/STAGED",
        f"model/STAGED -> {done}",
        "flush model",
        f"model/config.json -> {done}/old/config.json",
        f"model/model.safetensors -> {done}/old/model.safetensors",
        "flush model",
        f"{done}/new/model.safetensors -> model/model.safetensors",
        f"{done}/new/config.json -> model/config.json",
        "flush model",
        f"{done} -> model/STAGED",
    ]
    events.clear()
    models[1].save_pretrained(tmp_path / "new")
    assert events[2:] == [
        "flush STAGED/new",
        "flush STAGED",
        "STAGED/new -> new",
        f"flush {tmp_path}",
    ]


@pytest.mark.parametrize("failing", [checkpoint.CONFIG, checkpoint.WEIGHTS])
def test_an_old_file_that_cannot_be_moved_leaves_the_old_model(
    models, tmp_path, monkeypatch, failing
) -> None:
    models[0].save_pretrained(tmp_path)
    rename = os.rename

    def refuse(source: object, target: object) -> None:
        if source == tmp_path / failing:
            raise PermissionError(1, "Operation not permitted", os.fspath(source))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(PermissionError, match=failing):
            models[1].save_pretrained(tmp_path)
    assert which(tmp_path, models) == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_in_the_place_of_a_file_is_named(models, tmp_path) -> None:
    models[0].save_pretrained(tmp_path)
    (tmp_path / checkpoint.WEIGHTS).unlink()
    (tmp_path / checkpoint.WEIGHTS).mkdir()
    with pytest.raises(IsADirectoryError, match=checkpoint.WEIGHTS):
        models[1].save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        checkpoint.CONFIG,
        checkpoint.WEIGHTS,
    ]


def test_files_of_a_living_writer_are_left_alone_and_a_dead_ones_are_deleted(
    models, tmp_path
) -> None:
    models[0].save_pretrained(tmp_path / "model")
    with commit.replacement(tmp_path / "model") as new:
        (new / checkpoint.CONFIG).write_text("half of")
        models[1].save_pretrained(tmp_path / "model")
        assert (new / checkpoint.CONFIG).read_text(encoding="utf-8") == "half of"
        assert which(tmp_path / "model", models) == 1
        shutil.copytree(new.parent, tmp_path / "model" / f"{commit.STAGED}dead")
        models[0].save_pretrained(tmp_path / "model")
        names = {path.name for path in (tmp_path / "model").iterdir()}
        assert names == {checkpoint.CONFIG, checkpoint.WEIGHTS, new.parent.name}
        models[1].save_pretrained(new)
    assert which(tmp_path / "model", models) == 1
    assert len(list((tmp_path / "model").iterdir())) == 2


def test_a_commit_that_cannot_be_finished_is_a_clear_error(models, tmp_path, monkeypatch) -> None:
    models[0].save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        # The save ends as if the process were killed before the save moves the files.
        patch.setattr(commit, "_move_in", lambda folder, left: None)
        models[1].save_pretrained(tmp_path)

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", read_only)
        with pytest.raises(OSError, match=r"a save was stopped after its commit, and .*Read-only"):
            modules.BertModel.from_pretrained(tmp_path)
    with (tmp_path / commit.COMMITTED / commit.LOCK).open("r+") as lock, monkeypatch.context() as p:
        fcntl.flock(lock, fcntl.LOCK_EX)
        p.setattr(commit, "PATIENCE", 0.1)
        with pytest.raises(OSError, match="another process has been saving into this folder for"):
            modules.BertModel.from_pretrained(tmp_path)
    assert which(tmp_path, models) == 1


def test_without_locks_a_save_works_and_nothing_is_taken_for_a_dead_writers(
    models, tmp_path, monkeypatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    left = tmp_path / f"{commit.STAGED}unknown"
    left.mkdir()
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path)
        assert which(tmp_path, models) == number
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {checkpoint.CONFIG, checkpoint.WEIGHTS, left.name}
