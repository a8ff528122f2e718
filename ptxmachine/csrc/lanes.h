// Handlers of instructions that compute each lane independently: one template per number of
// operands.
//
// An operation is a struct with a static call(). The template reads the lanes, calls call() for
// each lane, and writes the lanes in the mask. All 32 lanes are computed, so that the compiler
// vectorises the loops. call() must therefore be defined for every value, even for uninitialized
// lanes.

#pragma once

#include <cmath>

#include "machine.h"

namespace ptxmachine {

template <class T>
using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

// The bits of an fp16 value (Half) and of a bf16 value (Brain).
struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

// The compiler's type of fp16. GCC 12 has _Float16 in C++ for x86-64, and __fp16 for aarch64.
#if defined(__ARM_FP16_FORMAT_IEEE)
using Float16 = __fp16;
#else
using Float16 = _Float16;
#endif

inline float to_float(Half h) { return (float)bits_as<Float16>(h.bits); }
inline float to_float(Brain b) { return bits_as<float>((uint32_t)b.bits << 16); }
// e4m3 has one NaN (of either sign) and no infinity. e5m2 is the upper byte of fp16.
inline float float_of_8_bits(Type type, uint8_t bits) {
  if (type == Type::e5m2) return to_float(Half{(uint16_t)(bits << 8)});
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if ((bits & 0x7f) == 0x7f) return bits_as<float>(0x7fc00000u | (uint32_t)(bits & 0x80) << 24);
  const float v = exponent == 0 ? std::ldexp((float)fraction, -9)
                                : std::ldexp((float)(8 + fraction), exponent - 10);
  return bits & 0x80 ? -v : v;
}
inline Half to_half(double x) { return {bits_as<uint16_t>((Float16)x)}; }
inline Brain to_brain(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  if (x != x) return {0x7fff};
  return {(uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
// Rounds a double to the nearest bf16 value. The first step rounds to fp32 in the mode "round to
// odd", so that the second step gives the same result as a single rounding.
inline Brain to_brain(double x) {
  float f = (float)x;
  if (f == f && (double)f != x && std::isfinite(f)) {
    const float toward_zero = std::fabs((double)f) > std::fabs(x) ? std::nextafterf(f, 0.0f) : f;
    f = bits_as<float>(bits_as<uint32_t>(toward_zero) | 1u);
  }
  return to_brain(f);
}

template <class T>
inline T from_word(Word<T> word) {
  if constexpr (sizeof(T) == 8 || sizeof(T) == 4) {
    return bits_as<T>(word);
  } else if constexpr (sizeof(T) == 2) {
    return bits_as<T>((uint16_t)word);
  } else {
    return bits_as<T>((uint8_t)word);
  }
}
template <class T>
inline Word<T> to_word(T value) {
  if constexpr (sizeof(T) == 8 || sizeof(T) == 4) {
    return bits_as<Word<T>>(value);
  } else if constexpr (sizeof(T) == 2) {
    return bits_as<uint16_t>(value);
  } else {
    return bits_as<uint8_t>(value);
  }
}

template <class T>
inline const Word<T>* lanes(Warp& w, Reg r) {
  if constexpr (sizeof(T) == 8) {
    return w.wide(r);
  } else {
    return w.word(r);
  }
}

// The handler of hints and of other instructions without an effect in the machine.
inline void nothing(Warp&, const Instr&, Mask) {}

// Returns Pick<T>::handler() for the C++ type T of an integer type, or null for another type.
template <template <class> class Pick>
Handler by_integer_type(Type type) {
  switch (type) {
    case Type::b16:
    case Type::u16:
      return Pick<uint16_t>::handler();
    case Type::s16:
      return Pick<int16_t>::handler();
    case Type::b32:
    case Type::u32:
      return Pick<uint32_t>::handler();
    case Type::s32:
      return Pick<int32_t>::handler();
    case Type::b64:
    case Type::u64:
      return Pick<uint64_t>::handler();
    case Type::s64:
      return Pick<int64_t>::handler();
    default:
      return nullptr;
  }
}

template <class W>
FASTBERT_PTX_SIMD inline void put(Warp& w, Reg r, Mask mask, const W* out, Mask valid) {
  W* to;
  if constexpr (sizeof(W) == 8) {
    to = w.wide(r);
  } else {
    to = w.word(r);
  }
  if (mask == kAll) {
    std::memcpy(to, out, sizeof(W) * kLanes);
  } else {
    for (int l = 0; l < kLanes; ++l) to[l] = mask >> l & 1 ? out[l] : to[l];
  }
  w.wrote(r, mask, valid);
}

template <class Out, class In, class Op>
FASTBERT_PTX_SIMD void unary(Warp& w, const Instr& i, Mask m) {
  const Word<In>* a = lanes<In>(w, i.reg[1]);
  Word<Out> out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = to_word<Out>(Op::call(from_word<In>(a[l])));
  put(w, i.reg[0], m, out, w.ok(i.reg[1]));
}

template <class Out, class In, class Op>
FASTBERT_PTX_SIMD void binary(Warp& w, const Instr& i, Mask m) {
  const Word<In>*a = lanes<In>(w, i.reg[1]), *b = lanes<In>(w, i.reg[2]);
  Word<Out> out[kLanes];
  for (int l = 0; l < kLanes; ++l)
    out[l] = to_word<Out>(Op::call(from_word<In>(a[l]), from_word<In>(b[l])));
  put(w, i.reg[0], m, out, w.ok(i.reg[1]) & w.ok(i.reg[2]));
}

template <class Out, class In, class Third, class Op>
FASTBERT_PTX_SIMD void ternary(Warp& w, const Instr& i, Mask m) {
  const Word<In>*a = lanes<In>(w, i.reg[1]), *b = lanes<In>(w, i.reg[2]);
  const Word<Third>* c = lanes<Third>(w, i.reg[3]);
  Word<Out> out[kLanes];
  for (int l = 0; l < kLanes; ++l)
    out[l] =
        to_word<Out>(Op::call(from_word<In>(a[l]), from_word<In>(b[l]), from_word<Third>(c[l])));
  put(w, i.reg[0], m, out, w.ok(i.reg[1]) & w.ok(i.reg[2]) & w.ok(i.reg[3]));
}

}  // namespace ptxmachine
