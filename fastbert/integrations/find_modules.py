"""Search an object of another library for the modules that contain an encoder.

Libraries hold a model of transformers in an attribute that is often private, such as
``HuggingFaceEmbeddings._client`` of langchain-huggingface. `find_modules` reads the stored state of
an object and of the objects inside, breadth-first. The search computes nothing: it reads instance
dictionaries, slots and the private attributes of pydantic, and calls neither properties nor
methods.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastbert.modules.class_name import class_name

# Largest number of attributes on the path from the object to a module. An item of a list, a tuple
# or a dict adds nothing to this number.
DEPTH = 4
# Largest number of objects that one search looks at, and of items that it takes from a container.
OBJECTS = 10_000
ITEMS = 1_000
# Values of these types hold no module.
VALUE_TYPES = (str, bytes, bytearray, int, float, complex, range, Tensor, type, types.ModuleType)
# The search skips objects of these packages, because they lead to every thread or every logger of
# the process.
SHARED = {"asyncio", "concurrent", "logging", "multiprocessing", "threading", "_thread"}
# Slots that hold a dictionary of attributes: the instance dictionary, and two slots of pydantic.
NAMESPACES = ("__dict__", "__pydantic_private__", "__pydantic_extra__")

Encoders = Callable[[nn.Module], Iterable[nn.Module]]


class Reached(NamedTuple):
    """An object that the search has reached.

    Attributes:
        path: The path from the first object, such as ``._client`` or ``._replicas[0].model``.
        place: The path without the indices and keys of containers.
        value: The object itself.
        depth: Number of attributes in the path.
    """

    path: str
    place: str
    value: Any
    depth: int


class Candidate(NamedTuple):
    """A module with encoders: `reached` is the module, and `encoders` the ids of its encoders."""

    reached: Reached
    encoders: frozenset[int]


def find_modules(wrapper: Any, encoders: Encoders) -> dict[str, nn.Module]:
    """Find the modules with an encoder in an object.

    If `wrapper` is a module with an encoder inside, it is the only result. In any other object, the
    search follows at most `DEPTH` attributes and looks once at each of at most `OBJECTS` objects.
    Several modules are returned together if their paths differ only in the indices of a container,
    such as the replicas ``._replicas[0]`` and ``._replicas[1]``. A module is left out if another
    result contains all its encoders.

    Args:
        wrapper: A module, a container, or any object that holds modules.
        encoders: Function that returns the encoders inside a module.

    Returns:
        The modules by their paths from `wrapper`; the path of `wrapper` itself is ``""``. If no
        module contains an encoder, the result is the outermost modules without one.

    Raises:
        TypeError: If there is no module at all.
        ValueError: If encoders are in several attributes. The message names them.
    """
    candidates: list[Candidate] = []
    others: dict[str, nn.Module] = {}
    for reached, inside in _modules_in(wrapper, encoders):
        if inside:
            candidates.append(Candidate(reached, inside))
        else:
            others[reached.path] = reached.value
    outermost = _outermost(candidates)
    if len({reached.place for reached in outermost}) > 1:
        places = ", ".join(f"{one.path} ({class_name(one.value)})" for one in outermost)
        raise ValueError(
            f"model: got {class_name(wrapper)} with encoders in {places}, allowed: encoders "
            f"in one attribute. Pass one of these objects, such as the one in {outermost[0].path}"
        )
    if not outermost and not others:
        raise TypeError(
            f"model: got {class_name(wrapper)} without a module within {DEPTH} attributes, "
            "allowed: a torch.nn.Module, or an object that holds one. Pass the attribute that "
            "holds the module"
        )
    return {one.path: one.value for one in outermost} or others


def _outermost(candidates: list[Candidate]) -> list[Reached]:
    """Return the candidates whose encoders are not all in a larger or in an earlier candidate."""
    return [
        reached
        for i, (reached, inside) in enumerate(candidates)
        if not any(inside < other.encoders for other in candidates)
        and not any(inside == other.encoders for other in candidates[:i])
    ]


def _modules_in(wrapper: Any, encoders: Encoders) -> Iterator[tuple[Reached, frozenset[int]]]:
    """Yield the outermost modules in an object, the nearest first, with the ids of their encoders.

    The search does not enter a module with an encoder.
    """
    waiting = deque([Reached("", "", wrapper, 0)] if _may_hold_a_module(wrapper) else [])
    # The values keep their objects alive, so that no two objects have the same id.
    seen: dict[int, Any] = {id(wrapper): wrapper}
    # Modules inside a module that has no encoder.
    without: set[int] = set()
    while waiting:
        reached = waiting.popleft()
        if issubclass(type(reached.value), nn.Module) and id(reached.value) not in without:
            inside = frozenset(map(id, encoders(reached.value)))
            yield reached, inside
            if inside:
                continue
            without.update(map(id, reached.value.modules()))
        for inner in _inside(reached):
            if len(seen) < OBJECTS and id(inner.value) not in seen:
                seen[id(inner.value)] = inner.value
                waiting.append(inner)


def _inside(reached: Reached) -> Iterator[Reached]:
    """Yield the items of a container, or the attributes of any other object.

    Values that cannot hold a module are left out.
    """
    path, place, value, depth = reached
    # The methods of the built-in classes are used, because a subclass may compute its items.
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = dict.items(value)
    elif isinstance(value, list):
        items = enumerate(list.__iter__(value))
    elif isinstance(value, tuple):
        items = enumerate(tuple.__iter__(value))
    elif depth < DEPTH:
        for name, item in _state(value):
            if _may_hold_a_module(item):
                yield Reached(f"{path}.{name}", f"{place}.{name}", item, depth + 1)
    for key, item in list(islice(items, ITEMS)):
        if _may_hold_a_module(item):
            yield Reached(f"{path}[{key!r}]", place, item, depth)


def _may_hold_a_module(value: Any) -> bool:
    kind = type(value)
    if value is None or issubclass(kind, VALUE_TYPES):
        return False
    if kind.__module__ == "builtins":
        return issubclass(kind, (dict, list, tuple))
    return kind.__module__.partition(".")[0] not in SHARED


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that an object stores, without running its code."""
    for name, content in _stored(value):
        if name not in NAMESPACES:
            yield name, content
        elif isinstance(content, dict):
            yield from list(content.items())


def _stored(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the instance dictionary of an object, and the contents of its slots."""
    for kind in type(value).__mro__:
        for name, descriptor in list(kind.__dict__.items()):
            is_dict = name == "__dict__" and isinstance(descriptor, types.GetSetDescriptorType)
            if is_dict or isinstance(descriptor, types.MemberDescriptorType):
                try:
                    yield name, descriptor.__get__(value)
                except AttributeError:
                    # The slot is empty.
                    continue
