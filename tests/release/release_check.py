"""Decide whether this commit can be released, and write what belongs to the release.

    python tests/release/release_check.py --out out/release [--only STEP ...]

The folder gets the wheel, the source distribution, `parity.json` and `speed.json`, which compare
releases with each other, and `report.md`, which names each step, its seconds and what it showed.
The exit status is 1 if a step fails. ``make release-check`` installs what the steps need.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import changelog

from fastbert.ops import backend
from fastbert.version import __version__

ROOT = Path(__file__).resolve().parents[2]
MOST_MIB = 60


class Failed(Exception):
    """A step shows that the commit cannot be released."""


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """Return the standard output of a command; raise `Failed` with its last lines if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-5:]
        raise Failed(f"{' '.join(words)}: status {done.returncode}: {' / '.join(last)}")
    return done.stdout


def version(out: Path) -> str:
    """The changelog's newest section has this version and a date, and the tree has no change."""
    newest = changelog.read(changelog.FILE.read_text(encoding="utf-8"))[0]
    changed = run("git", "status", "--porcelain").strip()
    if changed:
        raise Failed(f"the working tree has changes: {changed.splitlines()[0]}")
    if newest.version != __version__ or newest.date is None:
        raise Failed(
            f"CHANGELOG.md begins with {newest.version}, allowed: {__version__} and a date"
        )
    return f"{__version__} of {newest.date}"


def packages(out: Path) -> str:
    """Two builds have the same bytes, and the wheel is small and has the licence."""
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    digests = set()
    for number in (1, 2):
        with tempfile.TemporaryDirectory() as scratch:
            # Another folder in each build, because no path of the machine may be in the wheel.
            clone = Path(scratch, f"clone-{number}")
            run("git", "clone", "--quiet", ROOT, clone)
            run(
                *(sys.executable, "-m", "build", "--no-isolation", "--outdir", out),
                cwd=clone,
                SOURCE_DATE_EPOCH=epoch,
                PYTHONPATH="",
            )
        (sdist,) = out.glob("*.tar.gz")
        repack(sdist, int(epoch))
        digests |= {(p.name, digest(p)) for p in out.glob("fastbert-*")}
    names = {name for name, _ in digests}
    twice = [name for name in sorted(names) if len([n for n, _ in digests if n == name]) > 1]
    if twice:
        raise Failed(f"two builds of {', '.join(twice)} differ")
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = archive.infolist()
    if not any(info.filename.endswith("/licenses/LICENSE") for info in held):
        raise Failed(f"{wheel.name} has no licence")
    size = wheel.stat().st_size / 2**20
    if size > MOST_MIB:
        raise Failed(f"{wheel.name} has {size:.1f} MiB, allowed: up to {MOST_MIB}")
    libraries = sum(i.compress_size for i in held if ".so" in i.filename) / 2**20
    return (
        f"{wheel.name}, {size:.1f} MiB, of which compiled code {libraries:.1f} MiB, "
        f"sha256 {digest(wheel)}; the same bytes in two builds"
    )


def repack(sdist: Path, epoch: int) -> None:
    """Write a source distribution again, without the times and the owner of its build."""
    with tarfile.open(sdist) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        contents = [archive.extractfile(m).read() if m.isfile() else b"" for m in members]
    with (
        open(sdist, "wb") as file,
        gzip.GzipFile("", "wb", mtime=epoch, fileobj=file) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for member, content in zip(members, contents, strict=True):
            member.mtime, member.uid, member.gid = epoch, 0, 0
            member.uname = member.gname = ""
            member.pax_headers = {}
            archive.addfile(member, io.BytesIO(content))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def installation(out: Path) -> str:
    """The wheel works in a folder of its own, outside the repository."""
    (wheel,) = out.glob("*.whl")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "a folder")
        start = time.monotonic()
        install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
        run(*install, "--target", folder, wheel)
        seconds = time.monotonic() - start
        code = (
            "import time, torch; start = time.perf_counter(); import fastbert; "
            "print(fastbert.__file__, round(1e3 * (time.perf_counter() - start), 1), sep='\\n')"
        )
        place, took = run(
            sys.executable, "-c", code, cwd=Path(scratch), PYTHONPATH=str(folder)
        ).split("\n")[:2]
        if not place.startswith(str(folder)):
            raise Failed(f"import fastbert takes {place}")
        check = (sys.executable, "-m", "fastbert", "check", "--quick", "--backend", "cpu", "--json")
        rows = json.loads(run(*check, cwd=Path(scratch), PYTHONPATH=str(folder)))["rows"]
    return (
        f"installed in {seconds:.1f} s, imported in {took} ms, {len(rows)} rows of the check pass"
    )


def parity(out: Path) -> str:
    """Every operation agrees with float64 at each level that this processor has."""
    levels = backend.EXTENSION.build_info()["cpu_isas_supported"]
    content = {}
    for level in levels:
        check = (sys.executable, "-m", "fastbert", "check", "--backend", "cpu", "--json")
        content[level] = json.loads(run(*check, FASTBERT_CPU_ISA=level))
    (out / "parity.json").write_text(json.dumps(content), encoding="utf-8")
    counts = ", ".join(f"{level} {len(c['rows'])} rows" for level, c in content.items())
    worst = max(row["ratio"] or 0.0 for c in content.values() for row in c["rows"])
    return f"{counts}; the largest error is {worst:.2f} times that of PyTorch in the same dtype"


def speed(out: Path) -> str:
    """The operations and the encoder are timed beside stock PyTorch and transformers."""
    run(sys.executable, "-m", "fastbert", "bench", "--json", out / "speed.json")
    content = json.loads((out / "speed.json").read_text(encoding="utf-8"))
    return (
        f"{len(content['operations'])} rows of operations, {len(content['encoder'])} of the encoder"
    )


def make(target: str) -> Callable[[Path], str]:
    """Return a step that runs a target of the Makefile."""

    def step(out: Path) -> str:
        run("make", target)
        return f"make {target}"

    return step


STEPS: dict[str, Callable[[Path], str]] = {
    "version": version,
    "packages": packages,
    "installation": installation,
    "parity": parity,
    "speed": speed,
    **{
        target: make(target)
        for target in ("lint", "docs", "test", "test-processors", "conformance")
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/release"))
    parser.add_argument("--only", nargs="+", choices=tuple(STEPS), default=list(STEPS))
    options = parser.parse_args()
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    lines = [f"# fastbert {__version__}", "", "| step | seconds | result |", "|---|---|---|"]
    failed = False
    for number, name in enumerate(options.only, 1):
        print(f"[{number}/{len(options.only)}] {name}", flush=True)
        start = time.monotonic()
        try:
            said = STEPS[name](out)
        except Failed as error:
            failed, said = True, f"**FAILED**: {error}"
        print(f"    {said}", flush=True)
        lines.append(f"| {name} | {time.monotonic() - start:.0f} | {said} |")
    (out / "report.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    print(f"written: {out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
