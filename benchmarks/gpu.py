"""One command for a GPU machine: build, tests, parity, benchmarks; output kept in a folder.

    python -m benchmarks.gpu --out out/gpu                # everything
    python -m benchmarks.gpu --out out/gpu check bench    # some sections
    python -m benchmarks.gpu --dry-run                    # what would run, on any machine

A section that fails does not stop the next one; the exit status is 1 when any failed, and 2
when the machine has no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def sections(folder: Path) -> dict[str, list[list[str]]]:
    """Section → its commands, in the order in which they run."""
    python = sys.executable
    fastbert = [python, "-m", "fastbert"]
    return {
        "build": [[python, "setup.py", "--quiet", "build_ext", "--inplace"], [*fastbert, "info"]],
        "test": [[python, "-m", "pytest", "-q", "tests"]],
        "check": [[*fastbert, "check"]],
        "bench": [
            [*fastbert, "bench", "--json", f"{folder}/bench.json", "--plot", f"{folder}/bench.png"]
        ],
    }


def run(name: str, commands: list[list[str]], folder: Path) -> dict[str, object]:
    """Runs one section from the repository root; everything it prints goes to ``<section>.log``."""
    # The extension must contain the CUDA kernels here, or the build has to fail.
    environment = {**os.environ, "FASTBERT_CUDA": "1"}
    start = time.monotonic()
    status = 0
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        for command in commands:
            print(f"[{name}] {shlex.join(command)}", flush=True)
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            status = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
            if status:
                break
    seconds = round(time.monotonic() - start, 1)
    print(f"[{name}] {'ok' if status == 0 else f'FAILED, exit status {status}'} after {seconds} s")
    return {"section": name, "status": status, "seconds": seconds}


def has_cuda_device() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> int:
    names = list(sections(Path()))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(names):
        parser.error(f"SECTION: got {', '.join(sorted(unknown))}, allowed: {', '.join(names)}")
    folder = arguments.out.resolve()
    wanted = {n: c for n, c in sections(folder).items() if n in (arguments.sections or names)}
    if arguments.dry_run:
        for name, commands in wanted.items():
            for command in commands:
                print(f"[{name}] {shlex.join(command)}")
        return 0
    if not has_cuda_device():
        print(
            "gpu.py: no CUDA device, nothing was run (--dry-run lists what would)", file=sys.stderr
        )
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    results = [run(name, commands, folder) for name, commands in wanted.items()]
    (folder / "summary.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 1 if any(result["status"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
