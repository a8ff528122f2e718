"""The rates of the GPUs for which lower bounds of kernel times are predicted.

Each field of `Gpu` comes from one of these documents of NVIDIA.

- Multiprocessors, dense 16-bit matrix rate and memory bandwidth: the data sheets of A100, H100,
  H200 and L4, the white paper "NVIDIA Ada GPU Architecture" for the RTX 4090, and the data sheet of
  DGX B200, whose figures are for 8 GPUs. The 148 multiprocessors of a B200 are in no data sheet;
  CUDA reports them for the device.
- Clock: the boost clock of the same documents, at which the matrix rate holds: FLOP/s = clock ×
  multiprocessors × FLOP per clock. An H100 or H200 reaches 1.98 GHz while its matrix units are
  idle, which is 8 % more.
- FP32, integer and special functions: the table "Throughput of Native Arithmetic Instructions" in
  the CUDA C++ Programming Guide, which counts results per clock and multiprocessor. Compute
  capability 8.0 has 64 FP32 results, and 8.9, 9.0 and 10.0 have 128. All four have 64 integer
  results, 16 results of special functions and 32 shuffles.
- Shared memory serves 32 banks of 4 bytes per clock (same guide), and each of the four schedulers
  of a multiprocessor issues one instruction of a warp per clock (same guide, "Multiprocessor
  Level").

No document gives the bandwidth of the L2 cache or the time of a launch for all of these GPUs, so no
bound uses them.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 32


@dataclass(frozen=True)
class Gpu:
    """The rates of one GPU.

    Args:
        name: Name of the GPU.
        arch: Architecture for which code for the GPU is compiled, such as 90 for sm_90.
        multiprocessors: Number of multiprocessors.
        clock: Clock in Hz.
        tensor: Dense FLOP per clock and multiprocessor with 16-bit operands and fp32 sums, by the
            fastest instruction of the architecture.
        memory: Bytes/s of device memory.
        fma: FP32 results per clock and multiprocessor.
        alu: Integer results per clock and multiprocessor.
        mufu: Results of special functions, such as exponentials, per clock and multiprocessor.
        lsu: Lanes per clock and multiprocessor that load, store or shuffle.
        shared: Bytes of shared memory per clock and multiprocessor.
        issue: Instructions of warps that a multiprocessor starts per clock.
    """

    name: str
    arch: int
    multiprocessors: int
    clock: float
    tensor: int
    memory: float
    fma: int = 128
    alu: int = 64
    mufu: int = 16
    lsu: int = 32
    shared: int = 128
    issue: int = 4

    @property
    def flops(self) -> float:
        """Dense FLOP/s of 16-bit products on all multiprocessors."""
        return self.multiprocessors * self.clock * self.tensor

    @property
    def exponentials(self) -> float:
        """Exponentials/s of all multiprocessors."""
        return self.multiprocessors * self.clock * self.mufu


A100 = Gpu("A100", 80, 108, 1.41e9, 2048, 2.039e12, fma=64)
L4 = Gpu("L4", 89, 58, 2.04e9, 1024, 300e9)
# Per clock and multiprocessor, a GeForce multiplies 16-bit operands with fp32 sums at half the rate
# of an L4.
RTX_4090 = Gpu("RTX 4090", 89, 128, 2.52e9, 512, 1.008e12)
H100 = Gpu("H100", 90, 132, 1.83e9, 4096, 3.35e12)
H200 = Gpu("H200", 90, 132, 1.83e9, 4096, 4.8e12)
B200 = Gpu("B200", 100, 148, 1.856e9, 8192, 8.0e12)
GPUS = (A100, L4, RTX_4090, H100, H200, B200)
# The GPU for each device name that CUDA reports. Devices with similar names, such as "NVIDIA H100
# PCIe" or "NVIDIA GH200 480GB", have other rates.
BY_CUDA_NAME = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}
