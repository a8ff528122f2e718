"""nvcc's output is cached, and a source is compiled again if any of its inputs has changed."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
from _nvcc import require_nvcc

from fastbert.testing.ptx import nvcc

SOURCE = '#include "factor.cuh"\nextern "C" __global__ void scale(float* x) { *x *= FACTOR; }\n'


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Return a source that includes a header; the cache folder is empty."""
    require_nvcc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "scale.cu"
    source.write_text(SOURCE)
    (source.parent / "factor.cuh").write_text("#define FACTOR 3.0f\n")
    return source


def entries(tmp_path):
    return {path for path in (tmp_path / "cache" / "fastbert" / "nvcc").iterdir() if path.is_dir()}


def compiled(source, name, arch="80", flags=()):
    """Compile `source` into a new folder, and return the PTX texts."""
    folder = source.parents[1] / name
    folder.mkdir()
    object_file, files = nvcc.compiled(source, folder, arch, flags)
    assert object_file.stat().st_size > 1000
    return [path.read_text(encoding="utf-8") for path in files]


def test_a_second_compilation_is_a_copy(source, tmp_path, monkeypatch):
    [text] = compiled(source, "first")
    assert "mul.f32" in text
    monkeypatch.setattr(nvcc, "_compile", None)
    assert compiled(source, "second") == [text]
    assert len(entries(tmp_path)) == 1


@pytest.mark.every_case
def test_a_change_of_anything_is_compiled(source, tmp_path, monkeypatch):
    compiled(source, "first")
    header = source.parent / "factor.cuh"
    header.write_text("#define FACTOR 4.0f\n")
    [text] = compiled(source, "header")
    assert "0f40800000" in text
    source.write_text(SOURCE.replace("*=", "+="))
    [text] = compiled(source, "changed source")
    assert "add.f32" in text
    [text] = compiled(source, "architecture", "90a")
    assert ".target sm_90a" in text
    compiled(source, "flag", flags=["-DUNUSED"])
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DANOTHER")
    compiled(source, "variable")
    monkeypatch.setattr(nvcc, "_versions", lambda: "another compiler")
    compiled(source, "version")
    assert len(entries(tmp_path)) == 7


def test_nothing_is_kept_with_headers_of_another_project(source, tmp_path):
    for name, flags in (("first", ["-I", str(tmp_path)]), ("second", [f"-I{tmp_path}"])):
        [text] = compiled(source, name, flags=flags)
        assert "mul.f32" in text
    assert not (tmp_path / "cache").exists()
    compiled(source, "own", flags=["-I", str(nvcc.SOURCES / "cuda")])
    assert len(entries(tmp_path)) == 1


def test_a_source_with_an_error_is_not_kept(source, tmp_path):
    source.write_text("extern int x = nothing;")
    with pytest.raises(RuntimeError, match='identifier "nothing" is undefined'):
        compiled(source, "first")
    assert entries(tmp_path) == set()


def note_and_compile(source, name, log):
    """Compile `source`, and add a line to the file `log` for each run of nvcc.

    The test runs this function in other processes.
    """
    original = nvcc._compile

    def noting(*arguments):
        with open(log, "a", encoding="utf-8") as file:
            file.write("run\n")
        original(*arguments)

    nvcc._compile = noting
    compiled(source, name)


def test_processes_wait_for_the_first(source, tmp_path):
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    processes = [
        context.Process(target=note_and_compile, args=(source, f"process{n}", log))
        for n in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert log.read_text(encoding="utf-8") == "run\n"


@pytest.mark.every_case
def test_what_nobody_used_for_a_month_goes(source, tmp_path):
    compiled(source, "first")
    [old] = entries(tmp_path)
    killed = old.with_name("unfinished-1")
    killed.mkdir()
    long_ago = time.time() - nvcc.KEPT_SECONDS - 60
    for path in (old, killed):
        os.utime(path, (long_ago, long_ago))
    compiled(source, "again")  # This use makes the cache entry recent.
    compiled(source, "other", flags=["-DUNUSED"])
    assert old in entries(tmp_path)
    assert killed not in entries(tmp_path)
