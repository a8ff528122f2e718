"""Run the two kernels of attention weights on the PTX machine; a test runs this program.

    python tests/ptx/attention_weights_on_ptx.py 80|90

No registered case covers these kernels, which have no gradient. The program prints failed
comparisons.
"""

from __future__ import annotations

import sys

import torch

from fastbert import ops, reference
from fastbert.testing.compare import compare
from fastbert.testing.ptx.triton_launches import emulated
from fastbert.testing.selection import find
from fastbert.testing.yardstick import Yardstick


def check(arch: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 40, 64, generator=draw).to(dtype)
    k = torch.randn(2, 3, 97, 64, generator=draw).to(dtype)
    mask = torch.rand(2, 3, 40, 97, generator=draw) > 0.3
    mask[1, 2, 7] = False
    options = {"mask": mask, "scale": 0.125, "heads": [2, 0], "rows": [39, 7, 0, 7]}
    with emulated(arch, seed=1) as emulator:
        weights = ops.attention_weights(q, k, None, backend="triton", **options)
    assert [name for name, _ in emulator.reports] == ["attention_weights"]
    assert torch.count_nonzero(weights[1, 0, 1]) == 0

    def run(dtype: torch.dtype) -> torch.Tensor:
        return reference.attention_weights(q.to(dtype), k.to(dtype), **options)

    result = compare("weights", weights, run(torch.float64), Yardstick(lambda: run(dtype)))
    if not result.passed:
        print(result)


def check_relative(arch: int, dtype: torch.dtype, name: str) -> None:
    case = find("relative_attention", name)[0].inputs(dtype)
    with emulated(arch, seed=1) as emulator, torch.no_grad():
        call = {"backend": "triton", "return_weights": True}
        _, weights = ops.relative_attention(**dict(case.items()), **call)
    launches = [launch for launch, _ in emulator.reports]
    assert launches == ["relative_attention_forward", "relative_attention_weights"]

    def run(dtype: torch.dtype) -> torch.Tensor:
        given = {
            name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in case.items()
        }
        return reference.relative_attention(**given, return_weights=True)[1]

    result = compare("weights", weights, run(torch.float64), Yardstick(lambda: run(dtype)))
    if not result.passed:
        print(name, result)


if __name__ == "__main__":
    for kind in (torch.float16, torch.bfloat16, torch.float32):
        check(int(sys.argv[1]), kind)
        for name in ("deberta", "xlnet", "packed"):
            check_relative(int(sys.argv[1]), kind, name)
