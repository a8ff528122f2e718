"""A subclass with another ``forward`` for a module around an encoder, and the way back.

`accelerate` gives such a class to a module of sentence-transformers, and `restore` gives the module
its own class back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def wrapper_class(kind: Any, forward: Callable[..., Any], rebuild: tuple[Any, ...]) -> Any:
    """Return a subclass of `kind` that has the name and the module of `kind`.

    The attribute ``fastbert_wrapper_restores`` of the subclass is `kind`.

    Args:
        kind: A class of modules.
        forward: The ``forward`` of the subclass.
        rebuild: A function that returns the subclass, and its arguments. Copies and pickles of an
            object of the subclass call it.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        return _empty, rebuild, self.__dict__

    own = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "fastbert_wrapper_restores": kind,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), own)


def _empty(made: Callable[..., Any], *arguments: Any) -> Any:
    """Return an empty object of the class that ``made(*arguments)`` returns."""
    kind = made(*arguments)
    return kind.__new__(kind)


def is_wrapper(module: Any) -> bool:
    """Return whether a module has a class of `wrapper_class`."""
    return hasattr(type(module), "fastbert_wrapper_restores")


def path_of(kind: type) -> str:
    """Return the name of a class with its module, such as ``torch.nn.modules.linear.Linear``."""
    return f"{kind.__module__}.{kind.__qualname__}"
