"""The names of labels, and the indices that a model has for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Value = str | int
# The loss of a regression squares its targets in fp32, whose largest number is 3e38.
LARGEST_TARGET = 1e18

# These texts replace the labels of a test part if the publisher of the data withholds the labels.
NO_LABELS = {"-1", "-1.0", "", "None", "_"}


class Labels:
    """The labels of a task.

    Attributes:
        names: The name of each label by its index.
    """

    def __init__(self, names: Sequence[str], *, by_index: bool = False, least: int = 2) -> None:
        """Store the names.

        Args:
            names: The names of the labels, in the order of their indices.
            by_index: Whether data may have the index of a label instead of its name, because the
                user gave the order of the names. If any name is an integer, indices are refused.
            least: Smallest number of names that is allowed.

        Raises:
            ValueError: If there are fewer than `least` names, or if a name appears twice.
        """
        self.names = list(names)
        self._indices = {name: index for index, name in enumerate(self.names)}
        if len(self.names) < least or len(self._indices) < len(self.names):
            listed = ", ".join(self.names) or "none"
            raise ValueError(f"labels: got {listed:.200}, allowed: at least two different names")
        numbers = any(name.removeprefix("-").isdecimal() for name in self.names)
        self._by_index = by_index and not numbers

    @classmethod
    def of_values(cls, values: Iterable[Value]) -> Labels:
        """Return the labels that appear in data, sorted as integers if all of them are integers."""
        names = {str(value) for value in values}
        numbers = all(name.removeprefix("-").isdecimal() for name in names)
        return cls(sorted(names, key=(lambda name: (int(name), name)) if numbers else None))

    def index(self, value: Value, place: str) -> int:
        """Return the index of a label.

        Args:
            value: The name of the label, or its index if the user gave the order of the names.
            place: File and line of the label, for the message.

        Returns:
            The index.

        Raises:
            ValueError: If `value` is not a label. The message names the place.
        """
        name = str(value)
        if name in self._indices:
            return self._indices[name]
        if self._by_index and name.isdecimal() and int(name) < len(self.names):
            return int(name)
        allowed = ", ".join(self.names)
        more = f", or an index from 0 to {len(self.names) - 1}" if self._by_index else ""
        raise ValueError(f"{place}: got the label {value!r:.100}, allowed: {allowed:.500}{more}")


def check_label(value: Any, place: str) -> Value:
    """Return a label that is a text or an integer.

    Args:
        value: The value in the data.
        place: File and line, for the message.

    Returns:
        The value, without white space around a name.

    Raises:
        ValueError: If the value is empty or of another type. The message names the place.
    """
    value = value.strip() if isinstance(value, str) else value
    if not isinstance(value, (str, int)) or isinstance(value, bool) or value == "":
        raise ValueError(f"{place}: got the label {value!r:.100}, allowed: a name or an integer")
    return value


def check_number(value: Any, place: str) -> float:
    """Return a target of a regression.

    Args:
        value: The value in the data: a number, or its text.
        place: File and line, for the message.

    Returns:
        The number.

    Raises:
        ValueError: If the value is not a number, or its absolute value is larger than 1e18. The
            message names the place.
    """
    try:
        number = float("nan" if value is None or isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) <= LARGEST_TARGET:
        raise ValueError(
            f"{place}: got the number {value!r:.100}, allowed: a finite number of at most "
            f"{LARGEST_TARGET:.0e}"
        )
    return number
