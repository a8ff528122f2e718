// Integer and bit instructions.

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;

struct Add {
  template <class T>
  static T call(T a, T b) {
    return (T)((Unsigned<T>)a + (Unsigned<T>)b);
  }
};
struct Sub {
  template <class T>
  static T call(T a, T b) {
    return (T)((Unsigned<T>)a - (Unsigned<T>)b);
  }
};
struct MulLow {
  template <class T>
  static T call(T a, T b) {
    return (T)((uint64_t)a * (uint64_t)b);
  }
};
template <class T>
using Double = std::conditional_t<
    sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>>;
struct MulHigh {
  template <class T>
  static T call(T a, T b) {
    return (T)(((Double<T>)a * (Double<T>)b) >> (8 * sizeof(T)));
  }
};
struct MulWide {
  template <class T>
  static Double<T> call(T a, T b) {
    return (Double<T>)a * (Double<T>)b;
  }
};
struct MadLow {
  template <class T>
  static T call(T a, T b, T c) {
    return (T)((uint64_t)a * (uint64_t)b + (uint64_t)c);
  }
};
struct MadHigh {
  template <class T>
  static T call(T a, T b, T c) {
    return Add::call(MulHigh::call(a, b), c);
  }
};
struct MadWide {
  template <class T>
  static Double<T> call(T a, T b, Double<T> c) {
    return (Double<T>)((uint64_t)((Double<T>)a * (Double<T>)b) + (uint64_t)c);
  }
};
struct Div {
  template <class T>
  static T call(T a, T b) {
    if (b == 0) return (T)-1;
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return Sub::call((T)0, a);
    return a / b;
  }
};
struct Rem {
  template <class T>
  static T call(T a, T b) {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return 0;
    return a % b;
  }
};
struct Min {
  template <class T>
  static T call(T a, T b) {
    return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  static T call(T a, T b) {
    return a > b ? a : b;
  }
};
struct MinRelu {
  template <class T>
  static T call(T a, T b) {
    return std::max<T>(std::min(a, b), 0);
  }
};
struct MaxRelu {
  template <class T>
  static T call(T a, T b) {
    return std::max<T>(std::max(a, b), 0);
  }
};
struct And {
  template <class T>
  static T call(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <class T>
  static T call(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <class T>
  static T call(T a, T b) {
    return a ^ b;
  }
};
struct Not {
  template <class T>
  static T call(T a) {
    return (T)~a;
  }
};
struct CNot {
  template <class T>
  static T call(T a) {
    return a == 0;
  }
};
struct Neg {
  template <class T>
  static T call(T a) {
    return (T)(0 - (Unsigned<T>)a);
  }
};
struct Abs {
  template <class T>
  static T call(T a) {
    return a < 0 ? Neg::call(a) : a;
  }
};
struct PopC {
  template <class T>
  static uint32_t call(T a) {
    return (uint32_t)__builtin_popcountll((uint64_t)(Unsigned<T>)a);
  }
};
struct CLZ {
  template <class T>
  static uint32_t call(T a) {
    return a == 0 ? 8 * sizeof(T)
                  : (uint32_t)__builtin_clzll((uint64_t)(Unsigned<T>)a) - (64 - 8 * sizeof(T));
  }
};
struct BRev {
  template <class T>
  static T call(T a) {
    T r = 0;
    for (size_t i = 0; i < 8 * sizeof(T); ++i) r = (T)((r << 1) | (T)(a >> i & 1));
    return r;
  }
};
// bfind: the position of the highest bit that differs from the sign, or all ones if there is no
// such bit.
struct BFind {
  template <class T>
  static uint32_t call(T a) {
    const Unsigned<T> u = (Unsigned<T>)(a < 0 ? ~a : a);
    return u == 0 ? ~0u : 63u - (uint32_t)__builtin_clzll((uint64_t)u);
  }
};
// bfind.shiftamt: the shift that moves the bit found by bfind to the highest position.
struct BFindShift {
  template <class T>
  static uint32_t call(T a) {
    const uint32_t found = BFind::call(a);
    return found == ~0u ? found : 8u * (uint32_t)sizeof(T) - 1u - found;
  }
};
struct Shl {
  template <class T>
  static T call(T a, T, uint32_t n) {
    return n >= 8 * sizeof(T) ? 0 : (T)((Unsigned<T>)a << n);
  }
};
struct Shr {
  template <class T>
  static T call(T a, T, uint32_t n) {
    constexpr uint32_t bits = 8 * sizeof(T);
    if constexpr (std::is_signed_v<T>) return (T)(a >> std::min(n, bits - 1));
    return n >= bits ? 0 : (T)(a >> n);
  }
};
struct Sad {
  template <class T>
  static T call(T a, T b, T c) {
    return Add::call(c, a < b ? Sub::call(b, a) : Sub::call(a, b));
  }
};

// shl and shr. The shift amount has 32 bits for every type of the shifted value.
template <class T, class Op>
FASTBERT_PTX_SIMD void shift(Warp& w, const Instr& i, Mask m) {
  const Word<T>* a = lanes<T>(w, i.reg[1]);
  const uint32_t* n = w.word(i.reg[2]);
  Word<T> out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = to_word<T>(Op::call(from_word<T>(a[l]), T{}, n[l]));
  put(w, i.reg[0], m, out, w.ok(i.reg[1]) & w.ok(i.reg[2]));
}

template <class T>
void bit_field_extract(Warp& w, const Instr& i, Mask m) {
  constexpr int last = 8 * sizeof(T) - 1;
  const Mask valid = w.ok(i.reg[1]) & w.ok(i.reg[2]) & w.ok(i.reg[3]);
  each_lane(m, [&](int l) {
    const T a = from_word<T>(lanes<T>(w, i.reg[1])[l]);
    const int pos = w.word(i.reg[2])[l] & 0xff, len = w.word(i.reg[3])[l] & 0xff;
    const bool zero = !std::is_signed_v<T> || len == 0;
    const bool sign = zero ? false : a >> std::min(pos + len - 1, last) & 1;
    Unsigned<T> d = 0;
    for (int bit = 0; bit <= last; ++bit) {
      const bool one = bit < len && pos + bit <= last ? (a >> (pos + bit) & 1) : sign;
      d |= (Unsigned<T>)one << bit;
    }
    w.set(i.reg[0], l, to_word<T>((T)d));
  });
  w.wrote(i.reg[0], m, valid);
}

template <class T>
void bit_field_insert(Warp& w, const Instr& i, Mask m) {
  constexpr int last = 8 * sizeof(T) - 1;
  Mask valid = kAll;
  for (int r = 1; r < 5; ++r) valid &= w.ok(i.reg[r]);
  each_lane(m, [&](int l) {
    const T a = from_word<T>(lanes<T>(w, i.reg[1])[l]);
    T d = from_word<T>(lanes<T>(w, i.reg[2])[l]);
    const int pos = w.word(i.reg[3])[l] & 0xff, len = w.word(i.reg[4])[l] & 0xff;
    for (int bit = 0; bit < len && pos + bit <= last; ++bit) {
      const T one = (T)1 << (pos + bit);
      d = a >> bit & 1 ? d | one : d & ~one;
    }
    w.set(i.reg[0], l, d);
  });
  w.wrote(i.reg[0], m, valid);
}

// The modes of prmt, as they are named in the mnemonic.
const char* const kModes[] = {"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
constexpr uint32_t kPermutations[6][4] = {
    {0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
    {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
    {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};

// prmt. arg 0: 1 + index of the mode in kModes, or 0 without a mode. Each byte of the result is
// valid if its source byte is valid. Validity is per byte, because compilers fill unused bytes of a
// result from registers that no instruction has written.
void permute(Warp& w, const Instr& i, Mask m) {
  w.need(i.reg[3], m, "the selector of prmt");
  uint8_t valid[kLanes];
  each_lane(m, [&](int l) {
    const uint64_t bytes = (uint64_t)w.word(i.reg[2])[l] << 32 | w.word(i.reg[1])[l];
    const uint32_t ok =
        (w.valid_bytes(i.reg[2], l) & 15u) << 4 | (w.valid_bytes(i.reg[1], l) & 15u);
    const uint32_t given = w.word(i.reg[3])[l];
    const uint32_t selector = i.arg[0] ? kPermutations[i.arg[0] - 1][given & 3] : given;
    uint32_t d = 0;
    valid[l] = 0;
    for (int k = 0; k < 4; ++k) {
      const uint32_t choice = selector >> (4 * k) & 0xf;
      uint8_t byte = (uint8_t)(bytes >> (8 * (choice & 7)));
      if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
      d |= (uint32_t)byte << (8 * k);
      valid[l] |= (uint8_t)((ok >> (choice & 7) & 1) << k);
    }
    w.set(i.reg[0], l, d);
  });
  w.wrote_bytes(i.reg[0], m, valid);
}

FASTBERT_PTX_SIMD void logic3(Warp& w, const Instr& i, Mask m) {
  const uint32_t *a = w.word(i.reg[1]), *b = w.word(i.reg[2]), *c = w.word(i.reg[3]);
  const uint32_t table = w.word(i.reg[4])[0];
  uint32_t out[kLanes] = {};
  for (int k = 0; k < 8; ++k) {
    if (!(table >> k & 1)) continue;
    for (int l = 0; l < kLanes; ++l)
      out[l] |= (k & 4 ? a[l] : ~a[l]) & (k & 2 ? b[l] : ~b[l]) & (k & 1 ? c[l] : ~c[l]);
  }
  put(w, i.reg[0], m, out, w.ok(i.reg[1]) & w.ok(i.reg[2]) & w.ok(i.reg[3]));
}

// bmsk: the result has b ones, from bit a on. arg 0: whether a and b are clamped instead of wrapped
// around.
void bit_mask(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) {
    const uint32_t a = w.word(i.reg[1])[l], b = w.word(i.reg[2])[l];
    const uint32_t first = a & 31, end = first + (b & 31);
    const bool all = end >= 32 || (i.arg[0] && (a >= 32 || b >= 32));
    const uint32_t from = i.arg[0] && a >= 32 ? 0 : ~0u << first;
    w.set(i.reg[0], l, from & ~(all ? 0 : ~0u << end));
  });
  w.wrote(i.reg[0], m, w.ok(i.reg[1]) & w.ok(i.reg[2]));
}

// shf. arg 0: whether it shifts left. arg 1: whether the amount is clamped.
void funnel(Warp& w, const Instr& i, Mask m) {
  const Mask valid = w.ok(i.reg[1]) & w.ok(i.reg[2]) & w.ok(i.reg[3]);
  each_lane(m, [&](int l) {
    const uint64_t both = (uint64_t)w.word(i.reg[2])[l] << 32 | w.word(i.reg[1])[l];
    uint32_t n = w.word(i.reg[3])[l];
    n = i.arg[1] ? std::min(n, 32u) : n & 31u;
    w.set(i.reg[0], l, i.arg[0] ? (uint32_t)(both << n >> 32) : (uint32_t)(both >> n));
  });
  w.wrote(i.reg[0], m, valid);
}

// Extended-precision arithmetic with the carry flag of each lane. arg 0: 0 adds a and b, 1
// subtracts b from a, 2 adds c to the low half of the product of a and b, and 3 adds c to the high
// half. arg 1: whether the instruction reads the carry flag. arg 2: whether the instruction writes
// the carry flag (.cc). Signed and unsigned types have different results only in the high half of a
// product.
template <class T>
void with_carry(Warp& w, const Instr& i, Mask m) {
  using U = std::make_unsigned_t<T>;
  Mask valid = w.ok(i.reg[1]) & w.ok(i.reg[2]);
  if (i.arg[0] >= 2) valid &= w.ok(i.reg[3]);
  each_lane(m, [&](int l) {
    U a = (U)w.get(i.reg[1], l), b = (U)w.get(i.reg[2], l);
    if (i.arg[0] >= 2) {
      a = (U)(i.arg[0] == 2 ? MulLow::call((T)a, (T)b) : MulHigh::call((T)a, (T)b));
      b = (U)w.get(i.reg[3], l);
    }
    const unsigned __int128 in = i.arg[1] ? w.carry[l] : 0;
    const unsigned __int128 r =
        i.arg[0] == 1 ? (unsigned __int128)a - b - in : (unsigned __int128)a + b + in;
    w.set(i.reg[0], l, (U)r);
    if (i.arg[2]) w.carry[l] = (bool)(r >> (8 * sizeof(T)) & 1);
  });
  w.wrote(i.reg[0], m, valid);
}

// dp4a. arg 0: whether a is signed. arg 1: whether b is signed.
void dot4(Warp& w, const Instr& i, Mask m) {
  const Mask valid = w.ok(i.reg[1]) & w.ok(i.reg[2]) & w.ok(i.reg[3]);
  each_lane(m, [&](int l) {
    const uint32_t a = w.word(i.reg[1])[l], b = w.word(i.reg[2])[l];
    uint32_t sum = w.word(i.reg[3])[l];
    for (int k = 0; k < 32; k += 8) {
      const int x = i.arg[0] ? (int8_t)(a >> k) : (uint8_t)(a >> k);
      const int y = i.arg[1] ? (int8_t)(b >> k) : (uint8_t)(b >> k);
      sum += (uint32_t)(x * y);
    }
    w.set(i.reg[0], l, sum);
  });
  w.wrote(i.reg[0], m, valid);
}

// Operations on predicates. Each bit of one word is the predicate of one lane. If the value of one
// operand decides the result, as false does for `and`, then the other operand may be invalid.
template <class Op>
void predicate(Warp& w, const Instr& i, Mask m) {
  const Mask a = w.file[i.reg[1].at], b = w.file[i.reg[2].at];
  const Mask a_ok = w.ok(i.reg[1]), b_ok = w.ok(i.reg[2]);
  const uint32_t d = Op::call(a, b);
  const Mask a_decides = a_ok & ~(Op::call(a, (Mask)0) ^ Op::call(a, kAll));
  const Mask b_decides = b_ok & ~(Op::call((Mask)0, b) ^ Op::call(kAll, b));
  uint32_t& to = w.file[i.reg[0].at];
  to = (to & ~m) | (d & m);
  w.wrote(i.reg[0], m, (a_ok & b_ok) | a_decides | b_decides);
}
void predicate_not(Warp& w, const Instr& i, Mask m) {
  uint32_t& to = w.file[i.reg[0].at];
  to = (to & ~m) | (~w.file[i.reg[1].at] & m);
  w.wrote(i.reg[0], m, w.ok(i.reg[1]));
}

template <class Op>
struct Same2 {
  template <class T>
  struct Pick {
    static Handler handler() { return binary<T, T, Op>; }
  };
};
template <class Op>
struct Same1 {
  template <class T>
  struct Pick {
    static Handler handler() { return unary<T, T, Op>; }
  };
};
template <class Op>
struct Same3 {
  template <class T>
  struct Pick {
    static Handler handler() { return ternary<T, T, T, Op>; }
  };
};
template <class Op>
struct Count1 {
  template <class T>
  struct Pick {
    static Handler handler() { return unary<uint32_t, T, Op>; }
  };
};
template <class Op>
struct Shift {
  template <class T>
  struct Pick {
    static Handler handler() { return shift<T, Op>; }
  };
};
template <class T>
struct Wide2 {
  static Handler handler() {
    if constexpr (sizeof(T) == 8)
      return nullptr;
    else
      return binary<Double<T>, T, MulWide>;
  }
};
template <class T>
struct Wide3 {
  static Handler handler() {
    if constexpr (sizeof(T) == 8)
      return nullptr;
    else
      return ternary<Double<T>, T, Double<T>, MadWide>;
  }
};
template <class T>
struct Extract {
  static Handler handler() { return bit_field_extract<T>; }
};
template <class T>
struct Insert {
  static Handler handler() { return bit_field_insert<T>; }
};
template <class T>
struct Carry {
  static Handler handler() { return with_carry<T>; }
};

// A handler with the shape of its operands. The handler is null if no form fits.
struct Form {
  Handler run = nullptr;
  Shape shape;
};

// Returns the form of an instruction whose result and sources all have the type of its suffix.
Form same(Handler run, Type type, int sources) {
  Shape shape = {result(bits_of(type))};
  shape.insert(shape.end(), (size_t)sources, source(bits_of(type)));
  return {run, shape};
}

Form logic(const std::string& base, Type type) {
  if (type == Type::pred) {
    if (base == "and") return same(predicate<And>, type, 2);
    if (base == "or") return same(predicate<Or>, type, 2);
    if (base == "xor") return same(predicate<Xor>, type, 2);
    return base == "not" ? same(predicate_not, type, 1) : Form{};
  }
  if (base == "and") return same(by_integer_type<Same2<And>::Pick>(type), type, 2);
  if (base == "or") return same(by_integer_type<Same2<Or>::Pick>(type), type, 2);
  if (base == "xor") return same(by_integer_type<Same2<Xor>::Pick>(type), type, 2);
  if (base == "not") return same(by_integer_type<Same1<Not>::Pick>(type), type, 1);
  if (base == "cnot") return same(by_integer_type<Same1<CNot>::Pick>(type), type, 1);
  return {};
}

Form arithmetic(const Mnemonic& name, Type type) {
  const std::string& base = name.base();
  const int bits = bits_of(type);
  if (base == "add") return same(by_integer_type<Same2<Add>::Pick>(type), type, 2);
  if (base == "sub") return same(by_integer_type<Same2<Sub>::Pick>(type), type, 2);
  if (base == "div") return same(by_integer_type<Same2<Div>::Pick>(type), type, 2);
  if (base == "rem") return same(by_integer_type<Same2<Rem>::Pick>(type), type, 2);
  if (base == "neg") return same(by_integer_type<Same1<Neg>::Pick>(type), type, 1);
  if (base == "abs") return same(by_integer_type<Same1<Abs>::Pick>(type), type, 1);
  if (base == "sad") return same(by_integer_type<Same3<Sad>::Pick>(type), type, 3);
  if (base == "min")
    return same(name.has("relu") ? by_integer_type<Same2<MinRelu>::Pick>(type)
                                 : by_integer_type<Same2<Min>::Pick>(type),
                type, 2);
  if (base == "max")
    return same(name.has("relu") ? by_integer_type<Same2<MaxRelu>::Pick>(type)
                                 : by_integer_type<Same2<Max>::Pick>(type),
                type, 2);
  if (base == "mul") {
    if (name.has("wide"))
      return {by_integer_type<Wide2>(type), {result(2 * bits), source(bits), source(bits)}};
    return same(name.has("hi") ? by_integer_type<Same2<MulHigh>::Pick>(type)
                               : by_integer_type<Same2<MulLow>::Pick>(type),
                type, 2);
  }
  if (base == "mad") {
    if (name.has("wide"))
      return {by_integer_type<Wide3>(type),
              {result(2 * bits), source(bits), source(bits), source(2 * bits)}};
    return same(name.has("hi") ? by_integer_type<Same3<MadHigh>::Pick>(type)
                               : by_integer_type<Same3<MadLow>::Pick>(type),
                type, 3);
  }
  return {};
}

Form bits(const Mnemonic& name, Type type) {
  const std::string& base = name.base();
  const Slot to = result(bits_of(type)), from = source(bits_of(type)), word = source(32);
  if (base == "shl") return {by_integer_type<Shift<Shl>::Pick>(type), {to, from, word}};
  if (base == "shr") return {by_integer_type<Shift<Shr>::Pick>(type), {to, from, word}};
  if (base == "popc") return {by_integer_type<Count1<PopC>::Pick>(type), {result(32), from}};
  if (base == "clz") return {by_integer_type<Count1<CLZ>::Pick>(type), {result(32), from}};
  if (base == "bfind")
    return {name.has("shiftamt") ? by_integer_type<Count1<BFindShift>::Pick>(type)
                                 : by_integer_type<Count1<BFind>::Pick>(type),
            {result(32), from}};
  if (base == "brev") return same(by_integer_type<Same1<BRev>::Pick>(type), type, 1);
  if (base == "bfe") return {by_integer_type<Extract>(type), {to, from, word, word}};
  if (base == "bfi") return {by_integer_type<Insert>(type), {to, from, from, word, word}};
  if (bits_of(type) != 32) return {};
  if (base == "prmt") return same(permute, type, 3);
  if (base == "lop3") return same(logic3, type, 4);
  if (base == "bmsk") return same(bit_mask, type, 2);
  if (base == "shf") return same(funnel, type, 3);
  if (base == "dp4a") return same(dot4, type, 3);
  return {};
}

// addc, subc and madc read the carry flag. Instructions with .cc write it.
Known decode_carry(Instr& i, const Mnemonic& name, Type type) {
  const std::string& base = name.base();
  const bool product = base == "mad" || base == "madc";
  if (product && !name.any({"lo", "hi"})) return kUnknown;
  i.arg[0] = base == "sub" || base == "subc" ? 1 : !product ? 0 : name.has("lo") ? 2 : 3;
  i.arg[1] = base.back() == 'c';
  i.arg[2] = name.has("cc");
  const bool known = i.arg[1] || base == "add" || base == "sub" || base == "mad";
  i.run = known ? by_integer_type<Carry>(type) : nullptr;
  if (!i.run) return kUnknown;
  return same(i.run, type, product ? 3 : 2).shape;
}

}  // namespace

Known decode_integer(Instr& i, const Mnemonic& name, const RawInstr&) {
  const Type type = name.last();
  if (is_float(type)) return kUnknown;
  const std::string& base = name.base();
  i.pipe = Pipe::alu;
  if (name.has("cc") || base == "addc" || base == "subc" || base == "madc")
    return decode_carry(i, name, type);
  if (base == "prmt")
    for (int k = 0; k < 6; ++k)
      if (name.has(kModes[k])) i.arg[0] = k + 1;
  Form form = logic(base, type);
  if (!form.run) form = arithmetic(name, type);
  if (!form.run) form = bits(name, type);
  if (base == "shf") i.arg[0] = name.has("l"), i.arg[1] = name.has("clamp");
  if (base == "bmsk") i.arg[0] = name.has("clamp");
  if (base == "dp4a") i.arg[0] = is_signed(name.before()), i.arg[1] = is_signed(type);
  if (base == "mul" || base == "mad") i.pipe = Pipe::fma;
  i.run = form.run;
  return i.run ? Known(form.shape) : kUnknown;
}

}  // namespace ptxmachine
