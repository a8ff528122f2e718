"""The checkpoints from which a run resumes: ``checkpoints/step-00000120`` and so on.

A checkpoint has these files, none of which is a pickle:

- ``weights.safetensors``: the parameters and buffers of the model.
- ``optimizer.safetensors``: the state of the optimizer.
- ``average.safetensors``: the moving average of the weights, if the run computes an average.
- ``best.safetensors``: the weights after the best evaluation, if the run stores these weights.
- ``processes.safetensors``: random-number states and sums of the log, with a row per process.
- The files of the tokenizer.
- ``state.json``: all other values, such as the step and the options, and the SHA-256 of each file.

A checkpoint appears by one rename after its files have been flushed, so a killed writer leaves
either the whole checkpoint or none. The checksums reveal damage that happens later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fastbert import json_file
from fastbert.checksum import checksum
from fastbert.data import WordPieceTokenizer
from fastbert.data.tokenizer import MOST_TOKENIZER_BYTES
from fastbert.file_size import check_file
from fastbert.io import commit, safetensors_file

# AdamW and LAMB store these entries for each parameter.
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
CHECKPOINTS, STATE = "checkpoints", "state.json"
NAME = re.compile(r"step-(\d{8,})$")
# The number of the layout of the files; a checkpoint with another number is refused.
LAYOUT = 1
# Every integer in a checkpoint is below this limit. A 64-bit integer then holds the products that a
# run computes, such as a position times a number of processes.
MOST = 1 << 53


class StoredTokenizer(Protocol):
    """A tokenizer that writes its files."""

    def save(self, folder: Path, *, max_length: int | None = ...) -> None:
        """Write the files into `folder`; `max_length` is the largest number of tokens to store."""
        ...


class Checkpoint(NamedTuple):
    """A checkpoint on the disk.

    Attributes:
        folder: Folder of the checkpoint.
        content: Content of ``state.json``.
    """

    folder: Path
    content: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of ``name.safetensors``, on the CPU.

        Raises:
            ValueError: If the file is damaged or has no checksum in ``state.json``.
        """
        path = self.folder / f"{name}.safetensors"
        if path.name not in self.content["files"]:
            raise ValueError(f"{self.folder / STATE}: files: {path.name} is missing")
        return safetensors_file.read(path)

    @contextlib.contextmanager
    def fitting(self, name: str) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of ``name.safetensors``; errors in the ``with`` block name the file."""
        with self.reading(f"{name}.safetensors"):
            yield self.tensors(name)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Turn errors of the ``with`` block into a ValueError that names the file `name`."""
        try:
            yield
        except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and str(self.folder) in str(error):
                raise
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(
                f"{self.folder / name}: it does not fit the run: {reason:.300}"
            ) from error

    def tokenizer(self) -> WordPieceTokenizer:
        """Return the tokenizer of the run."""
        return WordPieceTokenizer.load(self.folder)


def save(
    output: Path,
    step: int,
    content: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
    tokenizer: StoredTokenizer,
    keep: int,
) -> None:
    """Write a checkpoint, then delete the checkpoints of later steps and the oldest checkpoints.

    Args:
        output: Folder of the run.
        step: Number of steps of the run so far, which names the checkpoint.
        content: The entries of ``state.json`` that the run adds to the step and the checksums.
        tensors: For each file of tensors, by its stem, the tensors by name.
        tokenizer: The tokenizer.
        keep: Number of newest checkpoints that are not deleted, at least 1.

    Raises:
        OSError: If a file cannot be written; the earlier checkpoints stay.
    """
    home, folder = output / CHECKPOINTS, folder_of(output, step)
    # An existing checkpoint of this step is damaged, because the run would otherwise have resumed
    # after this step.
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        # If the first checkpoint cannot be written, the empty folder ``checkpoints`` is removed.
        stack.callback(_remove_empty, home)
        new = stack.enter_context(commit.replacement(folder))
        for stem, named in tensors.items():
            safetensors_file.write(new / f"{stem}.safetensors", named)
        tokenizer.save(new)
        sums = {path.name: checksum(path) for path in sorted(new.iterdir())}
        whole = {"layout": LAYOUT, "step": step, "files": sums, **content}
        text = json.dumps({**whole, "checksum": _checksum_of(whole)}, indent=1)
        (new / STATE).write_text(text, encoding="utf-8")
    numbered = _numbered(home)
    # A checkpoint of a later step is damaged, because the run resumed from an earlier checkpoint.
    later = [path for number, path in numbered if number > step]
    earlier = [path for number, path in numbered if number <= step][keep:]
    for path in (*later, *earlier):
        shutil.rmtree(path, ignore_errors=True)


def folder_of(output: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return output / CHECKPOINTS / f"step-{step:08d}"


def exists(output: Path) -> bool:
    """Return whether a folder has a checkpoint, damaged or not."""
    return bool(_numbered(output / CHECKPOINTS))


def newest(output: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of a run, or None if the run has no checkpoint.

    Args:
        output: Folder of the run.
        say: Shows a line of text to the user, for each damaged checkpoint.

    Raises:
        ValueError: If all checkpoints are damaged.
    """
    numbered = _numbered(output / CHECKPOINTS)
    for _, folder in numbered:
        try:
            return read(folder)
        except (OSError, ValueError) as error:
            say(f"damaged checkpoint, an earlier one is tried: {error}")
    if numbered:
        raise ValueError(
            f"output: all checkpoints of {output} are damaged, "
            "allowed: a sound one, or overwrite=True (--overwrite), which starts anew"
        )
    return None


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint, and compare the checksums of its files with ``state.json``.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        ValueError: If the checkpoint is damaged or of another layout; the message names the file.
        OSError: If a file cannot be read.
    """
    path = folder / STATE
    content = json_file.read(path)
    if content.pop("checksum", None) != _checksum_of(content):
        raise ValueError(f"{path}: its content has another checksum than it says")
    if content.get("layout") != LAYOUT:
        raise ValueError(
            f"{path}: got the layout {content.get('layout')!r:.100}, allowed: {LAYOUT}"
        )
    _check_content(path, content)
    for name, expected in content["files"].items():
        _check_size(folder / name)
        if checksum(folder / name) != expected:
            raise ValueError(f"{folder / name}: its checksum is not the one in {STATE}")
    return Checkpoint(folder, content)


def _check_size(path: Path) -> None:
    """Raise ValueError if a file has a wrong size, so that no checksum of a huge file is computed.

    The size of a .safetensors file must match its header. All other files have a largest size.
    """
    if path.suffix == ".safetensors":
        safetensors_file.check_size(path)
    else:
        check_file(path, MOST_TOKENIZER_BYTES)


# The smallest allowed value of each integer in ``state.json``. All tasks store ``step``; the other
# integers depend on the task.
_INTEGERS = {
    **dict.fromkeys(("step", "processes", "accumulate"), 1),
    **dict.fromkeys(("epoch", "position", "tokens", "batches"), 0),
}
_NUMBERS = ("seconds", "before", "flops")
_KINDS = {"files": dict, "options": dict, "task": str, "data": str, "documents": str}
_REQUIRED = ("step", "seconds", "before", "files", "options")


def _check_content(path: Path, content: Mapping[str, Any]) -> None:
    """Raise ValueError if an entry that all tasks need is missing, or if a value is not allowed."""

    def refuse(name: str, allowed: str) -> ValueError:
        return ValueError(f"{path}: {name}: got {content[name]!r:.100}, allowed: {allowed}")

    for name in _REQUIRED:
        if name not in content:
            raise ValueError(f"{path}: {name}: got nothing, allowed: the state of a run")
    for name in _INTEGERS.keys() & content.keys():
        value, least = content[name], _INTEGERS[name]
        if type(value) is not int or not least <= value < MOST:
            raise refuse(name, f"an integer from {least} to {MOST - 1}")
    for name in set(_NUMBERS) & content.keys():
        value = content[name]
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise refuse(name, "a finite number >= 0")
    for name in _KINDS.keys() & content.keys():
        if not isinstance(content[name], _KINDS[name]):
            raise refuse(name, f"a {_KINDS[name].__name__}")
    figures = content.get("evaluation")
    if figures is not None and not (
        isinstance(figures, dict) and all(type(v) in (int, float) for v in figures.values())
    ):
        raise refuse("evaluation", "null, or numbers by their names")
    for name, value in content["files"].items():
        if not isinstance(value, str) or name in (".", "..") or re.search(r"[/\\\0]", name):
            raise refuse("files", "checksums by the names of files, without paths")


def forget(output: Path) -> None:
    """Delete all checkpoints of a run."""
    shutil.rmtree(output / CHECKPOINTS, ignore_errors=True)


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor, detached and on the CPU; the parts of a shared tensor are gathered.

    A shared tensor is one whose parts are on several processes (FSDP2). All of these processes must
    call this function.
    """
    return whole_here(tensor.detach()).cpu()


def whole_here(tensor: Tensor) -> Tensor:
    """Return a whole tensor on its device; the parts of a tensor shared by FSDP2 are gathered."""
    return tensor.full_tensor() if isinstance(tensor, _shared_type()) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that FSDP2 shares; return other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, _shared_type()) else tensor


def shared_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Divide a whole tensor among the processes in the same way as the tensor `like`.

    If `like` is not shared, the tensor is returned unchanged.
    """
    if not isinstance(like, _shared_type()):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    # All processes have read the same file, so no process needs to send data.
    whole = tensor.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _shared_type() -> Any:
    """Return the class of tensors that processes share; an empty tuple if none can exist yet."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name; a tied parameter appears once."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: whole(tensor) for name, tensor in named.items()}


def restore_weights(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Write saved parameters and buffers into a model.

    Raises:
        ValueError: If a name, a shape or a dtype differs from that of the model.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if named.keys() != saved.keys():
        other = sorted(named.keys() ^ saved.keys())
        raise ValueError(f"weights: got other names than the model has: {', '.join(other)}")
    for name, tensor in named.items():
        check_like(name, saved[name], tensor)
        tensor.detach().copy_(shared_like(saved[name], tensor))


def check_like(name: str, saved: Tensor, own: Tensor) -> None:
    """Raise ValueError if a saved tensor has another shape or dtype than the run's tensor `own`."""
    if saved.shape != own.shape or saved.dtype != own.dtype:
        raise ValueError(
            f"{name}: got {saved.dtype} of shape {tuple(saved.shape)}, allowed: {own.dtype} of "
            f"shape {tuple(own.shape)}"
        )


def moments_of(optimizer: Any) -> dict[str, Tensor]:
    """Return an optimizer's state; ``3.step`` is the key of the entry ``step`` of parameter 3."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": whole(value).clone()
        for number, entries in state.items()
        for name, value in entries.items()
    }


def restore_moments(optimizer: Any, saved: Mapping[str, Tensor]) -> None:
    """Give an optimizer the state that `moments_of` returned.

    Raises:
        ValueError: If an entry does not fit a parameter of the optimizer, or if a parameter has
            some of the entries but not all.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in saved.items():
        place, _, name = key.partition(".")
        if name not in MOMENTS or not place.isdecimal() or int(place) >= len(weights):
            raise ValueError(f"got {key!r:.100}, allowed: moments of {len(weights)} weights")
        weight = weights[int(place)]
        # The number of steps is a scalar, which the processes do not divide.
        counts = name == "step"
        check_like(key, value, torch.zeros(()) if counts else weight)
        own = value if counts else shared_like(value, weight)
        state.setdefault(int(place), {})[name] = own
    for number, entries in state.items():
        if entries.keys() != set(MOMENTS):
            raise ValueError(f"{number}: got {', '.join(entries)}, allowed: {', '.join(MOMENTS)}")
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _numbered(home: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in a folder with their steps, the newest first."""
    paths = home.iterdir() if home.is_dir() else ()
    numbered = [(int(match[1]), path) for path in paths if (match := NAME.match(path.name))]
    return sorted(numbered, reverse=True)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _checksum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
