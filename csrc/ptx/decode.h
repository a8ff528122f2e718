// What the files of instructions give to decode.cpp: one function per family of mnemonics.

#pragma once

#include <string>
#include <vector>

#include "program.h"

namespace fastbert::ptx {

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

// Each returns whether it knows the mnemonic; it then has set the handler and all modifiers. raw
// gives the operands as they were written.
bool decode_integer(Instr& instr, const Mnemonic& name);
bool decode_float(Instr& instr, const Mnemonic& name);
bool decode_compare(Instr& instr, const Mnemonic& name, const RawInstr& raw);
bool decode_convert(Instr& instr, const Mnemonic& name, const RawInstr& raw);
bool decode_warp(Instr& instr, const Mnemonic& name, const RawInstr& raw);
bool decode_memory(Instr& instr, const Mnemonic& name, const RawInstr& raw);
bool decode_atomic(Instr& instr, const Mnemonic& name, const RawInstr& raw);
bool decode_ldmatrix(Instr& instr, const Mnemonic& name, const RawInstr& raw);
bool decode_bulk(Instr& instr, const Mnemonic& name, const RawInstr& raw);
bool decode_tensor_map(Instr& instr, const Mnemonic& name, const RawInstr& raw);
bool decode_async(Instr& instr, const Mnemonic& name, const RawInstr& raw);
bool decode_mma(Instr& instr, const Mnemonic& name, const RawInstr& raw);
bool decode_wgmma(Instr& instr, const Mnemonic& name, const RawInstr& raw);
bool decode_wmma(Instr& instr, const Mnemonic& name, const RawInstr& raw);

}  // namespace fastbert::ptx
