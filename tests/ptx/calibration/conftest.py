"""The option that runs every case of the calibration."""

from __future__ import annotations


def pytest_addoption(parser):
    parser.addoption(
        "--every-case", action="store_true", help="run every case and every seed of the calibration"
    )
