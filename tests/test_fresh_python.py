"""``_fresh_python.run`` behaves like a new Python process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import _fresh_python
import pytest


def test_torch_is_imported_already_and_fastbert_is_not():
    code = "import sys; print('torch' in sys.modules, {'fastbert', 'triton'} & {*sys.modules})"
    done = _fresh_python.run("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True set()\n", "")
    import fastbert

    where = _fresh_python.run("-c", "import fastbert; print(fastbert.__file__)").stdout
    assert where.strip() == fastbert.__file__


def test_output_messages_and_status_are_those_of_a_new_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, atexit\n"
        "assert __name__ == '__main__'\n"
        "atexit.register(print, 'the end')\n"
        "print(sys.argv[1:], os.environ['WORD'], os.getcwd(), sys.stdin.read() == '')\n"
        "raise ValueError(sys.argv[1])\n",
        encoding="utf-8",
    )
    env = os.environ | {"WORD": "a word"}
    ours = _fresh_python.run(program, "an argument", env=env, cwd=tmp_path)
    real = subprocess.run(
        [sys.executable, program, "an argument"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert (ours.returncode, ours.stdout) == (real.returncode, real.stdout)
    assert ours.stderr.splitlines()[-1] == real.stderr.splitlines()[-1] == "ValueError: an argument"


def test_a_process_does_not_see_another_process():
    _fresh_python.run("-c", "import os, torch; torch.mark = os.environ['MARK'] = 'a mark'")
    code = "import os, torch; assert not hasattr(torch, 'mark'); assert 'MARK' not in os.environ"
    assert _fresh_python.run("-c", code).returncode == 0


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("", 0)])
def test_exit_statuses(code, status):
    assert _fresh_python.run("-c", code).returncode == status


def test_a_signal_is_a_negative_status():
    done = _fresh_python.run("-c", "import os; os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL


def test_a_process_that_takes_too_long_is_killed():
    code = "import time; print('begun', flush=True); time.sleep(100)"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        _fresh_python.run("-c", code, timeout=0.5)
    assert caught.value.output == "begun\n"
    assert _fresh_python.run("-c", "").returncode == 0


def test_a_module_is_run_by_its_name():
    done = _fresh_python.run("-m", "json.tool", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage:")
