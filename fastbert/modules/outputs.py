"""What the models return: dataclasses that can also be read like a dictionary or a tuple.

Class and field names, and the order of the fields, are those of transformers' BERT outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import Tensor


@dataclass
class ModelOutput:
    """Fields that are None are absent from every view but attribute access.

    ``output.loss``, ``output["loss"]``, ``output[0]``, ``output[:2]`` and ``loss, logits = output``
    work, and so do ``keys()``, ``items()``, ``values()``, ``len``, ``in`` and ``**output``.
    """

    def keys(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.keys())

    values = to_tuple

    def items(self) -> tuple[tuple[str, Any], ...]:
        return tuple((name, getattr(self, name)) for name in self.keys())

    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key not in self.keys():
            raise KeyError(f"{key!r}: this output has {', '.join(self.keys()) or 'nothing'}")
        return getattr(self, key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_tuple())

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self.keys()


Output = TypeVar("Output", bound=ModelOutput)


@dataclass
class BaseModelOutputWithPooling(ModelOutput):
    """``last_hidden_state`` (B, L, H), or (T, H) for packed input; ``pooler_output`` (B, H);
    ``hidden_states``: the embeddings and every layer's output; ``attentions``: per layer (B, heads,
    L, L)."""

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class BertForPreTrainingOutput(ModelOutput):
    """``loss`` = ``mlm_loss`` + ``nsp_loss`` where both labels were given; logits (B, L, V) and (B,
    2).

    The two single losses come last: the order of the fields that transformers has is kept.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    mlm_loss: Tensor | None = None
    nsp_loss: Tensor | None = None


@dataclass
class _LogitsOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class MaskedLMOutput(_LogitsOutput):
    """``logits`` (B, L, V), or (T, V) for packed input."""


@dataclass
class NextSentencePredictorOutput(_LogitsOutput):
    """``logits`` (B, 2): 0 = the second sentence follows, 1 = it does not."""


@dataclass
class SequenceClassifierOutput(_LogitsOutput):
    """``logits`` (B, num_labels)."""


@dataclass
class TokenClassifierOutput(_LogitsOutput):
    """``logits`` (B, L, num_labels), or (T, num_labels) for packed input."""


@dataclass
class MultipleChoiceModelOutput(_LogitsOutput):
    """``logits`` (B, choices)."""


@dataclass
class QuestionAnsweringModelOutput(ModelOutput):
    """``start_logits`` and ``end_logits`` (B, L)."""

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


def as_asked(output: Output, return_dict: bool) -> Output | tuple[Any, ...]:
    """``output`` itself, or its tuple for ``return_dict=False``."""
    return output if return_dict else output.to_tuple()
