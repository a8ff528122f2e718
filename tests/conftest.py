"""The settings of every test: Triton's interpreter without a GPU, poisoned memory and a seed."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import threading
import time
import types
import unittest

import torch

# This must be set before a Triton kernel is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# No test needs the network. An accidental call of the hub fails at once instead of timing out.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch.compile would precompile headers for 20 s, which its few kernels here do not repay.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
# Two processes with several threads each would mostly wait for each other on the same cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

# Some releases of torch import expecttest for opcheck and use none of it but the name of a class. A
# machine without a package registry may lack it.
if importlib.util.find_spec("expecttest") is None:
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

import pytest
import quick_cases
from _interpreter import save_repeated_work

# These fixtures are not those of a folder: a process has one handler of traps, and one browser.
pytest_plugins = ("_browser", "_levels")

# The width and the colours of a terminal change what a program prints, and no result may depend on
# them. Typer takes GitHub's runners for terminals with colours.
WIDTH = os.environ.pop("COLUMNS", "")
for name in ("LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "GITHUB_ACTIONS"):
    os.environ.pop(name, None)

# A search for garbage looks at all that the modules of the tests hold, so it is made rarely.
gc.set_threshold(50_000, 10, 20)
if os.environ.get("TRITON_INTERPRET") == "1":
    save_repeated_work()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_addoption(parser):
    parser.addoption(
        "--every-case",
        action="store_true",
        help="run also the long cases that `make test` leaves to `make every-case`",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselect the cases that `make test` leaves out, before `-k` selects among the others."""
    if config.getoption("--every-case"):
        return
    chosen = quick_cases.chosen(items)
    left_out = set(items) - set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = chosen


def pytest_sessionstart(session):
    """Give pytest's own lines the width that the environment asked for."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and WIDTH.isdigit():
        terminal._tw.fullwidth = int(WIDTH)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(EarlyFailures(config), "early_failures")
        config.pluginmanager.register(LongTests(config), "long_tests")


class EarlyFailures:
    """Shows the end of each failure at once: a run that is stopped early shows what it found."""

    def __init__(self, config):
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.line("")
            terminal.line(f"{report.nodeid}, {report.when}, {report.duration:.0f} s", red=True)
            terminal.line("\n".join(report.longreprtext.splitlines()[-40:]))


class LongTests:
    """Names each test that has run for five minutes: a stopped run shows what it waited for."""

    LIMIT = 300.0

    def __init__(self, config):
        self.config = config
        self.began = {}

    def pytest_sessionstart(self):
        threading.Thread(target=self.watch, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid):
        self.began[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid):
        self.began.pop(nodeid, None)

    def watch(self):
        named = set()
        while True:
            time.sleep(self.LIMIT / 10)
            for nodeid, began in self.began.copy().items():
                if time.monotonic() - began > self.LIMIT and nodeid not in named:
                    named.add(nodeid)
                    terminal = self.config.pluginmanager.get_plugin("terminalreporter")
                    terminal.write(f"\n{nodeid} has run for {self.LIMIT:.0f} s\n", flush=True)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill new memory with NaN, so that a test sees an element that a kernel did not write.

    It stays so until a test changes it, because torch takes a millisecond to set it.
    """
    on = torch.are_deterministic_algorithms_enabled()
    if not (on and torch.is_deterministic_algorithms_warn_only_enabled()):
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def seeded():
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # Beside this, `torch.manual_seed` notes the stack of the call for three kinds of devices.
        torch.default_generator.manual_seed(0)


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def drawn() -> None:
    """Let a test of a training run draw its pictures, which `quick_pictures` replaces elsewhere."""


@pytest.fixture
def quick_pictures(request, monkeypatch):
    """Replace the drawing of a picture, which takes longer than a small training run."""
    if "drawn" not in request.fixturenames:
        from matplotlib.figure import Figure

        def write(figure, path, **_):
            with open(path, "wb") as file:
                file.write(b"\x89PNG\r\n\x1a\n")

        monkeypatch.setattr(Figure, "savefig", write)
