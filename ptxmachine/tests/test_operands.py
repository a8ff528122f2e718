"""Decoding checks the number, the kinds and the widths of the operands of every instruction."""

import re
from functools import partial

import pytest
import torch
from _attempts import outcomes
from _examples import EXAMPLES, misfits, read, with_values
from small_kernels import kernel

import ptxmachine as ptx
from ptxmachine import _machine


def text_of(instruction: str) -> str:
    return kernel(f"    {instruction};\nEND:")


LINE = text_of("HERE").splitlines().index("    HERE;") + 1


def program(instruction: str):
    module = ptx.load(text_of(instruction))
    return module._program(module.text.kernels["k"])


def test_there_is_an_example_of_each_mnemonic_of_the_machine():
    assert {read(example).base for example in EXAMPLES} == set(_machine.mnemonics())


@pytest.mark.parametrize("example", EXAMPLES)
def test_operands_that_fit(example):
    known = read(example)
    program(known.text(known.operands))
    program(known.text(known.required))


# Each of the three parts of the test takes 2 s, so by default only the first part runs.
LATER = partial(pytest.param, marks=pytest.mark.every_case)


@pytest.mark.parametrize("part", [0, LATER(1), LATER(2)])
def test_operands_that_do_not_fit(part):
    """An instruction with a missing, surplus or wrong operand must raise PtxSyntaxError."""
    every = [(example, *misfit) for example in EXAMPLES for misfit in misfits(example)]
    wrong = every[part::3]
    found = outcomes([text_of(instruction) for _, _, instruction in wrong])
    bad = [
        f"{what}: {instruction}: {outcome.kind} {outcome.message[:200]}"
        for (_, what, instruction), outcome in zip(wrong, found, strict=True)
        if (outcome.kind, outcome.line) != ("PtxSyntaxError", LINE)
    ]
    assert bad == []
    assert len(every) > 10 * len(EXAMPLES)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("add.s32 %r1, %r2", "add.s32: got 2 operands, allowed: 3"),
        ("bar.sync", "bar.sync: got 0 operands, allowed: 1 to 2"),
        (
            "add.s32 %r1, %p2, %r3",
            "operand 2 is a predicate, allowed: a register of 32 bits or an immediate",
        ),
        ("add.s32 1, %r2, %r3", "operand 1 is the immediate 1, allowed: a register of 32 bits"),
        ("mov.u32 %tid.x, 1", "operand 1 is a special register of 32 bits, allowed: a register"),
        ("ld.global.v2.f32 {%r1}, [%d1]", "operand 1 is a vector of 1, allowed: a vector of 2"),
        ("ld.global.f32 %r1, %d1", "operand 2 is a register of 64 bits, allowed: an address"),
        ("and.pred %p1, !%p2, %p3", "operand 2 is the negation of a predicate, allowed: a pred"),
        ("cp.async.wait_group -1", "operand 1 is the immediate -1, allowed: an immediate from 0"),
        ("cp.async.ca.shared.global [%r1], [%d1], 5", "from 4 to 16, a power of 2"),
        ("@%r1 bra END", "the guard is a register of 32 bits, allowed: a predicate"),
        ("add.rn.f32.bf16 %r1, %h2, %r3", "does not know 1 instructions: .*add.rn.f32.bf16"),
        ("wmma.load.a.sync.aligned.m8n8k4.row.f64 %d1, [%d2]", "does not know 1 instructions"),
        ("mma.sync.aligned.m16n8k999.row.col.f32.f16.f16.f32 %r1", "does not know"),
        ("ld.global.pred %p1, [%d1]", "does not know"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(instruction, message):
    with pytest.raises(ptx.PtxSyntaxError, match=message) as caught:
        program(instruction)
    assert caught.value.line == LINE
    assert re.match(rf"line {LINE}: ", str(caught.value))
    assert isinstance(caught.value, ptx.PtxError)


def test_a_copy_without_its_source():
    """If the predicate ignore-src of cp.async is true, the copy must write zeros."""
    x, y = torch.ones(32, dtype=torch.int32), torch.full((32,), 9, dtype=torch.int32)
    body = """
    mov.u32 %r1, memory;
    mad.lo.u32 %r2, %r0, 4, %r1;
    mad.wide.u32 %d5, %r0, 4, %d0;
    mad.wide.u32 %d6, %r0, 4, %d1;
    setp.ge.u32 %p1, %r0, 7;
    cp.async.ca.shared.global [%r2], [%d5], 4, %p1;
    cp.async.wait_all;
    ld.shared.u32 %r4, [%r2];
    st.global.u32 [%d6], %r4;
"""
    ptx.load(kernel(body, 2, 128)).launch("k", (1,), (32,), [x, y])
    assert y.tolist() == [1] * 7 + [0] * 25


def check_values(seeds: range) -> None:
    """Assert that instructions with random register values run or raise a PtxFault."""
    for races in (False, True):
        cases = [(example, seed) for seed in seeds for example in EXAMPLES]
        texts = [kernel(with_values(*case), 1, 8192, bounds=".maxntid 128") for case in cases]
        found = outcomes(texts, races=races, seed=seeds.start)
        bad = [
            f"{example}, seed {seed}: {outcome.kind} {outcome.message[:200]}"
            for (example, seed), outcome in zip(cases, found, strict=True)
            if outcome.kind not in ("ran", "PtxFault")
        ]
        assert bad == []
        assert [outcome.kind for outcome in found].count("ran") > len(found) // 2


def test_instructions_with_any_values():
    check_values(range(1))


@pytest.mark.every_case
def test_instructions_with_many_values():
    check_values(range(1, 22))
