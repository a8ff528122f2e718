"""The name of a class together with the library that defines the class, for messages."""

from __future__ import annotations

from typing import Any


def class_name(value: Any) -> str:
    """Return the name of a value's class with its library, as in ``BertModel of transformers``.

    fastbert and transformers have classes of the same names, so a message needs the library besides
    the name. If `value` is itself a class, the result begins with ``the class``, as in ``the class
    BertModel of transformers``.

    Args:
        value: Any value.

    Returns:
        The name, without a library for a built-in class.
    """
    kind = value if isinstance(value, type) else type(value)
    library = kind.__module__.partition(".")[0]
    name = kind.__name__ if library == "builtins" else f"{kind.__name__} of {library}"
    return f"the class {name}" if isinstance(value, type) else name
