"""Draw comment and docstring lines for a reader who grades the prose.

``python tests/sample_prose.py --seed 7 --count 42 --paths csrc fastbert`` prints each drawn line
with its file and number, and with the line before and after it. The same seed and the same files
give the same lines. A reader grades each line as clear, half or unclear.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
CPP = {".c", ".cpp", ".cu", ".cuh", ".h"}
# The expression matches a C++ comment, or a string or character that may contain two slashes.
CPP_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|(//.*)')
# Comments for tools, comments at the end of a namespace, and examples in docstrings are not prose.
NO_PROSE = re.compile(
    r"#!|# (fmt|mypy|noqa|ruff|type)\b|// (NOLINT|clang-format|namespace)\b|>>> |\.\.\. "
)
FEWEST_WORDS = 3


class Line(NamedTuple):
    """A line of a file that contains prose.

    Attributes:
        path: Path of the file from the root of the repository.
        number: Number of the line, from 1.
        context: The line and its existing neighbours, by line number.
    """

    path: str
    number: int
    context: dict[int, str]

    def __str__(self) -> str:
        """Return the path, the number, and the lines, with an arrow at the drawn line."""
        lines = [f"{self.path}:{self.number}"]
        for number, text in self.context.items():
            lines.append(f"{'->' if number == self.number else '  '} | {text}".rstrip())
        return "\n".join(lines)


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the prose of each line of a comment or a docstring."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    lines = text.splitlines()
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            for number in range(docstring.lineno, docstring.end_lineno + 1):
                yield number, lines[number - 1]


def cpp_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each ``//`` comment."""
    for number, line in enumerate(text.splitlines(), 1):
        for token in CPP_TOKEN.finditer(line):
            if token[1]:
                yield number, token[1]


def is_prose(text: str) -> bool:
    """Return whether a line of a comment or a docstring has words for a reader."""
    return not NO_PROSE.search(text) and len(re.findall(r"[A-Za-z]{2,}", text)) >= FEWEST_WORDS


def lines_of(path: str, text: str) -> list[Line]:
    """Return the lines of a file that contain prose, in order."""
    prose = python_prose if path.endswith(".py") else cpp_prose
    numbers = sorted({number for number, words in prose(text) if is_prose(words)})
    lines = dict(enumerate(text.splitlines(), 1))
    return [
        Line(path, n, {m: lines[m] for m in range(n - 1, n + 2) if m in lines}) for n in numbers
    ]


def files(root: Path, paths: Sequence[str]) -> list[str]:
    """Return the Python, C++ and CUDA files in `paths` that git tracks, in order."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [Path(name) for name in listed.stdout.split("\0") if name]
    # git also lists the symlink `fastbert/kernels` to a folder; the filter by suffix removes it.
    return sorted(p.as_posix() for p in names if p.suffix == ".py" or p.suffix in CPP)


def sample(root: Path, paths: Sequence[str], seed: int, count: int) -> list[Line]:
    """Return `count` random lines in random order, or all lines if there are fewer."""
    lines = [
        line
        for path in files(root, paths)
        for line in lines_of(path, (root / path).read_text(encoding="utf-8"))
    ]
    return random.Random(seed).sample(lines, min(count, len(lines)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the sample of lines that the command-line options describe."""
    parser = argparse.ArgumentParser(description="Draw comment and docstring lines by seed.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=42)
    parser.add_argument("--paths", nargs="*", default=[], help="files and folders; all by default")
    given = parser.parse_args(arguments)
    print("\n\n".join(map(str, sample(ROOT, given.paths, given.seed, given.count))))


if __name__ == "__main__":
    main()
