"""Faults that only compiled code can have, put into the PTX of the shipped kernels.

A fault removes or changes instructions in the PTX of one launch: a barrier, a wait, a fence, a
swizzle, the form of a matrix instruction, a mask, a rounding. Each is a typical mistake of a
compiler or of a kernel that is written by hand. A fault counts as caught if the PTX machine raises
`PtxFault`, or if a tensor fails by the tolerance rule. try_compiled_faults.py tries the faults.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fastbert.testing.cases import Case
from fastbert.testing.selection import find

# Three tiles of keys take the general kernels around their loops. The other cases are registered.
CASES: dict[str, Case] = {
    "short": find("attention", "plain")[0],
    "general": Case("attention", "three_tiles", (1, 1, 300, 300, 64)),
    "gemm": find("linear_gelu", "erf")[0],
    "gradient": find("feed_forward", "erf")[0],
    "rows": find("layer_norm", "residual")[0],
    "embedding": find("embedding", "plain")[0],
    "loss": Case("linear_cross_entropy", "two_tiles", (200, 48, 301)),
}


class Kind(NamedTuple):
    """A kind of fault.

    Args:
        old: Regular expression of the instructions that it changes.
        new: What replaces a match, as in `re.sub`.
    """

    old: str
    new: str


def removed(instruction: str) -> Kind:
    """Remove an instruction; the argument is a regular expression of its name."""
    return Kind(rf"(?m)^\s*(?:@!?%p\d+ )?{instruction}\b[^;\n]*;$", "")


KINDS = {
    "no barrier": removed(r"bar\.sync"),
    "no wait for copies": removed(r"cp\.async\.wait_group"),
    "a wait for one copy less": Kind(r"(cp\.async\.wait_group\s+)0;", r"\g<1>1;"),
    "no end of a group of copies": removed(r"cp\.async\.commit_group"),
    "no wgmma fence": removed(r"wgmma\.fence"),
    "no wgmma commit": removed(r"wgmma\.commit_group"),
    "no wgmma wait": removed(r"wgmma\.wait_group"),
    "no proxy fence": removed(r"fence\.proxy\.async"),
    "ldmatrix without transposition": Kind(r"(ldmatrix\S*)\.trans", r"\1"),
    "ldmatrix with transposition": Kind(r"(ldmatrix\.\S*\.x\d)(\.shared)", r"\1.trans\2"),
    "stmatrix with transposition": Kind(r"(stmatrix\.\S*\.x\d)(\.shared)", r"\1.trans\2"),
    # Bits 62 and 63 of the descriptor of a matrix choose the swizzle: 128 bytes becomes none.
    "descriptor without swizzle": Kind(
        r"(or\.b64\s+%rd\d+, %rd\d+, )46116862933\d{8};", r"\g<1>4194304;"
    ),
    "address without swizzle": Kind(r"xor\.b32(\s+%r\d+, %r\d+), %r?\d+;", r"mov.b32\1;"),
    "exchanged registers of A": Kind(
        r"(mma\S*\s+\{[^}]*\},\s*\{\s*)(%r\d+),\s*(%r\d+)", r"\1\3, \2"
    ),
    "exchanged accumulators": Kind(r"(mma\S*\s+\{\s*)(%r\d+),\s*(%r\d+)", r"\1\3, \2"),
    "load without mask": Kind(r"@%p\d+ (ld\.global)", r"\1"),
    "store without mask": Kind(r"@%p\d+ (st\.global)", r"\1"),
    "rounding toward zero": Kind(r"cvt\.rn\.(b?f16x?2?)\.f32", r"cvt.rz.\1.f32"),
    "fma rounding toward zero": Kind(r"fma\.rn\.f32", "fma.rz.f32"),
    "shuffle over half the distance": Kind(r"(shfl\S*\s+%r\d+, %r\d+, )2(, 31, -1;)", r"\g<1>1\2"),
    "division of the approximate form": Kind(r"div\.full\.f32", "div.approx.ftz.f32"),
    "approximate exponential of the wrong base": Kind(
        r"ex2\.approx\.ftz\.f32(\s+%r\d+, %r\d+);", r"tanh.approx.f32\1;"
    ),
}


class CompiledFault(NamedTuple):
    """One fault in the PTX of a launch.

    Args:
        arch: Architecture, as 90 for sm_90.
        case: Key of `CASES`.
        launch: Name of the launch.
        kind: Key of `KINDS`.
        which: "first", "last" or "every" match of the kind's expression.
        dtype: Dtype of the inputs.
    """

    arch: int
    case: str
    launch: str
    kind: str
    which: str
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """Name the fault."""
        return f"sm_{self.arch} {self.launch} {self.dtype}: {self.which} {self.kind}"

    def broken(self, ptx: str) -> str:
        """Return the PTX with the fault, or raise ValueError if the kind does not fit."""
        old, new = KINDS[self.kind]
        found = list(re.finditer(old, ptx))
        if not found:
            raise ValueError(f"{self}: the PTX has no such instruction")
        chosen = {"first": found[:1], "last": found[-1:], "every": found}[self.which]
        for match in reversed(chosen):
            ptx = ptx[: match.start()] + match.expand(new) + ptx[match.end() :]
        return ptx


FAULTS = [
    CompiledFault(arch, case, launch, kind, which, dtype)
    for arch in (80, 90)
    for case, launches, dtype in (
        ("short", ("attention_short_forward", "attention_short_backward"), "bfloat16"),
        ("general", ("attention_forward", "attention_dq", "attention_dkv"), "bfloat16"),
        ("gemm", ("linear_gelu",), "bfloat16"),
        ("gradient", ("feed_forward_backward",), "bfloat16"),
        ("rows", ("layer_norm_forward", "layer_norm_backward"), "bfloat16"),
        ("rows", ("layer_norm_forward", "layer_norm_backward"), "float32"),
        ("embedding", ("embedding_run_sums", "embedding_forward"), "bfloat16"),
        (
            "loss",
            ("cross_entropy_partials", "cross_entropy_dlogits", "cross_entropy_dweight"),
            "bfloat16",
        ),
    )
    for launch in launches
    for kind in KINDS
    for which in ("first", "last", "every")
]
UNCAUGHT = {}
