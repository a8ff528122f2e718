"""A kernel launch as data, a cache of launches, and the arguments of dropout.

Except for the addresses of its tensors, a launch depends only on shapes, strides, dtypes and
numbers. `run` therefore builds the launch of a call once, caches it, and inserts the addresses of
later calls. A cached launch takes a tenth of the time of Triton's own call. Triton inspects each of
up to 70 arguments and builds a string from them to find the compiled kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

# Triton compiles one kernel for addresses that are divisible by this number, and another for other
# addresses.
ALIGNMENT = 16
# Calls with different shapes have different launches. The cache is cleared when it would hold the
# launches of more than this number of different calls.
MAX_CACHED = 4096


class Dropout(NamedTuple):
    """Kernel arguments of one dropout probability.

    Args:
        threshold: An element is dropped if its random number of 24 bits is below this threshold.
        scale: Factor of the elements that are not dropped.
        enabled: Whether the probability is above 0.
    """

    threshold: int
    scale: float
    enabled: bool


def dropout_arguments(p: float, seed: Tensor | None) -> Dropout:
    """Return the kernel arguments of a dropout probability.

    Args:
        p: Probability in [0, 1] with which an element is dropped.
        seed: Seed, int64 (1,); required if p > 0.

    Raises:
        ValueError: If p is not allowed, or if p > 0 and there is no seed.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p: got {p}, allowed: 0 to 1")
    if p > 0.0 and seed is None:
        raise ValueError(
            f"seed: got None with dropout_p={p}, allowed: an int64 tensor of shape (1,)"
        )
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return Dropout(threshold=int(p * 2**24 + 0.5), scale=scale, enabled=p > 0.0)


def dense(*vectors: Tensor | None) -> list[Tensor | None]:
    """Return the vectors with contiguous elements, for kernels that take no strides of vectors.

    Only a vector that is not contiguous is copied.
    """
    return [v if v is None or v.is_contiguous() else v.contiguous() for v in vectors]


def device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that makes the device of `x` current, on which Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


class Launch(NamedTuple):
    """One kernel launch with all its arguments, which can run or be compiled ahead of time.

    Args:
        name: Name of the launch.
        kernel: The kernel.
        grid: Number of programs along each axis.
        arguments: Arguments of the kernel by name.
        num_warps: Number of warps of a program.
        num_stages: Number of pipeline stages of the kernel's loops.
        fp_fusion: Whether the compiler may contract ``a * b + c`` to one operation with one
            rounding. A contracted ``a * b - c`` may differ from 0 if c is the rounded product of a
            and b.
        max_registers: Number of registers of a thread that ptxas may use; None leaves the choice to
            ptxas, which may let a few registers spill so that more programs run at a time.
    """

    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int
    fp_fusion: bool = True
    max_registers: int | None = None

    def options(self) -> dict[str, Any]:
        """Return the options with which Triton compiles the kernel."""
        # enable_fp_fusion is always passed, because Triton 3.10 changes its default.
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.fp_fusion,
            **({} if self.max_registers is None else {"maxnreg": self.max_registers}),
        }

    def run(self, on: Tensor) -> Any:
        """Run the kernel on the device of `on`; an empty grid runs nothing.

        Returns:
            The compiled kernel, or None if nothing ran.

        Raises:
            ValueError: If a vector argument is not contiguous and the kernel takes no stride for
                it.
        """
        self._check_vectors()
        if min(self.grid) == 0:
            return None
        with device_of(on):
            return self.kernel[self.grid](**self.arguments, **self.options())

    def _check_vectors(self) -> None:
        # A kernel that takes no stride for a vector would read the memory between its elements.
        for name, value in self.arguments.items():
            if isinstance(value, Tensor) and value.dim() == 1 and not value.is_contiguous():
                short = name.removesuffix("_ptr")
                if f"stride_{short}" not in self.arguments:
                    raise ValueError(f"{short}: got stride {value.stride(0)}, allowed: 1")


class CachedLaunch(NamedTuple):
    """A launch that was run, without the addresses of its tensors.

    Args:
        name: Name of the launch.
        device: Index of the device.
        runner: Triton's function that launches the compiled kernel; it takes all arguments in
            order.
        others: The arguments other than the tensors of the call.
        arrange: Function that puts the tuple of addresses, followed by `others`, into the order of
            the arguments.
    """

    name: str
    device: int
    runner: Callable[..., None]
    others: tuple[Any, ...]
    arrange: Callable[[tuple[Any, ...]], tuple[Any, ...]]

    def run(self, addresses: tuple[int | None, ...]) -> None:
        """Launch the kernel on the current stream of the device.

        Args:
            addresses: Addresses of the tensors of the call; None for an absent tensor.
        """
        arguments = self.arrange(addresses + self.others)
        if torch._C._cuda_getDevice() == self.device:
            self.runner(*arguments, stream=torch._C._cuda_getCurrentRawStream(self.device))
            return
        with torch.cuda.device(self.device):
            self.runner(*arguments, stream=torch._C._cuda_getCurrentRawStream(self.device))


_cache: dict[Hashable, list[CachedLaunch]] = {}


def forget() -> None:
    """Clear the cache of launches, which is necessary after a tile in ``kernels.tiles`` changes."""
    _cache.clear()


def run(
    build: Callable[..., Launch | list[Launch]],
    inputs: Sequence[Tensor | None],
    results: Sequence[Tensor | None],
    *constants: Hashable,
) -> None:
    """Run the launches ``build(*inputs, *results, *constants)``; on a GPU, also cache them.

    Args:
        build: Function that returns a launch, or launches in order. The launches must depend only
            on the shapes, strides, dtypes and device of the tensors and on the constants, and must
            pass the tensors to the kernel unchanged.
        inputs: Tensors of the call. The launches run on the device of the first tensor.
        results: Tensors to fill; None for a result that is not wanted.
        constants: Further arguments of `build`.
    """
    first = inputs[0]
    assert first is not None
    if not first.is_cuda:
        for launch in _launches(build(*inputs, *results, *constants)):
            launch.run(on=first)
        return
    key: list[Any] = [build, first.get_device(), constants]
    addresses: list[int | None] = []
    together = 0
    for tensor in (*inputs, *results):
        if tensor is None:
            key.append(None)
            addresses.append(None)
        else:
            address = tensor.data_ptr()
            together |= address
            key += (tensor.shape, tensor.stride(), tensor.dtype)
            addresses.append(address)
    if together % ALIGNMENT:
        # Triton compiles a separate kernel for unaligned addresses. Triton's own call detects such
        # addresses; a cached launch does not.
        for launch in _launches(build(*inputs, *results, *constants)):
            launch.run(on=first)
        return
    cached = _cache.get(tuple(key))
    if cached is None:
        _run_and_cache(tuple(key), build, (*inputs, *results), constants)
    else:
        in_order = tuple(addresses)
        for launch in cached:
            launch.run(in_order)


def _launches(built: Launch | list[Launch]) -> list[Launch]:
    return [built] if isinstance(built, Launch) else built


def _run_and_cache(
    key: Hashable,
    build: Callable[..., Launch | list[Launch]],
    tensors: tuple[Tensor | None, ...],
    constants: tuple[Hashable, ...],
) -> None:
    # `_run_one` finds the place of a tensor by its identity. A call may pass one tensor twice, so
    # `detach` gives each argument an identity of its own.
    tensors = tuple([None if t is None else t.detach() for t in tensors])
    cached = [_run_one(launch, tensors) for launch in _launches(build(*tensors, *constants))]
    if all(cached):
        if len(_cache) >= MAX_CACHED:
            _cache.clear()
        _cache[key] = cached


def _run_one(launch: Launch, tensors: tuple[Tensor | None, ...]) -> CachedLaunch | None:
    """Run a launch and return it as a `CachedLaunch`, or return None if it must not be cached."""
    on = tensors[0]
    assert on is not None
    compiled = launch.run(on=on)
    kernel = launch.kernel
    if compiled is None or not isinstance(kernel, triton.JITFunction) or kernel.pre_run_hooks:
        return None
    places = {id(t): i for i, t in enumerate(tensors) if t is not None}
    others: list[Any] = []
    order: list[int] = []
    for name in kernel.arg_names:
        value = launch.arguments[name]
        place = places.get(id(value))
        if place is None:
            if isinstance(value, Tensor):
                raise TypeError(f"{launch.name}: {name} is not one of the tensors of the call")
            place = len(tensors) + len(others)
            others.append(value)
        order.append(place)
    grid = (*launch.grid, 1, 1)[:3]
    arrange = itemgetter(*order)
    return CachedLaunch(launch.name, on.get_device(), compiled[grid], tuple(others), arrange)
