"""The compiled AMX level, including its assembly, gives the same bits as the emulated AMX level.

The tests trap the tile instructions of the built extension (`_trapped.py`). The trap handler and
csrc/cpu/isa/tile.h implement Intel's manual independently, so each checks the other. On a processor
with AMX, the same cases also run with the processor's tiles.
"""

from __future__ import annotations

import signal
import subprocess

import _emulated
import _trapped
import pytest
import torch

from fastbert import ops, reference
from fastbert.ops.int8_linear import pack

BF16 = torch.bfloat16
EPS = 1e-5


@pytest.fixture
def tiles(request, extension):
    """Trap the tile instructions of the extension during a test."""
    if reason := _trapped.lacking(extension):
        pytest.skip(reason)
    trapped = request.getfixturevalue("trapped")
    with trapped.trapping():
        yield trapped
        extension.set_cpu_isa(None)


@pytest.fixture(params=["trapped", "processor"])
def real(request, extension):
    """Return a function that selects the compiled level, with trapped tiles or real tiles."""
    if request.param == "trapped":
        trapped = request.getfixturevalue("tiles")
        yield lambda: trapped.use(extension)
    elif "amx" in extension.build_info()["cpu_isas_supported"]:
        yield lambda: extension.set_cpu_isa("amx")
        extension.set_cpu_isa(None)
    else:
        pytest.skip("this processor has no tiles of its own")


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


# Numbers of rows are near tiles of 16 and strips of 32, columns near one or two panels of 32, and
# depths near steps of 32. The last products have several tasks or read rows without a copy.
PRODUCTS = [
    *((m, 111, 59) for m in (1, 15, 16, 17, 31, 32, 33, 65)),
    *((m, 64, 64) for m in (1, 16, 17, 32, 33, 48, 49)),
    *((7, n, 96) for n in (1, 16, 17, 32, 33, 63, 65, 97)),
    *((20, 40, k) for k in (1, 2, 31, 32, 33, 300)),
    (70, 20, 33),
    (130, 20, 64),
    (130, 200, 256),
    (203, 111, 768),
]


def products():
    linear, norm = torch.ops.fastbert_C.linear, torch.ops.fastbert_C.linear_layer_norm
    for m, n, k in PRODUCTS:
        x, weight, bias, residual = draw(m, k), draw(n, k), draw(n), draw(m, n)
        yield from linear(x, weight, bias, residual, "gelu", True)
        yield linear(x, weight, None, None, "none", False)[0]
        yield norm(x, weight, bias, residual, draw(n), draw(n), EPS)
        yield norm(x, weight, None, residual.float(), draw(n), draw(n), EPS)


def strided_products():
    matmul = torch.ops.fastbert_C.matmul
    wide = draw(40, 200)
    for x in (wide[:, 1:97], wide[:, 64:160], wide.t(), wide[::3, 2::2]):
        weight = draw(50, x.shape[1])
        yield torch.ops.fastbert_C.linear(x, weight, draw(50), None, "relu", False)[0]
        yield matmul(x, weight.t(), None, torch.float32)
        yield matmul(x, weight.t().contiguous(), draw(x.shape[0], 50), BF16)


def products_at_the_limits():
    """Yield products whose operands and sums include denormals, infinities and signed zeros."""
    for scale in (2.0**-130, 2.0**-70, 2.0**63, 2.0**120):
        x, weight = draw(37, 100) * scale, draw(40, 100)
        weight[:, ::7] *= 2.0**-120
        x[3], x[4, 5], x[5] = 0.0, torch.inf, -0.0
        yield torch.ops.fastbert_C.linear(x, weight, None, None, "none", False)[0]
        yield torch.ops.fastbert_C.matmul(x, (weight * scale).t(), None, torch.float32)


def int8_products():
    operators = torch.ops.fastbert_C
    shapes = ((1, 1, 1), (7, 33, 59), (16, 16, 64), (17, 40, 65), (32, 32, 128), (33, 65, 64))
    for m, n, k in (*shapes, (50, 17, 129), (200, 130, 1500)):
        values, scale = reference.int8_weight(torch.randn(n, k))
        weight = pack(values, scale, *operators.int8_layout())
        for dtype in (BF16, torch.float32):
            x, bias, residual = draw(m, k, dtype=dtype), draw(n, dtype=dtype), draw(m, n)
            rest = (weight.outputs, bias, residual.to(dtype), "gelu", dtype)
            yield operators.int8_linear(x, *weight[:3], *rest)
    # The sums of these products have the largest possible magnitude.
    for sign in (-1, 1):
        values = torch.full((3, 65536), 127 if sign > 0 else -128, dtype=torch.int8)
        weight = pack(values, torch.ones(3), *operators.int8_layout())
        rest = (weight.outputs, None, None, "none", torch.float32)
        yield operators.int8_linear(torch.full((2, 65536), 255.0), *weight[:3], *rest)


def results(function, tensors, *arguments, **options):
    """Yield the output of `function` and its gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves, *arguments, backend="cpu", **options)
    yield out.detach()
    yield from torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out.dtype))


def attention():
    seed = torch.tensor([3])
    for dim in (1, 32, 59, 64, 80):
        for queries, keys in ((1, 1), (16, 33), (33, 17), (203, 203)):
            q, k, v = draw(2, 3, queries, dim), draw(2, 3, keys, dim), draw(2, 3, keys, dim)
            yield from results(ops.attention, (q, k, v))
    q, k, v = (draw(2, 2, 300, 64) for _ in range(3))
    padding, pairs = torch.rand(2, 300) < 0.6, torch.rand(2, 1, 300, 300) < 0.5
    padding[1, 100:], padding[0, 128:256], pairs[0, 0, 40] = False, False, False
    for options in (
        {"mask": padding},
        {"mask": pairs},
        {"causal": True, "scale": -0.3},
        {"window": (40, 140), "mask": padding},
        {"bias": torch.randn(1, 2, 300, 300).to(BF16)},
        {"dropout_p": 0.2, "dropout_seed": seed},
    ):
        yield from results(ops.attention, (q, k, v), **options)


def attention_varlen():
    lengths = torch.tensor([0, 40, 1, 0, 130, 16, 17, 300]).cumsum(0).int()
    for dim in (32, 64, 80):
        q, k, v = (draw(int(lengths[-1]), 2, dim) for _ in range(3))
        yield from results(ops.attention_varlen, (q, k, v), lengths)
        yield from results(ops.attention_varlen, (q, k, v), lengths, causal=True)
        yield from results(ops.attention_qkvpacked, (torch.stack((q, k, v), 1),), lengths)


def training():
    for m, k, n in ((1, 59, 111), (33, 96, 200), (70, 64, 256)):
        tensors = (draw(m, k), draw(n, k), draw(n), draw(k, n), draw(k))
        yield from results(ops.feed_forward, tensors)
        yield from results(ops.linear_gelu, tensors[:3])
        labels = torch.randint(0, n, (m,))
        yield from results(ops.linear_cross_entropy, tensors[:3], labels)


CASES = [products, strided_products, products_at_the_limits, int8_products, attention]
CASES += [attention_varlen, training]


def solve(case) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return list(case())


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of x, with the same pattern for all NaNs."""
    return x.masked_fill(x.isnan(), torch.nan).reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.every_case
def test_the_compiled_level_has_the_bits_of_its_emulation(real, request, extension, threads, case):
    if reason := _emulated.lacking(extension):
        pytest.skip(reason)
    request.getfixturevalue("emulated").use(extension, "amx")
    expected = solve(case)
    real()
    for i, (x, y) in enumerate(zip(solve(case), expected, strict=True)):
        assert torch.equal(bits(x), bits(y)), f"result {i}"


SCHEDULES = ("in_turn", "overlapped", "fetched")


SCHEDULED = [products, strided_products, int8_products, attention, attention_varlen, training]


@pytest.mark.parametrize("case", SCHEDULED, ids=lambda case: case.__name__)
@pytest.mark.every_case
def test_every_schedule_has_the_same_bits(real, extension, threads, case):
    real()
    before, result = extension.tile_schedule(), {}
    try:
        for schedule in SCHEDULES:
            extension.set_tile_schedule(schedule)
            assert extension.tile_schedule() == schedule
            result[schedule] = solve(case)
    finally:
        extension.set_tile_schedule(before)
    for schedule in SCHEDULES[1:]:
        for i, (x, y) in enumerate(zip(result[schedule], result["in_turn"], strict=True)):
            assert torch.equal(bits(x), bits(y)), f"{schedule}, result {i}"


def test_an_unknown_schedule_is_an_error(extension):
    before = extension.tile_schedule()
    with pytest.raises(ValueError, match=r"^name: got 'all', allowed: in_turn, overlapped, fet"):
        extension.set_tile_schedule("all")
    assert extension.tile_schedule() == before


def test_every_tile_instruction_of_the_extension_was_executed(tiles, extension):
    """The tests above execute every tile instruction, also in each copy of a loop."""
    tiles.use(extension)
    before = extension.tile_schedule()
    try:
        for schedule in SCHEDULES:
            extension.set_tile_schedule(schedule)
            for case in CASES:
                solve(case)
    finally:
        extension.set_tile_schedule(before)
    executed = tiles.executed()
    assert executed <= set(tiles.instructions)
    assert not [text for site, text in tiles.instructions.items() if site not in executed]


# Tests of the trap handler itself

FAULTS = {
    "palette": "LDTILECFG: #GP, palette",
    "reserved": "LDTILECFG: #GP, a reserved byte is not 0",
    "ninth": "LDTILECFG: #GP, a reserved byte is not 0",
    "large": "LDTILECFG: #GP, a tile is too large",
    "bytes": "LDTILECFG: #GP, rows without bytes or bytes without rows",
    "misfit": "#UD, the tiles of a product do not fit together",
    "absent": "#UD, this tile is not configured",
    "released": "#UD, tiles are not configured",
    "same": "#UD, two operands of a product are the same tile",
}


@pytest.fixture(scope="module")
def probe(tmp_path_factory, extension):
    if reason := _trapped.lacking(extension):
        pytest.skip(reason)
    program = tmp_path_factory.mktemp("probe") / "probe"
    _trapped.compile_probe(program)
    sites = _trapped.sites(program)

    def run(case: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, case, *sites], capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize("case", ["addresses", "products", "no fault"])
def test_forms_that_the_kernels_do_not_use(probe, case):
    result = probe(case)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("case", FAULTS)
def test_faults_of_the_manual_stop_the_program(probe, case):
    result = probe(case)
    assert result.returncode == -signal.SIGABRT
    assert result.stderr == f"trapped tiles: {FAULTS[case]}\n"


def test_other_invalid_instructions_are_not_taken(probe):
    assert probe("foreign").returncode == -signal.SIGILL
