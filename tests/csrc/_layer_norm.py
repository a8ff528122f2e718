"""Random inputs of layer norm, with results of the PyTorch reference and of the C++ operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastbert import reference

SEED = 0x0123456789ABCDEF
EPS = 1e-12


@dataclass
class Problem:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    x_bias: Tensor | None
    dy: Tensor
    dropout_p: float
    seed: Tensor

    def gradients(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the PyTorch reference's result and gradients, computed in ``dtype``."""
        inputs = {
            name: getattr(self, name).detach().to(dtype).requires_grad_()
            for name in ("x", "weight", "bias", "residual", "x_bias")
            if getattr(self, name) is not None
        }
        y = reference.layer_norm(
            **({"bias": None} | inputs), dropout_p=self.dropout_p, dropout_seed=self.seed, eps=EPS
        )
        y.backward(self.dy.to(dtype))
        return {"y": y.detach()} | {f"d{name}": t.grad for name, t in inputs.items()}

    def forward(self, operators) -> tuple[Tensor, Tensor, Tensor]:
        optional = (self.residual, self.x_bias, self.seed, self.dropout_p)
        return operators.layer_norm_forward(self.x, self.weight, self.bias, *optional, EPS)

    def run(self, operators) -> dict[str, Tensor]:
        """Return the C++ operators' result and gradients, with the names of ``gradients``."""
        y, mean, rstd = self.forward(operators)
        optional = (self.residual, self.x_bias, self.seed, self.bias is not None, self.dropout_p)
        dsum, dx, dweight, dbias, dx_bias = operators.layer_norm_backward(
            self.dy, self.x, self.weight, mean, rstd, *optional
        )
        results = {"y": y, "dweight": dweight, "dx": dx if self.dropout_p > 0 else dsum}
        if self.bias is not None:
            results["dbias"] = dbias
        else:
            assert dbias.shape == (0,)
        if self.residual is not None:
            results["dresidual"] = dsum
        if self.x_bias is not None:
            results["dx_bias"] = dx_bias
        return results


def problem(
    rows, columns, dtype, *, bias=True, residual=True, x_bias=True, dropout_p=0.0
) -> Problem:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    return Problem(
        x=draw(rows, columns),
        weight=draw(columns),
        bias=draw(columns) if bias else None,
        residual=draw(rows, columns) if residual else None,
        x_bias=draw(columns) if x_bias else None,
        dy=draw(rows, columns),
        dropout_p=dropout_p,
        seed=torch.tensor([SEED]),
    )
