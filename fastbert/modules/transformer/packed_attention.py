"""The keys and values of a batch of targets and sources, without padding on both sides."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastbert import ops
from fastbert.modules.attention import attend
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.transformer.decoder_layer import CausalSelfAttention, CrossAttention
from fastbert.ops.attention_context import attention_context
from fastbert.ops.product import needs_gradient


class PackedAttention:
    """The keys and values of a call that computes all tokens of the targets.

    Args:
        target: Division of the rows of the targets into sequences.
        source: Division of the rows of the sources into sequences.
        source_rows: The encoder's output, of shape ``(S, H)``.
        output_attentions: Whether attention weights are returned in the caller's layout. If
            autograd records the call, gradients flow through the returned weights.
    """

    def __init__(
        self,
        target: BatchLayout,
        source: BatchLayout,
        source_rows: Tensor,
        output_attentions: bool = False,
    ) -> None:
        """Store the arguments, and compute the boundaries of the sequences."""
        self.target, self.source, self.source_rows = target, source, source_rows
        self.output_attentions = output_attentions
        device = source_rows.device
        self.sequences: dict[str, Any] = {
            "cu_seqlens_q": target.ends(device),
            "cu_seqlens_k": source.ends(device),
            "max_seqlen_q": target.longest,
            "max_seqlen_k": source.longest,
        }

    def to_target(self, module: CausalSelfAttention, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend to the tokens of the target; see ``Attention.to_target``."""
        layout = self.target
        uniform = layout.cu_seqlens is None
        rows = (layout.batch, layout.length) if uniform else (-1,)
        out, weights = attend(
            qkv.view(*rows, 3, module.heads, module.head_dim),
            layout,
            self.output_attentions,
            {"mask": None, "bias": None, "causal": True, "backend": module.backend},
            {"dropout_p": module.dropout_p, "dropout_seed": None},
        )
        return out.reshape(qkv.shape[0], -1), weights

    def to_source(self, module: CrossAttention, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend to the tokens of the source; see ``Attention.to_source``."""
        k, v = module.keys_and_values(self.source_rows)
        q = q.view(-1, module.heads, module.head_dim)
        if self.output_attentions and needs_gradient(q, k):
            out, weights = self._through_weights(module, q, k, v)
            return out.reshape(q.shape[0], -1), weights
        result = ops.attention_varlen(
            q,
            k,
            v,
            dropout_p=module.dropout_p,
            return_weights=self.output_attentions,
            backend=module.backend,
            **self.sequences,
        )
        out, weights = result if isinstance(result, tuple) else (result, None)
        if weights is not None:
            weights = self.target.weights(weights, self.source)
        return out.view(q.shape[0], -1), weights

    def _through_weights(
        self, module: CrossAttention, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the attention weights in the caller's layout, and the output from them."""
        weights = ops.attention_weights(q, k, backend=module.backend, **self.sequences)
        weights = self.target.weights(weights, self.source)
        values = self.source.padded(v).transpose(1, 2)
        out = attention_context(weights, values, dropout_p=module.dropout_p)
        return self.target.rows(out.transpose(1, 2)), weights
