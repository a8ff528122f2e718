// Products of small matrices, and the fragments that mma.sync and wgmma share.

#include "products.h"

namespace ptxmachine {

namespace {

float toward_zero(double x) {
  const float f = (float)x;
  return std::isfinite(f) && std::fabs((double)f) > std::fabs(x) ? std::nextafterf(f, 0.0f) : f;
}

// The row and the column of accumulator element e of a lane, in fragments of C and D with 16 rows.
struct Accumulators {
  static int row(int lane, int e) { return lane / 4 + (e & 2 ? 8 : 0); }
  static int column(int lane, int e) { return 8 * (e / 4) + 2 * (lane % 4) + (e & 1); }
};

}  // namespace

float element(Type type, uint32_t bits) {
  switch (type) {
    case Type::f16:
      return to_float(Half{(uint16_t)bits});
    case Type::bf16:
      return to_float(Brain{(uint16_t)bits});
    case Type::e4m3:
    case Type::e5m2:
      return float_of_8_bits(type, (uint8_t)bits);
    // A tensor core reads only the upper 19 bits of a tf32 operand.
    case Type::tf32:
      return bits_as<float>(bits & 0xffffe000u);
    default:
      return (float)(type == Type::s8 ? (int)(int8_t)bits : (int)(uint8_t)bits);
  }
}

FASTBERT_PTX_SIMD void multiply(const Operands& o, float* d, Accumulate order) {
  const int n = o.columns, depth = o.depth;
  if (order == Accumulate::forward || order == Accumulate::reverse) {
    for (int r = 0; r < o.rows; ++r)
      for (int s = 0; s < depth; ++s) {
        const int k = order == Accumulate::forward ? s : depth - 1 - s;
        const float x = o.a[r * depth + k];
        const float* y = &o.b[k * n];
        float* to = d + r * n;
        for (int c = 0; c < n; ++c) to[c] = __builtin_fmaf(x, y[c], to[c]);
      }
    return;
  }
  for (int r = 0; r < o.rows; ++r)
    for (int c = 0; c < n; ++c) {
      double sum = d[r * n + c];
      for (int k = 0; k < depth; ++k) sum += (double)o.a[r * depth + k] * o.b[k * n + c];
      d[r * n + c] = order == Accumulate::exact ? (float)sum : toward_zero(sum);
    }
}

void multiply_integers(const Operands& o, int32_t* d, bool saturate) {
  for (int r = 0; r < o.rows; ++r)
    for (int c = 0; c < o.columns; ++c) {
      int64_t sum = d[r * o.columns + c];
      for (int k = 0; k < o.depth; ++k)
        sum += (int64_t)o.a[r * o.depth + k] * (int64_t)o.b[k * o.columns + c];
      if (saturate) sum = std::min<int64_t>(std::max<int64_t>(sum, INT32_MIN), INT32_MAX);
      d[r * o.columns + c] = (int32_t)sum;
    }
}

bool multiplies(Type a, Type b, bool integers) {
  const auto whole = [](Type t) { return t == Type::s8 || t == Type::u8; };
  const auto eight = [](Type t) { return t == Type::e4m3 || t == Type::e5m2; };
  if (integers) return whole(a) && whole(b);
  return (eight(a) && eight(b)) ||
         (a == b && (a == Type::f16 || a == Type::bf16 || a == Type::tf32));
}

bool shape_of(const Mnemonic& name, MatrixShape& s) {
  for (const std::string& part : name.parts)
    if (std::sscanf(part.c_str(), "m%dn%dk%d", &s.m, &s.n, &s.k) == 3) return true;
  return false;
}

void read_accumulators(Warp& w, const Reg* c, bool half, int n, float* d, uint8_t* ok,
                       const Mask* valid) {
  for (int e = 0; e < n / 2; ++e)
    for (int l = 0; l < kLanes; ++l) {
      const int at = Accumulators::row(l, e) * n + Accumulators::column(l, e);
      const int r = half ? e / 2 : e;
      const uint32_t bits = w.word(c[r])[l];
      d[at] = half ? to_float(Half{(uint16_t)(bits >> (16 * (e & 1)))}) : bits_as<float>(bits);
      ok[at] = valid[r] >> l & 1;
    }
}

std::vector<Mask> write_accumulators(Warp& w, const Reg* to, bool half, int n, const float* d,
                                     const uint8_t* ok) {
  const int count = half ? n / 4 : n / 2;
  std::vector<Mask> valid(count, kAll);
  for (int e = 0; e < n / 2; ++e) {
    const int r = half ? e / 2 : e;
    uint32_t* word = w.word(to[r]);
    for (int l = 0; l < kLanes; ++l) {
      const int at = Accumulators::row(l, e) * n + Accumulators::column(l, e);
      if (half) {
        const int shift = 16 * (e & 1);
        word[l] = (word[l] & ~(0xffffu << shift)) | (uint32_t)to_half(d[at]).bits << shift;
      } else {
        word[l] = bits_as<uint32_t>(d[at]);
      }
      if (!ok[at]) valid[r] &= ~(1u << l);
    }
  }
  return valid;
}

void read_a(Operands& o, Type type, int registers, const uint32_t* const* word, const Mask* valid) {
  const int per = 4 / element_bytes(type), bits = 32 / per;
  for (int r = 0; r < registers; ++r)
    for (int l = 0; l < kLanes; ++l) {
      const int row = l / 4 + (r & 1 ? 8 : 0), k = (r / 2) * 4 * per + (l % 4) * per;
      for (int e = 0; e < per; ++e)
        o.a[row * o.depth + k + e] = element(type, word[r][l] >> (bits * e));
      if (!(valid[r] >> l & 1)) o.a_ok[row] = 0;
    }
}

}  // namespace ptxmachine
