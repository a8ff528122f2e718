"""``ptxmachine run`` executes a kernel of a file, and prints its counts or its fault."""

import json
import subprocess
import sys

import pytest
from ptxmachine.command import main
from small_kernels import HEADER, kernel

# Each of 32 threads reads the element of its neighbour from shared memory and stores it.
ROTATE = """
    mul.wide.u32 %d2, %r0, 4;
    add.s64 %d3, %d0, %d2;
    add.s64 %d4, %d1, %d2;
    ld.global.u32 %r1, [%d3];
    mov.u32 %r4, memory;
    shl.b32 %r2, %r0, 2;
    add.u32 %r3, %r4, %r2;
    st.shared.u32 [%r3], %r1;
    {barrier}
    xor.b32 %r2, %r2, 4;
    add.u32 %r3, %r4, %r2;
    ld.shared.u32 %r1, [%r3];
    st.global.u32 [%d4], %r1;
"""


@pytest.fixture
def file(tmp_path):
    def write(barrier="bar.sync 0;", text=None):
        path = tmp_path / "kernel.ptx"
        body = ROTATE.format(barrier=barrier)
        path.write_text(text or kernel(body, pointers=2, shared=128), encoding="utf-8")
        return str(path)

    return write


def test_the_counts_and_the_arrays(file, capsys):
    assert main(["run", file(), "i32[32]=range", "i32[32]", "--show", "4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("k: no fault\n")
    assert "argument 0 = 0, 1, 2, 3, …\n" in out
    assert "argument 1 = 1, 0, 3, 2, …\n" in out
    assert main(["run", file(), "i32[32]=range", "i32[32]", "--show", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arrays"] == {"0": [0, 1, 2, 3], "1": [1, 0, 3, 2]}
    assert found["counts"]["barriers"] == 1


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
def test_arrays_of_each_type_are_filled_and_shown(kind, file, capsys):
    text = kernel("    ld.global.u16 %h0, [%d0];")
    assert main(["run", file(text=text), f"{kind}[3]=range", "--block", "1"]) == 0
    assert "argument 0 = 0, 1, 2\n" in capsys.readouterr().out


def test_a_race_is_told_with_its_line_and_ends_with_1(file, capsys):
    assert main(["run", file(barrier=""), "i32[32]=range", "i32[32]"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("PtxFault: race: shared memory at byte ")
    assert "[k, PTX line " in err


def test_an_array_without_values_is_not_read(file, capsys):
    assert main(["run", file(), "i32[32]", "i32[32]"]) == 1
    assert "PtxFault: uninitialised" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "got 0 values, k takes p0 (64 bits), p1 (64 bits)"),
        (["i32[2]=all", "0"], "i32[2]=all: got all, allowed: zeros, ones, range, random"),
        (["int[2]", "0"], "int[2]: got int, allowed: f16, bf16, f32, "),
        (["x", "0"], "got 'x', allowed: a number, or an array such as f32[1024]=range"),
        (["0", "0", "--kernel", "other"], "--kernel: got 'other', allowed: k"),
    ],
)
def test_a_wrong_argument_is_named_and_ends_with_2(arguments, message, file, capsys):
    assert main(["run", file(), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_text_that_is_no_ptx_is_told_with_its_line(file, capsys):
    assert main(["run", file(text=HEADER + "nonsense\n")]) == 1
    assert "PtxSyntaxError: line 4: " in capsys.readouterr().err


def test_the_package_needs_neither_torch_nor_numpy(file):
    """The command must run a kernel in a process that cannot import torch and numpy."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from ptxmachine.command import main\n"
        f"sys.exit(main(['run', {file()!r}, 'i32[32]=range', 'i32[32]']))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "argument 1 = 1, 0, 3, 2" in run.stdout
