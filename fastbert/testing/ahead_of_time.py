"""Compile the shipped launches for GPUs that need not be present, and judge the binaries.

    python -m fastbert.testing.ahead_of_time --arch 90 --noun attention --only dkv --processes 1

The program prints one JSON object per compiled launch, a `Compiled`. It runs in a process of its
own, which `compile_launches` starts, because Triton decides at import whether @jit interprets.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastbert.testing.addresses import narrow_products
from fastbert.testing.descriptors import stale_descriptors
from fastbert.testing.wgmma_hazards import overwritten_operands

ARCHITECTURES = (80, 89, 90, 100, 120)
# By architecture, the units that may compute the products of 16-bit operands. A newer GPU has older
# units too, but they are slower.
MATRIX_UNITS = {
    80: ("HMMA",),
    89: ("HMMA",),
    90: ("HGMMA",),
    100: ("UTCHMMA", "HMMA"),
    120: ("HMMA",),
}
# These kernels may use another unit too for 16-bit operands. The first element is the unit, and the
# second is the reason.
_SMALL_TILES = (
    "HMMA",
    "a warpgroup multiplies 64 rows, but gathers take many registers, so the tiles are smaller",
)
_SUMS_IN_FP32 = ("none", "the operands of the product are in fp32; the result alone has 16 bits")
OTHER_UNITS: dict[str, tuple[str, str]] = {
    "relative_attention_forward": _SMALL_TILES,
    "relative_attention_weights": _SMALL_TILES,
    "relative_attention_statistics": _SMALL_TILES,
    "relative_attention_dq": _SMALL_TILES,
    "relative_attention_dkv": _SMALL_TILES,
    "relative_attention_sums": _SMALL_TILES,
    "relative_attention_table_rows": _SUMS_IN_FP32,
    "relative_attention_bias_rows": _SUMS_IN_FP32,
}
# Instructions of 16 bytes per thread must load at least this share of a kernel's loaded bytes.
WIDE_SHARE = 0.5
_TERMS = "the tiles are small, and the index, the segments and a mask of pairs have 1 to 8 bytes"
# These kernels need only a smaller share. The first element is the share, and the second the
# reason.
NARROWER: dict[str, tuple[float, str]] = {
    "attention_dq": (0.2, "at head dim 32 a thread's part of a tile is 8 bytes"),
    "attention_dkv": (0.1, "as in attention_dq, and a statistic of a row is 4 bytes"),
    "attention_short_backward": (0.3, "as in attention_dkv"),
    "embedding_run_sums": (0.3, "the key of a row is loaded in two layouts"),
    "splade_dhidden": (0.1, "each class of a list has a logit, a row and a gradient of its own"),
    "relative_attention_forward": (0.3, _TERMS),
    "relative_attention_weights": (0.3, _TERMS),
    "relative_attention_statistics": (0.3, _TERMS),
    "relative_attention_dq": (0.3, _TERMS),
}
_EIGHT_WARPS = "a tile of 16 rows has 4 or 8 bytes for each of 256 threads"
# These kernels need no wide loads at all. The values are the reasons.
NARROW_LOADS: dict[str, str] = {
    "embedding_keys": "each row has one index, at any stride",
    "cross_entropy_partition": "any number of rows runs the same binary, so each has its own mask",
    "cross_entropy_reduce": "as in cross_entropy_partition",
    "splade_lists": "any number of classes runs the same binary, so that rows begin anywhere",
    "relative_attention_dkv": _EIGHT_WARPS,
    "relative_attention_sums": _EIGHT_WARPS,
    "relative_attention_bias_rows": "a row has one element for each head",
}


@dataclass(frozen=True)
class Compiled:
    """One launch compiled for one architecture, with the properties of the binary and the result.

    Args:
        name: Name of the launch.
        noun: Name of the kernel file without its suffix, such as "attention".
        arch: Architecture of the GPU, such as 90 for sm_90.
        dtype: The 16-bit dtype among the arguments, or "float32" if there is none.
        warps: Number of warps of a block.
        registers: Number of registers of a thread.
        stack: Bytes of stack of a thread, which are above 0 if registers spill.
        shared: Bytes of shared memory of a block.
        matrix: Unit of the matrix instructions in the SASS, or "none".
        loads: Number of instructions that load from global memory, by bytes per thread.
        tf32: Whether the PTX contains tf32 instructions.
        has_dot: Whether the TTIR contains a matrix product.
        narrow_products: The 32-bit products that may wrap, from `narrow_products`.
        overwritten: The writes to operands of running products, from `overwritten_operands`.
        stale: The products with a wrong descriptor, from `stale_descriptors`.
        constants: The compile-time constants, without strides.
        number: Position of the compilation in its run, from 1.
        total: Number of compilations in the run.
        faults: The faults in words; empty if the launch passes.
    """

    name: str
    noun: str
    arch: int
    dtype: str
    warps: int
    registers: int
    stack: int
    shared: int
    matrix: str
    loads: dict[int, int]
    tf32: bool
    has_dot: bool
    narrow_products: list[str]
    overwritten: list[str]
    stale: list[str]
    constants: dict[str, Any]
    number: int = 0
    total: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Name the launch, its dtype, its architecture and its constants."""
        constants = " ".join(f"{key}={value}" for key, value in self.constants.items())
        return f"{self.name} {self.dtype} sm_{self.arch} {self.warps} warps {constants}"

    @property
    def passed(self) -> bool:
        """Whether the launch has no fault."""
        return not self.faults

    @property
    def half(self) -> bool:
        """Whether the dtype has 16 bits."""
        return self.dtype in ("float16", "bfloat16")

    @property
    def wide_share(self) -> float:
        """The share of the loaded bytes that instructions of 16 bytes load; 1.0 without loads.

        Each load instruction is counted once, even if it is in a loop.
        """
        total = sum(width * count for width, count in self.loads.items())
        return 16 * self.loads.get(16, 0) / total if total else 1.0


def judge(compiled: Compiled) -> list[str]:
    """Return the faults of a compiled launch in words.

    A fault is a spilled register, too much shared memory, an older matrix unit, tf32, narrow loads,
    a 32-bit product in the address arithmetic, an operand that is overwritten too early, or a wrong
    descriptor of an operand.
    """
    from fastbert.kernels.tiles import shared_memory

    faults = []
    if compiled.stack:
        faults.append(f"{compiled.stack} bytes of stack: registers spill")
    if compiled.shared > (limit := shared_memory(compiled.arch)):
        faults.append(f"{compiled.shared} bytes of shared memory, allowed: {limit}")
    units = (*MATRIX_UNITS[compiled.arch], *OTHER_UNITS.get(compiled.name, ())[:1])
    if compiled.has_dot and compiled.half and compiled.matrix not in units:
        allowed = " or ".join(units)
        faults.append(f"matrix unit {compiled.matrix}, expected {allowed}")
    if compiled.tf32:
        faults.append("tf32 where IEEE fp32 is promised")
    needed = NARROWER.get(compiled.name, (WIDE_SHARE,))[0]
    if compiled.wide_share < needed and compiled.name not in NARROW_LOADS:
        loads = ", ".join(f"{n} of {width} bytes" for width, n in compiled.loads.items())
        faults.append(f"narrow loads: {loads}")
    faults += [f"32-bit address arithmetic: {product}" for product in compiled.narrow_products]
    return faults + compiled.overwritten + compiled.stale


# Launches


def specialise(launch: Any) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """Return the signature, constants and attributes that a real launch would compile with.

    Args:
        launch: The launch, with tensors among its arguments.

    Returns:
        The type of each argument by name, the value of each constant by name, and the attributes
        by position. The address of a tensor counts as divisible by 16. So does an integer that is
        divisible by 16, unless its parameter is marked as not specialised. As in Triton, other
        integers with a specialised parameter have an empty list as their attributes, and so have
        the constants that `_names` selects. With equal attributes, a real launch finds the binary
        in Triton's cache.
    """
    import torch

    names = {
        torch.float32: "*fp32",
        torch.float16: "*fp16",
        torch.bfloat16: "*bf16",
        torch.int32: "*i32",
        torch.int64: "*i64",
        torch.uint8: "*u8",
    }
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for position, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = names[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name], constants[parameter.name] = "constexpr", 1
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if not parameter.do_not_specialize:
                attributes[(position,)] = [["tt.divisibility", 16]] if value % 16 == 0 else []
        if signature[parameter.name] == "constexpr" and _names(value):
            attributes[(position,)] = []
    return signature, constants, attributes


def _names(constant: Any) -> bool:
    """Return whether Triton's attributes have an entry for a constant.

    From Triton 3.9 on, every constant has an entry. Before 3.9, only strings have one.
    """
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 9) or isinstance(constant, str)


def identity(launch: Any) -> str:
    """Return a text that is equal for two launches if they compile to the same binary."""
    kernel = f"{launch.kernel.__module__}.{launch.kernel.__name__}"
    return repr((kernel, *specialise(launch), launch.options()))


# The binary


def cuobjdump(option: str, cubin: Path) -> str:
    """Return the output of Triton's own ``cuobjdump`` for a binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), option, str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def matrix_unit(sass: str) -> str:
    """Return the newest kind of matrix instruction in the SASS, or "none"."""
    for name in ("UTCHMMA", "HGMMA", "HMMA", "DMMA"):
        if re.search(rf"\b{name}\b", sass):
            return name
    return "none"


def global_loads(sass: str) -> dict[int, int]:
    """Count the instructions that load from global memory, by bytes per thread.

    A bulk copy counts as 16 bytes.

    Examples:
        >>> from fastbert.testing.ahead_of_time import global_loads
        >>> global_loads("LDG.E.128 R4; LDG.E R8; LDG.E.U16 R9; LDG.E.128 R12;")
        {16: 2, 4: 1, 2: 1}
    """
    widths = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
    found = [16] * len(re.findall(r"\b(?:UTMALDG|UBLKCP)\b", sass))
    for modifiers in re.findall(r"\b(?:LDGSTS|LDG)\b((?:\.\w+)*)", sass):
        found.append(next((widths[m] for m in modifiers.split(".") if m in widths), 4))
    return {width: found.count(width) for width in sorted(set(found), reverse=True)}


def compile_one(launch: Any, noun: str, arch: int) -> Compiled:
    """Compile a launch for one architecture and judge the binary.

    Args:
        launch: The launch.
        noun: Name of the kernel file without its suffix, such as "attention".
        arch: Architecture of the GPU, such as 90 for sm_90.

    Returns:
        The properties of the binary and its faults.

    Raises:
        RuntimeError: If the output of ``cuobjdump`` lacks the registers or the stack.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = specialise(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(source, target=target, options=launch.options())
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage, sass = cuobjdump("-res-usage", cubin), cuobjdump("--dump-sass", cubin)
    dtypes = set(signature.values())
    narrow = {"*fp16": "float16", "*bf16": "bfloat16"}
    arguments = [name for name, kind in signature.items() if kind != "constexpr"]
    result = Compiled(
        name=launch.name,
        noun=noun,
        arch=arch,
        dtype=next((narrow[kind] for kind in sorted(dtypes & set(narrow))), "float32"),
        warps=launch.num_warps,
        registers=int(_group(r"REG:(\d+)", usage)),
        stack=int(_group(r"STACK:(\d+)", usage)),
        shared=compiled.metadata.shared,
        matrix=matrix_unit(sass),
        loads=global_loads(sass),
        tf32="tf32" in compiled.asm["ptx"],
        has_dot=" tt.dot " in compiled.asm["ttir"],
        narrow_products=narrow_products(compiled.asm["ttir"], arguments),
        overwritten=overwritten_operands(sass),
        stale=stale_descriptors(sass),
        constants={
            key: value
            for key, value in constants.items()
            if isinstance(value, (bool, int, str)) and not key.startswith("stride")
        },
    )
    return Compiled(**{**asdict(result), "faults": judge(result)})


def _group(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"cuobjdump: {pattern} is not in its output:\n{text[:500]}")
    return match[1]


# The program


def compile_launches(
    architectures: Sequence[int] = ARCHITECTURES,
    processes: int = 2,
    cache: Path | None = None,
    unlike: Sequence[int] = (),
    one_of_each: bool = False,
) -> Iterator[Compiled]:
    """Compile every shipped launch for every architecture, in separate processes.

    Args:
        architectures: Architectures of GPUs, such as 90 for sm_90.
        processes: Number of processes that compile.
        cache: Folder of Triton's cache; None is Triton's default.
        unlike: Architectures. A launch is left out if it has the same tiles and options on one of
            them.
        one_of_each: Whether one launch of each kernel is compiled, with 16-bit inputs if the kernel
            has such a launch.

    Yields:
        The compiled launches, as soon as each is done.

    Raises:
        ImportError: If Triton is not installed.
        RuntimeError: If a kernel does not compile. The message is the end of the standard error of
            the process.
    """
    from fastbert.ops.backend import HAS_TRITON, compiler_environment

    if not HAS_TRITON:
        raise ImportError("triton is not installed: pip install 'fastbert[triton]'")
    command = [sys.executable, "-m", "fastbert.testing.ahead_of_time"]
    command += ["--processes", str(processes), "--arch", *map(str, architectures)]
    command += ["--unlike", *map(str, unlike), *["--one-of-each"] * one_of_each]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(
            command, env=compiler_environment(cache), stdout=subprocess.PIPE, stderr=errors,
            text=True,
        ) as run,
    ):  # fmt: skip
        assert run.stdout is not None
        try:
            for line in run.stdout:
                yield from_json(line)
        except BaseException:
            run.terminate()
            raise
        if run.wait() != 0:
            errors.seek(0)
            raise RuntimeError(f"ahead of time: {errors.read()[-4000:]}")


def from_json(line: str) -> Compiled:
    """Return the `Compiled` of a line that the program printed."""
    content = json.loads(line)
    content["loads"] = {int(width): count for width, count in content["loads"].items()}
    return Compiled(**content)


@functools.cache
def _jobs(nouns: tuple[str, ...], only: str, arch: int) -> list[tuple[str, Any]]:
    """Return ``(noun, launch)`` for each distinct binary of an architecture.

    Kernel files share kernels, so that several launches can compile to the same binary.
    """
    from fastbert.kernels import tiles
    from fastbert.testing.shipped_launches import LAUNCHES

    tiles.compiled_target = arch
    found: dict[str, tuple[str, Any]] = {}
    for noun in nouns:
        for launch in LAUNCHES[noun]():
            if only in launch.name:
                found.setdefault(identity(launch), (noun, launch))
    return list(found.values())


def _one_of_each(nouns: tuple[str, ...], only: str, arch: int) -> set[int]:
    """Return the index of one launch of each name: the first with 16-bit inputs, or the first."""
    first: dict[tuple[str, bool], int] = {}
    for number, (_, launch) in enumerate(_jobs(nouns, only, arch)):
        half = bool({"*fp16", "*bf16"} & set(specialise(launch)[0].values()))
        first.setdefault((launch.name, half), number)
    return {n for (name, half), n in first.items() if half or (name, True) not in first}


def _compile_job(job: tuple[tuple[str, ...], str, int, int]) -> Compiled:
    nouns, only, index, arch = job
    noun, launch = _jobs(nouns, only, arch)[index]
    return compile_one(launch, noun, arch)


def main() -> None:
    """Compile the chosen launches and print a JSON object for each."""
    import triton

    from fastbert.testing.shipped_launches import LAUNCHES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--unlike", type=int, nargs="*", default=[])
    parser.add_argument("--noun", nargs="*", choices=LAUNCHES, default=list(LAUNCHES))
    parser.add_argument("--only", default="", help="launches whose name contains this")
    parser.add_argument("--one-of-each", action="store_true", help="one launch of each kernel")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET: got 1, allowed: unset; the interpreter compiles nothing")
    chosen = tuple(options.noun)
    known = {
        identity(launch)
        for arch in options.unlike
        for _, launch in _jobs(chosen, options.only, arch)
    }
    jobs = [
        (chosen, options.only, index, arch)
        for arch in options.arch
        for index, (_, launch) in enumerate(_jobs(chosen, options.only, arch))
        if identity(launch) not in known
    ]
    if options.one_of_each:
        few = {arch: _one_of_each(chosen, options.only, arch) for arch in options.arch}
        jobs = [job for job in jobs if job[2] in few[job[3]]]
    # The children are forked, so that they already have the launches.
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        for number, result in enumerate(pool.imap(_compile_job, jobs), 1):
            counted = {**asdict(result), "number": number, "total": len(jobs)}
            print(json.dumps(counted), flush=True)


if __name__ == "__main__":
    main()
