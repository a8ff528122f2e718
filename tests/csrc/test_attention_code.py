"""The registers, shared memory and loops of attention for sm_80 and later do not grow.

These tests find a regression of the machine code without a GPU and without timing. The expected
figures are in machine_code.json, which _machine_code.py rewrites after a deliberate change.
"""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import _machine_code
import pytest


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return each source's object file for all architectures, and the report of ptxas."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    folder = tmp_path_factory.mktemp("code")
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda x: _machine_code.compile_kernels(nvcc, x, folder), _machine_code.SOURCES
            )
        )


@pytest.mark.every_case
def test_no_register_spills(compiled):
    for source, (_, report) in zip(_machine_code.SOURCES, compiled, strict=True):
        usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
        # The kernels are for two dtypes, three head dims, and five architectures, and with or
        # without a mask of (query, key) pairs and dropout.
        assert len(usage) == 2 * 3 * 4 * 5
        assert set(usage) == {("0", "0")}, source.name


@pytest.mark.every_case
def test_the_code_is_that_of_the_record(compiled):
    pytest.importorskip("triton", reason="its wheel has cuobjdump")
    record = json.loads(_machine_code.RECORD.read_text(encoding="utf-8"))
    version = _machine_code.version(shutil.which("nvcc"))
    if version != record["nvcc"]:
        pytest.skip(f"nvcc is {version}, and the record describes the code of {record['nvcc']}")
    results = {}
    for target, _ in compiled:
        results |= _machine_code.properties(target)
    assert results == record["kernels"], "python tests/csrc/_machine_code.py writes the record anew"


@pytest.mark.parametrize(
    ("kernel", "products"),
    # The numbers count a warp's 16 x 8 x 16 products per tile, by head dim D. In the forward, a
    # tile has two products of 32 queries, 32 keys and D. In the backward, four warps share five
    # products of 32 queries, 128 keys (64 at D = 128) and D.
    [("forward", {32: 32, 64: 64, 128: 128}), ("backward", {32: 80, 64: 160, 128: 160})],
)
def test_the_loop_has_the_products_of_one_tile(kernel, products):
    record = json.loads(_machine_code.RECORD.read_text(encoding="utf-8"))["kernels"]
    for dim, number in products.items():
        for arch, line in record[f"{kernel} D{dim}"].items():
            assert line["hmma"] == number, (kernel, dim, arch)
