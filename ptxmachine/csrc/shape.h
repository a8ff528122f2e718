// The operands that an instruction takes: their number, their kinds and their widths.
//
// Each family of instructions returns the shape of an instruction together with its handler.
// decode.cpp compares the operands of a text with the shape before the kernel runs. A handler may
// therefore index its registers, and read the lanes of a register in the width of its type, without
// a check.

#pragma once

#include <string>
#include <vector>

#include "program.h"

namespace ptxmachine {

// Describes which operands an instruction allows at one position. The functions after this struct
// create slots.
struct Slot {
  enum class Kind : uint8_t { value, vector, address, constant, label };
  Kind kind = Kind::value;
  int bits = 32;              // bits of a register: 1 for a predicate, 8, 16, 32 or 64
  bool written = false;       // a result: a register that the kernel declares
  bool immediate = false;     // an immediate is allowed instead of the register
  bool more = false;          // the register may have more bits
  bool sink = false;          // "_" is allowed instead of the register
  bool negatable = false;     // "!" may precede the register
  bool optional = false;      // this operand and all later operands may be missing
  int64_t low = 0, high = 0;  // range of a constant
  bool power = false;         // the constant must be a power of two
  std::vector<Slot> parts;    // elements of a vector; coordinates of an address

  Slot or_more() const;
  Slot or_sink() const;
  Slot or_not() const;
  Slot if_given() const;
  Slot power_of_two() const;
};
using Shape = std::vector<Slot>;

// A register that the instruction writes.
Slot result(int bits);
// A register or an immediate that the instruction reads.
Slot source(int bits);
// A register that the instruction reads.
Slot held(int bits);
// Registers in braces. A vector of one element may be written without braces.
Slot vector(int elements, const Slot& element);
// Two registers with a bar between them.
Slot pair(const Slot& first, const Slot& second);
// A register or the address of a variable in brackets, followed by `coordinates` coordinates.
Slot address(int coordinates = 0);
// An immediate that only decoding uses. It does not become a register of the instruction.
Slot constant(int64_t low, int64_t high);
Slot label();

// Returns "" if the operands of `raw` fit `shape`. Otherwise, returns a message about the number of
// operands, the first operand that does not fit, or the guard. The message says what is allowed
// instead.
std::string mismatch(const RawInstr& raw, const Shape& shape);

}  // namespace ptxmachine
