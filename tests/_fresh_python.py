"""Run Python in a new process in which torch, or also transformers, is imported already.

Importing torch takes 2 s, and importing transformers takes 5 s. A server imports them once, and
forks a process for each call. The new process has nothing of fastbert, runs with the environment of
the call, and ends like any other Python process. All processes of a server have the same locale,
encoding of the output, options of OpenMP except OMP_NUM_THREADS, and seed of hashes; a test of one
of these needs a process without a server.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any


def run(
    *arguments: object,
    after: str = "torch",
    env: dict[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` and return its exit status, its output and its messages.

    Args:
        arguments: ``-c`` and code, ``-m`` and the name of a module, or the path of a script, and
            then the arguments of the program.
        after: The module that is imported already, "torch" or "transformers".
        env: The environment variables, by default those of this process.
        cwd: The current folder, by default that of this process.
        timeout: A time in seconds, after which the process is killed.

    Raises:
        subprocess.TimeoutExpired: If the process was killed after `timeout`.
    """
    server = _server(after)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="fresh-python-") as folder:
        paths = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        request = {
            "arguments": [str(argument) for argument in arguments],
            "environment": dict(os.environ if env is None else env),
            "cwd": str(cwd or os.getcwd()),
            "paths": paths,
        }
        server.stdin.write(json.dumps(request).encode() + b"\n")
        child = int(server.stdout.readline())
        late = not select.select([server.stdout], [], [], timeout)[0]
        if late:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(int(server.stdout.readline()))
        # A program may write bytes that are no UTF-8, and a killed program may write half a letter.
        output, messages = (Path(path).read_text("utf-8", errors="replace") for path in paths)
    if late:
        raise subprocess.TimeoutExpired(request["arguments"], timeout, output, messages)
    return subprocess.CompletedProcess(request["arguments"], status, output, messages)


@functools.cache
def _server(module: str) -> subprocess.Popen[bytes]:
    """Start a server; it ends when its standard input is closed."""
    # Without a buffer, `select` sees a line that has not been read.
    server = subprocess.Popen(
        [sys.executable, __file__, module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    atexit.register(server.kill)
    return server


def _serve(module: str) -> dict[str, Any] | None:
    """Fork a process for each request; in a new process, return the request."""
    importlib.import_module(module)
    if module == "transformers":
        # transformers imports the code of a model when its name is read.
        getattr(sys.modules[module], "BertModel")  # noqa: B009
    gc.collect()
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            return json.loads(line)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)
    return None


def _become(request: dict[str, Any]) -> None:
    """Turn this process into the process of a request."""
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(path, os.O_WRONLY | os.O_CREAT, 0o600) for path in request["paths"]]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [path for path in sys.path[1:] if path not in own]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first, *arguments = request["arguments"]
    sys.path[:] = ["" if first in ("-c", "-m") else str(Path(first).parent), *given, *rest]
    if first == "-c":
        code, *arguments = arguments
        main = types.ModuleType("__main__")
        sys.modules["__main__"], sys.argv = main, [first, *arguments]
        exec(compile(code, "<string>", "exec"), vars(main))
    elif first == "-m":
        module, *arguments = arguments
        sys.argv = [first, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *arguments]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    received = _serve(sys.argv[1])
    if received is not None:
        _become(received)
