// Functions that all loads, stores and atomics share. They check and count accesses, locate the
// accessed bytes, and maintain the happens-before order of strong accesses.

#pragma once

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {

// The state space of an address. `shared` is the shared memory of the thread's own block, and
// `cluster` is the shared memory of all blocks of its cluster.
enum class Space : int32_t { generic, global, shared, local, param, cluster };

// Sets the state space (arg 0) and the pipe of an instruction.
void set_space(Instr& i, const Mnemonic& name);

struct Place {
  uint8_t* at;
  uint8_t* valid;  // null: all bytes are valid
};

// The argument `value` of `reach` for a value of which no byte is valid.
extern const uint8_t* const kNothing;

// Checks an access, records it for the detection of races, and returns the bytes that it accesses.
// `value` is the value that a write stores. It is null if the result depends on the old value, as
// for atomics, and kNothing if no byte of the stored value is valid.
Place reach(Warp& w, int lane, Space space, uint64_t address, uint32_t size, bool write,
            Scope scope, const uint8_t* value = nullptr);

// Adds an access by the lanes of m to the counts of sectors or wavefronts.
void count(Warp& w, const Instr& i, Mask m, const uint64_t* address, uint32_t size);

// The flags of a strong access. Its Scope is in the bits from kScopeShift on. A weak access has no
// flag.
enum Order : int32_t { kWeak = 0, kRelaxed = 1, kAcquire = 2, kRelease = 4 };
constexpr int kScopeShift = 3;
int32_t order_of(const Mnemonic& name, bool strong);
// The scope of an access whose Order flags are in arg 2.
inline Scope scope_of(const Instr& i) { return (Scope)(i.arg[2] >> kScopeShift); }

// This mutex serializes the strong accesses of all blocks, together with the clocks that they
// publish or acquire.
extern std::mutex strong_accesses;
void acquire_at(Warp& w, const Instr& i, int lane, uint64_t address);
void release_at(Warp& w, const Instr& i, int lane, uint64_t address, bool reads);

}  // namespace ptxmachine
