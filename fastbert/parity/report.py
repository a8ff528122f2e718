"""The result of `verify`: a row for each field of the output, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastbert import json_file

HEADINGS = ("field", "mode", "dtype", "batches", "worst batch", "error", "allowed", "result")


class Row(NamedTuple):
    """The comparison of one field of the output, or of the gradients of one kind of parameter.

    Attributes:
        batch: Name of the batch, such as "padded left" or "texts 1-16". In the mode "serving", the
            name is "all".
        dtype: Dtype of the parameters, such as "bfloat16".
        mode: "inference", "all outputs" or "gradients"; or "serving", for an encoder that fastbert
            does not run.
        field: Name of the field, such as "logits". In the mode "gradients", the name of the
            parameter, with ``*`` for the number of a layer. In the mode "serving", the name of the
            encoder.
        error: Largest error against float64; NaN if there is nothing to compare.
        allowed: Limit of `error` by the tolerance rule.
        passed: Whether the field passes.
        detail: The comparison in words, or the reason why there is none.
    """

    batch: str
    dtype: str
    mode: str
    field: str
    error: float
    allowed: float
    passed: bool
    detail: str


class LeftOut(NamedTuple):
    """A result that is not compared, and the reason.

    Attributes:
        batch: As in `Row`.
        dtype: As in `Row`.
        mode: As in `Row`.
        field: As in `Row`; "all" is every field.
        reason: The reason in words.
    """

    batch: str
    dtype: str
    mode: str
    field: str
    reason: str


class Report(NamedTuple):
    """The result of `verify`.

    Attributes:
        model: Name of the class of the model.
        rows: The comparisons. Every batch, dtype and mode has a row for each field, or in the mode
            "gradients" for each kind of parameter.
        left_out: The results that were not compared.
    """

    model: str
    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def passed(self) -> bool:
        """Whether there is a row and every row passes."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def failures(self) -> list[Row]:
        """The rows that fail."""
        return [row for row in self.rows if not row.passed]

    def __str__(self) -> str:
        """Return a table with each field's worst row, then failures and left-out results."""
        cells = [HEADINGS, *summary_cells(self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        return "\n".join([*lines, *self.remarks(), self.conclusion()])

    def remarks(self) -> list[str]:
        """Return a line for each failure, and a line for each mode, field and reason left out."""
        failed = [f"{row.batch}, {row.mode}, {row.dtype}: {row.detail}" for row in self.failures]
        places: dict[tuple[str, str, str], list[str]] = {}
        for each in self.left_out:
            listed = places.setdefault((each.mode, each.field, each.reason), [])
            listed.append(f"{each.batch} {each.dtype}")
        left = [
            f"not compared: {field}, {mode} ({', '.join(batches)}): {reason}"
            for (mode, field, reason), batches in places.items()
        ]
        return failed + left

    def conclusion(self) -> str:
        """Return the result in one sentence."""
        if not self.rows:
            return f"{self.model}: nothing was compared, which counts as FAILED"
        wrong = len(self.failures)
        share = (
            f"{wrong} of {len(self.rows)} rows FAILED" if wrong else f"all {len(self.rows)} pass"
        )
        return f"{self.model}: {share} by the tolerance rule"

    def to_json(self) -> str:
        """Return a JSON object with ``model``, ``passed``, ``rows`` and ``left_out``.

        A row and an entry of ``left_out`` are objects with the attributes of `Row` and `LeftOut`. A
        number that is not finite is null.
        """
        content: dict[str, Any] = {
            "model": self.model,
            "passed": self.passed,
            "rows": [row._asdict() for row in self.rows],
            "left_out": [each._asdict() for each in self.left_out],
        }
        return json.dumps(json_file.jsonable(content), indent=2, ensure_ascii=False)


def summary_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of one line for each field, mode and dtype; the line shows the worst row.

    The gradients have one line for each dtype, which names the worst kind of parameter. The worst
    row has the largest ratio of error to limit; a failed row is worse than any row that passes.

    Args:
        rows: The rows.

    Returns:
        Cells in the order of ``HEADINGS``.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        field = "" if row.mode == "gradients" else row.field
        groups.setdefault((row.dtype, row.mode, field), []).append(row)
    lines: list[tuple[str, ...]] = []
    for (dtype, mode, _), group in groups.items():
        worst = max(group, key=_badness)
        kinds = len({row.field for row in group})
        field = worst.field if mode != "gradients" else f"worst of {kinds}: {worst.field}"
        batches = str(len({row.batch for row in group}))
        figures = (f"{worst.error:.1e}", f"{worst.allowed:.1e}")
        result = "ok" if worst.passed else "FAILED"
        lines.append((field, mode, dtype, batches, worst.batch, *figures, result))
    return lines


def _badness(row: Row) -> tuple[bool, float]:
    share = row.error / row.allowed if row.allowed > 0.0 else 0.0
    return not row.passed, share if share == share else 0.0
