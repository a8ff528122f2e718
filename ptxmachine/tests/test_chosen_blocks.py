"""With the argument `blocks`, a launch runs only the blocks whose numbers it names."""

import pytest
import torch
from small_kernels import kernel

import ptxmachine as ptx

# Block n writes 1 to element n.
MARK = kernel("""
    mov.u32 %r1, %ctaid.x;
    mad.wide.u32 %d1, %r1, 4, %d0;
    mov.u32 %r2, 1;
    st.global.u32 [%d1], %r2;""")


def test_the_chosen_blocks_run_and_no_others():
    marks = torch.zeros(10, dtype=torch.int32)
    module = ptx.load(MARK)
    report = module.launch("k", (10,), (1,), [marks], blocks=[7, 2])
    assert marks.nonzero().flatten().tolist() == [2, 7]
    every = module.launch("k", (10,), (1,), [marks])
    assert every.counts["instructions"] == 5 * report.counts["instructions"]
    assert bool(marks.all())


def test_a_block_outside_the_grid_is_refused():
    marks = torch.zeros(10, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"blocks: got \[10\], allowed: 0 to 9"):
        ptx.load(MARK).launch("k", (10,), (1,), [marks], blocks=[10])
