"""Small problems that reveal mistakes in (query, key) masks of attention for Hopper GPUs."""

from __future__ import annotations

from itertools import pairwise

import torch
from _hopper_problems import SCALE, Problems, statistics


class Pairs(Problems):
    """Inputs with (query, key) masks; kernels apply no mask in a tile whose pairs are all attended.

    Args:
        hopper: The attention kernels.
        dim: The head dim.
        packing: Whether the mistakes are in the kernel that packs the mask, not in attention.
    """

    columns: int

    def __init__(self, hopper, dim, packing=False):
        super().__init__(hopper, dim)
        self.ptx = hopper.ptx(f"nv_bfloat16Li{dim}ELb1ELb0E", self.source_of(dim))
        if packing:
            self.ptx = hopper.ptx(f"pack_pairs_kernelILi{self.columns}E", "pairs")

    def prepare(self, generator):
        def drawn(*shape):
            return torch.randn(*shape, self.dim, generator=generator).bfloat16()

        # The first tile has no attended pair, and query 65 attends no key. Keys that no query
        # attends are NaN. In one tile, some lanes attend all pairs and other lanes do not. Only the
        # queries 40 to 63 attend key 200.
        self.mask = torch.rand(1, 1, 70, self.keys, generator=generator) > 0.3
        self.mask[..., 256:384] = True
        self.mask[..., [35, 43], 384:512] = True
        self.mask[..., [210, 218]] = True
        self.mask[..., :40, 200] = self.mask[..., 64:, 200] = False
        self.mask[..., :140] = False
        self.mask[..., 65, :] = False
        q, dout = drawn(1, 1, 70), drawn(1, 1, 70)
        k, v = drawn(1, 1, self.keys), drawn(1, 1, self.keys)
        out, lse = statistics(q, k, v, self.mask)
        for x in (k, v):
            x.masked_fill_(~self.mask.any(2)[..., None], torch.nan)
        self.dense = [dout, q, k, v, out, lse]
        # Two packed sequences have one mask each, and the rows after the sequences are NaN.
        self.ends = [torch.tensor(x, dtype=torch.int32) for x in ([0, 40, 110], [0, 130, 170])]
        self.masks = torch.rand(2, 1, 70, 130, generator=generator) > 0.5
        q, dout, k, v = drawn(120, 1), drawn(120, 1), drawn(180, 1), drawn(180, 1)
        out, lse = torch.zeros_like(q), torch.full((1, 120), -torch.inf)
        for number, ((a, b), (c, d)) in enumerate(zip(*map(pairwise, self.ends), strict=True)):
            own = [x[None].transpose(1, 2) for x in (q[a:b], k[c:d], v[c:d])]
            result = statistics(*own, self.masks[number, None, :, : b - a, : d - c])
            out[a:b], lse[:, a:b] = result[0][0].transpose(0, 1), result[1][0]
        for x in (q, dout, out):
            x[110:] = torch.nan
        for x in (k, v):
            x[170:] = torch.nan
        self.packed = [dout, q, k, v, out, lse]

    def calls(self):
        """Yield the tensors and the other arguments of each call of a kernel."""
        yield self.dense, (self.mask, None, None, None, 70, self.keys, 0.0, SCALE)
        yield self.packed, (self.masks, *self.ends, None, 70, 130, 0.0, SCALE)


class ForwardPairs(Pairs):
    """Inputs of the forward; five tiles of keys make the ring of four stages reuse a stage."""

    source, keys, columns = "attention_forward", 520, 128

    def results(self):
        results = []
        for (_, *qkv, _, _), arguments in self.calls():
            results += self.hopper.flash_attention_forward(*qkv, *arguments)
        return results


class BackwardPairs(Pairs):
    """Inputs of the backward; three blocks of keys and six tiles of queries reuse both rings."""

    source, keys, columns = "attention_backward", 300, 64

    def source_of(self, dim):
        return "attention_backward_wide" if dim == 128 else self.source

    def results(self):
        results = []
        for tensors, arguments in self.calls():
            gradients = [torch.full_like(x, torch.nan) for x in tensors[1:4]]
            self.hopper.flash_attention_backward(*gradients, *tensors, *arguments)
            results += gradients
        return results
