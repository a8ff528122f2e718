"""Run a check in a forked child."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def holds_in_a_child(check: Callable[[], bool]) -> bool:
    """Fork, and return whether the check holds in the child, which is killed after a minute."""
    child = os.fork()
    if child == 0:
        holds = False
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            holds = check()
        finally:
            os._exit(0 if holds else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
