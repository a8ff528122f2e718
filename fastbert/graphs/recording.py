"""Recordings of functions; a recording, such as a CUDA graph, runs again in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

# The tensors that a recorded function returns; the second tensor is optional.
Results = tuple[Tensor, Tensor | None]
Result = TypeVar("Result")


class Recording(NamedTuple):
    """A recorded function; ``replay()`` computes ``result`` again in the same memory."""

    replay: Callable[[], None]
    result: Results


class Recorder(Protocol):
    """An object that records functions which read and write the same memory in every call.

    A turn is the block of a statement ``with recorder.turn():``. The device runs one turn at a
    time.
    """

    def run(self, function: Callable[[], Result]) -> Result:
        """Call a function that will be recorded, and return its result.

        The first call compiles kernels and opens libraries, which a recording cannot contain.
        """
        ...

    def record(self, function: Callable[[], Results]) -> Recording:
        """Record a function that `run` has called before; the recording computes no result."""
        ...

    def turn(self) -> AbstractContextManager[None]:
        """Return a context manager whose block runs on the device after all earlier turns."""
        ...

    def finish(self) -> None:
        """Wait for the end of the last turn, so that the memory of recordings may be freed."""
        ...


class CudaRecorder:
    """A recorder of CUDA graphs whose intermediate results are in the memory of one pool.

    The graphs may use the same memory, because the device runs one turn at a time, on any stream,
    and because the turn that replays a graph also copies the result.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        """Create the memory pool and the stream of the recordings."""
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.last: torch.cuda.Event | None = None

    def run(self, function: Callable[[], Result]) -> Result:
        """Call a function on the stream of the recordings, and return its result."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                result = function()
            current.wait_stream(self.stream)
        return result

    def record(self, function: Callable[[], Results]) -> Recording:
        """Record a function as a CUDA graph."""
        with torch.cuda.device(self.device):
            graph = torch.cuda.CUDAGraph()
            # In the mode "thread_local", other threads may use the device during the recording.
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                result = function()
        return Recording(graph.replay, result)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the current stream wait for the last turn, and record the end of this turn.

        The end is an event after the block, for which the next turn waits.
        """
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            if self.last is not None:
                stream.wait_event(self.last)
            yield
            self.last = stream.record_event()

    def finish(self) -> None:
        """Wait for the end of the last turn."""
        if self.last is not None:
            self.last.synchronize()


def cuda_recorder(device: torch.device, name: str) -> CudaRecorder:
    """Return the recorder of a device.

    Args:
        device: The device of the model.
        name: Name of the public function, such as ``graphed``, for the message of the error.

    Raises:
        RuntimeError: If `device` is not a CUDA device.
    """
    if device.type != "cuda":
        lacking = "move it there" if torch.cuda.is_available() else "this machine has none"
        raise RuntimeError(
            f"{name}: got a model on {device}, allowed: a CUDA device, for CUDA graphs ({lacking})"
        )
    return CudaRecorder(device)
