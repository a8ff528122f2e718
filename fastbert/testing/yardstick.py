"""The yardstick of the tolerance rule: the reference in the tested dtype, with two kinds of sums.

PyTorch chooses the order of the summation in a product, a sum or a mean by processor and shape. One
library sums a row in a single chain. Another library sums a row in sixteen chains and is up to 1.6
times more exact. A result must not depend on that choice. A `Yardstick` therefore also runs the
reference with sums in fixed orders, whose bits are the same on every processor.

A product in a fixed order rounds each term and each partial sum to fp32. It adds chains of
``CHAIN`` consecutive terms and then adds the chains, first to last. A sum is the product with ones.
Order 0 takes the terms as they are; every other order shuffles them first.

The errors of a large tensor hardly differ between orders. The errors of a few elements, or of one
dominant element, differ like independent draws, so that the largest of them is a bound and not one
lucky rounding.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

# A chain has this many terms. BLAS libraries keep a sum in a register for 128 to 512 terms.
CHAIN = 128
# Number of fixed orders of summation in which a `Yardstick` runs the reference.
ORDERS = 16


class Yardstick:
    """The result of the reference in the tested dtype, by torch and, on demand, in fixed orders.

    ``yardstick[key]`` is the yardstick of a part of the result, and ``yardstick.map(function)`` is
    the yardstick of a function of the result. The attribute ``library`` is the result by torch.

    Args:
        run: Function that computes a tensor, or a container of tensors, from scratch at every call.
            The state of torch's random numbers on the CPU is the same at every call.
        keep: Whether the results in fixed orders are stored. With False, a second call of
            `in_fixed_orders` computes the results again.
    """

    def __init__(self, run: Callable[[], Any], *, keep: bool = True) -> None:
        """Run the reference by torch, and store the state of torch's random numbers."""
        state = torch.get_rng_state()

        def result(order: int | None) -> Any:
            if order is None:
                return run()
            with torch.random.fork_rng(devices=()), fixed_order_sums(order):
                torch.set_rng_state(state)
                return run()

        self._result = functools.cache(result) if keep else result
        self.library: Any = self._result(None)

    def map(self, function: Callable[[Any], Any]) -> Yardstick:
        """Return the yardstick of a function of the result."""
        mapped = copy.copy(self)
        mapped._result = functools.cache(lambda order: function(self._result(order)))
        mapped.library = mapped._result(None)
        return mapped

    def __getitem__(self, key: Any) -> Yardstick:
        """Return the yardstick of a part of the result."""
        return self.map(lambda result: result[key])

    def __iter__(self) -> Iterator[Yardstick]:
        """Yield the yardstick of each element of the result."""
        return (self[index] for index in range(len(self.library)))

    def in_fixed_orders(self) -> Iterator[Any]:
        """Yield the result in each of the fixed orders in turn."""
        return (self._result(order) for order in range(ORDERS))


def each(function: Callable[[Any], Any], *sides: Any) -> list[Any]:
    """Apply a function to each side of a comparison; a yardstick becomes another yardstick.

    Args:
        function: Function that computes a part of a result.
        sides: Results and yardsticks.

    Returns:
        The new sides, in order.
    """
    return [side.map(function) if isinstance(side, Yardstick) else function(side) for side in sides]


def run_sides(function: Callable[[Any], Any], actual: Any, oracle: Any, stock: Any) -> list[Any]:
    """Apply a function to a tested model, to its float64 oracle and to the stock model.

    Args:
        function: Function that computes a result from a model.
        actual: The tested model.
        oracle: The model in float64.
        stock: The model in the tested dtype, whose result is the yardstick.

    Returns:
        The result of `actual`, the result of `oracle`, and the `Yardstick` of `stock`.
    """
    return [function(actual), function(oracle), Yardstick(lambda: function(stock))]


def fixed_order_product(a: Tensor, b: Tensor, order: int = 0) -> Tensor:
    """Compute the matrix product of two tensors in a fixed order of summation.

    Args:
        a: Tensor of shape ``(*, M, K)``.
        b: Tensor of shape ``(*, K, N)``.
        order: Order of the terms: 0 leaves the terms as they are, and another number seeds a
            shuffle.

    Returns:
        Tensor of shape ``(*, M, N)`` in the dtype of `a`, or in fp32 if `a` is narrower.

    Examples:
        >>> import torch
        >>> from fastbert.testing.yardstick import fixed_order_product
        >>> fixed_order_product(torch.ones(2, 3).half(), torch.ones(3, 2).half())
        tensor([[3., 3.],
                [3., 3.]])
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    depth = a.shape[-1]
    if order:
        shuffled = torch.randperm(depth, generator=torch.Generator().manual_seed(order))
        a, b = a[..., shuffled], b[..., shuffled, :]
    chains = max(1, -(-depth // CHAIN))
    rest = chains * CHAIN - depth
    # The shapes become [chains, ..., M, CHAIN] and [chains, ..., CHAIN, N].
    a = F.pad(a.to(dtype), (0, rest)).unflatten(-1, (chains, CHAIN)).movedim(-2, 0)
    b = F.pad(b.to(dtype), (0, 0, 0, rest)).unflatten(-2, (chains, CHAIN)).movedim(-3, 0)
    sums = a.new_zeros((*a.shape[:-1], b.shape[-1]))
    terms = torch.zeros_like(sums)
    for k in range(min(depth, CHAIN)):
        # The multiplication and the addition are separate operations, so that every processor
        # rounds twice; a fused multiply-add would round once.
        sums += torch.mul(a[..., k, None], b[..., k, None, :], out=terms)
    return functools.reduce(torch.add, sums)


@contextlib.contextmanager
def fixed_order_sums(order: int = 0) -> Iterator[None]:
    """Compute torch's products, sums and means of fp32, fp16 and bf16 in a fixed order.

    Args:
        order: Order of the terms, as in `fixed_order_product`.
    """
    # A dispatch mode does not see the products inside fused attention. The math backend of torch's
    # attention runs each product as an operator.
    with sdpa_kernel(SDPBackend.MATH), _FixedOrderSums(order):
        yield


class _FixedOrderSums(TorchDispatchMode):
    def __init__(self, order: int) -> None:
        super().__init__()
        self.order = order

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        compute = FIXED_ORDER.get(function)
        if compute is not None and args[0].dtype in (torch.float32, torch.float16, torch.bfloat16):
            return compute(self.order, *args, **kwargs)
        # In inference mode, torch does not decompose compound operations.
        if function._can_decompose():
            with self:
                return function.decompose(*args, **kwargs)
        # The reference backend is an operator in Python, whose products need the fixed order too.
        if function.namespace == "fastbert":
            device = next(x.device.type for x in args if isinstance(x, Tensor))
            key = getattr(torch._C.DispatchKey, device.upper())
            with self:
                return function.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        return function(*args, **kwargs)


def _product(order: int, a: Tensor, b: Tensor) -> Tensor:
    return fixed_order_product(a, b, order).to(a.dtype)


def _product_and_sum(
    order: int, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    return (alpha * fixed_order_product(a, b, order) + beta * c).to(a.dtype)


def _product_with_vector(order: int, a: Tensor, b: Tensor) -> Tensor:
    return fixed_order_product(a, b.unsqueeze(-1), order).squeeze(-1).to(a.dtype)


def _product_of_vectors(order: int, a: Tensor, b: Tensor) -> Tensor:
    return fixed_order_product(a.unsqueeze(0), b.unsqueeze(-1), order).reshape(()).to(a.dtype)


def _sum(
    order: int,
    x: Tensor,
    dim: int | list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    mean: bool = False,
) -> Tensor:
    dims = [dim] if isinstance(dim, int) else dim or range(x.dim())
    dims = sorted(d % x.dim() for d in dims)
    remaining = [d for d in range(x.dim()) if d not in dims]
    dtype = x.dtype if dtype is None else dtype
    terms = x.to(torch.promote_types(x.dtype, dtype)).permute(*remaining, *dims)
    terms = terms.reshape(*(x.shape[d] for d in remaining), 1, math.prod(x.shape[d] for d in dims))
    total = fixed_order_product(terms, torch.ones_like(terms).mT, order)[..., 0, 0]
    if mean:
        total = total / terms.shape[-1]
    if keepdim:
        total = total.reshape([1 if d in dims else size for d, size in enumerate(x.shape)])
    return total.to(dtype)


_aten = torch.ops.aten
_mean = functools.partial(_sum, mean=True)
FIXED_ORDER: dict[Any, Callable[..., Tensor]] = {
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _product_and_sum,
    _aten.baddbmm.default: _product_and_sum,
    _aten.mv.default: _product_with_vector,
    _aten.dot.default: _product_of_vectors,
    _aten.sum.default: _sum,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean,
}
