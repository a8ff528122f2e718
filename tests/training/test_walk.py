"""The walk through pre-training in docs/design.md names the functions that a run really calls."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from fastbert import training
from fastbert.training.pretraining import pretrain

DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design.md"


def stops() -> list[str]:
    """Return the functions that the walk names, once each and in order, as ``file.function``."""
    text = DESIGN.read_text(encoding="utf-8").partition("## A walk through pre-training\n")[2]
    names = re.findall(r"`(\w+(?:\.\w+)+)`", text.partition("\n## ")[0])
    return list(dict.fromkeys(re.sub(r"\.\w+\.", ".", name) for name in names))


def called(run) -> list[str]:
    """Return the functions of fastbert.training that `run` calls, in the order of first calls."""
    folder, names = str(Path(training.__file__).parent), {}

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            names.setdefault(f"{Path(code.co_filename).stem}.{code.co_name}")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(names)


def test_the_walk_has_the_functions_of_a_run_in_their_order(options, documents):
    chosen = options(steps=2, log_every=1, eval_every=1, save_every=1)
    console = Console(file=io.StringIO())
    order = called(lambda: pretrain(chosen, documents=documents, console=console))
    assert [name for name in order if name in stops()] == stops()
    assert len(stops()) <= 25
    assert len({name.partition(".")[0] for name in stops()}) <= 12
