"""Labels in scopes, calls of functions, and branches by an index (``brx.idx``)."""

import pytest
import torch
from small_kernels import HEADER, REGISTERS, launch

import ptxmachine as ptx

STORE = """
mul.wide.u32 %d10, %r0, 4;
add.s64 %d11, %d0, %d10;
st.global.b32 [%d11], %r5;
"""


def test_a_label_is_visible_in_its_scope_only():
    # Both scopes have a label of the same name, as two copies of inline assembly would have.
    body = """
mov.u32 %r5, 0;
{
AGAIN:
add.u32 %r5, %r5, 1;
setp.lt.u32 %p1, %r5, 10;
@%p1 bra AGAIN;
}
{
AGAIN:
add.u32 %r5, %r5, 100;
setp.lt.u32 %p1, %r5, 500;
@%p1 bra.uni AGAIN;
}
"""
    out = torch.zeros(32, dtype=torch.int32)
    launch(body + STORE, [out])
    assert (out == 510).all()


FUNCTIONS = """
.func (.param .b32 result) power(.param .b32 base, .param .b32 exponent)
{
    .reg .pred %p<4>;
    .reg .b32 %r<8>;
    .local .align 4 .b8 kept[8];
    .reg .b64 %d<4>;
    ld.param.b32 %r1, [base];
    ld.param.b32 %r2, [exponent];
    mov.u64 %d1, kept;
    st.local.b32 [%d1+4], 1;
LOOP:
    ld.local.b32 %r4, [%d1+4];
    setp.eq.u32 %p1, %r2, 0;
    @!%p1 bra MORE;
    st.param.b32 [result], %r4;
    ret;
MORE:
    mul.lo.u32 %r4, %r4, %r1;
    st.local.b32 [%d1+4], %r4;
    sub.u32 %r2, %r2, 1;
    bra LOOP;
}
.func (.param .align 8 .b8 pair[8]) squares(.param .b32 x)
{
    .reg .b32 %r<8>;
    ld.param.b32 %r1, [x];
    {
        .param .b32 a;
        .param .b32 b;
        .param .b32 out;
        st.param.b32 [a], %r1;
        st.param.b32 [b], 2;
        call.uni (out), power, (a, b);
        ld.param.b32 %r2, [out];
    }
    st.param.b32 [pair], %r1;
    st.param.b32 [pair+4], %r2;
    ret;
}
"""


def test_functions_are_called_and_lanes_return_at_different_times():
    text = (
        HEADER
        + FUNCTIONS
        + f".visible .entry k(.param .u64 p0)\n{{{REGISTERS}"
        + """
    ld.param.u64 %d0, [p0];
    mov.u32 %r0, %tid.x;
    {
        .param .b32 three;
        .param .b32 n;
        .param .b32 out;
        st.param.b32 [three], 3;
        st.param.b32 [n], %r0;
        call (out), power, (three, n);
        ld.param.b32 %r6, [out];
    }
    {
        .param .b32 x;
        .param .align 8 .b8 two[8];
        st.param.b32 [x], %r0;
        call.uni (two), squares, (x);
        ld.param.v2.b32 {%r7, %r8}, [two];
    }
    add.u32 %r5, %r6, %r7;
    add.u32 %r5, %r5, %r8;
"""
        + STORE
        + "ret;\n}\n"
    )
    out = torch.zeros(20, dtype=torch.int32)
    ptx.load(text).launch("k", (1,), (20,), [out])
    n = torch.arange(20)
    assert torch.equal(out, (3**n + n + n * n).int())


def test_a_function_that_calls_itself_is_refused():
    text = HEADER + ".func f()\n{\ncall f;\n}\n.visible .entry k()\n{\ncall f;\nret;\n}\n"
    module = ptx.load(text)
    with pytest.raises(ptx.PtxSyntaxError, match="f calls itself"):
        module.launch("k", (1,), (1,), [])


def test_a_failed_assertion_traps():
    text = (
        HEADER
        + """
.extern .func __assertfail(.param .b64 a);
.visible .entry k()
{
    .param .b64 message;
    st.param.b64 [message], 0;
    call.uni __assertfail, (message);
    ret;
}
"""
    )
    with pytest.raises(ptx.PtxFault, match="trap"):
        ptx.load(text).launch("k", (1,), (32,), [])


def test_a_branch_takes_the_label_of_its_index():
    body = """
and.b32 %r1, %r0, 3;
TABLE: .branchtargets ZERO, ONE, TWO, ZERO;
brx.idx %r1, TABLE;
ZERO:
mov.u32 %r5, 7;
bra END;
ONE:
mov.u32 %r5, 8;
bra END;
TWO:
mov.u32 %r5, 9;
END:
"""
    out = torch.zeros(32, dtype=torch.int32)
    launch(body + STORE, [out])
    assert out.tolist() == [7, 8, 9, 7] * 8
