"""Whether the code that a class of transformers or torch reaches is the code of its files.

A host is compared with a fresh model of the same class, and both run the same code. A method, a
global name or a table entry that was replaced in the process is therefore the same on both sides.
This module compares the code that a class reaches with the code that the loader of its file gives:
methods, the functions in closures of decorators, the functions that global names lead to, and the
entries "eager" and "sdpa" of the tables of attention functions and masks.

Two functions that a name could lead to are told apart by their names, by their modules and by the
decorators of the class body. The names that a function contains are taken from its code object, so
that a name which the function uses as an attribute of another object counts as well. That makes a
verdict more careful and never less careful.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from fastbert.integrations.stock_files import (
    MISSING,
    body_of,
    codes_inside,
    constants_of,
    content,
    defined_in,
    identifiers,
    placed,
    same,
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
# Python makes these attributes of every class.
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
# The methods of nn.Module that are stored under two names.
ALIASES = {"__call__": "_wrapped_call_impl", "forward": "_forward_unimplemented"}
# The wrapper that torch puts around a function → the name of the decorator in a class body.
WRAPPERS = {"context_decorator": "no_grad"}
# Functions of torch that wrap a method of a class in place. torch.compile wraps nn.Module.__init__.
PATCHES = ("install_generation_tagging_init",)
# The tables of functions by name, and the functions that the names must lead to.
ENTRIES: dict[str, dict[str, tuple[str, str] | None]] = {
    "AttentionInterface": {
        "eager": None,
        "sdpa": ("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
    },
    "AttentionMaskInterface": {
        "eager": ("transformers.masking_utils", "eager_mask"),
        "sdpa": ("transformers.masking_utils", "sdpa_mask"),
    },
}
# Code in these packages is compared with its file, and the names that it loads are followed.
FOLLOWED = ("transformers.", "torch.nn.")
COMPARED = ("transformers.", "torch.")
# transformers reads its own environment and version with these modules, and logs with them.
NOT_FOLLOWED = (
    "transformers.utils.import_utils",
    "transformers.utils.logging",
    "transformers.cache_utils",
    "transformers.generation",
)
# How far the comparison of a function goes: its code, the attributes that it reads as well, and the
# functions that it calls as well.
CODE, NAMES, FOLLOW = range(3)


class Entry(NamedTuple):
    """A name in a dictionary, and the value that it had when the code was compared."""

    names: dict[str, Any]
    name: str
    value: Any


class Record:
    """What is known of one function or class.

    Attributes:
        subject: The function or the class.
        problem: Why the code of the subject is not that of its file, or None.
        names: The identifiers in the code of the subject.
        entries: The dictionary entries that the code loads.
        reached: The records of the functions and classes that the code leads to.
    """

    def __init__(self, subject: Any) -> None:
        """Keep the facts of `subject` that a later comparison looks at."""
        self.subject = subject
        self.problem: str | None = None
        self.names: frozenset[str] = frozenset()
        self.entries: list[Entry] = []
        self.reached: list[Record] = []
        self.facts = _facts(subject)

    def holds(self) -> bool:
        """Return whether the subject and the dictionary entries are as they were compared."""
        now = _facts(self.subject)
        return (
            len(now) == len(self.facts)
            and all(a is b for a, b in zip(now, self.facts, strict=True))
            and all(names.get(name, MISSING) is value for names, name, value in self.entries)
        )


class Code(NamedTuple):
    """The code that one class reaches.

    Attributes:
        problem: The first difference from the files, in words, or None.
        names: The identifiers in the code.
        own: The identifiers in the code of the class's own methods.
        records: The records of all functions and classes.
    """

    problem: str | None
    names: frozenset[str]
    own: frozenset[str]
    records: tuple[Record, ...]


_records: dict[tuple[int, int], Record] = {}
_codes: dict[type, Code] = {}
_attributes: dict[tuple[type, str], tuple[list[Record], str | None]] = {}


def code_of(kind: type) -> Code:
    """Return the code that the class `kind` reaches.

    The result is kept. Call `refresh` with the results before they are used, because a class, a
    function or a global name may have been replaced.

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
    """Return why the code that the class `kind` reaches is not that of its files, or None.

    Args:
        kind: A subclass of ``nn.Module``.
    """
    refresh([kind])
    return code_of(kind).problem


def refresh(kinds: Iterable[type]) -> None:
    """Forget everything that was found if the code of one of the classes `kinds` was changed."""
    records = {id(r): r for kind in kinds if kind in _codes for r in _codes[kind].records}
    if not all(record.holds() for record in records.values()):
        _records.clear()
        _codes.clear()
        _attributes.clear()


def facts(kinds: Iterable[type]) -> tuple[list[dict[str, Any]], list[type], list[FunctionType]]:
    """Return what guards the verdicts about the classes `kinds`.

    Args:
        kinds: Subclasses of ``nn.Module``.

    Returns:
        The dictionaries whose entries the code loads, the classes whose attributes it uses, and
        the functions, which are changed if their ``__code__`` or their defaults are replaced.
    """
    records = {id(r): r for kind in kinds for r in code_of(kind).records}.values()
    dicts = {id(e.names): e.names for record in records for e in record.entries}
    subjects = {id(record.subject): record.subject for record in records}.values()
    return (
        list(dicts.values()),
        [subject for subject in subjects if isinstance(subject, type)],
        [subject for subject in subjects if isinstance(subject, FunctionType)],
    )


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return f"{module}.".startswith(packages)


def _facts(subject: Any) -> tuple[Any, ...]:
    if isinstance(subject, type):
        return (*subject.__mro__, *vars(subject), *vars(subject).values())
    cells = subject.__closure__ or ()
    keywords = subject.__kwdefaults__ or {}
    return (
        *(subject.__code__, subject.__defaults__, *keywords, *keywords.values()),
        *(content(cell) for cell in cells),
    )


# Functions


def _function_record(function: FunctionType, depth: int = FOLLOW) -> Record:
    """Compare a function; `depth` is CODE, NAMES or FOLLOW."""
    key = id(function), depth
    if key in _records and _records[key].subject is function:
        return _records[key]
    record = _records[key] = Record(function)
    module = function.__globals__.get("__name__", "")
    code = function.__code__
    title = f"{module}.{code.co_name}"
    if vars(sys.modules.get(module, builtins)) is not function.__globals__:
        record.problem = f"{title}: got a function with other globals, allowed: those of its module"
        return record
    if not _within(module, COMPARED):
        record.problem = f"{title}: got a function of {module}, allowed: transformers and torch"
        return record
    named = getattr(sys.modules[module], code.co_name, None) is function
    if named and not function.__closure__ and not _within(module, FOLLOWED):
        # A helper of torch outside torch.nn, such as handle_torch_function, is known by its place.
        return record
    place = placed(code, module)
    if place is None:
        record.problem = f"{title}: got other code, allowed: the code of the file of {module}"
        return record
    record.problem = _default_problem(function, place.parent, title)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        value = content(cell)
        if isinstance(value, FunctionType):
            record.reached.append(_function_record(value, depth))
        elif callable(value) and not isinstance(value, type):
            record.problem = record.problem or _loaded_problem(name, value, module)
    if depth >= NAMES:
        record.names = identifiers(code)
    if depth == FOLLOW:
        _follow_names(record, function, module)
    return record


def _default_problem(function: FunctionType, parent: CodeType, title: str) -> str | None:
    """Return why the defaults cannot be those in the file, or None.

    The file's code has constant defaults as one constant. Another default is the value of a name.
    """
    defaults = function.__defaults__
    if defaults is not None and not any(same(defaults, c) for c in parent.co_consts):
        known = [*parent.co_consts, *_named_values(function, parent)]
        for value in defaults:
            if not any(same(value, c) for c in known):
                return f"{title}: got the default {value!r}, allowed: the defaults in its file"
    for name, value in (function.__kwdefaults__ or {}).items():
        known = [*parent.co_consts, True, False, None, 0, 1, *_named_values(function, parent)]
        if not any(same(value, c) for c in known):
            return f"{title}: got {name}={value!r}, allowed: the defaults in its file"
    return None


def _named_values(function: FunctionType, parent: CodeType) -> Iterator[Any]:
    names = function.__globals__
    for name in parent.co_names:
        value = names.get(name, MISSING)
        yield value
        if isinstance(value, ModuleType):
            yield from (vars(value).get(other, MISSING) for other in parent.co_names)


def _follow_names(record: Record, function: FunctionType, module: str) -> None:
    """Look up the names that a function contains, and record the functions they lead to."""
    if not _within(module, FOLLOWED) or module.startswith(NOT_FOLLOWED):
        return
    names = {name for code in codes_inside(function.__code__) for name in code.co_names}
    waiting: list[dict[str, Any]] = [function.__globals__]
    seen: set[int] = set()
    while waiting:
        space = waiting.pop()
        if id(space) in seen:
            continue
        seen.add(id(space))
        for name in sorted(names & space.keys()):
            value = space[name]
            record.entries.append(Entry(space, name, value))
            if isinstance(value, ModuleType):
                if sys.modules.get(value.__name__) is not value:
                    record.problem = f"{module}.{name}: got a module that was never imported"
                elif value.__name__.startswith(("torch", "transformers")):
                    waiting.append(vars(value))
                continue
            problem = _loaded_problem(name, value, space.get("__name__", ""))
            record.problem = record.problem or problem
            if isinstance(value, FunctionType) and problem is None:
                record.reached.append(_function_record(value))
            if type(value).__name__ in ENTRIES:
                _follow_table(record, value)


def _loaded_problem(name: str, value: Any, module: str) -> str | None:
    """Return why `value` cannot be what a file of stock code binds to `name`, or None."""
    title = f"{module}.{name}"
    if isinstance(value, FunctionType):
        return _named_function_problem(title, name, value, module)
    if isinstance(value, BuiltinFunctionType):
        known = value.__name__ in (name, name.lstrip("_"), f"_{name}")
        return None if known else f"{title}: got {value.__name__}, allowed: {name}"
    if isinstance(value, type):
        found = sys.modules.get(value.__module__)
        for part in value.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not value and value.__module__ != "typing":
            return f"{title}: got {value!r}, allowed: a class that its module names"
        return None
    kind = type(value)
    known = _within(kind.__module__, (*COMPARED, "functools.", "typing.", "builtins."))
    if callable(value) and not known:
        return f"{title}: got a {kind.__module__}.{kind.__qualname__}, allowed: a stock function"
    return None


def _named_function_problem(title: str, name: str, value: FunctionType, module: str) -> str | None:
    """Return why the function cannot be the one that the file of `module` binds to `name`."""
    home = value.__globals__.get("__name__", "")
    defined = name in defined_in(module)
    allowed = module if defined else "transformers and torch"
    right = home == module or value.__module__ == module if defined else _within(home, COMPARED)
    if not right or (not defined and ".models." in home and home != module):
        return f"{title}: got a function of {home}, allowed: a function of {allowed}"
    if value.__name__ not in (name, name.lstrip("_")) and f"_{name}" != value.__name__:
        return f"{title}: got {value.__name__}, allowed: {name}"
    return None


def _follow_table(record: Record, table: Any) -> None:
    """Compare the entries of a table of attention functions or masks."""
    title = type(table).__name__
    for key, expected in ENTRIES[title].items():
        for space in (table._local_mapping, type(table)._global_mapping):
            record.entries.append(Entry(space, key, space.get(key, MISSING)))
        value = table._local_mapping.get(key, type(table)._global_mapping.get(key))
        if value is None and expected is None:
            continue
        right = isinstance(value, FunctionType) and expected == (value.__module__, value.__name__)
        if not right:
            allowed = "no entry" if expected is None else ".".join(expected)
            record.problem = record.problem or (
                f'{title}["{key}"]: got {value!r}, allowed: {allowed}'
            )
        else:
            record.reached.append(_function_record(value))


# Classes


def _class_record(kind: type) -> Record:
    """Compare the methods of a class that are reached from its ``forward`` and implicitly."""
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
    """Yield the records, and those of the functions in their closures."""
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
    if not _within(base.__module__, COMPARED):
        if base.__module__ in ("typing", "abc", "collections.abc"):
            return [], None
        return [], f"{title}: got a method of {base.__module__}, allowed: transformers and torch"
    body = body_of(base)
    if body is None:
        return [], f"{title}: got a class without a file, allowed: a class of its module's file"
    functions = _functions(value)
    if functions is None:
        return [], _value_problem(body, name, value, title)
    # What an __init__ makes is compared, so that the names which it loads need not be.
    depth = CODE if name == "__init__" else NAMES if base is nn.Module else FOLLOW
    records = [_function_record(function, depth) for function in functions]
    problem = next((p for f in functions if (p := _method_problem(base, body, name, f))), None)
    return records, None if problem is None else f"{title}: {problem}"


def _functions(value: Any) -> list[FunctionType] | None:
    """Return the functions in an attribute of a class, or None if it is no function."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        parts = [f for f in (value.fget, value.fset, value.fdel) if f is not None]
        found = [f for f in parts if isinstance(f, FunctionType)]
        return found if len(found) == len(parts) else None
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
    """Return why a method is not the one of the class statement, or None.

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
    found = function.__code__.co_name
    return None if found in (name, ALIASES.get(name)) else f"got {found}, allowed: {name}"
