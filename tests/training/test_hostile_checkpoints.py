"""Wrong content of a checkpoint with right checksums raises an error that names the file."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fastbert.io import safetensors_file
from fastbert.training import checkpoints
from fastbert.training.pretraining import pretrain


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return an empty folder for the output of this file's only run."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def cut_run(options, documents, trained):
    """Return the options of a run of 4 steps, and the folder of its checkpoint after step 2."""
    made = options(steps=4, save_every=2, eval_every=2, ema=0.9)
    if not any(trained.iterdir()):
        pretrain(made, documents=documents, console=Console(file=io.StringIO()))
        shutil.rmtree(checkpoints.folder_of(made.folder, 4))
        shutil.copytree(made.folder, trained, dirs_exist_ok=True)
    shutil.copytree(trained, made.folder, dirs_exist_ok=True)
    return made, checkpoints.folder_of(made.folder, 2)


def seal(folder: Path, content: dict) -> None:
    """Write a state with right checksums of the files, so that only its content can be wrong."""
    content.pop("checksum", None)
    if isinstance(content.get("files"), dict):
        for name in content["files"]:
            if (folder / name).is_file():
                content["files"][name] = checkpoints.checksum(folder / name)
    sealed = {**content, "checksum": checkpoints._checksum_of(content)}
    (folder / "state.json").write_text(json.dumps(sealed))


def content_of(folder: Path) -> dict:
    return json.loads((folder / "state.json").read_text(encoding="utf-8"))


NOTHING = ...
WRONG = [
    *((name, NOTHING) for name in ("step", "seconds", "before", "files", "options")),
    *((name, value) for name in ("step", "epoch", "position") for value in (-1, 1.5, "1", True)),
    *(("step", value) for value in (0, 10**30, None, [])),
    *((name, value) for name in ("seconds", "flops") for value in (-1, "x", float("inf"), None)),
    *((name, value) for name in ("files", "options") for value in ([], None, 5, "x")),
    *(("processes", value) for value in (0, "2", {})),
    *(("evaluation", value) for value in ([], 5, {"mlm_accuracy": None})),
    *(("files", {name: "0" * 64}) for name in ("../state.json", "/etc/passwd", "..", "a\0")),
    ("files", {"weights.safetensors": []}),
    ("layout", {}),
    ("task", 5),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=repr)
def test_an_entry_of_another_kind_is_named(name, value, tmp_path) -> None:
    content = {
        "files": {},
        "options": {},
        "task": "pre-training",
        "evaluation": None,
        **dict.fromkeys(("layout", "processes", "accumulate", "tokens", "seconds"), 1),
        **dict.fromkeys(("step", "before", "epoch", "position", "flops"), 2),
    }
    seal(tmp_path, dict(content))
    assert checkpoints.read(tmp_path).content["step"] == 2
    content.pop(name) if value is NOTHING else content.update({name: value})
    seal(tmp_path, content)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/state\.json: .*{name}.*allowed: "):
        checkpoints.read(tmp_path)


@pytest.mark.parametrize("text", ["[]", "5", "null", "{}", '{"checksum": 5}', "[" * 10**5, "\0"])
def test_something_else_than_a_state_is_named(text, tmp_path) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/state\.json: "):
        checkpoints.read(tmp_path)


def resumes_with(options, documents, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pretrain(options, documents=documents, console=Console(file=io.StringIO()))


@pytest.mark.parametrize("name", ["epoch", "position", "tokens", "evaluation", "step"])
def test_a_run_that_resumes_names_the_state(name, cut_run, documents) -> None:
    """A step after the end of the run, or a missing entry, raises an error that names the state."""
    options, folder = cut_run
    content = content_of(folder)
    content.pop(name)
    if name == "step":
        content["step"] = 5
    seal(folder, content)
    # The message names the entry after the path, because the path itself contains the word step.
    resumes_with(options, documents, rf"^{folder}/state\.json: .*{name}")


@pytest.mark.parametrize("part", ["weights", "optimizer", "processes", "average"])
@pytest.mark.parametrize("how", ["missing", "short", "broadcast", "integers", "unlisted"])
def test_a_run_that_resumes_names_the_file_of_tensors(part, how, cut_run, documents) -> None:
    options, folder = cut_run
    path, content = folder / f"{part}.safetensors", content_of(folder)
    tensors = safetensors_file.read(path)
    name = max(tensors, key=lambda key: tensors[key].ndim)
    if how == "missing":
        del tensors[name]
    elif how == "short":
        tensors[name] = tensors[name][..., :-1]
    elif how == "broadcast":
        tensors[name] = tensors[name][..., :1]
    elif how == "integers":
        tensors[name] = tensors[name].to(torch.int16)
    else:
        del content["files"][path.name]
    safetensors_file.write(path, tensors)
    seal(folder, content)
    named = "state.json" if how == "unlisted" else path.name
    resumes_with(options, documents, rf"^{folder}/{named}: ")
