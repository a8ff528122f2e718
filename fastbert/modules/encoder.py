"""The stack of layers, which runs on rows ``(T, H)`` and leaves padding to the batch layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastbert.config import BertConfig
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.chosen_rows import ChosenRows, Reads, choose_rows, run_layer
from fastbert.modules.dropout import NO_SEEDS, LayerSeeds
from fastbert.modules.executors import Call
from fastbert.modules.layer import BertLayer, PreNormLayer
from fastbert.modules.layer_norm import norm_of
from fastbert.modules.plan import Mode, Plan, plan
from fastbert.modules.plan_cache import PlanCache
from fastbert.modules.positions import DistanceBias, DistanceSlopes, RotaryTable
from fastbert.modules.relative_positions import RelativeTable
from fastbert.ops.backend import Choice
from fastbert.ops.dropout import dropout
from fastbert.ops.product import needs_gradient


class BertEncoder(nn.Module):
    """The layers of an encoder, the positions that they share, and the norm after them.

    The bias by distance, the tables of relative positions and of rotary angles, and the final norm
    are None if the architecture has none.

    With ``gradient_checkpointing``, a training step stores only one tensor of shape ``(T, H)`` per
    layer. The backward pass computes the other activations again, with the same dropout masks.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.

    Attributes:
        final_dropout_p: Dropout probability after the norm that follows the last layer.
        order: Indices in ``layer`` of the layers, in the order in which they run. With groups of
            layers (ALBERT), indices are repeated.
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
        self.relative_attention_bias: DistanceBias | DistanceSlopes | None = None
        if buckets:
            self.relative_attention_bias = DistanceBias(buckets, heads)
        elif choices.distance_slopes:
            self.relative_attention_bias = DistanceSlopes(heads)
        self.relative_positions = (
            RelativeTable(config, backend) if choices.relative_positions is not None else None
        )
        self.rotary_table = (
            RotaryTable(config.max_position_embeddings, config.head_dim, choices.rotary_bases[0])
            if choices.rotary_table
            else None
        )
        self.final_norm = norm_of(config, backend=backend) if choices.pre_norm else None
        self.final_dropout_p = choices.final_dropout
        self.gradient_checkpointing = False
        self._plans = PlanCache()

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

        If autograd records the call, gradients flow through the returned states and weights.

        Args:
            hidden: Rows of shape ``(T, H)``.
            layout: Division of the rows into sequences.
            output_attentions: True returns the attention weights of all layers, and False none. A
                sequence has the numbers of the layers whose weights are returned.
            output_hidden_states: True returns all hidden states, and False none. A sequence has the
                numbers of the states that are returned. State 0 is the input of the first layer.
            seeds: Dropout seeds of each layer; None lets every operation draw its own seed.
            chosen: The result of `choose`; None computes all rows. If `chosen` is not None, no
                states and no attention weights are returned.

        Returns:
            The rows after the last layer, or the rows in `chosen` only; a list of hidden states;
            and a list of attention weights. Both lists are in the caller's layout. The N + 1 hidden
            states are the input of the first layer and the output of each of the N layers. The last
            state includes the final norm, if the encoder has one. A state that was not chosen is
            None, and so are the attention weights of a layer that was not chosen. The list of
            states is empty if no state was chosen, and the list of weights if no layer was chosen.

        Raises:
            ValueError: If `output_attentions` names a layer that does not exist, or if
                `output_hidden_states` names a state that does not exist.
            TypeError: If one of the two arguments is neither a bool nor a sequence.

        Note:
            The choice of states does not change the code path of the layers. One call that runs all
            layers returns the rows after every layer, or after the last layer only. If a state
            between the first and the last is chosen, the call therefore stores the rows after every
            layer. When the call returns, the states that were not chosen are freed.
        """
        attentions: list[Tensor | None] = []
        layers = self.running()
        weighed = chosen_layers("output_attentions", output_attentions, len(layers))
        stated = chosen_layers("output_hidden_states", output_hidden_states, len(layers) + 1)
        states: list[Tensor | None] = [None] * (len(layers) + 1) if stated else []
        if self.relative_attention_bias is not None:
            bias = self.relative_attention_bias(layout.order(hidden.device))
            given = layout.bias
            layout = dataclasses.replace(layout, bias=bias if given is None else bias + given)

        layout = self.with_positions(layout)

        def after(number: int, rows: Tensor) -> Tensor:
            """Store the rows after `number` layers if chosen; return the next layer's input."""
            if number == len(layers) and self.final_norm is not None:
                rows = self.final_norm(rows)
            if number == len(layers) and self.training and self.final_dropout_p > 0.0:
                rows = dropout(rows, self.final_dropout_p)
            if number not in stated:
                return rows
            state = states[number] = layout.given(rows)
            if not needs_gradient(rows):
                return rows
            # The later layers are computed from the returned state, which is 0 at padding.
            returned = layout.rows(state)
            if layout.tokens is None:
                return returned
            return torch.where(layout.tokens.flatten()[:, None], returned, rows)

        hidden = after(0, hidden)
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if not (weighed or torch.compiler.is_compiling()):
            between = any(0 < number < len(layers) for number in stated)
            call = Call(hidden, layout, after, between, seeds, chosen, recompute)
            run = self.plan(hidden).run
            if run is not None and run.refuses(call) is None:
                return run.run(call), states, attentions
        hidden = layout.seen(hidden)
        for i, layer in enumerate(layers):
            if chosen is not None and i == len(layers) - 1:
                last = (layer, hidden, layout, chosen)
                if recompute:
                    return checkpoint(run_layer, *last, use_reentrant=False), [], []
                return run_layer(*last), [], []
            arguments = (hidden, layout, i in weighed, NO_SEEDS if seeds is None else seeds[i])
            if recompute:
                hidden, weights = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                hidden, weights = layer(*arguments)
            rows = hidden.view(-1, hidden.shape[-1])
            hidden = layout.seen(after(i + 1, rows))
            if weighed:
                attentions.append(weights)
        return hidden.view(-1, hidden.shape[-1]), states, attentions

    def with_positions(self, layout: BatchLayout) -> BatchLayout:
        """Return the layout with the relative positions of a call, if the encoder has them."""
        if self.relative_positions is None:
            return layout
        length = layout.longest if layout.places is None else layout.length
        return dataclasses.replace(layout, relative=self.relative_positions(max(length, 1)))

    def plan(self, hidden: Tensor) -> Plan:
        """Return the plan for rows ``(T, H)``; see ``fastbert.modules.plan``."""
        return self._plans.plan(self, hidden)

    def choose(self, hidden: Tensor, layout: BatchLayout, reads: Reads) -> ChosenRows | None:
        """Choose the rows of the last layer that a head reads.

        Args:
            hidden: Rows of shape ``(T, H)`` before the first layer.
            layout: Division of the rows into sequences.
            reads: Function that returns a mask of the rows that the head reads; see `Reads`.

        Returns:
            The rows, or None if all rows must be computed. The result is None without a gradient,
            because one call then runs all layers. The result is also None if the head reads more
            than half of the rows, because computing all rows then takes no longer. On a GPU, with
            an attention mask or bias, or with a layer that needs all rows, the result is None too.
        """
        last = self.running()[-1]
        if self.final_norm is not None or not needs_gradient(hidden, *last.parameters()):
            return None
        # On a GPU, the CPU would have to wait for the number of chosen rows.
        if hidden.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        if layout.mask is not None or layout.bias is not None or layout.tokens is not None:
            return None
        if layout.places is not None or not self.plan(hidden).chooses:
            return None
        chosen = choose_rows(hidden, layout, reads)
        few = 2 * chosen.indices.shape[0] <= hidden.shape[0]
        return chosen if few else None

    def running(self) -> list[nn.Module]:
        """Return the layers in the order in which they run."""
        return [self.layer[number] for number in self.order]

    def choice(self, device: str, dtype: torch.dtype, layers: str, length: int = 0) -> Choice:
        """Choose the backend of the layers for inference without attention weights.

        Args:
            device: Type of the device, such as ``"cpu"``.
            dtype: Dtype of the rows.
            layers: Backend of the layers if they run one by one.
            length: Result of ``ops.gpu_times.length_class`` for the length of the sequences.

        Returns:
            A `Choice` with the backend and the reason. If one call runs all layers, the backend is
            that of the call. If operations prevent a single call by their backends, the backend is
            that of the first such operation. Otherwise the backend is `layers`.
        """
        planned = plan(self.running(), Mode.now(device, dtype, False, length=length))
        return Choice(planned.backend or layers, planned.reason)


def chosen_layers(name: str, wanted: bool | Sequence[int], count: int) -> frozenset[int]:
    """Return the numbers that `wanted` chooses among the layers, or among the hidden states.

    Args:
        name: Name of the argument that has the value `wanted`, for the messages of errors.
        wanted: True for all, False for none, or a sequence of numbers. A negative number counts
            from the end.
        count: Number of layers, or of hidden states.

    Returns:
        The numbers, from 0.

    Raises:
        ValueError: If `wanted` has an entry that is not an integer, or is out of range.
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
