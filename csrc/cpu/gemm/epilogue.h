// The epilogue of a product: bias, activation, residual and conversion to the output's format. The
// epilogue of a tile runs while the sums of the tile are in the first-level cache.

#pragma once

#include "../isa/formats.h"
#include "../isa/kernels.h"
#include "../isa/pairs.h"
#include "../isa/transpose.h"
#include "../isa/vec.h"
#include "../rows/activation.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// A tile of complete sums, to which no more terms are added. The first sum of the tile belongs to
// (row, column) of the product, and rows of sums are `stride` elements apart.
struct Tile {
  float* sums;
  int64_t stride, row, column;
  int rows, columns;
};

// The functions that an epilogue applies to sums. A function is applied to several registers at a
// time, so that the processor overlaps the long chains of dependent operations. `Same` leaves the
// sums unchanged.
struct Same {
  template <int kCount>
  static FASTBERT_INLINE void apply(Vec (&)[kCount]) {}
};

template <class Function>
struct Each {
  template <int kCount>
  static FASTBERT_INLINE void apply(Vec (&x)[kCount]) {
    for (int i = 0; i < kCount; ++i) x[i] = Function::forward(x[i]);
  }
};

// GELU for a result in the format `To`. bf16 needs fewer operations than fp32.
template <class To>
struct GeluTo : Each<Gelu> {};

template <>
struct GeluTo<BF16> {
  template <int kCount>
  static FASTBERT_INLINE void apply(Vec (&x)[kCount]) {
    Gelu::forward_bf16(x);
  }
};

// A pointer into the matrix of a residual or of a result. `data` points to the element that belongs
// to the first sum of a tile, and is null if there is no residual. Rows are `stride` elements
// apart.
template <class Pointer>
struct Place {
  Pointer data;
  int64_t stride;
};

template <class Pointer>
FASTBERT_INLINE Place<Pointer> place_of(Pointer matrix, int64_t stride, const Tile& tile) {
  return {matrix ? matrix + tile.row * stride + tile.column : matrix, stride};
}

// One pass over a tile: out = function(sums + bias) + residual.
template <class From, class To, class Function>
struct Pass {
  const Tile& tile;
  const float* bias;  // bias of the tile's columns, or null
  Place<const typename From::Storage*> residual;
  Place<typename To::Storage*> out;

  template <int kRows>
  FASTBERT_INLINE void rows(int row, int n, int count) const {
    Vec v[kRows];
    const Vec summand = bias ? load(bias + n, count) : Vec{};
    for (int i = 0; i < kRows; ++i) {
      v[i] = load(tile.sums + (row + i) * tile.stride + n) + summand;
    }
    Function::apply(v);
    for (int i = 0; i < kRows; ++i) {
      if (residual.data) {
        v[i] += From::load(residual.data + (row + i) * residual.stride + n, count);
      }
      auto* p = out.data + (row + i) * out.stride + n;
      if constexpr (kIsBF16<To>) {
        store_half(p, narrow_normal(v[i]), count);
      } else {
        To::store(p, v[i], count);
      }
    }
  }

  FASTBERT_INLINE void run() const {
    for (int n = 0; n < tile.columns; n += kLanes) {
      const int count = clamp_count(tile.columns - n, kLanes);
      int row = 0;
      if (count == kLanes) {
        for (; row + 4 <= tile.rows; row += 4) rows<4>(row, n, kLanes);
        for (; row + 2 <= tile.rows; row += 2) rows<2>(row, n, kLanes);
      }
      for (; row < tile.rows; ++row) rows<1>(row, n, count);
    }
  }
};

template <class From, class To, class Function>
FASTBERT_INLINE void pass(const Tile& tile, const float* bias,
                          Place<const typename From::Storage*> residual,
                          Place<typename To::Storage*> out) {
  Pass<From, To, Function>{tile, bias, residual, out}.run();
}

// Calls body(function) with an object whose type computes `activation` for a result in the format
// `To`.
template <class To, class Body>
FASTBERT_INLINE void with_activation(Activation activation, Body body) {
  switch (activation) {
    case Activation::none:
      return body(Same{});
    case Activation::gelu:
      return body(GeluTo<To>{});
    case Activation::gelu_tanh:
      return body(Each<GeluTanh>{});
    case Activation::relu:
      return body(Each<Relu>{});
    case Activation::silu:
      return body(Each<Silu>{});
    case Activation::geglu:  // Gated activations need whole rows; see rows/activation_kernel.h.
    case Activation::geglu_tanh:
    case Activation::swiglu:
      __builtin_unreachable();
  }
}

template <class To>
FASTBERT_INLINE void activate(Activation activation, const Tile& tile, const float* bias,
                              Place<typename To::Storage*> out) {
  with_activation<To>(activation, [&](auto function) __attribute__((always_inline)) {
    pass<F32, To, decltype(function)>(tile, bias, {}, out);
  });
}

template <class To>
FASTBERT_INLINE void finish_to(const Epilogue& e, const Tile& tile, const float* bias,
                               Place<typename To::Storage*> out) {
  if (!e.residual.data) return activate<To>(e.activation, tile, bias, out);
  if (e.activation != Activation::none) {
    activate<F32>(e.activation, tile, bias, {tile.sums, tile.stride});
    bias = nullptr;
  }
  with_format(e.residual_format, [&](auto type) __attribute__((always_inline)) {
    using From = decltype(type);
    const auto* residual = (const typename From::Storage*)e.residual.data;
    pass<From, To, Same>(tile, bias, place_of(residual, e.residual.stride, tile), out);
  });
}

__attribute__((noinline)) void finish_tile(const Epilogue& e, const Tile& tile) {
  const float* bias = e.bias ? e.bias + tile.column : nullptr;
  const auto lying_like_out = [&](auto type, void* matrix) __attribute__((always_inline)) {
    return place_of((typename decltype(type)::Storage*)matrix, e.out_row, tile);
  };
  if (e.pre_activation) {
    with_format(e.pre_activation_format, [&](auto type) __attribute__((always_inline)) {
      pass<F32, decltype(type), Same>(tile, bias, {}, lying_like_out(type, e.pre_activation));
    });
  }
  with_format(e.out_format, [&](auto type) __attribute__((always_inline)) {
    finish_to<decltype(type)>(e, tile, bias, lying_like_out(type, e.out));
  });
}

// Transposes one square of kLanes x kLanes sums in a block of kPanel x kPanel sums. The block has
// four such squares, and `part` is the number of the square. Rows of sums are `stride` elements
// apart.
FASTBERT_INLINE void turn_part(const float* sums, int64_t stride, float* turned, int part) {
  const int64_t row = part / 2 * kLanes, column = part % 2 * kLanes;
  Vec block[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) block[i] = load(sums + (row + i) * stride + column);
  transpose(block);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(turned + (column + i) * kPanel + row, block[i]);
}

// Runs the epilogue of a tile in which a row of sums is a column of the result. The tile has at
// most kPanel x kPanel sums, and the caller guarantees that the memory of a whole block of this
// size can be read.
__attribute__((noinline)) void finish_turned(const Epilogue& e, const Tile& tile) {
  alignas(64) float turned[kPanel * kPanel];
  for (int part = 0; part < 4; ++part) {
    if (part / 2 * kLanes < tile.rows && part % 2 * kLanes < tile.columns) {
      turn_part(tile.sums, tile.stride, turned, part);
    }
  }
  finish_tile(e, {turned, kPanel, tile.column, tile.row, tile.columns, tile.rows});
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
