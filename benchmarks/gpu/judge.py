"""The comparison of an implementation's results with the results of the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gpu.match import Contender, Match
from fastbert import reference
from fastbert.bench.attention_peers import leaves
from fastbert.bench.limits import BACKWARD
from fastbert.testing.cases import Inputs
from fastbert.testing.compare import Comparison, compare

# At most this many elements of a tensor are compared, to save time.
COMPARED = 1 << 18


class Judge:
    """Compares outputs or gradients with the float64 reference on the first set of inputs.

    With dropout, only fastbert is compared, because only fastbert draws the mask of the reference.
    """

    def __init__(self, match: Match, inputs: Inputs) -> None:
        self.match, self.inputs = match, inputs
        self.dout: Tensor | None = None
        self._expected: tuple[list[Tensor], list[Tensor]] | None = None

    def gradient(self, shape: torch.Size, like: Tensor) -> Tensor:
        """Return a random output gradient, drawn once in bf16, and thus equal in all dtypes."""
        if self.dout is None:
            self.dout = torch.randn(shape, device=like.device).bfloat16()
        return self.dout.to(like.dtype)

    def expected(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the reference's outputs or gradients in float64 and in the dtype of the match."""
        if self._expected is None:
            exact = self.inputs.map(
                lambda _, v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            )
            self._expected = (self._reference(exact), self._reference(self.inputs))
        return self._expected

    def _reference(self, inputs: Inputs) -> list[Tensor]:
        function = getattr(reference, self.match.op)
        ready = leaves(inputs)
        with torch.set_grad_enabled(self.match.direction == BACKWARD):
            out = function(*ready.positional.values(), **ready.keyword)
        if self.match.direction != BACKWARD:
            return [sample(out)]
        named = dict(ready.items())
        targets = [named[name] for name in inputs.gradients]
        gradients = torch.autograd.grad(out, targets, self.gradient(out.shape, out))
        return [sample(gradient) for gradient in gradients]

    def compare(self, contender: Contender, results: Sequence[Tensor]) -> list[Comparison]:
        """Return a comparison for each tensor, or an empty list if no reference applies.

        There is no reference without a case, for a contender with another function, and for a peer
        with dropout.
        """
        if self.match.case is None or not contender.same_function:
            return []
        if self.match.case.options.get("dropout_p") and not contender.ours:
            return []
        backward = self.match.direction == BACKWARD
        names = [f"d{name}" for name in self.inputs.gradients] if backward else ["out"]
        tensors = [sample(result) for result in results]
        return [
            compare(name, tensor if contender.ours else tensor.to(best.dtype), oracle, best)
            for name, tensor, oracle, best in zip(names, tensors, *self.expected(), strict=True)
        ]

    def forget(self) -> None:
        """Free the memory of the reference's results before the timing."""
        self._expected = self.dout = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def sample(x: Tensor) -> Tensor:
    """Return evenly spaced elements of ``x``, so that large tensors are compared quickly."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // COMPARED) | 1)].clone()
