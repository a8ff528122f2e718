"""The commands and the program in the README must print the output that the README shows."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = {kind: [t for k, t in BLOCK.findall(README) if k == kind] for kind in ("cuda", "console")}


def without_numbers_of_the_compiler(text: str) -> list[str]:
    """Return the lines of a text without PTX line numbers and counts.

    These numbers depend on the release of nvcc.
    """
    lines = re.sub(r"(?<=PTX line )\d+", "N", text).strip().splitlines()
    counts = re.compile(r"  (?!argument)")
    return [re.sub(r" +\d+", "", line) if counts.match(line) else line for line in lines]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_commands_of_the_tutorial(tmp_path):
    for name, source in zip(("sum.cu", "copy.cu", "cluster.cu"), BLOCKS["cuda"], strict=True):
        (tmp_path / name).write_text(source, encoding="utf-8")
    # The command runs in the interpreter of the test, so that it uses the same ptxmachine.
    ptxmachine = f"{shlex.quote(sys.executable)} -m ptxmachine.command"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for block in BLOCKS["console"]:
        *commands, last = block.split("\n", 2)
        shell = "\n".join(command.removeprefix("$ ") for command in commands)
        run = subprocess.run(
            ["bash", "-c", shell.replace("ptxmachine run", f"{ptxmachine} run")],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        shown, got = map(without_numbers_of_the_compiler, (last, run.stdout + run.stderr))
        assert got == shown, shell


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_program_of_the_tutorial(tmp_path):
    [program] = [text for kind, text in BLOCK.findall(README) if kind == "python"]
    printed = re.search(r"It prints `(.+)`", README)[1]
    # Triton reads the source of a kernel from a file.
    file = tmp_path / "program.py"
    file.write_text(program, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, str(file)], env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == printed, run.stderr
