"""Accelerated models work with torch.compile, torch.export, ONNX and torch.jit.trace."""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from quick_cases import long_case
from tiny_models import REASON, agree, batch, gradients, model, rows_computed, sides, values
from torch import Tensor

import fastbert
from fastbert.data import PackedCollatorForTokenClassification
from fastbert.integrations.accelerate import _warn_once
from fastbert.testing.yardstick import Yardstick


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(made: Any) -> Any:
    return torch.compile(made, backend="aot_eager", fullgraph=True)


def packed() -> dict[str, Any]:
    lengths = batch()["attention_mask"].sum(1).tolist()
    rows = zip(batch()["input_ids"].tolist(), lengths, strict=True)
    features = [{"input_ids": ids[:n], "labels": ids[:n]} for ids, n in rows]
    made = PackedCollatorForTokenClassification(layout="transformers")(features)
    del made["labels"]
    return made


@pytest.mark.every_case
def test_compiled_padded_batches() -> None:
    pair = sides(model("BertForSequenceClassification"))
    whole = compiled(pair.fast)
    for given in (batch(), batch((7, 12), 4)):
        with torch.no_grad():
            stock = Yardstick(lambda given=given: values(pair.stock, given))
            agree(values(whole, given), values(pair.oracle, given), stock)


@pytest.mark.every_case
def test_compiled_packed_batches() -> None:
    pair, given = sides(model()), batch()
    exist = given["attention_mask"].bool()
    with torch.no_grad():
        out = compiled(pair.fast)(**packed())
        fast = {"states": out.last_hidden_state[0], "pooled": out.pooler_output}
        others = [side(**given) for side in pair[1:]]
    rest = [{"states": o.last_hidden_state[exist], "pooled": o.pooler_output} for o in others]
    agree(fast, *rest)


def test_a_compiled_training_step() -> None:
    pair = sides(model("BertForSequenceClassification"))
    pair.each(lambda side: side.train())
    given = batch() | {"labels": torch.tensor([0, 1, 1, 0])}

    def slopes(side: Any) -> dict[str, torch.Tensor]:
        side.zero_grad()
        run = compiled(side) if side is pair.fast else side
        run(**given).loss.backward()
        return gradients(side)

    agree(*pair.run(slopes), factor=3.0, reason=REASON)


@pytest.mark.every_case
def test_compiled_states_and_weights() -> None:
    pair = sides(model(attn_implementation="eager"))
    options = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        fast = values(compiled(pair.fast), batch(), **options)
        stock = Yardstick(lambda: values(pair.stock, batch(), **options))
        agree(fast, values(pair.oracle, batch(), **options), stock)


def test_a_compiled_model_holds_our_operators_and_sees_new_weights() -> None:
    made, graphs = fastbert.accelerate(model()), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    whole = torch.compile(made, backend=backend, fullgraph=True)
    with torch.no_grad():
        before = whole(**batch()).last_hidden_state
        assert any("fastbert" in target for target in graphs)
        assert not any("scaled_dot_product" in target for target in graphs)
        for parameter in made.parameters():
            parameter.mul_(1.1)
        after = whole(**batch()).last_hidden_state
        torch.testing.assert_close(after, made(**batch()).last_hidden_state)
    assert not torch.allclose(before, after)


@pytest.mark.every_case
def test_accelerated_after_being_compiled() -> None:
    pair = sides(model())
    made = fastbert.restore(pair.fast)
    whole = compiled(made)
    with torch.no_grad():
        whole(**batch())
        fastbert.accelerate(made)
        stock = Yardstick(lambda: values(pair.stock, batch()))
        agree(values(whole, batch()), values(pair.oracle, batch()), stock)
        assert not whole(**batch()).last_hidden_state[batch()["attention_mask"] == 0].any()
        fastbert.restore(made)
        assert whole(**batch()).last_hidden_state[batch()["attention_mask"] == 0].any()


# Tests of exports to other runtimes


def no_operator_of_ours(program: torch.export.ExportedProgram) -> None:
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets
    assert not [target for target in targets if "fastbert" in target]


@pytest.mark.parametrize(
    ("batches", "lengths"),
    [
        ((1, 2, 3), range(3, 12, 3)),
        long_case((1, 2, 3, 5, 8), range(2, 41, 2)),
    ],
    ids=["few sizes", "100 sizes"],
)
def test_two_recompilations_serve_all_batch_sizes_and_lengths(batches, lengths) -> None:
    """torch.compile recompiles only for the second length and for the second batch size."""
    pair = sides(model())
    # A third recompilation of any function raises an error.
    limit = torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True)
    whole = torch.compile(pair.fast, backend="eager")
    with torch.no_grad(), limit:
        for size, length in itertools.product(batches, lengths):
            given = batch((length, *[1 + 7 * i % length for i in range(1, size)]))
            exist, actual = given["attention_mask"].bool(), whole(**given)
            expected = pair.fast(**given)
            for name in ("last_hidden_state", "pooler_output"):
                torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)
            stock = Yardstick(lambda given=given: values(pair.stock, given))
            if size == batches[-1] and length == lengths[-1]:
                agree(values(whole, given), values(pair.oracle, given), stock)
            assert actual.last_hidden_state.shape[:2] == exist.shape


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict) -> None:
    pair = sides(model("BertForSequenceClassification"))
    with torch.no_grad():
        pair.fast(**batch())
        program = torch.export.export(pair.fast, (), batch(), strict=strict)
        no_operator_of_ours(program)
        out = program.module()(**batch())
        assert torch.equal(out.logits, pair.stock(**batch()).logits)
    pair.check(batch())


def test_export_with_a_dynamic_batch() -> None:
    made = fastbert.accelerate(model())
    size, length = torch.export.Dim("size"), torch.export.Dim("length", max=40)
    shapes = {name: {0: size, 1: length} for name in batch()}
    with torch.no_grad():
        program = torch.export.export(made, (), batch(), dynamic_shapes=shapes, strict=False)
        no_operator_of_ours(program)
        given = batch((5, 9), 3)
        actual = program.module()(**given).pooler_output
        torch.testing.assert_close(actual, made(**given).pooler_output)


class Logits(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.inner(input_ids, attention_mask).logits


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("onnxscript", "onnxruntime")),
    reason="needs onnxscript and onnxruntime: pip install 'fastbert[bench]'",
)
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.every_case
def test_onnx(tmp_path, dynamo) -> None:
    import onnxruntime

    pair = sides(model("BertForSequenceClassification"))
    given, path = batch(), str(tmp_path / "model.onnx")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair.fast(**given)
        torch.onnx.export(
            Logits(pair.fast),
            tuple(given.values()),
            path,
            input_names=list(given),
            dynamo=dynamo,
            verbose=False,
        )
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        actual = session.run(None, {name: x.numpy() for name, x in given.items()})[0]
        expected = pair.stock(**given).logits
    torch.testing.assert_close(torch.from_numpy(actual), expected)
    pair.check(given)


def kinds(graph: Any) -> Iterator[str]:
    """Yield the operator of each node; the text of a graph would also contain source paths."""
    for node in graph.nodes():
        yield node.kind()
        for block in node.blocks():
            yield from kinds(block)


def test_jit_trace() -> None:
    pair = sides(model("BertForSequenceClassification"))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair.fast(**batch())
        traced = torch.jit.trace(Logits(pair.fast), tuple(batch().values()))
        assert not [kind for kind in kinds(traced.inlined_graph) if "fastbert" in kind]
        assert torch.equal(traced(**batch()), pair.stock(**batch()).logits)
    pair.check(batch())


def test_nothing_is_warned_about_an_export() -> None:
    _warn_once.cache_clear()
    made = fastbert.accelerate(model())
    with warnings.catch_warnings(record=True) as warned, torch.no_grad(), rows_computed() as rows:
        warnings.simplefilter("always")
        torch.export.export(made, (), batch(), strict=False)
    assert rows == []
    assert not [w for w in warned if "fastbert" in str(w.message)]
