"""Integer instructions of the PTX machine, compared with Python's integers."""

import random

import pytest
import torch
from small_kernels import apply, bits_of, launch

INTERESTING = (0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 127, 128, 255, 256, 32767, 32768, 65535)
TYPES = ("u16", "s16", "u32", "s32", "u64", "s64")


def samples(kind, count=60):
    bits = bits_of(kind)
    draw = random.Random(kind)
    edges = [*INTERESTING, -1, -2, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    values = [draw.choice(edges) for _ in range(count // 2)]
    values += [draw.getrandbits(bits) for _ in range(count - count // 2)]
    return [v & ((1 << bits) - 1) for v in values]


def triples(kind):
    values = samples(kind)
    return list(zip(values, reversed(values), values[7:] + values[:7], strict=True))


def number(kind, bits):
    width = bits_of(kind)
    bits &= (1 << width) - 1
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


def divided(a, b):
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


TWO = {
    "add": lambda a, b, n: a + b,
    "sub": lambda a, b, n: a - b,
    "mul.lo": lambda a, b, n: a * b,
    "mul.hi": lambda a, b, n: (a * b) >> n,
    "min": lambda a, b, n: min(a, b),
    "max": lambda a, b, n: max(a, b),
    "div": lambda a, b, n: divided(a, b) if b else None,
    "rem": lambda a, b, n: a - b * divided(a, b) if b else None,
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", TWO)
def test_two_operands(name, kind):
    rows = list(zip(samples(kind), reversed(samples(kind)), strict=True))
    bits = bits_of(kind)
    results = apply(f"{name}.{kind}", kind, (kind, kind), rows)
    for (a, b), result in zip(rows, results, strict=True):
        expected = TWO[name](number(kind, a), number(kind, b), bits)
        if expected is not None:
            assert result == expected % (1 << bits), (name, kind, a, b)


@pytest.mark.parametrize("kind", TYPES)
def test_multiply_and_add(kind):
    rows = triples(kind)
    bits = bits_of(kind)
    results = apply(f"mad.lo.{kind}", kind, (kind,) * 3, rows)
    for (a, b, c), result in zip(rows, results, strict=True):
        assert result == (a * b + c) % (1 << bits)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind):
    wide = f"{kind[0]}{2 * bits_of(kind)}"
    rows = list(zip(samples(kind), reversed(samples(kind)), samples(wide), strict=True))
    results = apply(f"mul.wide.{kind}", wide, (kind, kind), [row[:2] for row in rows])
    added = apply(f"mad.wide.{kind}", wide, (kind, kind, wide), rows)
    for (a, b, c), product, total in zip(rows, results, added, strict=True):
        exact = number(kind, a) * number(kind, b)
        assert product == exact % (1 << bits_of(wide))
        assert total == (exact + number(wide, c)) % (1 << bits_of(wide))


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_bits(kind):
    bits, rows = bits_of(kind), [row[:2] for row in triples(kind)]
    for name, expected in (
        ("and", lambda a, b: a & b),
        ("or", lambda a, b: a | b),
        ("xor", lambda a, b: a ^ b),
    ):
        results = apply(f"{name}.{kind}", kind, (kind, kind), rows)
        assert results == [expected(a, b) for a, b in rows], name
    ones = apply(f"not.{kind}", kind, (kind,), [(a,) for a, _ in rows])
    assert ones == [~a % (1 << bits) for a, _ in rows]


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_shifts(kind):
    bits = bits_of(kind)
    amounts = [0, 1, 5, bits - 1, bits, bits + 1, 200]
    rows = [(a, n) for a in samples(kind, 20) for n in amounts]
    left = apply(f"shl.b{bits}", kind, (kind, "u32"), rows)
    right = apply(f"shr.{kind}", kind, (kind, "u32"), rows)
    for (a, n), up, down in zip(rows, left, right, strict=True):
        assert up == (a << n) % (1 << bits)
        assert down == (number(kind, a) >> n) % (1 << bits), (a, n)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind):
    bits = bits_of(kind)
    draw = random.Random(5)
    rows = [
        (draw.getrandbits(bits), draw.randrange(bits), draw.randrange(bits + 1)) for _ in range(80)
    ]
    results = apply(f"bfe.{kind}", kind, (kind, "u32", "u32"), rows)
    for (a, start, length), result in zip(rows, results, strict=True):
        field = a >> start & ((1 << length) - 1)
        if kind[0] == "s" and length and a >> min(start + length - 1, bits - 1) & 1:
            present = min(length, bits - start)
            field |= ((1 << bits) - 1) & ~((1 << present) - 1)
        assert result == field, (a, start, length)


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_bit_fields_are_inserted(kind):
    bits = bits_of(kind)
    draw = random.Random(6)
    rows = [
        (draw.getrandbits(bits), draw.getrandbits(bits), draw.randrange(bits), draw.randrange(bits))
        for _ in range(80)
    ]
    results = apply(f"bfi.{kind}", kind, (kind, kind, "u32", "u32"), rows)
    for (field, base, start, length), result in zip(rows, results, strict=True):
        mask = ((1 << length) - 1) << start & ((1 << bits) - 1)
        assert result == (base & ~mask) | (field << start & mask), (field, base, start, length)


@pytest.mark.parametrize("source", ["s32", "u32", "s64"])
@pytest.mark.parametrize("result", ["s8", "u8", "s16", "u16"])
def test_integers_are_clamped_to_narrower_ones(result, source):
    bits, narrow = bits_of(source), bits_of(result)
    edges = [0, 1, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 1 << (bits - 1)]
    values = [(v & ((1 << bits) - 1),) for edge in edges for v in (edge, -edge)]
    low = -(1 << narrow - 1) if result[0] == "s" else 0
    top = low + (1 << narrow) - 1
    results = apply(f"cvt.sat.{result}.{source}", result, (source,), values)
    for (value,), got in zip(values, results, strict=True):
        if source[0] == "s" and value >> (bits - 1):
            value -= 1 << bits
        assert got == min(max(value, low), top) & ((1 << narrow) - 1), value


def test_permutations_of_bytes():
    draw = random.Random(3)
    rows = [(draw.getrandbits(32), draw.getrandbits(32), draw.getrandbits(16)) for _ in range(64)]
    results = apply("prmt.b32", "b32", ("b32",) * 3, rows)
    for (a, b, selector), result in zip(rows, results, strict=True):
        pool = (b << 32 | a).to_bytes(8, "little")
        expected = []
        for n in range(4):
            choice = selector >> 4 * n & 15
            byte = pool[choice & 7]
            expected.append((255 if byte & 128 else 0) if choice & 8 else byte)
        assert result == int.from_bytes(bytes(expected), "little")


@pytest.mark.parametrize("table", [0x00, 0xC0, 0x96, 0xE8, 0x1B, 0xFF])
def test_three_operand_logic(table):
    rows = [(*row, table) for row in triples("b32")]
    results = apply("lop3.b32", "b32", ("b32",) * 4, rows)
    for (a, b, c, _), result in zip(rows, results, strict=True):
        expected = 0
        for bit in range(32):
            index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
            expected |= (table >> index & 1) << bit
        assert result == expected


def test_counts_of_bits():
    values = [(v,) for v in samples("b32")]
    assert apply("popc.b32", "u32", ("b32",), values) == [bin(v).count("1") for (v,) in values]
    assert apply("clz.b32", "u32", ("b32",), values) == [32 - v.bit_length() for (v,) in values]
    reverse = [int(f"{v:032b}"[::-1], 2) for (v,) in values]
    assert apply("brev.b32", "b32", ("b32",), values) == reverse


@pytest.mark.parametrize("mode", ["l", "r"])
@pytest.mark.parametrize("clamp", ["wrap", "clamp"])
def test_funnel_shifts(mode, clamp):
    draw = random.Random(1)
    rows = [(draw.getrandbits(32), draw.getrandbits(32), n) for n in (0, 1, 7, 31, 32, 33, 63)]
    results = apply(f"shf.{mode}.{clamp}.b32", "b32", ("b32",) * 3, rows)
    for (a, b, n), result in zip(rows, results, strict=True):
        n = min(n, 32) if clamp == "clamp" else n & 31
        both = b << 32 | a
        expected = (both << n) >> 32 if mode == "l" else both >> n
        assert result == expected % (1 << 32), n


def test_a_register_is_taken_apart_from_its_lowest_bits():
    out = torch.zeros(4, dtype=torch.int32)
    body = """
mov.b64 %d5, 0x0000000200000001;
mov.b64 {%r2, %r3}, %d5;
mov.b32 %r4, 0x00040003;
mov.b32 {%h1, %h2}, %r4;
cvt.u32.u16 %r5, %h1;
cvt.u32.u16 %r6, %h2;
setp.eq.u32 %p1, %r0, 0;
@%p1 st.global.v4.b32 [%d0], {%r2, %r3, %r5, %r6};
"""
    launch(body, [out])
    assert out.tolist() == [1, 2, 3, 4]
