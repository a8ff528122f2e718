// What the files of instructions give to decode.cpp: one function per family of mnemonics.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "shape.h"

namespace ptxmachine {

// A mnemonic split at its dots, and helpers to read it.
struct Mnemonic {
  std::vector<std::string> parts;
  bool has(const char* part) const;
  bool any(std::initializer_list<const char*> names) const;
  const std::string& base() const { return parts[0]; }
  // The last suffixes that are types: last() of cvt.f32.bf16 is bf16, before() is f32.
  Type last() const;
  Type before() const;
};

// The bits of a register for a type; 1 for a predicate.
inline int bits_of(Type type) { return type == Type::pred ? 1 : 8 * bytes_of(type); }

// The scope that a strong access or a fence names; it is the device for one that names none.
inline Scope scope_named(const Mnemonic& name) {
  return name.any({"cta", "cluster"}) ? Scope::block : Scope::device;
}

// Adds the policy of a cache to the operands of an instruction that names one.
inline Shape with_policy(Shape shape, const Mnemonic& name) {
  if (name.has("L2::cache_hint")) shape.push_back(held(64));
  return shape;
}

// Each returns the shape of the operands if it knows the mnemonic; it then has set the handler and
// all modifiers. raw gives the operands as they were written. They are compared with the shape
// afterwards, so that any of them may be missing or of another kind.
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
Known decode_async(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_mma(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_wgmma(Instr& instr, const Mnemonic& name, const RawInstr& raw);
Known decode_wmma(Instr& instr, const Mnemonic& name, const RawInstr& raw);

}  // namespace ptxmachine
