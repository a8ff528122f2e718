"""The extension's snapshot of dictionaries detects every kind of change to a dictionary."""

from __future__ import annotations

from collections import OrderedDict

import pytest

CHANGES = {
    "value": lambda d: d.update(second=object()),
    "equal value": lambda d: d.update(first=1.0),
    "new key": lambda d: d.update(third=3),
    "set": lambda d: d.__setitem__("first", 2),
    "setdefault": lambda d: d.setdefault("third", 3),
    "merge": lambda d: d.__ior__({"third": 3}),
    "delete": lambda d: d.__delitem__("first"),
    "pop": lambda d: d.pop("second"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
    "order": lambda d: d.update(first=d.pop("first")),
}


class Owner:
    """An object whose ``__dict__`` is in the snapshot."""


def of_owner(items):
    owner = Owner()
    for name, value in items.items():
        setattr(owner, name, value)
    return vars(owner)


class Record:
    """A snapshot as in ``fastbert.modules.snapshot``, but only of dictionaries."""

    def __init__(self, extension, *dicts) -> None:
        self._unchanged, self._tags = extension.unchanged, extension.Tags()
        self._dicts = tuple(x for d in dicts for x in (d, tuple(d), tuple(d.values())))

    def holds(self) -> bool:
        return self._unchanged(self._dicts, self._tags, (), (), ())


@pytest.mark.parametrize("made", [dict, OrderedDict, of_owner])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen_again_and_again(extension, made, change):
    other, changing = {"key": 0}, made({"first": 1, "second": [2]})
    record = Record(extension, other, changing)
    assert record.holds()
    assert record.holds()
    before = dict(changing)
    change(changing)
    assert not record.holds()
    assert not record.holds()
    changing.clear()
    changing.update(before)
    assert record.holds()
    assert record.holds()
    change(changing)
    assert not record.holds()


def test_an_attribute_set_in_python_is_seen(extension):
    owner = Owner()
    owner.first, owner.second = 1, 2
    record = Record(extension, vars(owner))
    for _ in range(20):  # Python specialises code that runs often.
        assert record.holds()
        owner.second = object()
        assert not record.holds()
        owner.second = 2
