"""The option ``--quick`` of the pytest-benchmark suites, which selects small shapes."""

from __future__ import annotations

import pytest

from fastbert.machine import describe


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="time small shapes; the times are no result"
    )


def pytest_report_header() -> list[str]:
    return [f"machine: {line}" for line in describe().lines()]


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    machine = describe()
    machine_info["fastbert"] = {
        "threads": machine.threads,
        "isa": machine.isa,
        "gpu": machine.gpu,
        "versions": machine.versions,
    }
