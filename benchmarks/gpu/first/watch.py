"""The time limit of a case: a clock that stops while kernels are compiled, and its alarm."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from fastbert.ops import backend as backends

# Seconds between two checks of the clock.
STEP_S = 0.05
# A rehearsal with inserted mistakes replaces this function to advance the clock.
now = time.monotonic


class Clock:
    """A clock of the seconds since its start, which stops while a kernel is compiled."""

    def __init__(self) -> None:
        self.start = now()
        self.compiled = 0.0
        self.paused_at: float | None = None

    def seconds(self) -> float:
        """Return the seconds since the start, without compilations."""
        until = now() if self.paused_at is None else self.paused_at
        return until - self.start - self.compiled

    def paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of the function; the clock stops during its outermost call."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if self.paused_at is not None:
                return function(*arguments, **options)
            self.paused_at = now()
            try:
                return function(*arguments, **options)
            finally:
                began, self.paused_at = self.paused_at, None
                self.compiled += now() - began

        return call


@contextlib.contextmanager
def limited(limit_s: float, give_up: Callable[[], Any]) -> Iterator[Clock]:
    """Call `give_up`, in a thread of its own, if the block takes longer than the limit.

    Triton's compilations do not count: compiling a kernel, building its launcher, loading its code.

    Args:
        limit_s: Seconds that the block may take, without its compilations.
        give_up: A function that does not return, because the block may hang for ever.

    Yields:
        The clock of the block.
    """
    clock, ended = Clock(), threading.Event()

    def look() -> None:
        while not ended.wait(STEP_S):
            if clock.seconds() > limit_s:
                give_up()
                return

    thread = threading.Thread(target=look, daemon=True)
    with contextlib.ExitStack() as patches:
        for owner, name in _compilers():
            stopped = clock.paused(getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, stopped))
        thread.start()
        try:
            yield clock
        finally:
            ended.set()


def _compilers() -> list[tuple[Any, str]]:
    """Return Triton's methods that compile a kernel, build its launcher and load its code."""
    if not backends.HAS_TRITON:
        return []
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    return [(JITFunction, "_do_compile"), (CompiledKernel, "_init_handles")]
