"""The parts of a data set: training, validation and test."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from fastbert.text_file import content_name

# The names that files and subfolders of each part may have.
NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev", "testa"),
    "test": ("test", "testb"),
}
# The name of a shard of a part, in the format of the Hugging Face library datasets.
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\..+)")
Item = TypeVar("Item")


def find_parts(
    data: Path, given: Mapping[str, Path | None], formats: Sequence[str], *, folders: bool
) -> dict[str, list[Path]]:
    """Find the files or the folder of each part.

    If `data` is a file, it is the training part. In a folder, a part is the file whose name begins
    or ends with the name of the part, such as ``train.csv``, ``dev-v2.0.json`` or
    ``de-train.conllu``. A part may also be the subfolder with this name, or all its shards, such as
    ``train-00000-of-00002.parquet``. A file may be compressed, as ``train.csv.gz``.

    Args:
        data: A file or a folder.
        given: The paths of parts that the caller names, which replace the parts in `data`.
        formats: The suffixes of files, in lower case.
        folders: Whether a part may be a folder.

    Returns:
        The paths of each part. Only a sharded part has several paths, and the training part is
        always present.

    Raises:
        FileNotFoundError: If a path does not exist, or if a shard is missing.
        ValueError: If there is no training part, or if there are several candidates for a part.
    """
    for name, path in {"data": data, **given}.items():
        if path is not None and not path.exists():
            raise FileNotFoundError(f"{name}: {path} does not exist, allowed: a file or a folder")
    parts = {} if data.is_dir() else {"train": [data]}
    if data.is_dir():
        for part, names in NAMES.items():
            paths = [path for path in sorted(data.iterdir()) if _is_part(path, names, formats)]
            paths = [path for path in paths if folders or path.is_file()]
            if paths and not _are_shards(paths) and len(paths) > 1:
                listed = ", ".join(path.name for path in paths)
                raise ValueError(
                    f"data: {data} has several files for the part {part}: {listed}; allowed: one, "
                    "its shards, or the path of the file itself"
                )
            if paths:
                parts[part] = paths
    parts |= {name: [path] for name, path in given.items() if path is not None}
    if "train" not in parts:
        kinds = ", ".join(f"train{suffix}" for suffix in formats)
        folder = ", or the folder train" if folders else ""
        raise ValueError(f"data: {data} has no training part, allowed: {kinds}{folder}")
    return parts


def _is_part(path: Path, names: Sequence[str], formats: Sequence[str]) -> bool:
    if path.is_dir():
        return path.name in names
    name = Path(content_name(path).lower())
    stem, suffix = name.stem, name.suffix
    # The files of CoNLL 2003 are named eng.train, eng.testa and eng.testb.
    if suffix[1:] in names:
        return suffix in formats
    first, *_, last = re.split(r"[-_.]", f"{stem}.{stem}")
    word = first if any(first in others for others in NAMES.values()) else last
    return word in names and suffix in formats


def _are_shards(paths: Sequence[Path]) -> bool:
    """Return whether files are the shards of one part.

    Raises:
        FileNotFoundError: If all files are shards of one part, and one of its shards is missing.
    """
    matches = [_SHARD.fullmatch(path.name) for path in paths]
    names = {(match[1], match[3], match[4]) if match else None for match in matches}
    if len(names) > 1 or None in names:
        return False
    ((stem, count, suffix),) = filter(None, names)
    there = {int(match[2]) for match in matches if match}
    for number in range(int(count)):
        if number not in there:
            name = f"{stem}-{number:05}-of-{count}{suffix}"
            raise FileNotFoundError(f"data: the shard {paths[0].parent / name} is missing")
    return len(paths) == int(count)


def hold_out(
    items: Sequence[Item], fraction: float, seed: int, group: Callable[[Item], Hashable]
) -> tuple[list[Item], list[Item]]:
    """Divide the training part into examples to train on and examples for validation.

    Args:
        items: The examples of the training part.
        fraction: Fraction of the groups that is held out, in [0, 1). A fraction above 0 holds out
            at least one group.
        seed: Seed of the random choice of groups.
        group: Function from an example to its group. Examples of one group stay together.

    Returns:
        The examples to train on and the held-out examples, both in their original order.

    Raises:
        ValueError: If no example is left for the training.
    """
    if fraction == 0:
        return list(items), []
    groups = list(dict.fromkeys(map(group, items)))
    held = max(1, round(len(groups) * fraction))
    if held >= len(groups):
        raise ValueError(
            f"held_out: got {fraction} of {len(groups)} examples or contexts, which leaves none to "
            "train on; allowed: more data, a smaller number, or 0"
        )
    random.Random(seed).shuffle(groups)
    chosen = set(groups[:held])
    return (
        [item for item in items if group(item) not in chosen],
        [item for item in items if group(item) in chosen],
    )
