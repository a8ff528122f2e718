// Which instruction-set level the CPU kernels run at.
//
// The best level that the processor and the operating system support, or the one that
// FASTBERT_CPU_ISA names (baseline, avx2, avx512, avx512_bf16, amx). A name that is unknown or not
// supported is an error, never ignored.

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

struct Level {
  const Kernels* kernels;
  bool supported;
};

// The levels that this build contains, lowest first.
const Level* levels_begin();
const Level* levels_end();

// The kernels in use. Throws ValueError when FASTBERT_CPU_ISA cannot be honoured.
const Kernels& kernels();

// Sets the level for the whole process, by name; nullptr goes back to the choice described above.
void set_level(const char* name);

// Puts another table in their place. Python cannot reach it; tests that compile levels of their own
// look up its address in the symbols of the library.
void set_kernels(const Kernels* table);

}  // namespace fastbert::cpu
