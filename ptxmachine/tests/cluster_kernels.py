"""Small kernels of clusters for the tests, and functions that run them."""

import pytest
import torch
from small_kernels import kernel

from ptxmachine import PtxFault, load

SEEDS = (0, 1, 2, 3, 4)
MEET = "    barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;\n"
# Sets %r1 to the rank of the block, %r2 to the address of the thread's word in shared memory, and
# %r3 to the address of the same word in the block whose rank differs in the last bit.
WORDS = """
    mov.u32 %r1, %cluster_ctarank;
    mov.u32 %r4, memory;
    mad.lo.u32 %r2, %r0, 4, %r4;
    xor.b32 %r5, %r1, 1;
    mapa.shared::cluster.u32 %r3, %r2, %r5;
"""
# Stores 100 times the number of the block plus the number of the thread in shared memory. Sets %d6
# to the address of the thread's element of the output.
FILL = """
    mov.u32 %r6, %ctaid.x;
    mad.lo.u32 %r7, %r6, 100, %r0;
    st.shared.u32 [%r2], %r7;
    mad.lo.u32 %r8, %r6, 32, %r0;
    mad.wide.u32 %d6, %r8, 4, %d0;
"""
READ = "    ld.shared::cluster.u32 %r9, [%r3];\n    st.global.u32 [%d6], %r9;\n"
EXCHANGE = WORDS + FILL + MEET + READ + MEET


def run(body, blocks=2, cluster=(2,), threads=32, bounds="", tensors=(), **options):
    """Run a kernel with a given body, and return its output, one row of 32 words per block."""
    out = torch.zeros(blocks, 32, dtype=torch.int32)
    module = load(kernel(body, 1 + len(tensors), shared=1024, bounds=bounds))
    options.setdefault("empty", [out])
    module.launch("k", (blocks,), (threads,), [out, *tensors], cluster=cluster, **options)
    return out


def fault(body, seed=0, **options):
    """Run a kernel with a given body, which must have a fault, and return the fault."""
    with pytest.raises(PtxFault) as caught:
        run(body, seed=seed, limit=100_000, **options)
    return caught.value


def of_neighbours(blocks):
    """Return the output of a kernel with the body `EXCHANGE` in clusters of an even size."""
    block = torch.arange(blocks)[:, None]
    return ((block ^ 1) * 100 + torch.arange(32)).to(torch.int32)
