// The element-wise half of the feed-forward block: gelu(h + bias), and its gradients.

#pragma once

#include "formats.h"
#include "gelu.h"
#include "kernels.h"
#include "vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

template <class Format, class Activation>
void bias_gelu_forward_rows(const BiasGeluForward& params, int64_t begin, int64_t end) {
  const BiasGeluForward p = params;  // a local copy: see RowSum
  using Storage = typename Format::Storage;
  for (int64_t row = begin; row < end; ++row) {
    const Storage* h = (const Storage*)p.h.data + row * p.h.stride;
    Storage* y = (Storage*)p.y + row * p.columns;
    for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
      Vec v = Format::load(h + n, count);
      if (p.bias) v += load(p.bias + n, count);
      Format::store(y + n, Activation::forward(v), count);
    });
  }
}

// kRows rows at a time, so that their share of dbias is summed in registers and memory is touched
// once.
template <class Format, class Activation, int kRows>
FASTBERT_INLINE void bias_gelu_backward_block(const BiasGeluBackward& p, int64_t first,
                                              double* dbias) {
  using Storage = typename Format::Storage;
  const Storage* dy = (const Storage*)p.dy.data + first * p.dy.stride;
  const Storage* h = (const Storage*)p.h.data + first * p.h.stride;
  Storage* dh = (Storage*)p.dh + first * p.columns;
  for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
    const Vec bias = p.bias ? load(p.bias + n, count) : Vec{};
    Vec total = {};
    for (int i = 0; i < kRows; ++i) {
      const Vec slope = Activation::derivative(Format::load(h + i * p.h.stride + n, count) + bias);
      const Vec d = Format::load(dy + i * p.dy.stride + n, count) * slope;
      Format::store(dh + i * p.columns + n, d, count);
      total += d;
    }
    if (p.bias) accumulate(dbias + n, total, count);
  });
}

template <class Format, class Activation>
void bias_gelu_backward_rows(const BiasGeluBackward& params, int64_t begin, int64_t end,
                             double* dbias) {
  constexpr int kRows = 4;
  const BiasGeluBackward p = params;  // a local copy: see RowSum
  int64_t row = begin;
  for (; row + kRows <= end; row += kRows) {
    bias_gelu_backward_block<Format, Activation, kRows>(p, row, dbias);
  }
  for (; row < end; ++row) bias_gelu_backward_block<Format, Activation, 1>(p, row, dbias);
}

// Calls body(format, activation) with the two types that the params struct names.
template <class P, class Body>
FASTBERT_INLINE void with_types(const P& p, Body body) {
  const bool tanh = p.gelu == Gelu::tanh;
  switch (p.format) {
    case Format::f32:
      return tanh ? body(F32{}, Tanh{}) : body(F32{}, Erf{});
    case Format::bf16:
      return tanh ? body(BF16{}, Tanh{}) : body(BF16{}, Erf{});
    case Format::f16:
      return tanh ? body(F16{}, Tanh{}) : body(F16{}, Erf{});
  }
}

void bias_gelu_forward(const BiasGeluForward& p, int64_t begin, int64_t end) {
  with_types(p, [&](auto format, auto activation) {
    bias_gelu_forward_rows<decltype(format), decltype(activation)>(p, begin, end);
  });
}

void bias_gelu_backward(const BiasGeluBackward& p, int64_t begin, int64_t end, double* partial) {
  with_types(p, [&](auto format, auto activation) {
    bias_gelu_backward_rows<decltype(format), decltype(activation)>(p, begin, end, partial);
  });
}

void sum_rows(const double* matrix, int64_t rows, int64_t columns, float* out) {
  constexpr int kDoubles = kLanes / 2;
  int64_t n = 0;
  for (; n + kDoubles <= columns; n += kDoubles) {
    DoubleVec total = {}, summand;
    for (int64_t row = 0; row < rows; ++row) {
      __builtin_memcpy(&summand, matrix + row * columns + n, sizeof(summand));
      total += summand;
    }
    const FloatHalf narrow = __builtin_convertvector(total, FloatHalf);
    __builtin_memcpy(out + n, &narrow, sizeof(narrow));
  }
  for (; n < columns; ++n) {
    double total = 0.0;
    for (int64_t row = 0; row < rows; ++row) total += matrix[row * columns + n];
    out[n] = (float)total;
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
