"""Compile CUDA C++ with nvcc, and run its kernels on the PTX machine.

The CPU code of the ``.cu`` files runs as nvcc compiled it. This code is linked with
cuda_runtime.cpp, which turns a launch into a call of `CudaLibrary` with the kernel's name and
arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from fastbert.testing.ptx import nvcc
from ptxmachine import Module, PtxFault, Report, limits, load

_ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p), ctypes.c_ulonglong,
)  # fmt: skip
_OF_KERNEL = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_uint),
)  # fmt: skip


class CudaLibrary:
    """A shared library of ``.cu`` files whose kernels run on the PTX machine.

    Args:
        sources: The ``.cu`` files.
        folder: An existing folder for the compiled files.
        arch: Architecture of the GPU, such as ``"90a"``.
        flags: Further flags of nvcc, such as ``-I``.

    Attributes:
        arch: Architecture of the GPU.
        functions: The library's functions, through ctypes.
        modules: The PTX modules of the sources. A test may replace a module.
        reports: Readable name and report of each launch so far.
        on_launch: A function that replaces the launches; None runs them. Its arguments are the
            mangled name of the kernel, the grid, and a function that runs the launch with the
            keyword arguments of `Module.launch`. Such a launch has no report.

    Raises:
        FileNotFoundError: If nvcc is not on the path.
        RuntimeError: If a file does not compile. The message is the output of the compiler.
    """

    def __init__(
        self, sources: Sequence[Path], folder: Path, arch: str, flags: Sequence[str] = ()
    ) -> None:
        """Compile the files, and link them with the runtime of the PTX machine."""
        if shutil.which("nvcc") is None:
            raise FileNotFoundError("nvcc is not on the path: the CUDA toolkit compiles .cu files")
        self.arch = arch
        with ThreadPoolExecutor() as pool:
            compiled = list(
                pool.map(lambda source: nvcc.compiled(source, folder, arch, flags), sources)
            )
        self.modules = [
            load(ptx.read_text(encoding="utf-8")) for _, files in compiled for ptx in files
        ]
        objects = [object_file for object_file, _ in compiled]
        library = folder / f"lib{arch}.so"
        runtime = Path(__file__).with_name("cuda_runtime.cpp")
        nvcc.run([
            "nvcc", "-shared", "-std=c++17", "-Xcompiler", "-fPIC", "--cudart", "none", runtime,
            *objects, "-o", library,
        ])  # fmt: skip
        self.functions = ctypes.CDLL(str(library))
        self.reports: list[tuple[str, Report]] = []
        self.options: dict[str, Any] = {}
        self.on_launch: Callable[[str, list[int], Callable[..., Report]], None] | None = None
        self._memory: list[Tensor] = []
        self._fault: BaseException | None = None
        self._callbacks = _ON_LAUNCH(self._launch), _OF_KERNEL(self._bounds)
        self.functions.fastbert_ptx_set_callbacks(*self._callbacks)
        self.set_multiprocessors(132)

    def set_multiprocessors(self, number: int) -> None:
        """Set the number of multiprocessors that the launchers see; the default is 132."""
        target = f"sm_{self.arch}"
        device = (
            limits.architecture(target), number, limits.STATIC_SHARED, limits.most_shared(target),
            limits.THREADS, *limits.BLOCK, *limits.GRID, limits.most_cluster(target),
            limits.MAP_BOX, limits.MAP_STRIDE_END,
        )  # fmt: skip
        # The order of the numbers is the order of the fields of `Device` in cuda_runtime.cpp.
        self.functions.fastbert_ptx_set_device((ctypes.c_uint64 * len(device))(*device))

    def call(self, name: str, *args: Any, memory: Sequence[Tensor], **options: Any) -> int:
        """Call a function of the library that launches kernels.

        Args:
            name: Name of an ``extern "C"`` function that returns an int.
            args: Arguments of the function, as ctypes takes them.
            memory: The tensors that the kernels may read and write.
            options: Keyword arguments of `Module.launch`.

        Returns:
            The result of the function.

        Raises:
            PtxFault: If the PTX machine finds a fault in a kernel.
        """
        # A tensor that requires a gradient cannot be exported by DLPack.
        self._memory = [tensor.detach() for tensor in memory]
        self.options, self._fault = options, None
        result: int = getattr(self.functions, name)(*args)
        if self._fault is not None:
            raise self._fault
        return result

    def _module(self, kernel: str) -> Module:
        return next(module for module in self.modules if kernel in module.text.kernels)

    def _bounds(self, name: bytes, static_shared: Any, most_threads: Any, cluster: Any) -> None:
        """Tell the runtime the limits that the PTX of a kernel sets for its launches."""
        kernel = name.decode()
        # An error is ignored here, because the launch raises it again.
        with contextlib.suppress(ValueError, StopIteration):
            module = self._module(kernel)
            bounds = module.text.kernels[kernel]
            static_shared[0] = module.static_shared(kernel)
            most_threads[0] = bounds.most_threads or most_threads[0]
            cluster[0], cluster[1], cluster[2] = bounds.cluster or (0, 0, 0)

    def _launch(
        self, name: bytes, grid: Any, cluster: Any, block: Any, args: Any, shared: int
    ) -> int:
        kernel = name.decode()
        try:
            module = self._module(kernel)
            parameters = module.text.kernels[kernel].parameters
            values = [ctypes.string_at(args[n], p.size) for n, p in enumerate(parameters)]
            run = functools.partial(
                module.launch, kernel, grid[:3], block[:3], values, cluster=cluster[:3],
                dynamic_shared=shared, memory=self._memory,
            )  # fmt: skip
            if self.on_launch is not None:
                self.on_launch(kernel, grid[:3], run)
                return 0
            report = run(**self.options)
        except (PtxFault, ValueError, StopIteration) as error:
            self._fault = error
            return 1
        self.reports.append((readable(kernel), report))
        return 0


def readable(mangled: str) -> str:
    """Return ``file.kernel`` for the mangled name of a kernel in an anonymous namespace.

    Other names are returned as they are.

    Examples:
        >>> from fastbert.testing.ptx.cuda_library import readable
        >>> readable("_ZN1a41_GLOBAL__N__d084fc85_9_reduce_cu_1024bcfb19sum_partials_kernelENS_1PE")
        'reduce.sum_partials_kernel'
    """
    found = re.search(r"_GLOBAL__N__[0-9a-f]{8}_\d+_(\w+?)_cu_[0-9a-f]{8}(\d+)(\w+)", mangled)
    if found is None:
        return mangled
    file, length, rest = found.groups()
    return f"{file}.{rest[: int(length)]}"
