// What follows the sums of a product while they are in the first-level cache: bias, activation,
// residual, the way out in another format, and the layer norm of whole rows.

#pragma once

#include "formats.h"
#include "gelu.h"
#include "kernels.h"
#include "layer_norm_kernel.h"
#include "pairs.h"
#include "vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// A tile of sums whose products are complete, or whole rows of them.
struct Tile {
  float* sums;
  int64_t stride, row, column;
  int rows, columns;
};

// Calls body(sums, row, column, count) for each register of the tile.
template <class Body>
FASTBERT_INLINE void for_each_register(const Tile& tile, Body body) {
  for (int i = 0; i < tile.rows; ++i) {
    for (int n = 0; n < tile.columns; n += kLanes) {
      body(tile.sums + i * tile.stride + n, tile.row + i, tile.column + n,
           clamp_count(tile.columns - n, kLanes));
    }
  }
}

template <class Function>
FASTBERT_INLINE void apply(const Tile& tile, Function function) {
  for_each_register(tile, [&](float* sums, int64_t, int64_t, int) __attribute__((always_inline)) {
    store(sums, function(load(sums)));
  });
}

FASTBERT_INLINE void store_as(Format format, void* matrix, int64_t columns, const Tile& tile) {
  with_format(format, [&](auto type) __attribute__((always_inline)) {
    using To = decltype(type);
    for_each_register(tile, [&](const float* sums, int64_t row, int64_t column,
                                int count) __attribute__((always_inline)) {
      To::store((typename To::Storage*)matrix + row * columns + column, load(sums), count);
    });
  });
}

__attribute__((noinline)) void finish_tile(const Gemm& g, const Tile& tile) {
  if (g.bias) {
    for_each_register(
        tile, [&](float* sums, int64_t, int64_t column, int count) __attribute__((always_inline)) {
          store(sums, load(sums) + load(g.bias + column, count));
        });
  }
  if (g.pre_activation) store_as(g.format, g.pre_activation, g.n, tile);
  switch (g.activation) {
    case Activation::none:
      break;
    case Activation::gelu:
      apply(tile, [&](Vec x) __attribute__((always_inline)) { return Erf::forward(x); });
      break;
    case Activation::gelu_tanh:
      apply(tile, [&](Vec x) __attribute__((always_inline)) { return Tanh::forward(x); });
      break;
    case Activation::relu:  // a NaN stays one
      apply(tile, [&](Vec x) __attribute__((always_inline)) { return select(x < 0.0f, Vec{}, x); });
      break;
    case Activation::geglu:  // of two halves of a row: feed_forward_kernel.h
    case Activation::swiglu:
      __builtin_unreachable();
  }
  if (g.residual.data) {
    with_format(g.residual_format, [&](auto type) __attribute__((always_inline)) {
      using From = decltype(type);
      for_each_register(tile, [&](float* sums, int64_t row, int64_t column,
                                  int count) __attribute__((always_inline)) {
        const auto* residual = (const typename From::Storage*)g.residual.data;
        store(sums, load(sums) + From::load(residual + row * g.residual.stride + column, count));
      });
    });
  }
  if (!g.norm_weight) store_as(g.out_format, g.out, g.n, tile);
}

// The layer norm of whole rows of sums, as in layer_norm_kernel.h.
template <class Format>
void normalise_rows(const Gemm& g, const Tile& tile) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    const float* sums = tile.sums + row * tile.stride;
    Vec totals[kSums] = {};
    for_each_summand(g.n, [&](int64_t n, int u, int count) __attribute__((always_inline)) {
      totals[u] += load(sums + n, count);
      __builtin_prefetch(sums + tile.stride + n, 0, 3);
    });
    const Moments m = moments(sums, totals, g.n, g.eps);
    auto* out = (typename Format::Storage*)g.out + (tile.row + row) * g.n;
    const Vec shift = splat(-m.correction * m.rstd);
    for_each_vector(g.n, [&](int64_t n, int count) __attribute__((always_inline)) {
      const Vec normal = fma(load(sums + n, count) - m.mean, splat(m.rstd), shift);
      Format::store(out + n,
                    fma(normal, load(g.norm_weight + n, count), load(g.norm_bias + n, count)),
                    count);
    });
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
