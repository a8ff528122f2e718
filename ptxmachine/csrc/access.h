// What loads, stores, atomics and the loads and stores of matrices share: the place of an access
// with all checks, the counts, and the order of strong accesses.

#pragma once

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {

enum class Space : int32_t { generic, global, shared, local, param };

// Sets the space (arg 0) and the pipe of an instruction.
void set_space(Instr& i, const Mnemonic& name);

struct Place {
  uint8_t* at;
  uint8_t* valid;  // null: all bytes are
};

// Stands for a value of which no byte is valid.
extern const uint8_t* const kNothing;

// The place of an access after all checks; notes it for the races. value is what a write stores:
// null where it changes what it finds, and kNothing where no byte of it is valid.
Place reach(Warp& w, int lane, Space space, uint64_t address, uint32_t size, bool write,
            Scope scope, const uint8_t* value = nullptr);

// Adds an access of these lanes to the counts of sectors or wavefronts.
void count(Warp& w, const Instr& i, Mask m, const uint64_t* address, uint32_t size);

// The order of a strong access, with kOfBlock where its scope is the block; 0 stands for a weak
// one.
enum Order : int32_t { kWeak = 0, kRelaxed = 1, kAcquire = 2, kRelease = 4, kOfBlock = 8 };
int32_t order_of(const Mnemonic& name, bool strong);
// The scope of an access with the order in arg 2.
inline Scope scope_of(const Instr& i) {
  if (i.arg[2] == kWeak) return Scope::weak;
  return i.arg[2] & kOfBlock ? Scope::block : Scope::device;
}

// Strong accesses of all blocks happen one after another, together with what they pass on.
extern std::mutex strong_accesses;
void acquire_at(Warp& w, const Instr& i, int lane, uint64_t address);
void release_at(Warp& w, const Instr& i, int lane, uint64_t address, bool reads);

}  // namespace ptxmachine
