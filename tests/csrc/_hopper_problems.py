"""Inputs of small calls ("problems") that reveal mistakes in attention for Hopper GPUs."""

from __future__ import annotations

from itertools import pairwise

import torch
from _broken_ptx import LONGEST, Fault, outcome, replaced
from _hopper_attention import Breakable
from torch import Tensor

from fastbert import reference

SCALE = 0.125


class Problems:
    """Inputs of small calls of one bf16 kernel without dropout, and their right results.

    Args:
        hopper: The attention kernels.
        dim: The head dim.
    """

    source: str

    def __init__(self, hopper: Breakable, dim: int) -> None:
        self.hopper, self.dim = hopper, dim
        self.prepare(torch.Generator().manual_seed(5))
        self.ptx = hopper.ptx(f"nv_bfloat16Li{dim}ELb0ELb0E", self.source_of(dim))
        self.expected = self.run(seed=1)

    def prepare(self, generator: torch.Generator) -> None:
        """Draw the inputs of all calls from `generator`."""
        raise NotImplementedError

    def source_of(self, dim: int) -> str:
        """Return the name of the source file that contains the kernel for head dim `dim`."""
        return self.source

    def results(self) -> list[Tensor]:
        """Return the results of all calls."""
        raise NotImplementedError

    def run(self, seed: int) -> list[Tensor]:
        """Return the results of all calls; one block computes all work items of a call."""
        self.hopper.options = {"seed": seed, "limit": LONGEST, "threads": 1}
        self.hopper.compiled.set_multiprocessors(1)
        return self.results()

    def outcome(self, fault: Fault) -> str:
        """Return the kind of error that `fault` causes, or "" if the results are right."""
        with replaced(self.hopper.compiled, fault.broken(self.ptx)):
            return outcome(self.run, self.expected)


class Forward(Problems):
    """Inputs of small calls of the forward kernel, and their right results."""

    source = "attention_forward"

    def prepare(self, generator):
        def drawn(*shape):
            return [torch.randn(shape, generator=generator).bfloat16() for _ in range(3)]

        # With five tiles of keys, the ring of four stages reuses a stage. The mask hides all keys
        # of the first tile.
        self.dense = drawn(1, 2, 520, self.dim)
        self.dense[0] = self.dense[0][:, :, :70]
        self.mask = torch.rand(1, 1, 1, 520, generator=generator) > 0.3
        self.mask[..., :140] = False
        self.dense[2].masked_fill_(~self.mask.transpose(2, 3), torch.nan)
        # A sequence has part of a tile, no key, or two tiles. Rows after the sequences are NaN.
        self.queries = torch.tensor([0, 40, 170, 370, 380], dtype=torch.int32)
        self.keys = torch.tensor([0, 40, 40, 240, 250], dtype=torch.int32)
        rows = 390, 260, 260
        self.packed = [x[:n] for x, n in zip(drawn(390, 1, self.dim), rows, strict=True)]
        for x, ends in zip(self.packed, (self.queries, self.keys, self.keys), strict=True):
            x[ends[-2] :] = torch.nan

    def results(self):
        dense = self.hopper.flash_attention_forward(
            *self.dense, self.mask, None, None, None, 70, 520, 0.0, SCALE
        )
        packed = self.hopper.flash_attention_forward(
            *self.packed, None, self.queries, self.keys, None, 200, 200, 0.0, SCALE
        )
        rows = [*range(370), *range(380, 390)]
        return [dense[0], packed[0][rows], dense[1], packed[1][:, rows]]


class Backward(Problems):
    """Inputs of small calls of the backward kernel, and their right results."""

    source = "attention_backward"

    def source_of(self, dim):
        return "attention_backward_wide" if dim == 128 else self.source

    def prepare(self, generator):
        def drawn(*shape):
            return torch.randn(*shape, self.dim, generator=generator).bfloat16()

        # Three blocks of keys are more than the ring of two buffers holds, and six tiles are more
        # than the ring of four stages holds. No key of the first block is attended.
        q, dout = (drawn(1, 1, 70) for _ in range(2))
        k, v = (drawn(1, 1, 300) for _ in range(2))
        self.mask = torch.rand(1, 1, 1, 300, generator=generator) > 0.3
        self.mask[..., :140] = False
        out, lse = statistics(q, k, v, self.mask)
        for x in (k, v):
            x.masked_fill_(~self.mask.transpose(2, 3), torch.nan)
        self.dense = [dout, q, k, v, out, lse]
        # A sequence has part of a tile, no key, two blocks of keys, or no query. Rows after the
        # sequences are NaN.
        self.queries = torch.tensor([0, 40, 45, 175, 175], dtype=torch.int32)
        self.keys = torch.tensor([0, 40, 40, 170, 180], dtype=torch.int32)
        q, dout = (drawn(180, 1) for _ in range(2))
        k, v = (drawn(190, 1) for _ in range(2))
        out, lse = torch.zeros_like(q), torch.full((1, 180), -torch.inf)
        for (a, b), (c, d) in zip(pairwise(self.queries), pairwise(self.keys), strict=True):
            own = [x[None].transpose(1, 2) for x in (q[a:b], k[c:d], v[c:d])]
            result = statistics(*own)
            out[a:b], lse[:, a:b] = result[0][0].transpose(0, 1), result[1][0]
        for x in (q, dout, out):
            x[175:] = torch.nan
        for x in (k, v):
            x[180:] = torch.nan
        self.packed = [dout, q, k, v, out, lse]

    def results(self):
        results = []
        for tensors, mask, ends, longest in (
            (self.dense, self.mask, (None, None), (70, 300)),
            (self.packed, None, (self.queries, self.keys), (130, 130)),
        ):
            gradients = [torch.full_like(x, torch.nan) for x in tensors[1:4]]
            self.hopper.flash_attention_backward(
                *gradients, *tensors, mask, *ends, None, *longest, 0.0, SCALE
            )
            results += gradients
        return results


def statistics(q, k, v, mask=None):
    """Return the attention output in bf16 and the log-sum-exp."""
    out = reference.attention(*(x.double() for x in (q, k, v)), mask=mask, scale=SCALE)
    scores = q.double() @ k.double().transpose(-1, -2) * SCALE
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return out.bfloat16(), scores.logsumexp(-1).float()
