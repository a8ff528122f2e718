"""An accelerated ``MultiVectorEncoder`` agrees with stock, also if its scores read padding.

With ``attend=False``, the scores of a query read the hidden states of mask tokens whose attention
mask is 0. An accelerated encoder otherwise leaves these positions out.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_sentence_models as tiny
import torch
from quick_cases import long_case
from tiny_models import rows_computed
from tiny_sentence_models import TEXTS
from torch import Tensor, nn

import fastbert
from fastbert.integrations import accelerate as accelerated
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import run_sides

pytest.importorskip("sentence_transformers", minversion="6")
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.multi_vector_encoder.modules import (
    HierarchicalTokenPooling,
    MultiVectorMask,
)

EXPANSIONS: dict[str, Any] = {
    "none": None,
    "attended": {"strategy": "fixed", "length": 36, "attend": True},
    "fixed": {"strategy": "fixed", "length": 36},
    "min": {"strategy": "min", "length": 12},
}
# ``TEXTS`` has texts of 2 to 32 tokens, so the longest query has no mask tokens with "min".
FAMILIES = ("Bert", "ModernBert", *map(long_case, ("XLMRoberta", "DistilBert", "MPNet")))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return tiny.checkpoints(tmp_path_factory)


def build(folder: Path, expansion: str = "fixed", **options: Any) -> Any:
    """Return a stock model like ColBERT: an encoder, a projection and the mask of the scores."""
    given = {"attn_implementation": "eager"}
    transformer = Transformer(
        str(folder), model_kwargs=given, query_expansion=EXPANSIONS[expansion]
    )
    torch.manual_seed(5)
    projection = Dense(
        48, 16, bias=False, activation_function=None, module_input_name="token_embeddings"
    )
    modules = [transformer, projection, MultiVectorMask(skiplist_words=["w3", "w7"])]
    return MultiVectorEncoder(modules=modules, device="cpu", **options).eval()


def queries(model: Any, **options: Any) -> Tensor:
    return torch.cat(model.encode_query(TEXTS, batch_size=8, **options))


def documents(model: Any, **options: Any) -> Tensor:
    return torch.cat(model.encode_document(TEXTS, batch_size=8, **options))


def scores(model: Any) -> Tensor:
    return model.similarity(model.encode_query(TEXTS[:6]), model.encode_document(TEXTS))


# Agreement


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("expansion", EXPANSIONS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_documents_agree_with_stock(folders, family, expansion, side, dtype):
    sides = tiny.sides(build(folders(family, side), expansion), dtype)
    with warnings.catch_warnings(), rows_computed() as rows:
        warnings.simplefilter("error")
        # The encoder cannot know that nothing reads position 0 of a sequence padded on the left.
        warnings.filterwarnings("ignore", "fastbert: .* got sequences that begin with padding")
        assert_close("queries", *run_sides(queries, *sides))
        assert_close("documents", *run_sides(documents, *sides))
    assert rows, "ours did not run"


@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_scores_agree_with_stock(folders, expansion):
    fast, oracle, stock = tiny.sides(build(folders("Bert"), expansion))
    assert_close("scores", *run_sides(scores, fast, oracle, stock))
    pairs = [model.encode_query(TEXTS) for model in (fast, oracle, stock)]
    answers = [model.encode_document(TEXTS[::-1]) for model in (fast, oracle, stock)]
    found = [stock.similarity_pairwise(*each) for each in zip(pairs, answers, strict=True)]
    assert_close("scores of pairs", *found)


def test_mask_tokens_are_read_and_documents_are_computed_without_padding(folders):
    """The embeddings at masked positions are not zero, and only queries compute these positions."""
    fast, _, stock = tiny.sides(build(folders("Bert"), "fixed"))
    for model in (fast, stock):
        features = model.preprocess(TEXTS, task="query")
        masked = features["attention_mask"] == 0
        assert masked.sum() > len(TEXTS)
        with torch.no_grad(), rows_computed() as rows:
            states = model(features, task="query")["token_embeddings"]
        assert states[masked].norm(dim=-1).min() > 0.01
    with torch.no_grad(), rows_computed() as rows:
        fast(fast.preprocess(TEXTS, task="query"), task="query")
    assert set(rows) == {len(TEXTS) * 36}
    given = fast.preprocess(TEXTS, task="document")
    with torch.no_grad(), rows_computed() as rows:
        fast(dict(given), task="document")
    assert set(rows) == {int(given["attention_mask"].sum())}


def test_prompts(folders):
    options = {"prompts": {"query": "w1 w2", "document": "w9"}}
    fast, oracle, stock = tiny.sides(build(folders("Bert"), **options))
    assert_close("queries", *run_sides(queries, fast, oracle, stock))
    assert_close("documents", *run_sides(documents, fast, oracle, stock))
    other = run_sides(lambda model: queries(model, prompt="w20 w21"), fast, oracle, stock)
    assert_close("another prompt", *other)
    assert not torch.equal(other[0], queries(fast))


@pytest.mark.parametrize("inside", [False, True])
def test_pooled_tokens_agree_with_stock(folders, inside):
    """A module of the model or an argument of the call merges tokens that are alike."""
    pooling = HierarchicalTokenPooling(pool_factor=2)
    model = build(folders("Bert"))
    if inside:
        model.append(pooling)
    options = {} if inside else {"token_pooling": pooling}
    sides = tiny.sides(model)
    assert_close("documents", *run_sides(lambda side: documents(side, **options), *sides))
    assert len(documents(sides[0], **options)) < len(documents(build(folders("Bert"))))


def test_gradients_agree_with_stock(folders):
    def gradients(model: Any) -> dict[str, Tensor]:
        model.train()
        torch.manual_seed(4)
        total = 0.0
        for task in ("query", "document"):
            features = model.preprocess(TEXTS, task=task)
            out = model(features, task=task)
            vectors = out["token_embeddings"][out["attention_mask"]]
            total = total + (vectors * torch.randn(vectors.shape).to(vectors.dtype)).sum()
        total.backward()
        named = model.named_parameters()
        return {n: p.grad for n, p in named if p.grad is not None and "key.bias" not in n}

    actual, expected, yardstick = run_sides(gradients, *tiny.sides(build(folders("Bert"))))
    assert actual.keys() == expected.keys()
    assert len(actual) > 30
    for name in expected:
        assert_close(name, actual[name], expected[name], yardstick[name])


# Changes, copies and files


def test_an_expansion_that_is_set_later_is_read(folders):
    fast, oracle, stock = tiny.sides(build(folders("Bert"), "none"))
    for model in (fast, oracle, stock):
        model[0].query_expansion = EXPANSIONS["min"]
    assert_close("queries", *run_sides(queries, fast, oracle, stock))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_accelerated(folders, copied):
    model = fastbert.accelerate(build(folders("Bert")))
    made = copied(model)
    with rows_computed() as rows:
        assert torch.equal(queries(made), queries(model))
    assert rows
    fastbert.restore(made)
    assert type(made[0]) is Transformer


def test_saved_and_opened_again(folders, tmp_path):
    model = fastbert.accelerate(build(folders("Bert")))
    model.save_pretrained(str(tmp_path))
    stock = MultiVectorEncoder(str(tmp_path), device="cpu")
    assert [type(module) for module in stock] == [Transformer, Dense, MultiVectorMask]
    torch.testing.assert_close(queries(stock), queries(model), rtol=1e-4, atol=1e-5)
    assert torch.equal(queries(fastbert.accelerate(stock)), queries(model))


def test_restore_gives_the_stock_classes_back(folders):
    model, stock = build(folders("Bert")), build(folders("Bert"))
    fastbert.restore(fastbert.accelerate(fastbert.accelerate(model)))
    assert [type(module) for module in model] == [Transformer, Dense, MultiVectorMask]
    assert accelerated.bound_encoders(model) == {}
    assert torch.equal(queries(model), queries(stock))
    # The encoder alone can be restored too.
    fastbert.restore(fastbert.accelerate(model)[0].model)
    assert torch.equal(queries(model), queries(stock))


def test_an_int8_copy_reads_mask_tokens(folders):
    model = fastbert.accelerate(build(folders("Bert")))
    expected = queries(model)
    assert (queries(fastbert.quantize(model)) - expected).abs().max() < 0.1


def test_stock_code_of_the_encoder_reads_mask_tokens_too(folders):
    """A hook makes the encoder run the code of transformers, which computes all positions."""
    model, stock = build(folders("Bert")), build(folders("Bert"))
    fastbert.accelerate(model)
    for each in (model, stock):
        each[0].model.encoder.layer[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="runs its own code, padded"):
        actual = queries(model)
    assert torch.equal(actual, queries(stock))


def test_a_called_module_in_the_encoder(folders):
    """fastbert calls the linear layer, with hidden states of all positions."""
    model, stock = build(folders("Bert")), build(folders("Bert"))
    fastbert.accelerate(model)
    for each in (model, stock):
        linear = each[0].model.encoder.layer[0].intermediate.dense
        linear.register_forward_hook(lambda *given: given[2] * 1.5)
    with rows_computed() as rows:
        actual = queries(model)
    assert rows
    torch.testing.assert_close(actual, queries(stock), rtol=1e-4, atol=1e-5)


def test_compiled_models_agree(folders):
    model, stock = fastbert.accelerate(build(folders("Bert"))), build(folders("Bert"))
    model.compile(backend="eager")
    results = [each.encode_query(TEXTS[2:4]) for each in (model, stock)]
    for pair in zip(*results, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


# Refusals


def test_an_encoder_with_other_rules_at_padding_is_refused_by_name(folders):
    """DeBERTa hides all keys from a position whose mask is 0."""
    model, stock = build(folders("DebertaV2")), build(folders("DebertaV2"))
    expected = (
        r"^accelerate: 0\.query_expansion: got attend=False, with which hidden states are read "
        r"where the mask is 0, allowed with a DebertaV2Model: attend=True or no query expansion$"
    )
    with pytest.raises(ValueError, match=expected):
        fastbert.accelerate(model)
    with pytest.warns(UserWarning, match="left MultiVectorEncoder as it is: 0.query_expansion"):
        fastbert.accelerate(model, strict=False)
    assert accelerated.bound_encoders(model) == {}
    model[0].query_expansion = None
    fastbert.accelerate(model)
    torch.testing.assert_close(documents(model), documents(stock), rtol=1e-4, atol=1e-5)
    model[0].query_expansion = EXPANSIONS["fixed"]
    with pytest.raises(ValueError, match=r"^query_expansion: got attend=False"):
        queries(model)


def test_a_subclass_of_the_encoder_is_refused_by_name(folders):
    """The ``forward`` of a subclass may drop the argument that asks for all hidden states."""
    model = build(folders("Bert"))

    class Own(type(model[0].model)):
        def forward(self, input_ids, attention_mask, **kwargs):
            return super().forward(input_ids, attention_mask)

    model[0].model.__class__ = Own
    with pytest.raises(ValueError, match="allowed with a Own: attend=True"):
        fastbert.accelerate(model)


def test_hooks_on_the_projection_run(folders):
    model = fastbert.accelerate(build(folders("Bert")))
    seen: list[nn.Module] = []
    model[1].register_forward_hook(lambda module, *_: seen.append(module))
    queries(model)
    assert seen
