"""``fastbert check --aot``: compile all shipped Triton launches ahead of time, and check them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastbert.cli.common import err, new_table, out, print_json_rows

if TYPE_CHECKING:
    from fastbert.testing.ahead_of_time import Compiled


def check_compiled(architectures: str, as_json: bool) -> bool:
    """Compile the shipped Triton launches for `architectures`, and print the results.

    Args:
        architectures: Numbers separated by commas, such as "80,90" for sm_80 and sm_90.
        as_json: Whether JSON is printed instead of a table.

    Returns:
        Whether all launches pass.

    Raises:
        ValueError: If an architecture is not known.
        ImportError: If triton is not installed.
    """
    from fastbert.testing import ahead_of_time

    known = ahead_of_time.ARCHITECTURES
    try:
        chosen = tuple(int(text) for text in architectures.split(","))
    except ValueError:
        chosen = ()
    if not chosen or not set(chosen) <= set(known):
        allowed = ", ".join(map(str, known))
        raise ValueError(f"--arch: got {architectures!r}, allowed: some of {allowed}, by commas")
    compiled = _with_progress(chosen)
    if as_json:
        launches = print_json_rows("launches", compiled, _outcome)
    else:
        launches = list(compiled)
        _print(launches, summarize(launches))
    return all(launch.passed for launch in launches)


def _outcome(launches: list[Compiled]) -> dict[str, Any]:
    passed = all(launch.passed for launch in launches)
    return {"summary": summarize(launches), "passed": passed}


def _with_progress(architectures: Sequence[int]) -> Iterator[Compiled]:
    from fastbert.testing.ahead_of_time import compile_launches

    columns = (TextColumn("compile"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.description}"), console=err, transient=True
    ) as progress:
        task = progress.add_task("", total=None)
        for launch in compile_launches(architectures, processes=os.cpu_count() or 1):
            description = f"{launch.name} {launch.dtype} sm_{launch.arch}"
            progress.update(
                task, completed=launch.number, total=launch.total, description=description
            )
            yield launch


def summarize(launches: list[Compiled]) -> list[dict[str, Any]]:
    """Return a dict per kernel, dtype and architecture, with the worst figures of its launches."""
    groups: dict[tuple[str, str, int], list[Compiled]] = {}
    for launch in launches:
        groups.setdefault((launch.name, launch.dtype, launch.arch), []).append(launch)
    return [
        {
            "kernel": name,
            "dtype": dtype,
            "arch": arch,
            "launches": len(group),
            "registers": max(launch.registers for launch in group),
            "stack": max(launch.stack for launch in group),
            "shared": max(launch.shared for launch in group),
            "matrix": " ".join(sorted({launch.matrix for launch in group})),
            "load": min(max(launch.loads, default=0) for launch in group),
            "passed": all(launch.passed for launch in group),
        }
        for (name, dtype, arch), group in sorted(groups.items())
    ]


def _print(launches: list[Compiled], summary: list[dict[str, Any]]) -> None:
    table = new_table()
    for heading in ("kernel", "dtype", "GPU"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "launches",
        "registers",
        "stack",
        "shared memory",
        "matrix unit",
        "widest load",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for line in summary:
        table.add_row(
            line["kernel"],
            line["dtype"],
            f"sm_{line['arch']}",
            str(line["launches"]),
            str(line["registers"]),
            f"{line['stack']} B",
            f"{line['shared'] / 1024:.0f} KiB",
            line["matrix"],
            f"{line['load']} B",
            "[green]ok[/]" if line["passed"] else "[bold red]FAILED[/]",
        )
    out.print(table)
    failures = [launch for launch in launches if not launch.passed]
    for launch in failures:
        out.print(f"{launch}:", style="red", markup=False, soft_wrap=True)
        for fault in launch.faults:
            out.print(f"  {fault}", style="red", markup=False, soft_wrap=True)
    outcome = (
        f"{len(failures)} of {len(launches)} FAILED" if failures else f"all {len(launches)} ok"
    )
    out.print(
        f"{outcome}. A launch passes if it spills no registers, uses the matrix units and 16-byte "
        "loads, computes addresses in 64 bits and fp32 products in IEEE fp32, overwrites no "
        "operand of a running product, and its shared memory fits.",
        highlight=False,
    )
