// Atomic operations on memory: atom, red, and the reductions of bulk copies.

#include "access.h"

namespace ptxmachine {
namespace {

enum class Atom : int32_t { add, min, max, inc, dec, exch, cas, and_, or_, xor_ };

template <class T>
T combined(Atom op, T old, T b, T c) {
  switch (op) {
    case Atom::add:
      return old + b;
    case Atom::min:
      return b < old ? b : old;
    case Atom::max:
      return old < b ? b : old;
    case Atom::exch:
      return b;
    case Atom::cas:
      return old == b ? c : old;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case Atom::inc:
        return old >= b ? 0 : old + 1;
      case Atom::dec:
        return old == 0 || old > b ? b : old - 1;
      case Atom::and_:
        return old & b;
      case Atom::or_:
        return old | b;
      case Atom::xor_:
        return old ^ b;
      default:
        break;
    }
  }
  return old;
}

uint64_t combined(Type type, Atom op, uint64_t old, uint64_t b, uint64_t c) {
  switch (type) {
    case Type::f32:
      return bits_as<uint32_t>(combined<float>(op, bits_as<float>((uint32_t)old),
                                               bits_as<float>((uint32_t)b),
                                               bits_as<float>((uint32_t)c)));
    case Type::f64:
      return bits_as<uint64_t>(
          combined<double>(op, bits_as<double>(old), bits_as<double>(b), bits_as<double>(c)));
    case Type::s32:
      return (uint32_t)combined<int32_t>(op, (int32_t)old, (int32_t)b, (int32_t)c);
    case Type::s64:
      return (uint64_t)combined<int64_t>(op, (int64_t)old, (int64_t)b, (int64_t)c);
    case Type::u64:
    case Type::b64:
      return combined<uint64_t>(op, old, b, c);
    case Type::b16:
    case Type::u16:
      return (uint16_t)combined<uint16_t>(op, (uint16_t)old, (uint16_t)b, (uint16_t)c);
    case Type::f16:
      return to_half(combined<double>(op, to_float(Half{(uint16_t)old}),
                                      to_float(Half{(uint16_t)b}), 0))
          .bits;
    case Type::bf16:
      return to_brain(combined<double>(op, to_float(Brain{(uint16_t)old}),
                                       to_float(Brain{(uint16_t)b}), 0))
          .bits;
    case Type::f16x2:
    case Type::bf16x2: {
      const Type half = type == Type::f16x2 ? Type::f16 : Type::bf16;
      return combined(half, op, old & 0xffff, b & 0xffff, 0) |
             combined(half, op, old >> 16, b >> 16, 0) << 16;
    }
    default:
      return (uint32_t)combined<uint32_t>(op, (uint32_t)old, (uint32_t)b, (uint32_t)c);
  }
}

// atom and red. arg 0: state space. arg 1: the number of elements; each element is one atomic
// operation. arg 2: Order flags. arg 3: operation. arg 4: whether the instruction returns the old
// values. The registers are those of the old values, the address, and the operands b and c of the
// PTX manual.
void atomic(Warp& w, const Instr& i, Mask m) {
  const uint32_t size = (uint32_t)bytes_of(i.type);
  const int n = i.arg[1];
  const Reg* source = i.reg + (i.arg[4] ? n : 0);
  w.need(source[0], m, "an address");
  for (int e = 0; e < n; ++e) w.need(source[1 + e], m, "an operand of an atomic");
  const Atom op = (Atom)i.arg[3];
  Mask valid[8] = {};
  each_lane(m, [&](int l) {
    const uint64_t address = w.address(source[0], l, i.offset);
    const Place p = reach(w, l, (Space)i.arg[0], address, size * n, true, scope_of(i));
    std::lock_guard<std::mutex> guard(strong_accesses);
    acquire_at(w, i, l, address);
    for (int e = 0; e < n; ++e) {
      uint64_t old = 0;
      std::memcpy(&old, p.at + e * size, size);
      valid[e] |= (Mask)(!p.valid || all_valid(p.valid + e * size, size)) << l;
      const uint64_t next = combined(i.type, op, old, w.get(source[1 + e], l),
                                     op == Atom::cas ? w.get(source[2], l) : 0);
      std::memcpy(p.at + e * size, &next, size);
      if (i.arg[4] && i.reg[e].id >= 0) w.set(i.reg[e], l, old);
    }
    release_at(w, i, l, address, true);
  });
  for (int e = 0; e < n; ++e)
    if (i.arg[4] && i.reg[e].id >= 0) w.wrote(i.reg[e], m, valid[e]);
}

}  // namespace

void reduce_element(Type type, int32_t op, uint8_t* to, uint64_t value) {
  uint64_t old = 0;
  const size_t size = (size_t)bytes_of(type);
  std::lock_guard<std::mutex> guard(strong_accesses);
  std::memcpy(&old, to, size);
  const uint64_t next = combined(type, (Atom)op, old, value, 0);
  std::memcpy(to, &next, size);
}

int32_t reduction_of(const Mnemonic& name) {
  static const std::pair<const char*, Atom> ops[] = {
      {"add", Atom::add}, {"min", Atom::min},   {"max", Atom::max}, {"inc", Atom::inc},
      {"dec", Atom::dec}, {"exch", Atom::exch}, {"cas", Atom::cas}, {"and", Atom::and_},
      {"or", Atom::or_},  {"xor", Atom::xor_}};
  for (const auto& [text, op] : ops)
    if (name.has(text)) return (int32_t)op;
  return -1;
}

Known decode_atomic(Instr& i, const Mnemonic& name, const RawInstr&) {
  if (name.has("async")) return kUnknown;
  i.type = name.last();
  set_space(i, name);
  i.arg[3] = reduction_of(name);
  i.arg[1] = name.has("v2") ? 2 : name.has("v4") ? 4 : name.has("v8") ? 8 : 1;
  i.arg[2] = order_of(name, true);
  i.arg[4] = name.base() == "atom";
  i.run = atomic;
  const Atom op = (Atom)i.arg[3];
  const int bits = bits_of(i.type), n = i.arg[1];
  if (i.arg[3] < 0 || bits < 16 || bits > 64 || bits * n > 128) return kUnknown;
  if (is_float(i.type) && op != Atom::add && op != Atom::min && op != Atom::max) return kUnknown;
  if (op == Atom::cas && (n > 1 || !i.arg[4])) return kUnknown;
  Shape shape;
  if (i.arg[4]) shape.push_back(vector(n, result(bits).or_sink()));
  shape.push_back(address());
  shape.push_back(vector(n, source(bits)));
  if (op == Atom::cas) shape.push_back(source(bits));
  return with_policy(std::move(shape), name);
}

}  // namespace ptxmachine
