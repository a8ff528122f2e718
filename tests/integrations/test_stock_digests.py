"""Known functions of transformers are identified by digests; unknown functions are probed."""

from __future__ import annotations

import ast
import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import stock_families as families
import torch

from fastbert.integrations import stock_digests, twin
from fastbert.integrations.accelerate import _unchecked
from fastbert.integrations.probe import probe
from fastbert.integrations.stock_digests import digest_of, unknown
from fastbert.integrations.twin import compare
from fastbert.integrations.twin_cache import twin_of

NAME = "transformers.models.bert.modeling_bert.BertSelfAttention.forward"


@pytest.fixture
def unknown_file():
    """Treat every file of transformers as unknown, so that the digests of functions decide."""
    table = copy.deepcopy(stock_digests._table())
    table["files"] = {}
    with (
        mock.patch.object(stock_digests, "_table", return_value=table),
        mock.patch.dict(twin._probed, clear=True),
    ):
        yield table


@pytest.mark.parametrize("family", families.ACCELERATED)
def test_every_function_of_a_family_is_pinned_by_its_file_and_by_itself(
    family, unknown_file
) -> None:
    kinds = twin_of(families.build(family)).kinds
    assert unknown(kinds) == []
    names = [name for name in unknown_file["functions"] if f"modeling_{family}" in name]
    if names:
        unknown_file["functions"].pop(names[0])
        assert unknown(kinds) == [names[0]]


PLAIN = "def f(x, y=1):\n    return x + y * 'a'"


def function(text: str) -> ast.AST:
    return ast.parse(text).body[0]


def test_a_digest_ignores_comments_docstrings_annotations_and_layout() -> None:
    plain = function("def f(x, y=1):\n    return x + y * 'a'\n")
    same = function(
        'def f(x: int, y: int = 1) -> str:\n    """Add."""\n    # why\n    return (x + y * "a")'
    )
    assert digest_of(plain) == digest_of(same)


@pytest.mark.parametrize(
    "text",
    [
        "def f(x, y=2):\n    return x + y * 'a'",
        "def f(x, y=True):\n    return x + y * 'a'",
        "def f(x, y=1):\n    return x + y * 'b'",
        "def f(x, y=1):\n    return x - y * 'a'",
        "def f(y, x=1):\n    return x + y * 'a'",
        "@g\ndef f(x, y=1):\n    return x + y * 'a'",
        "def f(x, y=1):\n    x = -x\n    return x + y * 'a'",
    ],
)
def test_a_digest_sees_every_change_of_the_code(text) -> None:
    assert digest_of(function(text)) != digest_of(
        function("def f(x, y=1):\n    return x + y * 'a'")
    )


def test_an_unknown_function_without_a_probe_is_a_reason(unknown_file) -> None:
    unknown_file["functions"].pop(NAME)
    reason = compare(families.build("bert")).reason
    words = f"{NAME}: got code that is not among the tested versions of transformers, allowed: the"
    assert words in str(reason)


def test_an_unknown_function_is_probed_once_and_named_once(unknown_file) -> None:
    unknown_file["functions"].pop(NAME)
    calls: list[Any] = []

    def accelerate(model: Any) -> None:
        calls.append(model)
        _unchecked(model)

    hf_model = families.build("bert")
    with pytest.warns(UserWarning, match=NAME):
        assert compare(hf_model, accelerate) == (None, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compare(hf_model, accelerate) == (None, {})
    assert len(calls) == 1


def scaled(model: Any) -> None:
    """Accelerate a model without checks, and change the result of its last linear layer."""
    _unchecked(model)
    linear = [module for module in model.modules() if type(module) is torch.nn.Linear][-1]
    with torch.no_grad():
        linear.weight.mul_(1.001)


def test_a_probe_that_differs_is_a_reason(unknown_file) -> None:
    unknown_file["functions"].pop(NAME)
    reason = str(compare(families.build("bert"), scaled).reason)
    assert f"{NAME}: got code" in reason
    assert "a small model differs from fastbert: got last_hidden_state" in reason


@pytest.mark.parametrize("family", ["roberta", "distilbert", "nomic_bert", "marian"])
def test_a_probe_agrees_and_keeps_the_random_numbers(family) -> None:
    hf_model = families.build(family)
    before = torch.get_rng_state()
    assert probe(hf_model, _unchecked) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_probe_whose_model_is_not_served_says_why() -> None:
    def refuse(model: Any) -> None:
        raise ValueError("no")

    problem = probe(families.build("bert"), refuse)
    assert problem == "got ValueError (no), allowed: a call that fastbert serves"
