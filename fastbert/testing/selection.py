"""Find registered and random cases by name."""

from __future__ import annotations

from fastbert.testing.cases import CASES, OPS, RANDOM, Case
from fastbert.testing.random_cases import named


def find(op: str | None = None, name: str | None = None, quick: bool = False) -> list[Case]:
    """Find cases by operation and name.

    Args:
        op: Name of the operation; None is all operations.
        name: Name of a registered case, or of a random case if `op` is given; None is all
            registered cases.
        quick: Whether only the registered cases of the quick selection are returned.

    Returns:
        The cases, at least one.

    Raises:
        ValueError: If the operation is unknown, or if no case is found.
    """
    if op is not None and op not in OPS:
        raise ValueError(f"op: got {op!r}, allowed: {', '.join(OPS)}")
    if name is not None and name.startswith(RANDOM):
        return [named(name, op)]
    selected = [
        c for c in CASES if op in (None, c.op) and name in (None, c.name) and (c.quick or not quick)
    ]
    if not selected:
        names = ", ".join(sorted({c.name for c in CASES if op in (None, c.op)}))
        raise ValueError(f"case: got {name!r}, allowed: {names}")
    return selected
