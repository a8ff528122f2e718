"""Handling of SIGTERM and SIGINT, after which a training run finishes its step and saves."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A second signal within this time, in seconds, is taken for a copy of the first signal. Launchers
# forward a signal that the terminal or the scheduler has already sent to every process.
REPEAT = 1.0


class StopSignals:
    """Context manager that notes the first SIGTERM or SIGINT; a later signal ends the run at once.

    A second signal within `REPEAT` seconds of the first signal has no effect. A signal that the
    process ignores stays ignored. Outside the main thread no signal is noted, because Python allows
    handlers only in the main thread.

    Attributes:
        received: Number of the noted signal, or 0.
    """

    def __init__(self) -> None:
        """Start without a signal."""
        self.received = 0
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # None means a handler that Python did not install and cannot restore.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._at = number, now
        elif now - self._at >= REPEAT:
            raise stopped_by(number)


def stopped_by(number: int) -> BaseException:
    """Return the exception that ends Python with the exit status 128 + `number`."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def leave_to_parent(worker: int = 0) -> None:
    """Ignore the signals in a process that prepares batches; its parent ends the process."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
