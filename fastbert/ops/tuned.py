"""The table that ``fastbert tune`` writes for this machine's GPU: times, paths and tiles.

The table holds for one GPU, one driver and one set of versions, which name its file. With other
versions there is another file, so an old table is never used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fastbert.version
from fastbert.ops.gpu_times import Point

# The file of the running Linux kernel module of the NVIDIA driver.
DRIVER = Path("/sys/module/nvidia/version")


class Tuned(NamedTuple):
    """The content of a table.

    Args:
        points: The times by which ``backend=None`` chooses a backend.
        choices: What the Triton kernels choose by themselves, as `kernels.tiles.TUNED` holds it.
    """

    points: tuple[Point, ...] = ()
    choices: dict[str, dict[int, Any]] = {}  # noqa: RUF012 - it is never changed


def key() -> dict[str, str | None]:
    """Return what a table holds for: the GPU, its driver, and the versions of the compilers."""
    triton = None
    if importlib.util.find_spec("triton") is not None:
        triton = importlib.metadata.version("triton")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "fastbert": fastbert.version.__version__,
        "torch": torch.__version__,
        "triton": triton,
    }


def _driver() -> str:
    """Return the version of the driver, or that of the CUDA that it supports."""
    try:
        return DRIVER.read_text(encoding="utf-8").strip()
    except OSError:
        return f"for CUDA {torch._C._cuda_getDriverVersion()}"


def path(folder: Path, named: dict[str, str | None]) -> Path:
    """Return the file of the table that holds for `named`, a result of `key`."""
    digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:12]
    gpu = re.sub(r"[^a-z0-9]+", "-", (named["gpu"] or "").lower()).strip("-")
    return folder / f"{gpu}-{digest}.json"


def content_of(named: dict[str, str | None], tuned: Tuned) -> dict[str, Any]:
    """Return the content of the file of a table."""
    points = [point._asdict() for point in tuned.points]
    return {"key": named, "points": points, "choices": tuned.choices}


def read(file: Path, named: dict[str, str | None]) -> Tuned:
    """Return the table in a file; without a file, it is empty.

    A file that cannot be read, or that holds for another GPU or version, gives a warning and an
    empty table, because a call must not fail for it.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["key"] != named:
            raise ValueError(f"holds for {content['key']}, this is {named}")
        points = tuple(Point(**row) for row in content["points"])
        choices = {
            name: {int(size): choice for size, choice in by_size.items()}
            for name, by_size in content["choices"].items()
        }
    except FileNotFoundError:
        return Tuned()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"{file}: the table of `fastbert tune` is not used ({reason}); run the command again",
            stacklevel=2,
        )
        return Tuned()
    return Tuned(points, choices)
