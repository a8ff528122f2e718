"""The batches on which models are compared: the user's batch, batches of texts, or random ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.integrations.packing import restarts
from fastbert.io import families
from fastbert.parity.subject import Subject

# The longest generated sequence, in tokens. It is longer than the attention windows of ModernBERT,
# and not a multiple of the size of a kernel's tiles.
LENGTH = 157
# Largest number of texts of a batch.
TEXTS = 16
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")


class Batch(NamedTuple):
    """A batch and its name in the report."""

    name: str
    values: dict[str, Any]


def given(batch: Any) -> Batch:
    """Check the batch of the user.

    Args:
        batch: The batch.

    Returns:
        A copy of the batch with the name "given".

    Raises:
        TypeError: If `batch` is not a mapping.
        ValueError: If `batch` is empty or packed.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batch: got {type(batch).__name__}, allowed: a mapping of argument names to tensors"
        )
    if not batch:
        raise ValueError("batch: got an empty mapping, allowed: at least one argument")
    values, why = dict(batch), "because a stock encoder lets packed sequences see each other"
    packed = [name for name in PACKED if values.get(name) is not None]
    if packed:
        raise ValueError(f"batch: got {packed[0]}, allowed: a padded batch, {why}")
    ids, positions = values.get("input_ids"), values.get("position_ids")
    unmasked = values.get("attention_mask") is None and positions is not None
    if unmasked and ids is not None and restarts(positions, *ids.shape[:2])[1] is not None:
        raise ValueError(
            f"batch: got position_ids that do not go up by one, allowed: a padded batch, {why}"
        )
    return Batch("given", values)


def of_texts(subject: Subject, texts: Any, encoders: Iterable[nn.Module]) -> Iterator[Batch]:
    """Yield batches of at most ``TEXTS`` texts.

    Args:
        subject: The model, whose tokenizer reads the texts.
        texts: The texts, or pairs of texts.
        encoders: The encoders in the model, which limit the number of tokens.

    Raises:
        TypeError: If `texts` is not a list of texts or of pairs.
        ValueError: If `texts` is empty, or if the model has no tokenizer.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"texts: got {type(texts).__name__}, allowed: a list of texts or of pairs")
    if not texts:
        raise ValueError("texts: got an empty list, allowed: at least one text")
    for number, text in enumerate(texts):
        pair = isinstance(text, (tuple, list)) and len(text) == 2
        parts = text if pair else (text,)
        if not all(isinstance(part, str) for part in parts) or pair == isinstance(texts[0], str):
            raise TypeError(f"texts: got {text!r:.80} at {number}, allowed: all texts or all pairs")
    limit = min(_config(encoder).max_length for encoder in encoders)
    for start in range(0, len(texts), TEXTS):
        part = texts[start : start + TEXTS]
        name = f"texts {start + 1}-{start + len(part)}"
        yield Batch(name, _with_target(subject, subject.read(part, limit)))


def generated(subject: Subject, encoders: Iterable[nn.Module], seed: int) -> Iterator[Batch]:
    """Yield batches of random tokens: without padding, padded on either side, and of one token.

    A model with a known head also gets labels, so that its loss is compared.

    Args:
        subject: The model.
        encoders: The encoders in the model, which limit the token ids and the lengths.
        seed: Seed of the tokens and the labels.

    Raises:
        ValueError: If the model takes no token ids or no attention mask.
    """
    for name in ("input_ids", "attention_mask"):
        if not subject.takes(name):
            raise ValueError(
                f"batch: got None for a {subject.name}, whose forward does not take {name}, "
                "allowed: a batch with the arguments of forward"
            )
    configs = [_config(encoder) for encoder in encoders]
    longest = min(LENGTH, *(config.max_length for config in configs))
    shorter = tuple(max(1, longest // part) for part in (1, 3, 2, 9, 5, 13, 7, longest))
    for name, lengths, side in (
        ("full", (longest,) * 4, "right"),
        ("padded right", shorter, "right"),
        ("padded left", shorter, "left"),
        ("one token", (1,) * 8, "right"),
    ):
        generator = torch.Generator().manual_seed(seed)
        values = _with_target(subject, _tokens(subject, configs, lengths, side, generator))
        yield Batch(name, _labelled(subject.module, values, generator))


def _config(encoder: nn.Module) -> BertConfig:
    return families.read_config(encoder.config.to_dict())


def _tokens(
    subject: Subject,
    configs: Sequence[BertConfig],
    lengths: tuple[int, ...],
    side: str,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return random ids, a mask, and token types if the model takes them, all of shape (B, L)."""
    places, sizes = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
    exists = places < sizes if side == "right" else places >= max(lengths) - sizes
    pads = {config.pad_token_id or 0 for config in configs}
    vocabulary = min(config.vocab_size for config in configs)
    allowed = torch.tensor([i for i in range(vocabulary) if i not in pads] or [0])
    ids = allowed[torch.randint(len(allowed), exists.shape, generator=generator)]
    values = {
        "input_ids": torch.where(exists, ids, min(pads)),
        "attention_mask": exists.long(),
    }
    typed = all(config.architecture.type_table for config in configs)
    if typed and subject.takes("token_type_ids"):
        types = min(config.type_vocab_size for config in configs)
        drawn = torch.randint(types, exists.shape, generator=generator)
        values["token_type_ids"] = drawn * exists
    return values


def _with_target(subject: Subject, values: dict[str, Any]) -> dict[str, Any]:
    """Add the ids of the source as the target, if the model has a decoder that needs a target."""
    if "decoder_input_ids" not in inspect.signature(subject.module.forward).parameters:
        return values
    size = getattr(subject.module.config, "decoder_vocab_size", None)
    return values | {"decoder_input_ids": values["input_ids"].clamp(max=size and size - 1)}


# Labels


def _labelled(
    module: nn.Module, values: dict[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Add the labels of the head; for multiple choice, also group the sequences into choices."""
    name = type(module).__name__
    for suffix, label in LABELS.items():
        if name.endswith(suffix):
            return label(module.config, values, generator)
    return values


def _of_sequences(config: Any, values: dict[str, Tensor], generator: Any) -> dict[str, Tensor]:
    rows, classes = len(values["input_ids"]), config.num_labels
    if config.problem_type == "multi_label_classification":
        labels = torch.randint(2, (rows, classes), generator=generator).float()
    elif config.problem_type == "regression" or classes == 1:
        shape = (rows,) if classes == 1 else (rows, classes)
        labels = torch.randn(shape, generator=generator)
    else:
        labels = torch.randint(classes, (rows,), generator=generator)
    return values | {"labels": labels}


def _of_tokens(classes: int, values: dict[str, Tensor], generator: Any) -> dict[str, Tensor]:
    exists = values["attention_mask"].bool()
    labels = torch.randint(classes, exists.shape, generator=generator)
    return values | {"labels": labels.where(exists, -100)}


def _of_pairs(
    name: str, values: dict[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    rows = len(values["input_ids"])
    return values | {name: torch.randint(2, (rows,), generator=generator)}


def _of_answers(config: Any, values: dict[str, Tensor], generator: Any) -> dict[str, Tensor]:
    # The answer reaches from the first to the last real token of each sequence.
    first = values["attention_mask"].argmax(1)
    last = values["attention_mask"].shape[1] - 1 - values["attention_mask"].flip(1).argmax(1)
    return values | {"start_positions": first, "end_positions": last}


def _of_choices(config: Any, values: dict[str, Tensor], generator: Any) -> dict[str, Tensor]:
    choices = {name: value.unflatten(0, (-1, 2)) for name, value in values.items()}
    rows = len(choices["input_ids"])
    return choices | {"labels": torch.randint(2, (rows,), generator=generator)}


# A key is the end of a class's name, and its value is the function that adds the labels of the
# head.
LABELS: dict[str, Callable[[Any, dict[str, Tensor], torch.Generator], dict[str, Tensor]]] = {
    "ForSequenceClassification": _of_sequences,
    "ForTokenClassification": lambda c, v, g: _of_tokens(c.num_labels, v, g),
    "ForMaskedLM": lambda c, v, g: _of_tokens(c.vocab_size, v, g),
    "MTModel": lambda c, v, g: _of_tokens(c.decoder_vocab_size, v, g),
    "ForQuestionAnswering": _of_answers,
    "ForMultipleChoice": _of_choices,
    "ForNextSentencePrediction": lambda c, v, g: _of_pairs("labels", v, g),
    "BertForPreTraining": lambda c, v, g: _of_pairs(
        "next_sentence_label", _of_tokens(c.vocab_size, v, g), g
    ),
}
