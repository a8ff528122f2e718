"""GPUs without the matrix units that the kernels need are refused, with the reason."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fastbert.ops import backend


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that this machine has a GPU of a compute capability."""

    def pretend(capability: tuple[int, int]) -> None:
        backend.refuse_old_gpu.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(backend, "HAS_TRITON", True)
        monkeypatch.setattr(backend, "EXTENSION", object())
        monkeypatch.setattr(backend, "EXTENSION_HAS_CUDA", True)

    # The GPU of a process stays the same, so that both are kept.
    with mock.patch.dict(backend._choices, clear=True):
        yield pretend
    backend.refuse_old_gpu.cache_clear()


REQUEST = backend.Request("cuda", torch.float16, head_dim=64)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_a_gpu_before_8_0_is_refused_with_its_capability(gpu, capability):
    gpu(capability)
    choice = backend.resolve("attention", None, REQUEST)
    assert choice.backend == "reference"
    words = f"compute capability {capability[0]}.{capability[1]}, allowed: 8.0 and higher"
    assert f"triton: the GPU has {words}" in choice.reason
    for name in ("triton", "cuda"):
        if name in backend.TABLES["attention"]:
            with pytest.raises(ValueError, match=f"'{name}' cannot serve attention: .*{words}"):
                backend.resolve("attention", name, REQUEST)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_newer_gpu_is_served(gpu, capability):
    gpu(capability)
    assert backend.resolve("attention", None, REQUEST).backend == "triton"
