"""Attention weights, queries, keys and values of a model, for one text.

When `collect` returns or raises an error, the model has the same mode, hooks and classes as before.
A model of transformers is accelerated during the call, so that the same code works for all model
families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.modules import BertModel
from fastbert.modules.attention import BertSelfAttention
from fastbert.modules.encoder import chosen_layers
from fastbert.modules.linear import Linear
from fastbert.modules.plain import deviation
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.viewer.model_name import model_name
from fastbert.viewer.predictions import ANY, Output, Prediction, predict
from fastbert.viewer.text import PADDING, Tokens


@dataclass
class Layer:
    """The attention of one layer for one text of L tokens, in fp32.

    Attributes:
        number: Number of the layer in the model, from 0.
        window: Largest distance between a query and its keys, or None if there is no limit.
        weights: Softmax weights of shape ``(heads, L, L)``, 0 at padding.
        queries: Queries of shape ``(heads, L, D)``, rotated if the model rotates them.
        keys: Keys of shape ``(heads, L, D)``, rotated if the model rotates them.
        norms: Norm of the vector that each token's value adds to the output of attention if its
            weight is 1, of shape ``(heads, L)`` (Kobayashi et al. 2020, "Attention is Not Only a
            Weight").
        relevance: Each weight times the gradient of the chosen output by this weight, or 0 if the
            product is negative; of shape ``(heads, L, L)``, or None without a gradient. The mean of
            `relevance` over the heads is equation 5 of Chefer et al. 2021.
        scores: Sum of ``|gradient × weight|`` of each head, of shape ``(heads,)``, or None without
            a gradient.
    """

    number: int
    window: int | None
    weights: Tensor
    queries: Tensor
    keys: Tensor
    norms: Tensor
    relevance: Tensor | None = None
    scores: Tensor | None = None


@dataclass
class Collected:
    """The attention and the prediction of a model for one text.

    Attributes:
        name: Name of the folder or hub id from which transformers loaded the model, or else of the
            class of the model.
        config: The configuration of the encoder.
        layers: The attention of the chosen layers.
        prediction: The prediction of the head, or None if the model has no head that the page
            shows.
        note: Why there is no gradient although there is a prediction; empty otherwise.
        biased: Whether the model adds to the product of a query and a key a bias that depends on
            their distance.
    """

    name: str
    config: BertConfig
    layers: list[Layer]
    prediction: Prediction | None
    note: str
    biased: bool


@contextmanager
def _opened(model: Any) -> Iterator[tuple[nn.Module, BertModel]]:
    """Yield the outermost module that takes token ids, and the encoder of fastbert inside it.

    Inside the block, modules are in eval mode and parameters require no gradient, because the
    gradients of parameters would take time and are not used. After the block, every module has its
    earlier mode and class, and every parameter has its earlier ``requires_grad``.
    """
    with ExitStack() as stack:
        whole: Any = model if isinstance(model, nn.Module) else getattr(model, "model", None)
        if not isinstance(whole, nn.Module):
            raise TypeError(f"model: got {type(model).__name__}, allowed: a model or a pipeline")
        ours = [part for part in whole.modules() if isinstance(part, BertModel)]
        if ours:
            outer, encoder = whole, ours[0]
        else:
            outer, encoder = stack.enter_context(_stock(whole))
        modes = [(part, part.training) for part in (*outer.modules(), *encoder.modules())]
        stack.callback(_set_modes, modes)
        outer.eval()
        for parameter in (*outer.parameters(), *encoder.parameters()):
            if parameter.requires_grad:
                stack.callback(parameter.requires_grad_, True)
                parameter.requires_grad_(False)
        yield outer, encoder


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for part, training in modes:
        part.training = training


@contextmanager
def _stock(whole: nn.Module) -> Iterator[tuple[nn.Module, BertModel]]:
    """Accelerate a model of transformers inside the block, unless it is already accelerated."""
    from fastbert.integrations import accelerate as host

    before = host.bound_encoders(whole)
    outer = next((part for part in whole.modules() if _is_stock(part)), None)
    try:
        try:
            if not before:
                host.accelerate(whole)
        except ValueError as error:
            raise ValueError(f"model: {str(error).removeprefix('accelerate: ')}") from error
        bound = list(host.bound_encoders(whole).values())
        if len(bound) != 1 or outer is None:
            raise ValueError(f"model: got {len(bound)} encoders, allowed: one")
        if not isinstance(bound[0].model, BertModel):
            raise ValueError("model: got XLNet, allowed: a model of another family")
        yield outer, bound[0].model
    finally:
        if not before:
            host.restore(whole)


def _is_stock(part: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(part).__mro__)


@dataclass
class _Seen:
    """A call of a self-attention module: the module, its input rows and their layout."""

    module: BertSelfAttention
    hidden: Tensor
    layout: Any


@contextmanager
def _watched(encoder: BertModel, gradient: bool) -> Iterator[list[_Seen]]:
    """Record the calls of self-attention inside the block, in the order of the layers.

    If `gradient` is true, the input of the layers becomes a leaf tensor that requires a gradient,
    so that the attention weights have a gradient even if every parameter is frozen.
    """
    seen: list[_Seen] = []

    def record(module: Any, arguments: tuple[Any, ...]) -> None:
        seen.append(_Seen(module, arguments[0].detach(), arguments[1]))

    def begin(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0].detach().requires_grad_(), *arguments[1:])

    with ExitStack() as stack:
        for layer in encoder.encoder.layer:
            handle = layer.attention.self.register_forward_pre_hook(record)
            stack.callback(handle.remove)
        if gradient:
            stack.callback(encoder.encoder.register_forward_pre_hook(begin).remove)
        yield seen


def collect(
    model: Any, tokens: Tokens, *, layers: Sequence[int] | None = None, output: Output = ANY
) -> Collected:
    """Run a model on one text and collect what its attention does.

    Args:
        model: A model of fastbert, a model of transformers, a ``SentenceTransformer`` or a
            pipeline; accelerated or not.
        tokens: The tokens of the text.
        layers: Numbers of the layers; a negative number counts from the end. None means all.
        output: The output whose gradient is computed.

    Returns:
        The attention of the layers and the prediction.

    Raises:
        TypeError: If `model` is not a model.
        ValueError: If the model has no encoder that fastbert can compute, if there are more tokens
            than the model has positions, if an id is not in the model's vocabulary, or if a layer
            or an output does not exist.
    """
    with _opened(model) as (outer, encoder):
        config = encoder.config
        _check_length(config, tokens)
        count = len(encoder.encoder.order)
        chosen = sorted(chosen_layers("layers", True if layers is None else layers, count))
        quantized = any(isinstance(part, QuantizedLinear) for part in outer.modules())
        inputs = _inputs(outer, encoder, tokens)
        with torch.inference_mode(False), torch.enable_grad():
            with _watched(encoder, not quantized) as seen, torch.set_grad_enabled(not quantized):
                out = outer(**inputs, output_attentions=chosen, return_dict=True)
            prediction = predict(outer, out, tokens, output)
            weights = [out.attentions[number] for number in chosen]
            gradients = _gradients(prediction, weights, quantized)
        with torch.no_grad():
            found = [
                _layer(encoder, seen[number], number, weight.detach(), gradient)
                for number, weight, gradient in zip(chosen, weights, gradients, strict=True)
            ]
    lacking = prediction is not None and quantized
    note = "The model is quantized, and quantized layers have no gradient." if lacking else ""
    layers = encoder.encoder
    shared = (layers.relative_attention_bias, layers.relative_positions)
    biased = any(positions is not None for positions in shared)
    return Collected(_name(outer), config, found, prediction, note, biased)


def _name(model: nn.Module) -> str:
    place = getattr(getattr(model, "config", None), "name_or_path", None)
    return model_name(place or "") or type(model).__name__


def _check_length(config: BertConfig, tokens: Tokens) -> None:
    limit, got = config.max_length, len(tokens.ids)
    if got > limit:
        raise ValueError(f"text: got {got} tokens, allowed: at most {limit}, the model's positions")
    largest = max(tokens.ids)
    if largest >= config.vocab_size:
        raise ValueError(
            f"tokenizer: got the id {largest}, allowed: below {config.vocab_size}, the vocabulary "
            "of the model"
        )


def _inputs(outer: nn.Module, encoder: BertModel, tokens: Tokens) -> dict[str, Tensor]:
    device = next(outer.parameters()).device
    exists = [int(sentence != PADDING) for sentence in tokens.sentences]
    inputs = {"input_ids": tokens.ids, "attention_mask": exists}
    types = encoder.embeddings.token_type_embeddings
    if types is not None and types.weight.shape[0] > 1:
        inputs["token_type_ids"] = tokens.types
    return {name: torch.tensor([values], device=device) for name, values in inputs.items()}


def _gradients(
    prediction: Prediction | None, weights: list[Tensor], quantized: bool
) -> list[Tensor | None]:
    if prediction is None or quantized:
        return [None] * len(weights)
    return list(torch.autograd.grad(prediction.target, weights, allow_unused=True))


def _layer(
    encoder: BertModel, seen: _Seen, number: int, weights: Tensor, gradient: Tensor | None
) -> Layer:
    module, layout = seen.module, seen.layout
    heads, size = module.heads, module.head_dim
    qkv = module.of_heads(module.content(seen.hidden), layout)
    padded = layout.given(qkv.reshape(-1, 3 * heads * size))[0].float()
    queries, keys, values = padded.view(-1, 3, heads, size).permute(1, 2, 0, 3)
    dense = encoder.encoder.layer[encoder.encoder.order[number]].attention.output.dense
    weights = weights[0].float()
    relevance = scores = None
    if gradient is not None:
        product = gradient[0].float() * weights
        scores = product.abs().sum((1, 2)).cpu()
        relevance = product.clamp_(min=0).cpu()
    return Layer(
        number,
        module.window,
        weights.cpu(),
        queries.cpu(),
        keys.cpu(),
        _norms(dense, values.to(seen.hidden.dtype)).cpu(),
        relevance,
        scores,
    )


def _norms(dense: nn.Module, values: Tensor) -> Tensor:
    """Return the norm of each value after the output projection, of shape ``(heads, L)``.

    The norm of head h and token j is ``‖W_O,h v_j,h‖``, where v is `values` of shape
    ``(heads, L, D)`` and ``W_O,h`` has the columns of the projection's weight that belong to head
    h. If the projection is quantized, adapted or hooked, the function does not use its weight. It
    calls the projection with the values of one head and zeros for the other heads, and subtracts
    the bias.
    """
    heads, length, size = values.shape
    if deviation(dense, Linear) is None:
        weight = dense.get_parameter("weight")
        parts = weight.view(weight.shape[0], heads, size).permute(1, 2, 0)
        return torch.bmm(values, parts).float().norm(dim=-1)
    rows = values.new_zeros(length, heads, size)
    none = dense(values.new_zeros(1, heads * size))
    norms = []
    for head in range(heads):
        rows[:, head] = values[head]
        norms.append((dense(rows.view(length, -1)) - none).float().norm(dim=-1))
        rows[:, head] = 0
    return torch.stack(norms)
