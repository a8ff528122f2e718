"""The limits of a GPU, the least work of each operation, and fastbert's goals on GPU and CPU.

A figure is compared with two bounds. The first bound is computed from recorded rates of a known GPU
(``KNOWN``): the rates in its datasheet, and the rates of a large copy and a large matrix product.
The second bound is computed from the rates of a copy and a matrix product in the run itself.
``GOALS`` has the figures to reach.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fastbert import gpus
from fastbert.testing.cases import TABLE_OF, Case

# Share of the tokens that have a masked-LM label, as in `fastbert.testing.cases`.
LABELLED = 0.15
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
INFERENCE, TRAINING, LATENCY = "inference", "training", "latency"


@dataclass(frozen=True)
class Limits:
    """The limits of a GPU: FLOP/s of dense 16-bit products, bytes/s of memory, exponentials/s.

    ``measured_flops`` is the best rate of a library's product. ``measured_bytes`` is the best rate
    of a copy, which counts the bytes read and the bytes written.
    """

    name: str
    flops: float
    bytes: float
    measured_flops: float
    measured_bytes: float
    exponentials: float


H200 = Limits("H200", 989e12, gpus.H200.memory, 790e12, 4.3e12, gpus.H200.exponentials)
# No H100 was measured. The H100 has the chip of the H200, and its copies are assumed to reach the
# same share of the datasheet's memory bandwidth.
H100 = Limits(
    "H100",
    989e12,
    gpus.H100.memory,
    H200.measured_flops,
    H200.measured_bytes * gpus.H100.memory / gpus.H200.memory,
    gpus.H100.exponentials,
)
KNOWN = {limits.name: limits for limits in (H200, H100)}


def limits_of(gpu: str | None) -> Limits | None:
    """Return the limits of a GPU by the name that CUDA reports, or None if they are not known."""
    known = gpus.BY_CUDA_NAME.get(gpu or "")
    return None if known is None else KNOWN.get(known.name)


@dataclass(frozen=True)
class Work:
    """The least work of a computation: FLOPs, bytes of device memory, exponentials."""

    flops: float = 0.0
    bytes: float = 0.0
    exponentials: float = 0.0

    def floor(self, limits: Limits) -> float:
        """Return the shortest possible time in seconds, which the slowest of three units needs.

        The rates of products and memory are measured rates. The rate of exponentials is computed.
        """
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
        """Return the TFLOP/s at which the memory bandwidth of the datasheet is the bound."""
        return self.flops / self.bytes * limits.bytes / 1e12


def work(case: Case, dtype: torch.dtype, direction: str) -> Work:
    """Return the work of one pass over ``case``, with every tensor read or written once.

    The backward pass of a matrix product computes two matrix products. The backward pass of
    attention also computes the logits again, so it has five products; the forward pass has two.

    Raises:
        KeyError: If the direction is not known.
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
        # Rows of the word table are read, and the result is written. Other tables stay in a cache.
        tokens, _, hidden = case.shape
        return Work(case.flops(), 2 * tokens * hidden * dtype.itemsize)
    return Work(case.flops(), case.bytes(dtype), _exponentials(case))


def _backward(table: str, case: Case, dtype: torch.dtype, forward: Work) -> Work:
    if table == "attention":
        # The backward pass reads q, k, v, the output and the output's gradient, and it writes the
        # gradients of q, k and v. It moves 8 tensors, and the forward pass moves 4.
        return Work(2.5 * forward.flops, 2 * forward.bytes, forward.exponentials)
    if table in ("layer_norm", "rms_norm"):
        rows, columns = case.shape[:2]
        # The output's gradient and the normalized input are read, and the input's gradient is
        # written. With dropout, the gradient of the residual is another tensor, which is written
        # too.
        own = bool(case.options.get("dropout_p")) and case.options.get("residual", True)
        return Work(2 * forward.flops, (4 if own else 3) * rows * columns * dtype.itemsize)
    if table == "rotary":
        # The gradient is rotated back, which is the same work.
        return forward
    if table == "embedding":
        tokens, vocabulary, hidden = case.shape
        # The output's gradient and rows of the word table are read, and the gradient of the whole
        # table is written.
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
    """A figure to reach: at least ``value`` in ``unit``, or at most if ``lower_is_better``."""

    value: float
    unit: str
    lower_is_better: bool = False

    def reached(self, value: float) -> float:
        """Return the reached fraction of the goal; the goal is met at a fraction of 1 or more."""
        return self.value / value if self.lower_is_better else value / self.value


# The goals of attention are for head dimension 64, no causal mask, and 16,384 tokens.
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
# Up to this sequence length, memory bounds the forward pass of attention, and the goal is
# MEMORY_BOUND_FRACTION of this bound.
MEMORY_BOUND_LENGTH = 256
MEMORY_BOUND_FRACTION = 0.8


@dataclass(frozen=True)
class Target:
    """The lowest ratio that is accepted, and the ratio that is the goal; None if there is none."""

    floor: float | None = None
    goal: float | None = None


# The targets on a CPU, by the kind of batch and the number format of fastbert. The ratio is the
# time of the fastest peer in the same or a more exact format, divided by the time of fastbert. The
# goals are those of a processor with AMX.
CPU_TARGETS = {
    ("full", "bf16"): Target(1.1, 2.0),
    ("half padded", "bf16"): Target(2.3, 3.5),
    ("one sequence", "bf16"): Target(1.3, 1.6),
    ("full", "fp32"): Target(1.1),
    ("half padded", "fp32"): Target(2.0),
    ("one sequence", "fp32"): Target(1.05),
    ("full", "int8"): Target(1.1),
    ("half padded", "int8"): Target(2.0),
    ("one sequence", "int8"): Target(1.1),
    ("training", "bf16"): Target(3.5, 4.0),
    ("training", "fp32"): Target(2.0, 4.0),
}
# The goals on a GPU. The ratio is the time of the fastest peer in the same run divided by the time
# of fastbert.
RATIO_GOALS = {
    "feed_forward": 1.25,
    "linear_gelu": 1.25,
    "linear_cross_entropy": 1.0,
    "BERT-base 16×512, 60 % real": 2.3,
}
# The goal is that the loss needs at most this fraction of the peak memory that PyTorch needs, which
# computes the logits of all tokens.
CROSS_ENTROPY_MEMORY = 0.15
# Packed attention of equal lengths may take longer than dense attention by this fraction.
VARLEN_OVERHEAD = 0.03


@functools.cache
def attention_goal(direction: str, length: int, head_dim: int) -> Goal | None:
    """Return the goal of dense attention at ``length``, or None if it has no goal."""
    if head_dim != 64:
        return None
    if direction == FORWARD and length <= MEMORY_BOUND_LENGTH:
        # For sequence length S and head dimension D, a head has 4 S² D FLOPs and reads and writes
        # 4 S D elements of two bytes.
        bound = length / 2 * H200.bytes / 1e12
        return Goal(MEMORY_BOUND_FRACTION * bound, "TFLOP/s")
    return GOALS.get(f"attention {direction} S{length} D{head_dim}")
