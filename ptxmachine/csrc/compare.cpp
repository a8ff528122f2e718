// Comparisons and selections: setp, set, selp, slct, testp.

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {
namespace {

enum class Cmp : int32_t { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan };

template <class T>
inline bool ordered(Cmp cmp, T a, T b) {
  switch (cmp) {
    case Cmp::eq:
      return a == b;
    case Cmp::ne:
      return a != b;
    case Cmp::lt:
      return a < b;
    case Cmp::le:
      return a <= b;
    case Cmp::gt:
      return a > b;
    default:
      return a >= b;
  }
}

template <class T>
inline bool compare(Cmp cmp, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    const bool nan = a != a || b != b;
    if (cmp == Cmp::num) return !nan;
    if (cmp == Cmp::nan) return nan;
    if (cmp >= Cmp::equ) return nan || ordered((Cmp)((int)cmp - (int)Cmp::equ), a, b);
    return !nan && ordered(cmp, a, b);
  } else {
    return ordered(cmp, a, b);
  }
}

template <class T>
auto value_of(T x) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Brain>) {
    return to_float(x);
  } else {
    return x;
  }
}

template <class T>
FASTBERT_PTX_SIMD Mask compared(Warp& w, const Instr& i, const Reg* source) {
  const Word<T>*a = lanes<T>(w, source[0]), *b = lanes<T>(w, source[1]);
  const Cmp cmp = (Cmp)i.arg[0];
  Mask bits = 0;
  const bool ftz = i.arg[3] != 0;
  for (int l = 0; l < kLanes; ++l) {
    auto x = value_of(from_word<T>(a[l])), y = value_of(from_word<T>(b[l]));
    if constexpr (std::is_same_v<T, float>) {
      if (ftz) {
        x = std::fabs(x) < 0x1p-126f ? 0 * x : x;
        y = std::fabs(y) < 0x1p-126f ? 0 * y : y;
      }
    }
    bits |= (Mask)compare(cmp, x, y) << l;
  }
  return bits;
}

void put_predicate(Warp& w, Reg r, Mask m, Mask bits, Mask valid) {
  uint32_t& to = w.file[r.at];
  to = (to & ~m) | (bits & m);
  w.wrote(r, m, valid);
}

// setp. arg 0: comparison. arg 1: boolean operation with the predicate c: 0 for none, 1 for and, 2
// for or, 3 for xor. arg 2: whether c is negated. arg 3: whether subnormal fp32 operands count as 0
// (ftz). arg 4: whether there are two results.
template <class T>
void set_predicate(Warp& w, const Instr& i, Mask m) {
  const Reg* source = i.reg + 1 + i.arg[4];
  Mask bits = compared<T>(w, i, source);
  Mask other = ~bits;
  Mask valid = w.ok(source[0]) & w.ok(source[1]);
  if (i.arg[1]) {
    const Mask c = i.arg[2] ? ~w.file[source[2].at] : w.file[source[2].at];
    // c alone decides the result if it is false for `and` or true for `or`. The comparison may then
    // be invalid.
    const Mask decides = i.arg[1] == 1 ? ~c : i.arg[1] == 2 ? c : 0;
    valid = (valid | decides) & w.ok(source[2]);
    auto combine = [&](Mask t) { return i.arg[1] == 1 ? t & c : i.arg[1] == 2 ? t | c : t ^ c; };
    bits = combine(bits), other = combine(other);
  }
  if (i.reg[0].id >= 0) put_predicate(w, i.reg[0], m, bits, valid);
  if (i.arg[4] && i.reg[1].id >= 0) put_predicate(w, i.reg[1], m, other, valid);
}

// setp p|q for f16x2 and bf16x2: p compares the low halves, and q compares the high halves.
template <class T>
void set_pair(Warp& w, const Instr& i, Mask m) {
  const uint32_t *a = w.word(i.reg[2]), *b = w.word(i.reg[3]);
  Mask bits[2] = {};
  for (int l = 0; l < kLanes; ++l)
    for (int e = 0; e < 2; ++e) {
      const float x = to_float(T{(uint16_t)(a[l] >> (16 * e))});
      const float y = to_float(T{(uint16_t)(b[l] >> (16 * e))});
      bits[e] |= (Mask)compare((Cmp)i.arg[0], x, y) << l;
    }
  for (int e = 0; e < 2; ++e)
    if (i.reg[e].id >= 0) put_predicate(w, i.reg[e], m, bits[e], w.ok(i.reg[2]) & w.ok(i.reg[3]));
}

// set. arg 0 and 3 have the same meaning as for setp. arg 5: whether the result is fp32. A true
// comparison gives 1.0 in fp32, or a word of ones if the result is an integer. A false comparison
// gives 0.
template <class T>
void set_word(Warp& w, const Instr& i, Mask m) {
  const Mask bits = compared<T>(w, i, i.reg + 1);
  uint32_t out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = bits >> l & 1 ? (i.arg[5] ? 0x3f800000u : ~0u) : 0;
  put(w, i.reg[0], m, out, w.ok(i.reg[1]) & w.ok(i.reg[2]));
}

// set for f16x2 and bf16x2. arg 5: the 16 bits of the result for a true comparison, which are all
// ones or 1.0.
template <class T>
void set_halves(Warp& w, const Instr& i, Mask m) {
  const uint32_t *a = w.word(i.reg[1]), *b = w.word(i.reg[2]);
  uint32_t out[kLanes] = {};
  for (int l = 0; l < kLanes; ++l)
    for (int e = 0; e < 32; e += 16) {
      const float x = to_float(T{(uint16_t)(a[l] >> e)}), y = to_float(T{(uint16_t)(b[l] >> e)});
      if (compare((Cmp)i.arg[0], x, y)) out[l] |= (uint32_t)i.arg[5] << e;
    }
  put(w, i.reg[0], m, out, w.ok(i.reg[1]) & w.ok(i.reg[2]));
}

template <class W>
FASTBERT_PTX_SIMD void select(Warp& w, const Instr& i, Mask m) {
  const W *a = lanes<W>(w, i.reg[1]), *b = lanes<W>(w, i.reg[2]);
  const Mask p = i.arg[2] ? ~w.file[i.reg[3].at] : w.file[i.reg[3].at];
  W out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = p >> l & 1 ? a[l] : b[l];
  put(w, i.reg[0], m, out, ((p & w.ok(i.reg[1])) | (~p & w.ok(i.reg[2]))) & w.ok(i.reg[3]));
}

void select_predicate(Warp& w, const Instr& i, Mask m) {
  const Mask p = w.file[i.reg[3].at];
  put_predicate(w, i.reg[0], m, (p & w.file[i.reg[1].at]) | (~p & w.file[i.reg[2].at]),
                ((p & w.ok(i.reg[1])) | (~p & w.ok(i.reg[2]))) & w.ok(i.reg[3]));
}

// slct: the result is a if c >= 0, and b otherwise. The type of c is s32 or f32.
template <class W, bool kFloat>
void select_sign(Warp& w, const Instr& i, Mask m) {
  const W *a = lanes<W>(w, i.reg[1]), *b = lanes<W>(w, i.reg[2]);
  const uint32_t* c = w.word(i.reg[3]);
  W out[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const bool first = kFloat ? bits_as<float>(c[l]) >= 0 : (int32_t)c[l] >= 0;
    out[l] = first ? a[l] : b[l];
  }
  put(w, i.reg[0], m, out, w.ok(i.reg[1]) & w.ok(i.reg[2]) & w.ok(i.reg[3]));
}

void test_property(Warp& w, const Instr& i, Mask m) {
  Mask bits = 0;
  for (int l = 0; l < kLanes; ++l) {
    const float x = bits_as<float>(w.word(i.reg[1])[l]);
    const int kind = std::fpclassify(x);
    const bool answers[] = {std::isfinite(x),
                            kind == FP_INFINITE,
                            !std::isnan(x),
                            kind == FP_NAN,
                            kind == FP_NORMAL || kind == FP_ZERO,
                            kind == FP_SUBNORMAL};
    bits |= (Mask)answers[i.arg[0]] << l;
  }
  put_predicate(w, i.reg[0], m, bits, w.ok(i.reg[1]));
}

template <template <class> class Pick>
Handler by_type(Type type) {
  switch (type) {
    case Type::f16:
      return Pick<Half>::handler();
    case Type::bf16:
      return Pick<Brain>::handler();
    case Type::f32:
      return Pick<float>::handler();
    case Type::f64:
      return Pick<double>::handler();
    default:
      return by_integer_type<Pick>(type);
  }
}
template <class T>
struct SetP {
  static Handler handler() { return set_predicate<T>; }
};
template <class T>
struct SetW {
  static Handler handler() { return set_word<T>; }
};

}  // namespace

Known decode_compare(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  const std::string& base = name.base();
  const Type type = name.last();
  const int bits = bits_of(type);
  i.pipe = Pipe::alu;
  if (base == "selp") {
    if (type == Type::pred) {
      i.run = select_predicate;
      return Shape{result(1), source(1), source(1), source(1)};
    }
    i.arg[2] = raw.operand(3).negated;
    i.run = bits == 64 ? select<uint64_t> : select<uint32_t>;
    if (bits < 16 || bits > 64) return kUnknown;
    return Shape{result(bits), source(bits), source(bits), source(1).or_not()};
  }
  if (base == "slct") {
    const bool f = type == Type::f32;
    const int chosen = bits_of(name.before());
    if ((!f && type != Type::s32) || chosen < 16 || chosen > 64) return kUnknown;
    if (chosen == 64)
      i.run = f ? select_sign<uint64_t, true> : select_sign<uint64_t, false>;
    else
      i.run = f ? select_sign<uint32_t, true> : select_sign<uint32_t, false>;
    return Shape{result(chosen), source(chosen), source(chosen), source(32)};
  }
  if (base == "testp") {
    static const char* names[] = {"finite",     "infinite", "number",
                                  "notanumber", "normal",   "subnormal"};
    bool found = false;
    for (int k = 0; k < 6; ++k)
      if (name.has(names[k])) i.arg[0] = k, found = true;
    i.run = test_property;
    if (!found || type != Type::f32) return kUnknown;
    return Shape{result(1), source(32)};
  }
  static const std::pair<const char*, Cmp> comparisons[] = {
      {"eq", Cmp::eq},   {"ne", Cmp::ne},   {"lt", Cmp::lt},   {"le", Cmp::le},   {"gt", Cmp::gt},
      {"ge", Cmp::ge},   {"lo", Cmp::lt},   {"ls", Cmp::le},   {"hi", Cmp::gt},   {"hs", Cmp::ge},
      {"equ", Cmp::equ}, {"neu", Cmp::neu}, {"ltu", Cmp::ltu}, {"leu", Cmp::leu}, {"gtu", Cmp::gtu},
      {"geu", Cmp::geu}, {"num", Cmp::num}, {"nan", Cmp::nan}};
  bool found = false;
  for (const auto& [text, cmp] : comparisons)
    if (name.has(text)) i.arg[0] = (int)cmp, found = true;
  i.arg[1] = name.has("and") ? 1 : name.has("or") ? 2 : name.has("xor") ? 3 : 0;
  i.arg[3] = name.has("ftz");
  if (!found) return kUnknown;
  if (base == "set") {
    const Type to = name.before();
    const bool halves = type == Type::f16x2 || type == Type::bf16x2;
    if (i.arg[1] || bits_of(to) != 32) return kUnknown;
    if (halves) {
      i.arg[5] = to == Type::f16x2 ? 0x3c00 : to == Type::bf16x2 ? 0x3f80 : 0xffff;
      i.run = type == Type::f16x2 ? set_halves<Half> : set_halves<Brain>;
    } else {
      i.arg[5] = to == Type::f32;
      i.run = by_type<SetW>(type);
    }
    if (!i.run) return kUnknown;
    return Shape{result(32), source(bits), source(bits)};
  }
  i.arg[4] = raw.operand(0).kind == 'v';
  const Slot one = result(1), two = pair(one.or_sink(), one.or_sink());
  Shape shape = {i.arg[4] ? two : one, source(bits), source(bits)};
  if (i.arg[1]) i.arg[2] = raw.operand(3).negated, shape.push_back(source(1).or_not());
  if (type == Type::f16x2 || type == Type::bf16x2) {
    i.run = type == Type::f16x2 ? set_pair<Half> : set_pair<Brain>;
    shape[0] = two;
    return i.arg[1] ? kUnknown : Known(shape);
  }
  i.run = by_type<SetP>(type);
  return i.run ? Known(shape) : kUnknown;
}

}  // namespace ptxmachine
