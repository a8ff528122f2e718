"""Attention for Hopper GPUs on the PTX machine, with other PTX in the place of nvcc's."""

from __future__ import annotations

from _broken_ptx import kernel_in
from _nvcc import require_nvcc

from fastbert.testing.ptx.hopper_attention import HopperAttention


def compiled_in(folder) -> Breakable:
    """Return the compiled kernels, or skip the test without nvcc."""
    require_nvcc()
    return Breakable(folder)


class Breakable(HopperAttention):
    """The kernels, and the PTX that nvcc made of them."""

    def __init__(self, folder) -> None:
        self.folder = folder
        super().__init__(folder)

    def ptx(self, kernel: str, source: str = "attention_forward") -> str:
        """Return the PTX of the kernel whose mangled name contains a text, as nvcc wrote it."""
        [path] = self.folder.glob(f"hopper-{source}-90a/*.ptx")
        return kernel_in(path, kernel)
