"""Mistakes that only compiled code can have, for insertion into the PTX of the shipped kernels.

A fault removes or changes instructions in the PTX of one launch: a barrier, a wait, a fence, a
swizzle, the form of a matrix instruction, a mask or a rounding. Compilers and hand-written kernels
make such mistakes. A fault is caught if the PTX machine raises `PtxFault`, or if a tensor fails the
tolerance rule. try_compiled_faults.py inserts the faults and runs the kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from fastbert.testing.cases import Case
from fastbert.testing.selection import find

# With "general", the general kernels loop over three tiles of keys. With "loss", there are two
# tiles. With "gradient", the loop over the depth of a product has two iterations; of the four
# stages in shared memory, the second iteration fills the stage that the code after the loop
# overwrites. The other cases are registered cases.
CASES: dict[str, Case] = {
    "short": find("attention", "plain")[0],
    "general": Case("attention", "three_tiles", (1, 1, 300, 300, 64)),
    "gemm": find("linear_gelu", "erf")[0],
    "gradient": Case("feed_forward", "two_steps", (65, 128, 160)),
    "rows": find("layer_norm", "residual")[0],
    "embedding": find("embedding", "plain")[0],
    "loss": Case("linear_cross_entropy", "two_tiles", (200, 48, 301)),
}


class Kind(NamedTuple):
    """A kind of mistake that is inserted.

    Args:
        meaning: Description of the mistake.
        old: Regular expression that matches the instructions to change.
        new: Replacement of a match, as in `re.sub`.
    """

    meaning: str
    old: str
    new: str | Callable[[re.Match[str]], str]

    def replacement(self, match: re.Match[str]) -> str:
        """Return the text that replaces `match`."""
        return match.expand(self.new) if isinstance(self.new, str) else self.new(match)


def removed(meaning: str, instruction: str) -> Kind:
    """Return a kind that removes the instructions whose names match the expression."""
    return Kind(meaning, rf"(?m)^\s*(?:@!?%p\d+ )?{instruction}\b[^;\n]*;$", "")


KINDS = {
    "barrier": removed("no barrier", r"bar\.sync"),
    "wait": removed("no wait for asynchronous copies", r"cp\.async\.wait_group"),
    "wait_less": Kind(
        "a wait that leaves one group of copies more",
        r"cp\.async\.wait_group\s+(\d+);",
        lambda match: f"cp.async.wait_group {int(match[1]) + 1};",
    ),
    "commit": removed("no end of a group of copies", r"cp\.async\.commit_group"),
    "wgmma_fence": removed("no wgmma.fence", r"wgmma\.fence"),
    "wgmma_commit": removed("no end of a group of wgmma", r"wgmma\.commit_group"),
    "wgmma_wait": removed("no wait for wgmma", r"wgmma\.wait_group"),
    "proxy_fence": removed("no fence.proxy.async", r"fence\.proxy\.async"),
    "ldmatrix_plain": Kind("ldmatrix without .trans", r"(ldmatrix\S*)\.trans", r"\1"),
    "ldmatrix_trans": Kind(
        "ldmatrix with .trans", r"(ldmatrix\.\S*\.x\d)(\.shared)", r"\1.trans\2"
    ),
    "stmatrix_trans": Kind(
        "stmatrix with .trans", r"(stmatrix\.\S*\.x\d)(\.shared)", r"\1.trans\2"
    ),
    # Bits 62 and 63 of a matrix descriptor select the swizzle; the fault changes the swizzle of 128
    # bytes to no swizzle.
    "descriptor_swizzle": Kind(
        "a descriptor without swizzle",
        r"(or\.b64\s+%rd\d+, %rd\d+, )46116862933\d{8};",
        r"\g<1>4194304;",
    ),
    "address_swizzle": Kind(
        "an address without swizzle", r"xor\.b32(\s+%r\d+, %r\d+), %r?\d+;", r"mov.b32\1;"
    ),
    "operand_order": Kind(
        "exchanged registers of A",
        r"(mma\S*\s+\{[^}]*\},\s*\{\s*)(%r\d+),\s*(%r\d+)",
        r"\1\3, \2",
    ),
    "accumulator_order": Kind(
        "exchanged accumulators", r"(mma\S*\s+\{\s*)(%r\d+),\s*(%r\d+)", r"\1\3, \2"
    ),
    "load_mask": Kind("a load without its mask", r"@%p\d+ (ld\.global)", r"\1"),
    "store_mask": Kind("a store without its mask", r"@%p\d+ (st\.global)", r"\1"),
    "rounding": Kind(
        "rounding toward zero to 16 bit", r"cvt\.rn\.(b?f16x?2?)\.f32", r"cvt.rz.\1.f32"
    ),
    "shuffle": Kind(
        "a shuffle over half the distance", r"(shfl\S*\s+%r\d+, %r\d+, )2(, 31, -1;)", r"\g<1>1\2"
    ),
    "exponential": Kind(
        "another approximate instruction than ex2",
        r"ex2\.approx\.ftz\.f32(\s+%r\d+, %r\d+);",
        r"tanh.approx.f32\1;",
    ),
    "fma_rounding": Kind(
        "products with sums that round toward zero", r"fma\.rn\.f32", "fma.rz.f32"
    ),
    "division": Kind("the approximate form of a division", r"div\.full\.f32", "div.approx.ftz.f32"),
}


class CompiledFault(NamedTuple):
    """One mistake that is inserted into the PTX of a launch.

    Args:
        arch: Architecture, such as 90 for sm_90.
        case: Key of `CASES`.
        launch: Name of the launch.
        kind: Key of `KINDS`.
        which: Matches of the kind's expression that change: "first", "last" or "every".
        dtype: Data type of the inputs.
    """

    arch: int
    case: str
    launch: str
    kind: str
    which: str
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """Return the name of the fault."""
        return f"sm_{self.arch} {self.launch} {self.dtype}: {self.which} {self.kind}"

    def broken(self, ptx: str) -> str:
        """Return the PTX with the fault, or raise ValueError if the kind matches nothing."""
        kind = KINDS[self.kind]
        found = list(re.finditer(kind.old, ptx))
        if not found:
            raise ValueError(f"{self}: the PTX has no such instruction")
        chosen = {"first": found[:1], "last": found[-1:], "every": found}[self.which]
        for match in reversed(chosen):
            ptx = ptx[: match.start()] + kind.replacement(match) + ptx[match.end() :]
        return ptx


def faults(
    arch: int, case: str, launch: str, dtype: str, first: str = "", last: str = "", every: str = ""
) -> list[CompiledFault]:
    """Return the faults of a launch, by the kinds that change the first, last or every match."""
    return [
        CompiledFault(arch, case, launch, kind, which, dtype)
        for which, kinds in (("first", first), ("last", last), ("every", every))
        for kind in kinds.split()
    ]


FAULTS = [
    *faults(
        80,
        "short",
        "attention_short_forward",
        "bfloat16",
        first=(
            "commit ldmatrix_plain ldmatrix_trans address_swizzle operand_order "
            "accumulator_order store_mask shuffle exponential"
        ),
        last="barrier wait wait_less load_mask",
        every="rounding",
    ),
    *faults(
        80,
        "short",
        "attention_short_backward",
        "bfloat16",
        first=(
            "ldmatrix_plain ldmatrix_trans address_swizzle operand_order accumulator_order "
            "shuffle exponential"
        ),
        last="barrier load_mask store_mask",
        every="rounding",
    ),
    *faults(
        80,
        "general",
        "attention_forward",
        "bfloat16",
        first=(
            "barrier wait wait_less ldmatrix_plain ldmatrix_trans address_swizzle operand_order "
            "accumulator_order shuffle exponential"
        ),
        last="load_mask store_mask",
        every="commit",
    ),
    *faults(
        80,
        "general",
        "attention_dkv",
        "bfloat16",
        first=(
            "barrier ldmatrix_plain ldmatrix_trans address_swizzle operand_order "
            "accumulator_order exponential"
        ),
        last="load_mask store_mask",
        every="rounding",
    ),
    *faults(
        80,
        "gemm",
        "linear_gelu",
        "bfloat16",
        first=(
            "barrier wait wait_less ldmatrix_trans address_swizzle operand_order "
            "accumulator_order load_mask store_mask exponential"
        ),
        last="commit",
    ),
    *faults(
        80,
        "rows",
        "layer_norm_backward",
        "bfloat16",
        first="barrier address_swizzle load_mask store_mask shuffle",
        every="rounding",
    ),
    *faults(
        80,
        "embedding",
        "embedding_run_sums",
        "bfloat16",
        first=(
            "barrier ldmatrix_plain address_swizzle operand_order accumulator_order load_mask "
            "store_mask"
        ),
    ),
    *faults(
        80,
        "loss",
        "cross_entropy_partials",
        "bfloat16",
        first=(
            "barrier wait wait_less ldmatrix_trans address_swizzle operand_order "
            "accumulator_order store_mask exponential"
        ),
        last="commit load_mask",
        every="shuffle",
    ),
    *faults(
        90,
        "short",
        "attention_short_forward",
        "bfloat16",
        first=(
            "commit wgmma_fence wgmma_commit wgmma_wait ldmatrix_trans descriptor_swizzle "
            "address_swizzle operand_order accumulator_order store_mask shuffle exponential"
        ),
        last="barrier wait wait_less wgmma_fence load_mask",
        every="proxy_fence rounding",
    ),
    *faults(
        90,
        "short",
        "attention_short_backward",
        "bfloat16",
        first=(
            "wgmma_fence wgmma_commit wgmma_wait proxy_fence ldmatrix_trans stmatrix_trans "
            "descriptor_swizzle address_swizzle operand_order accumulator_order shuffle "
            "exponential"
        ),
        last="barrier load_mask store_mask",
        every="wgmma_fence rounding",
    ),
    *faults(
        90,
        "general",
        "attention_forward",
        "bfloat16",
        first=(
            "barrier wait wgmma_fence wgmma_commit wgmma_wait proxy_fence ldmatrix_trans "
            "descriptor_swizzle address_swizzle operand_order accumulator_order shuffle "
            "exponential"
        ),
        last="wgmma_fence load_mask store_mask",
        every="commit wait_less",
    ),
    *faults(
        90,
        "general",
        "attention_dkv",
        "bfloat16",
        first=(
            "barrier wgmma_fence wgmma_commit wgmma_wait proxy_fence ldmatrix_trans "
            "descriptor_swizzle address_swizzle operand_order accumulator_order exponential"
        ),
        last="wgmma_fence load_mask store_mask",
        every="rounding",
    ),
    *faults(
        90,
        "gemm",
        "linear_gelu",
        "bfloat16",
        first=(
            "barrier wait wait_less wgmma_fence wgmma_commit wgmma_wait proxy_fence "
            "descriptor_swizzle address_swizzle accumulator_order load_mask store_mask "
            "exponential"
        ),
        last="commit",
    ),
    *faults(
        90,
        "gradient",
        "feed_forward_backward",
        "bfloat16",
        first=(
            "barrier wait wgmma_fence wgmma_commit wgmma_wait proxy_fence ldmatrix_trans "
            "descriptor_swizzle address_swizzle accumulator_order load_mask store_mask "
            "exponential"
        ),
        every="commit wait_less rounding",
    ),
    *faults(
        90,
        "rows",
        "layer_norm_forward",
        "float32",
        first="barrier",
        last="load_mask store_mask shuffle",
    ),
    *faults(
        90,
        "rows",
        "layer_norm_backward",
        "float32",
        first="barrier shuffle",
        last="load_mask store_mask",
    ),
    *faults(
        90,
        "loss",
        "cross_entropy_partials",
        "bfloat16",
        first=(
            "barrier wait wgmma_fence wgmma_commit wgmma_wait proxy_fence descriptor_swizzle "
            "address_swizzle accumulator_order store_mask shuffle exponential"
        ),
        last="load_mask",
        every="commit wait_less",
    ),
]


# Each of these changes is harmless for the reason in its entry, so neither the machine nor the
# tolerance rule must catch it. `FAULTS` also leaves out single redundant instructions, such as the
# barrier after the loop over keys in the short forward. This barrier is redundant, because each
# warp waits for its products before the later barriers around the layout conversion of the output.
UNCAUGHT: dict[CompiledFault, str] = {
    CompiledFault(80, "short", "attention_short_forward", "fma_rounding", "every", "bfloat16"): (
        "the sums are fp32, and a unit in their last place is lost when they are rounded to bf16"
    ),
    CompiledFault(80, "short", "attention_short_backward", "fma_rounding", "every", "bfloat16"): (
        "the sums are fp32, and a unit in their last place is lost when they are rounded to bf16"
    ),
    CompiledFault(80, "short", "attention_short_forward", "division", "every", "bfloat16"): (
        "the manual documents the same largest error for both forms, 2 units in the last place"
    ),
    CompiledFault(80, "general", "attention_forward", "division", "every", "bfloat16"): (
        "the manual documents the same largest error for both forms, 2 units in the last place"
    ),
    CompiledFault(80, "general", "attention_forward", "rounding", "every", "bfloat16"): (
        "the yardstick rounds to bf16 more often than the kernel"
    ),
}
