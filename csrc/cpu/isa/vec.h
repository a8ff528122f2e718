// One SIMD register of floats, and the few operations on it that the kernels use.
//
// Arithmetic uses the compilers' vector extensions, so one source serves every register width.
// Intrinsics appear only where the extensions cannot express an operation. A level_*.cpp file
// defines FASTBERT_LEVEL (the name of a namespace) and FASTBERT_LEVEL_BYTES (the size of a register
// in bytes) before it includes this header; a level of NEON also defines FASTBERT_LEVEL_NEON. All
// functions are always inlined, and no std header with code is included, because the linker could
// otherwise share the code between levels (kernels.h).

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(FASTBERT_LEVEL_NEON)
#include <arm_neon.h>
#endif

#define FASTBERT_INLINE inline __attribute__((always_inline))

// The size in bytes of the registers for which intrinsics are used, or 0 if no intrinsics are used.
// A test build (FASTBERT_EMULATE) compiles the levels with 64-byte registers for processors without
// such registers: the compiler splits the vectors, and plain C++ with the same results replaces the
// intrinsics.
#if defined(FASTBERT_EMULATE) && FASTBERT_LEVEL_BYTES == 64
#define FASTBERT_INTRINSIC_BYTES 0
#else
#define FASTBERT_INTRINSIC_BYTES FASTBERT_LEVEL_BYTES
#endif

namespace fastbert::cpu::FASTBERT_LEVEL {

constexpr int kBytes = FASTBERT_LEVEL_BYTES;
constexpr int kLanes = kBytes / 4;
// The number of columns of a panel, which is two registers wide.
constexpr int kPanel = 2 * kLanes;

typedef float Vec __attribute__((vector_size(kBytes)));
typedef int32_t IntVec __attribute__((vector_size(kBytes)));
typedef uint32_t WordVec __attribute__((vector_size(kBytes)));
typedef uint64_t WideVec __attribute__((vector_size(kBytes)));
typedef float FloatHalf __attribute__((vector_size(kBytes / 2)));
typedef double DoubleVec __attribute__((vector_size(kBytes)));
typedef uint16_t HalfVec __attribute__((vector_size(kBytes / 2)));

// Returns a register with x in every lane. x - 0 is x for every x, including NaN and -0.
FASTBERT_INLINE Vec splat(float x) { return x - Vec{}; }

#if defined(FASTBERT_LEVEL_NEON)
// GCC 12 compiles some copies of 16 bytes to moves through two general registers.
typedef float MemoryVec __attribute__((vector_size(kBytes), aligned(1), may_alias));

FASTBERT_INLINE Vec load(const float* p) { return *(const MemoryVec*)p; }
FASTBERT_INLINE void store(float* p, Vec v) { *(MemoryVec*)p = v; }
#else
FASTBERT_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, kBytes);
  return v;
}

FASTBERT_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, kBytes); }
#endif

#if FASTBERT_INTRINSIC_BYTES == 64
// Returns the mask of the first `count` lanes.
FASTBERT_INLINE __mmask16 lane_mask(int count) { return (__mmask16)((1u << count) - 1u); }
#endif

// Loads the first `count` lanes; the other lanes are 0.
FASTBERT_INLINE Vec load(const float* p, int count) {
  if (count == kLanes) return load(p);
#if FASTBERT_INTRINSIC_BYTES == 64
  return (Vec)_mm512_maskz_loadu_ps(lane_mask(count), p);
#elif defined(FASTBERT_LEVEL_NEON)
  // GCC compiles the loop below to a call of memcpy.
  Vec v = {};
  if (count & 2) v = vcombine_f32(vld1_f32(p), vdup_n_f32(0.0f));
  if (count & 1) v = count & 2 ? vld1q_lane_f32(p + 2, v, 2) : vld1q_lane_f32(p, v, 0);
  return v;
#else
  float lanes[kLanes] = {};
  for (int i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
#endif
}

FASTBERT_INLINE void store(float* p, Vec v, int count) {
  if (count == kLanes) return store(p, v);
#if FASTBERT_INTRINSIC_BYTES == 64
  _mm512_mask_storeu_ps(p, lane_mask(count), (__m512)v);
#elif defined(FASTBERT_LEVEL_NEON)
  if (count & 2) __builtin_memcpy(p, &v, 8);
  if (count & 1) p[count - 1] = count & 2 ? v[2] : v[0];
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < count; ++i) p[i] = lanes[i];
#endif
}

FASTBERT_INLINE WordVec lane_numbers() {
  WordVec v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

FASTBERT_INLINE Vec select(IntVec condition, Vec a, Vec b) { return condition ? a : b; }

// least returns a < b ? a : b, and greatest returns a > b ? a : b. If a or b is NaN, both return b.
// Intrinsics are used because compilers do not recognise a select as a minimum or a maximum.
FASTBERT_INLINE Vec least(Vec a, Vec b) {
#if FASTBERT_INTRINSIC_BYTES == 64
  return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return select(a < b, a, b);
#endif
}

FASTBERT_INLINE Vec greatest(Vec a, Vec b) {
#if FASTBERT_INTRINSIC_BYTES == 64
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

FASTBERT_INLINE Vec abs(Vec x) { return (Vec)((WordVec)x & 0x7fffffffu); }

// Returns the first `count` lanes of `v` and the other lanes of `rest`.
FASTBERT_INLINE Vec first_lanes(Vec v, int count, Vec rest = Vec{}) {
  if (count == kLanes) return v;
  return select((IntVec)lane_numbers() < count, v, rest);
}

// Returns a * b + c, with a single rounding if the instruction set has fused multiply-add. The
// build forbids the compiler to fuse operations by itself, so results depend on the level only, and
// not on the compiler. Kernels therefore call this function where they need a fused operation.
FASTBERT_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if FASTBERT_INTRINSIC_BYTES == 64
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FASTBERT_INTRINSIC_BYTES == 32
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(FASTBERT_LEVEL_NEON)
  return vfmaq_f32(c, a, b);
#elif FASTBERT_INTRINSIC_BYTES == 16
  return a * b + c;
#else
  __m256 x[2], y[2], z[2];
  __builtin_memcpy(x, &a, kBytes);
  __builtin_memcpy(y, &b, kBytes);
  __builtin_memcpy(z, &c, kBytes);
  for (int i = 0; i < 2; ++i) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  __builtin_memcpy(&c, z, kBytes);
  return c;
#endif
}

// A number that multiplies all lanes of a register. On x86-64, a register has the number in every
// lane. A multiplication of NEON can take one lane of a register as the number, so the number is
// loaded as a scalar. Loading it to every lane would occupy a pipe that multiplies on some cores.
#if defined(FASTBERT_LEVEL_NEON)
using Factor = float;
FASTBERT_INLINE Factor factor(float x) {
  asm("" : "+w"(x));  // Without this line, the compiler loads x to every lane.
  return x;
}
FASTBERT_INLINE Vec fma(Factor a, Vec b, Vec c) { return vfmaq_n_f32(c, b, a); }
#else
using Factor = Vec;
FASTBERT_INLINE Factor factor(float x) { return splat(x); }
#endif

#if defined(FASTBERT_LEVEL_DOTS)
// Adds the two products of the bf16 pairs in a and b to each lane of c. On x86-64, the product of
// the upper elements is added first. The instruction treats subnormals as 0.
FASTBERT_INLINE Vec dot_bf16(Vec a, Vec b, Vec c) {
#if FASTBERT_INTRINSIC_BYTES == 64
  return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#elif defined(FASTBERT_LEVEL_NEON)
  return vbfdotq_f32(c, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  const WordVec x = (WordVec)a, y = (WordVec)b;
  c = fma((Vec)(x & 0xffff0000u), (Vec)(y & 0xffff0000u), c);
  return fma((Vec)(x << 16), (Vec)(y << 16), c);
#endif
}

#if defined(FASTBERT_LEVEL_NEON)
FASTBERT_INLINE Vec dot_bf16(Factor a, Vec b, Vec c) {
  float32x2_t word;
  asm("" : "=w"(word) : "0"(a));  // Only the first lane of the register is used.
  return vbfdotq_lane_f32(c, (bfloat16x8_t)b, (bfloat16x4_t)word, 0);
}

// Returns dot_bf16(a, b, c) with lane kLane of a in each lane of a.
template <int kLane>
FASTBERT_INLINE Vec dot_lane_bf16(Vec a, Vec b, Vec c) {
  return vbfdotq_laneq_f32(c, (bfloat16x8_t)b, (bfloat16x8_t)a, kLane);
}
#endif

// Returns dot_bf16(a, b, c) with *word in each lane of a. The instruction broadcasts the word while
// it loads it. GCC uses a second instruction, which makes a Zen 4 a quarter slower.
FASTBERT_INLINE Vec dot_bf16(const float* word, Vec b, Vec c) {
#if FASTBERT_INTRINSIC_BYTES == 64
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(c) : "v"(b), "m"(*word));
  return c;
#else
  return dot_bf16(factor(*word), b, c);
#endif
}
#endif

// The number of registers of partial sums for a sum along a row. Short chains of additions are fast
// and accurate, and the registers for two such sums still fit the register file.
constexpr int kSums = 4;

// Returns the lower (half = 0) or upper (half = 1) lanes of v in double precision.
FASTBERT_INLINE DoubleVec widen(Vec v, int half) {
  FloatHalf narrow;
  __builtin_memcpy(&narrow, (const char*)&v + half * sizeof(narrow), sizeof(narrow));
  return __builtin_convertvector(narrow, DoubleVec);
}

// Returns the mean of a row of `columns` elements from its partial sums. The lanes are added and
// divided in double precision. All elements of a row share the error of the row's mean or variance,
// so this error must be small compared with the errors of the elements.
FASTBERT_INLINE double mean_of(const Vec (&sums)[kSums], int64_t columns) {
  const Vec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const DoubleVec wide = widen(sum, 0) + widen(sum, 1);
  double total = 0.0;
  for (int i = 0; i < kLanes / 2; ++i) total += wide[i];
  return total / (double)columns;
}

// Adds the first `count` lanes of v to `sums`. The sums are in double precision, because gradients
// of parameters are sums over many rows.
FASTBERT_INLINE void accumulate(double* sums, Vec v, int count) {
  if (count < kLanes) {
    for (int i = 0; i < count; ++i) sums[i] += v[i];
    return;
  }
  for (int half = 0; half < 2; ++half) {
    DoubleVec wide;
    double* p = sums + half * kLanes / 2;
    __builtin_memcpy(&wide, p, sizeof(wide));
    wide += widen(v, half);
    __builtin_memcpy(p, &wide, sizeof(wide));
  }
}

// Calls body(n, count) for the elements [n, n + count) of a row. `count` is the constant kLanes,
// except in the last call if `columns` is not a multiple of kLanes.
template <class Body>
FASTBERT_INLINE void for_each_vector(int64_t columns, Body body) {
  int64_t n = 0;
  for (; n + kLanes <= columns; n += kLanes) body(n, kLanes);
  if (n < columns) body(n, (int)(columns - n));
}

// An integer as a type, for a generic lambda that needs a constant.
template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

// Calls body(n, u, count) for the same ranges as for_each_vector. u < kSums is the number of the
// partial sum to which the range belongs.
template <class Body>
FASTBERT_INLINE void for_each_summand(int64_t columns, Body body) {
  constexpr int kStep = kSums * kLanes;
  int64_t n = 0;
  for (; n + kStep <= columns; n += kStep) {
    for (int u = 0; u < kSums; ++u) body(n + u * kLanes, u, kLanes);
  }
  // u is a constant in every call, because the compiler would keep an array of sums in memory if
  // its index were variable.
  for (int u = 0; u < kSums - 1; ++u) {
    if (n + kLanes > columns) break;
    body(n, u, kLanes);
    n += kLanes;
  }
  if (n < columns) body(n, kSums - 1, (int)(columns - n));
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
