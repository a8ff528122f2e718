"""The functions of transformers whose semantics fastbert implements, pinned by digests.

Code that equals its file may still compute something new after a release of transformers. The table
``stock_digests.json`` therefore holds the digests of the files and of the functions that the
families reach, for versions whose outputs and gradients were compared with fastbert's. A function
with another digest is unknown, and needs the comparison of `fastbert.integrations.probe`.

``python -m fastbert.integrations.stock_digests`` adds the installed version to the table. Run the
tests of the families with that version first.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from fastbert.integrations import stock_code
from fastbert.integrations.twin_cache import MODULES

PINNED = "transformers."
# The constructor of the base class of all models computes nothing that a forward uses.
BASE = ("transformers.modeling_utils", "__init__")
# The parts of a syntax tree that do not change what a function computes.
LEFT_OUT = ("annotation", "returns", "type_comment", "ctx", "kind", "type_params")
TABLE = Path(__file__).with_suffix(".json")


def unknown(kinds: Iterable[type]) -> list[str]:
    """Return the functions of transformers that the classes reach and that are not pinned.

    Args:
        kinds: Classes of the modules of an encoder. Their code must equal the code of their files.

    Returns:
        Names such as ``transformers.models.bert.modeling_bert.BertLayer.forward``, sorted.
    """
    table = _table()
    names = set()
    for function in _functions(kinds):
        module = function.__globals__["__name__"]
        if _file_digest(module) in table["files"]:
            continue
        name, digest = pin_of(function)
        if digest not in table["functions"].get(name, ()):
            names.add(name)
    return sorted(names)


def digest_of(node: ast.AST) -> str:
    """Return a digest of a function's syntax, without comments, docstrings and annotations."""
    return hashlib.sha256("".join(_syntax(node)).encode()).hexdigest()[:16]


def _functions(kinds: Iterable[type]) -> Iterator[FunctionType]:
    seen = set()
    for kind in kinds:
        for record in stock_code.code_of(kind).records:
            subject = record.subject
            if isinstance(subject, FunctionType) and id(subject) not in seen:
                seen.add(id(subject))
                module = subject.__globals__.get("__name__", "")
                if module.startswith(PINNED) and (module, subject.__name__) != BASE:
                    yield subject


def pin_of(function: FunctionType) -> tuple[str, str]:
    """Return the name and the digest of a function, whose code must be the code of its file."""
    module = function.__globals__["__name__"]
    code = function.__code__
    name, digest = _digests(module).get((code.co_name, code.co_firstlineno), (code.co_name, ""))
    return f"{module}.{name}", digest


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


@functools.cache
def _source(module: str) -> str:
    """Return the source of a module, or an empty string if there is none."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    try:
        return spec.loader.get_source(module) or ""  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError):
        return ""


@functools.cache
def _file_digest(module: str) -> str:
    spec = getattr(sys.modules.get(module), "__spec__", None)
    try:
        content = spec.loader.get_data(spec.origin)  # type: ignore[union-attr]
    except (AttributeError, OSError, TypeError):
        return ""
    return hashlib.sha256(content).hexdigest()[:32]


@functools.cache
def _digests(module: str) -> dict[tuple[str, int], tuple[str, str]]:
    """Return the path and the digest of each function in a file, by its name and first line."""
    digests: dict[tuple[str, int], tuple[str, str]] = {}

    def visit(node: ast.AST, before: str) -> None:
        for child in ast.iter_child_nodes(node):
            path = before
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                path = f"{before}{child.name}."
                if not isinstance(child, ast.ClassDef):
                    line = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                    digests[child.name, line] = path[:-1], digest_of(child)
            visit(child, path)

    visit(ast.parse(_source(module)), "")
    return digests


def _syntax(node: Any) -> Iterator[str]:
    """Yield the parts of a syntax tree in a form that does not depend on Python's version."""
    if isinstance(node, list):
        yield "["
        for each in node:
            yield from _syntax(each)
        yield "]"
    elif not isinstance(node, ast.AST):
        yield f"{node!r};"
    elif not (isinstance(node, ast.Expr) and _is_text(node.value)):
        yield f"{type(node).__name__}("
        for name, value in ast.iter_fields(node):
            if value is not None and value != [] and name not in LEFT_OUT:
                yield f"{name}="
                yield from _syntax(value)
        yield ")"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def main() -> None:
    """Add the files and functions of the installed version of transformers to the table."""
    version = importlib.import_module("transformers").__version__
    table = _table() if TABLE.exists() else {"files": {}, "functions": {}}
    for module in _modules():
        table["files"][_file_digest(module)] = f"{module} {version}"
    for function in _functions(_kinds()):
        name, digest = pin_of(function)
        table["functions"][name] = sorted({digest, *table["functions"].get(name, ())})
    table = {part: dict(sorted(table[part].items())) for part in ("files", "functions")}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


@functools.cache
def _kinds() -> frozenset[type]:
    """Return the classes of the modules in the families' default models, and other activations."""
    kinds = set()
    # The default configuration of ESM has no vocabulary, and that of T5 has no gate.
    settings: dict[str, tuple[dict[str, Any], ...]] = {
        "EsmModel": ({"vocab_size": 33, "position_embedding_type": "rotary"},),
        "T5Stack": ({}, {"feed_forward_proj": "gated-gelu"}),
    }
    for name, module in MODULES.items():
        stock = getattr(importlib.import_module(module), name)
        for given in settings.get(name, ({},)):
            with torch.device("meta"):
                kinds |= {type(each) for each in stock(stock.config_class(**given)).modules()}
    for activation in ("NewGELUActivation", "GELUTanh", "SiLUActivation"):
        kinds.add(getattr(importlib.import_module("transformers.activations"), activation))
    return frozenset(kinds)


def _modules() -> list[str]:
    return sorted({function.__globals__["__name__"] for function in _functions(_kinds())})


if __name__ == "__main__":
    main()
