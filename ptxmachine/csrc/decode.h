// The functions with which decode.cpp decodes instructions: one function per family of mnemonics.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "shape.h"

namespace ptxmachine {

// A mnemonic that is split at its dots, with helpers to read the parts.
struct Mnemonic {
  std::vector<std::string> parts;
  bool has(const char* part) const;
  bool any(std::initializer_list<const char*> names) const;
  const std::string& base() const { return parts[0]; }
  // The last suffix that is a type, and the type suffix before it. For cvt.f32.bf16, last() is bf16
  // and before() is f32.
  Type last() const;
  Type before() const;
};

// The number of bits of a register for a type; 1 for a predicate.
inline int bits_of(Type type) { return type == Type::pred ? 1 : 8 * bytes_of(type); }

// Returns the scope that a strong access or a fence names, or the device if it names no scope.
inline Scope scope_named(const Mnemonic& name) {
  return name.has("cta") ? Scope::block : name.has("cluster") ? Scope::cluster : Scope::device;
}

// Adds the operand for the cache policy to the shape of an instruction with .L2::cache_hint.
inline Shape with_policy(Shape shape, const Mnemonic& name) {
  if (name.has("L2::cache_hint")) shape.push_back(held(64));
  return shape;
}

// If one of the following functions knows the mnemonic, it sets the handler and all modifiers, and
// returns the shape of the operands. Otherwise, it returns kUnknown. raw has the operands of the
// text. They are compared with the shape only afterwards, so any operand of raw may be missing or
// have another kind.
using Known = std::optional<Shape>;
constexpr std::nullopt_t kUnknown = std::nullopt;
Known decode_integer(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_float(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_compare(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_convert(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_warp(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_memory(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_atomic(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_ldmatrix(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_bulk(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_tensor_map(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_cluster(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_async(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_mma(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_wgmma(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_wmma(Instr& instr, const Mnemonic& name, const RawInstr& raw);

}  // namespace ptxmachine
