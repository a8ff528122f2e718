"""A launch finds binaries in Triton's cache that were compiled ahead of time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fastbert.ops import backend as backends

# A launch with `warmup` compiles the kernel, or finds it in the cache, but does not run the kernel.
PROGRAM = """
import json, os
import triton
from triton.backends.compiler import GPUTarget
from fastbert.kernels import tiles
from fastbert.testing import ahead_of_time
from fastbert.testing.shipped_launches import LAUNCHES

class Gpu:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

tiles.compiled_target = 90
launches = []
for noun, name in (("layer_norm", "layer_norm_forward"), ("attention", "attention_delta"),
                   ("feed_forward", "linear_gelu")):
    launches.append(next(x for x in LAUNCHES[noun]() if x.name == name))
for launch in launches:
    ahead_of_time.compile_one(launch, "any", 90)
def kept():
    return sorted(os.listdir(os.environ["TRITON_CACHE_DIR"]))
before = kept()
triton.runtime.driver.set_active(Gpu())
new = {}
for launch in launches:
    launch.kernel.run(
        grid=launch.grid, warmup=True, **launch.arguments, **launch.options(),
    )
    new[launch.name] = len(set(kept()) - set(before))
print(json.dumps([len(before), new]))
"""


@pytest.mark.every_case
@pytest.mark.skipif(not backends.HAS_TRITON, reason="needs triton")
def test_a_launch_finds_what_was_compiled_ahead_of_time(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=backends.compiler_environment(tmp_path),
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    compiled, new = json.loads(result.stdout)
    assert compiled >= 3
    assert new == {"layer_norm_forward": 0, "attention_delta": 0, "linear_gelu": 0}
