"""Damaged and malicious checkpoints: an error that names file and reason, nothing half-written."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fastbert import modules
from fastbert.config import BertConfig
from fastbert.io import checkpoint, safetensors_file

CONFIG = BertConfig(
    vocab_size=31,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=12,
    max_position_embeddings=6,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    modules.BertModel(CONFIG).save_pretrained(tmp_path)
    return tmp_path


def container(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(
    begin: int, end: int, shape: tuple[int, ...] = (2,), dtype: str = "F32"
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("exploded",)


TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
TWICE += b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it ends after 0 bytes"),
    "short": (b"\x08\x00\x00", "it ends after 3 bytes"),
    "huge header": (
        struct.pack("<Q", 2**63) + b"{}",
        "its header claims 9223372036854775808 bytes",
    ),
    "header beyond the end": (struct.pack("<Q", 100) + b"{}", "its header claims 100 bytes"),
    "no JSON": (container(b"{never"), "its header is not valid JSON"),
    "deep JSON": (container(b"[" * 200_000), "its header is not valid JSON"),
    "no UTF-8": (container(b'{"\xff": 1}'), "its header is not valid JSON"),
    "a list": (container([1, 2]), "its header is not a JSON object"),
    "overlap": (
        container({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        r"b overlaps the tensor before it \(offset 4, expected 8\)",
    ),
    "gap": (container({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)), "b leaves a gap"),
    "truncated": (container({"a": entry(0, 8)}, bytes(5)), "need 8 bytes, it holds 5"),
    "trailing": (container({"a": entry(0, 8)}, bytes(9)), "need 8 bytes, it holds 9"),
    "duplicate": (container(TWICE, bytes(4)), "duplicate key 'a'"),
    "negative": (container({"a": entry(-8, 0)}, bytes(8)), "a has dtype 'F32'"),
    "wrong size": (container({"a": entry(0, 8, (3,))}, bytes(8)), r"a of F32 \[3\] does not fit"),
    "overflow": (container({"a": entry(0, 8, (2**62, 4))}, bytes(8)), "does not fit"),
    "unknown dtype": (container({"a": entry(0, 8, (2,), "F31")}, bytes(8)), "dtype 'F31'"),
    "a nested dtype": (
        container({"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        r"a has dtype \[\]",
    ),
    "no offsets": (container({"a": {"dtype": "F32", "shape": [1]}}), "a is not described in full"),
    "a number": (container({"a": 5}), "a is not described in full"),
    "pickle": (pickle.dumps(Bomb()), "its header claims"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_safetensors(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, reason = HOSTILE[kind]
    (folder / checkpoint.WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=reason) as caught:
        modules.BertModel.from_pretrained(folder)
    assert str(folder / checkpoint.WEIGHTS) in str(caught.value)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file(folder: Path, keep: float) -> None:
    path = folder / checkpoint.WEIGHTS
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a sound safetensors file: "):
        modules.BertModel.from_pretrained(folder)


def test_sound_files_pass(tmp_path: Path) -> None:
    tensors = {"scalar": torch.tensor(1.5), "none": torch.zeros(0, 3), "half": torch.ones(3).half()}
    tensors["bits"] = torch.tensor([True, False, True])
    safetensors.torch.save_file(tensors, tmp_path / "file")
    for name, tensor in safetensors_file.read(tmp_path / "file").items():
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize("reading", [None, torch.load])
def test_a_pickle_runs_nothing(
    reading: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / checkpoint.WEIGHTS).unlink()
    path = folder / checkpoint.PICKLED
    if reading is None:
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save({"weight": Bomb()}, path)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: refused or damaged: "):
        modules.BertModel.from_pretrained(folder)
    assert not (tmp_path / "exploded").exists()


def test_a_pickle_of_something_else(folder: Path) -> None:
    (folder / checkpoint.WEIGHTS).unlink()
    torch.save([1, 2], folder / checkpoint.PICKLED)
    with pytest.raises(ValueError, match="does not hold a dictionary of tensors"):
        modules.BertModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"weight_map": {"a": "../outside.safetensors"}}, r"file name '\.\./outside\.safetensors'"),
        ({"weight_map": {"a": "/etc/passwd"}}, "file name '/etc/passwd'"),
        ({"weight_map": {"a": "..\\outside.safetensors"}}, "file name"),
        ({"weight_map": {"a": ".."}}, r"file name '\.\.'"),
        ({"weight_map": {"a": 5}}, "file name 5"),
        ({"weight_map": {"a": "model-1.safetensors"}}, "its shard model-1.safetensors is missing"),
        ({"weight_map": {"a": "present.safetensors"}}, "a is not in its shard present.safetensors"),
        ({"weight_map": ["a"]}, "it has no weight_map"),
        ({}, "it has no weight_map"),
        ([], "holds a JSON list, expected dict"),
    ],
)
def test_an_index(index: Any, reason: str, folder: Path) -> None:
    weights = folder / checkpoint.WEIGHTS
    weights.rename(folder / "present.safetensors")
    (folder.parent / "outside.safetensors").write_bytes(container({"a": entry(0, 8)}, bytes(8)))
    (folder / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=reason) as caught:
        modules.BertModel.from_pretrained(folder)
    assert checkpoint.INDEX in str(caught.value)


def test_a_path_in_modules_json(folder: Path) -> None:
    listing = [{"path": "../elsewhere", "type": "sentence_transformers.models.Transformer"}]
    (folder / "config.json").unlink()
    (folder / "modules.json").write_text(json.dumps(listing))
    with pytest.raises(ValueError, match=r"modules\.json: got the file name '\.\./elsewhere'"):
        modules.BertModel.from_pretrained(folder)
    (folder / "modules.json").write_text("[]")
    with pytest.raises(ValueError, match=r"modules\.json: none of its modules is a Transformer"):
        modules.BertModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "swish"}, "hidden_act: got 'swish', allowed: gelu, "),
        ({"hidden_size": "8"}, "hidden_size: got '8', allowed: an integer"),
        ({"hidden_dropout_prob": "much"}, "config.json: "),
        ({"model_type": "gpt2"}, "model_type: got 'gpt2', allowed: bert, roberta, "),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type: got 'relative_key'",
        ),
        ({"is_decoder": True}, "is_decoder: got True"),
        ({"id2label": 7}, "config.json: "),
    ],
)
def test_a_configuration(changes: dict[str, Any], reason: str, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=reason) as caught:
        modules.BertModel.from_pretrained(folder)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_a_configuration_that_is_none(content: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json: (not valid JSON|holds a JSON list)"):
        modules.BertModel.from_pretrained(folder)


def test_weights_that_do_not_fit(folder: Path) -> None:
    tensors = {name: t.clone() for name, t in modules.BertModel(CONFIG).state_dict().items()}
    tensors["pooler.dense.weight"] = torch.zeros(8, 9)
    tensors["encoder.layer.0.attention.self.key.bias"] = torch.zeros(7)
    tensors["pooler.dense.bias"] = torch.zeros(8, dtype=torch.int64)
    safetensors_file.write(folder / checkpoint.WEIGHTS, tensors)
    with pytest.raises(ValueError, match="the weights do not fit the model") as caught:
        modules.BertModel.from_pretrained(folder)
    for part in (
        "pooler.dense.weight: got shape (8, 9), expected (8, 8)",
        "encoder.layer.0.attention.self.key.bias: got shape (7,), expected (8,)",
        "pooler.dense.bias: got torch.int64, expected a floating dtype",
    ):
        assert part in str(caught.value)


def test_an_encoder_with_holes(folder: Path) -> None:
    tensors = {name: t.clone() for name, t in modules.BertModel(CONFIG).state_dict().items()}
    del tensors["encoder.layer.0.attention.self.query.weight"]
    safetensors_file.write(folder / checkpoint.WEIGHTS, tensors)
    with pytest.raises(ValueError, match=r"1 weights of the encoder are missing: .*query\.weight"):
        modules.BertModel.from_pretrained(folder)


def test_nothing_to_load(tmp_path: Path, folder: Path) -> None:
    for wrong in (tmp_path / "absent", folder / "config.json", "no/such/folder", "two words"):
        with pytest.raises(FileNotFoundError, match="path_or_hub_id: got "):
            modules.BertModel.from_pretrained(wrong)
    (folder / checkpoint.WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=r"there is none of model\.safetensors"):
        modules.BertModel.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no config\.json in this folder"):
        modules.BertModel.from_pretrained(folder)


def test_a_hub_id_without_a_hub() -> None:
    with pytest.raises(FileNotFoundError, match="'someone/nothing': no such folder, and the hub"):
        modules.BertModel.from_pretrained("someone/nothing")


def test_a_failed_save_leaves_what_was_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def run_out_of_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", run_out_of_space)
    with pytest.raises(OSError, match="No space left"):
        modules.BertModel(CONFIG).save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_saving_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ValueError, match="a file; allowed: a folder or a name not taken"):
        modules.BertModel(CONFIG).save_pretrained(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"
