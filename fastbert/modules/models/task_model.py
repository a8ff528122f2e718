"""The base of the models with a head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastbert.config import OWN_TYPES, BertConfig
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.bert import BertModel
from fastbert.modules.outputs import ModelOutput, as_asked
from fastbert.modules.pretrained import BertPreTrainedModel
from fastbert.ops.arguments import require_shape

# The result of `forward`: an output object, or a tuple of its fields.
Result = Any


class TaskModel(BertPreTrainedModel):
    """The base of the models with a head; the encoder is the attribute ``bert``.

    The `options` of every `forward` are the keyword arguments of ``BertModel.encode``.

    Args:
        config: The configuration, whose ``model_type`` is ``"bert"``.
        backend: As in ``BertModel``.
        pooling: Whether the encoder has a pooler.

    Raises:
        ValueError: If ``config.model_type`` is not ``"bert"``, or if `backend` is unknown.
    """

    body_prefix = "bert."

    def __init__(
        self, config: BertConfig, *, backend: str | None = None, pooling: bool = True
    ) -> None:
        """Create the encoder."""
        if config.model_type not in OWN_TYPES:
            raise ValueError(
                f"model_type: got {config.model_type!r}, allowed: {', '.join(OWN_TYPES)}; "
                "fastbert.BertModel is the encoder of the other families, and fastbert.accelerate "
                "takes models of transformers with a head"
            )
        super().__init__(config, backend)
        self.bert = BertModel(config, add_pooling_layer=pooling, backend=backend)

    def _asked(self, output: ModelOutput, return_dict: bool | None) -> Result:
        return as_asked(output, self.flag("return_dict", return_dict, True))


def label_rows(labels: Tensor, layout: BatchLayout) -> Tensor:
    """Return the labels of the tokens, of shape ``(T,)``, without the labels of padding."""
    if not layout.packed:
        require_shape("labels", labels, (layout.batch, layout.length))
    return layout.rows(labels)
