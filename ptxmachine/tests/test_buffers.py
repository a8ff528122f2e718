"""Arrays of any library may be arguments, through the buffer protocol or through DLPack."""

import array
import ctypes

import numpy as np
import pytest
import torch
from small_kernels import HEADER, kernel, launch

from ptxmachine import PtxFault, buffers, load, tensor_map

# Thread n adds 1 to element n.
NEXT = """
    mul.wide.u32 %d1, %r0, 4;
    add.s64 %d1, %d0, %d1;
    ld.global.u32 %r1, [%d1];
    add.u32 %r1, %r1, 1;
    st.global.u32 [%d1], %r1;
"""


def plus_one(memory, threads=4, **options):
    load(kernel(NEXT)).launch("k", (1,), (threads,), [memory], **options)


MAKERS = {
    "array": lambda: array.array("i", range(4)),
    "ctypes": lambda: (ctypes.c_int32 * 4)(*range(4)),
    "memoryview": lambda: memoryview(array.array("i", range(4))),
    "numpy": lambda: np.arange(4, dtype=np.int32),
    "torch": lambda: torch.arange(4, dtype=torch.int32),
}


@pytest.mark.parametrize("library", MAKERS)
def test_a_kernel_writes_into_the_array_itself(library):
    memory = MAKERS[library]()
    plus_one(memory)
    assert [int(x) for x in memory] == [1, 2, 3, 4]


def test_a_bytearray_is_memory_and_bytes_are_the_value_of_a_struct():
    memory = bytearray(16)
    plus_one(memory)
    assert memory == bytes([1, 0, 0, 0]) * 4
    text = (
        f"{HEADER}.visible .entry k(.param .u64 p0, .param .align 4 .b8 p1[8])\n{{\n"
        "    .reg .b32 %r<2>;\n    .reg .b64 %d<2>;\n    ld.param.u64 %d0, [p0];\n"
        "    ld.param.u32 %r0, [p1+4];\n    st.global.u32 [%d0], %r0;\n    ret;\n}\n"
    )
    load(text).launch("k", (1,), (1,), [memory, bytes([0, 0, 0, 0, 7, 0, 0, 0])])
    assert memory[:4] == bytes([7, 0, 0, 0])


@pytest.mark.parametrize("value", [np.int32(5), np.uint64(5), 5, True], ids=str)
def test_numbers_of_other_libraries_are_numbers(value):
    text = (
        f"{HEADER}.visible .entry k(.param .u64 p0, .param .u32 p1)\n{{\n"
        "    .reg .b32 %r<2>;\n    .reg .b64 %d<2>;\n    ld.param.u64 %d0, [p0];\n"
        "    ld.param.u32 %r0, [p1];\n    st.global.u32 [%d0], %r0;\n    ret;\n}\n"
    )
    memory = array.array("I", [0])
    load(text).launch("k", (1,), (1,), [memory, value])
    assert memory[0] == int(value)


def test_memory_that_is_read_only_is_not_written():
    constant = np.arange(4, dtype=np.int32)
    constant.setflags(write=False)
    with pytest.raises(PtxFault, match=r"buffer 0 \(4,\) is written, but is constant"):
        plus_one(constant)
    assert constant.tolist() == [0, 1, 2, 3]


def test_the_end_of_a_view_is_the_end_of_what_a_kernel_may_reach():
    """An access to an element after a view must fault, even if the array has the element."""
    whole = np.arange(8, dtype=np.int32)
    with pytest.raises(PtxFault, match=r"0 bytes after the end of buffer 0 \(4,\)"):
        plus_one(whole[:4], threads=5)
    plus_one(whole[:4])
    assert whole.tolist() == [1, 2, 3, 4, 4, 5, 6, 7]


def test_views_that_overlap_are_one_memory():
    whole = torch.zeros(4, 6)
    parts = [buffers.buffer(part, "args") for part in whole.split(2, dim=1)]
    [region] = buffers.regions(parts, [])
    assert (region.begin, region.size) == (whole.data_ptr(), 96)
    apart = [buffers.buffer(torch.zeros(3), "args") for _ in range(2)]
    assert [part.size for part in buffers.regions(apart, [])] == [12, 12]


def test_a_view_backwards_begins_at_its_last_element():
    whole = np.arange(6, dtype=np.float32)
    assert buffers.buffer(whole[::-1], "args").extent == buffers.buffer(whole, "args").extent


def test_a_view_may_begin_anywhere():
    """A view may begin 2 bytes after a 4-byte boundary; writes to its elements are not races."""
    raw = np.zeros(36, dtype=np.uint8)
    begin = 2 + -raw.ctypes.data % 4
    body = """
    cvt.u16.u32 %h0, %r0;
    mul.wide.u32 %d1, %r0, 2;
    add.s64 %d1, %d0, %d1;
    st.global.u16 [%d1], %h0;
    """
    view = raw[begin : begin + 32].view(np.uint16)
    launch(body, [view], threads=16, seed=3)
    assert view.tolist() == list(range(16))


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (np.zeros(2, np.float16), "f16"),
        (np.zeros(2, np.int64), "i64"),
        (np.zeros(2, bool), "u8"),
        (np.zeros(2, np.complex64), ""),
        (torch.zeros(2, dtype=torch.bfloat16), "bf16"),
        (torch.zeros(2, dtype=torch.uint8), "u8"),
        (torch.zeros(2, dtype=torch.bool), "u8"),
    ],
    ids=["f16", "i64", "bool", "complex", "bf16", "u8", "torch bool"],
)
def test_the_type_of_an_element(array, kind):
    found = buffers.buffer(array, "args")
    assert (found.kind, found.shape, found.strides) == (kind, (2,), (found.size,))


def test_a_tensor_map_of_an_array_of_numpy_equals_that_of_a_tensor():
    memory = torch.zeros(8, 16)
    assert tensor_map(memory.numpy(), (4, 8)) == tensor_map(memory, (4, 8))
    assert tensor_map(memory.numpy()[:, :8], (4, 8)) == tensor_map(memory[:, :8], (4, 8))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "args: got a str for p0"),
        (
            torch.zeros(2, requires_grad=True),
            "args: got an array that DLPack does not give: .*grad",
        ),
        (torch.zeros(2, device="meta"), "args: "),
    ],
    ids=["str", "gradient", "meta"],
)
def test_what_is_no_memory_of_the_cpu_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        plus_one(value)
