"""Random changes of an HF model or of its code are either reported or harmless.

Each case randomly changes one attribute, buffer, parameter, method, submodule, hook, class, global
name or table entry. fastbert compares the changed model with its twin, a new model of its class. A
change that the comparison does not report must not alter the output of the stock model.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import stock_families as families
import torch
from quick_cases import long_case
from torch import Tensor, nn

from fastbert.integrations import stock_code
from fastbert.integrations.twin import compare
from fastbert.integrations.twin_cache import twin_of

SEEDS = 24
FAMILIES = ("bert", "roberta", "distilbert", "albert", "mpnet", "nomic_bert", "modernbert")
Change = tuple[str, Callable[[], None]]


def build(family: str, **changes: Any) -> Any:
    """Return an HF model without a pooler; fastbert always calls the pooler, changed or not."""
    hf_model = families.build(family, **changes)
    if "pooler" in hf_model._modules:
        hf_model.pooler = None
    return hf_model


def changed(value: Any) -> Any:
    """Return a different value: of the same type for numbers and texts, 1 for None, else None."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if value is None:
        return 1
    return None


def an_attribute(hf_model: Any, draw: random.Random) -> Change:
    path, module = draw.choice(list(hf_model.named_modules()))
    internal = vars(nn.Module())
    # A change of eps is excluded, because fastbert reads eps from the module and therefore uses it.
    names = [n for n in vars(module) if n not in internal and n not in ("config", "eps")]
    name = draw.choice([*names, "training_speed"] if names else ["training_speed"])
    value = changed(vars(module).get(name))
    return f"{path}.{name} = {value!r}", lambda: vars(module).__setitem__(name, value)


def a_buffer(hf_model: Any, draw: random.Random) -> Change:
    buffers = [(m, n) for m in hf_model.modules() for n, b in m._buffers.items() if b is not None]
    if not buffers:
        return a_parameter(hf_model, draw)
    module, name = draw.choice(buffers)
    value = module._buffers[name].clone()
    value[..., draw.randrange(4)] += 1
    return f"buffer {name}", lambda: module._buffers.__setitem__(name, value)


def a_parameter(hf_model: Any, draw: random.Random) -> Change:
    modules = [(path, m) for path, m in hf_model.named_modules() if m._parameters]
    path, module = draw.choice(modules)
    name = draw.choice(list(module._parameters))
    value = module._parameters[name]
    kinds: list[Any] = [None, nn.Parameter(value.data.bfloat16()), nn.Parameter(value.data[:-1])]
    new = draw.choice(kinds)
    return f"parameter {path}.{name}", lambda: module._parameters.__setitem__(name, new)


def a_method(hf_model: Any, draw: random.Random) -> Change:
    # The root module is excluded: its own forward method runs first and then calls fastbert.
    path, module = draw.choice(list(hf_model.named_modules())[1:])
    names = [n for n in ("forward", "feed_forward_chunk", "ff_chunk") if hasattr(module, n)]
    name = draw.choice(names)
    real = getattr(module, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        return more(real(*args, **kwargs))

    return f"{path}.{name}()", lambda: vars(module).__setitem__(name, method)


def more(out: Any) -> Any:
    """Return the output of a module with 1 added to each number in it."""
    if isinstance(out, Tensor):
        return out + 1 if out.is_floating_point() else out
    if isinstance(out, tuple):
        return tuple(map(more, out))
    if hasattr(out, "last_hidden_state"):
        out["last_hidden_state"] = more(out["last_hidden_state"])
    return out


def a_submodule(hf_model: Any, draw: random.Random) -> Change:
    places = [(p, m, n) for p, m in hf_model.named_modules() for n in m._modules if m._modules[n]]
    path, module, name = draw.choice(places)
    new = draw.choice([nn.Identity(), nn.ReLU(), None])
    return f"{path}.{name} = {new}", lambda: module._modules.__setitem__(name, new)


def a_hook(hf_model: Any, draw: random.Random) -> Change:
    path, module = draw.choice(list(hf_model.named_modules())[1:])
    kind = draw.choice(["forward", "forward_pre", "full_backward", "full_backward_pre"])

    def hook(module: Any, given: Any, out: Any = None) -> Any:
        return more(out) if kind == "forward" else None

    return f"{kind} hook {path}", lambda: getattr(module, f"register_{kind}_hook")(hook)


def a_class(hf_model: Any, draw: random.Random) -> Change:
    path, module = draw.choice(list(hf_model.named_modules())[1:])
    kind: Any = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return more(kind.forward(self, *args, **kwargs))

    own = type(kind.__name__, (kind,), {"forward": forward})
    return f"class of {path}", lambda: setattr(module, "__class__", own)


INSTANCE = [
    an_attribute, a_buffer, a_parameter, a_method, a_submodule, a_hook, a_class,
]  # fmt: skip


def outputs(hf_model: Any, family: str) -> Tensor | str:
    """Return the hidden states at real tokens, or the name of the raised error."""
    batch = families.inputs("right", family)
    try:
        with torch.no_grad():
            states = hf_model(**batch).last_hidden_state
    except Exception as error:
        return type(error).__name__
    return states[batch["attention_mask"].bool()]


@pytest.mark.parametrize("seed", [*range(8), *map(long_case, range(8, SEEDS))])
def test_a_random_change_of_a_host_is_named_or_changes_nothing(seed) -> None:
    draw = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    stock = outputs(build(family), family)
    tried = 0
    for kind in INSTANCE:
        hf_model = build(family)
        title, change = kind(hf_model, draw)
        change()
        tried += 1
        if compare(hf_model) == (None, {}):
            result = outputs(hf_model, family)
            assert isinstance(result, Tensor), (title, result)
            assert torch.equal(result, stock), title
    assert tried == len(INSTANCE)


def test_the_random_changes_of_hosts_are_168_and_most_are_named() -> None:
    assert SEEDS * len(INSTANCE) == 168
    named = 0
    for seed in range(SEEDS):
        draw = random.Random(seed)
        for kind in INSTANCE:
            hf_model = build("bert", num_hidden_layers=1)
            kind(hf_model, draw)[1]()
            named += compare(hf_model) != (None, {})
    assert named >= 130


@contextlib.contextmanager
def patched(place: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a global name of a module, or an attribute of a class, in the ``with`` block."""
    with mock.patch.object(place, name, value):
        yield


def other(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("called")


def reached_functions(family: str) -> list[tuple[Any, str]]:
    """Return (module or class, name) of each function that the code of an HF model reaches."""
    hf_model = build(family)
    functions = {}
    for kind in twin_of(hf_model).kinds:
        for record in stock_code.code_of(kind).records:
            for space, name, value in record.entries:
                module = sys.modules.get(space.get("__name__", ""))
                function = callable(value) and not isinstance(value, type)
                if function and module is not None and vars(module) is space:
                    functions[module.__name__, name] = (module, name)
        for base in kind.__mro__[:-1]:
            if base.__module__.startswith(("transformers.models.", "torch.nn.modules.")):
                for name in vars(base).keys() & stock_code.code_of(kind).own:
                    if callable(vars(base)[name]) and name != "__init__":
                        functions[base, name] = (base, name)
    return [functions[key] for key in sorted(functions, key=str)]


@pytest.mark.parametrize("family", ["bert", *map(long_case, ["mpnet", "modernbert"])])
def test_every_function_that_the_code_of_a_host_reaches_is_watched(family) -> None:
    """If a function that the code of an HF model reaches is replaced, the comparison reports it."""
    hf_model = build(family)
    places = reached_functions(family)
    assert len(places) >= 60
    unseen = []
    for place, name in places:
        with patched(place, name, other):
            try:
                seen = compare(hf_model) != (None, {})
            except AssertionError:
                seen = True
        if not seen:
            unseen.append((place, name))
    assert unseen == []
    assert compare(hf_model) == (None, {})
