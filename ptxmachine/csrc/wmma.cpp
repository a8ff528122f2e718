// wmma: a warp loads, multiplies and stores fragments. The PTX manual does not define the layout of
// a fragment. In this machine, element e of lane l is element 32 e + l of the matrix in row-major
// order.

#include "products.h"

namespace ptxmachine {
namespace {

int fragment_elements(int rows, int columns) { return rows * columns / kLanes; }

// The number of registers of a fragment. `factor` is true for the factors A and B, and false for
// the accumulators C and D.
int fragment_registers(Type type, int rows, int columns, bool factor) {
  if (factor && type == Type::f16) return 8;
  return fragment_elements(rows, columns) * bytes_of(type) / 4;
}

// wmma.load. arg 0: rows. arg 1: columns. arg 2: whether memory is in column-major order. arg 3:
// the number of registers of the fragment. arg 4: state space.
void wmma_load(Warp& w, const Instr& i, Mask m) {
  const Reg address = i.reg[i.arg[3]];
  w.need(address, m, "an address");
  const int rows = i.arg[0], columns = i.arg[1], size = bytes_of(i.type), per = 4 / size;
  const uint64_t stride =
      i.regs > i.arg[3] + 1 ? w.get(i.reg[i.arg[3] + 1], 0) : (uint64_t)(i.arg[2] ? rows : columns);
  std::vector<Mask> valid(i.arg[3], kAll);
  for (int r = 0; r < i.arg[3]; ++r) std::memset(w.word(i.reg[r]), 0, 4 * kLanes);
  for (int e = 0; e < fragment_elements(rows, columns); ++e)
    for (int l = 0; l < kLanes; ++l) {
      const int number = 32 * e + l, row = number / columns, column = number % columns;
      const uint64_t at = i.arg[2] ? column * stride + row : row * stride + column;
      const Element x =
          element_at(w, l, (int)i.arg[4], w.address(address, l, i.offset) + at * size, size);
      if (!x.ok) valid[e / per] &= ~(1u << l);
      w.word(i.reg[e / per])[l] |= (uint32_t)x.bits << (8 * size * (e % per));
    }
  for (int r = 0; r < i.arg[3]; ++r) w.wrote(i.reg[r], kAll, valid[r]);
}

void wmma_store(Warp& w, const Instr& i, Mask m) {
  const Reg address = i.reg[0];
  w.need(address, m, "an address");
  const int rows = i.arg[0], columns = i.arg[1], size = bytes_of(i.type), per = 4 / size;
  const uint64_t stride =
      i.regs > i.arg[3] + 1 ? w.get(i.reg[i.arg[3] + 1], 0) : (uint64_t)(i.arg[2] ? rows : columns);
  for (int e = 0; e < fragment_elements(rows, columns); ++e)
    for (int l = 0; l < kLanes; ++l) {
      const int number = 32 * e + l, row = number / columns, column = number % columns;
      const uint64_t at = i.arg[2] ? column * stride + row : row * stride + column;
      const Reg r = i.reg[1 + e / per];
      put_element(w, l, (int)i.arg[4], w.address(address, l, i.offset) + at * size, size,
                  w.word(r)[l] >> (8 * size * (e % per)), w.ok(r) >> l & 1);
    }
}

// wmma.mma. arg 0, 1 and 2: the sizes m, n and k of the matrices. arg 3: the number of registers of
// A. arg 4: the number of registers of B. arg 5, flags: 1 if C is fp16, 2 if D is fp16.
void wmma_mma(Warp& w, const Instr& i, Mask) {
  const int m = i.arg[0], n = i.arg[1], k = i.arg[2];
  const int d_count = i.arg[5] & 2 ? m * n / 64 : m * n / 32;
  const Reg *a = i.reg + d_count, *b = a + i.arg[3], *c = b + i.arg[4];
  Operands o(m, n, k);
  const int per = i.type == Type::tf32 ? 1 : 2;
  auto read = [&](const Reg* r, int count, auto&& f) {
    for (int e = 0; e < count; ++e)
      for (int l = 0; l < kLanes; ++l)
        f(32 * e + l, element(i.type, w.word(r[e / per])[l] >> (16 * (e % per))),
          w.ok(r[e / per]) >> l & 1);
  };
  read(a, fragment_elements(m, k),
       [&](int at, float x, bool ok) { o.a[at] = x, o.a_ok[at / k] &= ok; });
  read(b, fragment_elements(k, n),
       [&](int at, float x, bool ok) { o.b[at] = x, o.b_ok[at % n] &= ok; });
  std::vector<float> sum(m * n);
  std::vector<uint8_t> ok(m * n);
  for (int at = 0; at < m * n; ++at) {
    const int e = at / 32, l = at % 32;
    const Reg r = c[i.arg[5] & 1 ? e / 2 : e];
    const uint32_t bits = w.word(r)[l];
    sum[at] =
        i.arg[5] & 1 ? to_float(Half{(uint16_t)(bits >> (16 * (e % 2)))}) : bits_as<float>(bits);
    ok[at] = w.ok(r) >> l & 1;
  }
  multiply(o, sum.data(), w.block->launch->options.accumulate);
  std::vector<Mask> valid(d_count, kAll);
  for (int at = 0; at < m * n; ++at) {
    const int e = at / 32, l = at % 32, r = i.arg[5] & 2 ? e / 2 : e;
    uint32_t* word = w.word(i.reg[r]) + l;
    if (i.arg[5] & 2) {
      const int shift = 16 * (e % 2);
      *word = (*word & ~(0xffffu << shift)) | (uint32_t)to_half(sum[at]).bits << shift;
    } else {
      *word = bits_as<uint32_t>(sum[at]);
    }
    if (!(ok[at] & o.a_ok[at / n] & o.b_ok[at % n])) valid[r] &= ~(1u << l);
  }
  for (int r = 0; r < d_count; ++r) w.wrote(i.reg[r], kAll, valid[r]);
  w.block->counts.tensor_flops += 2ull * m * n * k;
}

}  // namespace

Known decode_wmma(Instr& i, const Mnemonic& name, const RawInstr&) {
  MatrixShape s;
  if (!shape_of(name, s)) return kUnknown;
  const bool wide = s.m * s.n == 256 && s.m >= 8 && s.m <= 32 && s.k == 16;
  const bool tf32 = s.m == 16 && s.n == 16 && s.k == 8;
  if (!wide && !tf32) return kUnknown;
  i.aligned = true;
  i.pipe = Pipe::tensor;
  if (name.has("mma")) {
    i.arg[0] = s.m, i.arg[1] = s.n, i.arg[2] = s.k;
    const size_t types = name.parts.size();
    // The types are .d.c, or .d.a.b.c. If the types of A and B are missing, A and B are f16.
    const bool named = name.any({"bf16", "tf32"});
    i.type = name.has("tf32") ? Type::tf32 : name.has("bf16") ? Type::bf16 : Type::f16;
    if (name.any({"s8", "u8", "s4", "u4", "b1"}) || tf32 != (i.type == Type::tf32)) return kUnknown;
    i.arg[3] = fragment_registers(i.type, s.m, s.k, true);
    i.arg[4] = fragment_registers(i.type, s.k, s.n, true);
    const std::string d = named ? "f32" : name.parts[types - 2], c = name.parts[types - 1];
    if ((d != "f16" && d != "f32") || (c != "f16" && c != "f32")) return kUnknown;
    i.arg[5] = (c == "f16" ? 1 : 0) | (d == "f16" ? 2 : 0);
    i.run = wmma_mma;
    return Shape{vector(d == "f16" ? 4 : 8, result(32)), vector(i.arg[3], held(32)),
                 vector(i.arg[4], held(32)), vector(c == "f16" ? 4 : 8, held(32))};
  }
  const bool is_a = name.has("a"), is_b = name.has("b"), stores = name.has("store");
  i.arg[0] = is_b ? s.k : s.m, i.arg[1] = is_a ? s.k : s.n;
  i.arg[2] = name.has("col");
  i.type = name.last();
  const int size = bytes_of(i.type);
  if (is_a || is_b ? size < 1 || i.type == Type::f32 || i.type == Type::s32 : size < 2)
    return kUnknown;
  if (size > 4 || tf32 != (i.type == Type::tf32 || (size == 4 && s.k == 8))) return kUnknown;
  i.arg[3] = fragment_registers(i.type, i.arg[0], i.arg[1], is_a || is_b);
  i.arg[4] = name.any({"shared", "shared::cta"}) ? kElementShared
             : name.has("global")                ? kElementGlobal
                                                 : kElementGeneric;
  i.run = stores ? wmma_store : wmma_load;
  const Slot stride = source(32).if_given();
  if (stores) return Shape{address(), vector(i.arg[3], held(32)), stride};
  return Shape{vector(i.arg[3], result(32)), address(), stride};
}

}  // namespace ptxmachine
