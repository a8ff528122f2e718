"""``accelerate`` finds encoders inside objects of other libraries."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict, PrivateAttr
from tiny_models import model
from torch import nn

import fastbert
from fastbert.integrations import find_modules as search
from fastbert.integrations.accelerate import bound_encoders
from fastbert.integrations.find_modules import find_modules


class Encoder(nn.Module):
    """The type of module that the tests search for."""


class Holder:
    """An object whose attributes are the arguments of its constructor."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slots:
    __slots__ = ("__hidden", "empty")

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden


class Pydantic(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str = "a"
    _client: Any = PrivateAttr(default=None)


class Computing:
    """An object that fails the test if its property or one of its special methods runs."""

    def __init__(self, inner: Any) -> None:
        self.__dict__["inner"] = inner

    @property
    def model(self) -> Any:
        raise AssertionError("a property ran")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"__getattr__({name}) ran")

    def __len__(self) -> int:
        raise AssertionError("__len__ ran")

    def __iter__(self) -> Any:
        raise AssertionError("__iter__ ran")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("__eq__ ran")

    __hash__ = None  # type: ignore[assignment]


def encoders(module: nn.Module) -> list[nn.Module]:
    return [inner for inner in module.modules() if isinstance(inner, Encoder)]


def paths(wrapper: Any) -> list[str]:
    modules = find_modules(wrapper, encoders)
    assert all(encoders(module) for module in modules.values())
    return list(modules)


def pydantic(**extra: Any) -> Pydantic:
    made = Pydantic(**extra)
    made._client = Encoder()
    return made


WRAPPERS: dict[str, tuple[Any, list[str]]] = {
    "a module": (lambda: nn.Sequential(Encoder(), Encoder()), [""]),
    "an attribute": (lambda: Holder(_model=nn.Sequential(Encoder())), ["._model"]),
    "four attributes": (
        lambda: Holder(a=Holder(b=Holder(c=Holder(d=Encoder())))),
        [".a.b.c.d"],
    ),
    "a slot": (lambda: Slots(Encoder()), ["._Slots__hidden"]),
    "a private attribute": (pydantic, ["._client"]),
    "a namespace": (lambda: SimpleNamespace(x=Encoder()), [".x"]),
    "a list of replicas": (
        lambda: Holder(_replicas=[Holder(m=Encoder()), Holder(m=Encoder())]),
        ["._replicas[0].m", "._replicas[1].m"],
    ),
    "containers of containers": (
        lambda: [("name", {"key": (3, Encoder())})],
        ["[0][1]['key'][1]"],
    ),
    "an object that computes": (lambda: Computing(Encoder()), [".inner"]),
    "a module that hides the encoder": (
        lambda: nn.Sequential(hiding_module()),
        ["._modules['0'].hidden"],
    ),
    "an unrelated module beside": (
        lambda: Holder(head=nn.Linear(2, 2), body=Encoder()),
        [".body"],
    ),
}


def hiding_module() -> nn.Module:
    made = nn.Linear(2, 2)
    object.__setattr__(made, "hidden", Encoder())
    return made


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_path_of_the_encoder(name) -> None:
    build, expected = WRAPPERS[name]
    assert paths(build()) == expected


def test_an_extra_field_of_pydantic() -> None:
    assert paths(Pydantic(extra=Encoder())) == [".extra"]


def test_a_cycle_ends_and_each_module_is_found_once() -> None:
    encoder = Encoder()
    outer = Holder(first=encoder, all=[encoder, nn.Sequential(encoder)])
    outer.itself = {"outer": [outer]}
    # The search finds the larger module later. The larger module contains no other encoder, so the
    # first path is returned.
    assert paths(outer) == [".first"]
    whole = nn.Sequential(encoder, Encoder())
    assert paths(Holder(part=encoder, whole=whole)) == [".whole"]


def test_five_attributes_are_too_many() -> None:
    far = Holder(a=Holder(b=Holder(c=Holder(d=Holder(e=Encoder())))))
    with pytest.raises(
        TypeError, match=r"^model: got Holder of test_find_modules without a module within 4"
    ):
        find_modules(far, encoders)


def test_encoders_in_several_attributes_are_named() -> None:
    rag = Holder(retriever=Holder(_client=Encoder()), reranker=nn.Sequential(Encoder()))
    expected = (
        r"^model: got Holder of test_find_modules with encoders in \.reranker "
        r"\(Sequential of torch\), \.retriever\._client \(Encoder of test_find_modules\), "
        r"allowed: encoders in one attribute\. "
        r"Pass one of these objects, such as the one in \.reranker$"
    )
    with pytest.raises(ValueError, match=expected):
        find_modules(rag, encoders)


def test_modules_without_an_encoder_are_returned_by_their_paths() -> None:
    head, body = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    assert find_modules(Holder(a=head, b=[body]), encoders) == {".a": head, ".b[0]": body}


def test_threads_loggers_functions_and_classes_are_not_followed() -> None:
    encoder = Encoder()

    class Hiding:
        hidden = encoder

    def function() -> Any:
        return encoder

    function.hidden = encoder  # type: ignore[attr-defined]
    thread = threading.Thread()
    thread.hidden = encoder  # type: ignore[attr-defined]
    for value in (Hiding, Hiding(), function, thread, encoder.forward, threading):
        with pytest.raises(TypeError, match="without a module"):
            find_modules(value, encoders)
        with pytest.raises(TypeError, match="without a module"):
            find_modules(Holder(value=value), encoders)


def test_the_number_of_objects_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(search, "OBJECTS", 50)
    crowd = [Holder() for _ in range(60)]
    assert paths(Holder(crowd=crowd[:40], model=Encoder())) == [".model"]
    with pytest.raises(TypeError, match="without a module"):
        find_modules(Holder(crowd=[*crowd, Encoder()]), encoders)


def test_numbers_and_texts_do_not_count(monkeypatch) -> None:
    monkeypatch.setattr(search, "OBJECTS", 10)
    table = {f"word {i}": i for i in range(900)}
    assert paths(Holder(vocabulary=table, x=torch.zeros(3), model=Encoder())) == [".model"]


def test_accelerate_and_restore_a_wrapper() -> None:
    wrapper = pydantic()
    wrapper._client = nn.Sequential(model())
    stock = type(wrapper._client[0])
    assert bound_encoders(wrapper) == {}
    assert fastbert.accelerate(wrapper) is wrapper
    assert list(bound_encoders(wrapper)) == ["_client.0"]
    assert type(wrapper._client[0]) is not stock
    assert fastbert.restore(wrapper) is wrapper
    assert type(wrapper._client[0]) is stock


def test_accelerate_names_what_a_wrapper_holds_instead_of_an_encoder() -> None:
    native = fastbert.BertModel(fastbert.BertConfig.preset("tiny", vocab_size=50))
    expected = (
        r"^accelerate: got BertModel of fastbert in \.model, allowed: an encoder of transformers: "
        r"bert, .*xlnet\. Pass the attribute that holds one$"
    )
    with pytest.raises(ValueError, match=expected):
        fastbert.accelerate(Holder(model=native))
    with pytest.raises(ValueError, match=r"encoders in \.a \(BertModel of transf"):
        fastbert.accelerate(Holder(a=model(), b=model()))
