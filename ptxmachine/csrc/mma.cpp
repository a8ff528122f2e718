// mma.sync: a warp multiplies fragments of registers.

#include "products.h"

namespace ptxmachine {
namespace {

// mma.sync.aligned.m16n8kK. arg 0: the K of the shape. arg 1: whether accumulators are fp16. arg 2:
// the number of registers of A. arg 3: the number of registers of B. arg 4: whether A and B are
// integers. arg 5: whether integer sums saturate.
void mma(Warp& w, const Instr& i, Mask) {
  const int k = i.arg[0], accumulators = i.arg[1] ? 2 : 4;
  const Reg *d = i.reg, *a = d + accumulators, *b = a + i.arg[2], *c = b + i.arg[3];
  Operands o(16, 8, k);
  const uint32_t* words[4];
  Mask valid[4];
  for (int r = 0; r < i.arg[2]; ++r) words[r] = w.word(a[r]), valid[r] = w.ok(a[r]);
  read_a(o, i.type, i.arg[2], words, valid);
  const int per = 4 / element_bytes(i.type), bits = 32 / per;
  for (int r = 0; r < i.arg[3]; ++r)
    for (int l = 0; l < kLanes; ++l) {
      const int column = l / 4, first = r * 4 * per + (l % 4) * per;
      for (int e = 0; e < per; ++e)
        o.b[(first + e) * 8 + column] = element(i.source, w.word(b[r])[l] >> (bits * e));
      if (!(w.ok(b[r]) >> l & 1)) o.b_ok[column] = 0;
    }
  float sum[16 * 8];
  uint8_t ok[16 * 8];
  Mask c_valid[4];
  for (int r = 0; r < accumulators; ++r) c_valid[r] = w.ok(c[r]);
  read_accumulators(w, c, i.arg[1], 8, sum, ok, c_valid);
  if (i.arg[4])  // the elements of `sum` contain the bits of s32 values
    multiply_integers(o, reinterpret_cast<int32_t*>(sum), i.arg[5]);
  else
    multiply(o, sum, w.block->launch->options.accumulate);
  for (int r = 0; r < 16; ++r)
    for (int n = 0; n < 8; ++n) ok[r * 8 + n] &= o.a_ok[r] & o.b_ok[n];
  const std::vector<Mask> result = write_accumulators(w, d, i.arg[1], 8, sum, ok);
  for (int r = 0; r < accumulators; ++r) w.wrote(d[r], kAll, result[r]);
  w.block->counts.tensor_flops += 2ull * 16 * 8 * k;
}

}  // namespace

Known decode_mma(Instr& i, const Mnemonic& name, const RawInstr&) {
  MatrixShape s;
  if (!shape_of(name, s) || s.m != 16 || s.n != 8 || !name.has("row") || !name.has("col"))
    return kUnknown;
  if (name.any({"sp", "sp::ordered_metadata", "b1", "s4", "u4", "f64"})) return kUnknown;
  const size_t types = name.parts.size();  // .d.a.b.c
  if (types < 6) return kUnknown;
  i.type = type_of(name.parts[types - 3]), i.source = type_of(name.parts[types - 2]);
  const std::string& sum = name.parts[types - 4];
  const bool integers = sum == "s32";
  if ((sum != "f16" && sum != "f32" && !integers) || sum != name.parts[types - 1]) return kUnknown;
  if (!multiplies(i.type, i.source, integers)) return kUnknown;
  // A row of A must have 16 or 32 bytes.
  const int bytes = s.k * element_bytes(i.type);
  if (bytes != 16 && bytes != 32) return kUnknown;
  i.arg[0] = s.k, i.arg[1] = sum == "f16";
  i.arg[2] = bytes / 8;
  i.arg[3] = bytes / 16;
  i.arg[4] = integers, i.arg[5] = name.has("satfinite");
  i.aligned = true;
  i.pipe = Pipe::tensor;
  i.run = mma;
  const int sums = i.arg[1] ? 2 : 4;
  return Shape{vector(sums, result(32)), vector(i.arg[2], held(32)), vector(i.arg[3], held(32)),
               vector(sums, held(32))};
}

}  // namespace ptxmachine
