"""The six alignment scores of a query s and a key h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.modules.alignment.arguments import require_size
from fastbert.modules.alignment.base import Alignment
from fastbert.modules.alignment.soft import Products
from fastbert.modules.linear import Linear
from fastbert.ops.arguments import require
from fastbert.ops.attention_context import hide_unattended


class ContentBased(Alignment):
    """The cosine of the query and the key, ``β cos(s, h)``.

    The cosine is at most 1, so with ``β = 1`` the largest of Lk weights is at most ``e² / (e² + Lk
    - 1)``. A larger key strength β makes the weights sharper. A query or a key of zeros has the
    cosine 0.

    Args:
        strength: The key strength β, above 0.
        options: `attend`, `local` and `backend`, as in `Alignment`.

    Raises:
        ValueError: If an argument is not allowed.

    Note:
        Graves et al. 2014, section 3.3.1, eq. 5 and 6.

    Examples:
        >>> import torch
        >>> from fastbert.modules import alignment
        >>> query, keys, values = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 6)
        >>> mask = torch.arange(5) < torch.tensor([[5], [3]])  # The lengths are 5 and 3.
        >>> output, weights = alignment.ContentBased()(query, keys, values, mask)
        >>> output.shape, weights.shape
        (torch.Size([2, 3, 6]), torch.Size([2, 3, 5]))
    """

    same_size = True

    def __init__(self, *, strength: float = 1.0, **options: Any) -> None:
        """Store the key strength."""
        super().__init__(**options)
        require(0.0 < strength < float("inf"), "strength", strength, "a finite number > 0")
        self.strength = strength

    def scores(self, query: Tensor, keys: Tensor, mask: Tensor | None) -> Products:
        """Return the products of rows of norm 1."""
        return Products(_unit(query), _unit(hide_unattended(keys, mask)), self.strength)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"strength={self.strength}, {super().extra_repr()}"


class Additive(Alignment):
    """A feed-forward network of the query and the key, ``vᵀ tanh(W [s; h])``.

    W is stored as two matrices, ``W [s; h] = W₁ s + W₂ h``, so each query and each key is projected
    once. The sums of all pairs are computed block by block, in the forward and again in the
    backward; see ``fastbert.ops.additive_scores``.

    Args:
        query_size: Size of a query.
        key_size: Size of a key.
        hidden_size: Number of rows of W.
        options: `attend`, `local` and `backend`, as in `Alignment`.

    Raises:
        ValueError: If an argument is not allowed.

    Note:
        Bahdanau et al. 2015, appendix A.1.2.

    Examples:
        >>> import torch
        >>> from fastbert.modules import alignment
        >>> keys = torch.randn(2, 5, 10)
        >>> output, weights = alignment.Additive(8, 10, 16)(torch.randn(2, 3, 8), keys, keys)
        >>> output.shape, weights.shape
        (torch.Size([2, 3, 10]), torch.Size([2, 3, 5]))
    """

    def __init__(self, query_size: int, key_size: int, hidden_size: int, **options: Any) -> None:
        """Create W and v."""
        super().__init__(query_size, key_size, **options)
        sizes = {"query_size": query_size, "key_size": key_size, "hidden_size": hidden_size}
        for name, size in sizes.items():
            require_size(name, size)
        self.query_projection = Linear(query_size, hidden_size, self.backend, bias=False)
        self.key_projection = Linear(key_size, hidden_size, self.backend, bias=False)
        bound = hidden_size**-0.5
        self.v = nn.Parameter(torch.empty(hidden_size).uniform_(-bound, bound))

    def scores(self, query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """Return the scores of shape ``(B, Lq, Lk)``."""
        keys = self.key_projection(hide_unattended(keys, mask))
        return ops.additive_scores(self.query_projection(query), keys, self.v)


class LocationBased(Alignment):
    """A score for each position that depends on the query alone, ``W s``.

    The keys are not read. The module needs a largest number of keys, because W has a row for each
    position. The scores of a shorter sentence are the first rows.

    Args:
        query_size: Size of a query.
        max_keys: Largest number of keys.
        options: `attend`, `local` and `backend`, as in `Alignment`.

    Raises:
        ValueError: If an argument is not allowed.

    Note:
        Luong et al. 2015, section 3.1, eq. 8.

    Examples:
        >>> import torch
        >>> from fastbert.modules import alignment
        >>> keys = torch.randn(2, 5, 10)
        >>> output, weights = alignment.LocationBased(8, 50)(torch.randn(2, 3, 8), keys, keys)
        >>> output.shape, weights.shape
        (torch.Size([2, 3, 10]), torch.Size([2, 3, 5]))
    """

    def __init__(self, query_size: int, max_keys: int, **options: Any) -> None:
        """Create W."""
        super().__init__(query_size, **options)
        require_size("query_size", query_size)
        require_size("max_keys", max_keys)
        self.max_keys = max_keys
        self.projection = Linear(query_size, max_keys, self.backend, bias=False)

    def scores(self, query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """Return the scores of shape ``(B, Lq, Lk)``."""
        count, allowed = keys.shape[1], f"at most max_keys={self.max_keys}"
        require(count <= self.max_keys, "keys", f"{count} keys", allowed)
        # A product with a weight of no rows is not allowed.
        weight = self.projection.weight[: max(1, count)]
        scores: Any = ops.linear(query, weight, backend=self.projection.backend)
        return scores[:, :, :count]


class General(Alignment):
    """The product of the query and the key through a matrix, ``sᵀ W h``.

    Args:
        query_size: Size of a query.
        key_size: Size of a key.
        options: `attend`, `local` and `backend`, as in `Alignment`.

    Raises:
        ValueError: If an argument is not allowed.

    Note:
        Luong et al. 2015, section 3.1, eq. 7.

    Examples:
        >>> import torch
        >>> from fastbert.modules import alignment
        >>> keys = torch.randn(2, 5, 10)
        >>> output, weights = alignment.General(8, 10)(torch.randn(2, 3, 8), keys, keys)
        >>> output.shape, weights.shape
        (torch.Size([2, 3, 10]), torch.Size([2, 3, 5]))
    """

    def __init__(self, query_size: int, key_size: int, **options: Any) -> None:
        """Create W, as a projection of the query."""
        super().__init__(query_size, key_size, **options)
        require_size("query_size", query_size)
        require_size("key_size", key_size)
        self.projection = Linear(query_size, key_size, self.backend, bias=False)

    def scores(self, query: Tensor, keys: Tensor, mask: Tensor | None) -> Products:
        """Return the products of the projected queries and the keys."""
        return Products(self.projection(query), keys, 1.0)


class Dot(Alignment):
    """The product of the query and the key, ``sᵀ h``.

    Args:
        options: `attend`, `local` and `backend`, as in `Alignment`.

    Note:
        Luong et al. 2015, section 3.1, eq. 7.

    Examples:
        >>> import torch
        >>> from fastbert.modules import alignment
        >>> keys = torch.randn(2, 5, 8)
        >>> output, weights = alignment.Dot()(torch.randn(2, 3, 8), keys, keys)
        >>> output.shape, weights.shape
        (torch.Size([2, 3, 8]), torch.Size([2, 3, 5]))
    """

    same_size = True

    def __init__(self, **options: Any) -> None:
        """Create the module, which has no parameters."""
        super().__init__(**options)

    def scores(self, query: Tensor, keys: Tensor, mask: Tensor | None) -> Products:
        """Return the products of the queries and the keys."""
        return Products(query, keys, 1.0)


class ScaledDot(Dot):
    """The product of the query and the key over the root of their size n, ``sᵀ h / √n``.

    Args:
        options: `attend`, `local` and `backend`, as in `Alignment`.

    Note:
        Vaswani et al. 2017, section 3.2.1, eq. 1.

    Examples:
        >>> import torch
        >>> from fastbert.modules import alignment
        >>> keys = torch.randn(2, 5, 8)
        >>> output, weights = alignment.ScaledDot()(torch.randn(2, 3, 8), keys, keys)
        >>> output.shape, weights.shape
        (torch.Size([2, 3, 8]), torch.Size([2, 3, 5]))
    """

    def scores(self, query: Tensor, keys: Tensor, mask: Tensor | None) -> Products:
        """Return the scaled products of the queries and the keys."""
        return Products(query, keys, query.shape[-1] ** -0.5)


def _unit(x: Tensor) -> Tensor:
    """Return the rows of `x` with norm 1; a row of zeros stays zero. The norms are fp32 or fp64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide / norm.masked_fill(norm == 0.0, 1.0)).to(x.dtype)
