"""The driver of a worker process: start the process, send requests to it, and end it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The slowest request compiles a model for a shape.
LIMIT_S = 480.0


class Failed(RuntimeError):
    """A request failed; the message is the worker's reason, or says that no answer came."""


class Remote:
    """A worker process with one implementation; leaving this context manager ends the process."""

    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = str(threads)
        self.engine = engine
        self.log = folder / f"{engine.replace(' ', '-')}.log"
        self._log = self.log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cpu.worker", engine, str(folder), str(threads)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def ask(self, do: str, *, limit: float = LIMIT_S, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            Failed: If the worker reports an error, has ended or takes too long.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise Failed(f"{self.engine}: its process ended: {self._tail()}") from error
        line = b""
        end = time.monotonic() + limit
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                self.close()
                raise Failed(f"no answer to {do} within {limit:.0f} s")
            piece = os.read(process.stdout.fileno(), 1 << 20)
            if not piece:
                raise Failed(f"{self.engine}: its process ended: {self._tail()}")
            line += piece
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def measure(self, first: int, calls: int) -> float:
        return self.ask("measure", first=first, calls=calls)["seconds"]

    def _tail(self) -> str:
        self._process.kill()  # This call does not change the exit status of an ended process.
        self._process.wait()
        text = self.log.read_text("utf-8", errors="replace").split("\n")
        said = " ".join(line for line in text if line.strip())[-300:]
        return f"exit status {self._process.returncode} {said}"

    def close(self) -> None:
        process = self._process
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._log):
            if stream is not None:
                # Closing the pipe to an ended worker fails if a request is left in the buffer.
                with contextlib.suppress(OSError):
                    stream.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteWatch:
    """A stopwatch for workers, which measure the time in their own processes."""

    @staticmethod
    def measure(call: Remote, first: int, calls: int) -> float:
        return call.measure(first, calls)
