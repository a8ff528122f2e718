"""One layer of a BERT encoder in training: its forward, and its backward from the saved tensors.

With the fused path of the feed-forward and the short path of attention, the forward takes four
kernels and three library GEMMs. The backward then takes nine kernels and seven library GEMMs. The
launches, and therefore the bits, are the same as if the operations of the layer were called one by
one. One call for the layer takes less time on the host, because nothing is checked, wrapped or
registered again between two launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.kernels.layer_parts import TRITON, Launchers
from fastbert.kernels.reduction import sum_rows


class LayerShape(NamedTuple):
    """The sizes and the options of a layer.

    Attributes:
        batch: Number of sequences.
        max_seqlen: Length of the longest sequence.
        heads: Number of heads.
        eps: Term that is added to the variance in layer norms.
        activation: Name of an activation in ``fastbert.activations``.
        dtype: Dtype of the products; the rows may be fp32 instead.
        attention_p: Dropout probability of the attention weights.
        attention_output_p: Dropout probability before the first layer norm.
        output_p: Dropout probability before the last layer norm.
    """

    batch: int
    max_seqlen: int
    heads: int
    eps: float
    activation: str
    dtype: torch.dtype
    attention_p: float
    attention_output_p: float
    output_p: float


class Inputs(NamedTuple):
    """The tensors of a layer that are neither rows nor parameters.

    Attributes:
        cu_seqlens: Cumulative lengths of packed sequences, int32 (B + 1,), or None.
        mask: Bool mask, expanded to (B, heads, L, L), or None.
        bias: Additive bias in the dtype of the products, expanded to (B, heads, L, L), or None.
        attention_seed: Seed of the dropout of the attention weights, int64 (1,), or None.
        attention_output_seed: Seed of the dropout before the first layer norm, int64 (1,), or None.
        output_seed: Seed of the dropout before the last layer norm, int64 (1,), or None.
    """

    cu_seqlens: Tensor | None
    mask: Tensor | None
    bias: Tensor | None
    attention_seed: Tensor | None
    attention_output_seed: Tensor | None
    output_seed: Tensor | None


class Saved(NamedTuple):
    """The tensors that the backward of a layer reads, besides the parameters and `Inputs`.

    ``rows`` and ``inner_rows`` are copies of ``hidden`` and ``first`` in the dtype of the products.
    They are None if ``hidden`` and ``first`` have this dtype.
    """

    hidden: Tensor
    rows: Tensor | None
    qkv: Tensor
    out: Tensor
    lse: Tensor
    projected: Tensor
    mean: Tensor
    rstd: Tensor
    first: Tensor
    inner_rows: Tensor | None
    inner: Tensor
    last_projected: Tensor
    last_mean: Tensor
    last_rstd: Tensor


def layer_forward(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    inputs: Inputs,
    shape: LayerShape,
    launchers: Launchers = TRITON,
) -> tuple[Tensor, Saved]:
    """Run the layer on rows.

    Args:
        hidden: Rows (T, N), contiguous; in the dtype of the products, or fp32.
        parameters: The twelve parameters, in the order of ``fastbert.ops.encoder``. The parameters
            of products have the dtype of the products.
        inputs: The tensors that are neither rows nor parameters.
        shape: The sizes and the options of the layer.
        launchers: The launchers of attention, feed-forward and layer norm.

    Returns:
        The rows (T, N) after the layer, in the dtype of `hidden`, and the tensors that the backward
        reads.
    """
    attention, feed_forward, layer_norm = launchers
    wqkv, bqkv, wo, bo, weight1, bias1, w1, b1, w2, b2, weight2, bias2 = parameters
    rows = None if hidden.dtype == shape.dtype else hidden.to(shape.dtype)
    qkv = F.linear(hidden if rows is None else rows, wqkv, bqkv)
    q, k, v = _heads(qkv, 3, inputs, shape)
    out, lse = attention.forward(q, k, v, **_options(inputs, shape, q.shape[-1]))
    projected = _cast(F.linear(_joined(out, inputs).view(hidden.shape), wo), hidden.dtype)
    first, mean, rstd = layer_norm.forward(
        projected, weight1, bias1, residual=hidden, x_bias=bo, seed=inputs.attention_output_seed,
        dropout_p=shape.attention_output_p, eps=shape.eps,
    )  # fmt: skip
    inner_rows = None if first.dtype == shape.dtype else first.to(shape.dtype)
    activated, inner = feed_forward.forward(
        first if inner_rows is None else inner_rows, w1, b1, activation=shape.activation, save=True
    )
    assert inner is not None
    last_projected = _cast(F.linear(activated, w2), hidden.dtype)
    y, last_mean, last_rstd = layer_norm.forward(
        last_projected, weight2, bias2, residual=first, x_bias=b2, seed=inputs.output_seed,
        dropout_p=shape.output_p, eps=shape.eps,
    )  # fmt: skip
    return y, Saved(
        hidden, rows, qkv, out, lse, projected, mean, rstd, first, inner_rows, inner,
        last_projected, last_mean, last_rstd,
    )  # fmt: skip


def layer_backward(
    dy: Tensor,
    parameters: Sequence[Tensor],
    inputs: Inputs,
    saved: Saved,
    shape: LayerShape,
    needs: Sequence[bool],
    launchers: Launchers = TRITON,
) -> list[Tensor | None]:
    """Compute the gradients of `layer_forward`.

    Args:
        dy: Gradient of the result (T, N), at any strides.
        parameters: As in `layer_forward`.
        inputs: As in `layer_forward`.
        saved: The tensors that `layer_forward` returned for the backward.
        shape: As in `layer_forward`.
        needs: Whether each gradient is wanted, first for `hidden` and then for each parameter.
        launchers: As in `layer_forward`.

    Returns:
        The gradients of `hidden` and of the parameters, each in the dtype of its tensor. A gradient
        that is not wanted may be a tensor or None.
    """
    attention, feed_forward, layer_norm = launchers
    wqkv, bqkv, wo, bo, weight1, _, w1, _, w2, b2, weight2, _ = parameters
    dresidual, dx, dweight2, dbias2, db2 = layer_norm.backward(
        dy, saved.last_projected, weight2, saved.last_mean, saved.last_rstd, residual=saved.first,
        x_bias=b2, seed=inputs.output_seed, dropout_p=shape.output_p,
    )  # fmt: skip
    gradients: list[Tensor | None] = [*[None] * 10, db2, dweight2, dbias2]
    if not any(needs[:10]):
        return gradients
    dprojected = _cast(dresidual if dx is None else dx, shape.dtype)
    dinner, gradients[8], activated = feed_forward.backward(
        dprojected, w2, saved.inner, activation=shape.activation
    )
    inner_rows = saved.first if saved.inner_rows is None else saved.inner_rows
    gradients[7] = dinner.t() @ inner_rows if needs[7] else None
    gradients[9] = dprojected.t() @ activated if needs[9] else None
    if not any(needs[:7]):
        return gradients
    dfirst = _add_product(dresidual, dinner, w1)
    dresidual, dx, gradients[5], gradients[6], gradients[4] = layer_norm.backward(
        dfirst, saved.projected, weight1, saved.mean, saved.rstd, residual=saved.hidden, x_bias=bo,
        seed=inputs.attention_output_seed, dropout_p=shape.attention_output_p,
    )  # fmt: skip
    dprojected = _cast(dresidual if dx is None else dx, shape.dtype)
    if needs[3]:
        gradients[3] = dprojected.t() @ _joined(saved.out, inputs).view(dprojected.shape)
    if any(needs[:3]):
        dqkv = torch.empty_like(saved.qkv)
        (dout,) = _heads(dprojected @ wo, 1, inputs, shape)
        attention.backward(
            dout, *_heads(saved.qkv, 3, inputs, shape), saved.out, saved.lse,
            into=_heads(dqkv, 3, inputs, shape), **_options(inputs, shape, dout.shape[-1]),
        )  # fmt: skip
        rows = saved.hidden if saved.rows is None else saved.rows
        gradients[0] = _add_product(dresidual, dqkv, wqkv) if needs[0] else None
        gradients[1] = dqkv.t() @ rows if needs[1] else None
        gradients[2] = sum_rows(dqkv, bqkv.dtype) if needs[2] else None
    return gradients


def _heads(rows: Tensor, parts: int, inputs: Inputs, shape: LayerShape) -> tuple[Tensor, ...]:
    """Split `rows`, of shape (T, parts · N), into `parts` views of the shape that attention takes.

    A view is (B, heads, L, D), or (T, heads, D) with ``inputs.cu_seqlens``.
    """
    sizes = (parts, shape.heads, rows.shape[1] // (parts * shape.heads))
    if inputs.cu_seqlens is not None:
        return rows.view(rows.shape[0], *sizes).unbind(1)
    dense = rows.view(shape.batch, shape.max_seqlen, *sizes).unbind(2)
    return tuple([part.transpose(1, 2) for part in dense])


def _joined(out: Tensor, inputs: Inputs) -> Tensor:
    """Return the output of attention with all heads of a row adjacent in memory."""
    return out if inputs.cu_seqlens is not None else out.transpose(1, 2)


def _options(inputs: Inputs, shape: LayerShape, head_dim: int) -> dict[str, Any]:
    return {
        "mask": inputs.mask,
        "bias": inputs.bias,
        "cu_seqlens_q": inputs.cu_seqlens,
        "max_seqlen_q": shape.max_seqlen,
        "max_seqlen_k": shape.max_seqlen,
        "seed": inputs.attention_seed,
        "dropout_p": shape.attention_p,
        "scale": head_dim**-0.5,
    }


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _add_product(dresidual: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """Return dresidual + dy W in the dtype of dresidual, which may differ from the dtype of dy."""
    if dresidual.dtype == dy.dtype:
        return torch.addmm(dresidual, dy, weight)
    # torch.addmm requires operands of one dtype.
    return dresidual + dy @ weight
