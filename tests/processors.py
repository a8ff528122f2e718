"""Run the numeric tests with the yardsticks of other processors.

    python tests/processors.py [pytest's arguments]    # or: make test-processors

Variables of MKL, oneDNN and ATen choose the code that torch runs on an older processor. The kernels
of fastbert remain those of this machine, so each run compares the same results with another
yardstick. The exit status is 1 if a test fails in one of the runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIRECTORIES = [
    *("tests/csrc", "tests/kernels", "tests/ops", "tests/modules"),
    *("tests/integrations", "tests/testing", "tests/bench", "tests/cli", "tests/data"),
    *("tests/inference", "tests/jobs"),
]
PROCESSORS = {
    "SSE": {
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "ATEN_CPU_CAPABILITY": "default",
    },
    "AVX2": {
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
    "AVX-512": {
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "ATEN_CPU_CAPABILITY": "avx512",
    },
}


def main() -> int:
    failed = []
    for name, variables in PROCESSORS.items():
        print(f"== {name}: {variables}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *DIRECTORIES, *sys.argv[1:]]
        if subprocess.run(command, cwd=ROOT, env=os.environ | variables).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all tests pass with every yardstick")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
