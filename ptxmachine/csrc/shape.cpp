// Makes the slots of shapes, and compares operands with shapes.

#include "shape.h"

namespace ptxmachine {

Slot Slot::or_more() const {
  Slot s = *this;
  s.more = true;
  return s;
}
Slot Slot::or_sink() const {
  Slot s = *this;
  s.sink = true;
  return s;
}
Slot Slot::or_not() const {
  Slot s = *this;
  s.negatable = true;
  return s;
}
Slot Slot::if_given() const {
  Slot s = *this;
  s.optional = true;
  return s;
}
Slot Slot::power_of_two() const {
  Slot s = *this;
  s.power = true;
  return s;
}

Slot result(int bits) {
  Slot s;
  s.bits = bits, s.written = true;
  return s;
}
Slot source(int bits) {
  Slot s;
  s.bits = bits, s.immediate = true;
  return s;
}
Slot held(int bits) {
  Slot s;
  s.bits = bits;
  return s;
}
Slot vector(int elements, const Slot& element) {
  Slot s;
  s.kind = Slot::Kind::vector;
  s.parts.assign((size_t)elements, element);
  return s;
}
Slot pair(const Slot& first, const Slot& second) {
  Slot s;
  s.kind = Slot::Kind::vector;
  s.parts = {first, second};
  return s;
}
Slot address(int coordinates) {
  Slot s;
  s.kind = Slot::Kind::address;
  s.parts.assign((size_t)coordinates, source(32));
  return s;
}
Slot constant(int64_t low, int64_t high) {
  Slot s;
  s.kind = Slot::Kind::constant;
  s.low = low, s.high = high;
  return s;
}
Slot label() {
  Slot s;
  s.kind = Slot::Kind::label;
  return s;
}

namespace {

std::string register_of(int bits) {
  return bits == 1 ? "a predicate" : "a register of " + std::to_string(bits) + " bits";
}

std::string words(const Slot& s) {
  switch (s.kind) {
    case Slot::Kind::vector: {
      const bool pair = s.parts.size() == 2 && s.parts[0].bits != s.parts[1].bits;
      if (pair) return "a pair of " + words(s.parts[0]) + " and " + words(s.parts[1]);
      return "a vector of " + std::to_string(s.parts.size()) + ", each " + words(s.parts[0]);
    }
    case Slot::Kind::address:
      if (s.parts.empty()) return "an address";
      return "an address with " + std::to_string(s.parts.size()) + " coordinates";
    case Slot::Kind::constant:
      return "an immediate from " + std::to_string(s.low) + " to " + std::to_string(s.high) +
             (s.power ? ", a power of 2" : "");
    case Slot::Kind::label:
      return "a label";
    default:
      break;
  }
  std::string text = register_of(s.bits);
  if (s.more) text += " or more";
  if (s.written) text += " that the kernel declares";
  if (s.negatable) text += ", also negated,";
  if (s.immediate) text += " or an immediate";
  if (s.sink) text += " or _";
  return text;
}

std::string words(const RawOperand& o) {
  const std::string negated = o.negated ? "the negation of " : "";
  switch (o.kind) {
    case 'r':
      return negated + (o.special ? "a special register of " + std::to_string(o.bits) + " bits"
                                  : register_of(o.bits));
    case 'i':
      return negated + "the immediate " + std::to_string(o.value);
    case 'v':
      return negated + "a vector of " + std::to_string(o.parts.size());
    case 'm':
      return negated + (o.parts.size() > 1 ? "an address with coordinates" : "an address");
    case 'l':
      return negated + "a label";
    default:
      return negated + "_";
  }
}

bool fits(const RawOperand& o, const Slot& s);

bool value_fits(const RawOperand& o, const Slot& s) {
  if (o.negated && !s.negatable) return false;
  if (o.kind == '_') return s.sink && !o.negated;
  if (o.kind == 'i') return s.immediate && !o.negated;
  if (o.kind != 'r' || (s.written && o.special)) return false;
  return o.bits == s.bits || (s.more && o.bits > s.bits && s.bits > 1);
}

bool all_fit(const std::vector<RawOperand>& given, const std::vector<Slot>& slots) {
  if (given.size() != slots.size()) return false;
  for (size_t k = 0; k < given.size(); ++k)
    if (!fits(given[k], slots[k])) return false;
  return true;
}

bool address_fits(const RawOperand& o, const Slot& s) {
  if (o.kind != 'm' || o.negated || o.parts.size() != (s.parts.empty() ? 1u : 2u)) return false;
  const RawOperand& base = o.parts[0];
  const bool reaches = base.kind == 'i' || (base.kind == 'r' && base.bits >= 32);
  if (!reaches || base.negated) return false;
  if (s.parts.empty()) return true;
  return o.parts[1].kind == 'v' && !o.parts[1].negated && all_fit(o.parts[1].parts, s.parts);
}

bool fits(const RawOperand& o, const Slot& s) {
  switch (s.kind) {
    case Slot::Kind::vector:
      if (o.kind != 'v') return s.parts.size() == 1 && value_fits(o, s.parts[0]);
      return !o.negated && all_fit(o.parts, s.parts);
    case Slot::Kind::address:
      return address_fits(o, s);
    case Slot::Kind::constant:
      return o.kind == 'i' && !o.negated && o.value >= s.low && o.value <= s.high &&
             (!s.power || (o.value & (o.value - 1)) == 0);
    case Slot::Kind::label:
      return o.kind == 'l' && !o.negated;
    default:
      return value_fits(o, s);
  }
}

}  // namespace

std::string mismatch(const RawInstr& raw, const Shape& shape) {
  size_t least = 0;
  while (least < shape.size() && !shape[least].optional) ++least;
  const size_t given = raw.operands.size();
  if (given < least || given > shape.size()) {
    std::string allowed = std::to_string(least);
    if (least < shape.size()) allowed += " to " + std::to_string(shape.size());
    return "got " + std::to_string(given) + " operands, allowed: " + allowed;
  }
  for (size_t k = 0; k < given; ++k)
    if (!fits(raw.operands[k], shape[k]))
      return "operand " + std::to_string(k + 1) + " is " + words(raw.operands[k]) +
             ", allowed: " + words(shape[k]);
  if (raw.guard_bits > 1)
    return "the guard is " + register_of(raw.guard_bits) + ", allowed: a predicate";
  return "";
}

}  // namespace ptxmachine
