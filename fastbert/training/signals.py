"""SIGTERM and SIGINT ask a training run to stop after its step, so that it can save first."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds. Launchers forward a signal that the terminal or the scheduler has sent to every process
# already, so a second signal within this time is the first one again.
REPEAT = 1.0


class StopSignals:
    """Notes the first SIGTERM or SIGINT while it is entered; a later one ends the run at once.

    ``received`` is the number of the noted signal, or 0. A signal that the process ignores stays
    ignored. Outside the main thread nothing is noted, because Python allows no handlers there.
    """

    def __init__(self) -> None:
        self.received = 0
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # None is a handler that Python did not set and could not put back.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
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
    """The exception by which Python ends on a signal: with the exit status 128 + ``number``."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def leave_to_parent(worker: int = 0) -> None:
    """Ignores the signals in a process that prepares batches; its parent ends it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
