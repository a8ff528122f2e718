"""The choice of a backend for each call, the reason for the choice, and environment variables.

No other Python file of the package reads ``os.environ``. ``FASTBERT_BACKEND`` names the preferred
backend of calls with ``backend=None``. ``TRITON_INTERPRET=1``, a variable of Triton, lets Triton
kernels run on CPU tensors. torchrun sets ``LOCAL_WORLD_SIZE``, the number of its processes on this
machine. The C++ extension reads ``FASTBERT_CPU_ISA``, the instruction set of its kernels.

A stand-in runs the kernels of a GPU backend on CPU tensors. There are two stand-ins. Triton's
interpreter runs the Python source of Triton kernels. The PTX machine (fastbert/testing/ptx) runs
the compiled code of Triton and of CUDA C++ kernels.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastbert.ops import gpu_times, tuned

BACKENDS = ("reference", "triton", "cuda", "cpu")
LOW_PRECISION = (torch.float32, torch.float16, torch.bfloat16)
ALL_DTYPES = (*LOW_PRECISION, torch.float64)
# The backends of each device type, in the order in which ``backend=None`` tries them. On a GPU,
# measured times (fastbert/ops/gpu_times.py) take precedence over this order.
ORDER = {"cuda": ("triton", "cuda", "reference"), "cpu": ("cpu", "reference")}
OTHER_DEVICE = ("reference",)
OLDEST_CAPABILITY = (8, 0)
# This number equals LARGEST_ROW of kernels.tiles. That module cannot be imported without Triton.
LARGEST_TRITON_ROW = 8192


class Choice(NamedTuple):
    """The backend that was chosen for a call, and the reason in words."""

    backend: str
    reason: str


class Request(NamedTuple):
    """The properties of a call that decide which backends can serve it.

    Args:
        device: Device type, such as "cpu" or "cuda".
        dtype: Dtype of the inputs.
        head_dim: Head dim of attention.
        options: Names of the options of attention in this call that some backends refuse: "bias",
            "window", "weights" (the softmax weights are returned) and "scale" (the scale is 0 or
            less).
        activation: Name of the activation of a feed-forward.
        columns: Number of columns of the rows of a norm or an embedding, or of the left operand of
            a product on a GPU.
        transformed: Whether a transform of torch.func or forward-mode AD is active.
        length: Length of the longest key sequence in attention on a GPU, rounded by
            `gpu_times.length_class`.
        rows: Number of rows of a product on a GPU, rounded by `gpu_times.rows_class`.
        trained: On a GPU, whether a gradient is wanted, so that the time of the backward pass
            counts.
    """

    device: str
    dtype: torch.dtype
    head_dim: int = 0
    options: tuple[str, ...] = ()
    activation: str = "gelu"
    columns: int = 0
    transformed: bool = False
    length: int = 0
    rows: int = 0
    trained: bool = False


def serves_all(request: Request) -> str | None:
    """Return None for every request; the default of `Implementation.refuses`."""
    return None


def refuse_wide_rows(request: Request) -> str | None:
    """Return why rows are too wide for Triton kernels that hold a row in registers, or None."""
    if request.columns <= LARGEST_TRITON_ROW:
        return None
    return f"rows have {request.columns} elements, allowed: up to {LARGEST_TRITON_ROW}"


@dataclass(frozen=True)
class Implementation:
    """The implementation of an operation by one backend: an entry of `TABLES`.

    Args:
        forward: Function that takes the arguments of the operator, without the backend. Only the
            functions of attention and of the feed-forward take other arguments (see their modules).
        backward: Function that takes the arguments of the backward operator, without the backend,
            with the same exceptions.
        dtypes: Allowed dtypes of the inputs.
        refuses: Function that returns the reason why a request cannot be served, or None.
        is_partial: Whether the backend serves only some calls. If a model requests a partial
            backend, each operation chooses its backend itself (see `prefer`).
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] = LOW_PRECISION
    refuses: Callable[[Request], str | None] = serves_all
    is_partial: bool = False


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
    # `python -m benchmarks.cpu tiles` writes tile_schedule.json on a processor with AMX.
    recorded = json.loads(Path(__file__).with_name("tile_schedule.json").read_text("utf-8"))
    extension.set_tile_schedule(recorded["schedule"])
    return extension, "built"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


EXTENSION, EXTENSION_STATE = _load_extension()
EXTENSION_HAS_CUDA = EXTENSION is not None and bool(EXTENSION.build_info()["cuda"])
# The architectures of the extension's CUDA code, in the format of TORCH_CUDA_ARCH_LIST; "" without
# CUDA code.
CUDA_ARCHS = EXTENSION.build_info()["cuda_archs"] if EXTENSION_HAS_CUDA else ""
# The reason why the extension was built without CUDA code, recorded by setup.py; "" otherwise.
WITHOUT_CUDA = "" if EXTENSION is None else EXTENSION.build_info().get("without_cuda", "")
HAS_TRITON = _has_triton()
DEFAULT_REQUEST = os.environ.get("FASTBERT_BACKEND") or None
INTERPRETER = "Triton's interpreter"
# The name of the stand-in that runs the kernels of a GPU backend on CPU tensors, by backend.
_stand_ins = {"triton": INTERPRETER} if os.environ.get("TRITON_INTERPRET") == "1" else {}


def enable_interpreter() -> None:
    """Let Triton kernels run on CPU tensors, in Triton's interpreter, which is slow.

    Raises:
        RuntimeError: If Triton kernels are already loaded for a GPU.
    """
    if not interpreted() and any(name.startswith("fastbert.kernels.") for name in sys.modules):
        raise RuntimeError(
            "TRITON_INTERPRET: the Triton kernels are already loaded for a GPU; set "
            "TRITON_INTERPRET=1 before Python starts"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    _stand_ins["triton"] = INTERPRETER


def interpreted() -> bool:
    """Tell whether Triton kernels run in the interpreter."""
    return _stand_ins.get("triton") == INTERPRETER


@contextmanager
def standing_in(name: str, backend: str) -> Iterator[None]:
    """Let `backend` serve CPU tensors inside a with block, where a stand-in runs its kernels.

    The caller must make the kernels of the backend run on the stand-in.

    Args:
        name: The stand-in, such as "the PTX machine".
        backend: "triton" or "cuda".

    Raises:
        RuntimeError: If the Triton kernels were loaded for Triton's interpreter, because such
            kernels cannot be compiled.
    """
    if _stand_ins.get(backend) == INTERPRETER:
        raise RuntimeError(
            f"TRITON_INTERPRET: the Triton kernels are loaded for the interpreter, so that {name} "
            "cannot run them; set TRITON_INTERPRET=0 before Python starts"
        )
    before = _stand_ins.get(backend)
    _stand_ins[backend] = name
    try:
        yield
    finally:
        if before is None:
            del _stand_ins[backend]
        else:
            _stand_ins[backend] = before


def processes_here() -> int:
    """Return the number of processes that torchrun runs on this machine, 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def compiler_environment(cache: Path | None = None) -> dict[str, str]:
    """Return the environment of a child process that compiles the Triton kernels for GPUs.

    Args:
        cache: Folder of Triton's cache; None leaves the setting of this process.
    """
    # TRITON_DEFAULT_FP_FUSION is set here, because Triton 3.10 has another default than Triton 3.9,
    # and this setting changes the last bits of results.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    return environment if cache is None else {**environment, "TRITON_CACHE_DIR": str(cache)}


@functools.cache
def capability() -> tuple[int, int] | None:
    """Return the compute capability of the current GPU, or None without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def user_cache() -> Path:
    """Return the folder for files that fastbert can make again, which may not exist yet.

    It is ``fastbert`` in the folder that XDG_CACHE_HOME names, by default ``~/.cache``.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fastbert")


def tuned_file() -> Path:
    """Return the file of the table of ``fastbert tune`` for the current GPU."""
    return tuned.path(user_cache() / "gpu-times", tuned.key())


@functools.cache
def tuned_table() -> tuned.Tuned:
    """Return the table of ``fastbert tune`` for the current GPU; it is empty if there is none.

    The paths and tiles of the table are given to the Triton kernels.
    """
    if capability() is None:
        return tuned.Tuned()
    table = tuned.read(tuned_file(), tuned.key())
    if table.choices and HAS_TRITON:
        tiles = importlib.import_module("fastbert.kernels.tiles")
        tiles.TUNED.update(table.choices)
    return table


def refuse_old_gpu() -> str | None:
    """Return the reason why the current GPU cannot run the kernels, or None if it can."""
    arch = capability()
    if arch is None or arch >= OLDEST_CAPABILITY:
        return None
    return (
        f"the GPU has compute capability {arch[0]}.{arch[1]}, allowed: 8.0 and higher (older "
        "matrix units lack bf16 and the operand layouts of the kernels)"
    )


def refuse_missing_code() -> str | None:
    """Return the reason why the extension's CUDA code does not run on the current GPU, or None.

    Machine code runs on later GPUs with the same major compute capability. Machine code for an
    architecture whose name ends in a letter, such as 9.0a, runs on that architecture only. PTX,
    marked by "+PTX", runs on every later GPU.
    """
    arch = capability()
    if arch is None:
        return None
    for name in CUDA_ARCHS.split(";"):
        number = name.removesuffix("+PTX")
        major, _, minor = number.rstrip("af").partition(".")
        built = (int(major or 0), int(minor or 0))
        alone = not number.endswith(minor)
        if built == arch or (
            not alone and built <= arch and (built[0] == arch[0] or name.endswith("+PTX"))
        ):
            return None
    return (
        f"the GPU has compute capability {arch[0]}.{arch[1]}, the extension was built for "
        f"{CUDA_ARCHS}"
    )


def unavailable(backend: str, device: str) -> str | None:
    """Return the reason why `backend` cannot run on `device` on this machine, or None if it can."""
    if backend == "reference":
        return None
    if backend == "cuda" and device == "cpu" and backend in _stand_ins:
        return None
    if backend == "triton":
        if not HAS_TRITON:
            return "triton is not installed"
        if device == "cpu" and backend not in _stand_ins:
            return (
                "Triton runs on CPU tensors only in its interpreter (TRITON_INTERPRET=1) or on the "
                "PTX machine (fastbert check --emulate)"
            )
        if device == "cuda":
            return refuse_old_gpu()
        return None if device == "cpu" else f"there are no Triton kernels for {device}"
    if device != backend:
        return f"the tensors are on {device}, allowed: {backend}"
    if EXTENSION is None:
        return EXTENSION_STATE
    if backend == "cuda" and not EXTENSION_HAS_CUDA:
        return f"the extension was built without CUDA: {WITHOUT_CUDA}"
    return (refuse_old_gpu() or refuse_missing_code()) if backend == "cuda" else None


def refusal(op: str, backend: str, request: Request) -> str | None:
    """Return the reason why `backend` cannot serve a request for `op`, or None if it can."""
    implementation = TABLES[op].get(backend)
    if implementation is None:
        return f"{op} has no {backend} implementation"
    reason = unavailable(backend, request.device)
    if reason is not None:
        return reason
    if request.dtype not in implementation.dtypes:
        names = ", ".join(map(dtype_name, implementation.dtypes))
        return f"the dtype is {dtype_name(request.dtype)}, allowed: {names}"
    if request.transformed and backend != "reference":
        return "transforms of torch.func and forward-mode AD need plain PyTorch, the reference"
    return implementation.refuses(request)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as in commands and result files, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def validate(backend: str | None) -> str | None:
    """Return `backend` if it is None or a known name; raise ValueError otherwise."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, allowed: None, {', '.join(BACKENDS)}")
    return backend


def resolve(op: str, requested: str | None, request: Request) -> Choice:
    """Choose the backend of a call.

    Args:
        op: Name of the operation.
        requested: The backend to use. None takes the backend that FASTBERT_BACKEND names, if that
            backend implements `op` and is not partial. Otherwise None takes the first backend that
            can serve the call. The order is that of the measured times if there are any for the
            GPU, and otherwise that of ``ORDER``.
        request: Properties of the call.

    Returns:
        The backend and the reason. With None, the reason names the backends that refused the call
        and why they refused it, and on a GPU the times of the backends.

    Raises:
        ValueError: If the backend that `requested` or FASTBERT_BACKEND names is unknown or cannot
            serve the call, or if no backend can.
    """
    if torch.compiler.is_compiling():
        return _resolve(op, requested, request)
    # The key contains all facts on which a choice depends. The identities of the implementations
    # are among them, because an implementation may be added to a table or removed from it.
    rows = tuple(map(id, TABLES[op].values()))
    installed = (EXTENSION is None, EXTENSION_STATE, EXTENSION_HAS_CUDA, HAS_TRITON)
    key = (op, requested, request, DEFAULT_REQUEST, rows, installed, tuple(_stand_ins.items()))
    choice = _choices.get(key)
    if choice is None:
        choice = _choices[key] = _resolve(op, requested, request)
    return choice


# The choices that `resolve` has made, by key. There are few different keys, because lengths and
# numbers of rows are rounded to classes.
_choices: dict[tuple[Any, ...], Choice] = {}


def _resolve(op: str, requested: str | None, request: Request) -> Choice:
    if request.device == "cuda":
        _load_tuned()
    requested = prefer(op, DEFAULT_REQUEST) if requested is None else validate(requested)
    if requested is not None:
        reason = refusal(op, requested, request)
        if reason is not None:
            raise ValueError(f"backend: {requested!r} cannot serve {op}: {reason}")
        return Choice(requested, "asked for")
    order: tuple[str, ...] = ORDER.get(request.device, OTHER_DEVICE)
    times = ""
    if request.device == "cuda":
        place = (request.columns, request.rows)
        if op == "attention":
            place = (request.head_dim, request.length)
        width, size = map(int, place)
        order, times = _order_on_gpu(op, dtype_name(request.dtype), width, size, request.trained)
    passed: list[str] = []
    for backend in order:
        reason = refusal(op, backend, request)
        if reason is None:
            words = [*passed, times] if times else passed
            return Choice(backend, "; ".join(words) or "first choice on this device")
        passed.append(f"{backend}: {reason}")
    raise ValueError(f"backend: none can serve {op}: {'; '.join(passed)}")


def _order_on_gpu(
    op: str, dtype: str, width: int, size: int, trained: bool
) -> tuple[tuple[str, ...], str]:
    """Return the backends in order of preference, and their times as text, or "" without times."""
    arch = capability()
    if arch is None:
        return ORDER["cuda"], ""
    point = gpu_times.nearest(tuned_table().points, op, arch, dtype, width, size)
    point = point or gpu_times.nearest(gpu_times.POINTS, op, arch, dtype, width, size)
    times = "" if point is None else gpu_times.reason(point, trained)
    return gpu_times.order(point, trained, ORDER["cuda"]), times


# torch.compile calls `_order_on_gpu` and `_load_tuned` while it traces, and takes the result as a
# constant. The attribute has the effect of the decorator torch.compiler.assume_constant_result. The
# decorator itself would import torch._dynamo, which takes seconds.
_order_on_gpu._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _load_tuned() -> bool:
    """Give the choices of ``fastbert tune`` to the kernels, whichever backend a call requests."""
    return bool(tuned_table().choices)


_load_tuned._dynamo_marked_constant = True  # type: ignore[attr-defined]


def prefer(op: str, requested: str | None) -> str | None:
    """Return `requested` if that backend implements `op` and is not partial, or None otherwise.

    A model calls this function for each operation, to decide whether to ask for the backend of the
    model. If the result is None, the operation chooses the backend. ``fastbert info`` and
    ``model.backends()`` show the resulting backends.

    Raises:
        ValueError: If `requested` is unknown.
    """
    row = None if requested is None else TABLES[op].get(validate(requested) or "")
    return None if row is None or row.is_partial else requested
