"""The module with which ``fastbert.quantize`` replaces a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.modules.operation import OperationModule
from fastbert.ops.int8_linear import Int8Weight, int8_weight, layout, pack, unpack


class QuantizedLinear(OperationModule):
    """A linear layer with int8 weights for inference, computed by ``fastbert.ops.int8_linear``.

    The weight W is stored once, in the memory layout of the instruction set in use, with one byte
    per element. The properties ``weight`` (int8, ``(N, K)``) and ``scale`` (fp32, ``(N,)``), which
    are also the entries of a state dict, are copies with W ≈ scale · weight. ``scale`` stays fp32
    when the model changes its dtype.

    Args:
        values: Weights, int8 of shape ``(N, K)``.
        scale: Scale of each output, fp32 of shape ``(N,)``.
        bias: Bias of shape ``(N,)``, or None.
        backend: Requested backend; see ``OperationModule``. None lets the operation choose.
    """

    operation = "int8_linear"

    def __init__(
        self, values: Tensor, scale: Tensor, bias: Tensor | None, backend: str | None = None
    ) -> None:
        """Pack the weights."""
        super().__init__(backend)
        self.out_features, self.in_features = values.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        for name in ("prepacked", "padded_scale", "column_sum"):
            self.register_buffer(name, None, persistent=False)
        self._prepack(values, scale)

    @classmethod
    def of(cls, linear: nn.Linear) -> QuantizedLinear:
        """Quantise a linear layer symmetrically, with one scale for each output.

        The bias is shared with `linear`.

        Args:
            linear: The layer whose weight is quantised; it is not changed.

        Returns:
            The quantised layer.
        """
        values, scale = int8_weight(linear.weight)
        return cls(values, scale, linear.bias)

    @classmethod
    def joined(cls, parts: Sequence[QuantizedLinear]) -> QuantizedLinear:
        """Return one layer that computes the outputs of several layers side by side.

        If the outputs of each part fill whole panels of the memory layout, the parts then share
        the memory of the joined weight. The bias is a copy of the biases of the parts.

        Args:
            parts: Quantized layers that share their input.

        Returns:
            The joined layer.
        """
        # Tensors that are made in inference mode could not be changed outside inference mode.
        with torch.inference_mode(False):
            values = torch.cat([part.weight for part in parts])
            scale = torch.cat([part.scale for part in parts])
            biases = [part.bias for part in parts if part.bias is not None]
            zeros = biases[0].new_zeros if biases else scale.new_zeros
            bias = torch.cat([zeros(p.out_features) if p.bias is None else p.bias for p in parts])
            whole = cls(values, scale, bias if biases else None, parts[0].backend)
            # A packed weight consists of panels of `lanes` outputs, and the last panels have zeros.
            sizes = [part.weight_now(whole._layout).packed.shape for part in parts]
            if all(n[0] * n[2] == p.out_features for n, p in zip(sizes, parts, strict=True)):
                panels = whole.prepacked.split([n[0] for n in sizes])
                for part, packed in zip(parts, panels, strict=True):
                    part.prepacked = packed
        return whole.train(parts[0].training)

    def forward(
        self, x: Tensor, return_residual: bool = False, activation: str = "none"
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute ``activation(x Wᵀ + b)``.

        Args:
            x: Input of shape ``(..., K)``.
            return_residual: Whether `x` is returned too, as in ``Linear``.
            activation: ``"none"``, ``"gelu"``, ``"gelu_tanh"``, ``"relu"`` or ``"silu"``.

        Returns:
            Tensor of shape ``(..., N)``. If `return_residual` is True, a pair of this tensor and
            `x`.

        Raises:
            RuntimeError: If the module is in training mode.
        """
        if self.training:
            raise RuntimeError(
                "a quantised model got a call in training mode, allowed: model.eval()"
            )
        weight = self.weight_now(layout())
        y = ops.int8_linear(x, weight, self.bias, activation=activation, backend=self.backend)
        return (y, x) if return_residual else y

    def weight_now(self, layout: tuple[int, int]) -> Int8Weight:
        """Return W in the memory layout `layout`; W is packed again if it has another layout."""
        if self._layout != layout:
            # A buffer that is made in inference mode could not be changed outside inference mode.
            with torch.inference_mode(False):
                self._prepack(*unpack(self._int8()))
        return self._int8()

    @property
    def weight(self) -> Tensor:
        """A copy of the integers of W, int8 of shape ``(N, K)``."""
        return unpack(self._int8())[0]

    @property
    def scale(self) -> Tensor:
        """A copy of the scale of each output, fp32 of shape ``(N,)``."""
        return unpack(self._int8())[1]

    def _int8(self) -> Int8Weight:
        # The buffers are read from the dictionary of the module, because a stack of layers reads
        # many buffers and the attribute lookup of a module is slow.
        own = self._buffers
        return Int8Weight(
            own["prepacked"], own["padded_scale"], own["column_sum"],
            self.out_features, self.in_features,
        )  # fmt: skip

    def _prepack(self, values: Tensor, scale: Tensor) -> None:
        self._layout = layout()
        self.prepacked, self.padded_scale, self.column_sum, *_ = pack(values, scale, *self._layout)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        scale = self.padded_scale
        super()._apply(fn, recurse)
        # `fn` may have converted the scale to a narrower dtype, as it converts every floating
        # tensor.
        if self.padded_scale.dtype != torch.float32:
            self.padded_scale = scale.to(self.padded_scale.device)
        return self

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        state[f"{prefix}weight"], state[f"{prefix}scale"] = unpack(self._int8())
        super()._save_to_state_dict(state, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        values, scale = unpack(self._int8())
        stored = []
        for name, old in (("weight", values), ("scale", scale)):
            new = state.pop(f"{prefix}{name}", None)
            if new is None:
                missing.append(f"{prefix}{name}")
            elif new.shape != old.shape or new.dtype != old.dtype:
                errors.append(
                    f"{prefix}{name}: got {new.dtype} {tuple(new.shape)}, allowed: {old.dtype} "
                    f"{tuple(old.shape)}, the state of a quantised model"
                )
                new = None
            stored.append(new)
        if all(new is not None for new in stored):
            self._prepack(*(new.detach().to(self.prepacked.device) for new in stored))
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, int8"
