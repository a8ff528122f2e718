"""The losses of sentence-transformers train an accelerated model as they train the stock model."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_sentence_models as tiny
import torch
from quick_cases import long_case
from stock_families import assert_gradients_close
from stock_families import gradients as gradients_of
from tiny_models import rows_computed
from torch import Tensor, nn

import fastbert
from fastbert.testing.in_float64 import InFloat64
from fastbert.testing.yardstick import run_sides

pytest.importorskip("sentence_transformers", minversion="6")
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.cross_encoder import losses as of_pairs
from sentence_transformers.multi_vector_encoder import losses as of_several
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer import losses as of_one
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder import losses as of_words
from sentence_transformers.sparse_encoder.modules import SpladePooling

STEPS, SIZE = 6, 4
# The training data: rows of a query, a document that answers it, and a document that does not.
ROWS = [
    (f"w{i} w{i + 1}", " ".join(f"w{j}" for j in range(i, i + 1 + 3 * i % 11)), f"w{90 - i} w{i}")
    for i in range(STEPS * SIZE)
]
# A loss, given a model, and a way to train it: number of columns, and labels of ``SIZE`` rows.
Case = tuple[Callable[[Any], nn.Module], int, Callable[[Tensor], Tensor] | None]


def scores(drawn: Tensor) -> Tensor:
    """Return scores of two documents for each query, such as a teacher gives."""
    return drawn[:, :2]


def margins(drawn: Tensor) -> Tensor:
    """Return differences of two scores for each query."""
    return drawn[:, 0] - drawn[:, 1]


LOSSES: dict[str, Case] = {
    "MultipleNegativesRankingLoss": (of_one.MultipleNegativesRankingLoss, 3, None),
    "CachedMultipleNegativesRankingLoss": (
        lambda model: of_one.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3), 2, None,
    ),
    "MarginMSELoss": (of_one.MarginMSELoss, 3, margins),
    "DistillKLDivLoss": (of_one.DistillKLDivLoss, 3, scores),
    "MSELoss": (of_one.MSELoss, 1, lambda drawn: drawn),
    "MatryoshkaLoss": (
        lambda model: of_one.MatryoshkaLoss(
            model, of_one.MultipleNegativesRankingLoss(model), [48, 16]
        ),
        2, None,
    ),
    "AdaptiveLayerLoss": (
        lambda model: of_one.AdaptiveLayerLoss(model, of_one.MultipleNegativesRankingLoss(model)),
        2, None,
    ),
    "CoSENTLoss": (of_one.CoSENTLoss, 2, margins),
    # The model is its own guide, and embeds the same features a second time.
    "CachedGISTEmbedLoss": (
        lambda model: of_one.CachedGISTEmbedLoss(model, model, mini_batch_size=3), 2, None,
    ),
}  # fmt: skip
EXPANSION = {"strategy": "fixed", "length": 12}
# The losses that `make test` tries.
QUICK = (
    *("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss", "DistillKLDivLoss"),
    "CachedGISTEmbedLoss",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return tiny.checkpoints(tmp_path_factory)


def transformer(folder: Path, **options: Any) -> Any:
    return Transformer(str(folder), model_kwargs={"attn_implementation": "eager"}, **options)


def dense(folder: Path) -> Any:
    return SentenceTransformer(modules=[transformer(folder), Pooling(48, "mean")], device="cpu")


def training(model: Any, loss: nn.Module, case: Case, step: int) -> Tensor:
    """Return the loss of one batch; the labels have the dtype of the model."""
    _, count, make = case
    rows = ROWS[step * SIZE : (step + 1) * SIZE]
    columns = list(zip(*rows, strict=True))[:count]
    if isinstance(model, CrossEncoder):
        given: Any = [list(column) for column in columns]
    else:
        given = []
        for number, column in enumerate(columns):
            task = "document" if number else "query"
            # `MultiVectorEncoder` and models with a router read the task.
            options = {"task": task} if isinstance(model, MultiVectorEncoder) else {}
            given.append(model.preprocess(list(column), **options) | options)
    drawn = torch.randn(SIZE, 48, generator=torch.Generator().manual_seed(step))
    labels = None if make is None else make(drawn).to(next(model.parameters()).dtype)
    with warnings.catch_warnings():
        # The encoder must not run the code of transformers.
        warnings.filterwarnings("error", "fastbert: ")
        value = loss(given, labels)
    return sum(value.values()) if isinstance(value, dict) else value


def trained(model: Any) -> list[nn.Parameter]:
    """Return the parameters that receive gradients: all but those of an unread pooler."""
    return [p for name, p in model.named_parameters() if ".model.pooler." not in name]


def check_gradients(sides: Any, case: Case) -> None:
    """Check the gradients of every parameter in the first batch."""

    def run(model: Any) -> dict[str, Tensor]:
        model.train().zero_grad()
        in_float64 = next(model.parameters()).dtype == torch.float64
        # Some losses convert scores and labels to fp32. An adaptive loss draws a layer at random.
        random.seed(1)
        with InFloat64() if in_float64 else contextlib.nullcontext():
            training(model, case[0](model), case, 0).backward()
        return {name: grad.clone() for name, grad in gradients_of(model).items()}

    with rows_computed() as rows:
        run(sides[0])
    assert rows, "ours did not run"
    actual, expected, yardstick = run_sides(run, *sides)
    assert len(actual) == len(trained(sides[0]))
    assert_gradients_close(actual, expected, yardstick)


def losses(model: Any, case: Case) -> list[float]:
    """Train a copy of a model for six steps of AdamW, and return the losses."""
    model = copy.deepcopy(model).train()
    loss = case[0](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    values = []
    random.seed(2)
    for step in range(STEPS):
        optimizer.zero_grad()
        value = training(model, loss, case, step)
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


def check_training(sides: Any, case: Case) -> None:
    """Check the gradients of one batch, and that six losses agree to four digits."""
    check_gradients(sides, case)
    fast, _, stock = sides
    expected = losses(stock, case)
    assert losses(fast, case) == pytest.approx(expected, rel=1e-4)
    assert len({round(value, 6) for value in expected}) == STEPS


@pytest.mark.parametrize("name", [name if name in QUICK else long_case(name) for name in LOSSES])
def test_a_sentence_transformer(folders, name):
    check_training(tiny.sides(dense(folders())), LOSSES[name])


@pytest.mark.parametrize("family", ["ModernBert", long_case("MPNet")])
def test_other_families(folders, family):
    check_training(tiny.sides(dense(folders(family))), LOSSES["MultipleNegativesRankingLoss"])


def test_a_cross_encoder(tmp_path):
    settings = tiny.config("Bert", num_labels=1)
    folder = tiny.save(tmp_path, "BertForSequenceClassification", settings)
    given = {"attn_implementation": "eager"}
    model = CrossEncoder(str(folder), device="cpu", model_kwargs=given)
    loss = of_pairs.BinaryCrossEntropyLoss
    check_training(tiny.sides(model), (loss, 2, lambda drawn: drawn[:, 0] > 0))


def test_a_sparse_encoder(tmp_path):
    folder = tiny.save(tmp_path, "DistilBertForMaskedLM", tiny.config("DistilBert"))
    modules = [transformer(folder, transformer_task="fill-mask"), SpladePooling()]
    model = SparseEncoder(modules=modules, device="cpu")

    def loss(model: Any) -> Any:
        ranking = of_words.SparseMultipleNegativesRankingLoss(model)
        return of_words.SpladeLoss(model, ranking, 3e-3, 5e-3)

    check_training(tiny.sides(model), (loss, 3, None))


@pytest.mark.parametrize(
    ("expansion", "cached"),
    [
        (EXPANSION, False),
        long_case(None, False),
        long_case(EXPANSION, True),
        long_case(None, True),
    ],
)
def test_a_multi_vector_encoder(folders, expansion, cached):
    """With the expansion, mask tokens whose attention mask is 0 receive gradients."""
    torch.manual_seed(3)
    projection = Dense(
        48, 16, bias=False, activation_function=None, module_input_name="token_embeddings"
    )
    encoder = transformer(folders(), query_expansion=expansion)
    model = MultiVectorEncoder(modules=[encoder, projection, MultiVectorMask()], device="cpu")

    def loss(model: Any) -> Any:
        if cached:
            return of_several.CachedMultiVectorMultipleNegativesRankingLoss(
                model, mini_batch_size=3
            )
        return of_several.MultiVectorMultipleNegativesRankingLoss(model)

    check_training(tiny.sides(model), (loss, 3, None))


# Dropout


def with_dropout(model: Any, probability: float) -> Any:
    """Accelerate a model, whose dropouts all get one probability, and set it to training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
    return fastbert.accelerate(model).train()


def test_training_with_dropout_learns(folders):
    model = with_dropout(dense(folders()), 0.1)
    case = LOSSES["MultipleNegativesRankingLoss"]
    loss = case[0](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    values = []
    for step in range(30):
        optimizer.zero_grad()
        value = training(model, loss, case, step % 2)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert sum(values[-6:]) < 0.7 * sum(values[:6])


def test_a_cached_loss_replays_its_dropout(folders):
    """The first pass runs without gradients. The second pass, with gradients, drops the same."""
    model = with_dropout(dense(folders()), 0.3)
    features = model.preprocess([row[1] for row in ROWS[:SIZE]])
    passes = []
    for enabled in (False, True, False):
        torch.manual_seed(5)
        with torch.set_grad_enabled(enabled):
            passes.append(model(dict(features))["sentence_embedding"].detach())
    torch.manual_seed(6)
    other = model(dict(features))["sentence_embedding"].detach()
    torch.testing.assert_close(passes[0], passes[1])
    assert torch.equal(passes[0], passes[2])
    assert (other - passes[0]).abs().max() > 0.01
