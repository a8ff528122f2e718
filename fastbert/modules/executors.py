"""The four executors of fused layers, for inference and training on the CPU and on the GPU.

An executor is made once for a plan (``fastbert.modules.plan``), from the parameters and the
settings of the layers, and runs any number of calls. The executors of the GPU choose between Triton
and CUDA C++ for each operation. They also take CPU tensors if a substitute, such as Triton's
interpreter, executes the kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastbert import ops
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.chosen_rows import ChosenRows
from fastbert.modules.dropout import NO_SEEDS, LayerSeeds
from fastbert.modules.relative_attention import RelativeSelfAttention
from fastbert.ops.backend import Request
from fastbert.ops.cpu_layer import LayerSettings, Sequences, cpu_layer
from fastbert.ops.gpu_layer import gpu_layer
from fastbert.ops.gpu_times import length_class, rows_class
from fastbert.ops.layer_parts import Parts, choose_parts
from fastbert.ops.layer_weights import LayerWeights
from fastbert.ops.register import TENSOR_TYPES, is_watched


class Settings(NamedTuple):
    """The settings that the layers of a plan share, and the settings of each layer.

    Only `scales`, `dropouts`, `bases`, `windows` and `relative` have entries for each layer.

    Attributes:
        heads: Number of attention heads.
        key_value_heads: Number of heads of the keys and values.
        head_dim: Width of a head.
        eps: Term that is added to the variance in layer norms.
        activation: Name of the activation.
        dtype: Dtype in which matrix products are computed.
        backend: Backend of the layers, ``"cpu"`` or ``"triton"``.
        requested: Maps the name of each operation to the backend that its modules ask for; None if
            the operation chooses.
        scales: Scales and column sums of int8 weights of all layers; empty for other weights.
        dropouts: Dropout probabilities of each layer in training: for the attention weights, before
            both residual additions, and in a `PreNormLayer` also in its layer norms. Empty in
            inference.
        bases: Base of the rotary embedding of each layer; empty without rotary embeddings.
        windows: Largest distance between a query and its keys in each layer, -1 without a limit;
            empty if no layer has a limit.
        relative: The self-attention of each layer with relative positions; empty without them.
        scale: Factor of the attention logits; None for the default.
        pre_norm: Whether the layer norms are before attention and feed-forward.
        rms_norm: Whether the norms are RMS norms.
    """

    heads: int
    key_value_heads: int
    head_dim: int
    eps: float
    activation: str
    dtype: torch.dtype
    backend: str
    requested: dict[str, str | None]
    scales: tuple[Tensor, ...] = ()
    dropouts: tuple[tuple[float, ...], ...] = ()
    bases: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()
    relative: tuple[RelativeSelfAttention, ...] = ()
    scale: float | None = None
    pre_norm: bool = False
    rms_norm: bool = False


class Call(NamedTuple):
    """One call of the layers.

    Attributes:
        hidden: Rows of shape ``(T, H)`` before the first layer.
        layout: Division of the rows into sequences.
        after: Function that takes the number of a layer, counted from 1, and the rows after that
            layer. The function returns the input of the next layer.
        between: Whether `after` must be called after every layer, not only after the last layer.
        seeds: Dropout seeds of each layer; None if there are none.
        chosen: The rows that the last layer computes; None computes all rows.
        recompute: Whether the backward pass computes the activations of a layer again, so that they
            need not be stored.
    """

    hidden: Tensor
    layout: BatchLayout
    after: Callable[[int, Tensor], Tensor]
    between: bool = False
    seeds: Sequence[LayerSeeds] | None = None
    chosen: ChosenRows | None = None
    recompute: bool = False


class Executor:
    """The base of the executors.

    Args:
        layers: The parameters of the layers in the order in which they run.
        settings: The settings of the layers.
    """

    def __init__(self, layers: list[LayerWeights], settings: Settings) -> None:
        """Store the parameters in the order in which the kernels take them."""
        self.layers = [layer.flat() for layer in layers]
        self.parameters = [tensor for layer in self.layers for tensor in layer]
        self.settings = settings
        self.projections = len(layers[0].qkv)
        self.inner_projections = len(layers[0].inner)

    def refuses(self, call: Call) -> str | None:
        """Return the reason why the executor cannot run a call, or None if it can."""
        raise NotImplementedError

    def run(self, call: Call) -> Tensor:
        """Run the layers, and return the result of ``call.after`` for the last layer.

        Args:
            call: A call that the executor does not refuse.

        Returns:
            Rows of shape ``(T, H)``, or ``(N, H)`` if ``call.chosen`` selects N rows.
        """
        raise NotImplementedError

    def parts(self, call: Call) -> Parts:
        """Return the backend of each operation that exists both in Triton and in CUDA C++."""
        settings, hidden, layout = self.settings, call.hidden, call.layout
        columns, on_gpu = hidden.shape[1], hidden.device.type == "cuda"
        request = Request(
            hidden.device.type,
            settings.dtype,
            head_dim=settings.head_dim,
            options=() if layout.bias is None else ("bias",),
            activation=settings.activation,
            columns=columns,
            length=length_class(layout.longest) if on_gpu else 0,
            rows=rows_class(hidden.shape[0]) if on_gpu else 0,
            trained=bool(settings.dropouts),
        )
        return choose_parts(request, hidden.dtype, settings.requested)


class CpuInference(Executor):
    """Runs all layers in one C++ call, without gradients."""

    def refuses(self, call: Call) -> str | None:
        """Refuse distances over padding between tokens, and a bias with relative positions."""
        distances = self.settings.windows or self.settings.relative
        if distances and call.layout.places is not None:
            return "a window or relative positions over padding in a sequence"
        if self.settings.relative and call.layout.bias is not None:
            return "attention has relative positions and an additive mask"
        return None

    def run(self, call: Call) -> Tensor:
        """Run the layers; see `Executor.run`."""
        return self._run(call, Parts())

    def _run(self, call: Call, parts: Parts) -> Tensor:
        settings, layout = self.settings, call.layout
        relative = settings.relative
        outputs = ops.encoder(
            call.hidden,
            self.parameters,
            layout.cu_seqlens,
            layout.longest,
            batch=layout.batch,
            heads=settings.heads,
            key_value_heads=settings.key_value_heads,
            projections=self.projections,
            scales=settings.scales,
            mask=layout.mask,
            bias=layout.bias,
            rotations=[part for base in settings.bases for part in layout.rotations[base]],
            windows=settings.windows,
            positions=[table for a in relative for table in a.tables(layout, settings.dtype)],
            scale=settings.scale,
            inner_projections=self.inner_projections,
            pre_norm=settings.pre_norm,
            rms_norm=settings.rms_norm,
            eps=settings.eps,
            activation=settings.activation,
            dtype=settings.dtype,
            all_states=call.between,
            backend=settings.backend,
            attention_backend=parts.attention,
            feed_forward_backend=parts.feed_forward,
            layer_norm_backend=parts.layer_norm,
        )
        first = len(self.layers) + 1 - len(outputs)
        for number, rows in enumerate(outputs, first):
            last = call.after(number, rows)
        return last


class GpuInference(CpuInference):
    """Runs all layers in one Python function that launches the kernels, without gradients."""

    def refuses(self, call: Call) -> str | None:
        """Refuse a bias together with ``cu_seqlens``, and all calls that `CpuInference` refuses."""
        if call.layout.cu_seqlens is not None and call.layout.bias is not None:
            return "a bias by distance"
        return super().refuses(call)

    def run(self, call: Call) -> Tensor:
        """Run the layers; see `Executor.run`."""
        return self._run(call, self.parts(call))


class _Training(Executor):
    """Runs each layer as one autograd function, and calls `Call.after` after each layer."""

    def refuses(self, call: Call) -> str | None:
        if type(call.hidden) not in TENSOR_TYPES or is_watched():
            return "something watches the operators, or the rows are of a class of their own"
        for i, dropouts in enumerate(self.settings.dropouts):
            given = NO_SEEDS if call.seeds is None else call.seeds[i]
            if any(dropouts) and any(seed is None for seed in given[:3]):
                return "a dropout has no seed"
        return None

    def run(self, call: Call) -> Tensor:
        hidden, run_layer = call.hidden, self._layer(call)
        for i in range(len(self.layers)):
            if call.recompute:
                rows = checkpoint(run_layer, i, hidden, use_reentrant=False)
            else:
                rows = run_layer(i, hidden)
            hidden = call.after(i + 1, rows)
        return hidden

    def _layer(self, call: Call) -> Callable[[int, Tensor], Tensor]:
        """Return a function of a layer's number, from 0, and of rows, which runs that layer."""
        raise NotImplementedError


class CpuTraining(_Training):
    """Runs each layer as one autograd function in C++."""

    def refuses(self, call: Call) -> str | None:
        """Refuse masks, biases, and all calls that `_Training` refuses.

        A layout with `tokens` or `places` is refused too; see `BatchLayout`.
        """
        layout = call.layout
        if layout.mask is not None or layout.bias is not None or layout.tokens is not None:
            return "attention has a mask or a bias"
        if layout.places is not None:
            return "a sequence has padding in its middle"
        return super().refuses(call)

    def _layer(self, call: Call) -> Callable[[int, Tensor], Tensor]:
        layout, settings, last = call.layout, self.settings, len(self.layers) - 1
        ends, longest = layout.cu_seqlens, layout.longest
        every = of_last = Sequences(None, ends, ends, longest, longest, layout.batch)
        if call.chosen is not None:
            own = call.chosen.layout
            of_last = Sequences(
                call.chosen.indices,
                own.cu_seqlens,
                layout.ends(call.hidden.device),
                own.max_seqlen,
                longest,
                own.batch,
            )

        def run(i: int, rows: Tensor) -> Tensor:
            first, second, third = settings.dropouts[i][:3]
            numbers = LayerSettings(
                (first, second, third),
                settings.heads,
                self.projections,
                self.inner_projections,
                settings.windows[i] if settings.windows else -1,
                settings.pre_norm,
                settings.eps,
                settings.activation,
                settings.dtype,
            )
            dropping = call.seeds is not None and any(settings.dropouts[i])
            seeds = call.seeds[i][:3] if call.seeds is not None and dropping else ()
            sequences = of_last if i == last else every
            rotation = layout.rotations[settings.bases[i]] if settings.bases else ()
            return cpu_layer(rows, self.layers[i], sequences, seeds, rotation, numbers)

        return run


class GpuTraining(_Training):
    """Runs each layer as one autograd function that launches GPU kernels."""

    def refuses(self, call: Call) -> str | None:
        """Refuse chosen rows, a bias with a gradient, and all calls that `_Training` refuses."""
        if call.chosen is not None:
            return "the last layer computes chosen rows only"
        if call.layout.bias is not None and call.layout.bias.requires_grad:
            return "the bias of attention needs a gradient"
        return super().refuses(call)

    def _layer(self, call: Call) -> Callable[[int, Tensor], Tensor]:
        layout, settings, longest = call.layout, self.settings, call.layout.longest
        full = (layout.batch, settings.heads, longest, longest)
        # The kernels take masks and biases of the full shape. `expand` makes views of this shape,
        # in which a broadcast dimension has stride 0.
        mask = None if layout.mask is None else layout.mask.expand(full)
        bias = None if layout.bias is None else layout.bias.to(settings.dtype).expand(full)
        numbers = (
            *(layout.batch, longest, settings.heads),
            *(settings.eps, settings.activation, settings.dtype),
        )
        parts = self.parts(call)

        def run(i: int, rows: Tensor) -> Tensor:
            own = NO_SEEDS if call.seeds is None else call.seeds[i]
            inputs = (layout.cu_seqlens, mask, bias, *own[:3])
            shape = (*numbers, *settings.dropouts[i])
            return gpu_layer(rows, self.layers[i], inputs, shape, parts)

        return run
