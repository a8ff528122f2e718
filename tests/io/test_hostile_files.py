"""Damaged and malicious checkpoints raise errors that name the file and the reason.

A save that fails leaves the old files unchanged.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from small_model import CONFIG

from fastbert import json_file, modules
from fastbert.io import checkpoint, safetensors_file


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
    "no JSON": (container(b"{never"), "invalid JSON in header"),
    "deep JSON": (container(b"[" * 200_000), "invalid JSON in header"),
    "no UTF-8": (container(b'{"\xff": 1}'), "invalid UTF-8 in header"),
    "a list": (container([1, 2]), "invalid JSON in header: invalid type: sequence"),
    "overlap": (
        container({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        "invalid offset for tensor `b`",
    ),
    "gap": (
        container({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)),
        "invalid offset for tensor `b`",
    ),
    "truncated": (
        container({"a": entry(0, 8)}, bytes(5)),
        r"file not fully covered \(the file has 74 bytes\)",
    ),
    "trailing": (
        container({"a": entry(0, 8)}, bytes(9)),
        r"file not fully covered \(the file has 78 bytes\)",
    ),
    "duplicate": (container(TWICE, bytes(4)), "duplicate key 'a'"),
    "negative": (container({"a": entry(-8, 0)}, bytes(8)), "invalid value: integer `-8`"),
    "wrong size": (
        container({"a": entry(0, 8, (3,))}, bytes(8)),
        "invalid shape, data type, or offset",
    ),
    "overflow": (
        container({"a": entry(0, 8, (2**62, 4))}, bytes(8)),
        "overflow computing buffer size",
    ),
    "unknown dtype": (
        container({"a": entry(0, 8, (2,), "F31")}, bytes(8)),
        "unknown variant `F31`",
    ),
    "a nested dtype": (
        container({"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        "invalid type: sequence, expected string",
    ),
    "no offsets": (
        container({"a": {"dtype": "F32", "shape": [1]}}),
        "missing field `data_offsets`",
    ),
    "a number": (container({"a": 5}), "invalid type: integer `5`"),
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


def empty(name: str) -> str:
    return f'"{name}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'


LONG: dict[str, tuple[bytes, str]] = {
    "a duplicate among many": (
        ("{" + ",".join(empty(f"n{i}") for i in [*range(80_000), 79_999]) + "}").encode(),
        "duplicate key 'n79999'",
    ),
    "integers of 4,000 digits": (
        b'{"a":{"dtype":"F32","shape":[' + b",".join([b"9" * 4000] * 2800) + b"]}}",
        "number out of range",
    ),
    "a product of many integers": (
        b'{"a":{"dtype":"F32","shape":['
        + b",".join([b"9" * 18] * 600_000)
        + b'],"data_offsets":[0,4]}}',
        "overflow computing buffer size",
    ),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_long_header_is_judged_at_once(kind: str, tmp_path: Path) -> None:
    header, reason = LONG[kind]
    (tmp_path / "file").write_bytes(container(header, bytes(4) if b"[0,4]" in header else b""))
    start = time.process_time()
    with pytest.raises(ValueError, match=reason):
        safetensors_file.read(tmp_path / "file")
    assert time.process_time() - start < 20


TERABYTE = 1 << 40


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (TERABYTE, r"its 1,\d+,\d+,\d+,\d+ bytes cannot be mapped"),
        (8, r"file not fully covered \(the file has 1\d{12} bytes\)"),
        (2 * TERABYTE, r"file not fully covered \(the file has 1\d{12} bytes\)"),
    ],
)
def test_a_sparse_file_of_a_terabyte(end: int, reason: str, tmp_path: Path) -> None:
    start = container({"a": entry(0, end, (end // 4,))})
    (tmp_path / "file").write_bytes(start)
    os.truncate(tmp_path / "file", len(start) + TERABYTE)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    # Without this limit, a machine might map a terabyte, because no byte of the mapping is read.
    resource.setrlimit(resource.RLIMIT_AS, (1 << 39, limits[1]))
    try:
        with pytest.raises(ValueError, match=reason) as caught:
            safetensors_file.read(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert str(tmp_path / "file") in str(caught.value)


def test_a_pickle_that_is_larger_than_the_model_is_mapped_and_refused(folder: Path) -> None:
    (folder / checkpoint.WEIGHTS).unlink()
    path, size = folder / checkpoint.PICKLED, 1 << 30
    with torch.serialization.skip_data():
        torch.save({"embeddings.word_embeddings.weight": torch.empty(size // 4, 1)}, path)
    assert path.stat().st_size > size
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"got shape \(268435456, 1\), expected \(31, 8\)"):
        modules.BertModel.from_pretrained(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 18  # in KiB


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


def test_a_pickle_that_unpacks_to_much_more(folder: Path) -> None:
    (folder / checkpoint.WEIGHTS).unlink()
    path = folder / checkpoint.PICKLED
    torch.save({"weight": torch.zeros(1 << 20)}, folder / "plain")
    with zipfile.ZipFile(folder / "plain") as plain, zipfile.ZipFile(path, "w") as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: refused .*: it unpacks to 4,19"):
        modules.BertModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.ones(1).expand(1 << 40)},
        {"a": torch.ones(3, 3).to_sparse()},
        {"a": torch.ones(3, device="meta")},
        {5: torch.ones(3)},
        {"a": {"b": torch.ones(3)}},
    ],
)
def test_a_pickle_of_tensors_that_no_model_has(tensors: Any, folder: Path) -> None:
    (folder / checkpoint.WEIGHTS).unlink()
    torch.save(tensors, folder / checkpoint.PICKLED)
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin: it does not hold a dictionary of te"
    ):
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
    with pytest.raises(ValueError, match=r"modules\.json: got the path '\.\./elsewhere'"):
        modules.BertModel.from_pretrained(folder)
    (folder / "modules.json").write_text("[]")
    with pytest.raises(ValueError, match=r"modules\.json: none of its modules is a Transformer"):
        modules.BertModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "mish"}, "hidden_act: got 'mish', allowed: gelu, "),
        ({"hidden_size": "8"}, "hidden_size: got '8', allowed: an integer"),
        ({"hidden_dropout_prob": "much"}, "config.json: "),
        ({"model_type": "gpt2"}, "model_type: got 'gpt2', allowed: bert, roberta, "),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type: got 'relative_key'",
        ),
        ({"is_decoder": True}, "is_decoder: got True"),
        ({"id2label": 7}, "config.json: id2label: got 7"),
        ({"layer_norm_eps": "x"}, "layer_norm_eps: got 'x', allowed: a finite number >= 0"),
        ({"layer_norm_eps": math.nan}, "layer_norm_eps: got nan, allowed: a finite number"),
        ({"layer_norm_eps": math.inf}, "layer_norm_eps: got inf, allowed: a finite number"),
        ({"layer_norm_eps": -1}, "layer_norm_eps: got -1, allowed: a finite number >= 0"),
        ({"layer_norm_eps": True}, "layer_norm_eps: got True, allowed: a finite number"),
        ({"initializer_range": "x"}, "initializer_range: got 'x', allowed: a finite number"),
        ({"hidden_dropout_prob": True}, "hidden_dropout_prob: got True, allowed: a number in"),
        ({"classifier_dropout": [0.1]}, r"classifier_dropout: got \[0.1\], allowed: None or a num"),
        ({"num_labels": True}, "num_labels: got True, allowed: an integer >= 1"),
        ({"num_hidden_layers": 1.0}, "num_hidden_layers: got 1.0, allowed: an integer"),
        ({"type_vocab_size": 2**31}, "type_vocab_size: got 2147483648, allowed: an integer"),
        ({"vocab_size": 10**400}, "vocab_size: got 10000000"),
        ({"pad_token_id": 0.0}, "pad_token_id: got 0.0, allowed: None or 0 <= id"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: got 'no', allowed: True or False"),
        ({"problem_type": ["x"]}, r"problem_type: got \['x'\], allowed: None, regression, single"),
        ({"model_type": ["bert"]}, r"model_type: got \['bert'\], allowed: bert"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers: got 100000, allowed: .* <= 1000"),
        ({"model_type": "roberta", "pad_token_id": None}, "pad_token_id: got None, allowed"),
        (
            {"model_type": "roberta", "pad_token_id": 5},
            "max_position_embeddings: got 6, allowed: more than 6",
        ),
        ({"model_type": "albert", "inner_group_num": 2**30}, "group_size: got 1073741824, allowed"),
        ({"model_type": "nomic_bert", "num_hidden_layers": 2**31}, "num_hidden_layers: got 21474"),
        ({"model_type": "nomic_bert", "rope_parameters": 5}, "rope_parameters: got 5, allowed"),
        (
            {"model_type": "nomic_bert", "rope_parameters": {"rope_theta": "x"}},
            "rope_theta: got 'x', allowed: a number",
        ),
        (
            {"model_type": "nomic_bert", "num_attention_heads": 0, "head_dim": 4},
            "head_dim: got 4, allowed: None or hidden_size / num_attention_heads",
        ),
        (
            {"model_type": "modernbert", "global_attn_every_n_layers": 0},
            "global_attn_every_n_layers: got 0, allowed: an integer >= 1",
        ),
        ({"model_type": "modernbert", "local_attention": "x"}, "local_attention: got 'x', allowed"),
        ({"model_type": "modernbert", "norm_bias": 1}, "norm_bias: got 1, allowed: True or False"),
    ],
)
def test_a_configuration(changes: dict[str, Any], reason: str, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}))
    with pytest.raises(ValueError, match=reason) as caught:
        modules.BertModel.from_pretrained(folder)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "\xff", "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"]
)
def test_a_configuration_that_is_none(content: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json: (not valid JSON|holds a JSON list)"):
        modules.BertModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1000},
        {"vocab_size": 2**28},
        {"intermediate_size": 2**28},
        {"hidden_size": 2**28 - 4, "vocab_size": 2**28},
        {"max_position_embeddings": 2**28},
    ],
)
def test_a_model_is_compared_with_the_weights_before_it_is_built(
    changes: dict[str, int], folder: Path
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}))
    start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ValueError, match=r"do not fit the model|weights of the encoder are missing"
    ):
        modules.BertModel.from_pretrained(folder)
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 18  # in KiB


def test_comparing_first_draws_no_random_number(folder: Path) -> None:
    torch.manual_seed(1)
    modules.BertModel(CONFIG)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    modules.BertModel.from_pretrained(folder)
    assert torch.equal(torch.rand(1), drawn)


def test_weights_of_eight_bits_are_refused(folder: Path) -> None:
    tensors = {
        n: t.to(torch.float8_e4m3fn) for n, t in modules.BertModel(CONFIG).state_dict().items()
    }
    safetensors_file.write(folder / checkpoint.WEIGHTS, tensors)
    with pytest.raises(ValueError, match=r"got torch\.float8_e4m3fn, expected a floating dtype of"):
        modules.BertModel.from_pretrained(folder)


@pytest.mark.parametrize("classes", [5, "BertModel", [5], {"a": 1}])
def test_classes_that_are_no_names(classes: Any, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), "architectures": classes})
    )
    with pytest.raises(ValueError, match=r"config\.json: architectures: got .*, allowed: names"):
        checkpoint.read_settings(folder)


def test_settings_larger_than_any(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(json_file.MAX_BYTES + 1)  # The hole takes no space on the disk.
    with pytest.raises(ValueError, match=r"config\.json: it has 8,388,609 bytes, allowed: at most"):
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
        "pooler.dense.bias: got torch.int64, expected a floating dtype of 16 to 64 bits",
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
    with pytest.raises(ValueError, match="a file; allowed: a folder or an unused name"):
        modules.BertModel(CONFIG).save_pretrained(tmp_path / "taken")
    assert (tmp_path / "taken").read_text(encoding="utf-8") == "mine"
