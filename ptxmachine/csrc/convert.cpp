// Conversions and moves: cvt, cvta, and mov, which also packs and unpacks vectors.

#include <cfenv>
#include <limits>

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {
namespace {

enum class Round : int32_t { nearest, zero, down, up, away };
// The flags in arg 1 of cvt.
enum : int32_t { kFtz = 1, kSat = 2, kRelu = 4, kFinite = 8, kIntegral = 16 };

double rounded_integral(double x, Round round) {
  switch (round) {
    case Round::zero:
      return std::trunc(x);
    case Round::down:
      return std::floor(x);
    case Round::up:
      return std::ceil(x);
    default:
      return std::nearbyint(x);
  }
}

// Returns the value of a floating-point source of cvt. A double represents every value of the
// source formats exactly.
double read_float(Type type, uint64_t bits) {
  switch (type) {
    case Type::f16:
      return to_float(Half{(uint16_t)bits});
    case Type::bf16:
      return to_float(Brain{(uint16_t)bits});
    case Type::f32:
      return bits_as<float>((uint32_t)bits);
    case Type::f64:
      return bits_as<double>(bits);
    default:
      return float_of_8_bits(type, (uint8_t)bits);
  }
}

__int128 read_integer(Type type, uint64_t bits) {
  switch (type) {
    case Type::s8:
      return (int8_t)bits;
    case Type::s16:
      return (int16_t)bits;
    case Type::s32:
      return (int32_t)bits;
    case Type::s64:
      return (int64_t)bits;
    case Type::u8:
    case Type::b8:
      return (uint8_t)bits;
    case Type::u16:
    case Type::b16:
      return (uint16_t)bits;
    case Type::u32:
    case Type::b32:
      return (uint32_t)bits;
    default:
      return bits;
  }
}

// Rounds x to a format with `fraction` fraction bits, the least exponent `lowest` and the largest
// finite value `largest`. `infinite` tells whether a value above `largest` may become an infinity.
// The result is a double.
double rounded_to(double x, int fraction, int lowest, double largest, Round round, bool infinite) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent;
  std::frexp(x, &exponent);  // |x| = m 2^exponent, 1/2 <= m < 1
  const int unit = std::max(exponent - 1, lowest) - fraction;
  const double scaled = std::ldexp(x, -unit);
  double r;
  if (round == Round::away) {
    r = std::copysign(std::floor(std::fabs(scaled) + 0.5), x);
  } else {
    r = rounded_integral(scaled, round);
  }
  r = std::ldexp(r, unit);
  if (std::fabs(r) <= largest) return r;
  const bool stays =
      round == Round::zero || (round == Round::down && x > 0) || (round == Round::up && x < 0);
  return std::copysign(infinite && !stays ? std::numeric_limits<double>::infinity() : largest, x);
}

uint64_t write_float(Type type, double x, Round round, int flags) {
  if (flags & kRelu) x = x != x ? x : std::max(x, 0.0);
  if (flags & kSat) x = x != x ? 0.0 : std::min(std::max(x, 0.0), 1.0);
  switch (type) {
    case Type::f64:
      return bits_as<uint64_t>(x);
    case Type::f32: {
      const float f =
          (float)rounded_to(x, 23, -126, (double)std::numeric_limits<float>::max(), round, true);
      return x != x ? 0x7fffffffu : bits_as<uint32_t>(f);
    }
    case Type::tf32: {
      const float f = (float)rounded_to(x, 10, -126, 0x1.ffcp127, round, true);
      return x != x ? 0x7fffffffu : bits_as<uint32_t>(f);
    }
    case Type::f16: {
      if (x != x) return 0x7fff;
      return to_half(rounded_to(x, 10, -14, 65504.0, round, !(flags & kFinite))).bits;
    }
    case Type::bf16: {
      if (x != x) return 0x7fff;
      return bits_as<uint32_t>((float)rounded_to(x, 7, -126, 0x1.fep127, round, true)) >> 16;
    }
    case Type::e5m2: {
      if (x != x) return 0x7f;
      return to_half(rounded_to(x, 2, -14, 57344.0, round, !(flags & kFinite))).bits >> 8;
    }
    case Type::e4m3: {
      if (x != x) return 0x7f;
      const double r = rounded_to(x, 3, -6, 448.0, round, false);
      const uint8_t sign = std::signbit(r) ? 0x80 : 0;
      if (r == 0) return sign;
      int exponent;
      const double m = std::frexp(std::fabs(r), &exponent);
      if (exponent - 1 < -6) return sign | (uint8_t)std::ldexp(std::fabs(r), 9);
      return sign | (uint8_t)((exponent - 1 + 7) << 3) | (uint8_t)(m * 16 - 8);
    }
    default:
      return 0;
  }
}

uint64_t write_integer(Type type, double x, Round round) {
  if (x != x) return bytes_of(type) == 8 ? 0x8000000000000000ull : 0;
  x = rounded_integral(x, round);
  const int bits = 8 * bytes_of(type);
  if (is_signed(type)) {
    const double top = std::ldexp(1.0, bits - 1);
    if (x >= top) return ((uint64_t)1 << (bits - 1)) - 1;
    if (x <= -top) return (uint64_t)1 << (bits - 1);
    return (uint64_t)(int64_t)x;
  }
  if (x <= 0) return 0;
  if (x >= std::ldexp(1.0, bits)) return bits == 64 ? ~0ull : ((uint64_t)1 << bits) - 1;
  return (uint64_t)x;
}

// Converts a 64-bit integer to a float with a single rounding.
template <class F>
F from_integer(__int128 value, Round round) {
  constexpr int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD, FE_TONEAREST};
  volatile F r;
  std::fesetround(modes[(int)round]);
  if (value < 0) {
    volatile int64_t v = (int64_t)value;
    r = (F)v;
  } else {
    volatile uint64_t v = (uint64_t)value;
    r = (F)v;
  }
  std::fesetround(FE_TONEAREST);
  return r;
}

uint64_t converted(Type to, Type from, uint64_t bits, Round round, int flags) {
  if (!is_float(from)) {
    const __int128 value = read_integer(from, bits);
    if (!is_float(to)) {
      if (!(flags & kSat)) return (uint64_t)value;
      const int n = 8 * bytes_of(to);
      const __int128 top = is_signed(to) ? ((__int128)1 << (n - 1)) - 1 : ((__int128)1 << n) - 1;
      const __int128 low = is_signed(to) ? -((__int128)1 << (n - 1)) : 0;
      return (uint64_t)std::min(std::max(value, low), top);
    }
    if (to == Type::f64) return bits_as<uint64_t>(from_integer<double>(value, round));
    if (to == Type::f32) return bits_as<uint32_t>(from_integer<float>(value, round));
    return write_float(to, (double)value, round, flags);
  }
  double x = read_float(from, bits);
  if ((flags & kFtz) && from == Type::f32 && std::fabs(x) < 0x1p-126) x = std::copysign(0.0, x);
  if (!is_float(to)) return write_integer(to, x, round);
  if (flags & kIntegral) x = rounded_integral(x, round);
  uint64_t r = write_float(to, x, round, flags);
  if ((flags & kFtz) && to == Type::f32 && (r & 0x7f800000u) == 0) r &= 0x80000000u;
  return r;
}

// Returns whether cvt converts single values of this type.
bool converts(Type type) {
  return bytes_of(type) > 0 && bytes_of(type) <= 8 && type != Type::f16x2 && type != Type::bf16x2;
}

Type element_of(Type type) {
  return type == Type::f16x2 ? Type::f16 : type == Type::bf16x2 ? Type::bf16 : type;
}

// Returns the bits of a result of the type `type`, where an integer is extended to 64 bits with its
// sign.
uint64_t extended(Type type, uint64_t value) {
  return is_float(type) ? value : (uint64_t)(int64_t)read_integer(type, value);
}

// cvt of a single value. arg 0: rounding. arg 1: flags.
void convert(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) {
    w.set(i.reg[0], l,
          extended(i.type,
                   converted(i.type, i.source, w.get(i.reg[1], l), (Round)i.arg[0], i.arg[1])));
  });
  w.wrote(i.reg[0], m, w.ok(i.reg[1]));
}

// cvt with two sources, such as cvt.rn.f16x2.f32 d, a, b. The upper half of d is the converted a,
// and the lower half is the converted b.
void convert_pair(Warp& w, const Instr& i, Mask m) {
  const Type to = element_of(i.type);
  const int shift = bytes_of(to) * 8;
  each_lane(m, [&](int l) {
    const Round round = (Round)i.arg[0];
    const uint64_t high = converted(to, i.source, w.get(i.reg[1], l), round, i.arg[1]);
    const uint64_t low = converted(to, i.source, w.get(i.reg[2], l), round, i.arg[1]);
    w.set(i.reg[0], l, high << shift | low);
  });
  w.wrote(i.reg[0], m, w.ok(i.reg[1]) & w.ok(i.reg[2]));
}

// Converts f16x2 to a pair of fp8 in a b16 register.
void narrow_pair(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) {
    const uint64_t a = w.get(i.reg[1], l);
    const uint64_t low = converted(i.type, Type::f16, a & 0xffff, (Round)i.arg[0], i.arg[1]);
    const uint64_t high = converted(i.type, Type::f16, a >> 16, (Round)i.arg[0], i.arg[1]);
    w.set(i.reg[0], l, high << 8 | low);
  });
  w.wrote(i.reg[0], m, w.ok(i.reg[1]));
}

// Converts a pair of fp8 in a b16 register to f16x2.
void widen_pair(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) {
    const uint64_t a = w.get(i.reg[1], l);
    const uint64_t low = converted(Type::f16, i.source, a & 0xff, Round::nearest, i.arg[1]);
    const uint64_t high = converted(Type::f16, i.source, a >> 8 & 0xff, Round::nearest, i.arg[1]);
    w.set(i.reg[0], l, high << 16 | low);
  });
  w.wrote(i.reg[0], m, w.ok(i.reg[1]));
}

// Fast versions of conversions that are frequent in kernels with 16-bit formats.
FASTBERT_PTX_SIMD void brain_to_float(Warp& w, const Instr& i, Mask m) {
  const uint32_t* a = w.word(i.reg[1]);
  uint32_t out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = a[l] << 16;
  put(w, i.reg[0], m, out, w.ok(i.reg[1]));
}
inline uint32_t nearest_brain(uint32_t bits) {
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
FASTBERT_PTX_SIMD void float_to_brains(Warp& w, const Instr& i, Mask m) {
  const uint32_t *a = w.word(i.reg[1]), *b = w.word(i.reg[2]);
  uint32_t out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = nearest_brain(a[l]) << 16 | nearest_brain(b[l]);
  put(w, i.reg[0], m, out, w.ok(i.reg[1]) & w.ok(i.reg[2]));
}

void move_predicate(Warp& w, const Instr& i, Mask m) {
  uint32_t& to = w.file[i.reg[0].at];
  to = (to & ~m) | (w.file[i.reg[1].at] & m);
  w.wrote(i.reg[0], m, w.ok(i.reg[1]));
}

// mov. Unless the source is a constant, the destination gets the same entry in Warp::written as the
// source, so that the move does not count as a write after wgmma.fence. LLVM copies accumulators
// between wgmma.fence and wgmma, and ptxas assigns the copy to the same hardware register as the
// source.
template <class W>
void move(Warp& w, const Instr& i, Mask m) {
  W out[kLanes];
  std::memcpy(out, lanes<W>(w, i.reg[1]), sizeof(out));
  const uint64_t when = w.written[i.reg[1].id];
  put(w, i.reg[0], m, out, w.ok(i.reg[1]));
  if (when != kAlways) w.written[i.reg[0].id] = when;
}

// mov between registers of different widths, such as a 32-bit special register to a 64-bit
// register.
void move_any(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) { w.set(i.reg[0], l, w.get(i.reg[1], l)); });
  w.wrote(i.reg[0], m, w.ok(i.reg[1]));
}

// mov of a vector. arg 0: the number of parts. arg 1: the bits of a part. arg 2: whether the vector
// is the source.
void move_vector(Warp& w, const Instr& i, Mask m) {
  const int parts = i.arg[0], bits = i.arg[1];
  const uint64_t all = bits == 64 ? ~0ull : ((uint64_t)1 << bits) - 1;
  const int bytes = bits / 8;
  const uint8_t full = (uint8_t)((1u << bytes) - 1);
  uint8_t valid[kLanes] = {};
  if (i.arg[2]) {
    each_lane(m, [&](int l) {
      uint64_t whole = 0;
      for (int p = 0; p < parts; ++p) {
        whole |= (w.get(i.reg[p + 1], l) & all) << (p * bits);
        valid[l] |= (uint8_t)((w.valid_bytes(i.reg[p + 1], l) & full) << (p * bytes));
      }
      w.set(i.reg[0], l, whole);
    });
    w.wrote_bytes(i.reg[0], m, valid);
    return;
  }
  uint64_t whole[kLanes];
  uint8_t whole_valid[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    whole[l] = w.get(i.reg[parts], l);
    whole_valid[l] = w.valid_bytes(i.reg[parts], l);
  }
  for (int p = 0; p < parts; ++p) {
    if (i.reg[p].id < 0) continue;
    each_lane(m, [&](int l) {
      w.set(i.reg[p], l, whole[l] >> (p * bits) & all);
      valid[l] = (uint8_t)(whole_valid[l] >> (p * bytes));
    });
    w.wrote_bytes(i.reg[p], m, valid);
  }
}

// cvta. arg 0: whether it converts to the state space (cvta.to). offset: the window of the state
// space.
void convert_address(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) {
    const uint64_t a = w.get(i.reg[1], l), window = (uint64_t)i.offset;
    w.set(i.reg[0], l, i.arg[0] ? a & ~window : a | window);
  });
  w.wrote(i.reg[0], m, w.ok(i.reg[1]));
}

// isspacep. arg 0: whether the shared memory of other blocks belongs to the state space, as for
// shared::cluster. offset: the window of the state space.
void is_space(Warp& w, const Instr& i, Mask m) {
  uint32_t& to = w.file[i.reg[0].at];
  each_lane(m, [&](int l) {
    const uint64_t a = w.get(i.reg[1], l), window = (uint64_t)i.offset;
    const bool other = window == kSharedWindow && !i.arg[0] && rank_field(a);
    const bool is = (a & kWindowMask) == window && !other;
    to = (to & ~(1u << l)) | (uint32_t)is << l;
  });
  w.wrote(i.reg[0], m, w.ok(i.reg[1]));
}

uint64_t window_of(const Mnemonic& name) {
  if (name.any({"shared", "shared::cta", "shared::cluster"})) return kSharedWindow;
  if (name.has("local")) return kLocalWindow;
  if (name.has("param") || name.has("param::entry")) return kParamWindow;
  return 0;  // global, const
}

Known decode_cvt(Instr& i, const Mnemonic& name) {
  i.pipe = Pipe::convert;
  i.type = name.before(), i.source = name.last();
  const std::string* pair = nullptr;
  for (const std::string& part : name.parts)
    if (part == "e4m3x2" || part == "e5m2x2") pair = &part;
  Round round = Round::nearest;
  if (name.any({"rz", "rzi"})) round = Round::zero;
  if (name.any({"rm", "rmi"})) round = Round::down;
  if (name.any({"rp", "rpi"})) round = Round::up;
  if (name.has("rna")) round = Round::away;
  i.arg[0] = (int)round;
  if (name.has("ftz")) i.arg[1] |= kFtz;
  if (name.has("sat")) i.arg[1] |= kSat;
  if (name.has("relu")) i.arg[1] |= kRelu;
  if (name.has("satfinite")) i.arg[1] |= kFinite;
  if (name.any({"rni", "rzi", "rmi", "rpi"})) i.arg[1] |= kIntegral;
  if (pair) {
    const Type fp8 = *pair == "e4m3x2" ? Type::e4m3 : Type::e5m2;
    if (name.parts.back() == *pair) {
      i.source = fp8, i.run = widen_pair;
      if (!name.has("f16x2")) return kUnknown;
      return Shape{result(32), source(16)};
    }
    i.type = fp8, i.source = name.last();
    i.run = i.source == Type::f16x2 ? narrow_pair : convert_pair;
    if (i.source == Type::f16x2) return Shape{result(16), source(32)};
    if (i.source == Type::f32) return Shape{result(16), source(32), source(32)};
    return kUnknown;
  }
  if (i.type == Type::f16x2 || i.type == Type::bf16x2) {
    i.run = i.type == Type::bf16x2 && round == Round::nearest && i.arg[1] == 0 ? float_to_brains
                                                                               : convert_pair;
    if (i.source != Type::f32) return kUnknown;
    return Shape{result(32), source(32), source(32)};
  }
  const bool brain = i.type == Type::f32 && i.source == Type::bf16 && i.arg[1] == 0;
  i.run = brain ? brain_to_float : convert;
  if (!converts(i.type) || !converts(i.source) || i.source == Type::tf32) return kUnknown;
  // Integers may be in registers that are wider than their type.
  const auto sized = [](const Slot& slot, Type type) {
    return is_float(type) ? slot : slot.or_more();
  };
  return Shape{sized(result(bits_of(i.type)), i.type), sized(source(bits_of(i.source)), i.source)};
}

Known decode_mov(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  i.type = name.last();
  const int bits = bits_of(i.type);
  if (i.type == Type::pred) {
    i.run = move_predicate;
    return Shape{result(1), source(1)};
  }
  if (bits < 16 || bits > 64) return kUnknown;
  for (int side = 0; side < 2; ++side) {
    if (raw.operand(side).kind != 'v') continue;
    // A vector has two parts, or four parts if the whole has at least 32 bits.
    const int parts = raw.operand(side).parts.size() == 4 && bits >= 32 ? 4 : 2,
              each = bits / parts;
    i.arg[0] = parts, i.arg[1] = each, i.arg[2] = side;
    i.run = move_vector;
    const auto sized = [&](const Slot& slot) { return each == 8 ? slot.or_more() : slot; };
    if (side) return Shape{result(bits), vector(parts, sized(source(each)))};
    return Shape{vector(parts, sized(result(each).or_sink())), source(bits)};
  }
  // A special register as the source may have another width than the type.
  const RawOperand& from = raw.operand(1);
  const int from_bits = from.special ? from.bits : bits;
  if ((from_bits == 64) != (bits == 64))
    i.run = move_any;
  else
    i.run = bits == 64 ? move<uint64_t> : move<uint32_t>;
  return Shape{result(bits), source(from_bits)};
}

}  // namespace

Known decode_convert(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  const std::string& base = name.base();
  i.pipe = Pipe::alu;
  if (base == "mov") return decode_mov(i, name, raw);
  if (base == "cvt") return name.has("pack") ? kUnknown : decode_cvt(i, name);
  const int bits = bits_of(name.last());
  if (base == "isspacep") {
    i.arg[0] = name.has("shared::cluster");
    i.offset = (int64_t)window_of(name);
    i.run = is_space;
    return Shape{result(1), source(raw.operand(1).bits == 32 ? 32 : 64)};
  }
  if (bits != 32 && bits != 64) return kUnknown;
  i.arg[0] = name.has("to");  // cvta
  i.offset = (int64_t)window_of(name);
  i.run = convert_address;
  return Shape{result(bits), source(bits)};
}

}  // namespace ptxmachine
