"""A substitute for CUDA graphs that runs on a CPU, for tests of recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fastbert.graphs.recording import Recording, Result, Results


class Trace:
    """A recorder that traces the operators of a function, and replays them on the same memory.

    As in a CUDA graph, a value that Python reads from a tensor while recording stays fixed.
    """

    def __init__(self) -> None:
        self.ran = self.recorded = self.replayed = self.turns = 0

    def run(self, function: Callable[[], Result]) -> Result:
        self.ran += 1
        return function()

    def record(self, function: Callable[[], Results]) -> Recording:
        self.recorded += 1
        with self.unchanged():
            trace = make_fx(function)()
            result = function()

        @torch.no_grad()
        def replay() -> None:
            self.replayed += 1
            for old, new in zip(result, trace(), strict=True):
                if old is not None:
                    old.copy_(new)

        return Recording(replay, result)

    def unchanged(self) -> AbstractContextManager[None]:
        """Return a context that undoes the writes of a capture, which on a GPU computes nothing."""
        return nullcontext()

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.turns += 1
        yield
        self.turns -= 1

    def finish(self) -> None:
        assert self.turns <= 1


class StepTrace(Trace):
    """A recorder of training steps.

    Args:
        model: The model that a step updates.
        optimizer: The optimizer of the model.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer
        # These are the other tensors that a step writes.
        self.others: list[Tensor] = []

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        states = [state.values() for state in self.optimizer.state.values()]
        tensors = [
            *self.others,
            *self.model.parameters(),
            *(t for values in states for t in values),
        ]
        before, generator = [t.detach().clone() for t in tensors], torch.get_rng_state()
        yield
        torch.set_rng_state(generator)
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
