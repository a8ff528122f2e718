"""Compile CUDA C++ with nvcc to an object file, PTX and machine code, with a cache of the results.

The cache is in ``$XDG_CACHE_HOME/fastbert/nvcc``, by default in ``~/.cache``. The name of an entry
is a hash of everything on which its content depends: the source, every file that it can include,
the flags, and the versions of both compilers. An entry is therefore never out of date. After a
change of any source or header in csrc, all sources are compiled again. Entries that have not been
used for 30 days are deleted.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fastbert.ops.backend import compiler_environment

SOURCES = Path(__file__).resolve().parents[3] / "csrc"
SUFFIXES = (".cu", ".cuh", ".h")
# These environment variables change what nvcc compiles.
VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CPATH", "CPLUS_INCLUDE_PATH")
KEPT_SECONDS = 30 * 86400


def compiled(
    source: Path, folder: Path, arch: str, flags: Sequence[str] = ()
) -> tuple[Path, list[Path]]:
    """Compile a source, or copy its results from the cache.

    Args:
        source: The ``.cu`` file.
        folder: An existing folder for the results.
        arch: Architecture of the GPU, such as ``"90a"``.
        flags: Further flags of nvcc, such as ``-I``. If a flag names headers of another project,
            the cache is not used.

    Returns:
        The object file, and the files with PTX.

    Raises:
        RuntimeError: If the source does not compile. The message is the output of the compiler.
    """
    target = folder / f"{source.parent.name}-{source.stem}-{arch}"
    target.mkdir(exist_ok=True)
    command = _command(arch, flags)
    if any(_foreign(flag) for flag in flags):
        _compile(source, command, target)
    else:
        entry = _folder() / _key(source, command)
        _provide(entry, target, lambda content: _compile(source, command, content))
    return target / f"{source.stem}.o", sorted(target.glob("*.ptx"))


def assembled(source: Path, folder: Path, arch: str) -> tuple[Path, str]:
    """Compile a source of csrc/cuda to machine code with ptxas, or copy the result from the cache.

    The PTX comes from `compiled` with the flags of `flags_of`, so that no source is compiled twice.

    Args:
        source: The ``.cu`` file.
        folder: An existing folder for the results.
        arch: Architecture of the GPU, such as ``"90a"``.

    Returns:
        The binary, and the report of ``ptxas -v``.

    Raises:
        RuntimeError: If the source does not compile. The message is the output of the compiler.
    """
    flags = flags_of(arch)
    _, [ptx] = compiled(source, folder, arch, flags)

    def assemble(content: Path) -> None:
        binary = content / f"{source.stem}.cubin"
        command = ["nvcc", "-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v", str(ptx)]
        command += ["-o", str(binary)]
        (content / "ptxas.txt").write_text(_finished(command).stderr, encoding="utf-8")

    _provide(_folder() / _key(source, [*_command(arch, flags), "ptxas"]), ptx.parent, assemble)
    report = (ptx.parent / "ptxas.txt").read_text(encoding="utf-8")
    return ptx.parent / f"{source.stem}.cubin", report


def flags_of(arch: str) -> list[str]:
    """Return the flags with which the extension compiles csrc/cuda for an architecture."""
    return ["-I", str(SOURCES / "cuda"), *(["-DFASTBERT_SM90A"] if arch == "90a" else [])]


def run(command: Sequence[str | Path]) -> str:
    """Run a compiler, and return its standard output.

    Raises:
        RuntimeError: If the compiler fails. The message is its output.
    """
    return _finished(command).stdout


def _finished(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    # The messages of a compiler quote lines of sources, whose encoding is unknown.
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, encoding="utf-8", errors="replace"
    )
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{result.stdout}{result.stderr}")
    return result


def _command(arch: str, flags: Sequence[str]) -> list[str]:
    code = f"arch=compute_{arch},code=compute_{arch}"
    # One process loads several libraries with these objects. Without -fno-gnu-unique, the libraries
    # would share the variables of inline functions.
    host = ["-Xcompiler", "-fPIC,-fno-gnu-unique"]
    return ["-O3", "-std=c++17", "-lineinfo", "-gencode", code, *host, *flags]


def _compile(source: Path, command: Sequence[str], target: Path) -> None:
    """Compile a source, and write its object file and its PTX into the folder `target`."""
    with tempfile.TemporaryDirectory(prefix="fastbert-nvcc-") as kept:
        output = target / f"{source.stem}.o"
        run(["nvcc", *command, "--keep", "--keep-dir", kept, "-c", source, "-o", output])
        for ptx in Path(kept).glob("*.ptx"):
            shutil.copy(ptx, target)


def _provide(entry: Path, target: Path, make: Callable[[Path], None]) -> None:
    """Copy a cache entry into the folder `target`; `make` fills an entry that does not exist."""
    if not entry.is_dir():
        _make(entry, make)
    os.utime(entry)
    shutil.copytree(entry, target, dirs_exist_ok=True)


def _make(entry: Path, make: Callable[[Path], None]) -> None:
    """Fill a cache entry under a lock; other processes wait, and never see an incomplete entry."""
    import fcntl

    entry.parent.mkdir(parents=True, exist_ok=True)
    with open(entry.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if entry.is_dir():
            return
        _forget_old(entry.parent)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=entry.parent) as unfinished:
            content = Path(unfinished) / "content"
            content.mkdir()
            make(content)
            content.rename(entry)


def _forget_old(folder: Path) -> None:
    oldest = time.time() - KEPT_SECONDS
    for path in folder.iterdir():
        if path.stat().st_mtime < oldest:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _foreign(flag: str) -> bool:
    """Return whether a flag names a folder with headers of another project."""
    path = flag.removeprefix("-I")
    return os.path.isdir(path) and not Path(path).resolve().is_relative_to(SOURCES)


def _folder() -> Path:
    base = compiler_environment().get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fastbert" / "nvcc"


def _key(source: Path, command: Sequence[str]) -> str:
    """Return the hash of everything on which the output of nvcc depends."""
    found = hashlib.sha256()

    def add(text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)

    beside = [path for path in source.parent.iterdir() if path.suffix in SUFFIXES]
    within = [path for path in SOURCES.rglob("*") if path.suffix in SUFFIXES]
    environment = compiler_environment()
    given = [environment.get(name, "") for name in VARIABLES]
    for text in (source.name, *command, _versions(), *given):
        add(text)
    for path in (source, *sorted(beside), *sorted(within)):
        add(path.name)
        add(path.read_bytes())
    return found.hexdigest()


@functools.cache
def _versions() -> str:
    """Return the versions of nvcc and of the compiler of host code."""
    host = compiler_environment().get("NVCC_CCBIN") or "g++"
    return run(["nvcc", "--version"]) + run([host, "--version"])
