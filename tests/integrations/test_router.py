"""Accelerated models with a ``Router`` of sentence-transformers agree with stock on every route."""

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
from tiny_sentence_models import TEXTS, WORDS
from torch import Tensor

import fastbert
from fastbert.integrations import accelerate as accelerated
from fastbert.integrations import sparse_encoder as splade
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import run_sides

pytest.importorskip("sentence_transformers", minversion="6")
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, StaticEmbedding
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

BOTH = ("query", "document")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return tiny.checkpoints(tmp_path_factory)


def transformer(folder: Path, **options: Any) -> Any:
    return Transformer(str(folder), model_kwargs={"attn_implementation": "eager"}, **options)


def build(folders: Callable[..., Path], query: str = "MPNet", document: str = "Bert") -> Any:
    """Return a model with one family of encoders for queries and another one for documents."""
    routes = {
        "query": [transformer(folders(query)), Pooling(48, "mean")],
        "document": [transformer(folders(document)), Pooling(48, "cls")],
    }
    router = Router.for_query_document(routes["query"], routes["document"])
    return SentenceTransformer(modules=[router, Normalize()], device="cpu").eval()


def queries(model: Any, **options: Any) -> Tensor:
    return model.encode_query(TEXTS, batch_size=8, convert_to_tensor=True, **options)


def documents(model: Any, **options: Any) -> Tensor:
    return model.encode_document(TEXTS, batch_size=8, convert_to_tensor=True, **options)


def agree(sides: Any, *functions: Callable[[Any], Tensor]) -> None:
    for function in functions:
        assert_close(function.__name__, *run_sides(function, *sides))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "families",
    [("MPNet", "Bert"), long_case(("ModernBert", "XLMRoberta")), ("DistilBert", "DebertaV2")],
)
def test_both_routes_agree_with_stock(folders, families, dtype):
    sides = tiny.sides(build(folders, *families), dtype)
    assert list(accelerated.bound_encoders(sides[0])) == [
        f"0.sub_modules.{route}.0.model" for route in BOTH
    ]
    tokens = sum(len(text.split()) + 2 for text in TEXTS)
    for function in (queries, documents):
        with rows_computed() as rows:
            function(sides[0])
        # One call computes both layers, or each layer has a call; no call computes padding.
        assert sum(rows) in (tokens, 2 * tokens)
    agree(sides, queries, documents)


def test_similarities_agree_with_stock(folders):
    def scores(model: Any) -> Tensor:
        return model.similarity(queries(model), documents(model))

    agree(tiny.sides(build(folders)), scores)


def test_both_routes_are_restored(folders):
    model, stock = fastbert.accelerate(build(folders)), build(folders)
    assert fastbert.restore(model) is model
    assert accelerated.bound_encoders(model) == {}
    assert torch.equal(queries(model), queries(stock))
    assert torch.equal(documents(model), documents(stock))


def test_gradients_of_both_routes_agree_with_stock(folders):
    def gradients(model: Any) -> dict[str, Tensor]:
        model.train()
        first, second = (
            model(model.preprocess(TEXTS, task=task), task=task)["sentence_embedding"]
            for task in BOTH
        )
        torch.nn.functional.cross_entropy(
            20 * first @ second.T, torch.arange(len(TEXTS))
        ).backward()
        named = model.named_parameters()
        biases = ("key.bias", "attn.k.bias")
        return {n: p.grad for n, p in named if p.grad is not None and not n.endswith(biases)}

    actual, expected, yardstick = run_sides(gradients, *tiny.sides(build(folders)))
    assert actual.keys() == expected.keys()
    assert {name.split(".")[2] for name in actual} == set(BOTH)
    for name in expected:
        assert_close(name, actual[name], expected[name], yardstick[name])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_accelerated(folders, copied):
    model = fastbert.accelerate(build(folders))
    made = copied(model)
    with rows_computed() as rows:
        assert torch.equal(queries(made), queries(model))
        assert torch.equal(documents(made), documents(model))
    assert rows


def test_saved_and_opened_again(folders, tmp_path):
    model = fastbert.accelerate(build(folders))
    model.save_pretrained(str(tmp_path))
    stock = SentenceTransformer(str(tmp_path), device="cpu")
    assert accelerated.bound_encoders(stock) == {}
    torch.testing.assert_close(queries(stock), queries(model), rtol=1e-4, atol=1e-5)
    fastbert.accelerate(stock)
    assert torch.equal(queries(stock), queries(model))
    assert torch.equal(documents(stock), documents(model))


def test_an_encoder_that_both_routes_share(folders):
    """Both routes call one encoder, with a projection and a prompt of their own."""
    torch.manual_seed(6)
    encoder, pooling = transformer(folders()), Pooling(48, "mean")
    routes = {name: [encoder, pooling, Dense(48, 12)] for name in BOTH}
    model = SentenceTransformer(
        modules=[Router(routes)], prompts={"query": "w1 w2", "document": "w3"}, device="cpu"
    ).eval()
    sides = tiny.sides(model)
    assert len(accelerated.bound_encoders(sides[0])) == 1
    agree(sides, queries, documents)


def test_routes_by_task_and_modality(folders):
    routes = {
        name: [transformer(folders(family)), Pooling(48, "mean")]
        for name, family in (("short", "DistilBert"), ("long", "Bert"))
    }
    mappings = {("search", "text"): "short", (None, None): "long"}
    model = SentenceTransformer(modules=[Router(routes, route_mappings=mappings)], device="cpu")
    sides = tiny.sides(model.eval())

    def search(side: Any) -> Tensor:
        return side.encode(TEXTS, task="search", convert_to_tensor=True)

    def other(side: Any) -> Tensor:
        return side.encode(TEXTS, convert_to_tensor=True)

    agree(sides, search, other)
    assert not torch.equal(search(sides[0]), other(sides[0]))


def test_static_embeddings_for_queries(folders):
    torch.manual_seed(7)
    static = StaticEmbedding(tiny.tokenizer().backend_tokenizer, embedding_dim=48)
    encoder = [transformer(folders()), Pooling(48, "mean")]
    router = Router.for_query_document([static], encoder)
    sides = tiny.sides(SentenceTransformer(modules=[router], device="cpu").eval())
    assert list(accelerated.bound_encoders(sides[0])) == ["0.sub_modules.document.0.model"]
    agree(sides, queries, documents)


def test_a_hook_on_one_route_leaves_the_other_route_accelerated(folders):
    model, stock = fastbert.accelerate(build(folders, "DistilBert")), build(folders, "DistilBert")
    for each in (model, stock):
        inner = each[0].sub_modules["query"][0].model
        inner.transformer.layer[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="DistilBertModel runs its own code, padded"):
        assert torch.equal(queries(model), queries(stock))
    with rows_computed() as rows:
        torch.testing.assert_close(documents(model), documents(stock), rtol=1e-4, atol=1e-5)
    assert rows


def test_a_refusal_leaves_both_routes_as_they_are(folders):
    model = build(folders)
    model[0].sub_modules["document"][0].model.config.is_decoder = True
    with pytest.raises(ValueError, match="is_decoder"):
        fastbert.accelerate(model)
    assert accelerated.bound_encoders(model) == {}


# Other kinds of models


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a family's model with a masked-LM head."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            made[family] = tiny.save(path, f"{family}ForMaskedLM", tiny.config(family))
        return made[family]

    return folder


@pytest.fixture(autouse=True)
def forgotten_warnings():
    splade._warn_once.cache_clear()


def masked(folder: Path, activation: str = "relu") -> list[Any]:
    """Return the modules of SPLADE."""
    given = {"attn_implementation": "eager"}
    encoder = Transformer(str(folder), transformer_task="fill-mask", model_kwargs=given)
    return [encoder, SpladePooling("max", activation_function=activation)]


def sparse(folder: Path) -> Any:
    """Return a model like OpenSearch's: weights of tokens for queries, SPLADE for documents."""
    torch.manual_seed(8)
    encoder, pooling = masked(folder, "log1p_relu")
    static = SparseStaticEmbedding(encoder.tokenizer, weight=torch.rand(len(WORDS)), frozen=True)
    router = Router.for_query_document([static], [encoder, pooling])
    return SparseEncoder(modules=[router], device="cpu", similarity_fn_name="dot").eval()


def two_heads(heads: Callable[[str], Path]) -> Any:
    """Return a model with a SPLADE model for queries and another one for documents."""
    router = Router.for_query_document(masked(heads("Bert")), masked(heads("DistilBert")))
    return SparseEncoder(modules=[router], device="cpu").eval()


def words_of(task: str) -> Callable[[Any], Tensor]:
    def words(model: Any) -> Tensor:
        encode = model.encode_query if task == "query" else model.encode_document
        return encode(TEXTS, convert_to_sparse_tensor=False)

    return words


def computes_without_padding(model: Any, task: str) -> bool:
    with torch.no_grad():
        return "token_embeddings" not in model(model.preprocess(TEXTS, task=task), task=task)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_routes_of_a_sparse_encoder_agree_with_stock(heads, dtype):
    sides = tiny.sides(two_heads(heads), dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(sides, *map(words_of, BOTH))
    for task in BOTH:
        assert computes_without_padding(sides[0], task)
        assert not computes_without_padding(sides[2], task)


def test_gradients_of_both_routes_of_a_sparse_encoder_agree_with_stock(heads):
    torch.manual_seed(9)
    dy = torch.randn(2, len(TEXTS), len(WORDS))

    def gradients(model: Any) -> dict[str, Tensor]:
        model.train()
        for task, each in zip(BOTH, dy, strict=True):
            out = model(model.preprocess(TEXTS, task=task), task=task)["sentence_embedding"]
            (out * each.to(out.dtype)).sum().backward()
        named = model.named_parameters()
        return {n: p.grad for n, p in named if p.grad is not None and not n.endswith("key.bias")}

    actual, expected, yardstick = run_sides(gradients, *tiny.sides(two_heads(heads)))
    assert actual.keys() == expected.keys()
    assert {name.split(".")[2] for name in actual} == set(BOTH)
    for name in expected:
        assert_close(name, actual[name], expected[name], yardstick[name])


def test_a_watched_module_of_one_route_is_called(heads):
    model, stock = fastbert.accelerate(two_heads(heads)), two_heads(heads)
    calls: list[str] = []
    pooling = model[0].sub_modules["query"][1]
    pooling.register_forward_hook(lambda *_: calls.append("hook"))
    told = r"Router computes the logits of its head with padding: sub_modules.query.1.forward_hooks"
    with pytest.warns(UserWarning, match=told):
        torch.testing.assert_close(words_of("query")(model), words_of("query")(stock))
    assert calls
    assert not computes_without_padding(model, "query")
    assert computes_without_padding(model, "document")


def test_the_task_may_be_among_the_features(heads):
    model, stock = fastbert.accelerate(two_heads(heads)), two_heads(heads)
    features = [side.preprocess(TEXTS, task="query") | {"task": "query"} for side in (model, stock)]
    with torch.no_grad():
        fast, expected = (
            side(f)["sentence_embedding"] for side, f in zip((model, stock), features, strict=True)
        )
    torch.testing.assert_close(fast, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="No route found for task type 'other'"):
        model(features[0], task="other")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_sparse_encoder_is_accelerated(heads, copied):
    model = fastbert.accelerate(two_heads(heads))
    made = copied(model)
    for task in BOTH:
        assert torch.equal(words_of(task)(made), words_of(task)(model))
        assert computes_without_padding(made, task)
    fastbert.restore(made)
    assert type(made[0]) is Router
    assert splade.PLANS not in vars(made[0])
    assert not computes_without_padding(made, "query")
    assert computes_without_padding(model, "query")


def test_a_router_with_its_own_forward_is_called(heads):
    class Own(Router):
        def forward(self, features, **kwargs):
            return super().forward(features, **kwargs) | {"own": True}

    routes = {"query": masked(heads("Bert")), "document": masked(heads("DistilBert"))}
    model = SparseEncoder(modules=[Own(routes)], device="cpu").eval()
    fastbert.accelerate(model)
    assert type(model[0]) is Own
    assert model(model.preprocess(TEXTS, task="query"), task="query")["own"]


def test_a_patched_router_runs_the_stock_head(heads, monkeypatch):
    model = fastbert.accelerate(two_heads(heads))
    assert computes_without_padding(model, "query")
    real = Router.forward
    monkeypatch.setattr(Router, "forward", lambda *a, **k: real(*a, **k))
    with pytest.warns(UserWarning, match="Router.forward: got .*, allowed: the function in its"):
        assert not computes_without_padding(model, "query")


def test_a_sparse_encoder_with_static_weights_for_queries(tmp_path):
    folder = tiny.save(tmp_path / "model", "DistilBertForMaskedLM", tiny.config("DistilBert"))
    sides = tiny.sides(sparse(folder))
    options = {"convert_to_sparse_tensor": False}

    def words(model: Any) -> Tensor:
        return model.encode_document(TEXTS, **options)

    def scores(model: Any) -> Tensor:
        return model.similarity(model.encode_query(TEXTS, **options), words(model))

    agree(sides, words, scores)
    fast, _, stock = sides
    assert computes_without_padding(fast, "document")
    asked = [model.encode_query(TEXTS, **options) for model in (fast, stock)]
    assert torch.equal(*asked)
    fast.save_pretrained(str(tmp_path / "saved"))
    opened = SparseEncoder(str(tmp_path / "saved"), device="cpu")
    torch.testing.assert_close(words(opened), words(fast), rtol=1e-4, atol=1e-5)
    fastbert.restore(fast)
    assert torch.equal(words(fast), words(stock))


def test_a_multi_vector_encoder_whose_queries_have_mask_tokens(folders):
    expansion = {"strategy": "fixed", "length": 36}
    router = Router.for_query_document(
        [transformer(folders("DistilBert"), query_expansion=expansion)], [transformer(folders())]
    )
    model = MultiVectorEncoder(modules=[router, MultiVectorMask()], device="cpu").eval()
    sides = tiny.sides(model)

    def asked(side: Any) -> Tensor:
        return torch.cat(side.encode_query(TEXTS))

    def scores(side: Any) -> Tensor:
        return side.similarity(side.encode_query(TEXTS), side.encode_document(TEXTS))

    agree(sides, asked, scores)
    fastbert.restore(sides[0])
    kinds = {type(module) for module in sides[0].modules() if isinstance(module, Transformer)}
    assert kinds == {Transformer}
