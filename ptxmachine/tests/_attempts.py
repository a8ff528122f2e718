"""Run PTX texts in a separate process, so that a crash does not end the tests.

The process has limits of time and of address space. If a text makes the process crash, the outcome
of the text says so, and another process continues with the next text.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import ptxmachine as ptx

# Largest number of bytes that the process may allocate after its imports, and largest number of
# seconds per text.
SPACE = 3 << 30
SECONDS = 20
# The most instructions that a warp may execute.
LIMIT = 20_000


class Outcome(NamedTuple):
    """The outcome of a text.

    Attributes:
        kind: "ran", the name of the exception, or "died: " and the reason.
        line: Line of the PTX text in which the error is, or None.
        message: Message of the exception.
        seconds: Processor time that the text took.
    """

    kind: str
    line: int | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def orderly(self) -> bool:
        """Whether the text ran or raised a PtxError."""
        return self.kind in ("ran", "PtxSyntaxError", "PtxFault")


def outcomes(texts: Sequence[str], **options) -> list[Outcome]:
    """Launch all kernels of each text in another process, and return the outcomes.

    Args:
        texts: The texts.
        options: Keyword arguments of `Module.launch`.
    """
    found: list[Outcome] = []
    while len(found) < len(texts):
        command = [sys.executable, str(Path(__file__))]
        child = subprocess.run(
            command,
            input=json.dumps([texts[len(found) :], options]),
            capture_output=True,
            text=True,
            # The process must import the same ptxmachine as the tests, which may be in a copy of
            # the repository.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        lines = child.stdout.splitlines()
        found += [Outcome(*json.loads(line)) for line in lines]
        if len(found) < len(texts):
            if not lines and "Traceback" in child.stderr:
                raise RuntimeError(f"the process of the texts does not start: {child.stderr}")
            found.append(Outcome(f"died: {_reason(child.returncode)}", message=child.stderr[-500:]))
    return found


def _reason(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def launch_kernels(text: str, **options) -> None:
    """Launch all kernels of a text with arguments that fit their parameters.

    Args:
        text: The text.
        options: Keyword arguments of `Module.launch`, such as `races`.
    """
    module = ptx.load(text)
    for name in module.kernels:
        kernel = module.text.kernels[name]
        memory = [torch.zeros(16_384, dtype=torch.uint8) for _ in kernel.parameters]
        args = [
            tensor if parameter.size == 8 else bytes(parameter.size)
            for tensor, parameter in zip(memory, kernel.parameters, strict=True)
        ]
        block = kernel.threads or (min(kernel.most_threads or 32, 128),)
        options = {"seed": 1, "limit": LIMIT, "threads": 1, **options}
        module.launch(name, (2,), block, args, **options)


def attempt(text: str, options: dict) -> tuple[str, int | None, str]:
    """Launch all kernels of a text, and return kind, line and message of the `Outcome`."""
    try:
        launch_kernels(text, **options)
    except ptx.PtxError as error:
        return type(error).__name__, error.line, str(error)
    # Any other exception is a mistake in ptxmachine, which the tests report by its name.
    except BaseException as error:
        return type(error).__name__, None, repr(error)
    return "ran", None, ""


def main() -> None:
    """Read texts from the standard input, and print a line for each outcome."""
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    space = used * resource.getpagesize() + SPACE
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    texts, options = json.load(sys.stdin)
    for text in texts:
        signal.alarm(SECONDS)
        start = time.process_time()
        found = attempt(text, options)
        print(json.dumps((*found, time.process_time() - start)), flush=True)
    signal.alarm(0)


if __name__ == "__main__":
    main()
