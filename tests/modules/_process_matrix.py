"""Run a model in child processes after an action of the parent, for test_cpu_processes.py.

The first argument names the action. The program writes the result of each child, and then the
parent's result, to the folder of the second argument. The parent computes its result after the last
child has ended.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from fastbert import BertModel
from fastbert.config import BertConfig

PARENTS = ("nothing", "torchs-threads", "the-model", "a-backward-pass", "products-meanwhile")
METHODS = ("fork", "spawn", "forkserver", "threads")
SECONDS = 60
CONFIG = BertConfig(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=128,
)


def model() -> BertModel:
    torch.manual_seed(0)
    return BertModel(CONFIG).eval()


def ids() -> torch.Tensor:
    return torch.arange(400).view(2, 200) % 97


def compute(file: Path, encoder: BertModel | None = None) -> None:
    """Run the model and a multi-threaded operator of torch, and save both results."""
    torch.set_num_threads(2)
    with torch.inference_mode():
        waves = torch.linspace(0, 9, 1 << 20).sin()
        states = (encoder or model())(ids()).last_hidden_state
    torch.save((torch.get_num_threads(), waves, states), file)


@contextmanager
def products() -> Iterator[None]:
    """Compute matrix products in another thread during the ``with`` block."""
    from fastbert import _C  # noqa: F401  registers the operators

    weights = [torch.randn(64, 64) for _ in range(8)]
    x, stop = torch.randn(4, 64), threading.Event()

    def multiply() -> None:
        while not stop.is_set():
            for weight in weights:
                torch.ops.fastbert_C.linear(x, weight, None, None, "none", False)

    thread = threading.Thread(target=multiply)
    thread.start()
    yield
    stop.set()
    thread.join()


def prepare(parent: str, encoder: BertModel) -> None:
    if parent == "torchs-threads":
        torch.randn(700, 700) @ torch.randn(700, 700)
        torch.linspace(0, 9, 1 << 20).cos()
    elif parent == "the-model":
        with torch.inference_mode():
            encoder(ids())
    elif parent == "a-backward-pass":
        model().train()(ids()).last_hidden_state.sum().backward()


def fork(file: Path, encoder: BertModel) -> int:
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)  # This signal ends a child that hangs.
        try:
            compute(file, encoder)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start(method: str, file: Path) -> int:
    process = multiprocessing.get_context(method).Process(target=compute, args=(file,))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    return int(process.exitcode or 0)


def thread(file: Path, encoder: BertModel) -> int:
    worker = threading.Thread(target=compute, args=(file, encoder))
    worker.start()
    worker.join()
    return 0


def main(parent: str, folder: Path) -> None:
    torch.set_num_threads(2)
    encoder = model()
    prepare(parent, encoder)
    children: dict[str, Callable[[Path], int]] = {
        "fork": lambda file: fork(file, encoder),
        "spawn": lambda file: start("spawn", file),
        "forkserver": lambda file: start("forkserver", file),
        "threads": lambda file: thread(file, encoder),
    }
    multiprocessing.get_context("forkserver").set_forkserver_preload(["fastbert"])
    with products() if parent == "products-meanwhile" else nullcontext():
        for method in METHODS:
            began = time.monotonic()
            status = children[method](folder / method)
            print(method, status, f"{time.monotonic() - began:.1f}", flush=True)
    compute(folder / "parent", encoder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
