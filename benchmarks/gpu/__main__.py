"""Build, test, check and time fastbert on a GPU machine; write all results to a folder.

    python -m benchmarks.gpu --out out/gpu                        # all sections
    python -m benchmarks.gpu build bench-attention --out out/gpu  # some sections
    python -m benchmarks.gpu build bench-rows --minutes 9         # on a machine lent for ten
    python -m benchmarks.gpu --dry-run                            # on any machine, without a GPU

The command uses the machine's own Python and downloads nothing. A section is ended after nine
minutes. If a section fails, the next section still runs. The exit status is 1 if a section failed.
It is 2 if the machine has no CUDA device, or if TORCH_CUDA_ARCH_LIST leaves out the kernels for the
machine's GPU. A dry run lists the commands, runs every benchmark on tiny shapes on the CPU, and
compiles every shipped Triton launch for sm_90.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu import bench, summary
from benchmarks.gpu.sections import Section, refused_architectures, run, sections

DRY_ARCHITECTURE = "90"


def main() -> int:
    names = list(sections(Path()))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(names))
    parser.add_argument(
        "--out", type=Path, default=Path("out/gpu"), help="folder that receives the results"
    )
    parser.add_argument("--dry-run", action="store_true", help="try what needs no GPU")
    parser.add_argument(
        "--minutes", type=float, help="time of the whole command; without it, nine per section"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(names):
        parser.error(f"SECTION: got {', '.join(sorted(unknown))}, allowed: {', '.join(names)}")
    folder = arguments.out.resolve()
    wanted = [s for n, s in sections(folder).items() if n in (arguments.sections or names)]
    if arguments.dry_run:
        return dry_run(wanted)
    import torch

    if not torch.cuda.is_available():
        print(
            "benchmarks.gpu: this machine has no CUDA device, so nothing was run; --dry-run lists "
            "the commands",
            file=sys.stderr,
        )
        return 2
    if "build" in [section.name for section in wanted] and (reason := refused_architectures()):
        print(f"benchmarks.gpu: nothing was run: {reason}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    start = time.monotonic()
    for section in wanted:
        used = time.monotonic() - start
        left = None if arguments.minutes is None else 60 * arguments.minutes - used
        results.append(run(section, folder, seconds=left))
        summary.write(folder, results)
    summary.print_table(folder, results)
    return 1 if any(result["status"] for result in results) else 0


def dry_run(wanted: list[Section]) -> int:
    """List the commands, run tiny benchmarks, and compile the Triton kernels of the sections.

    Returns 1 if a benchmark or a compilation fails, else 0.
    """
    for section in wanted:
        print(f"[{section.name}] {section.about}")
        for command in section.commands:
            print(f"[{section.name}]   {shlex.join(command)}")
        if section.name in bench.SECTIONS:
            _list_matches(section.name)
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for section in wanted:
            command = _dry_command(section.name, scratch)
            if command is None:
                continue
            tried = Section(section.name, section.about, (command,))
            # The section runs in a new process, as on a GPU machine. In this process, it may be too
            # late to set TRITON_INTERPRET, because Triton's kernels may be loaded.
            if run(tried, Path(scratch), notify=_echo)["status"]:
                failed.append(section.name)
            _show(Path(scratch), section.name)
    print(f"dry run: {'faults in ' + ', '.join(failed) if failed else 'no fault'}")
    return 1 if failed else 0


def _list_matches(section: str) -> None:
    matches = bench.matches_of(section, "cpu", toy=False)
    for match in matches:
        print(f"[{section}]   {match.series}: {match.label}")
    engines = dict.fromkeys(c.name for match in matches for c in match.contenders if not c.ours)
    print(f"[{section}]   {len(matches)} matches; peers: {', '.join(engines)}")


def _dry_command(section: str, scratch: str) -> tuple[str, ...] | None:
    if section in bench.SECTIONS:
        module = (sys.executable, "-m", "benchmarks.gpu.bench", section, "--toy")
        return (*module, "--out", scratch)
    if section == "compile":
        return (sys.executable, "-m", "fastbert", "check", "--aot", "--arch", DRY_ARCHITECTURE)
    return None


def _echo(text: str) -> None:
    print(text, flush=True)


def _show(folder: Path, section: str) -> None:
    """Print which contenders ran or were refused, or the log of a section without contenders."""
    log, figures = folder / f"{section}.log", folder / f"{section}.json"
    if section not in bench.SECTIONS and log.exists():
        print(log.read_text("utf-8"), end="")
    elif figures.exists():
        rows = json.loads(figures.read_text("utf-8"))["rows"]
        refused = {row["contender"]: row["refused"] for row in rows if "refused" in row}
        ran = dict.fromkeys(row["contender"] for row in rows if "seconds" in row)
        print(f"[{section}]   ran on the CPU: {', '.join(ran)}")
        for name, reason in refused.items():
            print(f"[{section}]   did not run on the CPU: {name}: {reason[:80]}")


if __name__ == "__main__":
    sys.exit(main())
