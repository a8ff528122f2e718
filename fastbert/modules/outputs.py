"""The results of the models: dataclasses that also read like a dictionary or a tuple.

The names of classes and fields, and the order of the fields, match transformers' BERT outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import Tensor


@dataclass
class ModelOutput:
    """The base class of the outputs of all models.

    ``output.loss``, ``output["loss"]``, ``output[0]``, ``output[:2]`` and ``loss, logits = output``
    are supported, and so are ``keys()``, ``items()``, ``values()``, ``len``, ``in`` and
    ``**output``. A field that is None can be read only as an attribute.

    Examples:
        >>> import torch
        >>> from fastbert.modules import MaskedLMOutput
        >>> output = MaskedLMOutput(logits=torch.zeros(2, 4, 8))
        >>> output.keys(), len(output), output.loss is None
        (('logits',), 1, True)
        >>> output[0] is output["logits"]
        True
    """

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields that are not None, in order."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the fields that are not None, in order."""
        return tuple(getattr(self, name) for name in self.keys())

    values = to_tuple

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Return the names and values of the fields that are not None, in order."""
        return tuple((name, getattr(self, name)) for name in self.keys())

    def __getitem__(self, key: str | int | slice) -> Any:
        """Return a field by its name, or fields by their index in `to_tuple`.

        Args:
            key: Name of a field, index or slice.

        Returns:
            The field; a tuple of fields for a slice.

        Raises:
            KeyError: If the field does not exist or is None.
            IndexError: If the index is out of range.
        """
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key not in self.keys():
            raise KeyError(f"{key!r}: this output has {', '.join(self.keys()) or 'nothing'}")
        return getattr(self, key)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the fields that are not None."""
        return iter(self.to_tuple())

    def __len__(self) -> int:
        """Return the number of fields that are not None."""
        return len(self.keys())

    def __contains__(self, key: object) -> bool:
        """Return whether a field of this name exists and is not None."""
        return key in self.keys()


Output = TypeVar("Output", bound=ModelOutput)


@dataclass
class BaseModelOutputWithPooling(ModelOutput):
    """The output of `BertModel`.

    Attributes:
        last_hidden_state: Hidden states after the last layer, of shape ``(B, L, H)``; ``(T, H)``
            for packed input.
        pooler_output: Pooled first tokens of shape ``(B, H)``; None without a pooler.
        hidden_states: The embeddings and the output of every layer, each of the shape of
            `last_hidden_state`. A state that was not chosen is None.
        attentions: Attention weights of each layer, of shape ``(B, heads, L, L)``. The weights of a
            layer that was not chosen are None. If the input is packed, L is ``max_seqlen``.
    """

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor | None, ...] | None = None
    attentions: tuple[Tensor | None, ...] | None = None


@dataclass
class BertForPreTrainingOutput(ModelOutput):
    """The output of `BertForPreTraining`.

    ``mlm_loss`` and ``nsp_loss`` are the last fields, so that the other fields have the same order
    as in transformers.

    Attributes:
        loss: ``mlm_loss + nsp_loss``; None if one of the two losses is None.
        prediction_logits: Logits of the tokens, of shape ``(B, L, V)``, or ``(T, V)`` for packed
            input; None if they were not computed.
        seq_relationship_logits: Logits of next sentence prediction, of shape ``(B, 2)``.
        hidden_states: As in `BaseModelOutputWithPooling`.
        attentions: As in `BaseModelOutputWithPooling`.
        mlm_loss: Masked-LM loss; None without labels for masked LM.
        nsp_loss: Next-sentence loss; None without labels for next sentence prediction.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    hidden_states: tuple[Tensor | None, ...] | None = None
    attentions: tuple[Tensor | None, ...] | None = None
    mlm_loss: Tensor | None = None
    nsp_loss: Tensor | None = None


@dataclass
class _LogitsOutput(ModelOutput):
    """The base of the outputs with one tensor of logits."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor | None, ...] | None = None
    attentions: tuple[Tensor | None, ...] | None = None


@dataclass
class MaskedLMOutput(_LogitsOutput):
    """The output of `BertForMaskedLM`.

    Attributes:
        loss: Mean loss over the labelled tokens; None without labels.
        logits: Logits of shape ``(B, L, V)``, or ``(T, V)`` for packed input; None if they were not
            computed.
        hidden_states: As in `BaseModelOutputWithPooling`.
        attentions: As in `BaseModelOutputWithPooling`.
    """


@dataclass
class NextSentencePredictorOutput(_LogitsOutput):
    """The output of `BertForNextSentencePrediction`.

    Attributes:
        loss: Cross entropy; None without labels.
        logits: Logits of shape ``(B, 2)``. Class 0 means that the second sentence follows the
            first, and class 1 means the opposite.
        hidden_states: As in `BaseModelOutputWithPooling`.
        attentions: As in `BaseModelOutputWithPooling`.
    """


@dataclass
class SequenceClassifierOutput(_LogitsOutput):
    """The output of `BertForSequenceClassification`.

    Attributes:
        loss: Loss that ``config.problem_type`` selects; None without labels.
        logits: Logits of shape ``(B, num_labels)``.
        hidden_states: As in `BaseModelOutputWithPooling`.
        attentions: As in `BaseModelOutputWithPooling`.
    """


@dataclass
class TokenClassifierOutput(_LogitsOutput):
    """The output of `BertForTokenClassification`.

    Attributes:
        loss: Cross entropy; None without labels.
        logits: Logits of shape ``(B, L, num_labels)``, or ``(T, num_labels)`` for packed input.
        hidden_states: As in `BaseModelOutputWithPooling`.
        attentions: As in `BaseModelOutputWithPooling`.
    """


@dataclass
class MultipleChoiceModelOutput(_LogitsOutput):
    """The output of `BertForMultipleChoice`.

    Attributes:
        loss: Cross entropy; None without labels.
        logits: Logits of shape ``(B, choices)``.
        hidden_states: As in `BaseModelOutputWithPooling`, with ``B * choices`` sequences.
        attentions: As in `BaseModelOutputWithPooling`, with ``B * choices`` sequences.
    """


@dataclass
class QuestionAnsweringModelOutput(ModelOutput):
    """The output of `BertForQuestionAnswering`.

    Attributes:
        loss: Mean of the cross entropies of start and end; None unless the caller passed both
            ``start_positions`` and ``end_positions``.
        start_logits: Logits of shape ``(B, L)``, or ``(B, max_seqlen)`` for packed input.
        end_logits: Logits of the shape of `start_logits`.
        hidden_states: As in `BaseModelOutputWithPooling`.
        attentions: As in `BaseModelOutputWithPooling`.
    """

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    hidden_states: tuple[Tensor | None, ...] | None = None
    attentions: tuple[Tensor | None, ...] | None = None


def as_asked(output: Output, return_dict: bool) -> Output | tuple[Any, ...]:
    """Return `output` itself, or a tuple of its fields if `return_dict` is False."""
    return output if return_dict else output.to_tuple()
