"""Small training runs of classifiers, and their predictions and attention weights on texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.analysis.agreement import jensen_shannon, total_variation
from fastbert.analysis.rollout import rollout
from fastbert.analysis.subject import padded
from fastbert.data import load_tokenizer
from fastbert.modules import BertForSequenceClassification, BertModel

# A function that receives a line with the name of a run and the mean loss of an epoch.
Progress = Callable[[str], None]
WARMUP = 0.1


def silent(_: str) -> None:
    """Ignore a line of progress."""


@dataclass(frozen=True)
class FitOptions:
    """Options of a training run.

    Attributes:
        epochs: Number of passes over the texts.
        batch_size: Number of texts of a batch.
        learning_rate: Largest learning rate of AdamW. The rate rises to this value in the first
            tenth of the steps, and then falls to 0.
    """

    epochs: int = 4
    batch_size: int = 16
    learning_rate: float = 1e-4

    def __post_init__(self) -> None:
        """Check the options."""
        for name in ("epochs", "batch_size", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, allowed: above 0")


class Examples(NamedTuple):
    """N texts as one padded batch, with labels.

    Attributes:
        ids: Ids of the tokens, int64 of shape ``(N, L)``.
        mask: int64 of shape ``(N, L)``, 1 at tokens and 0 at padding.
        labels: Label of each text, int64 of shape ``(N,)``.
    """

    ids: Tensor
    mask: Tensor
    labels: Tensor

    def at(self, rows: Tensor) -> Examples:
        """Return the examples with the indices `rows`."""
        return Examples(self.ids[rows], self.mask[rows], self.labels[rows])


def encode(
    folder: str | os.PathLike[str],
    texts: Sequence[str],
    labels: Sequence[int],
    *,
    max_length: int = 64,
) -> Examples:
    """Encode texts with the tokenizer of a model folder.

    Args:
        folder: Folder of the model, which contains the tokenizer.
        texts: N texts; a text of more than `max_length` tokens is cut.
        labels: N labels, numbered from 0.
        max_length: Largest number of tokens of a text, special tokens included.

    Returns:
        The texts as one padded batch, with their labels.

    Raises:
        FileNotFoundError: If the folder has no tokenizer.
        ValueError: If there is no text, or if the numbers of texts and labels differ.
    """
    if not texts or len(texts) != len(labels):
        raise ValueError(
            f"texts and labels: got {len(texts)} and {len(labels)}, allowed: a label for each text"
        )
    tokenizer = load_tokenizer(folder)
    ids, mask = padded([tokenizer.encode(text, max_length=max_length) for text in texts], 0)
    return Examples(ids, mask, torch.tensor(list(labels)))


class Starts:
    """A callable that returns a pre-trained encoder with a new head, which a seed initializes."""

    def __init__(self, folder: str | os.PathLike[str], num_labels: int) -> None:
        """Store the folder of a pre-trained BERT, and the number of labels."""
        self.folder, self.num_labels = folder, num_labels

    def __call__(self, seed: int) -> BertForSequenceClassification:
        """Load the encoder with a new head.

        Args:
            seed: Seed of the weights of the head.

        Returns:
            The model in fp32, in training mode.
        """
        torch.manual_seed(seed)
        encoder = BertModel.from_pretrained(self.folder, dtype=torch.float32)
        # The folder of a fine-tuned model has a head and names of labels, which are not used.
        extra = {k: v for k, v in encoder.config.extra.items() if k not in ("id2label", "label2id")}
        config = encoder.config.replace(num_labels=self.num_labels, extra=extra)
        model = BertForSequenceClassification(config)
        model.bert.load_state_dict(encoder.state_dict())
        return model


Loss = Callable[[Any, Examples, Tensor], Tensor]


def cross_entropy(model: nn.Module, batch: Examples, _: Tensor) -> Tensor:
    """Compute the mean cross entropy of a batch of labelled texts; the default loss of `fit`."""
    return F.cross_entropy(model(batch.ids, batch.mask).logits, batch.labels)


def fit(
    model: nn.Module,
    examples: Examples,
    options: FitOptions,
    *,
    seed: int,
    name: str,
    loss: Loss = cross_entropy,
    progress: Progress = silent,
) -> list[float]:
    """Train a model, and leave it in eval mode.

    Args:
        model: The model, which is trained in place.
        examples: The texts and labels of the training.
        options: Number of epochs, batch size and learning rate.
        seed: Seed of the order of the texts and of the dropout.
        name: Name of the run for `progress`.
        loss: Function that returns the loss of a batch. Its arguments are the model, the batch, and
            the indices of the batch's texts in `examples`.
        progress: Function that receives a line of text after each epoch.

    Returns:
        The mean loss of each epoch.
    """
    torch.manual_seed(seed)
    model.train()
    count = len(examples.labels)
    batches = -(-count // options.batch_size)
    total = batches * options.epochs
    rise = max(1, round(WARMUP * total))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, (total - step) / max(1, total - rise))
    )
    losses = []
    for epoch in range(options.epochs):
        summed = 0.0
        for rows in torch.randperm(count).split(options.batch_size):
            value = loss(model, examples.at(rows), rows)
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            summed += value.item() * len(rows)
        losses.append(summed / count)
        progress(f"{name}: epoch {epoch + 1} of {options.epochs}, loss {losses[-1]:.4f}")
    model.eval()
    return losses


class Observed(NamedTuple):
    """The predictions and attention weights of a model on N texts.

    Attributes:
        probabilities: Softmax of the logits, of shape ``(N, labels)``.
        read: Attention of the first token in the last layer, the mean over the heads, ``(N, L)``.
        every: Attention of every token in every layer, the mean over the heads, of shape
            ``(N, layers, L, L)``.
        rolled: Rollout of the first token, of shape ``(N, L)``.
    """

    probabilities: Tensor
    read: Tensor
    every: Tensor
    rolled: Tensor

    def accuracy(self, labels: Tensor) -> float:
        """Return the share of the labels that the model predicts."""
        return (self.probabilities.argmax(-1) == labels).double().mean().item()


@torch.no_grad()
def observe(model: nn.Module, examples: Examples, batch_size: int = 64) -> Observed:
    """Compute predictions and attention weights.

    Args:
        model: A classifier of fastbert in eval mode.
        examples: N texts.
        batch_size: Number of texts of a batch; the result does not depend on this number.

    Returns:
        The predictions and weights.
    """
    parts = []
    for rows in torch.arange(len(examples.labels)).split(batch_size):
        batch = examples.at(rows)
        output = model(batch.ids, batch.mask, output_attentions=True)
        weights = output.attentions
        parts.append(
            (
                output.logits.softmax(-1),
                read(weights),
                every(weights),
                # A query at padding has weights 0, so its row of the rollout is only a scaled row
                # of the identity matrix. The row of the first token does not use these rows.
                rollout(weights)[:, 0],
            )
        )
    return Observed(*(torch.cat(column) for column in zip(*parts, strict=True)))


def read(attentions: Sequence[Tensor]) -> Tensor:
    """Return the attention of the first token in the last layer, averaged over the heads.

    A permutation of the heads changes neither the output of the model nor this mean.

    Args:
        attentions: Weights of each layer, ``(B, heads, L, L)``; only the last layer is used.

    Returns:
        Tensor of shape ``(B, L)``.
    """
    return attentions[-1].mean(1)[:, 0]


def every(attentions: Sequence[Tensor]) -> Tensor:
    """Return the attention of all layers and tokens, averaged over the heads.

    Args:
        attentions: Weights of each layer, ``(B, heads, L, L)``.

    Returns:
        Tensor of shape ``(B, layers, L, L)``.
    """
    return torch.stack([weights.mean(1) for weights in attentions], 1)


def divergence(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Compute, for each text, the mean Jensen-Shannon divergence of two models' attention weights.

    Args:
        a: Weights of one model, of shape ``(B, L)``, or ``(B, layers, L, L)`` with rows of 0 at
            padding.
        b: Weights of the other model, of the same shape.
        mask: Mask of shape ``(B, L)``, 1 at tokens.

    Returns:
        Divergences of shape ``(B,)``, in nats.
    """
    each = jensen_shannon(a, b)
    if each.dim() == 1:
        return each
    return each.sum((1, 2)) / (each.shape[1] * mask.sum(-1))


@dataclass(frozen=True)
class Distance:
    """The accuracy of a model and its distances from a base model, averaged over texts.

    Attributes:
        name: Name of the model.
        accuracy: Accuracy of the model.
        tvd: Total variation distance of the predictions, from 0 to 1.
        jsd_read: Jensen-Shannon divergence, in nats, of the attention of the first token in the
            last layer.
        jsd_every: The same divergence, as a mean over all layers and tokens.
    """

    name: str
    accuracy: float
    tvd: float
    jsd_read: float
    jsd_every: float


def distance(name: str, model: Observed, base: Observed, examples: Examples) -> Distance:
    """Compare a model with the base model on the same texts.

    Args:
        name: Name of the model.
        model: Predictions and weights of the model.
        base: Predictions and weights of the base model.
        examples: The texts that both models have read, with labels.

    Returns:
        The accuracy of the model, and its distances from the base model.
    """
    tvd = total_variation(model.probabilities, base.probabilities)
    return Distance(
        name=name,
        accuracy=model.accuracy(examples.labels),
        tvd=tvd.mean().item(),
        jsd_read=divergence(model.read, base.read, examples.mask).mean().item(),
        jsd_every=divergence(model.every, base.every, examples.mask).mean().item(),
    )
