"""A pytest plugin that records outcomes of tests, and why transformers' own code ran in them."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

# These texts are in the warnings for an encoder that is refused, and for a call that runs stock
# code.
RAN_STOCK = ("accelerate: left ", "runs its own code")
outcomes: dict[str, str] = {}
fallbacks: dict[str, set[str]] = defaultdict(set)


def _name(nodeid: str) -> str:
    return nodeid.rpartition("::")[2]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = _name(report.nodeid)
    if report.when == "call" or report.outcome != "passed":
        outcomes[name] = report.outcome


def pytest_warning_recorded(warning_message: Any, nodeid: str) -> None:
    message = str(warning_message.message)
    if any(words in message for words in RAN_STOCK):
        fallbacks[_name(nodeid)].add(message)


def pytest_sessionfinish() -> None:
    tests = {
        name: {"outcome": outcome, "fallbacks": sorted(fallbacks[name])}
        for name, outcome in outcomes.items()
    }
    Path(os.environ["CONFORMANCE_OUT"]).write_text(json.dumps(tests, indent=1), encoding="utf-8")
