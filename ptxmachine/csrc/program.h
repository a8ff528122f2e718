// A PTX kernel as the machine runs it: instructions with a handler and resolved operands.
//
// src/ptxmachine/parse.py splits the text into instructions and operands. decode.cpp gives each
// instruction the handler of its mnemonic. Registers are virtual, as in PTX: each register has its
// own words in the register file of a warp, for 32 lanes. Immediates and addresses of variables are
// registers, too, which hold the same value in every lane and which no instruction writes. Handlers
// therefore read every operand from a register.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptxmachine {

constexpr int kLanes = 32;
using Mask = uint32_t;  // one bit per lane
constexpr Mask kAll = ~0u;

struct Warp;
struct Instr;
using Handler = void (*)(Warp&, const Instr&, Mask);

// The number format that a suffix such as .f32 or .b16 names.
enum class Type : uint8_t {
  none,
  pred,
  b8,
  b16,
  b32,
  b64,
  b128,
  u8,
  u16,
  u32,
  u64,
  s8,
  s16,
  s32,
  s64,
  f16,
  bf16,
  f16x2,
  bf16x2,
  tf32,
  f32,
  f64,
  e4m3,
  e5m2,
};  // clang-format off

int bytes_of(Type type);
bool is_signed(Type type);
bool is_float(Type type);
Type type_of(const std::string& suffix);  // Type::none when the suffix is no type
// clang-format on

// The scope of a strong access or a fence: the threads that it affects. A weak access has no scope.
enum class Scope : uint8_t { weak, block, cluster, device };
constexpr int kScopes = 3;  // number of scopes other than weak

// A register in the register file. A narrow register has 32 words. A wide register (64 bits) has 64
// words. A predicate has a single word with one bit per lane.
enum class Width : uint8_t { pred, narrow, wide };
struct Reg {
  int32_t at = 0;   // first word in the register file of the warp
  int32_t id = -1;  // index of the register in Warp::valid
  Width width = Width::narrow;
  uint8_t bits = 32;  // 1, 8, 16, 32 or 64
};

// The effect of an instruction on the control flow of its warp. After an instruction with `poll`,
// the warp continues even if the tested condition is false. An instruction with `retry` is issued
// again until it takes effect.
enum class Flow : uint8_t { next, branch, exit, barrier, warp_sync, poll, retry };
// The hardware unit that executes an instruction. A launch counts the instructions of each unit.
enum class Pipe : uint8_t {
  control,
  alu,
  fma,
  fp64,
  mufu,
  convert,
  shuffle,
  shared,
  global,
  tensor,
  sync
};
constexpr int kPipes = 11;

struct Instr {
  Handler run = nullptr;
  const Reg* reg = nullptr;  // the registers of all operands in the order of the text
  int32_t regs = 0;
  int32_t guard = -1;  // word of the guard predicate in the register file, or -1
  int32_t guard_id = -1;
  bool negated = false;
  bool aligned = false;  // whether all live lanes of the warp must execute it together
  Flow flow = Flow::next;
  Pipe pipe = Pipe::alu;
  Type type = Type::none, source = Type::none;
  int32_t target = -1;      // number of the instruction that a branch jumps to
  int64_t offset = 0;       // byte offset of the first address operand
  int64_t offsets[4] = {};  // byte offsets of all address operands
  int32_t arg[6] = {};      // modifiers, whose meaning depends on the handler
  int32_t line = 0;         // line of the PTX text
  const char* text = "";    // mnemonic
};

// An operand as the parser passes it to decode.
struct RawOperand {
  char kind = 'r';                // r register, i immediate, v vector, m address, l label, _ sink
  int64_t value = 0;              // register number, immediate or instruction number
  int64_t offset = 0;             // byte offset of an address
  std::vector<RawOperand> parts;  // elements of a vector; base and coordinates of an address
  bool negated = false;           // !%p as an operand
  int32_t bits = 0;               // bits of a register; set by decode.cpp
  bool special = false;           // a special register, such as %tid.x
};

struct RawInstr {
  std::string mnemonic;
  std::vector<RawOperand> operands;
  int32_t guard = -1;
  int32_t guard_bits = 1;
  bool negated = false;
  int32_t line = 0;
  // Returns the operand number `at`, counted from 0. If there is no such operand, returns an
  // operand of the kind ' ', which fits no slot.
  const RawOperand& operand(size_t at) const;
};

// The special registers. The machine writes them when a warp starts.
enum Special : int {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneId,
  kWarpId,
  kNwarpId,
  kSmId,
  kNsmId,
  kGridId,
  kClock,
  kClock64,
  kLanemaskEq,
  kLanemaskLe,
  kLanemaskLt,
  kLanemaskGe,
  kLanemaskGt,
  kClusterCtaid,
  kClusterNctaid,
  kClusterCtarank,
  kClusterNctarank,
  kTotalSmem,
  kDynamicSmem,
  kGlobaltimer,
  kClusterCtaidY,
  kClusterCtaidZ,
  kClusterNctaidY,
  kClusterNctaidZ,
  kClusterIdX,
  kClusterIdY,
  kClusterIdZ,
  kNclusterIdX,
  kNclusterIdY,
  kNclusterIdZ,
  kZero,
  kSpecials,
};

struct Constant {
  Reg reg;
  uint64_t value;
};

struct Program {
  std::vector<Instr> code;
  std::vector<std::vector<Reg>> operands;  // the arrays that Instr::reg points into
  std::vector<Reg> registers;              // the declared registers, then the special registers
  std::vector<Constant> constants;
  int32_t words = 0;  // size of a warp's register file, in words of 32 bits
  int32_t ids = 0;    // number of registers of all kinds
  int32_t first_special = 0;
  int32_t granule = 16;  // bytes; every write to shared memory fills whole units of this size
  int32_t global_granule = 16;
  std::vector<std::string> texts;
  // Pairs of a line and a message. `unsupported` has one for each instruction that the machine does
  // not know, and `misfits` has one for each instruction whose operands do not fit. A program with
  // such an instruction or operand cannot run.
  std::vector<std::pair<int32_t, std::string>> unsupported, misfits;
  bool runs() const { return unsupported.empty() && misfits.empty(); }
};

// Makes a program: gives each register its place in the register file, finds the handlers and
// checks the operands. bits[n] is the number of bits of declared register n.
Program* decode(std::vector<RawInstr> code, const std::vector<int>& bits);

// The first parts of all mnemonics, such as "add".
std::vector<std::string> mnemonics();

}  // namespace ptxmachine
