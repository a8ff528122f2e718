"""The interface that all alignment scores share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastbert.modules.alignment import hard, soft
from fastbert.modules.alignment.arguments import checked_mask, require_inputs
from fastbert.modules.alignment.local import Monotonic, Predictive
from fastbert.modules.operation import OperationModule
from fastbert.ops.arguments import autocast

ATTEND = ("soft", "hard")


class Alignment(OperationModule):
    """The base of the alignment scores, ``(query, keys, values, mask) → (output, weights)``.

    A subclass defines `scores`. This class turns the scores into weights and the weights into the
    output. With soft attention, the weights of a query are the softmax of its scores, and the
    output is the weighted sum of the values. With hard attention, the output is the value at one
    position: in training mode a position that is drawn from the softmax, and otherwise the
    position of the largest weight.

    Args:
        query_size: Size of a query; None allows any size.
        key_size: Size of a key; None allows any size, or the size of the query if `same_size`.
        attend: ``"soft"`` or ``"hard"``.
        local: The module that limits the attention of each query to a window of keys: a `Monotonic`
            or a `Predictive`. None lets each query attend to all keys.
        backend: Requested backend of the attention operation; see ``OperationModule``.

    Attributes:
        same_size: Whether queries and keys must have the same size.

    Raises:
        ValueError: If `attend` is not allowed.
        TypeError: If `local` is not allowed.
    """

    operation = "attention"
    same_size = False

    def __init__(
        self,
        query_size: int | None = None,
        key_size: int | None = None,
        *,
        attend: str = "soft",
        local: Monotonic | Predictive | None = None,
        backend: str | None = None,
    ) -> None:
        """Store the settings."""
        super().__init__(backend)
        if attend not in ATTEND:
            raise ValueError(f"attend: got {attend!r}, allowed: {', '.join(ATTEND)}")
        if not (local is None or isinstance(local, (Monotonic, Predictive))):
            raise TypeError(f"local: got {type(local).__name__}, allowed: Monotonic, Predictive")
        self.query_size = query_size
        self.key_size = key_size
        self.attend = attend
        self.local: nn.Module | None = local

    def scores(self, query: Tensor, keys: Tensor, mask: Tensor | None) -> soft.Scores:
        """Return the score of each pair of a query and a key.

        Args:
            query: Queries of shape ``(B, Lq, Dq)``.
            keys: Keys of shape ``(B, Lk, Dk)``.
            mask: Bool mask, broadcastable to ``(B, Lq, Lk)``, True where a query attends to a key;
                or None. Keys that no query attends to may be NaN.

        Returns:
            The scores as ``soft.Products``, or as a tensor of shape ``(B, Lq, Lk)``.
        """
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        *,
        first_position: int = 0,
        generator: torch.Generator | None = None,
        return_log_probability: bool = False,
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        """Attend to the keys.

        A query that attends to no key has an output and weights of exactly 0, and gradients of
        exactly 0. Keys and values that no query attends to do not change a result, even if they
        are NaN.

        Args:
            query: Queries of shape ``(B, Lq, Dq)``; fp32, fp16, bf16 or fp64.
            keys: Keys of shape ``(B, Lk, Dk)`` in the dtype of `query`.
            values: Values of shape ``(B, Lk, Dv)`` in the dtype of `query`.
            mask: Bool mask, True where a query attends to a key; of shape ``(B, Lk)``, or
                broadcastable to ``(B, Lq, Lk)``. None lets every query attend to every key.
            first_position: Position of the first query, for a decoder that calls the module once
                for each word. Only `Monotonic` reads it.
            generator: Generator on the device of `query` that draws the positions of hard
                attention; None is torch's generator of the device.
            return_log_probability: Whether the log-probability of the positions of hard attention
                is returned too. Without it, the scores of hard attention get no gradient.

        Returns:
            The output of shape ``(B, Lq, Dv)`` and the weights of shape ``(B, Lq, Lk)``, both in
            the dtype of `query`, or in autocast's dtype under autocast. The output is the sum of
            the values times these weights; with hard attention, the weights are 1 at the position
            of each query and 0 elsewhere. With `return_log_probability`, also the log-probability
            of the position of each query, of shape ``(B, Lq)``, in fp64 for fp64 inputs and in fp32
            otherwise. It is 0 for a query that attends to no key.

        Raises:
            ValueError: If a shape, a device or a value is not allowed. The message names the
                argument, its value and what is allowed.
            TypeError: If a dtype is not allowed.
        """
        is_hard = self.attend == "hard"
        if return_log_probability and not is_hard:
            raise ValueError(
                "return_log_probability: got True, allowed: False with attend='soft', which draws "
                "no positions"
            )
        query, keys, values = autocast(query, keys, values)
        require_inputs(query, keys, values, self.query_size, self.key_size, self.same_size)
        mask = checked_mask(mask, query, keys)
        factors = None
        if self.local is not None:
            mask = query.new_ones(1, 1, 1, dtype=torch.bool) if mask is None else mask
            mask = mask.expand(*mask.shape[:2], keys.shape[1])
            mask, factors = self.local(query, mask, first_position)
        scores = self.scores(query, keys, mask)
        if not is_hard:
            return soft.attend(scores, values, mask, factors, self.backend)
        probabilities = hard.probabilities(scores, mask, factors, self.backend)
        output, weights, log_probability = hard.attend(
            probabilities, values, self.training, generator
        )
        return (output, weights, log_probability) if return_log_probability else (output, weights)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        sizes = [str(size) for size in (self.query_size, self.key_size) if size is not None]
        return ", ".join([*sizes, f"attend={self.attend!r}"])
