"""The choice of the instruction-set level, and process state that this choice must not change."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import _fresh_python
import pytest
import torch

X86, ARM = (platform.machine() == name for name in ("x86_64", "aarch64"))


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return _fresh_python.run("-c", code, env=os.environ | environment, timeout=120)


def test_build_info(extension):
    info = extension.build_info()
    assert info["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert info["cpu_isas"][0] == "baseline"
    assert set(info["cpu_isas_supported"]) <= set(info["cpu_isas"])
    assert isinstance(info["cuda"], bool)


ASK = "import torch; from fastbert import _C; print(_C.cpu_isa())"


def test_the_highest_level_that_is_not_slow_is_the_default(extension):
    info = extension.build_info()
    fast = [x for x in info["cpu_isas_supported"] if x not in info["cpu_isas_slow"]]
    assert python(ASK, FASTBERT_CPU_ISA="").stdout.strip() == fast[-1]


@pytest.mark.every_case
def test_each_level_can_be_chosen(extension):
    for level in extension.build_info()["cpu_isas_supported"]:
        assert python(ASK, FASTBERT_CPU_ISA=level).stdout.strip() == level


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo")
def test_bf16_dot_products_are_slow_on_intel_without_tiles(extension):
    info = extension.build_info()
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    is_intel = "GenuineIntel" in text
    is_cooper_lake = re.search(r"^model\s*: 85$", text, re.MULTILINE) is not None
    slow = {"avx512_bf16"} if is_intel and not is_cooper_lake else set()
    assert set(info["cpu_isas_slow"]) == slow & set(info["cpu_isas_supported"])


def test_an_unknown_level_is_an_error(extension):
    use = (
        "import torch; from fastbert import _C\n"
        "torch.ops.fastbert_C.activation_forward(torch.zeros(1, 1), None, 'gelu')"
    )
    result = python(use, FASTBERT_CPU_ISA="sse9")
    assert result.returncode != 0
    assert (
        "ValueError: FASTBERT_CPU_ISA: got 'sse9', allowed on this processor: base" in result.stderr
    )
    with pytest.raises(ValueError, match="level: got 'sse9', allowed on this processor: baseline"):
        extension.set_cpu_isa("sse9")


def test_the_module_takes_no_address(extension):
    """No Python function takes an address as a number; a wrong address would crash the process."""
    functions = [getattr(extension, name) for name in dir(extension) if not name.startswith("_")]
    signatures = [function.__doc__.splitlines()[0] for function in functions]
    assert [s for s in signatures if re.search(r"\(.*\bint\b.*\)", s, re.IGNORECASE)] == []


# Registers in the machine code reveal an instruction set. Only namespaces of levels that have this
# instruction set may use them.
TILE = re.compile(r"%tmm|\t(tile|[ls][dt]tilecfg)")
ZMM_OR_MASK = re.compile(r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b")
AVX = re.compile(r"%ymm|\tv[a-z]")
# On ARM, mnemonics and operands do: products of bf16, products of unsigned by signed bytes, and all
# else that ARMv8.0 lacks: other products of bytes, arithmetic in fp16, SVE, and the atomic
# operations that the compiler's own functions choose at run time.
BF16 = re.compile(r"\tbf(dot|mmla|mlal|cvt)")
I8MM = re.compile(r"\t(us|su)dot|\t(us|s|u)mmla")
ABOVE_NEON = re.compile(
    r"\t[us]dot|\tf(?!cvt)\w+\tv\d+\.[48]h|\tf(?!cvt|mov)\w+\th\d|\b[zp]\d+[./]"
    r"|\t(ld(add|clr|set|eor)|cas|swp)"
)


def instructions(extension) -> list[tuple[str, str]]:
    """Return the demangled function and the text of each instruction of the extension."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump (binutils) is not installed")
    listing = subprocess.run(
        ["objdump", "-d", "--demangle", "--no-show-raw-insn", extension.__file__],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    function, found = "", []
    for line in listing.splitlines():
        header = re.match(r"[0-9a-f]+ <(.*)>:$", line)
        if header:
            function = header[1]
        else:
            found.append((function, line))
    return found


@pytest.mark.skipif(not ARM, reason="not an aarch64 machine")
def test_no_instruction_above_a_level_on_arm(extension):
    stray, seen = set(), set()
    for function, line in instructions(extension):
        if BF16.search(line):
            seen.add("bf16")
            allowed = re.search(r"fastbert::cpu::neon_(bf16|i8mm)::", function)
        elif I8MM.search(line):
            seen.add("i8mm")
            allowed = "fastbert::cpu::neon_i8mm::" in function
        elif ABOVE_NEON.search(line):
            allowed = function.startswith("__aarch64_")
        else:
            continue
        if not allowed:
            stray.add((function, line.strip()))
    assert not stray, sorted(stray)[:10]
    assert seen == {"bf16", "i8mm"}


@pytest.mark.skipif(not X86, reason="not an x86-64 machine")
def test_no_instruction_above_the_baseline_outside_the_dispatched_functions(extension):
    stray, seen = set(), set()
    for function, line in instructions(extension):
        if TILE.search(line):
            seen.add("amx")
            if "fastbert::cpu::amx::" not in function:
                stray.add((function, line.strip()))
        elif ZMM_OR_MASK.search(line):
            seen.add("avx512")
            if not re.search(r"fastbert::cpu::(avx512|avx512_bf16|amx)::", function):
                stray.add((function, line.strip()))
        elif AVX.search(line):
            seen.add("avx2")
            # The PTX machine checks the processor's instruction set before it runs a launch.
            levels = r"fastbert::(cpu::(avx2|avx512|avx512_bf16|amx)|ptx)::"
            if not re.search(levels, function):
                stray.add((function, line.strip()))
    assert not stray, sorted(stray)[:10]
    assert seen == {"avx2", "avx512", "amx"}


# Loading an extension that was built with -ffast-math would flush subnormals to zero.
def test_import_leaves_the_floating_point_mode_alone(extension):
    code = (
        "import torch\n"
        "tiny = torch.tensor([1e-40]); before = float(tiny * 0.5)\n"
        "from fastbert import _C\n"
        "torch.ops.fastbert_C.activation_forward(torch.randn(999, 111), None, 'gelu')\n"
        "assert before != 0.0 and float(tiny * 0.5) == before\n"
        "assert float(torch.full((100000,), 1e-40).mul(0.5).min()) == before\n"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.every_case
@pytest.mark.skipif(sys.platform != "linux", reason="needs os.fork")
def test_works_in_a_child_forked_after_a_parallel_region(extension):
    """A forked child can call operators without OpenMP's threads; torch's layer norm would hang."""
    code = (
        "import os, signal, torch\n"
        "from fastbert import _C\n"
        "torch.set_num_threads(2)\n"
        "h = torch.randn(512, 768)\n"
        "activate = torch.ops.fastbert_C.activation_forward\n"
        "run = lambda: bytes(activate(h, None, 'gelu').untyped_storage())\n"
        "expected = run()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    signal.alarm(30)\n"
        "    os._exit(0 if run() == expected else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    result = python(code)
    assert result.returncode == 0, (result.returncode, result.stderr)
