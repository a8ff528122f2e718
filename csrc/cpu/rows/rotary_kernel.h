// Rotary embeddings in fp32 (Su et al. 2021). Element i of the first half of a head and element i
// of the second half are a pair (a, b), which becomes (a cos - b sin, b cos + a sin).

#pragma once

#include "../isa/formats.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

template <class Format>
FASTBERT_INLINE void turn_head(const typename Format::Storage* x, const float* cos,
                               const float* sin, float direction, int64_t half,
                               typename Format::Storage* y) {
  for_each_vector(half, [&](int64_t n, int count) __attribute__((always_inline)) {
    const Vec first = Format::load(x + n, count), second = Format::load(x + half + n, count);
    const Vec c = load(cos + n, count), s = load(sin + n, count) * direction;
    Format::store(y + n, fma(-second, s, first * c), count);
    Format::store(y + half + n, fma(first, s, second * c), count);
  });
}

template <class Format>
void rotary_rows(const Rotary& params, int64_t begin, int64_t end) {
  const Rotary p = params;  // RowSum (layer_norm_kernel.h) explains this copy.
  using Storage = typename Format::Storage;
  const int64_t head_dim = 2 * p.half;
  for (int64_t row = begin; row < end; ++row) {
    const Storage* x = (const Storage*)p.x + row * p.stride_row;
    Storage* y = (Storage*)p.y + row * p.heads * head_dim;
    const float *cos = p.cos + row * p.half, *sin = p.sin + row * p.half;
    for (int64_t head = 0; head < p.turned; ++head) {
      turn_head<Format>(x + head * p.stride_head, cos, sin, p.direction, p.half,
                        y + head * head_dim);
    }
    if (p.x == p.y) continue;
    for (int64_t head = p.turned; head < p.heads; ++head) {
      __builtin_memcpy(y + head * head_dim, x + head * p.stride_head, head_dim * sizeof(Storage));
    }
  }
}

void rotary(const Rotary& p, int64_t begin, int64_t end) {
  with_format(p.format, [&](auto format) { rotary_rows<decltype(format)>(p, begin, end); });
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
