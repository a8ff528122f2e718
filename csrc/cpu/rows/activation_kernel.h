// The element-wise part of the feed-forward: an activation, which may be gated, and its gradients.

#pragma once

#include "../isa/formats.h"
#include "../isa/kernels.h"
#include "../isa/vec.h"
#include "activation.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// Returns h + bias for `count` elements of one row, from element n on.
template <class Format>
FASTBERT_INLINE Vec pre_activation(const typename Format::Storage* h, const float* bias, int64_t n,
                                   int count) {
  const Vec v = Format::load(h + n, count);
  return bias ? v + load(bias + n, count) : v;
}

template <class Format, class Function, bool kGated>
void activation_forward_rows(const ActivationForward& params, int64_t begin, int64_t end) {
  const ActivationForward p = params;  // RowSum (layer_norm_kernel.h) explains this copy.
  using Storage = typename Format::Storage;
  for (int64_t row = begin; row < end; ++row) {
    const Storage* h = (const Storage*)p.h.data + row * p.h.stride;
    Storage* y = (Storage*)p.y + row * p.columns;
    for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
      Vec v = Function::forward(pre_activation<Format>(h, p.bias, n, count));
      if (kGated) v *= pre_activation<Format>(h, p.bias, p.columns + n, count);
      Format::store(y + n, v, count);
    });
  }
}

// Computes the gradients of up to four rows. The gradients of these rows are added in registers
// first, so `sums`, which is in memory, is read and written only once for these rows.
template <class Format, class Function, bool kGated>
FASTBERT_INLINE void activation_backward_block(const ActivationBackward& p, int64_t first, int rows,
                                               double* sums) {
  using Storage = typename Format::Storage;
  const int64_t width = kGated ? 2 * p.columns : p.columns;
  const Storage* dy_block = (const Storage*)p.dy.data + first * p.dy.stride;
  const Storage* h_block = (const Storage*)p.h.data + first * p.h.stride;
  Storage* dh_block = (Storage*)p.dh + first * width;
  Storage* a_block = p.a ? (Storage*)p.a + first * p.columns : nullptr;
  for_each_vector(p.columns, [&](int64_t n, int count) __attribute__((always_inline)) {
    Vec total = {}, linear_total = {};
    for (int i = 0; i < rows; ++i) {
      const Storage* h = h_block + i * p.h.stride;
      Storage* dh = dh_block + i * width;
      Vec slope;
      Vec a = Function::both(pre_activation<Format>(h, p.bias, n, count), slope);
      const Vec dy = Format::load(dy_block + i * p.dy.stride + n, count);
      Vec d = dy * slope;
      if (kGated) {
        const Vec linear = pre_activation<Format>(h, p.bias, p.columns + n, count);
        const Vec dlinear = dy * a;
        Format::store(dh + p.columns + n, dlinear, count);
        linear_total += dlinear;
        d *= linear;
        a *= linear;
      }
      Format::store(dh + n, d, count);
      total += d;
      if (a_block) Format::store(a_block + i * p.columns + n, a, count);
    }
    if (sums) accumulate(sums + n, total, count);
    if (sums && kGated) accumulate(sums + p.columns + n, linear_total, count);
  });
}

template <class Format, class Function, bool kGated>
void activation_backward_rows(const ActivationBackward& params, int64_t begin, int64_t end,
                              double* sums) {
  constexpr int kRows = 4;
  const ActivationBackward p = params;  // RowSum (layer_norm_kernel.h) explains this copy.
  for (int64_t row = begin; row < end; row += kRows) {
    const int rows = end - row < kRows ? (int)(end - row) : kRows;
    activation_backward_block<Format, Function, kGated>(p, row, rows, sums);
  }
}

struct Gated {
  static constexpr bool value = true;
};

struct Ungated {
  static constexpr bool value = false;
};

// Calls body(format, function, gated) with objects whose types correspond to the format and the
// activation in the params struct.
template <class Format, class P, class Body>
FASTBERT_INLINE void with_function(const P& p, Body body) {
  switch (p.activation) {
    case Activation::none:
      return;
    case Activation::gelu:
      return body(Format{}, Gelu{}, Ungated{});
    case Activation::gelu_tanh:
      return body(Format{}, GeluTanh{}, Ungated{});
    case Activation::relu:
      return body(Format{}, Relu{}, Ungated{});
    case Activation::silu:
      return body(Format{}, Silu{}, Ungated{});
    case Activation::geglu:
      return body(Format{}, Gelu{}, Gated{});
    case Activation::geglu_tanh:
      return body(Format{}, GeluTanh{}, Gated{});
    case Activation::swiglu:
      return body(Format{}, Silu{}, Gated{});
  }
}

template <class P, class Body>
FASTBERT_INLINE void with_types(const P& p, Body body) {
  with_format(p.format, [&](auto format) __attribute__((always_inline)) {
    with_function<decltype(format)>(p, body);
  });
}

void activation_forward(const ActivationForward& p, int64_t begin, int64_t end) {
  with_types(p, [&](auto format, auto function, auto gated) {
    activation_forward_rows<decltype(format), decltype(function), gated.value>(p, begin, end);
  });
}

void activation_backward(const ActivationBackward& p, int64_t begin, int64_t end, double* partial) {
  with_types(p, [&](auto format, auto function, auto gated) {
    activation_backward_rows<decltype(format), decltype(function), gated.value>(p, begin, end,
                                                                                partial);
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
