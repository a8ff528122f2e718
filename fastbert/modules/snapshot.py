"""A record of all Python objects on which a module's prepared call, or its plan, depends.

A module computes with the attributes, parameters and hooks that it has at the time of the call.
Users may change all of them: they register hooks, replace parameters and submodules, move the model
and patch classes. A check of each attribute in Python takes longer than two layers of a small
encoder. A snapshot records the attributes, and C++ compares them in a few microseconds. The
comparison detects every change of an attribute, because it compares whole dictionaries by the
identity of the values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as modules_of_torch

from fastbert.ops import backend as backends

# The dictionaries of the hooks that torch calls for every module.
GLOBAL_HOOKS = tuple(
    value
    for name, value in vars(modules_of_torch).items()
    if name.startswith("_global_") and isinstance(value, dict)
)


class Snapshot:
    """The facts about a module and the modules inside it, at one moment.

    The facts are the attributes, parameters, buffers, submodules and hooks of the modules, their
    classes and the attributes of these classes, the names in the Python files of fastbert that
    define the classes, the hooks of torch for all modules, and the table of backends.

    The values and the memory of a tensor are not facts, because every call reads them again.

    Args:
        root: The module. The snapshot has no reference to `root`, because `root` may have a
            reference to the snapshot.
        holder: Name of the attribute of `root` that holds the snapshot. This attribute is not a
            fact.
        others: Further dictionaries that are facts, such as the names in a Python module.
        classes: Further classes whose attributes are facts.
        functions: Functions whose code and defaults are facts.
    """

    def __init__(
        self,
        root: nn.Module,
        holder: str,
        others: Iterable[dict[str, Any]] = (),
        classes: Iterable[type] = (),
        functions: Iterable[FunctionType] = (),
    ) -> None:
        """Record the facts."""
        self._holder = holder
        inside = [module for module in root.modules() if module is not root]
        self._kind = type(root)
        self._own = self._of_root(root)
        dicts: list[Any] = [d for module in inside for d in _dicts(module)]
        dicts += [value for value in self._own.values() if isinstance(value, dict)]
        kinds = {self._kind, *map(type, inside), *classes}
        names = {kind.__module__ for kind in kinds}
        named = [vars(sys.modules[name]) for name in sorted(names) if name.startswith("fastbert")]
        dicts += [*named, *others, *GLOBAL_HOOKS]
        dicts += [vars(backends), backends.TABLES, *backends.TABLES.values(), backends._stand_ins]
        self._tags = backends.EXTENSION.Tags()
        self._dicts = _flat((d, tuple(d.keys()), tuple(d.values())) for d in dicts)
        self._objects = _flat((module, type(module)) for module in inside)
        version_of = backends.EXTENSION.version_of
        self._classes = _flat((kind, version_of(kind)) for kind in kinds)
        self._functions = _flat(
            (f, f.__code__, f.__defaults__, f.__kwdefaults__) for f in functions
        )
        self._tag = backends.EXTENSION.tag_of(vars(root))

    def holds(self, root: nn.Module) -> bool:
        """Return whether no fact about `root` has changed since the snapshot."""
        return (
            type(root) is self._kind
            and self._same(root)
            and backends.EXTENSION.unchanged(
                self._dicts, self._tags, self._objects, self._classes, self._functions
            )
        )

    def _same(self, root: nn.Module) -> bool:
        own, now = self._own, vars(root)
        tag = backends.EXTENSION.tag_of(now)
        if tag != 0 and tag == self._tag:
            return True
        # `root` may not yet have the attribute that holds the snapshot.
        others = len(now) - (self._holder in now)
        if len(own) != others or not all(now.get(k) is v for k, v in own.items()):
            return False
        self._tag = tag
        return True

    def _of_root(self, root: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(root).items() if name != self._holder}


class NotCopied:
    """The base of objects that a module stores about itself, such as its plans.

    Copies and pickles of the module get an empty object, because a copy consists of other modules.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an empty object."""
        return type(self)()

    def __reduce__(self) -> Any:
        """Pickle an empty object."""
        return (type(self), ())


def _dicts(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes of a module and its dictionaries of parameters, hooks and so on."""
    own = vars(module)
    yield own
    yield from (value for value in own.values() if isinstance(value, dict))


def _flat(rows: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(entry for row in rows for entry in row)
