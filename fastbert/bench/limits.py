"""What a GPU can do at most, and what fastbert wants to reach: the data behind every fraction.

A figure is read against two bounds: the datasheet's and the measured rates of the machine (``H200``
below, measured on such machines with a large copy and a large product of random numbers), and the
same two ceilings measured in the run itself. ``GOALS`` holds the figures to reach.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fastbert.testing.cases import TABLE_OF, Case

# The share of masked-LM tokens with a label, as the registry of cases draws them.
LABELLED = 0.15
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Limits:
    """FLOP/s of dense 16-bit products, bytes/s of device memory, exponentials/s of all SMs.

    ``measured_*`` are the best that a library's product and a copy (read plus written) reached.
    """

    name: str
    flops: float
    bytes: float
    measured_flops: float
    measured_bytes: float
    exponentials: float


# 132 SMs of 16 exponentials per clock at 1.83 GHz.
H200 = Limits("H200", 989e12, 4.8e12, 790e12, 4.3e12, 132 * 16 * 1.83e9)
KNOWN = (H200,)


def limits_of(gpu: str | None) -> Limits | None:
    """The limits of a GPU by its name, None for one that nobody has measured."""
    return next((limits for limits in KNOWN if gpu is not None and limits.name in gpu), None)


@dataclass(frozen=True)
class Work:
    """What a computation has to do at least: FLOPs, bytes of device memory, exponentials."""

    flops: float = 0.0
    bytes: float = 0.0
    exponentials: float = 0.0

    def floor(self, limits: Limits) -> float:
        """Seconds below which no version can go: the slowest unit at its measured best."""
        return max(
            self.flops / limits.measured_flops,
            self.bytes / limits.measured_bytes,
            self.exponentials / limits.exponentials,
        )

    def bound_by(self, limits: Limits) -> str:
        times = {
            "products": self.flops / limits.measured_flops,
            "memory": self.bytes / limits.measured_bytes,
            "exponentials": self.exponentials / limits.exponentials,
        }
        return max(times, key=lambda name: times[name])

    def memory_bound_tflops(self, limits: Limits) -> float:
        """TFLOP/s at which the datasheet's memory bandwidth would be the bound."""
        return self.flops / self.bytes * limits.bytes / 1e12


def work(case: Case, dtype: torch.dtype, direction: str) -> Work:
    """The work of one pass over ``case``: every tensor read or written once.

    The backward pass of a product costs two; attention's computes the logits once more, so five
    products to the forward's two. Raises KeyError for an unknown direction.
    """
    table = TABLE_OF[case.op]
    forward = _forward(case, dtype)
    return {FORWARD: lambda: forward, BACKWARD: lambda: _backward(table, case, dtype, forward)}[
        direction
    ]()


def _forward(case: Case, dtype: torch.dtype) -> Work:
    if case.op == "linear_cross_entropy":
        # Rows without a label need no logits.
        tokens, hidden, vocabulary = case.shape
        labelled = case.options.get("labelled", LABELLED) * tokens
        size = dtype.itemsize * hidden * (labelled + vocabulary)
        return Work(2.0 * labelled * hidden * vocabulary, size)
    if case.op == "embedding":
        # A word's row read, the result written; the other two tables stay in the cache.
        tokens, _, hidden = case.shape
        return Work(case.flops(), 2 * tokens * hidden * dtype.itemsize)
    return Work(case.flops(), case.bytes(dtype), _exponentials(case))


def _backward(table: str, case: Case, dtype: torch.dtype, forward: Work) -> Work:
    if table == "attention":
        # q, k, v, out, dout read; dq, dk, dv written: twice the forward's four tensors.
        return Work(2.5 * forward.flops, 2 * forward.bytes, forward.exponentials)
    if table in ("layer_norm", "rms_norm"):
        rows, columns = case.shape[:2]
        # dout and the normalised row's source read, dx written, and a residual's own gradient
        # where dropout makes it another tensor.
        own = bool(case.options.get("dropout_p")) and case.options.get("residual", True)
        return Work(2 * forward.flops, (4 if own else 3) * rows * columns * dtype.itemsize)
    if table == "rotary":
        # The gradient turned back: the same again.
        return forward
    if table == "embedding":
        tokens, vocabulary, hidden = case.shape
        # dout and the words' rows read, the whole gradient of the word table written.
        return Work(2 * forward.flops, (2 * tokens + vocabulary) * hidden * dtype.itemsize)
    return Work(2 * forward.flops, 2 * forward.bytes)


def _exponentials(case: Case) -> float:
    if case.op == "attention":
        batch, heads, queries, keys, _ = case.shape
        return float(batch * heads * queries * keys)
    if case.op == "attention_varlen":
        lengths, heads = case.shape[:2]
        return float(heads * sum(n * n for n in lengths))
    return 0.0


@dataclass(frozen=True)
class Goal:
    """A figure to reach: ``value`` in ``unit``, at least or (``lower_is_better``) at most."""

    value: float
    unit: str
    lower_is_better: bool = False

    def reached(self, value: float) -> float:
        """Fraction of the goal: 1 or more is there."""
        return self.value / value if self.lower_is_better else value / self.value


# TFLOP/s of attention, D = 64, non-causal, 16k tokens.
GOALS = {
    "attention forward S512 D64": Goal(450, "TFLOP/s"),
    "attention backward S512 D64": Goal(350, "TFLOP/s"),
    "layer_norm forward": Goal(3700, "GB/s"),
    "layer_norm backward": Goal(3700, "GB/s"),
    "BERT-base s128": Goal(3.7e6, "tokens/s"),
    "BERT-base s512": Goal(3.4e6, "tokens/s"),
    "BERT-large training": Goal(1000, "sequences/s"),
    "BERT-base batch 1": Goal(0.40, "ms", lower_is_better=True),
}
# Below the length at which products become the bound, a fraction of the memory bound is asked for.
MEMORY_BOUND_LENGTH = 256
MEMORY_BOUND_FRACTION = 0.8
# Ratios against peers of the same run, their time over ours.
RATIO_GOALS = {
    "feed_forward": 1.25,
    "linear_gelu": 1.25,
    "linear_cross_entropy": 1.0,
    "BERT-base 16×512, 60 % real": 2.3,
}
# Of the peak memory that all the logits of all the tokens take in PyTorch.
CROSS_ENTROPY_MEMORY = 0.15
# Packed attention of equal lengths may cost this much more than dense attention.
VARLEN_OVERHEAD = 0.03


@functools.cache
def attention_goal(direction: str, length: int, head_dim: int) -> Goal | None:
    """The goal of dense attention at ``length``, None where none was set."""
    if head_dim != 64:
        return None
    if direction == FORWARD and length <= MEMORY_BOUND_LENGTH:
        # 4 S² D FLOPs over 4 S D elements of two bytes
        bound = length / 2 * H200.bytes / 1e12
        return Goal(MEMORY_BOUND_FRACTION * bound, "TFLOP/s")
    return GOALS.get(f"attention {direction} S{length} D{head_dim}")
