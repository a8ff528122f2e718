"""Compare the functions that the code of transformers reaches with the files that define them."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from fastbert.integrations.stock_files import (
    MISSING,
    codes_inside,
    content,
    defined_in,
    identifiers,
    placed,
    same,
)

# Class of a table → name of an entry → module and name of the function that the entry must be.
# None means that the table must have no such entry.
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
# The methods by which a model looks up an entry of a table.
LOOKUPS = frozenset(("get_interface", "get", "__getitem__", "__contains__"))
# The code of the packages in COMPARED is compared with its file. For the packages in FOLLOWED, the
# functions that the names in the code lead to are compared as well.
FOLLOWED = ("transformers.", "torch.nn.")
COMPARED = ("transformers.", "torch.")
# The names that the code of these modules loads are not followed. In these modules, transformers
# checks which packages are installed, logs, caches keys and values, and generates text.
NOT_FOLLOWED = (
    "transformers.utils.import_utils",
    "transformers.utils.logging",
    "transformers.cache_utils",
    "transformers.generation",
)
# How much of a function is compared. CODE compares only its code, NAMES also collects the names in
# the code, and FOLLOW also compares the functions that these names lead to.
CODE, NAMES, FOLLOW = range(3)


class Entry(NamedTuple):
    """A name in a dictionary, and the value that it had when the code was compared."""

    names: dict[str, Any]
    name: str
    value: Any


class Record:
    """The result of the comparison of one function or class with its file.

    Attributes:
        subject: The function or the class.
        problem: Why the code of the subject differs from its file, or None if it does not.
        names: The identifiers in the code of the subject.
        entries: The dictionary entries that the code loads.
        reached: The records of the functions and classes that the code leads to.
    """

    def __init__(self, subject: Any) -> None:
        """Store the properties of `subject` that `holds` compares later."""
        self.subject = subject
        self.problem: str | None = None
        self.names: frozenset[str] = frozenset()
        self.entries: list[Entry] = []
        self.reached: list[Record] = []
        self.facts = _facts(subject)

    def holds(self) -> bool:
        """Return whether the subject and the dictionary entries are still the compared ones."""
        now = _facts(self.subject)
        return (
            len(now) == len(self.facts)
            and all(a is b for a, b in zip(now, self.facts, strict=True))
            and all(names.get(name, MISSING) is value for names, name, value in self.entries)
        )


# The records of functions, by the id of the function and the depth.
_records: dict[tuple[int, int], Record] = {}


def forget() -> None:
    """Delete the records of all functions, so that the functions are compared again."""
    _records.clear()


def within(module: str, packages: tuple[str, ...]) -> bool:
    """Return whether a module is in one of the packages, whose names end with a dot."""
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


def function_record(function: FunctionType, depth: int = FOLLOW) -> Record:
    """Compare a function with its file; `depth` is CODE, NAMES or FOLLOW."""
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
    if not within(module, COMPARED):
        record.problem = f"{title}: got a function of {module}, allowed: transformers and torch"
        return record
    named = getattr(sys.modules[module], code.co_name, None) is function
    if named and not function.__closure__ and not within(module, FOLLOWED):
        # A helper of torch outside torch.nn, such as handle_torch_function, is known by its name in
        # its module, so its code is not compared.
        return record
    place = placed(code, module)
    if place is None:
        record.problem = f"{title}: got other code, allowed: the code of the file of {module}"
        return record
    record.problem = _default_problem(function, place.parent, title)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        value = content(cell)
        if isinstance(value, FunctionType):
            record.reached.append(function_record(value, depth))
        elif callable(value) and not isinstance(value, type):
            record.problem = record.problem or _loaded_problem(name, value, module)
    if depth >= NAMES:
        record.names = identifiers(code)
    if depth == FOLLOW:
        _follow_names(record, function, module)
    return record


def _default_problem(function: FunctionType, parent: CodeType, title: str) -> str | None:
    """Return why the defaults of a function cannot be those in its file, or None if they can.

    Compiled code stores defaults that are all constants as one tuple. Any other default is the
    value of a name, so it must be among the values of the names in `parent`.
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
    """Look up the names in the code of a function, and compare the functions they lead to."""
    if not within(module, FOLLOWED) or module.startswith(NOT_FOLLOWED):
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
                record.reached.append(function_record(value))
            if type(value).__name__ in ENTRIES:
                _follow_table(record, value)


def _loaded_problem(name: str, value: Any, module: str) -> str | None:
    """Return why a file of stock code cannot bind `value` to `name`, or None if it can."""
    title = f"{module}.{name}"
    if isinstance(value, FunctionType):
        return _named_function_problem(title, name, value, module)
    if isinstance(value, BuiltinFunctionType):
        known = value.__name__ in (name, name.lstrip("_"), f"_{name}")
        return None if known else f"{title}: got {value.__name__}, allowed: {name}"
    if isinstance(value, type):
        current = sys.modules.get(value.__module__)
        for part in value.__qualname__.split("."):
            current = getattr(current, part, None)
        if current is not value and value.__module__ != "typing":
            return f"{title}: got {value!r}, allowed: a class that its module names"
        return None
    kind = type(value)
    known = within(kind.__module__, (*COMPARED, "functools.", "typing.", "builtins."))
    if callable(value) and not known:
        return f"{title}: got a {kind.__module__}.{kind.__qualname__}, allowed: a stock function"
    return None


def _named_function_problem(title: str, name: str, value: FunctionType, module: str) -> str | None:
    """Return why the file of `module` cannot bind `value` to `name`, or None if it can."""
    home = value.__globals__.get("__name__", "")
    defined = name in defined_in(module)
    allowed = module if defined else "transformers and torch"
    right = home == module or value.__module__ == module if defined else within(home, COMPARED)
    if not right or (not defined and ".models." in home and home != module):
        return f"{title}: got a function of {home}, allowed: a function of {allowed}"
    if value.__name__ not in (name, name.lstrip("_")) and f"_{name}" != value.__name__:
        return f"{title}: got {value.__name__}, allowed: {name}"
    return None


def _follow_table(record: Record, table: Any) -> None:
    """Compare the entries of a table of attention functions or masks with `ENTRIES`."""
    title = type(table).__name__
    _follow_lookups(record, table)
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
            record.reached.append(function_record(value))


def _follow_lookups(record: Record, table: Any) -> None:
    """Compare the methods that look up an entry of a table with the methods in its file."""
    title = type(table).__name__
    for name in LOOKUPS:
        record.entries.append(Entry(vars(table), name, vars(table).get(name, MISSING)))
        if name in vars(table):
            problem = f"{title}.{name}: got an attribute of its own, allowed: none"
            record.problem = record.problem or problem
    for base in type(table).__mro__:
        if not within(base.__module__, COMPARED):
            continue
        record.reached.append(Record(base))
        for name in LOOKUPS & vars(base).keys():
            method = vars(base)[name]
            if isinstance(method, FunctionType) and method.__code__.co_name == name:
                record.reached.append(function_record(method, CODE))
            else:
                text = f"{title}.{name}: got {method!r}, allowed: the method in its file"
                record.problem = record.problem or text
