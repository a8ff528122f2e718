"""A worker of `fastbert tune` whose kernels run on the PTX machine, with times from a table.

    python _tune_rehearsal.py SECONDS.json

The table has seconds by candidate. The candidate "triton general 128×64, 4 warps, 3 stages" gives a
wrong result, and the candidate "triton general 128×64, 8 warps, 2 stages" hangs.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from fastbert.bench import tune_worker
from fastbert.ops.backend import TABLES
from fastbert.testing.ptx.triton_launches import emulated

WRONG, HANGS = "128×64, 4 warps, 3 stages", "128×64, 8 warps, 2 stages"
SECONDS = json.loads(Path(sys.argv[1]).read_text("utf-8"))


class TableWatch:
    """A watch that looks up the seconds of a candidate and does not run it."""

    def __init__(self, direction: str) -> None:
        self.share = 1 if direction == "forward" else 3

    def measure(self, call: Any, first: int, calls: int) -> float:
        return self.share * float(SECONDS[call.args[0]["name"]])


@contextlib.contextmanager
def faulty(candidate: dict[str, Any]) -> Iterator[None]:
    row = TABLES["attention"]["triton"]

    def forward(*arguments: Any, **options: Any) -> Any:
        out, *saved = row.forward(*arguments, **options)
        return (out + (WRONG in candidate["name"]), *saved)

    with CHOOSING(candidate):
        if HANGS in candidate["name"]:
            time.sleep(3600)
        if WRONG in candidate["name"]:
            changed = mock.Mock(wraps=row, forward=forward)
            changed.dtypes, changed.refuses, changed.backward = (
                row.dtypes,
                row.refuses,
                row.backward,
            )
            with mock.patch.dict(TABLES["attention"], triton=changed):
                yield
        else:
            yield


CHOOSING = tune_worker.choosing
if __name__ == "__main__":
    with emulated(90), mock.patch.object(tune_worker, "choosing", faulty):
        tune_worker.serve(tune_worker.Trial("cpu", TableWatch))
