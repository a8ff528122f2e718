"""Which implementation serves an operation, and why; the only reader of environment variables.

``FASTBERT_BACKEND`` is the preference of calls that name no backend. ``TRITON_INTERPRET=1``, which
is Triton's own, lets Triton kernels run on CPU tensors. The extension reads ``FASTBERT_CPU_ISA``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

BACKENDS = ("reference", "triton", "cuda", "cpu")
LOW_PRECISION = (torch.float32, torch.float16, torch.bfloat16)
ALL_DTYPES = (*LOW_PRECISION, torch.float64)
# The order in which ``backend=None`` tries them; the first that serves is taken.
ORDER = {"cuda": ("triton", "cuda", "reference"), "cpu": ("cpu", "reference")}
OTHER_DEVICE = ("reference",)
# Equal to kernels.tiles.LARGEST_ROW, which cannot be read where Triton is missing.
LARGEST_TRITON_ROW = 8192


class Choice(NamedTuple):
    """A resolved backend and the reason in words."""

    backend: str
    reason: str


class Request(NamedTuple):
    """What a call needs of a backend.

    ``device`` is the device type, such as "cpu" or "cuda". ``transformed`` says that a transform of
    torch.func or forward-mode AD is active.
    """

    device: str
    dtype: torch.dtype
    head_dim: int = 0
    activation: str = "gelu"
    columns: int = 0
    transformed: bool = False


def serves_all(request: Request) -> str | None:
    """Refuse nothing."""
    return None


def refuse_wide_rows(request: Request) -> str | None:
    """For kernels that hold a whole row in registers; see ``kernels/tiles.py``."""
    if request.columns <= LARGEST_TRITON_ROW:
        return None
    return f"it takes rows of up to {LARGEST_TRITON_ROW} elements, not {request.columns}"


@dataclass(frozen=True)
class Implementation:
    """One row of an operation's backend table.

    ``forward`` and ``backward`` take the operator's arguments; ``dtypes`` are the inputs they
    accept; ``refuses`` returns the reason why a request cannot be served, or None.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] = LOW_PRECISION
    refuses: Callable[[Request], str | None] = serves_all


TABLES: dict[str, dict[str, Implementation]] = {}


def _load_extension() -> tuple[Any, str]:
    try:
        extension = importlib.import_module("fastbert._C")
    except ModuleNotFoundError:
        why = "it was not built: no C++ compiler or no Python.h at installation"
        return None, f"the extension fastbert._C is missing ({why})"
    except ImportError as error:
        return None, f"the extension fastbert._C does not load ({error})"
    built = extension.build_info()["torch"]
    if built.split("+")[0] != torch.__version__.split("+")[0]:
        return None, (
            f"the extension fastbert._C was built for torch {built}, this is torch "
            f"{torch.__version__}: reinstall fastbert with --no-build-isolation"
        )
    return extension, "built"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


EXTENSION, EXTENSION_STATE = _load_extension()
EXTENSION_HAS_CUDA = EXTENSION is not None and bool(EXTENSION.build_info()["cuda"])
HAS_TRITON = _has_triton()
DEFAULT_REQUEST = os.environ.get("FASTBERT_BACKEND") or None
_interpreted = os.environ.get("TRITON_INTERPRET") == "1"


def enable_interpreter() -> None:
    """Lets Triton kernels run on CPU tensors, slowly; must come before the first kernel is loaded.

    Raises RuntimeError when kernels were already loaded for a GPU.
    """
    global _interpreted
    if not _interpreted and any(name.startswith("fastbert.kernels.") for name in sys.modules):
        raise RuntimeError(
            "TRITON_INTERPRET: the Triton kernels are already loaded for a GPU; set "
            "TRITON_INTERPRET=1 before Python starts"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    _interpreted = True


def interpreted() -> bool:
    """Tell whether Triton kernels run in the interpreter."""
    return _interpreted


def compiler_environment(cache: Path | None = None) -> dict[str, str]:
    """The environment of a child process that compiles the Triton kernels for GPUs.

    ``cache`` is the folder of Triton's cache, its own default without one.
    """
    # Triton 3.10 flips the default of the fusion, which moves last bits.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    return environment if cache is None else {**environment, "TRITON_CACHE_DIR": str(cache)}


def unavailable(backend: str, device: str) -> str | None:
    """Why ``backend`` cannot run on tensors of ``device`` on this machine; None when it can."""
    if backend == "reference":
        return None
    if backend == "triton":
        if not HAS_TRITON:
            return "triton is not installed"
        if device == "cpu" and not _interpreted:
            return "Triton runs on CPU tensors only in its interpreter (TRITON_INTERPRET=1)"
        return None if device in ("cpu", "cuda") else f"there are no Triton kernels for {device}"
    if device != backend:
        return f"it takes {backend} tensors, these are on {device}"
    if EXTENSION is None:
        return EXTENSION_STATE
    if backend == "cuda" and not EXTENSION_HAS_CUDA:
        return "the extension was built without CUDA"
    return None


def refusal(op: str, backend: str, request: Request) -> str | None:
    """Why ``backend`` cannot serve this request for ``op``; None when it can."""
    implementation = TABLES[op].get(backend)
    if implementation is None:
        return f"there is no {backend} implementation of {op} yet"
    reason = unavailable(backend, request.device)
    if reason is not None:
        return reason
    if request.dtype not in implementation.dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in implementation.dtypes)
        return f"it takes {names}, not {str(request.dtype).removeprefix('torch.')}"
    if request.transformed and backend != "reference":
        return "torch.func's transforms and forward-mode AD look through plain PyTorch only"
    return implementation.refuses(request)


def validate(backend: str | None) -> str | None:
    """``backend`` itself if it is None or a known name. Raises ValueError otherwise."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, allowed: None, {', '.join(BACKENDS)}")
    return backend


def resolve(op: str, requested: str | None, request: Request) -> Choice:
    """The backend for one call and why.

    An explicit request is served or refused with ValueError. ``None`` prefers FASTBERT_BACKEND
    where that implements ``op``, else takes the first of ``ORDER`` that serves; the reason lists
    what the ones before it lacked.
    """
    requested = prefer(op, DEFAULT_REQUEST) if requested is None else validate(requested)
    if requested is not None:
        reason = refusal(op, requested, request)
        if reason is not None:
            raise ValueError(f"backend: {requested!r} cannot serve {op}: {reason}")
        return Choice(requested, "asked for")
    passed: list[str] = []
    for backend in ORDER.get(request.device, OTHER_DEVICE):
        reason = refusal(op, backend, request)
        if reason is None:
            return Choice(backend, "; ".join(passed) or "first choice on this device")
        passed.append(f"{backend}: {reason}")
    raise ValueError(f"backend: none serves {op}: {'; '.join(passed)}")


def prefer(op: str, requested: str | None) -> str | None:
    """For a whole model built with one ``backend``: the request for each of its operations.

    An operation without any implementation in that backend resolves by itself (None); ``fastbert
    info`` and ``Model.backends()`` list which those are.
    """
    return None if validate(requested) is None or requested not in TABLES[op] else requested
