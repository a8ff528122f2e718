"""Registers, shared memory and loops of attention and product kernels, as ptxas compiles them.

    python tests/csrc/_machine_code.py    # rewrites machine_code.json

The loop of a kernel is the shortest loop of its machine code that contains every matrix
instruction. The loop runs over tiles of keys in the forward of attention, and over tiles of queries
in the backward. machine_code.json has loops only for the attention kernels for sm_80 and later.
test_hopper_code.py and test_cuda_gemm_code.py limit the loops of the other kernels.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fastbert.testing.ahead_of_time import cuobjdump
from fastbert.testing.machine_code import functions, loops, read
from fastbert.testing.ptx import cuda_gemm, hopper_attention

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("machine_code.json")
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("attention_*.cu"))
# The binaries for sm_80 also run on sm_86 and sm_89, and sm_120 runs code compiled from the PTX for
# sm_100.
TARGETS = {"80": ("80", "89"), "90": ("90",), "100": ("100", "120")}
# gemm.cu is compiled for these architectures; hopper/gemm.cu has the products for Hopper GPUs.
PRODUCTS = ("80", "89", "100", "120")
PRODUCT = re.compile(r"gemm_kernelI\S*?Store(Gelu|Gradient)\S*?Gelu(Tanh)?By")
HOPPER = re.compile(r"persistent_(forward|backward)_kernelI\d+__[a-z_\d]+?Li(\d+)ELb(\d)ELb(\d)E")
KERNEL = re.compile(r"(forward|backward)_kernelI(6__half|13__nv_bfloat16)Li(\d+)ELb(\d)ELb(\d)E")


def compile_kernels(nvcc: Path | str, source: Path, folder: Path) -> tuple[Path, str]:
    """Compile a source for all architectures; return the object file and the report of ptxas."""
    target = folder / f"{source.stem}.o"
    command = [nvcc, "-c", "-O3", "-std=c++17", "-Xptxas", "-v", source, "-o", target]
    for virtual, real in TARGETS.items():
        code = ",".join(f"sm_{arch}" for arch in real)
        command += ["-gencode", f"arch=compute_{virtual},code=[{code}]"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target, result.stderr


def version(nvcc: Path | str) -> str:
    """Return the version of nvcc, such as "13.0.88"."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    return re.search(r"V([\d.]+)", text)[1]


def loop(text: str) -> dict[str, int]:
    """Count all instructions, and the matrix instructions, in the loop of a kernel.

    Examples:
        >>> from _machine_code import loop
        >>> loop("/*0000*/ MOV R1, R2 ; /*0010*/ HMMA.16816 R1 ; /*0020*/ @P0 BRA 0x10 ;")
        {'instructions': 2, 'hmma': 1}
    """
    code = read(text)
    products = [x.address for x in code if x.name == "HMMA"]
    whole = [
        body
        for body in loops(code)
        if body[0].address <= products[0] and products[-1] < body[-1].address
    ]
    inside = min(whole, key=lambda body: body[-1].address - body[0].address)
    return {"instructions": len(inside), "hmma": len(products)}


def properties(target: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Return registers, shared memory and loop of each kernel in an object file, by architecture.

    The shared memory is the static memory, without the dynamic memory that a launch requests. The
    fp16 and the bf16 kernel share an entry, which has the larger of their two figures.
    """
    by_kernel: dict[str, dict[str, dict[str, int]]] = {}
    usage, dumped = cuobjdump("-res-usage", target), cuobjdump("--dump-sass", target)
    for (arch, used), (_, code) in zip(
        by_architecture(usage), by_architecture(dumped), strict=True
    ):
        loop_of = {name: loop(text) for name, text in functions(code).items()}
        for name, registers, shared in re.findall(
            r"Function (\S+):\s+REG:(\d+).*SHARED:(\d+)", used
        ):
            kernel, _, dim, pairs, dropout = KERNEL.search(name).groups()
            words = [kernel, f"D{dim}", *["pairs"] * int(pairs), *["dropout"] * int(dropout)]
            line = {"registers": int(registers), "shared": int(shared), **loop_of[name]}
            lines = by_kernel.setdefault(" ".join(words), {})
            before = lines.get(f"sm_{arch}", line)
            lines[f"sm_{arch}"] = {key: max(before[key], line[key]) for key in line}
    return by_kernel


def resources(binary: Path) -> dict[str, dict[str, int]]:
    """Return registers and shared memory of product kernels, or of attention for Hopper GPUs.

    Args:
        binary: File with the code for one architecture.
    """
    by_kernel: dict[str, dict[str, int]] = {}
    usage = cuobjdump("-res-usage", binary)
    for name, registers, stack, shared in re.findall(
        r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage
    ):
        assert stack == "0", name
        if product := PRODUCT.search(name):
            direction = {"Gelu": "forward", "Gradient": "backward"}[product[1]]
            words = ["product", direction, *["tanh"] * bool(product[2])]
        else:
            direction, dim, pairs, dropout = HOPPER.search(name).groups()
            words = ["attention", direction, f"D{dim}"]
            words += [*["pairs"] * int(pairs), *["dropout"] * int(dropout)]
        line = {"registers": int(registers), "shared": int(shared)}
        before = by_kernel.get(" ".join(words), line)
        by_kernel[" ".join(words)] = {key: max(before[key], line[key]) for key in line}
    return by_kernel


def recorded(arch: str, prefix: str) -> dict[str, dict[str, int]]:
    """Return the figures of machine_code.json for the kernels whose names begin with `prefix`.

    The test is skipped if nvcc has another version than the nvcc of machine_code.json.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    nvcc_version = version(shutil.which("nvcc"))
    if nvcc_version != record["nvcc"]:
        pytest.skip(
            f"nvcc is {nvcc_version}, and the record describes the code of {record['nvcc']}"
        )
    return {
        name: lines[f"sm_{arch}"]
        for name, lines in record["others"].items()
        if name.startswith(prefix) and f"sm_{arch}" in lines
    }


def merge(
    record: dict[str, dict[str, Any]], arch: str, by_kernel: dict[str, dict[str, int]]
) -> None:
    """Add the entries of one architecture to the content of machine_code.json."""
    for name, line in by_kernel.items():
        record.setdefault(name, {})[f"sm_{arch}"] = line


def by_architecture(text: str) -> list[tuple[str, str]]:
    """Split the output of cuobjdump into pairs of architecture and text, sorted by architecture."""
    parts = re.split(r"^arch = sm_(\d+)$", text, flags=re.M)[1:]
    return sorted(zip(parts[::2], parts[1::2], strict=True))


def main() -> None:
    nvcc = shutil.which("nvcc")
    kernels = {}
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:
            kernels |= properties(compile_kernels(nvcc, source, Path(folder))[0])
        binaries: dict[str, dict[str, Any]] = {}
        for arch in (*PRODUCTS, "90a"):
            cuda_gemm.machine_code(Path(folder), 90 if arch == "90a" else int(arch))
            merge(binaries, arch, resources(Path(folder) / f"gemm{arch}.cubin"))
        for direction in ("forward", "backward", "backward_wide"):
            hopper_attention.machine_code(Path(folder), direction)
            merge(binaries, "90a", resources(Path(folder) / f"attention_{direction}.cubin"))
    content = {"nvcc": version(nvcc), "kernels": kernels, "others": binaries}
    text = json.dumps(content, indent=1)
    # The file has one line for each kernel and architecture.
    RECORD.write_text(re.sub(r"\n {4}|\n {3}(?=})", " ", text) + "\n")


if __name__ == "__main__":
    main()
