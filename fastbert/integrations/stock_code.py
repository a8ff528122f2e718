"""Check whether the code that a class of transformers or torch reaches is the code of its files.

An HF model is compared with a fresh model of the same class, and both run the same code. That
comparison cannot detect a method, a global name or a table entry that was replaced in the process.
This module therefore compares the code that a class reaches with the code in the file of the class.
It compares methods, the functions in closures of decorators, the functions that global names lead
to, and the entries "eager" and "sdpa" of the tables of attention functions and masks.

A replaced function is recognised by its name, by its module, or by a decorator that is not in the
class body. The names that a function reads are taken from its code object, so a name that the
function uses only as an attribute of another object is followed too. The comparison may therefore
cover more code than the function runs, but never less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from fastbert.integrations.stock_files import (
    body_of,
    constants_of,
    content,
    placed,
    same,
)
from fastbert.integrations.stock_functions import (
    CODE,
    COMPARED,
    FOLLOW,
    NAMES,
    Record,
    forget,
    function_record,
    within,
)

# Python and torch call these methods of a module or of a container without naming them.
IMPLICIT = frozenset(
    [
        "forward",
        "__init__",
        "__call__",
        "__getattr__",
        "__getattribute__",
        "__iter__",
        "__getitem__",
        "__len__",
        "__bool__",
        "__contains__",
        "__torch_function__",
    ]
)
# Attributes that Python creates for every class.
GENERATED = frozenset(
    (
        "__dict__",
        "__weakref__",
        "__module__",
        "__doc__",
        "__qualname__",
        "__annotations__",
        "__name__",
        "__class__",
    )
)
# The name of a method in the class nn.Module → the name of the function that is stored there.
ALIASES = {"__call__": "_wrapped_call_impl", "forward": "_forward_unimplemented"}
# The name of a wrapper that torch puts around a function → the name of its decorator.
WRAPPERS = {"context_decorator": "no_grad"}
# Functions of torch that wrap a method of a class in place. torch.compile wraps nn.Module.__init__.
PATCHES = ("install_generation_tagging_init",)


class Code(NamedTuple):
    """The code that one class reaches.

    Attributes:
        problem: A description of the first difference from the files, or None if there is none.
        names: The identifiers in all code that the class reaches.
        own: The identifiers in the methods of the class and of its base classes.
        records: The comparison results of all functions and classes that the class reaches.
    """

    problem: str | None
    names: frozenset[str]
    own: frozenset[str]
    records: tuple[Record, ...]


_codes: dict[type, Code] = {}
_attributes: dict[tuple[type, str], tuple[list[Record], str | None]] = {}


def code_of(kind: type) -> Code:
    """Return the code that the class `kind` reaches.

    The result is cached. Call `refresh` with the class before you use the result, because a class,
    a function or a global name may have been replaced since.

    Args:
        kind: A subclass of ``nn.Module``.
    """
    if kind not in _codes:
        root = _class_record(kind)
        reached: dict[int, Record] = {}
        waiting = [root]
        while waiting:
            record = waiting.pop()
            if id(record) not in reached:
                reached[id(record)] = record
                waiting += reversed(record.reached)
        records = tuple(reached.values())
        problems = (record.problem for record in records if record.problem is not None)
        names = frozenset().union(*(record.names for record in records))
        _codes[kind] = Code(next(problems, None), names, root.names, records)
    return _codes[kind]


def problem_of(kind: type) -> str | None:
    """Return how the code that `kind` reaches differs from its files, or None if it does not.

    Args:
        kind: A subclass of ``nn.Module``.
    """
    refresh([kind])
    return code_of(kind).problem


def refresh(kinds: Iterable[type]) -> None:
    """Clear all cached results if the code of one of the classes `kinds` has changed."""
    records = {id(r): r for kind in kinds if kind in _codes for r in _codes[kind].records}
    if not all(record.holds() for record in records.values()):
        forget()
        _codes.clear()
        _attributes.clear()


def facts(kinds: Iterable[type]) -> tuple[list[dict[str, Any]], list[type], list[FunctionType]]:
    """Return the objects whose changes make the comparisons of the classes `kinds` outdated.

    Args:
        kinds: Subclasses of ``nn.Module``.

    Returns:
        The dictionaries whose entries the code loads, the classes whose attributes the code uses,
        and the functions that the code reaches, whose ``__code__`` and defaults can be replaced.
    """
    records = {id(r): r for kind in kinds for r in code_of(kind).records}.values()
    dicts = {id(e.names): e.names for record in records for e in record.entries}
    subjects = {id(record.subject): record.subject for record in records}.values()
    return (
        list(dicts.values()),
        [subject for subject in subjects if isinstance(subject, type)],
        [subject for subject in subjects if isinstance(subject, FunctionType)],
    )


# Classes


def _class_record(kind: type) -> Record:
    """Compare the methods of a class that its ``forward`` or any name in `IMPLICIT` reaches."""
    record = Record(kind)
    names, done = set(IMPLICIT), frozenset[str]()
    bases = [base for base in kind.__mro__ if base is not object]
    record.reached += [Record(base) for base in bases[1:]]
    while not names <= done:
        new = names - done - GENERATED
        done |= names
        for base in bases:
            for name in sorted(new & vars(base).keys()):
                if (base, name) not in _attributes:
                    _attributes[base, name] = _attribute(base, name)
                reached, problem = _attributes[base, name]
                record.problem = record.problem or problem
                record.reached += reached
                for each in _through_closures(reached):
                    names |= each.names
    record.names = frozenset(names)
    return record


def _through_closures(records: list[Record]) -> Iterator[Record]:
    """Yield the records, and the records of functions in the closures of their subjects."""
    waiting, seen = list(records), set()
    while waiting:
        record = waiting.pop()
        if id(record) in seen:
            continue
        seen.add(id(record))
        yield record
        inner = {id(content(cell)) for cell in record.subject.__closure__ or ()}
        waiting += [r for r in record.reached if id(r.subject) in inner]


def _attribute(base: type, name: str) -> tuple[list[Record], str | None]:
    """Compare one attribute of a class with the class statement in its file."""
    value = vars(base)[name]
    title = f"{base.__module__}.{base.__qualname__}.{name}"
    if not within(base.__module__, COMPARED):
        if base.__module__ in ("typing", "abc", "collections.abc"):
            return [], None
        return [], f"{title}: got a method of {base.__module__}, allowed: transformers and torch"
    body = body_of(base)
    if body is None:
        return [], f"{title}: got a class without a file, allowed: a class of its module's file"
    functions = _functions(value)
    if functions is None:
        return [], _value_problem(body, name, value, title)
    # The attributes that __init__ sets are compared elsewhere, so the names in the code of __init__
    # are not followed.
    depth = CODE if name == "__init__" else NAMES if base is nn.Module else FOLLOW
    records = [function_record(function, depth) for function in functions]
    problem = next((p for f in functions if (p := _method_problem(base, body, name, f))), None)
    return records, None if problem is None else f"{title}: {problem}"


def _functions(value: Any) -> list[FunctionType] | None:
    """Return the functions in an attribute of a class, or None if it contains anything else."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        parts = [f for f in (value.fget, value.fset, value.fdel) if f is not None]
        functions = [f for f in parts if isinstance(f, FunctionType)]
        return functions if len(functions) == len(parts) else None
    return [value] if isinstance(value, FunctionType) else None


def _value_problem(body: CodeType, name: str, value: Any, title: str) -> str | None:
    constants = constants_of(body)
    if name in constants:
        expected = constants[name]
        right = same(value, expected)
        return None if right else f"{title}: got {value!r}, allowed: {expected!r}"
    if name not in body.co_names:
        return f"{title}: got {value!r}, allowed: no such attribute of the class"
    if hasattr(type(value), "__get__"):
        return f"{title}: got a {type(value).__name__}, allowed: what its file says"
    return None


def _method_problem(base: type, body: CodeType, name: str, value: FunctionType) -> str | None:
    """Return why a method differs from the class statement, or None if it does not.

    A decorator's wrapper is allowed if the class statement names the decorator, or if it is the
    wrapper that ``GradientCheckpointingLayer`` puts around ``forward``.
    """
    function, depth = value, 0
    while function.__code__ not in body.co_consts:
        place = placed(function.__code__, function.__globals__.get("__name__", ""))
        if place is None:
            return "got other code, allowed: the code of its file"
        if ALIASES.get(name) == function.__code__.co_name and base is nn.Module:
            return None
        wrapper = WRAPPERS.get(place.outermost, place.outermost)
        inherits = any(each.__name__ == wrapper for each in base.__mro__)
        if wrapper not in (*body.co_names, *PATCHES) and not inherits:
            return f"got a function of {wrapper}, allowed: the function in its file"
        cells = [content(cell) for cell in function.__closure__ or ()]
        inner = [cell for cell in cells if isinstance(cell, FunctionType) and cell is not function]
        inner = [cell for cell in inner if cell.__name__ == name] or inner
        depth += 1
        if not inner or depth > 9:
            return f"got a wrapper of {wrapper}, allowed: a wrapper around the function in its file"
        function = inner[0]
    code_name = function.__code__.co_name
    return None if code_name in (name, ALIASES.get(name)) else f"got {code_name}, allowed: {name}"
