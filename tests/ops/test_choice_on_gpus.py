"""A GPU's compute capability and the table of times decide which backend serves a call."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastbert import ops
from fastbert.ops import backend, gpu_times, tuned
from fastbert.ops.encoder import ONE_CALL, choose
from fastbert.ops.gpu_times import MEASURED, PREDICTED, Point
from fastbert.ops.layer_norm import LARGEST_CUDA_ROW
from fastbert.ops.layer_parts import choose_parts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that simulates a GPU with a compute capability."""

    def pretend(capability: tuple[int, int]) -> None:
        backend.capability.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(backend, "HAS_TRITON", True)
        monkeypatch.setattr(backend, "EXTENSION", object())
        monkeypatch.setattr(backend, "EXTENSION_HAS_CUDA", True)
        monkeypatch.setattr(backend, "CUDA_ARCHS", "8.0;9.0a;10.0+PTX")
        monkeypatch.setattr(backend, "tuned_table", tuned.Tuned)

    # The choices of backends and the compute capability are cached, because the GPU of a process
    # never changes.
    with mock.patch.dict(backend._choices, clear=True):
        yield pretend
    backend.capability.cache_clear()


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


@pytest.fixture
def times(monkeypatch):
    """Return a function that replaces the table of times: one shape per operation, for sm_90."""

    def replace(
        attention: dict[str, float],
        layer_norm: dict[str, float],
        product: dict[str, float] | None = None,
        kind: str = MEASURED,
    ) -> None:
        rows = (("attention", "S512 D64", 64, 512, attention),)
        rows += (("layer_norm", "768 columns", 768, 0, layer_norm),)
        for op in ("linear_gelu", "feed_forward"):
            rows += ((op, "2048×768×3072", 768, 2048, product or {}),)
        points = tuple(
            Point(op, 90, "H200", "16 bits", shape, width, size, kind, both, both)
            for op, shape, width, size, both in rows
        )
        monkeypatch.setattr(gpu_times, "POINTS", points)

    return replace


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_newer_gpu_is_served(gpu, times, capability):
    gpu(capability)
    times({"triton": 1e-5, "cuda": 2e-5}, {})
    choice = backend.resolve("attention", None, REQUEST)
    assert choice.backend == "triton"
    if capability == (9, 0):
        words = "16 bits, forward: triton 10.0 µs, cuda 20.0 µs"
        assert choice.reason == f"measured for H200, S512 D64, {words}"
    else:
        assert choice.reason == "first choice on this device"


def test_the_faster_backend_is_chosen(gpu, times):
    gpu((9, 0))
    times({"triton": 2e-5, "cuda": 1e-5}, {"triton": 1e-5, "cuda": 2e-5})
    assert backend.resolve("attention", None, REQUEST).backend == "cuda"
    assert backend.resolve("layer_norm", None, REQUEST).backend == "triton"
    # The table has no times for this dtype or for this operation.
    single = REQUEST._replace(dtype=torch.float32)
    assert backend.resolve("attention", None, single).backend == "triton"
    assert backend.resolve("embedding", None, REQUEST).backend == "triton"


def test_a_prediction_informs_and_triton_is_chosen(gpu, times):
    gpu((9, 0))
    times(*[{"triton": 2e-5, "cuda": 1e-5}] * 3, kind=PREDICTED)
    for op, request in (
        ("attention", REQUEST),
        ("layer_norm", REQUEST._replace(columns=768)),
        ("linear_gelu", REQUEST._replace(columns=768, rows=2048)),
        ("feed_forward", REQUEST._replace(columns=768, rows=2048)),
    ):
        for trained in (False, True):
            choice = backend.resolve(op, None, request._replace(trained=trained))
            assert choice.backend == "triton"
            assert choice.reason.startswith("no recorded run decides (predicted for H200, ")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_predictions_of_the_shipped_table_leave_triton_first(gpu, monkeypatch, capability):
    gpu(capability)
    predicted = tuple(point for point in gpu_times.POINTS if point.kind == PREDICTED)
    monkeypatch.setattr(gpu_times, "POINTS", predicted)
    for op, table in backend.TABLES.items():
        if "triton" not in table:
            continue
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for width, size, rows in ((64, 128, 128), (64, 512, 2048), (768, 0, 16384)):
                request = backend.Request(
                    "cuda", dtype, width, columns=width, length=size, rows=rows, trained=True
                )
                if backend.refusal(op, "triton", request) is None:
                    assert backend.resolve(op, None, request).backend == "triton"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"options": ("bias",)}, "the CUDA kernels do not serve bias"),
        ({"options": ("window",)}, "the CUDA kernels do not serve window"),
        ({"head_dim": 80}, "the head dim is 80, allowed: 32, 64, 128"),
        ({"transformed": True}, "transforms of torch.func"),
    ],
)
def test_a_first_choice_that_refuses_is_passed_over_with_its_reason(gpu, times, change, reason):
    gpu((9, 0))
    times({"triton": 2e-5, "cuda": 1e-5}, {})
    choice = backend.resolve("attention", None, REQUEST._replace(**change))
    assert choice.backend == ("reference" if "transformed" in change else "triton")
    assert choice.reason.startswith(f"cuda: {reason}")
    assert "measured for H200, S512 D64" in choice.reason


@pytest.mark.parametrize("op", ["linear_gelu", "feed_forward"])
def test_the_rows_of_a_product_choose_its_backend(gpu, monkeypatch, op):
    """The number of rows selects the times; a call with gradients adds the backward's time."""
    gpu((9, 0))
    seconds = {128: (1e-5, 2e-5), 2048: (2e-5, 1e-5)}
    points = tuple(
        Point(op, 90, "H200", "16 bits", f"{rows}×64×64", 64, rows, MEASURED,
              {"triton": triton, "cuda": cuda}, {"triton": cuda, "cuda": triton + 1e-5})
        for rows, (triton, cuda) in seconds.items()
    )  # fmt: skip
    monkeypatch.setattr(gpu_times, "POINTS", points)
    chosen = []

    def resolved(name: str, requested: str | None, request: backend.Request) -> None:
        assert (name, request.columns) == (op, 64)
        chosen.append(original(name, requested, request).backend)
        raise LookupError("enough")

    original = backend.resolve
    monkeypatch.setattr(backend, "resolve", resolved)
    shapes = [(64, 64), (64,)] * (1 if op == "linear_gelu" else 2)
    for rows, needs in ((100, False), (2, False), (3000, False), (3000, True)):
        # A fake tensor reports a GPU as its device.
        with FakeTensorMode():
            x, *parameters = (
                torch.empty(shape, device="cuda", dtype=torch.float16)
                for shape in ((2, rows, 64), *shapes)
            )
            with pytest.raises(LookupError):
                getattr(ops, op)(x.requires_grad_(needs), *parameters)
    assert chosen == ["triton", "triton", "cuda", "triton"]


def test_wide_rows_are_refused_before_the_launch(gpu, times):
    gpu((9, 0))
    times({}, {"triton": 2e-5, "cuda": 1e-5})
    for columns, name in ((6144, "cuda"), (6145, "triton"), (8193, "reference")):
        request = REQUEST._replace(columns=columns)
        assert backend.resolve("layer_norm", None, request).backend == name
    header = ROOT / "csrc" / "cuda" / "layer_norm.cuh"
    assert f"kMaxColumns = {LARGEST_CUDA_ROW};" in header.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("archs", "capability", "served"),
    [
        ("8.0;9.0a;10.0+PTX", (8, 9), True),
        ("8.0;9.0a;10.0+PTX", (9, 0), True),
        ("8.0;9.0a;10.0+PTX", (10, 3), True),
        ("8.0;9.0a;10.0+PTX", (12, 0), True),
        ("8.0;9.0a;10.0", (12, 0), False),
        ("9.0a", (10, 0), False),
        ("8.0;9.0a", (10, 0), False),
        ("9.0a", (8, 0), False),
        ("8.6", (8, 0), False),
        ("8.0+PTX", (9, 0), True),
    ],
)
def test_an_extension_without_code_for_the_gpu_is_passed_over(
    gpu, times, monkeypatch, archs, capability, served
):
    gpu(capability)
    monkeypatch.setattr(backend, "CUDA_ARCHS", archs)
    reason = backend.unavailable("cuda", "cuda")
    assert (reason is None) == served
    if not served:
        words = f"capability {capability[0]}.{capability[1]}, the extension was built for {archs}"
        assert words in reason


def test_layers_take_their_parts_from_cuda(gpu, times):
    gpu((9, 0))
    request = backend.Request("cuda", torch.bfloat16, 64, columns=768)
    for attention, norm, product, words in (
        (1e-5, 1e-5, 1e-5, ", by cuda: attention, feed_forward, layer_norm"),
        (1e-5, 3e-5, 3e-5, ", by cuda: attention"),
        (3e-5, 3e-5, 1e-5, ", by cuda: feed_forward"),
        (3e-5, 3e-5, 3e-5, ""),
    ):
        of_cuda = ({"triton": 2e-5, "cuda": seconds} for seconds in (attention, norm, product))
        times(*of_cuda)
        with mock.patch.dict(backend._choices, clear=True):
            assert choose(request, {}) == ("triton", ONE_CALL + words, True)
            parts = choose_parts(request, torch.bfloat16, {})
        seconds = (attention, product, norm)
        assert parts == tuple("cuda" if x == 1e-5 else "triton" for x in seconds)
    with pytest.raises(ValueError, match=r"'cuda' cannot serve attention: .*bias"):
        choose_parts(request._replace(options=("bias",)), torch.bfloat16, {"attention": "cuda"})
    # The CUDA C++ feed-forward does not implement ReLU.
    relu = request._replace(activation="relu")
    with mock.patch.dict(backend._choices, clear=True):
        times({}, {}, {"triton": 2e-5, "cuda": 1e-5})
        assert choose(relu, {}) == ("triton", ONE_CALL, True)
    with pytest.raises(ValueError, match=r"'cuda' cannot serve feed_forward: .*none for relu"):
        choose_parts(relu, torch.bfloat16, {"feed_forward": "cuda"})
    # If an operation has another backend, the layers cannot run as one call.
    choice = choose(request, {"feed_forward": "reference"})
    assert choice.backend == "reference"
    assert choice.reason.startswith("layer by layer: feed_forward is served by reference")
