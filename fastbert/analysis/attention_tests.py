"""Four tests of attention as an explanation (Wiegreffe and Pinter 2019), for a BERT classifier.

Wiegreffe and Pinter's classifier has a single attention over the states of an LSTM. BERT has
attention in every layer and head, so attention weights are compared in two scopes. The scope "read"
compares the weights of the first token in the last layer, averaged over the heads, because the
classifier reads the state of this token. The scope "every" takes the mean divergence over all
layers and tokens.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.analysis import fitting
from fastbert.analysis.agreement import total_variation
from fastbert.analysis.fitting import Distance, Examples, FitOptions, Observed, Progress, silent
from fastbert.analysis.token_classifier import TokenClassifier, inside, on_tokens
from fastbert.modules import BertForSequenceClassification

SCOPES = ("read", "every")
# Options for training the small token-wise classifier. The training takes a few seconds.
TOKEN_WISE = FitOptions(epochs=30, batch_size=32, learning_rate=2e-3)

Start = Callable[[int], BertForSequenceClassification]


@dataclass(frozen=True)
class Texts:
    """The texts of a test.

    Attributes:
        train: The texts on which models are trained.
        test: The texts on which models are compared.
    """

    train: Examples
    test: Examples


@dataclass(frozen=True)
class Guided:
    """The accuracy of token-wise classifiers that use the same attention weights.

    Attributes:
        weights: Name of the attention weights, such as "uniform"; see `frozen_weights`.
        accuracy: Mean accuracy over the seeds.
        deviation: Standard deviation over the seeds; 0 for one seed.
    """

    weights: str
    accuracy: float
    deviation: float


@dataclass(frozen=True)
class Adversary:
    """The result of a model that was trained to imitate the predictions of the base model only.

    The attention weights of this model should differ from the weights of the base model.

    Attributes:
        scope: The attention weights that had to differ: ``"read"`` or ``"every"``. The scope has no
            meaning if `strength` is 0.
        strength: The factor λ by which the loss multiplies the divergence of attention weights.
        distance: Accuracy of the model, and the distances of its predictions and attention weights
            from those of the base model.
    """

    scope: str
    strength: float
    distance: Distance


def make_uniform(model: nn.Module, layers: Iterable[int]) -> None:
    """Make the attention of some layers uniform over the keys, now and in later training.

    The query projection becomes 0 and gets no gradient, so all scores are 0. The softmax of equal
    scores is exactly uniform over the keys that are not masked.

    Args:
        model: A model of fastbert, which is changed in place.
        layers: Numbers of the layers; a negative number counts from the last layer.

    Raises:
        ValueError: If the model has no layer with one of the numbers.
    """
    blocks: Any = model.get_submodule("bert.encoder.layer")
    for number in layers:
        if not -len(blocks) <= number < len(blocks):
            allowed = f"from {-len(blocks)} to {len(blocks) - 1}"
            raise ValueError(f"layers: got {number}, allowed: numbers {allowed}")
        projection = blocks[number].attention.self.qkv
        for parameter in (projection.weight, projection.bias):
            if parameter is None:
                continue
            queries = len(parameter) // 3
            with torch.no_grad():
                parameter[:queries].zero_()
            parameter.register_hook(lambda grad, n=queries: _without(grad, n))


def _without(gradient: Tensor, queries: int) -> Tensor:
    gradient = gradient.clone()
    gradient[:queries] = 0
    return gradient


def uniform_weights(
    base: BertForSequenceClassification,
    start: Start,
    texts: Texts,
    options: FitOptions,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Distance]:
    """Test 1: make attention uniform in the fine-tuned model, and in models during their training.

    If a model with uniform attention weights is as good, the task does not need attention, and the
    attention weights explain nothing.

    Args:
        base: The fine-tuned model.
        start: Function that returns, for a seed, a classifier before its fine-tuning.
        texts: The texts of the training and of the test.
        options: Number of epochs, batch size and learning rate of the training.
        seed: Seed of the models.
        progress: Function that receives a line of text after each epoch.

    Returns:
        The distances of four models from `base`. Attention is uniform in the last layer or in all
        layers, in inference only or also in the training.
    """
    seen = fitting.observe(base, texts.test)
    results = []
    count = base.config.num_hidden_layers
    for where, layers in (("last layer", [count - 1]), ("all layers", list(range(count)))):
        changed = copy.deepcopy(base)
        make_uniform(changed, layers)
        trained = start(seed)
        make_uniform(trained, layers)
        name = f"uniform {where}, trained"
        fitting.fit(trained, texts.train, options, seed=seed, name=name, progress=progress)
        for label, model in ((f"uniform {where}, inference only", changed), (name, trained)):
            now = fitting.observe(model, texts.test)
            results.append(fitting.distance(label, now, seen, texts.test))
    return results


def seed_variance(
    base: BertForSequenceClassification,
    start: Start,
    texts: Texts,
    options: FitOptions,
    *,
    seeds: Sequence[int],
    progress: Progress = silent,
) -> list[Distance]:
    """Test 2: train with other seeds, which decide the head, the order of texts and dropout.

    The distances show how much the attention weights depend on the seed alone.

    Args:
        base: The fine-tuned model.
        start: Function that returns, for a seed, a classifier before its fine-tuning.
        texts: The texts of the training and of the test.
        options: Number of epochs, batch size and learning rate of the training.
        seeds: One seed for each model; they should not include the seed of `base`.
        progress: Function that receives a line of text after each epoch.

    Returns:
        For each model, its accuracy and the distances of its predictions and attention weights from
        the predictions and weights of `base`.
    """
    seen = fitting.observe(base, texts.test)
    results = []
    for seed in seeds:
        model = start(seed)
        name = f"seed {seed}"
        fitting.fit(model, texts.train, options, seed=seed, name=name, progress=progress)
        now = fitting.observe(model, texts.test)
        results.append(fitting.distance(name, now, seen, texts.test))
    return results


def frozen_weights(
    base: BertForSequenceClassification,
    texts: Texts,
    *,
    others: Mapping[str, nn.Module],
    seeds: Sequence[int],
    options: FitOptions = TOKEN_WISE,
    progress: Progress = silent,
) -> list[Guided]:
    """Test 3: guide a token-wise classifier by the frozen attention weights of a model.

    The weights of special tokens are left out, because a classifier without context learns nothing
    from these tokens. The other weights are scaled to the sum 1.

    Args:
        base: The fine-tuned model, whose word embeddings the classifiers use.
        texts: The texts of the training and of the test.
        others: Other models, by the name of their attention weights.
        seeds: Seeds of the classifiers.
        options: Options of the training of the classifiers.
        progress: Function that receives a line of text after each epoch.

    Returns:
        The accuracy with uniform weights, with weights that the classifier learns itself, with
        attention and rollout of `base`, and with the attention of each of `others`.
    """
    parts = (texts.train, texts.test)
    flat = [on_tokens(torch.ones_like(inside(part)), part) for part in parts]
    weights = {"uniform": flat, "learned by the classifier": flat}
    for name, model in {"attention of the model": base, **others}.items():
        seen = [fitting.observe(model, part) for part in parts]
        weights[name] = [on_tokens(s.read, p) for s, p in zip(seen, parts, strict=True)]
        if model is base:
            rolled = [on_tokens(s.rolled, p) for s, p in zip(seen, parts, strict=True)]
            weights["rollout of the model"] = rolled
    table = base.get_input_embeddings().weight
    results = []
    for name, (train, test) in weights.items():
        accuracies = []
        for seed in seeds:
            torch.manual_seed(seed)
            learned = name == "learned by the classifier"
            model = TokenClassifier(table, base.config.num_labels, learned=learned)
            fitting.fit(
                model, texts.train, options, seed=seed, name=f"{name}, seed {seed}",
                loss=_guided(train), progress=progress,
            )  # fmt: skip
            with torch.no_grad():
                predicted = model(texts.test.ids, test).argmax(-1)
            accuracies.append((predicted == texts.test.labels).double().mean().item())
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        results.append(Guided(name, statistics.mean(accuracies), spread))
    return results


def _guided(weights: Tensor) -> fitting.Loss:
    def loss(model: Any, batch: Examples, rows: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model(batch.ids, weights[rows]), batch.labels)

    return loss


def adversarial_attention(
    base: BertForSequenceClassification,
    start: Start,
    texts: Texts,
    options: FitOptions,
    *,
    strengths: Sequence[float],
    scopes: Sequence[str] = SCOPES,
    seed: int = 1000,
    progress: Progress = silent,
) -> tuple[list[Adversary], dict[str, BertForSequenceClassification]]:
    """Test 4: train models that predict the same as `base` with different attention weights.

    The loss is ``TVD(predictions) − λ JSD(weights)`` between the model and `base`, averaged over
    the texts of the training. TVD is the total variation distance, and JSD is the Jensen-Shannon
    divergence. Labels are not used.

    Args:
        base: The fine-tuned model.
        start: Function that returns, for a seed, the classifier with which the training begins. A
            copy of `base` needs the fewest steps.
        texts: The texts of the training and of the test.
        options: Number of epochs, batch size and learning rate of the training.
        strengths: The factors λ. For λ = 0, one model is trained for all scopes. This model only
            imitates the predictions.
        scopes: The weights that must differ: ``"read"``, ``"every"`` or both.
        seed: Seed of the models.
        progress: Function that receives a line of text after each epoch.

    Returns:
        The models' distances from `base`, and the model with the largest λ of each scope for which
        a model was trained.

    Raises:
        ValueError: If a scope is unknown or a factor is negative.

    Note:
        Wiegreffe and Pinter 2019, section 4, subtract the Kullback-Leibler divergence of the
        weights. Here, the loss subtracts the Jensen-Shannon divergence, which is bounded.
    """
    for scope in scopes:
        if scope not in SCOPES:
            raise ValueError(f"scopes: got {scope!r}, allowed: {', '.join(SCOPES)}")
    if min(strengths, default=0) < 0:
        raise ValueError(f"strengths: got {min(strengths)}, allowed: at least 0")
    train, seen = (fitting.observe(base, part) for part in (texts.train, texts.test))
    adversaries: list[Adversary] = []
    strongest = {}
    for scope in scopes:
        for strength in sorted(strengths):
            if strength == 0 and adversaries:
                continue  # With λ = 0, all scopes give the same model.
            model = start(seed)
            name = f"adversary, {scope}, λ = {strength:g}"
            loss = adversarial_loss(train, scope, strength)
            fitting.fit(
                model, texts.train, options, seed=seed, name=name, loss=loss, progress=progress
            )
            now = fitting.observe(model, texts.test)
            away = fitting.distance(name, now, seen, texts.test)
            adversaries.append(Adversary(scope, strength, away))
            strongest[scope] = model
    return adversaries, strongest


def adversarial_loss(base: Observed, scope: str, strength: float) -> fitting.Loss:
    """Return the loss with which `adversarial_attention` trains a model.

    Args:
        base: Predictions and weights of the base model on the texts of the training.
        scope: The weights that must differ, ``"read"`` or ``"every"``.
        strength: The factor λ by which the divergence of the weights is multiplied.

    Returns:
        The loss function, for the argument `loss` of `fitting.fit`.
    """
    targets = base.read if scope == "read" else base.every
    view = fitting.read if scope == "read" else fitting.every

    def loss(model: Any, batch: Examples, rows: Tensor) -> Tensor:
        wanted: Any = [-1] if scope == "read" else True
        output = model(batch.ids, batch.mask, output_attentions=wanted)
        same = total_variation(output.logits.softmax(-1), base.probabilities[rows])
        other = fitting.divergence(view(output.attentions), targets[rows], batch.mask)
        return (same - strength * other).mean()

    return loss
