"""Reading and writing checkpoint folders with ``config.json`` and ``model.safetensors``.

An error about a damaged file names the file. A save replaces all files or none of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fastbert import json_file
from fastbert.config import OURS, OWN_TYPES, BertConfig, check
from fastbert.io import commit, families, names, safetensors_file, sentence_transformers_folder
from fastbert.io.commit import CONFIG

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
# The files that are downloaded for a hub id. Code and pickles are not in the list.
DOWNLOADED = (
    CONFIG, "generation_config.json", WEIGHTS, INDEX, "model-*.safetensors", "vocab.txt",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    sentence_transformers_folder.LISTING, sentence_transformers_folder.SETTINGS,
    *sentence_transformers_folder.ENCODER_SETTINGS,
    # sentence-transformers has one folder per module: 0_Transformer, 1_Pooling, 2_Dense, …
    "[0-9]*_*/*.json", "[0-9]*_*/vocab.txt", "[0-9]*_*/model*.safetensors",
)  # fmt: skip
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class StoredModel(Protocol):
    """The members of ``fastbert.modules.BertPreTrainedModel`` that a checkpoint needs.

    Attributes:
        config: The configuration.
        body_prefix: Prefix of the names of the encoder and the pooler in the state dict:
            ``"bert."`` or ``""``.
    """

    config: BertConfig
    body_prefix: str

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        ...

    def tied(self) -> dict[str, str]:
        """Return a dict from the second name of each tied parameter to its first name."""
        ...

    def state_dict(self) -> Any:
        """Return the parameters and buffers by name."""
        ...

    def load_state_dict(self, state_dict: Any, strict: bool = ...) -> Any:
        """Copy parameters and buffers into the model."""
        ...


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose tensors have the names and dtypes that its files have.

    Attributes:
        folder: Folder of the checkpoint.
        content: Content of ``config.json``.
        tensors: The tensors by name.
    """

    folder: Path
    content: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Floating dtype of the weights; float32 if there are several dtypes or none."""
        dtypes = {t.dtype for t in self.tensors.values() if t.dtype in DTYPES}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def config(self, overrides: dict[str, Any]) -> BertConfig:
        """Return the configuration.

        Args:
            overrides: Fields of `BertConfig` that replace the values in ``config.json``.

        Returns:
            The configuration.

        Raises:
            ValueError: If ``config.json`` is not usable, or if an override is not a field or has a
                value that is not allowed. The message names the file or the override.
        """
        known = {field.name for field in dataclasses.fields(BertConfig)} - OURS
        check_overrides(overrides, sorted(known))
        try:
            kind, native = self.content.get("model_type", "bert"), families.NATIVE
            check("model_type", kind, ", ".join(native), isinstance(kind, str) and kind in native)
            config = families.read_config(self.content)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"{self.folder / CONFIG}: {error}") from error
        return config.replace(**overrides)

    def architectures(self) -> list[str]:
        """Return the class names in ``config.json``; raise ValueError if they are not names."""
        classes = self.content.get("architectures") or []
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise ValueError(
                f"{self.folder / CONFIG}: architectures: got {classes!r:.200}, allowed: names"
            )
        return classes


# Reading


def check_overrides(overrides: Iterable[str], known: Sequence[str]) -> None:
    """Raise ValueError if the name of a `config_overrides` is not in `known`."""
    for name in overrides:
        check("config_overrides", name, ", ".join(known), name in known)


@contextlib.contextmanager
def naming_config(folder: Path) -> Iterator[None]:
    """Put the path of ``config.json`` before the message of a ValueError in the ``with`` block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error


def read(path_or_hub_id: str | os.PathLike[str]) -> Stored:
    """Read the checkpoint of a folder, or of a hub id if there is no such folder.

    The encoder of a sentence-transformers folder may be in a subfolder. Configuration and weights
    come from the same save, even if another process saves during the call. If a process was killed
    while it moved the files of a save into place, the function first finishes that save
    (``fastbert.io.commit``).

    Args:
        path_or_hub_id: Folder or hub id.

    Returns:
        The checkpoint.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If the checkpoint is damaged. The message names the file and the reason.
        OSError: If an interrupted save cannot be finished, or if other processes keep saving into
            the folder.
    """
    folder = encoder_folder(find(path_or_hub_id))
    return commit.consistent(
        folder, lambda: Stored(folder, _read_content(folder), read_tensors(folder))
    )


def read_settings(path_or_hub_id: str | os.PathLike[str]) -> tuple[BertConfig, list[str]]:
    """Read the configuration and the class names of a checkpoint, without its weights.

    Args:
        path_or_hub_id: Folder or hub id.

    Returns:
        The configuration, and the names of the classes in ``config.json``.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If ``config.json`` is damaged.
        OSError: If an interrupted save cannot be finished.
    """
    stored = without_weights(path_or_hub_id)
    return stored.config({}), stored.architectures()


def read_source(path_or_hub_id: str | os.PathLike[str]) -> str:
    """Read the name of the model from which a checkpoint was made.

    Args:
        path_or_hub_id: Folder or hub id.

    Returns:
        The folder or hub id under ``_name_or_path`` in ``config.json``, or an empty string.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If ``config.json`` is damaged.
        OSError: If an interrupted save cannot be finished.
    """
    source = without_weights(path_or_hub_id).content.get("_name_or_path")
    return source if isinstance(source, str) else ""


def without_weights(path_or_hub_id: str | os.PathLike[str]) -> Stored:
    """Read ``config.json`` of a checkpoint; the result has no tensors.

    Args:
        path_or_hub_id: Folder or hub id.

    Returns:
        The checkpoint without tensors.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If ``config.json`` is damaged.
        OSError: If an interrupted save cannot be finished.
    """
    folder = encoder_folder(find(path_or_hub_id))
    return Stored(folder, commit.consistent(folder, lambda: _read_content(folder)), {})


def _read_content(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        # A training run writes the model to a subfolder.
        inner = folder / "model"
        hint = f"; allowed: {inner}, which has one" if (inner / CONFIG).exists() else ""
        raise FileNotFoundError(f"{folder}: there is no {CONFIG} in this folder{hint}")
    return json_file.read(folder / CONFIG)


def find(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """Return the folder itself, or the folder to which the files of a hub id are downloaded.

    If a process was killed while it moved the files of a save into place, the function finishes
    that save (``fastbert.io.commit``).

    Args:
        path_or_hub_id: Folder or hub id.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If there is no such folder, and the hub does not have the name or the
            name is not a hub id.
        OSError: If an interrupted save cannot be finished.
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
            f"path_or_hub_id: got {name!r}: no such folder, and the hub does not have it: {error}"
        ) from error


def encoder_folder(folder: Path) -> Path:
    """Return the folder of the encoder in a sentence-transformers folder, or `folder` itself."""
    if (folder / CONFIG).exists() or not sentence_transformers_folder.is_one(folder):
        return folder
    return sentence_transformers_folder.encoder_folder(folder)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder.

    Args:
        folder: The folder, with ``model.safetensors``, its shards or ``pytorch_model.bin``.

    Returns:
        The tensors by name.

    Raises:
        FileNotFoundError: If the folder has no weights.
        ValueError: If a file is damaged. The message names the file.
    """
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
    places = json_file.read(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index}: it has no weight_map")
    tensors: dict[str, Tensor] = {}
    shards: dict[str, list[str]] = {}
    for name, place in places.items():
        shards.setdefault(_plain_name(index, place), []).append(name)
    for shard, wanted in sorted(shards.items()):
        if not (index.parent / shard).is_file():
            raise ValueError(f"{index}: its shard {shard} is missing")
        stored = safetensors_file.read(index.parent / shard)
        absent = [name for name in wanted if name not in stored]
        if absent:
            raise ValueError(f"{index}: {absent[0]} is not in its shard {shard}")
        tensors.update({name: stored[name] for name in wanted})
    return tensors


def _plain_name(index: Path, name: Any) -> str:
    """Return `name` if it is a file name without a path; otherwise raise ValueError."""
    if not isinstance(name, str) or name in (".", "..") or re.search(r"[/\\\0]", name):
        raise ValueError(f"{index}: got the file name {name!r}, allowed: a name without a path")
    return name


def _read_pickled(path: Path) -> dict[str, Tensor]:
    try:
        # A zip file is memory-mapped, so the data of tensors that the model lacks are never read.
        is_zip = _refuse_compressed(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # The unpickler raises any kind of error for a damaged file.
        if isinstance(error, OSError) and error.filename:
            raise
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: refused or damaged: {reason}") from error
    if not isinstance(tensors, dict) or not all(map(_is_plain, tensors, tensors.values())):
        raise ValueError(f"{path}: it does not hold a dictionary of tensors")
    return tensors


def _refuse_compressed(path: Path) -> bool:
    """Return whether a file is a zip file; torch before 1.6 wrote another format.

    Raises:
        ValueError: If the zip file is compressed, because a small compressed file could fill the
            memory. ``torch.save`` does not compress.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        size = sum(entry.file_size for entry in file.infolist())
    if size > path.stat().st_size:
        raise ValueError(f"it unpacks to {size:,} bytes")
    return True


def _is_plain(name: object, tensor: object) -> bool:
    """Return whether `name` is a string and `tensor` a dense, unexpanded tensor on the CPU."""
    return (
        isinstance(name, str)
        and isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.nbytes <= tensor.untyped_storage().nbytes()
    )


def fit(model: StoredModel, stored: Stored) -> dict[str, Tensor]:
    """Return the stored tensors under the names of `model`.

    The result includes the weights of heads that `model` does not have.

    Args:
        model: The model, which may be on the meta device.
        stored: The checkpoint.

    Returns:
        The tensors by name.

    Raises:
        ValueError: If the shape or the dtype of a tensor does not fit the model. The error is also
            raised if `stored` lacks weights of the encoder, or has weights of an encoder that
            `model` lacks.
    """
    if model.config.model_type in OWN_TYPES:
        tensors = names.for_model(stored.tensors, model.body_prefix)
    else:
        tensors = families.to_fastbert(stored.tensors, model.config)
    expected = _own_state(model)
    for name, target in model.tied().items():
        tied = tensors.pop(name, None)
        if tied is not None:
            tensors.setdefault(target, tied)
    check_shapes(stored.folder, tensors, expected)
    lost = [n for n in expected if n not in tensors and names.part(n) in names.ENCODER]
    if lost:
        raise ValueError(
            f"{stored.folder}: {len(lost)} weights of the encoder are missing: {few(lost)}"
        )
    left = [name for name in tensors if name not in expected]
    _check_surplus(stored.folder, left, model.config)
    return tensors


def load_into(model: StoredModel, tensors: dict[str, Tensor], folder: Path) -> None:
    """Copy the tensors that `fit` returned into a model.

    One warning names the weights that the checkpoint lacks, and its weights with unknown names.

    Args:
        model: The model.
        tensors: The result of `fit`.
        folder: Folder of the checkpoint, for the warning.
    """
    expected = _own_state(model)
    missing = [name for name in expected if name not in tensors]
    unknown = [
        name
        for name in tensors
        if name not in expected and names.part(name) not in (*names.BODY, *names.HEADS)
    ]
    if missing or unknown:
        message = [f"{folder}:"]
        if missing:
            message.append(f"not in the checkpoint, newly initialized: {', '.join(missing)}.")
        if unknown:
            message.append(f"in the checkpoint, but unknown: {few(unknown)}.")
        warnings.warn(" ".join(message), stacklevel=3)
    model.load_state_dict({n: t for n, t in tensors.items() if n in expected}, strict=False)


def _own_state(model: StoredModel) -> dict[str, Tensor]:
    """Return the state dict of `model` without the second names of tied parameters."""
    tied = model.tied()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def check_names(folder: Path, missing: Collection[str], unknown: Collection[str]) -> None:
    """Check that a checkpoint has all weights of a model, and no others.

    Args:
        folder: Folder of the checkpoint, for the message.
        missing: Weights that the checkpoint lacks.
        unknown: Weights of the checkpoint that the model lacks.

    Raises:
        ValueError: If there are such weights. The message names the first of them.
    """
    for wrong, what in ((missing, "missing"), (unknown, "not in the model of config.json")):
        if wrong:
            first = few(sorted(wrong, key=by_number))
            raise ValueError(f"{folder}: {what}: {len(wrong)} weights: {first}")


def check_shapes(folder: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check the shapes and dtypes of tensors.

    Args:
        folder: Folder of the checkpoint, for the message.
        tensors: The tensors by name.
        expected: Tensors with the expected shapes, by name.

    Raises:
        ValueError: If a tensor has another shape than in `expected`, or no floating dtype. The
            message names the tensors.
    """
    wrong = []
    for name in expected.keys() & tensors.keys():
        got, want = tensors[name], expected[name]
        if got.shape != want.shape:
            wrong.append(f"{name}: got shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        elif got.dtype not in DTYPES:
            wrong.append(f"{name}: got {got.dtype}, expected a floating dtype of 16 to 64 bits")
    if wrong:
        raise ValueError(f"{folder}: the weights do not fit the model: {few(sorted(wrong), '; ')}")


def _check_surplus(folder: Path, left: list[str], config: BertConfig) -> None:
    """Raise ValueError if `left`, the stored names that the model lacks, has encoder weights."""
    parts = families.encoder_parts(config)
    surplus = [name for name in left if names.part(name) in parts]
    if surplus:
        what = "1 weight" if len(surplus) == 1 else f"{len(surplus)} weights"
        verb = "has" if len(surplus) == 1 else "have"
        raise ValueError(
            f"{folder}: {what} of the encoder {verb} no place in the model of {CONFIG}, with "
            f"num_hidden_layers {config.num_hidden_layers}: {few(sorted(surplus, key=by_number))}"
        )


def by_number(name: str) -> tuple[list[int], str]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [int(digits) for digits in re.findall(r"\d+", name)], name


def few(items: list[str], separator: str = ", ", most: int = 10) -> str:
    """Join the first `most` items for a message, with the number of the other items."""
    more = f"{separator}and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


# Writing


def write(folder: str | os.PathLike[str], model: StoredModel) -> None:
    """Write a model to a folder that transformers can load with ``from_pretrained``.

    A tied parameter is stored once, under the name that transformers uses. The files
    ``config.json`` and ``model.safetensors`` are replaced together, and other files in the folder
    stay (``fastbert.io.commit``).

    Args:
        folder: Folder, which is created if it does not exist.
        model: The model.

    Raises:
        ValueError: If `folder` is a file.
        OSError: If a file cannot be written.
    """
    tied = model.tied()
    tensors = {name: t for name, t in model.state_dict().items() if name not in tied}
    content = families.write_config(model.config)
    content.pop("torch_dtype", None)
    if model.config.model_type in OWN_TYPES:
        content["architectures"] = [type(model).__name__]
    else:
        content["architectures"] = [families.family_of(model.config.model_type).model]
        tensors = families.to_transformers(tensors, model.config)
    content["dtype"] = str(model.dtype).removeprefix("torch.")
    write_files(folder, tensors, {CONFIG: content})


def write_files(
    folder: str | os.PathLike[str], tensors: dict[str, Tensor], contents: dict[str, dict[str, Any]]
) -> None:
    """Write ``model.safetensors`` and JSON files to a folder, and replace all of them together.

    Args:
        folder: Folder, which is created if it does not exist.
        tensors: The tensors by name.
        contents: Content of each JSON file by its name, with ``config.json`` among them.

    Raises:
        ValueError: If `folder` is a file.
        OSError: If a file cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"folder: got {str(folder)!r}, a file; allowed: a folder or an unused name"
        )
    texts = {
        name: json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        for name, content in contents.items()
    }
    with commit.replacement(folder) as new:
        safetensors_file.write(new / WEIGHTS, {name: t.cpu() for name, t in tensors.items()})
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
