"""Checkpoint folders: config.json and model.safetensors, read with care and written whole or not at
all."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastbert.config import OURS, BertConfig
from fastbert.io import commit, families, names, safetensors_file
from fastbert.io.commit import CONFIG

if TYPE_CHECKING:
    from fastbert.modules.pretrained import BertPreTrainedModel

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
# What a hub id downloads; never code, never pickles.
DOWNLOADED = (
    CONFIG, WEIGHTS, INDEX, "model-*.safetensors", "modules.json", "0_Transformer/config.json",
    "0_Transformer/model.safetensors", "vocab.txt", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "1_Pooling/config.json",
    "sentence_bert_config.json",
)  # fmt: skip
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Stored:
    """A checkpoint as it lies on the disk: the content of config.json, and the tensors by their
    names."""

    folder: Path
    content: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """The one floating dtype of the weights; float32 when there are several or none."""
        dtypes = {t.dtype for t in self.tensors.values() if t.dtype.is_floating_point}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def config(self, overrides: dict[str, Any]) -> BertConfig:
        """Raises ValueError naming the file, or the override that is no field of BertConfig."""
        known = {field.name for field in dataclasses.fields(BertConfig)} - OURS
        for name in overrides:
            if name not in known:
                allowed = ", ".join(sorted(known))
                raise ValueError(f"config_overrides: got {name!r}, allowed: {allowed}")
        try:
            config = families.read_config(self.content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{self.folder / CONFIG}: {error}") from error
        return config.replace(**overrides)


# Reading


def read(path_or_hub_id: str | os.PathLike[str]) -> Stored:
    """The checkpoint of a folder, or of a hub id when there is no such folder.

    A sentence-transformers folder may keep its encoder in a sub-folder. Raises FileNotFoundError
    when there is no checkpoint, ValueError naming file and reason when there is a damaged one.

    Configuration and weights are of one save, even if another process saves at the same time. A
    save that was killed after its commit point is finished first (``fastbert.io.commit``); OSError
    when this is not possible.
    """
    folder = _encoder_folder(find(path_or_hub_id))
    return commit.consistent(
        folder, lambda: Stored(folder, _read_content(folder), _read_tensors(folder))
    )


def read_settings(path_or_hub_id: str | os.PathLike[str]) -> tuple[BertConfig, list[str]]:
    """The configuration of a checkpoint and the classes that its config.json names, without reading
    weights. Errors as in ``read``."""
    folder = _encoder_folder(find(path_or_hub_id))
    content = commit.consistent(folder, lambda: _read_content(folder))
    return Stored(folder, content, {}).config({}), list(content.get("architectures") or [])


def _read_content(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder}: there is no {CONFIG} in this folder")
    return _read_json(folder / CONFIG)


def find(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """The folder itself, or where the files of the hub id were downloaded to.

    Finishes a save to the folder that was killed after its commit point.
    """
    path = Path(path_or_hub_id)
    if path.is_dir():
        commit.settle(path)
        return path
    name = str(path_or_hub_id)
    if path.exists() or not _HUB_ID.fullmatch(name):
        what = "it is a file" if path.exists() else "there is no such folder, and it is no hub id"
        raise FileNotFoundError(
            f"path_or_hub_id: got {name!r}: {what}; allowed: a model folder or a hub id"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=list(DOWNLOADED)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise FileNotFoundError(
            f"path_or_hub_id: got {name!r}: no such folder, and the hub did not give it: {error}"
        ) from error


def _encoder_folder(folder: Path) -> Path:
    """The folder of the transformer in a sentence-transformers folder; else ``folder`` itself."""
    listing = folder / "modules.json"
    if (folder / CONFIG).exists() or not listing.is_file():
        return folder
    content = _read_json(listing, kind=list)
    for module in content:
        if isinstance(module, dict) and str(module.get("type", "")).endswith("Transformer"):
            return folder / _plain_name(listing, module.get("path"))
    raise ValueError(f"{listing}: none of its modules is a Transformer")


def _read_json(path: Path, kind: type = dict) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path}: holds a JSON {type(content).__name__}, expected {kind.__name__}")
    return content


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / WEIGHTS).is_file():
        return safetensors_file.read(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return _read_shards(folder / INDEX)
    if (folder / PICKLED).is_file():
        return _read_pickled(folder / PICKLED)
    raise FileNotFoundError(
        f"{folder}: there is none of {WEIGHTS}, {INDEX}, {PICKLED} in this folder"
    )


def _read_shards(index: Path) -> dict[str, Tensor]:
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index}: it has no weight_map")
    tensors: dict[str, Tensor] = {}
    for shard in sorted({_plain_name(index, place) for place in places.values()}):
        if not (index.parent / shard).is_file():
            raise ValueError(f"{index}: its shard {shard} is missing")
        stored = safetensors_file.read(index.parent / shard)
        wanted = [name for name, place in places.items() if place == shard]
        absent = [name for name in wanted if name not in stored]
        if absent:
            raise ValueError(f"{index}: {absent[0]} is not in its shard {shard}")
        tensors.update({name: stored[name] for name in wanted})
    return tensors


def _plain_name(index: Path, name: Any) -> str:
    """``name`` if it stays inside the folder. Raises ValueError naming ``index``."""
    if not isinstance(name, str) or name in (".", "..") or re.search(r"[/\\\0]", name):
        raise ValueError(f"{index}: got the file name {name!r}, allowed: a name without a path")
    return name


def _read_pickled(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: refused or damaged: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"{path}: it does not hold a dictionary of tensors")
    return tensors


def load_into(model: BertPreTrainedModel, stored: Stored) -> None:
    """Copies the stored weights into ``model``; one warning names what it lacks and what nobody
    knows. Weights of heads that ``model`` does not have are left out.

    Raises ValueError when a shape differs, or weights of the embeddings or the encoder are missing
    or have no place in ``model``; the model is untouched then.
    """
    if model.config.model_type == "bert":
        tensors = names.for_model(stored.tensors, model.body_prefix)
    else:
        tensors = families.to_ours(stored.tensors, model.config)
    expected = model.state_dict()
    for name, target in model.tied().items():
        tied = tensors.pop(name, None)
        if tied is not None:
            tensors.setdefault(target, tied)
        del expected[name]
    _check_shapes(stored.folder, tensors, expected)
    missing = [name for name in expected if name not in tensors]
    lost = [name for name in missing if names.part(name) in names.ENCODER]
    if lost:
        raise ValueError(
            f"{stored.folder}: {len(lost)} weights of the encoder are missing: {_few(lost)}"
        )
    left = [name for name in tensors if name not in expected]
    _check_surplus(stored.folder, left, model.config)
    unknown = [name for name in left if names.part(name) not in (*names.BODY, *names.HEADS)]
    if missing or unknown:
        message = [f"{stored.folder}:"]
        if missing:
            message.append(f"not in the checkpoint, initialised afresh: {', '.join(missing)}.")
        if unknown:
            message.append(f"in the checkpoint, but in no BERT: {_few(unknown)}.")
        warnings.warn(" ".join(message), stacklevel=3)
    model.load_state_dict({n: t for n, t in tensors.items() if n in expected}, strict=False)


def _check_shapes(folder: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    wrong = []
    for name in expected.keys() & tensors.keys():
        got, want = tensors[name], expected[name]
        if got.shape != want.shape:
            wrong.append(f"{name}: got shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        elif not got.dtype.is_floating_point:
            wrong.append(f"{name}: got {got.dtype}, expected a floating dtype")
    if wrong:
        raise ValueError(f"{folder}: the weights do not fit the model: {_few(sorted(wrong), '; ')}")


def _check_surplus(folder: Path, left: list[str], config: BertConfig) -> None:
    """Raises ValueError naming the weights of an encoder among those that no module took."""
    parts = families.encoder_parts(config)
    surplus = [name for name in left if names.part(name) in parts]
    if surplus:
        what = "1 weight" if len(surplus) == 1 else f"{len(surplus)} weights"
        verb = "has" if len(surplus) == 1 else "have"
        raise ValueError(
            f"{folder}: {what} of the encoder {verb} no place in the model of {CONFIG}, with "
            f"num_hidden_layers {config.num_hidden_layers}: {_few(sorted(surplus, key=_number))}"
        )


def _number(name: str) -> tuple[list[int], str]:
    """Sorts layer 2 before layer 10."""
    return [int(digits) for digits in re.findall(r"\d+", name)], name


def _few(items: list[str], separator: str = ", ", most: int = 10) -> str:
    more = f"{separator}and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


# Writing


def write(folder: str | os.PathLike[str], model: BertPreTrainedModel) -> None:
    """Writes ``model`` so that transformers' class of the same name opens it.

    A tied parameter is stored once, under the name transformers keeps. Both files appear together
    or not at all, and other files of ``folder`` stay (``fastbert.io.commit``). Raises ValueError
    when ``folder`` is a file, OSError when a file cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"folder: got {str(folder)!r}, a file; allowed: a folder or a name not taken"
        )
    tied = model.tied()
    tensors = {name: t.cpu() for name, t in model.state_dict().items() if name not in tied}
    content = families.write_config(model.config)
    content.pop("torch_dtype", None)
    if model.config.model_type == "bert":
        content["architectures"] = [type(model).__name__]
    else:
        content["architectures"] = [families.family_of(model.config.model_type).model]
        tensors = families.to_theirs(tensors, model.config)
    content["dtype"] = str(model.dtype).removeprefix("torch.")
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    with commit.replacement(folder) as new:
        safetensors_file.write(new / WEIGHTS, tensors)
        (new / CONFIG).write_text(text, encoding="utf-8")
