// The choice of the instruction-set level at which the CPU kernels run.
//
// FASTBERT_CPU_ISA may name a level (baseline, avx2, avx512, avx512_bf16, amx; on ARM baseline,
// neon, neon_bf16, neon_i8mm). If this variable is not set or is empty, the highest level that the
// processor and the operating system support is chosen, except levels that are slower on this
// processor than a lower level. An unknown or unsupported name is an error.

#pragma once

#include "kernels.h"

namespace fastbert::cpu {

namespace baseline {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}
namespace amx {
extern const Kernels kKernels;
}
namespace neon {
extern const Kernels kKernels;
}
namespace neon_bf16 {
extern const Kernels kKernels;
}
namespace neon_i8mm {
extern const Kernels kKernels;
}

struct Level {
  const Kernels* kernels;
  bool supported;
  bool slow;  // whether a lower level is faster on this processor
};

// The levels that this build contains, lowest first.
const Level* levels_begin();
const Level* levels_end();

// Returns the kernels in use. Throws ValueError if no level was chosen yet and FASTBERT_CPU_ISA
// names a level that is unknown or not supported.
const Kernels& kernels();

// Sets the level of the whole process by name. nullptr restores the choice at start, by
// FASTBERT_CPU_ISA or the processor. Throws ValueError if the level is unknown or not supported.
void set_level(const char* name);

// Replaces the kernels in use by another table. Python cannot call this function. Tests that
// compile their own levels look up the function's address in the symbols of the library.
void set_kernels(const Kernels* table);

}  // namespace fastbert::cpu
