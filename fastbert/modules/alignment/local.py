"""Local attention: the window of keys to which a query attends (Luong et al. 2015)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastbert.modules.alignment.arguments import require_size


def _places(mask: Tensor) -> Tensor:
    """Return the position of each key among the keys that the mask allows, from 0."""
    return mask.cumsum(dim=-1) - 1


class Monotonic(nn.Module):
    """A window around the query's own position, for sentences in roughly the same order.

    Query t attends to the keys from t - D to t + D. Their weights are the softmax of their scores.
    Positions count the keys that the mask allows, so that padding does not move them. A query whose
    window has no key has an output of 0.

    Args:
        window: The largest distance D between a query and its keys, at least 0.

    Raises:
        ValueError: If `window` is not allowed.

    Note:
        Luong et al. 2015, section 3.2, local-m.

    Examples:
        >>> import torch
        >>> from fastbert.modules import alignment
        >>> near = alignment.Dot(local=alignment.Monotonic(1))
        >>> _, weights = near(torch.zeros(1, 3, 4), torch.zeros(1, 5, 4), torch.zeros(1, 5, 4))
        >>> weights[0].round(decimals=2)
        tensor([[0.5000, 0.5000, 0.0000, 0.0000, 0.0000],
                [0.3300, 0.3300, 0.3300, 0.0000, 0.0000],
                [0.0000, 0.3300, 0.3300, 0.3300, 0.0000]])
    """

    def __init__(self, window: int) -> None:
        """Store the window."""
        super().__init__()
        require_size("window", window, least=0)
        self.window = window

    def forward(self, query: Tensor, mask: Tensor, first_position: int) -> tuple[Tensor, None]:
        """Return the mask inside the window.

        Args:
            query: Queries of shape ``(B, Lq, D)``.
            mask: Bool mask of shape ``(B or 1, Lq or 1, Lk)``.
            first_position: Position of the first query, at least 0.

        Returns:
            The mask inside the window, broadcastable to ``(B, Lq, Lk)``, and None, because there
            are no factors.

        Raises:
            ValueError: If `first_position` is not allowed.
        """
        require_size("first_position", first_position, least=0)
        positions = torch.arange(query.shape[1], device=query.device) + first_position
        distance = _places(mask) - positions.unsqueeze(-1)
        return mask & (distance.abs() <= self.window), None

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return str(self.window)


class Predictive(nn.Module):
    """A window around a position that is predicted from the query, with a Gaussian inside.

    The centre of query s in a sentence of S keys is ``p = S · sigmoid(vᵀ tanh(W s))``. The query
    attends to the keys at most D from p. The softmax of the scores in this window is multiplied by
    ``exp(-(position - p)² / 2σ²)`` with ``σ = D / 2``. The products are not normalized again, so
    the weights of a query have a sum of at most 1. Positions count the keys that the mask allows,
    from 0, and S is their number.

    Args:
        query_size: Size of a query.
        window: The largest distance D between the centre and a key, at least 1.
        hidden_size: Number of rows of W; `query_size` by default.

    Raises:
        ValueError: If an argument is not allowed.

    Note:
        Luong et al. 2015, section 3.2, local-p, eq. 9 and 10.
    """

    def __init__(self, query_size: int, window: int, hidden_size: int | None = None) -> None:
        """Create the parameters of the prediction."""
        super().__init__()
        hidden_size = query_size if hidden_size is None else hidden_size
        sizes = {"query_size": query_size, "window": window, "hidden_size": hidden_size}
        for name, size in sizes.items():
            require_size(name, size)
        self.window = window
        self.projection = nn.Linear(query_size, hidden_size, bias=False)
        self.v = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, query: Tensor, mask: Tensor, first_position: int) -> tuple[Tensor, Tensor]:
        """Return the mask inside the window, and the Gaussian.

        Args:
            query: Queries of shape ``(B, Lq, query_size)``.
            mask: Bool mask of shape ``(B or 1, Lq or 1, Lk)``.
            first_position: Not read, because the centre is predicted.

        Returns:
            The mask inside the window and the Gaussian, both of shape ``(B, Lq, Lk)``. The Gaussian
            has at least the dtype fp32.

        Raises:
            ValueError: If the size of `query` is not allowed.
        """
        size = self.projection.in_features
        if query.shape[-1] != size:
            raise ValueError(f"query: got shape {tuple(query.shape)}, allowed: (B, Lq, {size})")
        logit = self.v(self.projection(query).tanh())
        share = logit.to(torch.promote_types(logit.dtype, torch.float32)).sigmoid()
        distance = _places(mask) - mask.sum(dim=-1, keepdim=True) * share
        # With σ = D / 2, (position - p)² / 2σ² is 2 (position - p)² / D².
        gaussian = (-2.0 * (distance / self.window).square()).exp()
        return mask & (distance.detach().abs() <= self.window), gaussian

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"window={self.window}"
