"""Self-attention with one fused projection, which a state dict stores as query, key and value."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.config import BertConfig
from fastbert.io.names import QKV
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.dropout import NO_SEEDS, LayerSeeds, Probabilities
from fastbert.modules.joined_linear import JoinedLinear
from fastbert.modules.layer_norm import norm_of
from fastbert.modules.linear import Linear
from fastbert.modules.operation import OperationModule
from fastbert.modules.plain import deviation
from fastbert.modules.positions import Rotary
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.ops.attention_context import attention_context
from fastbert.ops.product import needs_gradient

# Classes of linear layers whose `forward` can also return the input, for a residual connection.
OURS = (Linear, QuantizedLinear)


class BertSelfAttention(OperationModule):
    """Self-attention ``softmax(q kᵀ / √D) v`` for every head of size D, on rows ``(T, H)``.

    ``qkv`` is one linear layer from H to 3H columns. State dicts store this layer as the three
    layers ``query``, ``key`` and ``value``. With grouped queries, there are fewer columns of keys
    and of values.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
        number: Number of the layer, from 0.

    Attributes:
        rotary: Rotary embedding of the layer; None if the layer has none.
        rotates_values: Whether the values are rotated too.
        window: Largest distance, in tokens, between a query and its keys; None allows any distance.
        scale: Factor of the attention logits; None means ``D ** -0.5``.
        key_value_heads: Number of heads of the keys and values, each shared by as many heads of the
            queries.
    """

    operation = "attention"

    def __init__(self, config: BertConfig, backend: str | None = None, number: int = 0) -> None:
        """Create the projection and register the state-dict hooks."""
        super().__init__(backend)
        choices = config.architecture
        bases = choices.rotary_bases
        table = choices.rotary_table
        self.rotary = Rotary(bases[number], backend, neighbours=table) if bases else None
        self.rotates_values = choices.rotary_values
        window = choices.windows[number] if choices.windows else -1
        self.window = window if window >= 0 else None
        self.heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.scale = choices.attention_scale
        self.key_value_heads = choices.key_value_heads or self.heads
        self.dropout_p = Probabilities.of(config).attention
        columns = (self.heads + 2 * self.key_value_heads) * self.head_dim
        self.qkv = Linear(config.hidden_size, columns, backend, bias=choices.attention_bias)
        if not choices.interleaved:
            heads = (self.heads, self.key_value_heads, self.key_value_heads)
            store_in_parts(self, "qkv", QKV, [each * self.head_dim for each in heads])

    def content(self, hidden: Tensor) -> Tensor:
        """Project rows ``(T, H)`` to the rows of queries, keys and values, side by side."""
        return self.qkv(hidden)

    def forward(
        self,
        hidden: Tensor,
        layout: BatchLayout,
        output_attentions: bool = False,
        dropout_seed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the attention of all heads.

        Args:
            hidden: Rows of shape ``(T, H)``.
            layout: Division of the rows into sequences.
            output_attentions: Whether the attention weights are returned. If autograd records the
                call, gradients flow through the returned weights.
            dropout_seed: Seed of the dropout, int64 of shape ``(1,)``; None draws a seed.

        Returns:
            The output of attention, of shape ``(T, H)``; `hidden` for the residual connection
            around this module (see ``ops.linear``); and the softmax weights before dropout in the
            caller's layout, or None if `output_attentions` is False.
        """
        qkv, residual = project(self.qkv, hidden)
        uniform = layout.cu_seqlens is None
        rows = (layout.batch, layout.length) if uniform else (-1,)
        near = None if self.window is None else layout.near(self.window)
        qkv = self.of_heads(qkv, layout).view(*rows, 3, self.heads, self.head_dim)
        options: dict[str, Any] = {
            "mask": layout.mask if near is None else near,
            "window": self.window if near is None else None,
            "bias": None if layout.bias is None else layout.bias.to(qkv.dtype),
            "scale": self.scale,
            "backend": self.backend,
        }
        dropout: dict[str, Any] = {
            "dropout_p": self.dropout_p if self.training else 0.0,
            "dropout_seed": dropout_seed,
        }
        out, weights = attend(qkv, layout, output_attentions, options, dropout)
        columns = self.heads * self.head_dim
        return out.reshape(*hidden.shape[:-1], columns), residual, weights

    def of_heads(self, qkv: Tensor, layout: BatchLayout) -> Tensor:
        """Rotate projected queries and keys, and repeat the keys and values that heads share.

        Args:
            qkv: Result of `content`.
            layout: Division of the rows into sequences.

        Returns:
            The queries, keys and values of all heads, of shape ``(T, 3 heads, D)``.
        """
        qkv = qkv.view(-1, self.heads + 2 * self.key_value_heads, self.head_dim)
        if self.rotary is not None:
            rotated = self.heads + self.key_value_heads
            rotated = qkv.shape[1] if self.rotates_values else rotated
            qkv = self.rotary(qkv, layout.rotations, rotated)
        sharing = self.heads // self.key_value_heads
        if sharing == 1:
            return qkv
        q, kv = qkv.tensor_split((self.heads,), 1)
        return torch.cat((q, kv.repeat_interleave(sharing, 1)), 1)


def project(linear: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``linear(hidden)``, and `hidden` for the residual connection (see ``ops.linear``).

    A projection that was replaced or has hooks is called with `hidden` as its only argument.
    """
    kind = type(linear)
    if kind is JoinedLinear or (kind in OURS and deviation(linear, kind) is None):
        return linear(hidden, return_residual=True)
    return linear(hidden), hidden


def attend(
    qkv: Tensor,
    layout: BatchLayout,
    output_attentions: bool,
    options: dict[str, Any],
    dropout: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Compute self-attention from the fused projection.

    Args:
        qkv: Tensor of shape ``(B, L, 3, heads, D)`` in a uniform layout, otherwise ``(T, 3, heads,
            D)``.
        layout: Division of the rows into sequences.
        output_attentions: Whether the attention weights are returned. If autograd records the
            call, gradients flow through the returned weights.
        options: Keyword arguments of ``ops.attention_qkvpacked`` that ``ops.attention_weights``
            takes too.
        dropout: The keyword arguments `dropout_p` and `dropout_seed`.

    Returns:
        The output of attention, of the shape of `qkv` without the third dimension from the end; and
        the softmax weights before dropout in the caller's layout, or None.
    """
    if output_attentions and needs_gradient(qkv, options["bias"]):
        return _through_weights(qkv, layout, options, dropout)
    result = ops.attention_qkvpacked(
        qkv,
        layout.cu_seqlens,
        layout.max_seqlen,
        return_weights=output_attentions,
        **options,
        **dropout,
    )
    out, weights = result if isinstance(result, tuple) else (result, None)
    return out, None if weights is None else layout.weights(weights)


def _through_weights(
    qkv: Tensor, layout: BatchLayout, options: dict[str, Any], dropout: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Compute the attention weights in the caller's layout, and the output from these weights.

    The output is a function of the returned weights, so that the caller can differentiate the
    model's loss with respect to the weights.

    Returns:
        The output of attention, and the weights in the caller's layout.
    """
    q, k, v = qkv.unbind(-3)
    ends, longest = layout.cu_seqlens, layout.max_seqlen
    if ends is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        weights = ops.attention_weights(q, k, **options)
    else:
        packed = {"cu_seqlens_q": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        weights = ops.attention_weights(q, k, **packed, **options)
    weights = layout.weights(weights)
    out = attention_context(layout.weights_of_rows(weights), v, ends, **dropout)
    return out.transpose(1, 2) if ends is None else out, weights


class BertSelfOutput(nn.Module):
    """The output projection of attention, ``LN(hidden + dropout(projection))``.

    The layer norm adds the bias of the projection ``dense``. If ``dense`` was replaced or has
    hooks, ``dense`` is called as a module and adds its own bias.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
    """

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the projection and the layer norm."""
        super().__init__()
        size = config.num_attention_heads * config.head_dim
        bias = config.architecture.attention_bias
        self.dense = Linear(size, config.hidden_size, backend, bias=bias)
        self.LayerNorm = norm_of(config, Probabilities.of(config).attention_output, backend)

    def forward(
        self, attended: Tensor, hidden: Tensor, dropout_seed: Tensor | None = None
    ) -> Tensor:
        """Project the output of attention, add it to `hidden`, and normalise the sum.

        Args:
            attended: Output of attention, of shape ``(T, H)``.
            hidden: Rows of shape ``(T, H)`` for the residual connection.
            dropout_seed: Seed of the dropout, int64 of shape ``(1,)``; None draws a seed.

        Returns:
            Rows of shape ``(T, H)``.
        """
        dense = self.dense
        if deviation(dense, Linear) is not None:
            return self.LayerNorm(dense(attended), residual=hidden, dropout_seed=dropout_seed)
        projected = ops.linear(attended, dense.weight, backend=dense.backend)
        return self.LayerNorm(
            projected, residual=hidden, x_bias=dense.bias, dropout_seed=dropout_seed
        )


class BertAttention(nn.Module):
    """Self-attention and its output projection, ``(T, H) → (T, H)``.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
        number: Number of the layer, from 0.
        kind: Class of the self-attention.
    """

    def __init__(
        self,
        config: BertConfig,
        backend: str | None = None,
        number: int = 0,
        kind: type[BertSelfAttention] = BertSelfAttention,
    ) -> None:
        """Create the self-attention and the output projection."""
        super().__init__()
        self.self = kind(config, backend, number)
        self.output = BertSelfOutput(config, backend)

    def forward(
        self,
        hidden: Tensor,
        layout: BatchLayout,
        output_attentions: bool = False,
        seeds: LayerSeeds = NO_SEEDS,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention block.

        Args:
            hidden: Rows of shape ``(T, H)``.
            layout: Division of the rows into sequences.
            output_attentions: Whether the attention weights are returned.
            seeds: Dropout seeds of the layer.

        Returns:
            Rows of shape ``(T, H)``; the attention weights in the caller's layout, or None if
            `output_attentions` is False.
        """
        attended, hidden, weights = self.self(hidden, layout, output_attentions, seeds.attention)
        return self.output(attended, hidden, seeds.attention_output), weights


def store_in_parts(
    module: nn.Module, fused: str, parts: tuple[str, ...], sizes: Sequence[int]
) -> None:
    """Register hooks with which a state dict stores one linear layer as several linear layers.

    Args:
        module: The module that has the linear layer.
        fused: Name of the linear layer in `module`.
        parts: Names of the linear layers in a state dict, in the order of the outputs.
        sizes: Number of outputs of each part.
    """
    named = dict(zip(parts, sizes, strict=True))
    module.register_state_dict_post_hook(functools.partial(_split, fused, named))
    module.register_load_state_dict_pre_hook(functools.partial(_join, fused, named))


def _kinds(linear: nn.Module) -> tuple[str, ...]:
    """Return the names of the tensors that a projection has in a state dict."""
    weight = ("weight", "scale") if isinstance(linear, QuantizedLinear) else ("weight",)
    return weight if linear.bias is None else (*weight, "bias")


def _split(
    fused: str,
    parts: dict[str, int],
    module: nn.Module,
    state: dict[str, Tensor],
    prefix: str,
    _: Any,
) -> None:
    """Split the weight of the layer `fused` into the weights of its parts; a state-dict hook.

    Scales and biases are split in the same way.
    """
    kinds = _kinds(getattr(module, fused))
    sizes = tuple(parts.values())
    tensors = {kind: state.pop(f"{prefix}{fused}.{kind}").split(sizes) for kind in kinds}
    for i, name in enumerate(parts):
        for kind, chunks in tensors.items():
            state[f"{prefix}{name}.{kind}"] = chunks[i]


def _join(
    fused: str,
    parts: dict[str, int],
    module: nn.Module,
    state: dict[str, Tensor],
    prefix: str,
    _: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Join the weights of the parts to the weight of the layer `fused`.

    This is a load hook, the inverse of `_split`. If a tensor of a part is absent or has a wrong
    shape, the module keeps its own values for this tensor. An absent tensor is reported as missing
    under its own name, and a wrong shape is reported as an error.
    """
    linear = getattr(module, fused)
    for kind in _kinds(linear):
        whole = f"{prefix}{fused}.{kind}"
        if whole in state:
            unexpected.append(whole)
        parameter = getattr(linear, kind).detach()
        chunks, kept = list(parameter.split(tuple(parts.values()))), 0
        for i, name in enumerate(parts):
            key = f"{prefix}{name}.{kind}"
            part = state.pop(key, None)
            if part is not None and part.shape == chunks[i].shape:
                chunks[i] = part
                continue
            kept += 1
            if part is None:
                missing.append(key)
            else:
                got, expected = tuple(part.shape), tuple(chunks[i].shape)
                errors.append(f"size mismatch for {key}: got {got}, expected {expected}")
        if kept:
            chunks = [chunk.to(parameter.device) for chunk in chunks]
        state[whole] = parameter if kept == len(chunks) else torch.cat(chunks)
