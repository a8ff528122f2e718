"""Attention for Hopper GPUs, run on the PTX machine from the original or changed PTX of nvcc."""

from __future__ import annotations

import torch
from _broken_ptx import kernel_in
from _nvcc import require_nvcc
from torch import Tensor

from fastbert.testing.ptx.hopper_attention import HopperAttention

SEED = torch.tensor([0x0123456789ABCDEF])
# Largest number of instructions of a warp; for the tests' small inputs, a correct kernel executes
# far fewer.
LONGEST = 400_000


def drawn(batch, heads, queries, keys, dim=64, dtype=torch.bfloat16, seed=0) -> list[Tensor]:
    """Return random q, k and v, and a random gradient dout of the output."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, n, heads, dim, generator=generator).to(dtype).transpose(1, 2)
        for n in (queries, keys, keys, queries)
    ]


def compiled_in(folder) -> Breakable:
    """Return the attention kernels, or skip the test if nvcc is missing."""
    require_nvcc()
    return Breakable(folder)


class Breakable(HopperAttention):
    """The attention kernels, and the PTX that nvcc made of them."""

    def __init__(self, folder) -> None:
        self.folder = folder
        super().__init__(folder)

    def ptx(self, kernel: str, source: str = "attention_forward") -> str:
        """Return the PTX of the only kernel whose mangled name contains `kernel`."""
        [path] = self.folder.glob(f"hopper-{source}-90a/*.ptx")
        return kernel_in(path, kernel)
