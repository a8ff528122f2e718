"""Child processes that receive SIGKILL at a chosen call, or whenever the parent likes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

# The audit events of calls that change a folder or a file, or open one.
WATCHED = ("open", "os.", "shutil.", "fcntl.")


def child(work: Callable[[], None]) -> int:
    """Forks a process that does ``work``, and returns its number."""
    number = os.fork()
    if number:
        return number
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def end_of(number: int) -> int:
    """Waits for a child. Returns its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def killed_at_every_call(work: Callable[[], None]) -> Iterator[int]:
    """Runs ``work`` in one child after the other; the n-th is killed before its n-th watched call.

    Yields n after each kill, and ends when a child lived to finish its work.
    """
    for call in range(1, 1000):
        status = end_of(child(lambda last=call: _work_until(last, work)))
        if status == 0:
            return
        assert status == -signal.SIGKILL, f"call {call}: the child ended with {status}"
        yield call
    raise AssertionError("the work never ended")


def _work_until(last: int, work: Callable[[], None]) -> None:
    calls = 0

    def watch(event: str, _: Any) -> None:
        nonlocal calls
        if event.startswith(WATCHED):
            calls += 1
            if calls == last:
                os.kill(os.getpid(), signal.SIGKILL)

    # A hook stays as long as its process does, which is why it is never set in the parent.
    os.fsync = lambda handle: sys.audit("os.fsync", handle)
    sys.addaudithook(watch)
    work()
