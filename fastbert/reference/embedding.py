"""The embedding of a BERT input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastbert.reference.dropout import dropout
from fastbert.reference.layer_norm import layer_norm


def embedding(
    ids: Tensor,
    token_types: Tensor | None,
    positions: Tensor | None,
    word_table: Tensor,
    type_table: Tensor | None,
    position_table: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float = 1e-12,
    dropout_p: float = 0.0,
    padding_idx: int | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Embed tokens as in BERT (Devlin et al. 2019, figure 2); see ``fastbert.ops.embedding``."""
    total = F.embedding(ids, word_table, padding_idx)
    for index, table in ((token_types, type_table), (positions, position_table)):
        if index is not None and table is not None:
            total = total + F.embedding(index, table)
    y = layer_norm(total, weight, bias, eps=eps)
    return dropout(y, dropout_p, dropout_seed, (ids.numel(), y.shape[-1]))
