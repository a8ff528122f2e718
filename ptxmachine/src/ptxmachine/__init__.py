"""A machine that executes PTX on the CPU and reports faults that otherwise occur only on a GPU.

PTX is the documented virtual instruction set of NVIDIA GPUs. `load` reads the text that Triton or
nvcc emits. `Module.launch` executes a kernel of the text, instruction by instruction, on arrays of
any library.

Every error in a PTX text raises a `PtxError`, which names the line of the text. The error is a
`PtxSyntaxError` if the machine cannot run the text. The error is a `PtxFault` if a kernel does
something wrong: an access that is out of bounds or misaligned, a use of an uninitialized value, a
race, a deadlock, or an instruction of the whole warp that only some of its lanes execute.

Examples:
    >>> from array import array
    >>> import ptxmachine
    >>> module = ptxmachine.load('''
    ... .version 8.0
    ... .target sm_80
    ... .address_size 64
    ... .visible .entry twice(.param .u64 x)
    ... {
    ...     .reg .b32 %r<4>;
    ...     .reg .b64 %rd<4>;
    ...     ld.param.u64 %rd1, [x];
    ...     mov.u32 %r1, %tid.x;
    ...     mad.wide.u32 %rd2, %r1, 4, %rd1;
    ...     ld.global.f32 %r2, [%rd2];
    ...     add.f32 %r3, %r2, %r2;
    ...     st.global.f32 [%rd2], %r3;
    ...     ret;
    ... }''')
    >>> x = array("f", [0, 1, 2, 3])
    >>> report = module.launch("twice", grid=(1,), block=(4,), args=[x])
    >>> x
    array('f', [0.0, 2.0, 4.0, 6.0])
    >>> report.counts["instructions"]
    7
"""

from __future__ import annotations

from ptxmachine.errors import PtxError, PtxFault, PtxSyntaxError
from ptxmachine.machine import Module, Report, load
from ptxmachine.tensor_map import tensor_map

__all__ = ["Module", "PtxError", "PtxFault", "PtxSyntaxError", "Report", "load", "tensor_map"]
