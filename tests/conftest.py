"""Settings for every test: NaN in new memory, a seed, and Triton's interpreter without a GPU."""

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

# The variable must be set before a Triton kernel is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# No test needs the network. With this variable, an accidental call of the hub fails immediately.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch.compile would precompile headers for 20 s, and would save less time than that in these
# tests.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
# Several test processes with several threads each would compete for the same cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

# Some torch releases import expecttest for opcheck, but use only the name of one class. A machine
# without a package registry may lack expecttest.
if importlib.util.find_spec("expecttest") is None:
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

import pytest
import quick_cases
from _interpreter import save_repeated_work

# All folders use these fixtures, because a process can have only one trap handler and one browser.
pytest_plugins = ("_browser", "_levels")

# The width and colours of the terminal change the output of programs, but no result may depend on
# the terminal. Typer assumes that GitHub's runners are terminals with colours.
WIDTH = os.environ.pop("COLUMNS", "")
for name in ("LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "GITHUB_ACTIONS"):
    os.environ.pop(name, None)

# Garbage collection runs rarely, because it visits all objects of the imported modules.
gc.set_threshold(50_000, 10, 20)
if os.environ.get("TRITON_INTERPRET") == "1":
    save_repeated_work()

# A test would wait 4 ms for the disk at each file that it saves, and no test loses its power.
# The processes that tests start wait, so the calls themselves are tested too.
os.fsync = os.fstat

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_addoption(parser):
    parser.addoption(
        "--every-case",
        action="store_true",
        help="run also the long cases that `make test` leaves to `make every-case`",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselect the cases that `make test` leaves out, before `-k` selects from the other cases."""
    if config.getoption("--every-case"):
        return
    chosen = quick_cases.chosen(items)
    left_out = set(items) - set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = chosen


def pytest_collection_finish():
    """Keep the collector from visiting the imported modules, which all tests need to the end.

    A collection of all generations takes 0.5 s with these objects.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session):
    """Use the original width of the environment variable COLUMNS for pytest's own lines."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and WIDTH.isdigit():
        terminal._tw.fullwidth = int(WIDTH)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(EarlyFailures(config), "early_failures")
        config.pluginmanager.register(LongTests(config), "long_tests")


class EarlyFailures:
    """Print the end of each failure immediately, so that an interrupted run shows failures."""

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
    """Print each test that has run for five minutes, so that a hanging run shows its cause."""

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
    """Fill new memory with NaN, so that a test notices elements that a kernel did not write.

    The setting is changed only if a test has changed it, because each change takes a millisecond.
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
        # `torch.manual_seed` would also record the call stack for three other kinds of devices.
        torch.default_generator.manual_seed(0)


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def drawn() -> None:
    """With this fixture, a test writes real pictures instead of the stubs of `quick_pictures`."""


@pytest.fixture
def quick_pictures(request, monkeypatch):
    """Write stubs instead of pictures, because drawing takes longer than a small training run."""
    if "drawn" not in request.fixturenames:
        from matplotlib.figure import Figure

        def write(figure, path, **_):
            with open(path, "wb") as file:
                file.write(b"\x89PNG\r\n\x1a\n")

        monkeypatch.setattr(Figure, "savefig", write)


@pytest.fixture
def one_thread():
    """Use one thread, so that sums have a fixed order and tests do not compete for cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
