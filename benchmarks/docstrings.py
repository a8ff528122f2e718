"""Real English text: the docstrings of the installed Python packages.

A document is the text of one module of a package: the paragraphs of its docstrings. Paragraphs with
an indented line or an example are left out, because they are code or lists.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("matplotlib", "networkx", "numpy", "pandas", "scipy", "sklearn", "sympy")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Document(NamedTuple):
    """The prose of one module.

    Attributes:
        package: Name of the package.
        module: Path of the module in its package.
        paragraphs: The paragraphs of its docstrings, each of at least one line.
    """

    package: str
    module: str
    paragraphs: list[str]


def installed(packages: Sequence[str] = PACKAGES) -> list[str]:
    """Return the names in ``packages`` whose packages are installed."""
    return [name for name in packages if importlib.util.find_spec(name) is not None]


def documents(packages: Sequence[str]) -> Iterator[Document]:
    """Read the docstrings of packages, sorted by package and path; tests are left out.

    Args:
        packages: Names of the packages.

    Yields:
        The modules that have prose.

    Raises:
        ValueError: If a package is not installed; the message names the package.
    """
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ValueError(f"packages: got {package}, allowed: packages that are installed")
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            place = path.relative_to(folder)
            if any("test" in part for part in place.parts):
                continue
            paragraphs = _paragraphs(path)
            if paragraphs:
                yield Document(package, str(place), paragraphs)


def _paragraphs(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    paragraphs = [part.strip("\n") for text in texts for part in re.split(r"\n[ \t]*\n", text)]
    # A class and its methods often have the same paragraph, which is kept once.
    return list(dict.fromkeys(part for part in paragraphs if part and _is_prose(part)))


def _is_prose(paragraph: str) -> bool:
    return not any(line[0].isspace() or line.startswith(">>>") for line in paragraph.splitlines())
