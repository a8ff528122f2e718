"""The code objects that the loaders of Python modules read from the files of the modules."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

MISSING = object()


class Placed(NamedTuple):
    """A code object of a file, with its surroundings.

    Attributes:
        code: The code object.
        parent: The code object that contains `code`.
        outermost: Name of the function or class at the top level of the file that contains `code`.
    """

    code: CodeType
    parent: CodeType
    outermost: str


@functools.cache
def file_of(name: str) -> tuple[dict[tuple[str, int], list[Placed]], CodeType] | None:
    """Return the code objects of a module's file by name and first line, and the file's own code.

    The result is None if the loader of the module gives no code.
    """
    spec = getattr(sys.modules.get(name), "__spec__", None)
    try:
        whole = spec.loader.get_code(name)  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError, SyntaxError):
        whole = None
    if whole is None:
        return None
    placed: dict[tuple[str, int], list[Placed]] = {}
    waiting = [(whole, "")]
    while waiting:
        parent, outermost = waiting.pop()
        for child in parent.co_consts:
            if isinstance(child, CodeType):
                place = Placed(child, parent, outermost or child.co_name)
                placed.setdefault((child.co_name, child.co_firstlineno), []).append(place)
                waiting.append((child, place.outermost))
    return placed, whole


@functools.cache
def defined_in(module: str) -> frozenset[str]:
    """Return the names of the functions and classes at the top level of a module's file."""
    file = file_of(module)
    codes = file[1].co_consts if file is not None else ()
    return frozenset(code.co_name for code in codes if isinstance(code, CodeType))


def placed(code: CodeType, module: str) -> Placed | None:
    """Return the code object in the file of `module` that equals `code`, or None if none does."""
    file = file_of(module)
    places = file[0].get((code.co_name, code.co_firstlineno), []) if file is not None else []
    return next((place for place in places if place.code == code), None)


@functools.cache
def body_of(kind: type) -> CodeType | None:
    """Return the code object of the class statement of `kind`, or None if its file has none."""
    file = file_of(kind.__module__)
    for (name, _), places in (file[0] if file is not None else {}).items():
        for place in places if name == kind.__name__ else ():
            if "__qualname__" in place.code.co_names and kind.__qualname__ in place.code.co_consts:
                return place.code
    return None


@functools.cache
def constants_of(body: CodeType) -> dict[str, Any]:
    """Return the constants that the body of a class statement assigns to names, by name."""
    constants = {}
    for before, step in itertools.pairwise(dis.get_instructions(body)):
        constant = before.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
        if constant and step.opname == "STORE_NAME":
            constants[step.argval] = before.argval
    return constants


def codes_inside(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all code objects inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_inside(constant)


@functools.cache
def identifiers(code: CodeType) -> frozenset[str]:
    """Return the names in a code object, and the strings in it that could be names."""
    names: set[str] = set()
    for each in codes_inside(code):
        names.update(each.co_names)
        names.update(c for c in each.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(names)


def content(cell: Any) -> Any:
    """Return the content of a closure cell, or MISSING if it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def same(a: Any, b: Any) -> bool:
    """Return whether two values are the same object, or equal constants of the same type.

    Tuples are compared element by element. Constants are numbers, strings, bytes, None and
    Ellipsis.
    """
    if isinstance(a, tuple):
        return type(b) is tuple and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (int, float, str, bytes, type(None), type(Ellipsis))):
        return type(a) is type(b) and a == b
    return a is b
