"""After any failure of a save, the folder of a model is complete or absent."""

import os

import pytest

from fastbert.config import BertConfig
from fastbert.io import commit
from fastbert.training.model_folder import refuse_existing, save_checkpoint


class Writer:
    """A substitute for a model or tokenizer that writes one file, and may then raise an error."""

    def __init__(self, name, content, error=None):
        self.name, self.content, self.error = name, content, error

    config = BertConfig()

    def save_pretrained(self, folder, max_length=None):
        (folder / self.name).write_text(self.content)
        if self.error is not None:
            raise self.error

    save = save_pretrained


def contents(folder):
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_replaces_the_old_checkpoint_as_a_whole(tmp_path):
    folder = tmp_path / "out" / "model"
    save_checkpoint(folder, Writer("a", "1"), Writer("b", "1"))
    save_checkpoint(folder, Writer("c", "2"), Writer("b", "2"))
    assert contents(folder) == {"c": "2", "b": "2"}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("there_before", [False, True])
def test_a_failure_leaves_what_was_there(tmp_path, error, there_before):
    folder = tmp_path / "model"
    if there_before:
        save_checkpoint(folder, Writer("a", "1"), Writer("b", "1"))
    with pytest.raises(type(error)):
        save_checkpoint(folder, Writer("a", "2"), Writer("b", "2", error))
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if there_before else [])
    if there_before:
        assert contents(folder) == {"a": "1", "b": "1"}


def test_an_existing_checkpoint_is_refused_unless_told(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"output: .* holds a model already, and no checkpoint"):
        refuse_existing(tmp_path, overwrite=False)
    refuse_existing(tmp_path, overwrite=True)


def test_output_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "out"
    path.write_text("")
    with pytest.raises(ValueError, match=r"output: .* is a file"):
        refuse_existing(path, overwrite=True)


def test_a_folder_that_a_process_of_the_same_number_left_is_no_obstacle(tmp_path):
    (tmp_path / f".model.partial-{os.getpid()}").mkdir()
    save_checkpoint(tmp_path / "model", Writer("a", "1"), Writer("b", "1"))
    assert contents(tmp_path / "model") == {"a": "1", "b": "1"}


def test_what_a_dead_process_staged_is_deleted_and_what_a_living_one_staged_stays(tmp_path):
    (tmp_path / f"{commit.STAGED}dead" / "new").mkdir(parents=True)
    with commit.replacement(tmp_path / "other") as living:
        save_checkpoint(tmp_path / "model", Writer("a", "1"), Writer("b", "1"))
        assert {path.name for path in tmp_path.iterdir()} == {"model", living.parent.name}
        (living / "config.json").write_text("{}")
    assert contents(tmp_path / "other") == {"config.json": "{}"}
