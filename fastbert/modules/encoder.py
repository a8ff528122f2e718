"""The stack of layers, which works on rows ``(T, H)`` and never pads or unpads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastbert import ops
from fastbert.config import BertConfig
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.chosen_rows import ChosenRows, Reads, choose_rows, run_layer, suits
from fastbert.modules.dropout import NO_SEEDS, LayerSeeds
from fastbert.modules.fused_encoder import FusedCall, TrainingCall, fused_call, training_call
from fastbert.modules.layer import BertLayer, PreNormLayer
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.positions import DistanceBias
from fastbert.modules.trained_layers import trained_layers
from fastbert.ops.backend import Choice, Request
from fastbert.ops.encoder_layer import encoder_layer
from fastbert.ops.gpu_times import length_class, rows_class
from fastbert.ops.layer_parts import Parts, choose_parts
from fastbert.ops.product import needs_gradient
from fastbert.ops.register import PLAIN


class BertEncoder(nn.Module):
    """All layers, in the order in which they run.

    With ``gradient_checkpointing``, a training step keeps one tensor of shape ``(T, H)`` per layer.
    The backward pass computes the other activations again, with the same dropout masks.

    Args:
        config: The configuration.
        backend: Backend of every operation; None lets each operation choose.

    Attributes:
        order: Index of the stored layer of each step; a stored layer may run more than once.
        gradient_checkpointing: Whether activations are computed again in the backward pass.
    """

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the layers."""
        super().__init__()
        choices = config.architecture
        kind = PreNormLayer if choices.pre_norm else BertLayer
        self.order = choices.order(config.num_hidden_layers)
        self.layer = nn.ModuleList(
            kind(config, backend, number) for number in range(max(self.order) + 1)
        )
        buckets, heads = choices.distance_buckets, config.num_attention_heads
        self.relative_attention_bias = DistanceBias(buckets, heads) if buckets else None
        self.final_norm = (
            LayerNorm(
                config.hidden_size, config.layer_norm_eps, backend=backend, bias=choices.norm_bias
            )
            if choices.pre_norm
            else None
        )
        self.gradient_checkpointing = False

    def forward(
        self,
        hidden: Tensor,
        layout: BatchLayout,
        output_attentions: bool | Sequence[int] = False,
        output_hidden_states: bool | Sequence[int] = False,
        seeds: Sequence[LayerSeeds] | None = None,
        chosen: ChosenRows | None = None,
    ) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
        """Run the layers.

        A gradient, if wanted, passes through the returned states and weights.

        Args:
            hidden: Rows of shape ``(T, H)``.
            layout: Division of the rows into sequences.
            output_attentions: Whether attention weights are returned; or the numbers of the layers
                whose weights are returned.
            output_hidden_states: Whether the hidden states are returned; or the numbers of the
                states that are returned. State 0 is the input of the first layer.
            seeds: Dropout seeds of each layer; None lets every operation draw its own seed.
            chosen: The rows that `choose` has returned; None computes all rows. With a choice, no
                states and no attention weights are returned.

        Returns:
            The rows after the last layer, a list of hidden states and a list of attention weights,
            both in the caller's layout. The N + 1 hidden states are the input of the first layer
            and the output of each of the N layers. The last state includes the final norm, if the
            encoder has one. A state, and the attention weights of a layer, are None if they were
            not chosen. A list that was not asked for is empty.

        Raises:
            ValueError: If `output_attentions` or `output_hidden_states` names a layer that does not
                exist.
            TypeError: If one of them is neither a bool nor a sequence.

        Note:
            The choice of states does not change the path of the layers. A call that runs all layers
            at once can return the rows after every layer or after the last layer only. If a state
            between the first and the last is chosen, the call therefore holds the rows after every
            layer until it returns, and the states that were not chosen are then released.
        """
        states: list[Tensor | None] = []
        attentions: list[Tensor | None] = []
        layers = self.running()
        weighed = chosen_layers("output_attentions", output_attentions, len(layers))
        stated = chosen_layers("output_hidden_states", output_hidden_states, len(layers) + 1)
        if self.relative_attention_bias is not None:
            bias = self.relative_attention_bias(layout.order(hidden.device))
            given = layout.bias
            layout = dataclasses.replace(layout, bias=bias if given is None else bias + given)
        if not weighed:
            rows, wants_gradient = hidden.shape[0], hidden.requires_grad
            plan = fused_call(layers, hidden.device.type, hidden.dtype, wants_gradient, rows)
            of_triton = isinstance(plan, FusedCall) and plan.backend == "triton"
            if of_triton and layout.cu_seqlens is not None and layout.bias is not None:
                plan = Choice("", "layer by layer: a bias by distance")
            if isinstance(plan, FusedCall) and plan.windows and layout.places is not None:
                plan = Choice("", "layer by layer: a window over padding in a sequence")
            if isinstance(plan, FusedCall):
                between = any(0 < number < len(layers) for number in stated)
                outputs = _one_call(plan, hidden, layout, between)
                if self.final_norm is not None:
                    outputs[-1] = self.final_norm(outputs[-1])
                if stated:
                    known = {0: hidden, len(layers): outputs[-1]}
                    known |= dict(enumerate(outputs, 1)) if between else {}
                    states = [
                        layout.given(known[number]) if number in stated else None
                        for number in range(len(layers) + 1)
                    ]
                return outputs[-1], states, []
        if stated:
            hidden = _through(hidden, layout, states, 0 in stated)
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        trained = None
        if torch.is_grad_enabled() and not (weighed or recompute):
            trained = _training(layers, hidden, layout, seeds, chosen)
        if trained is None:
            hidden = layout.seen(hidden)
        for i, layer in enumerate(layers):
            if chosen is not None and i == len(layers) - 1 and trained is None:
                last = (layer, hidden, layout, chosen)
                if recompute:
                    return checkpoint(run_layer, *last, use_reentrant=False), [], []
                return run_layer(*last), [], []
            if trained is not None:
                hidden = trained(i, hidden)
                if stated:
                    hidden = _through(hidden, layout, states, i + 1 in stated)
                continue
            arguments = (hidden, layout, i in weighed, NO_SEEDS if seeds is None else seeds[i])
            if recompute:
                hidden, weights = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                hidden, weights = layer(*arguments)
            if self.final_norm is not None and i == len(layers) - 1:
                hidden = self.final_norm(hidden)
            if stated:
                rows = hidden.view(-1, hidden.shape[-1])
                hidden = layout.seen(_through(rows, layout, states, i + 1 in stated))
            if weighed:
                attentions.append(weights)
        return hidden.view(-1, hidden.shape[-1]), states, attentions

    def choose(self, hidden: Tensor, layout: BatchLayout, reads: Reads) -> ChosenRows | None:
        """Choose the rows of the last layer that a head reads.

        Args:
            hidden: Rows of shape ``(T, H)`` before the first layer.
            layout: Division of the rows into sequences.
            reads: Function that marks the rows that the head reads.

        Returns:
            The rows, or None if all rows must be computed. Without a gradient, one call runs all
            layers, and most rows at once take no more time than all rows.
        """
        last = self.running()[-1]
        if self.final_norm is not None or not needs_gradient(hidden, *last.parameters()):
            return None
        if not suits(last, layout, hidden.device):
            return None
        chosen = choose_rows(hidden, layout, reads)
        few = 2 * chosen.indices.shape[0] <= hidden.shape[0]
        return chosen if few else None

    def running(self) -> list[nn.Module]:
        """Return the layers in the order in which they run."""
        return [self.layer[number] for number in self.order]

    def choice(self, device: str, dtype: torch.dtype, layers: str, length: int = 0) -> Choice:
        """Return the backend of the layers in inference without attention weights, and the reason.

        Args:
            device: Type of the device, such as ``"cpu"``.
            dtype: Dtype of the rows.
            layers: Backend that serves the layers one by one.
            length: Class of the length of the sequences (`ops.gpu_times.length_class`).

        Returns:
            The backend of the call if one call runs all layers. Otherwise the backend of the first
            operation that another backend serves, or `layers` if the layers run one by one for
            another reason.
        """
        with torch.no_grad():
            plan = fused_call(self.running(), device, dtype, wants_gradient=False, length=length)
        if isinstance(plan, FusedCall):
            return Choice(plan.backend, plan.reason)
        return Choice(plan.backend or layers, plan.reason)


def _through(
    rows: Tensor, layout: BatchLayout, states: list[Tensor | None], wanted: bool
) -> Tensor:
    """Append `rows` in the caller's layout to `states`, or None if unwanted, and return the rows.

    If a gradient is wanted, the returned rows are taken from the appended state. The later layers
    are then computed from the state.
    """
    state = layout.given(rows) if wanted else None
    states.append(state)
    return rows if state is None or not needs_gradient(rows) else layout.rows(state)


def chosen_layers(name: str, wanted: bool | Sequence[int], count: int) -> frozenset[int]:
    """Return the numbers that `wanted` chooses among the layers, or among the hidden states.

    Args:
        name: Name of the argument, for errors.
        wanted: True for all, False for none, or numbers. A negative number counts from the end.
        count: Number of layers, or of hidden states.

    Returns:
        The numbers, from 0.

    Raises:
        ValueError: If `wanted` has a number that is out of range.
        TypeError: If `wanted` is neither a bool nor a sequence.
    """
    if isinstance(wanted, bool):
        return frozenset(range(count) if wanted else ())
    allowed = f"allowed: True, False or numbers from {-count} to {count - 1}"
    if not isinstance(wanted, Sequence):
        raise TypeError(f"{name}: got {wanted!r}, {allowed}")
    for number in wanted:
        if isinstance(number, bool) or not isinstance(number, int) or not -count <= number < count:
            raise ValueError(f"{name}: got layer {number!r}, {allowed}")
    return frozenset(number % count for number in wanted)


def _training(
    layers: Sequence[nn.Module],
    hidden: Tensor,
    layout: BatchLayout,
    seeds: Sequence[LayerSeeds] | None,
    chosen: ChosenRows | None,
) -> Callable[[int, Tensor], Tensor] | None:
    """Return the function that runs a layer, by its number, as one function of autograd.

    The result is None if the layers run operation by operation.
    """
    on_cpu = trained_layers(layers, hidden, layout, seeds, chosen)
    if on_cpu is not None or chosen is not None:
        return on_cpu
    bias = layout.bias
    if type(hidden) not in PLAIN or (bias is not None and bias.requires_grad):
        return None
    call = training_call(layers, hidden.device.type, hidden.dtype)
    if isinstance(call, Choice) or (seeds is None and any(map(any, call.dropouts))):
        return None
    uniform = layout.cu_seqlens is None
    length = layout.length if uniform else layout.max_seqlen
    full = (layout.batch, call.heads, length, length)
    # The kernels take views of the full shape, with stride 0 where a dimension is broadcast.
    mask = None if layout.mask is None else layout.mask.expand(full)
    bias = None if bias is None else bias.to(call.dtype).expand(full)
    numbers = (layout.batch, length, call.heads, call.eps, call.activation, call.dtype)
    parts = _parts(call, hidden, layout, length)

    def run(i: int, rows: Tensor) -> Tensor:
        own = NO_SEEDS if seeds is None else seeds[i]
        inputs = (layout.cu_seqlens, mask, bias, own.attention, own.attention_output, own.output)
        shape = (*numbers, *call.dropouts[i])
        return encoder_layer(rows, call.parameters[i], inputs, shape, parts)

    return run


def _parts(
    call: FusedCall | TrainingCall, hidden: Tensor, layout: BatchLayout, length: int
) -> Parts:
    """Return the backends of the operations that have both, in layers on Triton kernels."""
    columns, on_gpu = hidden.shape[1], hidden.device.type == "cuda"
    request = Request(
        hidden.device.type,
        call.dtype,
        head_dim=columns // call.heads,
        options=() if layout.bias is None else ("bias",),
        activation=call.activation,
        columns=columns,
        length=length_class(length) if on_gpu else 0,
        rows=rows_class(hidden.shape[0]) if on_gpu else 0,
        trained=isinstance(call, TrainingCall),
    )
    return choose_parts(request, hidden.dtype, call.requested)


def _one_call(
    plan: FusedCall, hidden: Tensor, layout: BatchLayout, all_states: bool
) -> list[Tensor]:
    """Run all layers in one call and return the rows after each layer, or after the last layer."""
    length = layout.length if layout.cu_seqlens is None else layout.max_seqlen
    parts = _parts(plan, hidden, layout, length) if plan.backend == "triton" else Parts()
    return ops.encoder(
        hidden,
        plan.parameters,
        layout.cu_seqlens,
        length,
        batch=layout.batch,
        heads=plan.heads,
        projections=plan.projections,
        scales=plan.scales,
        mask=layout.mask,
        bias=layout.bias,
        rotations=[part for base in plan.bases for part in layout.rotations[base]],
        windows=plan.windows,
        inner_projections=plan.inner_projections,
        pre_norm=plan.pre_norm,
        eps=plan.eps,
        activation=plan.activation,
        dtype=plan.dtype,
        all_states=all_states,
        backend=plan.backend,
        attention_backend=parts.attention,
        feed_forward_backend=parts.feed_forward,
        layer_norm_backend=parts.layer_norm,
    )
