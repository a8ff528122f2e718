// AMX tiles, eight registers of up to 16 rows of 64 bytes, and the products on them (Intel's
// Software Developer's Manual).
//
// A bf16 product adds A (M rows of K pairs) times B (K rows of N pairs) to C (M rows of N floats);
// the two elements of a pair are consecutive along k. An int8 product takes groups of four instead
// of pairs. Tile numbers are part of the instruction, so they are template arguments. The code is
// assembly, because GCC's intrinsics need literal numbers and do not tell the compiler that they
// touch memory.
//
// A test build (FASTBERT_EMULATE) runs the same operations in plain C++ with the rounding that the
// manual specifies. A bf16 product has two chains of fused multiply-adds, one for each element of
// the pairs, and treats denormals as zeros. The emulation aborts where a processor would raise an
// exception, and where a processor would silently compute with tiles whose shapes do not match.

#pragma once

#include "vec.h"

#if defined(FASTBERT_EMULATE)
#include <cstdio>
#include <cstdlib>
#endif

namespace fastbert::cpu::FASTBERT_LEVEL {

constexpr int kMostTileRows = 16, kMostTileBytes = 64;

// The operand of LDTILECFG: the rows and the bytes per row of each tile.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[8] = {}, reserved_bytes[8] = {};
  uint8_t rows[8] = {}, reserved_rows[8] = {};

  FASTBERT_INLINE void set(int tile, int tile_rows, int tile_bytes) {
    rows[tile] = (uint8_t)tile_rows;
    bytes[tile] = (uint16_t)tile_bytes;
  }
};

static_assert(sizeof(TileShapes) == 64, "the configuring instruction reads 64 bytes");

#if !defined(FASTBERT_EMULATE)

FASTBERT_INLINE void tile_configure(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}

// Releases the tiles, so that other code of this thread may use them and the system has less state
// to save.
FASTBERT_INLINE void tile_release() { asm volatile("tilerelease" ::: "memory"); }

template <int kTile>
FASTBERT_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// Loads a tile. Rows in memory are `stride` bytes apart.
template <int kTile>
FASTBERT_INLINE void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}

// Loads a tile with the hint that the data will not be needed again soon.
template <int kTile>
FASTBERT_INLINE void tile_stream(const void* p, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
FASTBERT_INLINE void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}

#define FASTBERT_TILE_PRODUCT(name, instruction)                                           \
  template <int kC, int kA, int kB>                                                        \
  FASTBERT_INLINE void name() {                                                            \
    asm volatile(instruction " %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB)); \
  }

// The products C += A B. tile_product_bf16 is in bf16. The others are in int8, and their last two
// letters tell whether the bytes of A and of B are signed (s) or unsigned (u).
FASTBERT_TILE_PRODUCT(tile_product_bf16, "tdpbf16ps")
FASTBERT_TILE_PRODUCT(tile_product_ss, "tdpbssd")
FASTBERT_TILE_PRODUCT(tile_product_su, "tdpbsud")
FASTBERT_TILE_PRODUCT(tile_product_us, "tdpbusd")
FASTBERT_TILE_PRODUCT(tile_product_uu, "tdpbuud")

#undef FASTBERT_TILE_PRODUCT

#else

struct EmulatedTiles {
  bool configured = false;
  TileShapes shapes;
  alignas(64) uint8_t data[8][kMostTileRows][kMostTileBytes];
};

static thread_local EmulatedTiles emulated_tiles;

FASTBERT_INLINE void tile_require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "emulated tiles: %s\n", what);
  std::abort();
}

// Aborts if the tiles are already configured, because a kernel then did not release its tiles.
FASTBERT_INLINE void tile_configure(const TileShapes& shapes) {
  EmulatedTiles& t = emulated_tiles;
  tile_require(!t.configured, "the tiles are configured twice without a release");
  tile_require(shapes.palette == 1 && shapes.start_row == 0,
               "the palette must be 1 and the start row 0");
  for (int i = 0; i < 8; ++i) {
    tile_require(shapes.rows[i] <= kMostTileRows && shapes.bytes[i] <= kMostTileBytes,
                 "a tile has more than 16 rows or 64 bytes per row");
    tile_require((shapes.rows[i] == 0) == (shapes.bytes[i] == 0),
                 "a tile has rows without bytes or bytes without rows");
  }
  t.configured = true;
  t.shapes = shapes;
  __builtin_memset(t.data, 0, sizeof(t.data));
}

FASTBERT_INLINE void tile_release() { emulated_tiles.configured = false; }

template <int kTile>
FASTBERT_INLINE EmulatedTiles& emulated_tile() {
  static_assert(kTile >= 0 && kTile < 8, "there are eight tiles");
  EmulatedTiles& t = emulated_tiles;
  tile_require(t.configured && t.shapes.rows[kTile] > 0, "a tile is used that is not configured");
  return t;
}

template <int kTile>
FASTBERT_INLINE void tile_zero() {
  __builtin_memset(emulated_tile<kTile>().data[kTile], 0, sizeof(EmulatedTiles::data[kTile]));
}

template <int kTile>
FASTBERT_INLINE void tile_load(const void* p, int64_t stride) {
  EmulatedTiles& t = emulated_tile<kTile>();
  __builtin_memset(t.data[kTile], 0, sizeof(t.data[kTile]));
  for (int r = 0; r < t.shapes.rows[kTile]; ++r) {
    __builtin_memcpy(t.data[kTile][r], (const char*)p + r * stride, t.shapes.bytes[kTile]);
  }
}

template <int kTile>
FASTBERT_INLINE void tile_stream(const void* p, int64_t stride) {
  tile_load<kTile>(p, stride);
}

template <int kTile>
FASTBERT_INLINE void tile_store(void* p, int64_t stride) {
  const EmulatedTiles& t = emulated_tile<kTile>();
  for (int r = 0; r < t.shapes.rows[kTile]; ++r) {
    __builtin_memcpy((char*)p + r * stride, t.data[kTile][r], t.shapes.bytes[kTile]);
  }
}

template <int kC, int kA, int kB>
FASTBERT_INLINE EmulatedTiles& emulated_product() {
  static_assert(kC != kA && kC != kB && kA != kB, "a product takes three different tiles");
  emulated_tile<kC>();
  emulated_tile<kA>();
  EmulatedTiles& t = emulated_tile<kB>();
  const TileShapes& s = t.shapes;
  tile_require(
      s.rows[kC] == s.rows[kA] && s.bytes[kC] == s.bytes[kB] && s.bytes[kA] == 4 * s.rows[kB],
      "the tiles of a product do not fit together");
  return t;
}

template <int kC, int kA, int kB>
FASTBERT_INLINE void tile_product_bf16() {
  EmulatedTiles& t = emulated_product<kC, kA, kB>();
  constexpr unsigned kFlushDenormals = 0x8040;
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(0x1f80 | kFlushDenormals);
  for (int m = 0; m < t.shapes.rows[kA]; ++m) {
    Vec even = {}, odd = {}, c;
    for (int k = 0; k < t.shapes.rows[kB]; ++k) {
      uint32_t a;
      WordVec b;
      __builtin_memcpy(&a, t.data[kA][m] + 4 * k, sizeof(a));
      __builtin_memcpy(&b, t.data[kB][k], sizeof(b));
      even = fma((Vec)(WordVec{} + (a << 16)), (Vec)(b << 16), even);
      odd = fma((Vec)(WordVec{} + (a & 0xffff0000u)), (Vec)(b & 0xffff0000u), odd);
    }
    __builtin_memcpy(&c, t.data[kC][m], sizeof(c));
    c += even + odd;
    __builtin_memcpy(t.data[kC][m], &c, t.shapes.bytes[kC]);
  }
  _mm_setcsr(mode);
}

template <class A, class B, int kC, int kA, int kB>
FASTBERT_INLINE void emulated_product_int8() {
  EmulatedTiles& t = emulated_product<kC, kA, kB>();
  for (int m = 0; m < t.shapes.rows[kA]; ++m) {
    for (int n = 0; n < t.shapes.bytes[kB] / 4; ++n) {
      int32_t c;
      __builtin_memcpy(&c, t.data[kC][m] + 4 * n, sizeof(c));
      for (int k = 0; k < t.shapes.rows[kB]; ++k) {
        for (int i = 0; i < 4; ++i) {
          c += (int32_t)(A)t.data[kA][m][4 * k + i] * (int32_t)(B)t.data[kB][k][4 * n + i];
        }
      }
      __builtin_memcpy(t.data[kC][m] + 4 * n, &c, sizeof(c));
    }
  }
}

template <int kC, int kA, int kB>
FASTBERT_INLINE void tile_product_ss() {
  emulated_product_int8<int8_t, int8_t, kC, kA, kB>();
}

template <int kC, int kA, int kB>
FASTBERT_INLINE void tile_product_su() {
  emulated_product_int8<int8_t, uint8_t, kC, kA, kB>();
}

template <int kC, int kA, int kB>
FASTBERT_INLINE void tile_product_us() {
  emulated_product_int8<uint8_t, int8_t, kC, kA, kB>();
}

template <int kC, int kA, int kB>
FASTBERT_INLINE void tile_product_uu() {
  emulated_product_int8<uint8_t, uint8_t, kC, kA, kB>();
}

#endif

}  // namespace fastbert::cpu::FASTBERT_LEVEL
