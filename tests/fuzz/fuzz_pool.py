"""Run a function in a forked process with limits of time and memory, and judge how it ends."""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from typing import NamedTuple

SECONDS = 10.0
# A case may use this number of bytes in addition to the memory of the forked process.
MEMORY = 1 << 30


class Limits(NamedTuple):
    """The limits of a case: seconds of processor time and bytes of memory.

    The case may take twice as many seconds of wall-clock time.
    """

    seconds: float = SECONDS
    memory: int = MEMORY


LIMITS = Limits()
# This text is the signature of a case that exceeded the limit of wall-clock or processor time.
LATE = "it did not end in time"


class Outcome(NamedTuple):
    """How a case ended: ``"success"``, ``"refused"`` or ``"failure"``, and the reason.

    Two failures with the same signature are taken to have the same cause.
    """

    kind: str
    reason: str = ""
    signature: str = ""


def judged(case: Callable[[], object], named: str, limits: Limits = LIMITS) -> Outcome:
    """Call `case` in a forked process, and return how the call ended.

    Args:
        case: Function that reads files.
        named: Text that the message of an acceptable error must contain.
        limits: The limits of time and memory.

    Returns:
        The outcome; `case` may return, or raise a ValueError, TypeError or OSError with `named`.
    """
    reader, writer = os.pipe()
    number = os.fork()
    if number == 0:
        # `os._exit` always ends the forked process without the cleanup code of its parent.
        try:
            os.close(reader)
            _limit(limits)
            os.write(writer, pickle.dumps(tuple(_outcome(case, named))))
        finally:
            os._exit(0)
    os.close(writer)
    try:
        return _received(number, reader, limits)
    finally:
        os.close(reader)


def _limit(limits: Limits) -> None:
    # Without this call, the faulthandler of pytest would print the stacks of a crash.
    faulthandler.disable()
    # A reader may write to the standard output. A reader in Rust may write to the standard error.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(nowhere, handle)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory,) * 2)
    seconds = max(1, round(limits.seconds))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _outcome(case: Callable[[], object], named: str) -> Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case()
    except (ValueError, TypeError, OSError) as error:
        if named in str(error):
            return Outcome("refused", f"{type(error).__name__}: {error}"[:500])
        return _failure(error, "the file is not named")
    except BaseException as error:
        return _failure(error, "not an accepted error")
    return Outcome("success")


def _failure(error: BaseException, what: str) -> Outcome:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/fastbert/" in frame.filename] or frames
    place = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}"
    text = "".join(traceback.format_exception(error))[-4000:]
    return Outcome("failure", f"{what}\n{text}", f"{type(error).__name__} at {place}, {what}")


def _received(number: int, reader: int, limits: Limits) -> Outcome:
    # The wall-clock limit is doubled, because a busy machine may give a process half of its time.
    deadline = time.monotonic() + 2 * limits.seconds
    parts = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            reason = f"no end within {2 * limits.seconds:.0f} s"
            return Outcome("failure", reason, LATE)
        part = os.read(reader, 1 << 16)
        if not part:
            break
        parts.append(part)
    status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    if parts:
        return Outcome(*pickle.loads(b"".join(parts)))
    reason = f"it ended by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return Outcome("failure", reason, LATE if status == -signal.SIGXCPU else reason)
