"""Fork child processes that get SIGKILL at a chosen call, or when the parent decides."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

# The names of audit events for calls that open or change a file or a folder begin with these texts.
WATCHED = ("open", "os.", "shutil.", "fcntl.")


def child(work: Callable[[], None]) -> int:
    """Fork a process that calls `work`, and return its id."""
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
    """Wait for a child, and return its exit status, or the negative number of its signal."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def killed_at_every_call(work: Callable[[], None], stride: int = 1) -> Iterator[int]:
    """Run `work` in several child processes, and kill each child just before a different call.

    The calls are the watched calls 1, 1 + `stride` and so on. The function yields the number of the
    call after each kill, and ends when a child has finished `work`.
    """
    for call in range(1, 1000, stride):
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

    # An audit hook cannot be removed from a process, so only the children set one.
    os.fsync = lambda handle: sys.audit("os.fsync", handle)
    sys.addaudithook(watch)
    work()
