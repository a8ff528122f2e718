"""The C++ matrix products agree with float64, at every instruction-set level."""

from __future__ import annotations

import math
import os
import resource

import pytest
import torch
import torch.nn.functional as F
from _forked import holds_in_a_child
from torch import Tensor

from fastbert import reference
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu")
EPS = 1e-5
# In (M, N, K), M is near the tile sizes of every level. Most N and K are not multiples of a
# register, a panel or a block.
SHAPES = [
    (0, 15, 59),
    (1, 1, 1),
    (1, 768, 768),
    (2, 111, 59),
    # After the whole registers of a row, one word of fp32 or of two bf16 is left at every level.
    (3, 40, 49),
    (3, 40, 97),
    (3, 15, 3072),
    (5, 111, 768),
    (6, 1, 768),
    (7, 768, 59),
    (13, 40, 300),
    (97, 15, 1),
    (97, 111, 768),
    (129, 111, 257),
]


def draw(m, n, k, dtype) -> dict[str, Tensor]:
    shapes = {"x": (m, k), "weight": (n, k), "bias": (n,), "residual": (m, n)}
    shapes |= {"norm_weight": (n,), "norm_bias": (n,)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def solve(case, activation, dtype, norm=False) -> tuple[Tensor, Tensor]:
    """Return PyTorch's result and pre-activation in ``dtype``.

    The sums of a layer norm are in fp32 or wider, because no kernel rounds these sums to 16 bits.
    """
    wide = torch.promote_types(dtype, torch.float32) if norm else dtype
    given = {name: t.to(wide) for name, t in case.items()}
    h = F.linear(given["x"], given["weight"], given.get("bias"))
    y = h if activation == "none" else reference.activate(h, activation)
    if "residual" in given:
        y = y + given["residual"]
    if norm:
        y = F.layer_norm(y, y.shape[1:], given["norm_weight"], given["norm_bias"], EPS)
    return y.to(dtype), h


def linear(operators, case, activation="none", save=False) -> tuple[Tensor, Tensor]:
    optional = (case.get("bias"), case.get("residual"))
    return operators.linear(case["x"], case["weight"], *optional, activation, save)


def linear_layer_norm(operators, case) -> Tensor:
    names = ("x", "weight", "bias", "residual", "norm_weight", "norm_bias")
    return operators.linear_layer_norm(*(case.get(name) for name in names), EPS)


def check_layer_norm(case, y) -> None:
    """Check the result ``y`` of ``linear_layer_norm`` against float64, by the tolerance rule."""
    oracle = solve(case, "none", torch.float64, True)[0]
    yardstick = Yardstick(lambda: solve(case, "none", y.dtype, True)[0])
    assert_close("linear_layer_norm", y, oracle, yardstick)


def check(operators, case, activation="none") -> None:
    dtype = case["x"].dtype
    oracle = solve(case, activation, torch.float64)
    yardstick = Yardstick(lambda: solve(case, activation, dtype))
    saved = linear(operators, case, activation, True)
    for i, actual in enumerate(saved):
        assert_close(f"linear {'yh'[i]}", actual, oracle[i], yardstick[i])
    y, h = linear(operators, case, activation)
    assert torch.equal(y, saved[0])
    assert h.numel() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_agrees_with_float64(isa, operators, m, n, k, dtype):
    case = draw(m, n, k, dtype)
    check(operators, case)
    if m > 0:
        check_layer_norm(case, linear_layer_norm(operators, case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("omitted", [(), ("bias",), ("residual",), ("bias", "residual")])
def test_epilogues(isa, operators, activation, dtype, omitted):
    case = draw(19, 111, 300, dtype)
    for name in omitted:
        del case[name]
    check(operators, case, activation)


def test_gelu_of_every_bf16(isa, operators):
    """GELU of 0 and of every bf16 number of at least 2⁻¹²⁰ in magnitude is within a bound.

    ``linear`` computes the input of GELU as the number times 1, without error. The bound is half a
    unit in the last place, for the rounding, plus the error of the polynomials.
    The result may be 0 where the exact result is denormal.
    """
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = x[(x.abs() >= 2.0**-120) | (x == 0)].unsqueeze(1)
    y = operators.linear(x, torch.ones(1, 1, dtype=x.dtype), None, None, "gelu", False)[0]
    x, y = x.double().flatten(), y.double().flatten()
    exact = 0.5 * x * torch.erfc(-x * 0.5**0.5)
    units = (y - exact).abs() / torch.exp2(torch.frexp(exact).exponent.double() - 8)
    for least, most, added in ((-4.0, 1e39, 1e-4), (-6.0, -4.0, 2e-4), (-12.8, -6.0, 1.3e-3)):
        assert units[(x >= least) & (x < most)].max() <= 0.5 + 256 * added, least
    assert y[x < -12.8].abs().max() < 1.1e-36
    assert y[x == math.inf].item() == math.inf


def test_layer_norm_without_a_bias_and_of_rows_far_from_zero(isa, operators):
    case = draw(40, 768, 59, torch.float32)
    del case["bias"]
    case["residual"] += 1e4
    check_layer_norm(case, linear_layer_norm(operators, case))


@pytest.mark.parametrize("m", [3, 150])
def test_layer_norm_of_rows_longer_than_a_task_s_columns(isa, operators, m):
    """The result is right for rows that span several tasks, which must end before the norm."""
    case = draw(m, 1100, 600, torch.float32)
    oracle, yardstick = (solve(case, "none", d, True)[0] for d in (torch.float64, torch.float32))
    assert_close("linear_layer_norm", linear_layer_norm(operators, case), oracle, yardstick)


def test_layer_norm_of_fp32_sums_with_16_bit_products(isa, operators):
    """With 16-bit operands and an fp32 residual, as under autocast, sum and result are in fp32."""
    for m in (3, 40):
        case = draw(m, 111, 300, torch.bfloat16)
        case["residual"] = torch.randn(m, 111)
        y = linear_layer_norm(operators, case)
        check_layer_norm({name: t.float() for name, t in case.items()}, y)


@pytest.mark.parametrize("largest", [3, 9])
def test_small_integers_are_exact(isa, operators, largest):
    """Sums of products of small integers are exact before they are rounded to the dtype once."""
    shapes = ((37, 300), (111, 300))
    x, weight = (torch.randint(-largest, largest + 1, shape).float() for shape in shapes)
    for dtype in DTYPES:
        y, _ = linear(operators, {"x": x.to(dtype), "weight": weight.to(dtype)})
        assert torch.equal(y, (x @ weight.t()).to(dtype))


def test_fp32_parameters_with_16_bit_rows(isa, operators):
    """An fp32 weight gives the same bits as the weight rounded to the dtype of x."""
    for dtype in DTYPES[1:]:
        case = draw(9, 111, 300, dtype)
        rounded = linear(operators, case, "gelu")[0]
        wide = case | {name: case[name].float() for name in ("weight", "bias")}
        assert torch.equal(linear(operators, wide, "gelu")[0], rounded)
        wide["weight"] += wide["weight"] * 2.0**-13  # under half a unit of fp16 and bf16
        assert torch.equal(linear(operators, wide, "gelu")[0], rounded)


def test_weights_halfway_between_two_numbers_are_packed_as_torch_rounds_them(isa, operators):
    x = torch.eye(64, dtype=torch.bfloat16)
    numbers = torch.arange(-2048, 2048, dtype=torch.int32) * 2**15 + (127 << 23)
    weight = numbers.view(torch.float32).view(64, 64).t()
    for given in (weight, weight.contiguous()):
        y = linear(operators, {"x": x, "weight": given})[0]
        assert torch.equal(y, given.t().bfloat16())
        # matmul packs the second operand unless its columns are contiguous.
        assert torch.equal(operators.matmul(x, given.t(), None, x.dtype), y)


def test_nan_of_any_bits_stays_nan_when_a_weight_is_packed(isa, operators):
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    weight = torch.randn(4, 70)
    weight[:, 3] = bits.view(torch.float32)
    for given in (weight, weight.t().contiguous().t()):
        for dtype in DTYPES[1:]:
            x = torch.randn(5, 70).to(dtype)
            assert linear(operators, {"x": x, "weight": given})[0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 59, 100])
def test_nothing_is_read_between_the_end_of_a_row_and_the_next(isa, operators, k, dtype):
    """A NaN between the end of a row and the next row is not read, even at whole cache lines."""
    wide = torch.full((33, 128), torch.nan, dtype=dtype)
    wide[:, :k] = torch.randn(33, k).to(dtype)
    weight = torch.randn(40, k).to(dtype)
    for m in (1, 2, 33):
        x = wide[:m, :k]
        expected = linear(operators, {"x": x.contiguous(), "weight": weight})[0]
        assert expected.isfinite().all()
        assert torch.equal(linear(operators, {"x": x, "weight": weight})[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_operands_and_odd_addresses(isa, operators, dtype):
    case = draw(13, 59, 111, dtype)
    expected, normal = linear(operators, case, "gelu", True), linear_layer_norm(operators, case)

    def views(t):
        wide = torch.full((t.shape[0], 211), torch.nan, dtype=dtype)
        wide[:, 1 : 1 + t.shape[1]] = t
        yield wide[:, 1 : 1 + t.shape[1]]
        yield t.t().contiguous().t()
        yield wide.repeat_interleave(2, dim=1)[:, 2 : 2 + 2 * t.shape[1] : 2]

    for name in ("x", "weight", "residual"):
        for view in views(case[name]):
            actual = linear(operators, case | {name: view}, "gelu", True)
            assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), name
            assert torch.equal(linear_layer_norm(operators, case | {name: view}), normal), name


@pytest.mark.parametrize("rows", [1, 33, 45])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_far_apart_whose_elements_fill_whole_tiles(isa, operators, rows, dtype):
    case = draw(rows, 70, 128, dtype)
    wide = torch.full((rows, 192), torch.nan, dtype=dtype)
    wide[:, :128] = case["x"]
    actual = linear(operators, case | {"x": wide[:, :128]})[0]
    assert torch.equal(actual, linear(operators, case)[0])


@pytest.mark.parametrize("rows", [1, 45, 150])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1024, 1100, 2048])
def test_rows_of_weights_a_page_apart_have_the_same_product(isa, operators, k, dtype, rows):
    """Weights whose rows share a set of the cache, and are copied first, give the same product."""
    case = draw(rows, 100, k, dtype)
    expected = results(operators, case | {"weight": case["weight"].clone()})
    for columns in (2048, 4096, 2080):
        wide = torch.full((100, columns), torch.nan, dtype=dtype)
        wide[:, :k] = case["weight"]
        actual = results(operators, case | {"weight": wide[:, :k]})
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), columns


def test_nan_stays_in_its_row_and_column(isa, operators):
    case = draw(9, 40, 59, torch.float32)
    case["x"][3, 7], case["weight"][17, 5] = torch.nan, torch.nan
    y = linear(operators, case, "relu")[0].isnan()
    expected = torch.zeros(9, 40, dtype=torch.bool)
    expected[3], expected[:, 17] = True, True
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("a_transposed", "b_transposed"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_matmul(isa, operators, a_transposed, b_transposed, dtype):
    """`matmul` is right for every layout of both operands, and for fp32 and 16-bit results."""

    def stored(shape, transposed):
        t = torch.randn(shape).to(dtype)
        return t.t().contiguous().t() if transposed else t

    for m, n, k in ((2, 111, 59), (7, 111, 59), (40, 15, 700), (768, 40, 97)):
        a, b = stored((m, k), a_transposed), stored((k, n), b_transposed)
        for out in {dtype, torch.float32}:
            oracle = a.double() @ b.double()
            yardstick = Yardstick(lambda a=a, b=b, out=out: a.to(out) @ b.to(out))
            c = operators.matmul(a, b, None, out)
            assert_close(f"matmul in {out}", c, oracle, yardstick)
            addend = torch.randn(m, n).to(out)
            c = operators.matmul(a, b, addend, out)
            oracle = oracle + addend.double()
            yardstick = yardstick.map(lambda product, addend=addend: product + addend)
            assert_close(f"matmul with an addend in {out}", c, oracle, yardstick)


def test_matmul_without_products(isa, operators):
    addend = torch.randn(3, 5)
    a, b = torch.zeros(3, 0), torch.zeros(0, 5)
    assert torch.equal(operators.matmul(a, b, addend, torch.float32), addend)
    assert not operators.matmul(a, b, None, torch.bfloat16).any()
    assert operators.matmul(addend[:0], b.t(), None, torch.float32).shape == (0, 0)


def results(operators, case) -> list[Tensor]:
    product = operators.matmul(case["x"], case["weight"].t(), None, torch.float32)
    return [*linear(operators, case, "gelu", True), linear_layer_norm(operators, case), product]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_in_any_batch(isa, operators, dtype):
    for n, k in ((111, 300), (40, 600)):
        case = draw(129, n, k, dtype)
        expected = results(operators, case)
        for begin, end in ((0, 1), (5, 7), (60, 63), (20, 25), (30, 46), (1, 129)):
            part = case | {name: case[name][begin:end] for name in ("x", "residual")}
            for actual, whole in zip(results(operators, part), expected, strict=True):
                assert torch.equal(actual, whole[begin:end]), (begin, end)


def test_few_rows_may_have_any_strides(isa, operators):
    """Up to four rows, which are read as they are stored, may be columns or parts of a tensor."""
    case = draw(4, 64, 60, torch.float32)
    rest = case["weight"], case["bias"], None, "none", False
    for m in range(1, 5):
        rows = case["x"][:m]
        expected, _ = operators.linear(rows, *rest)
        columns = rows.t().contiguous().t()
        apart = torch.full((m, 77), math.nan)[:, :60].copy_(rows)
        for given in (columns, apart):
            assert torch.equal(operators.linear(given, *rest)[0], expected)


# For 512 fp32 rows and a small weight, `linear` packs the weight instead of the rows.
@pytest.mark.parametrize(("n", "k"), [(200, 300), (40, 1024), (111, 59)])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_a_product_that_packs_its_weight_has_the_same_bits(isa, operators, n, k, activation):
    few = 500
    case = draw(530, n, k, torch.float32)
    part = case | {name: case[name][:few] for name in ("x", "residual")}
    for omitted in ({}, {"residual": None}, {"bias": None}):
        whole = linear(operators, case | omitted, activation, True)
        for actual, expected in zip(
            whole, linear(operators, part | omitted, activation, True), strict=True
        ):
            assert torch.equal(actual[:few], expected)
    check(operators, case, activation)


# For 257 rows in 16 bits, an fp32 weight is rounded once, before the product.
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("n", "k"), [(40, 300), (111, 61), (64, 128)])
def test_a_weight_that_is_rounded_before_the_product_gives_the_same_bits(
    isa, operators, n, k, dtype
):
    few = 256
    case = draw(260, n, k, dtype)
    wide = torch.randn(n, k + 3)
    wide[1, 2:4] = torch.tensor([math.nan, 1e-40])
    columns = wide.t().contiguous().t()
    for weight in (wide[:, :k], wide[:, 1 : k + 1], columns[:, :k]):
        whole = case | {"weight": weight}
        part = whole | {name: case[name][:few] for name in ("x", "residual")}
        expected = [*linear(operators, part, "gelu", True), linear_layer_norm(operators, part)]
        actual = [*linear(operators, whole, "gelu", True), linear_layer_norm(operators, whole)]
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one[:few].view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reruns_and_thread_counts_agree_bitwise(isa, operators, dtype):
    # In the last shapes, the last task has fewer rows or columns than the other tasks.
    shapes = ((17, 300, 259), (300, 300, 259), (331, 300, 67), (150, 1001, 67), (587, 49, 67))
    cases = [draw(*shape, dtype) for shape in shapes]

    def all_results() -> list[Tensor]:
        entries = []
        for case in cases:
            rows = case["weight"].t().contiguous()
            entries += [*results(operators, case), operators.matmul(case["x"], rows, None, dtype)]
        return entries

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = all_results()
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            for actual, want in zip(all_results(), expected, strict=True):
                assert torch.equal(actual, want), count
    finally:
        torch.set_num_threads(threads)


# Tests of weights that change


def step(weight):
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = torch.randn_like(weight)
    optimizer.step()


def load(weight):
    module = torch.nn.Linear(59, 111, bias=False)
    module.weight = weight
    module.load_state_dict({"weight": torch.randn(111, 59)})


WRITES = {
    "in place": lambda weight: weight.detach().mul_(2.0),
    "one element in place": lambda weight: weight.detach()[3, 5].add_(2.0),
    "data in place": lambda weight: weight.data.mul_(2.0),
    "data replaced": lambda weight: setattr(weight, "data", torch.randn(111, 59)),
    "optimizer": step,
    "load_state_dict": load,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_changed_weight_is_seen(isa, operators, write):
    x, weight = torch.randn(7, 59), torch.nn.Parameter(torch.randn(111, 59))
    with torch.no_grad():
        for _ in range(3):
            fresh = linear(operators, {"x": x, "weight": weight.detach().clone()})[0]
            assert torch.equal(linear(operators, {"x": x, "weight": weight})[0], fresh)
            write(weight)


CHANGES = {
    "the first row": lambda weight: weight[0].add_(1.0),
    "the 256th row": lambda weight: weight[255].add_(1.0),
    "the last row": lambda weight: weight[-1].add_(1.0),
    "the last column": lambda weight: weight[:, -1].add_(1.0),
    "one element": lambda weight: weight[400, 30].add_(1.0),
    "rows in another order": lambda weight: weight[:8].copy_(weight[:8].flip(0)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("m", [1, 7, 1024])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_any_change_is_seen(isa, operators, m, dtype, change):
    """The next product uses each changed weight, even after a write that PyTorch does not count."""
    x, weight = torch.randn(m, 59).to(dtype), torch.randn(602, 59).to(dtype)
    linear(operators, {"x": x, "weight": weight})
    change(weight.data)
    fresh = linear(operators, {"x": x, "weight": weight.clone()})[0]
    assert torch.equal(linear(operators, {"x": x, "weight": weight})[0], fresh)


def test_a_changed_inference_tensor_is_seen(isa, operators):
    with torch.inference_mode():
        x, weight = torch.randn(7, 59), torch.randn(111, 59)
        before = linear(operators, {"x": x, "weight": weight})[0]
        weight.mul_(2.0)
        assert torch.equal(linear(operators, {"x": x, "weight": weight})[0], 2 * before)


def test_the_level_may_change_between_calls(operators, extension):
    x, weight = torch.randn(7, 300), torch.randn(111, 300)
    try:
        for level in 2 * extension.build_info()["cpu_isas_supported"]:
            extension.set_cpu_isa(level)
            y = linear(operators, {"x": x, "weight": weight})[0]
            oracle = x.double() @ weight.double().t()
            assert_close(level, y, oracle, Yardstick(lambda: x @ weight.t()))
    finally:
        extension.set_cpu_isa(None)


@pytest.mark.parametrize(("m", "k"), [(1, 64), (5, 300), (40, 320)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_linear_has_the_bits_of_matmul_with_a_packed_operand(isa, operators, dtype, m, k):
    """``linear`` has the bits of ``matmul`` with a packed operand; both add in the same order."""
    for n in (1, 40, 111):
        x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        wide = weight.new_zeros(k, n + 1)
        wide[:, :n] = weight.t()  # With n = 1, the stride along k must differ from 1.
        expected = operators.matmul(x, wide[:, :n], None, dtype)
        assert torch.equal(linear(operators, {"x": x, "weight": weight})[0], expected)
        for part in (weight, weight.float()):
            y = operators.linear_of_parts(x, [part, part], [], "none")
            assert torch.equal(y, torch.cat([expected, expected], 1))


def test_views_of_one_storage(isa, operators):
    x, storage = torch.randn(3, 64), torch.randn(512, 64)
    for weight in (storage[:256], storage[256:], storage[1:257], storage, storage[::2]):
        y = linear(operators, {"x": x, "weight": weight})[0]
        assert torch.equal(y, linear(operators, {"x": x, "weight": weight.clone()})[0])


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_ten_thousand_calls_grow_no_memory(operators):
    case = draw(5, 48, 64, torch.bfloat16)

    def calls(count):
        for i in range(count):
            if i % 10 == 0:
                case["weight"] = torch.randn(48, 64)
            linear(operators, case, "gelu")
            operators.matmul(case["x"], case["x"].t(), None, torch.float32)

    try:
        calls(500)
        before = resident_bytes()
        calls(5000)
        assert resident_bytes() - before < 2**20
    except FileNotFoundError:
        pytest.skip("no /proc/self/statm on this system")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_computes_the_same(operators):
    """A forked child, which lacks the parent's threads, computes the same product.

    The tensors are small, because torch hangs in the child when it fills more than 32,768 elements
    with NaN. The product is large enough for several threads.
    """
    case = draw(100, 60, 100, torch.float32)
    expected = linear(operators, case, "gelu")[0]

    def is_the_same() -> bool:
        return all(torch.equal(linear(operators, case, "gelu")[0], expected) for _ in range(2))

    assert holds_in_a_child(is_the_same)


# Bad input

BAD_LINEAR = [
    ("x", torch.zeros(4, 8, 1), ValueError),
    ("x", torch.zeros(4, 8, dtype=torch.float64), TypeError),
    ("weight", torch.zeros(6, 7), ValueError),
    ("weight", torch.zeros(8), ValueError),
    ("weight", torch.zeros(6, 8, dtype=torch.bfloat16), TypeError),
    ("bias", torch.zeros(8), ValueError),
    ("bias", torch.zeros(6, dtype=torch.int64), TypeError),
    ("residual", torch.zeros(4, 8), ValueError),
    ("residual", torch.zeros(4, 6, dtype=torch.float16), TypeError),
]


@pytest.mark.parametrize(
    ("name", "value", "error"), [*BAD_LINEAR, ("activation", "swish", ValueError)]
)
def test_linear_names_the_argument(operators, name, value, error):
    arguments = {"x": torch.zeros(4, 8), "weight": torch.zeros(6, 8), "bias": torch.zeros(6)}
    arguments |= {"residual": torch.zeros(4, 6), "activation": "none", "save": False}
    with pytest.raises(error, match=rf"^{name}: got .*allowed"):
        operators.linear(**(arguments | {name: value}))


NORM = [("norm_weight", torch.zeros(8)), ("norm_bias", torch.zeros(1, 6)), ("eps", -1.0)]


@pytest.mark.parametrize(
    ("name", "value", "error"), [*BAD_LINEAR, *((*item, ValueError) for item in NORM)]
)
def test_linear_layer_norm_names_the_argument(operators, name, value, error):
    arguments = {"x": torch.zeros(4, 8), "weight": torch.zeros(6, 8), "bias": torch.zeros(6)}
    arguments |= {"residual": torch.zeros(4, 6), "eps": EPS}
    arguments |= {"norm_weight": torch.zeros(6), "norm_bias": torch.zeros(6)}
    with pytest.raises(error, match=rf"^{name}: got .*allowed"):
        operators.linear_layer_norm(**(arguments | {name: value}))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("a", torch.zeros(4), ValueError),
        ("a", torch.zeros(4, 8, dtype=torch.float64), TypeError),
        ("b", torch.zeros(7, 6), ValueError),
        ("b", torch.zeros(8, 6, dtype=torch.bfloat16), TypeError),
        ("addend", torch.zeros(6, 4), ValueError),
        ("addend", torch.zeros(4, 6, dtype=torch.bfloat16), TypeError),
        ("dtype", torch.float64, TypeError),
    ],
)
def test_matmul_names_the_argument(operators, name, value, error):
    arguments = {"a": torch.zeros(4, 8), "b": torch.zeros(8, 6), "addend": torch.zeros(4, 6)}
    with pytest.raises(error, match=rf"^{name}: got .*allowed"):
        operators.matmul(**(arguments | {"dtype": torch.float32} | {name: value}))
