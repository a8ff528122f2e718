"""The whole BERT model in unfused PyTorch, on padded batches, in any dtype.

Tests compare `fastbert.modules` with this model, whose result in float64 counts as exact. The model
takes the weights as a state dict under the names of Hugging Face. It therefore shares no code with
the modules that it judges, and uses only the formulas of `fastbert.reference`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import reference
from fastbert.activations import of_config
from fastbert.config import BertConfig


class Encoded(NamedTuple):
    """The output of the encoder.

    Args:
        last_hidden_state: Tensor of shape ``(B, L, N)``.
        pooler_output: Tensor of shape ``(B, N)``.
        hidden_states: The states after the embeddings and after each layer, each of shape
            ``(B, L, N)``.
        attentions: The attention weights of each layer, each of shape ``(B, H, L, L)``.
    """

    last_hidden_state: Tensor
    pooler_output: Tensor
    hidden_states: tuple[Tensor, ...]
    attentions: tuple[Tensor, ...]


def encode(
    state: Mapping[str, Tensor],
    config: BertConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    seeds: Tensor | None = None,
) -> Encoded:
    """Compute the output of BertModel (Devlin et al. 2019).

    Args:
        state: State dict of BertModel, without the prefix ``bert.``.
        config: The sizes of the model.
        input_ids: Token ids, int64 of shape ``(B, L)``.
        attention_mask: Mask of shape ``(B, L)``, nonzero where a token exists.
        token_type_ids: Token types of shape ``(B, L)``; all 0 by default.
        seeds: Dropout seeds, int64 of shape ``(1 + 3 * layers,)``: one for the embeddings, and
            three for each layer: attention, attention output and output. None applies no dropout.

    Returns:
        The output, with all hidden states and attention weights.
    """
    exists = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    dropout = _Dropout(config, seeds, exists.bool())
    types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    x = reference.embedding(
        input_ids,
        types,
        positions,
        state["embeddings.word_embeddings.weight"],
        state["embeddings.token_type_embeddings.weight"],
        state["embeddings.position_embeddings.weight"],
        state["embeddings.LayerNorm.weight"],
        state["embeddings.LayerNorm.bias"],
        eps=config.layer_norm_eps,
        padding_idx=config.pad_token_id,
    )
    x = dropout.rows(x, 0)
    mask = None if attention_mask is None else attention_mask.bool()
    hidden_states, attentions = [x], []
    for i in range(config.num_hidden_layers):
        x, weights = _layer(state, f"encoder.layer.{i}.", config, x, mask, dropout, 1 + 3 * i)
        hidden_states.append(x)
        attentions.append(weights)
    pooled = torch.tanh(_linear(state, "pooler.dense", x[:, 0]))
    return Encoded(x, pooled, tuple(hidden_states), tuple(attentions))


class _Dropout:
    """The dropout masks of one step; rows are numbered without padding, as in the modules."""

    def __init__(self, config: BertConfig, seeds: Tensor | None, exists: Tensor) -> None:
        self.seeds, self.exists = seeds, exists
        self.hidden_p = 0.0 if seeds is None else config.hidden_dropout_prob
        self.attention_p = 0.0 if seeds is None else config.attention_probs_dropout_prob

    def seed(self, index: int) -> Tensor | None:
        return None if self.seeds is None else self.seeds[index : index + 1]

    def rows(self, x: Tensor, index: int) -> Tensor:
        """Apply dropout to the rows of ``x (B, L, N)`` that exist, with the seed number `index`."""
        rows = x[self.exists]
        dropped = reference.dropout(rows, self.hidden_p, self.seed(index), tuple(rows.shape))
        return x.index_put((self.exists,), dropped)


def _linear(state: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def _add_norm(state, name: str, config: BertConfig, x: Tensor, residual: Tensor) -> Tensor:
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    return reference.layer_norm(x, weight, bias, residual=residual, eps=config.layer_norm_eps)


def _layer(
    state,
    prefix: str,
    config: BertConfig,
    x: Tensor,
    mask: Tensor | None,
    dropout: _Dropout,
    seed: int,
):
    batch, length, hidden = x.shape

    def heads(name: str) -> Tensor:
        projected = _linear(state, f"{prefix}attention.self.{name}", x)
        return projected.view(batch, length, config.num_attention_heads, -1).transpose(1, 2)

    out, weights = reference.attention(
        heads("query"),
        heads("key"),
        heads("value"),
        mask=mask,
        dropout_p=dropout.attention_p,
        dropout_seed=dropout.seed(seed),
        return_weights=True,
    )
    out = out.transpose(1, 2).reshape(batch, length, hidden)
    out = dropout.rows(_linear(state, f"{prefix}attention.output.dense", out), seed + 1)
    x = _add_norm(state, f"{prefix}attention.output.LayerNorm", config, out, x)
    inner = _linear(state, f"{prefix}intermediate.dense", x)
    inner = of_config(gated=False)[config.hidden_act](inner)
    out = dropout.rows(_linear(state, f"{prefix}output.dense", inner), seed + 2)
    return _add_norm(state, f"{prefix}output.LayerNorm", config, out, x), weights


def pretraining_loss(
    state: Mapping[str, Tensor],
    config: BertConfig,
    batch: Mapping[str, Tensor],
    seeds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the MLM and NSP losses of BertForPreTraining.

    Args:
        state: State dict of BertForPreTraining.
        config: The sizes of the model.
        batch: ``input_ids``, ``attention_mask``, ``token_type_ids`` and ``labels`` of shape
            ``(B, L)``, with -100 at labels that are ignored; and ``next_sentence_label`` of shape
            ``(B,)``, 0 where the second sentence follows the first.
        seeds: Dropout seeds, as in `encode`.

    Returns:
        The MLM loss and the NSP loss, scalars.
    """
    bert = {k.removeprefix("bert."): v for k, v in state.items() if k.startswith("bert.")}
    ids, mask, types = (batch[name] for name in ("input_ids", "attention_mask", "token_type_ids"))
    encoded = encode(bert, config, ids, mask, types, seeds)
    transform = "cls.predictions.transform."
    x = _linear(state, f"{transform}dense", encoded.last_hidden_state)
    x = of_config(gated=False)[config.hidden_act](x)
    norm = (state[f"{transform}LayerNorm.weight"], state[f"{transform}LayerNorm.bias"])
    x = reference.layer_norm(x, *norm, eps=config.layer_norm_eps)
    decoder = (state["cls.predictions.decoder.weight"], state["cls.predictions.bias"])
    mlm = reference.linear_cross_entropy(x.flatten(0, 1), *decoder, batch["labels"].flatten())
    related = _linear(state, "cls.seq_relationship", encoded.pooler_output)
    related = related.to(torch.promote_types(related.dtype, torch.float32))
    nsp = F.cross_entropy(related, batch["next_sentence_label"].flatten())
    return mlm, nsp
