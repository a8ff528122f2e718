"""One row per token from the hidden states of chosen layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COMBINATIONS = ("concat", "sum", "mean")


class LayerStates:
    """The hidden states of chosen layers, combined into one row per token.

    Devlin et al. 2019 (section 5.3) concatenate or sum the last four layers of a frozen BERT.

    Attributes:
        numbers: Numbers of the states, from 0.
        combine: Name of the combination; None if there is one state.
        factor: Width of the combined rows, divided by the hidden size.

    Args:
        layers: Numbers of the states. State 0 is the embedding output, state N is the output of
            layer N, and a negative number counts from the last state. None is the last state.
        combine: ``"concat"`` puts the states side by side in the order of `layers`, ``"sum"`` adds
            the states, and ``"mean"`` averages them. None is ``"concat"``.
        count: Number of states of the encoder, which is the number of layers plus 1.

    Raises:
        ValueError: If `layers` is empty, names a state twice or names a state that does not exist,
            if `combine` is unknown, or if `combine` is not None while `layers` is None.
    """

    def __init__(self, layers: Sequence[int] | None, combine: str | None, count: int) -> None:
        """Check the arguments."""
        if combine is not None and combine not in COMBINATIONS:
            raise ValueError(f"combine: got {combine!r}, allowed: {', '.join(COMBINATIONS)}")
        if combine is not None and layers is None:
            raise ValueError(f"combine: got {combine!r} without layers, allowed: with layers")
        chosen = (-1,) if layers is None else tuple(layers)
        sound = all(type(number) is int and -count <= number < count for number in chosen)
        self.numbers = tuple(number % count for number in chosen) if sound else ()
        if not self.numbers or len(set(self.numbers)) < len(chosen):
            got = ", ".join(map(str, chosen)) or "none"
            raise ValueError(
                f"layers: got {got}, allowed: different numbers from {-count} to {count - 1}, at "
                "least one"
            )
        self.combine = (combine or "concat") if len(chosen) > 1 else None
        self.factor = len(chosen) if self.combine == "concat" else 1

    def rows(self, states: Sequence[Tensor | None]) -> Tensor:
        """Combine the chosen states; a sum or a mean of 16-bit states is computed in fp32.

        Args:
            states: All states of the encoder, each of shape ``(T, H)``. A state that was not chosen
                may be None.

        Returns:
            Tensor of shape ``(T, factor · H)``.
        """
        chosen = [state for number in self.numbers if (state := states[number]) is not None]
        if self.combine is None:
            return chosen[0]
        if self.combine == "concat":
            return torch.cat(chosen, dim=-1)
        total = chosen[0].float()
        for state in chosen[1:]:
            total = total + state
        return total if self.combine == "sum" else total / len(chosen)
