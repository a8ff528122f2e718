"""A mocked GPU, with which any machine can measure the CPU time of a GPU call.

The mock consists of two libraries. ``device.cpp`` adds the device "cuda" to a torch that was built
without CUDA. ``driver.cpp`` is a CUDA driver that accepts launches and executes nothing. All code
between the two is real: torch's dispatcher and autograd, and Triton's compiler, binder and
launcher. Results are therefore meaningless, and times do not include a real driver. On a real
machine, a launch takes 2 to 3 µs more in ``cuLaunchKernelEx``, and a matrix product a few µs more
in cuBLAS.

The libraries must be loaded before torch. A parent process therefore calls `environment` and starts
a child process, which calls `activate` first.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import torch

from fastbert.ops.backend import compiler_environment

SOURCES = Path(__file__).resolve().parent
DRIVER, DEVICE = "libcuda.so.1", "libmocked_cuda.so"
PROPERTIES = SimpleNamespace(
    name="mocked",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    shared_memory_per_block_optin=227 * 1024,
)


def build(folder: Path) -> None:
    """Compile both libraries into `folder`, unless they are newer than their sources.

    Raises:
        subprocess.CalledProcessError: If the compiler fails.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder = Path(spec.origin).parent
    include = torch_folder / "include"
    flags = ["-shared", "-fPIC", "-O1", "-std=c++20"]
    libraries = torch_folder / "lib"
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"]
    commands = {
        DRIVER: ("driver.cpp", [f"-Wl,-soname,{DRIVER}"]),
        DEVICE: (
            "device.cpp",
            [f"-I{include}", f"-I{include}/torch/csrc/api/include", *links],
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, (source, options) in commands.items():
        path, library = SOURCES / source, folder / name
        if library.exists() and library.stat().st_mtime > path.stat().st_mtime:
            continue
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            made = Path(temporary, name)
            subprocess.run(["g++", *flags, path, "-o", made, *options], check=True)
            made.replace(library)


def environment(folder: Path) -> dict[str, str]:
    """Build the libraries, and return the environment variables that load them in a child process.

    Args:
        folder: Folder for the libraries.
    """
    build(folder)
    libraries = ":".join(str(folder / name) for name in (DEVICE, DRIVER))
    own = {"LD_PRELOAD": libraries, "TRITON_LIBCUDA_PATH": str(folder)}
    return compiler_environment() | own


def is_loaded() -> bool:
    """Return whether this process was started with the variables of `environment`."""
    return hasattr(torch.ops.mocked_cuda, "take_waits")


def activate() -> None:
    """Make torch.cuda report one device; the process needs the variables of `environment`.

    Raises:
        RuntimeError: If the libraries are not loaded.
    """
    if not is_loaded():
        raise RuntimeError("LD_PRELOAD: got no mocked GPU, allowed: mocked_cuda.environment(...)")
    # Compilers that this process starts must not load the libraries.
    os.unsetenv("LD_PRELOAD")
    # A CPU build of torch lacks these functions. The device and the stream always have number 0.
    for name in (
        "_cuda_getDevice",
        "_cuda_setDevice",
        "_cuda_exchangeDevice",
        "_cuda_maybeExchangeDevice",
        "_cuda_getCurrentRawStream",
        "_cuda_synchronize",
    ):
        setattr(torch._C, name, lambda *arguments: 0)
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = lambda device: 0
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: (PROPERTIES.major, PROPERTIES.minor)
    torch.cuda.get_device_properties = lambda device=None: PROPERTIES
    torch.cuda.get_device_name = lambda device=None: "a mocked GPU"
    torch._C._cuda_getDriverVersion = lambda: 13000
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True


def launches() -> int:
    """Return the number of launches of Triton kernels in this process."""
    count = ctypes.CDLL(DRIVER).mocked_launches
    count.restype = ctypes.c_int64
    return count()


def waits() -> list[str]:
    """Return and clear the list of operators that would have made the CPU wait for the GPU."""
    return torch.ops.mocked_cuda.take_waits()


def leave() -> NoReturn:
    """End this process without the shutdown of Python.

    A thread of autograd may still free tensors of the last backward. The shutdown would interrupt
    this thread, and the process would abort.
    """
    sys.stdout.flush()
    os._exit(0)
