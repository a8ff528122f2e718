"""Floating-point instructions of the PTX machine, compared with exact rational arithmetic."""

import math
import random
import struct
from fractions import Fraction

import pytest
import torch
from small_kernels import apply

# Format → number of fraction bits, least exponent, and largest finite value.
FORMATS = {
    "f16": (10, -14, Fraction(65504)),
    "bf16": (7, -126, Fraction(255) * Fraction(2) ** 120),
    "f32": (23, -126, Fraction((1 << 24) - 1) * Fraction(2) ** 104),
    "f64": (52, -1022, Fraction((1 << 53) - 1) * Fraction(2) ** 971),
    "tf32": (10, -126, Fraction((1 << 11) - 1) * Fraction(2) ** 117),
}
WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "tf32": 32}


def value(kind, bits):
    """Return the exact value of `bits` as a Fraction, or a float if it is infinite or NaN."""
    if kind == "f64":
        number = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    elif kind == "f16":
        number = struct.unpack("<e", bits.to_bytes(2, "little"))[0]
    else:
        word = bits << 16 if kind == "bf16" else bits
        number = struct.unpack("<f", word.to_bytes(4, "little"))[0]
    return Fraction(number) if math.isfinite(number) else number


def encode(kind, number):
    """Return the bits of a number that the format represents exactly."""
    if kind == "f64":
        return int.from_bytes(struct.pack("<d", number), "little")
    if kind == "f16":
        return int.from_bytes(struct.pack("<e", number), "little")
    word = int.from_bytes(struct.pack("<f", number), "little")
    return word >> 16 if kind == "bf16" else word


def rounded(kind, exact, mode="rn"):
    """Round an exact value to a format, and return the bits; the sign of a zero may be wrong."""
    fraction, lowest, largest = FORMATS[kind]
    if exact == 0:
        return 0
    exponent = lowest
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - fraction)
    scaled = exact / unit
    below = math.floor(scaled)
    rest = scaled - below
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1),
        "rz": exact < 0 and rest > 0,
        "rm": False,
        "rp": rest > 0,
        "rna": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and exact > 0),
    }[mode]
    result = (below + up) * unit
    if abs(result) > largest:
        stays = mode == "rz" or (mode == "rm" and exact > 0) or (mode == "rp" and exact < 0)
        return encode(kind, math.copysign(float(largest) if stays else math.inf, exact))
    return encode(kind, float(result))


def samples(kind, count=60, seed=0):
    draw = random.Random(f"{kind}{seed}")
    fraction = FORMATS[kind][0]
    width = WIDTH[kind]
    one = encode(kind, 1.0)
    values = [0, one, one | 1 << (width - 1), one + 1, 1, (1 << fraction) - 1]
    while len(values) < count:
        near = draw.random() < 0.6
        if near:
            bits = encode(kind, float(draw.randint(1, 40))) ^ draw.getrandbits(fraction)
            bits |= draw.getrandbits(1) << (width - 1)
        else:
            bits = draw.getrandbits(width)
        number = value(kind, bits)
        if isinstance(number, Fraction):
            values.append(bits)
    return values


def same(kind, bits, expected):
    """Return whether the bits are equal, except for the sign of a zero."""
    sign = 1 << (WIDTH[kind] - 1)
    return bits == expected or (bits & ~sign == 0 and expected & ~sign == 0)


OPERATIONS = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b),
    "fma": (3, lambda a, b, c: a * b + c),
}


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_is_rounded_once(name, kind, mode):
    count, exact = OPERATIONS[name]
    rows = list(zip(*(samples(kind, seed=n) for n in range(count)), strict=True))
    results = apply(f"{name}.{mode}.{kind}", kind, (kind,) * count, rows)
    for row, result in zip(rows, results, strict=True):
        expected = rounded(kind, exact(*(value(kind, bits) for bits in row)), mode)
        assert same(kind, result, expected), (name, mode, [hex(bits) for bits in row])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_of_16_bits(name, kind):
    count, exact = OPERATIONS[name]
    rows = list(zip(*(samples(kind, seed=n) for n in range(count)), strict=True))
    results = apply(f"{name}.rn.{kind}", kind, (kind,) * count, rows)
    pairs = apply(
        f"{name}.rn.{kind}x2", f"{kind}x2", (f"{kind}x2",) * count,
        [[bits << 16 | other for bits, other in zip(row, rows[0], strict=True)] for row in rows],
    )  # fmt: skip
    for row, result, pair in zip(rows, results, pairs, strict=True):
        expected = rounded(kind, exact(*(value(kind, bits) for bits in row)))
        assert same(kind, result, expected), (name, [hex(bits) for bits in row])
        assert (pair >> 16, pair & 0xFFFF) == (result, results[0])


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_division_root_and_reciprocal_are_exact_unless_asked(mode):
    rows = [(a, b) for a, b in zip(samples("f32"), samples("f32", seed=1), strict=True)]
    rows = [(a, b) for a, b in rows if value("f32", b) != 0]
    results = apply(f"div.{mode}.f32", "f32", ("f32", "f32"), rows)
    for (a, b), result in zip(rows, results, strict=True):
        assert same("f32", result, rounded("f32", value("f32", a) / value("f32", b), mode))
    reciprocals = apply(f"rcp.{mode}.f32", "f32", ("f32",), [(b,) for _, b in rows])
    for (_, b), result in zip(rows, reciprocals, strict=True):
        assert same("f32", result, rounded("f32", 1 / value("f32", b), mode))
    positive = [(a & 0x7FFFFFFF,) for a, _ in rows]
    roots = apply(f"sqrt.{mode}.f32", "f32", ("f32",), positive)
    for (a,), result in zip(positive, roots, strict=True):
        root = value("f32", result)
        # The result is the float next to the exact root in the direction of the rounding mode.
        square, exact = root * root, value("f32", a)
        above = value("f32", result + 1) if result else Fraction(1, 2**149)
        below = value("f32", result - 1) if result else Fraction(0)
        if mode in ("rz", "rm"):
            assert square <= exact < above * above
        elif mode == "rp":
            assert square >= exact
            assert result == 0 or below * below < exact
        else:
            assert ((root + above) / 2) ** 2 >= exact
            assert result == 0 or ((root + below) / 2) ** 2 <= exact


def test_flush_and_saturation():
    tiny = 0x00400000
    assert apply("add.rn.ftz.f32", "f32", ("f32", "f32"), [(tiny, 0)]) == [0]
    assert apply("add.rn.f32", "f32", ("f32", "f32"), [(tiny, 0)]) == [tiny]
    half, two, minus = encode("f32", 0.5), encode("f32", 2.0), encode("f32", -3.0)
    rows = [(half, 0), (two, 0), (minus, 0), (0x7FC00000, 0)]
    expected = [half, encode("f32", 1.0), 0, 0]
    assert apply("add.rn.sat.f32", "f32", ("f32", "f32"), rows) == expected


def test_minimum_and_maximum_of_nan():
    one, nan = encode("f32", 1.0), 0x7FC00000
    for name in ("min", "max"):
        assert apply(f"{name}.f32", "f32", ("f32", "f32"), [(one, nan), (nan, one)]) == [one, one]
        results = apply(f"{name}.NaN.f32", "f32", ("f32", "f32"), [(one, nan), (nan, one)])
        assert results == [0x7FFFFFFF, 0x7FFFFFFF]
    zeros = [(0, 0x80000000), (0x80000000, 0)]
    assert apply("min.f32", "f32", ("f32", "f32"), zeros) == [0x80000000] * 2
    assert apply("max.f32", "f32", ("f32", "f32"), zeros) == [0, 0]


# Instruction → exact function, domain, largest error, and whether the largest error is absolute
# instead of relative (PTX ISA, 9.7.3).
APPROXIMATIONS = {
    "ex2.approx.ftz.f32": (lambda x: 2.0**x, (-100, 100), 2.0**-22, False),
    "lg2.approx.f32": (math.log2, (2.5, 1e6), 2.0**-22, False),
    "rcp.approx.f32": (lambda x: 1 / x, (0.01, 100), 2.0**-23, False),
    "sqrt.approx.f32": (math.sqrt, (0.01, 1e5), 2.0**-23, False),
    "rsqrt.approx.f32": (lambda x: x**-0.5, (0.01, 1e5), 1.3125 * 2.0**-23, False),
    "tanh.approx.f32": (math.tanh, (0.1, 5), 2.0**-11, False),
    "sin.approx.f32": (math.sin, (-3, 3), 1.4375 * 2.0**-21, True),
}


@pytest.mark.parametrize("name", APPROXIMATIONS)
@pytest.mark.parametrize("share", [-1.0, 0.0, 1.0])
def test_approximations_err_by_the_documented_share(name, share):
    function, (low, high), bound, absolute = APPROXIMATIONS[name]
    draw = random.Random(name)
    rows = [(encode("f32", draw.uniform(low, high)),) for _ in range(64)]
    results = apply(name, "f32", ("f32",), rows, approximate=share)
    errors = []
    for (bits,), result in zip(rows, results, strict=True):
        exact = function(float(value("f32", bits)))
        error = float(value("f32", result)) - exact
        errors.append(error if absolute else error / exact)
    assert max(map(abs, errors)) <= bound * (1 + 2.0**-20)
    if share:
        assert sum(error * share for error in errors) > 0.4 * bound * len(errors)
    else:
        assert max(map(abs, errors)) <= (2.0**-24 if not absolute else 2.0**-25) * 1.01


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32"])
def test_narrowing_is_rounded_once(kind, mode):
    mode = "rna" if kind == "tf32" else mode
    rows = [(bits,) for bits in samples("f32", 120)]
    results = apply(f"cvt.{mode}.{kind}.f32", kind, ("f32",), rows)
    for (bits,), result in zip(rows, results, strict=True):
        assert same(kind, result, rounded(kind, value("f32", bits), mode)), hex(bits)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs_put_the_first_operand_into_the_upper_half(kind):
    rows = list(zip(samples("f32"), samples("f32", seed=1), strict=True))
    results = apply(f"cvt.rn.{kind}x2.f32", f"{kind}x2", ("f32", "f32"), rows)
    for (a, b), result in zip(rows, results, strict=True):
        assert same(kind, result >> 16, rounded(kind, value("f32", a)))
        assert same(kind, result & 0xFFFF, rounded(kind, value("f32", b)))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_widening_is_exact(kind):
    rows = [(bits,) for bits in range(0, 1 << 16, 37)]
    rows = [row for row in rows if isinstance(value(kind, row[0]), Fraction)][:1000]
    results = apply(f"cvt.f32.{kind}", "f32", (kind,), rows)
    for (bits,), result in zip(rows, results, strict=True):
        assert value("f32", result) == value(kind, bits)


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("kind", ["s32", "u32", "s64"])
def test_floats_to_integers_are_clamped(kind, mode):
    rows = [(bits,) for bits in samples("f32", 100)]
    rows += [(encode("f32", x),) for x in (0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, 1e20, math.inf)]
    results = apply(f"cvt.{mode}.{kind}.f32", kind, ("f32",), rows)
    bits = int(kind[1:])
    low, high = (
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    )
    turn = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    for (pattern,), result in zip(rows, results, strict=True):
        number = value("f32", pattern)
        expected = high if number == math.inf else min(max(turn(number), low), high)
        assert result == expected % (1 << bits), hex(pattern)
    assert apply(f"cvt.{mode}.s32.f32", "s32", ("f32",), [(0x7FC00000,)]) == [0]


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_integers_to_floats_are_rounded_once(kind, mode):
    draw = random.Random(kind)
    bits = int(kind[1:])
    rows = [(draw.getrandbits(bits) >> draw.randrange(bits),) for _ in range(60)]
    rows += [((1 << bits) - 1,), ((1 << (bits - 1)),), (0,)]
    results = apply(f"cvt.{mode}.f32.{kind}", "f32", (kind,), rows)
    for (pattern,), result in zip(rows, results, strict=True):
        signed = kind[0] == "s" and pattern >> (bits - 1)
        number = pattern - (1 << bits) if signed else pattern
        assert same("f32", result, rounded("f32", Fraction(number), mode)), hex(pattern)


def test_comparisons_with_nan():
    one, two, nan = encode("f32", 1.0), encode("f32", 2.0), 0x7FC00000
    rows = [(one, two), (two, one), (one, one), (nan, one), (one, nan)]
    expected = {
        "eq": [0, 0, 1, 0, 0], "ne": [1, 1, 0, 0, 0], "lt": [1, 0, 0, 0, 0], "le": [1, 0, 1, 0, 0],
        "gt": [0, 1, 0, 0, 0], "ge": [0, 1, 1, 0, 0], "equ": [0, 0, 1, 1, 1],
        "neu": [1, 1, 0, 1, 1], "ltu": [1, 0, 0, 1, 1], "leu": [1, 0, 1, 1, 1],
        "gtu": [0, 1, 0, 1, 1], "geu": [0, 1, 1, 1, 1], "num": [1, 1, 1, 0, 0],
        "nan": [0, 0, 0, 1, 1],
    }  # fmt: skip
    for name, answers in expected.items():
        assert apply(f"setp.{name}.f32", "pred", ("f32", "f32"), rows) == answers, name


def test_eight_bit_floats_survive_a_round_trip():
    for kind, torch_kind in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        codes = torch.arange(256, dtype=torch.uint8)
        numbers = codes.view(torch_kind).float()
        finite = [n for n in range(256) if math.isfinite(numbers[n].item())]
        rows = [(encode("f32", numbers[n].item()), 0) for n in finite]
        packed = apply(f"cvt.rn.satfinite.{kind}x2.f32", "b16", ("f32", "f32"), rows)
        assert [p >> 8 for p in packed] == finite
        widened = apply(f"cvt.rn.f16x2.{kind}x2", "f16x2", ("b16",), [(n,) for n in finite])
        for n, pair in zip(finite, widened, strict=True):
            assert value("f16", pair & 0xFFFF) == Fraction(numbers[n].item())


def test_a_tie_between_two_bf16_goes_to_the_even_one():
    ties = [[0x3F808000, 0x3F818000], [0xBF838000, 0x3F828000]]
    found = apply("cvt.rn.bf16x2.f32", "b32", ["f32", "f32"], ties)
    assert found == [0x3F803F82, 0xBF843F82]
