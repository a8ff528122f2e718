// The kernels for ARM processors with NEON, which every aarch64 processor has: fused multiply-add
// in fp32, and conversions of fp16.

#if defined(__aarch64__)

#define FASTBERT_LEVEL neon
#define FASTBERT_LEVEL_BYTES 16
#define FASTBERT_LEVEL_NEON 1
#include "level.h"

#endif
