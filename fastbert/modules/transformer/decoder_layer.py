"""A layer of the decoder: causal self-attention, cross-attention and feed-forward.

A layer does not know where the keys and values come from. It passes its queries to an `Attention`:
``packed_attention`` has the keys of a whole batch of targets, and ``cache`` has the keys of the
tokens that were generated before.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.io.names import QKV
from fastbert.modules.attention import BertSelfOutput, project, store_in_parts
from fastbert.modules.dropout import Probabilities
from fastbert.modules.feed_forward import BertIntermediate, BertOutput
from fastbert.modules.linear import Linear
from fastbert.modules.operation import OperationModule
from fastbert.ops.dropout import dropout


class Attention(Protocol):
    """The keys and values to which the rows of a call attend."""

    def to_target(self, module: CausalSelfAttention, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend to the tokens of the target, at the position of the query or earlier.

        Args:
            module: The self-attention of a layer.
            qkv: Queries, keys and values of the rows side by side, of shape ``(T, 3H)``.

        Returns:
            The output of attention, of shape ``(T, H)``, and the attention weights or None.
        """
        ...

    def to_source(self, module: CrossAttention, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend to the tokens of the source.

        Args:
            module: The cross-attention of a layer.
            q: Queries of the rows, of shape ``(T, H)``.

        Returns:
            The output of attention, of shape ``(T, H)``, and the attention weights or None.
        """
        ...


class _HeadsModule(OperationModule):
    """The base of both kinds of attention, with the settings that an `Attention` reads.

    Args:
        config: Configuration of the decoder's layers.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
        number: Number of the layer, from 0.
    """

    operation = "attention"

    def __init__(self, config: BertConfig, backend: str | None, number: int) -> None:
        """Store the settings."""
        super().__init__(backend)
        self.heads, self.head_dim, self.number = (
            config.num_attention_heads, config.head_dim, number,
        )  # fmt: skip
        self._dropout_p = Probabilities.of(config).attention

    @property
    def dropout_p(self) -> float:
        """Dropout probability of the attention weights, 0 in eval mode."""
        return self._dropout_p if self.training else 0.0


class CausalSelfAttention(_HeadsModule):
    """Self-attention to the tokens at the position of a query or earlier, on rows ``(T, H)``.

    ``qkv`` is one linear layer, which state dicts store as ``query``, ``key`` and ``value``.
    """

    def __init__(self, config: BertConfig, backend: str | None = None, number: int = 0) -> None:
        """Create the projection and register the state-dict hooks."""
        super().__init__(config, backend, number)
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, backend)
        store_in_parts(self, "qkv", QKV, (config.hidden_size,) * 3)

    def forward(self, rows: Tensor, attention: Attention) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the attention of all heads.

        Args:
            rows: Rows of shape ``(T, H)``.
            attention: The keys and values of the call.

        Returns:
            The output of attention, of shape ``(T, H)``; `rows` for the residual connection around
            this module (see ``ops.linear``); and the attention weights or None.
        """
        qkv, residual = project(self.qkv, rows)
        attended, weights = attention.to_target(self, qkv)
        return attended, residual, weights


class CrossAttention(_HeadsModule):
    """Attention of the rows of a target ``(T, H)`` to the rows of its source.

    ``query`` projects the rows of the target. ``kv`` is one linear layer for the rows of the
    source, which state dicts store as ``key`` and ``value``.
    """

    def __init__(self, config: BertConfig, backend: str | None = None, number: int = 0) -> None:
        """Create the projections and register the state-dict hooks."""
        super().__init__(config, backend, number)
        self.query = Linear(config.hidden_size, config.hidden_size, backend)
        self.kv = Linear(config.hidden_size, 2 * config.hidden_size, backend)
        store_in_parts(self, "kv", QKV[1:], (config.hidden_size,) * 2)

    def forward(self, rows: Tensor, attention: Attention) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the attention of all heads; as in `CausalSelfAttention.forward`."""
        q, residual = project(self.query, rows)
        attended, weights = attention.to_source(self, q)
        return attended, residual, weights

    def keys_and_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of rows ``(S, H)``, both ``(S, heads, D)``."""
        kv = self.kv(source).view(-1, 2, self.heads, self.head_dim)
        return kv[:, 0], kv[:, 1]


class AttentionBlock(nn.Module):
    """One kind of attention, and the output projection with its residual connection and norm."""

    def __init__(self, attention: nn.Module, output: BertSelfOutput) -> None:
        """Store both modules."""
        super().__init__()
        self.self = attention
        self.output = output

    def forward(self, rows: Tensor, attention: Attention) -> tuple[Tensor, Tensor | None]:
        """Compute ``LN(rows + dropout(projection))``; return it and the attention weights."""
        attended, rows, weights = self.self(rows, attention)
        return self.output(attended, rows), weights


class DecoderLayer(nn.Module):
    """A layer with a layer norm after each residual addition (Vaswani et al. 2017, section 3.1).

    Args:
        config: Configuration of the decoder's layers.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
        number: Number of the layer, from 0.
    """

    def __init__(self, config: BertConfig, backend: str | None = None, number: int = 0) -> None:
        """Create both kinds of attention and the feed-forward."""
        super().__init__()
        self.attention = AttentionBlock(
            CausalSelfAttention(config, backend, number), BertSelfOutput(config, backend)
        )
        self.cross_attention = AttentionBlock(
            CrossAttention(config, backend, number), BertSelfOutput(config, backend)
        )
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, backend)

    def forward(
        self, rows: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run the layer.

        Args:
            rows: Rows of shape ``(T, H)``.
            attention: The keys and values of the call.

        Returns:
            Rows of shape ``(T, H)``, the weights of self-attention, and the weights of
            cross-attention. The weights are None unless `attention` returns them.
        """
        rows, own = self.attention(rows, attention)
        rows, cross = self.cross_attention(rows, attention)
        return self.output(rows, self.intermediate), own, cross


class PreNormDecoderLayer(DecoderLayer):
    """A layer with a layer norm before each block (Xiong et al. 2020).

    In a state dict, the norm before a block has the name that `DecoderLayer` gives to the norm
    after the same block.
    """

    def __init__(self, config: BertConfig, backend: str | None = None, number: int = 0) -> None:
        """Create the blocks, and move the dropouts out of the layer norms."""
        super().__init__(config, backend, number)
        blocks = (self.attention.output, self.cross_attention.output, self.output)
        self.dropout_p = self.output.LayerNorm.dropout_p
        for block in blocks:
            block.LayerNorm.dropout_p = 0.0

    def forward(
        self, rows: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run the layer; see `DecoderLayer.forward`."""
        rows, own = self._attended(self.attention, rows, attention)
        rows, cross = self._attended(self.cross_attention, rows, attention)
        fed = self.output.without_norm(self.output.LayerNorm(rows), self.intermediate)
        return rows + self._dropped(fed), own, cross

    def _attended(
        self, block: AttentionBlock, rows: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor | None]:
        attended, _, weights = block.self(block.output.LayerNorm(rows), attention)
        return rows + self._dropped(block.output.dense(attended)), weights

    def _dropped(self, rows: Tensor) -> Tensor:
        dropout_p = self.dropout_p if self.training else 0.0
        return dropout(rows, dropout_p, backend=self.output.backend)
