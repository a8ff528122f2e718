"""The public names of fastbert and the parameters of its functions, as of the last release.

    python tests/release/public_api.py          # writes tests/release/public_api.json

``docs/releases.md`` says what is public. The file is written once for each release.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("public_api.json")
# The modules whose `__all__` is public.
MODULES = (
    "fastbert",
    "fastbert.analysis",
    "fastbert.data",
    "fastbert.finetuning",
    "fastbert.inference",
    "fastbert.modules",
    "fastbert.modules.alignment",
    "fastbert.modules.transformer",
    "fastbert.modules.xlnet",
    "fastbert.ops",
    "fastbert.parity",
    "fastbert.reference",
    "fastbert.seq2seq",
    "fastbert.training",
    "fastbert.viewer",
)


def parameters(value: Any) -> list[str] | None:
    """Return the names of the parameters of a function or a class, or None for another value."""
    if inspect.ismodule(value) or not callable(value):
        return None
    try:
        found = inspect.signature(value).parameters.values()
    except (ValueError, TypeError):
        return None
    return [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def collect() -> dict[str, dict[str, list[str] | None]]:
    """Return the parameters of each public name by module."""
    content = {}
    for name in MODULES:
        module = importlib.import_module(name)
        content[name] = {n: parameters(getattr(module, n)) for n in sorted(module.__all__)}
    return content


def lost(
    before: dict[str, dict[str, list[str] | None]], now: dict[str, dict[str, list[str] | None]]
) -> list[str]:
    """Return what `before` has and `now` lacks: names, and parameters as ``name(parameter)``."""
    missing = []
    for module, names in before.items():
        for name, known in names.items():
            if name not in now.get(module, {}):
                missing.append(f"{module}.{name}")
                continue
            accepted = now[module][name] or ()
            missing += [f"{module}.{name}({p})" for p in known or () if p not in accepted]
    return missing


if __name__ == "__main__":
    lines = []
    for module, names in collect().items():
        rows = (f"  {json.dumps(name)}: {json.dumps(known)}" for name, known in names.items())
        lines.append(f" {json.dumps(module)}: {{\n" + ",\n".join(rows) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
