"""During a run, a signal only sets a flag; before and after, signals have their usual effect."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fastbert.training import signals
from fastbert.training.signals import StopSignals, stopped_by


@pytest.fixture(autouse=True)
def usual_handlers():
    """Set the usual handlers, because a shell starts background jobs with SIGINT ignored."""
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_the_first_signal_is_noted_and_the_handlers_come_back(number) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert stop.received == 0
        os.kill(os.getpid(), number)
        assert stop.received == number
        # A launcher may forward a signal that the terminal has already sent to every process.
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_later_signal_ends_the_run_at_once(monkeypatch, number, error) -> None:
    monkeypatch.setattr(signals, "REPEAT", 0.0)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(error) as caught:
            os.kill(os.getpid(), number)
        assert stop.received == signal.SIGTERM
    if error is SystemExit:
        assert caught.value.code == 143


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert stop.received == 0


def test_another_thread_may_train() -> None:
    ended = []

    def train() -> None:
        with StopSignals() as stop:
            ended.append(stop.received)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert ended == [0]


def test_the_exceptions_carry_the_conventional_status() -> None:
    assert isinstance(stopped_by(signal.SIGINT), KeyboardInterrupt)
    assert stopped_by(signal.SIGTERM).code == 128 + 15
