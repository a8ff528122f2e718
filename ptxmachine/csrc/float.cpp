// Floating-point instructions.
//
// The common forms of fp32 and fp64 (round to nearest, no flush of subnormal numbers, no
// saturation) have their own loops. `general` executes all other forms, one lane at a time. An
// approximate fp32 instruction returns the exact result plus Options::approximate times the largest
// error that the PTX manual allows.

#include <cfenv>
#include <limits>

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {
namespace {

struct FAdd {
  template <class T>
  static inline T call(T a, T b) {
    return a + b;
  }
};
struct FSub {
  template <class T>
  static inline T call(T a, T b) {
    return a - b;
  }
};
struct FMul {
  template <class T>
  static inline T call(T a, T b) {
    return a * b;
  }
};
struct FDiv {
  template <class T>
  static inline T call(T a, T b) {
    return a / b;
  }
};
struct Fma {
  static inline float call(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static inline double call(double a, double b, double c) { return __builtin_fma(a, b, c); }
};
// If one operand is NaN, the result is the other operand. -0 is less than +0.
struct FMin {
  template <class T>
  static inline T call(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    return a < b || (a == b && std::signbit(a)) ? a : b;
  }
};
struct FMax {
  template <class T>
  static inline T call(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    return a > b || (a == b && !std::signbit(a)) ? a : b;
  }
};
struct FNeg {
  static inline float call(float a) { return bits_as<float>(bits_as<uint32_t>(a) ^ 0x80000000u); }
  static inline double call(double a) { return -a; }
};
struct FAbs {
  static inline float call(float a) { return bits_as<float>(bits_as<uint32_t>(a) & 0x7fffffffu); }
  static inline double call(double a) { return std::fabs(a); }
};

enum class Op : int32_t {
  add,
  sub,
  mul,
  fma,
  div,
  min,
  max,
  neg,
  abs,
  copysign,
  rcp,
  sqrt,
  rsqrt,
  ex2,
  lg2,
  sin,
  cos,
  tanh
};
enum class Round : int32_t { nearest, zero, down, up };
// The flags in arg 2 of `general`.
enum : int32_t { kFtz = 1, kSat = 2, kNan = 4, kRelu = 8, kApprox = 16, kFull = 32, kXorsign = 64 };

template <class T>
T flushed(T x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(T(0), x) : x;
}

template <class T>
T exact(Op op, T a, T b, T c) {
  switch (op) {
    case Op::add:
      return a + b;
    case Op::sub:
      return a - b;
    case Op::mul:
      return a * b;
    case Op::fma:
      return std::fma(a, b, c);
    case Op::div:
      return a / b;
    case Op::min:
      return FMin::call(a, b);
    case Op::max:
      return FMax::call(a, b);
    case Op::neg:
      return -a;
    case Op::abs:
      return std::fabs(a);
    case Op::copysign:
      return std::copysign(b, a);
    case Op::rcp:
      return T(1) / a;
    case Op::sqrt:
      return std::sqrt(a);
    default:
      break;
  }
  const double x = (double)a;
  switch (op) {
    case Op::rsqrt:
      return (T)(1.0 / std::sqrt(x));
    case Op::ex2:
      return (T)std::exp2(x);
    case Op::lg2:
      return (T)std::log2(x);
    case Op::sin:
      return (T)std::sin(x);
    case Op::cos:
      return (T)std::cos(x);
    default:
      return (T)std::tanh(x);
  }
}

// Computes an operation with a directed rounding mode, which C++ expressions do not have.
template <class T>
__attribute__((noinline, optimize("rounding-math"))) T directed(Op op, Round round, T a, T b, T c) {
  constexpr int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  volatile T x = a, y = b, z = c;
  std::fesetround(modes[(int)round]);
  volatile T r = exact<T>(op, x, y, z);
  std::fesetround(FE_TONEAREST);
  return r;
}

// The largest relative error of an approximate fp32 instruction, from the PTX manual. For sin and
// cos, and for lg2 near 1, it is the largest absolute error.
double documented_error(Op op) {
  switch (op) {
    case Op::ex2:
      return 0x1p-22;
    case Op::lg2:
      return 0x1p-22;
    case Op::rcp:
      return 0x1p-23;
    case Op::rsqrt:
      return 0x1.5p-23;
    case Op::sqrt:
      return 0x1p-23;
    case Op::div:
      return 0x1p-22;
    case Op::sin:
    case Op::cos:
      return 0x1.7p-21;
    case Op::tanh:
      return 0x1p-11;
    default:
      return 0;
  }
}

float approximate(Op op, float a, float b, double share) {
  const double x = a, y = b;
  double r = 0;
  switch (op) {
    case Op::div:
      r = x / y;
      break;
    case Op::rcp:
      r = 1.0 / x;
      break;
    case Op::sqrt:
      r = std::sqrt(x);
      break;
    default:
      r = exact<double>(op, x, 0, 0);
  }
  if (share == 0 || !std::isfinite(r) || r == 0) return (float)r;
  const double error = share * documented_error(op);
  const bool absolute = op == Op::sin || op == Op::cos || (op == Op::lg2 && x > 0.5 && x < 2.0);
  const double off = absolute ? r + error : r * (1 + error);
  // The documented error includes the rounding, so the result is rounded toward the exact result.
  float f = (float)off;
  if ((double)f != off && std::fabs((double)f - r) > std::fabs(off - r))
    f = std::nextafterf(f, (float)r);
  return f;
}

template <class T>
T modified(const Instr& i, T a, T b, T c, double share) {
  const Op op = (Op)i.arg[0];
  const Round round = (Round)i.arg[1];
  const int flags = i.arg[2];
  if (flags & kFtz) a = flushed(a), b = flushed(b), c = flushed(c);
  T r;
  if constexpr (std::is_same_v<T, float>) {
    if (flags & (kApprox | kFull)) {
      r = approximate(op, a, b, share);
    } else {
      r = round == Round::nearest ? exact<T>(op, a, b, c) : directed<T>(op, round, a, b, c);
    }
  } else {
    r = round == Round::nearest ? exact<T>(op, a, b, c) : directed<T>(op, round, a, b, c);
  }
  if (flags & kXorsign)
    r = std::copysign(std::fabs(r), std::signbit(a) != std::signbit(b) ? -1 : 1);
  if ((flags & kNan) && (a != a || b != b)) r = std::numeric_limits<T>::quiet_NaN();
  if (flags & kFtz) r = flushed(r);
  if (flags & kSat) r = r != r ? T(0) : std::min(std::max(r, T(0)), T(1));
  if (flags & kRelu) r = r != r ? r : std::max(r, T(0));
  // Arithmetic returns the canonical NaN. neg, abs and copysign change only the sign.
  if constexpr (std::is_same_v<T, float>)
    if (r != r && op != Op::neg && op != Op::abs && op != Op::copysign)
      r = bits_as<float>(0x7fffffffu);
  return r;
}

template <class T>
struct Format;
template <>
struct Format<float> {
  using Compute = float;
  static float widen(float x) { return x; }
  static float narrow(float x) { return x; }
};
template <>
struct Format<double> {
  using Compute = double;
  static double widen(double x) { return x; }
  static double narrow(double x) { return x; }
};
template <>
struct Format<Half> {
  using Compute = double;
  static double widen(Half x) { return to_float(x); }
  static Half narrow(double x) { return x != x ? Half{0x7fff} : to_half(x); }
};
template <>
struct Format<Brain> {
  using Compute = double;
  static double widen(Brain x) { return to_float(x); }
  static Brain narrow(double x) { return to_brain(x); }
};

template <class T>
T compute(const Instr& i, T a, T b, T c, double share) {
  using F = Format<T>;
  using C = typename F::Compute;
  // 16-bit formats are computed in double precision, also by approximate instructions, and the
  // result is rounded to the format.
  return F::narrow(modified<C>(i, F::widen(a), F::widen(b), F::widen(c), share));
}

// The handler of all forms without a loop of their own. arg 0: a value of Op. arg 1: a value of
// Round. arg 2: flags. arg 3: the number of sources. arg 4: the number of elements in a register.
template <class T>
void general(Warp& w, const Instr& i, Mask m) {
  const double share = w.block->launch->options.approximate;
  Mask valid = kAll;
  for (int r = 1; r <= i.arg[3]; ++r) valid &= w.ok(i.reg[r]);
  each_lane(m, [&](int l) {
    Word<T> in[3] = {}, out = 0;
    for (int r = 0; r < i.arg[3]; ++r) in[r] = (Word<T>)w.get(i.reg[r + 1], l);
    if constexpr (sizeof(T) == 2) {
      for (int e = 0; e < i.arg[4]; ++e) {
        const int s = 16 * e;
        const T d = compute<T>(i, from_word<T>(in[0] >> s), from_word<T>(in[1] >> s),
                               from_word<T>(in[2] >> s), share);
        out |= (uint32_t)d.bits << s;
      }
    } else {
      out = to_word<T>(
          compute<T>(i, from_word<T>(in[0]), from_word<T>(in[1]), from_word<T>(in[2]), share));
    }
    w.set(i.reg[0], l, out);
  });
  w.wrote(i.reg[0], m, valid);
}

template <class T>
Handler plain(Op op) {
  switch (op) {
    case Op::add:
      return binary<T, T, FAdd>;
    case Op::sub:
      return binary<T, T, FSub>;
    case Op::mul:
      return binary<T, T, FMul>;
    case Op::fma:
      return ternary<T, T, T, Fma>;
    case Op::min:
      return binary<T, T, FMin>;
    case Op::max:
      return binary<T, T, FMax>;
    case Op::neg:
      return unary<T, T, FNeg>;
    case Op::abs:
      return unary<T, T, FAbs>;
    default:
      return nullptr;
  }
}

bool find_op(const std::string& base, Op& op, int& sources) {
  struct Entry {
    const char* name;
    Op op;
    int sources;
  };
  static const Entry table[] = {
      {"add", Op::add, 2},   {"sub", Op::sub, 2},           {"mul", Op::mul, 2},
      {"fma", Op::fma, 3},   {"mad", Op::fma, 3},           {"div", Op::div, 2},
      {"min", Op::min, 2},   {"max", Op::max, 2},           {"neg", Op::neg, 1},
      {"abs", Op::abs, 1},   {"copysign", Op::copysign, 2}, {"rcp", Op::rcp, 1},
      {"sqrt", Op::sqrt, 1}, {"rsqrt", Op::rsqrt, 1},       {"ex2", Op::ex2, 1},
      {"lg2", Op::lg2, 1},   {"sin", Op::sin, 1},           {"cos", Op::cos, 1},
      {"tanh", Op::tanh, 1},
  };
  for (const Entry& e : table)
    if (base == e.name) {
      op = e.op, sources = e.sources;
      return true;
    }
  return false;
}

}  // namespace

Known decode_float(Instr& i, const Mnemonic& name, const RawInstr&) {
  const Type type = name.last();
  Op op;
  int sources;
  // Instructions with operands of two types, such as add.f32.bf16 of sm_100, are not supported.
  if (name.before() != Type::none) return kUnknown;
  if (!is_float(type) || !find_op(name.base(), op, sources)) return kUnknown;
  i.pipe = Pipe::alu;
  if (op == Op::add || op == Op::sub || op == Op::mul || op == Op::fma) i.pipe = Pipe::fma;
  if (op >= Op::rcp) i.pipe = Pipe::mufu;
  if (type == Type::f64) i.pipe = Pipe::fp64;
  const Round round = name.has("rz")   ? Round::zero
                      : name.has("rm") ? Round::down
                      : name.has("rp") ? Round::up
                                       : Round::nearest;
  int flags = 0;
  if (name.has("ftz")) flags |= kFtz;
  if (name.has("sat")) flags |= kSat;
  if (name.has("NaN")) flags |= kNan;
  if (name.has("relu")) flags |= kRelu;
  if (name.has("approx")) flags |= kApprox;
  if (name.has("full")) flags |= kFull;
  if (name.has("xorsign")) flags |= kXorsign;
  const bool half = type == Type::f16 || type == Type::f16x2;
  const bool brain = type == Type::bf16 || type == Type::bf16x2;
  if ((half || brain) && round != Round::nearest) return kUnknown;
  if (flags == 0 && round == Round::nearest && (type == Type::f32 || type == Type::f64))
    i.run = type == Type::f32 ? plain<float>(op) : plain<double>(op);
  i.arg[0] = (int)op, i.arg[1] = (int)round, i.arg[2] = flags, i.arg[3] = sources;
  i.arg[4] = type == Type::f16x2 || type == Type::bf16x2 ? 2 : 1;
  if (!i.run)
    i.run = half                ? general<Half>
            : brain             ? general<Brain>
            : type == Type::f32 ? general<float>
            : type == Type::f64 ? general<double>
                                : nullptr;
  if (!i.run) return kUnknown;
  Shape shape = {result(bits_of(type))};
  shape.insert(shape.end(), (size_t)sources, source(bits_of(type)));
  return shape;
}

}  // namespace ptxmachine
