// The kernels for ARM processors with products of bf16 (FEAT_BF16: BFMMLA, BFDOT and BFCVT) in
// addition to NEON: Neoverse V1, N2 and later, and Apple's M2 and later.

#if defined(__aarch64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("bf16"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+bf16")
#endif

#define FASTBERT_LEVEL neon_bf16
#define FASTBERT_LEVEL_BYTES 16
#define FASTBERT_LEVEL_BASE neon
#define FASTBERT_LEVEL_NEON 1
#define FASTBERT_LEVEL_DOTS 1
#define FASTBERT_LEVEL_MATRICES 1
#include "level.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
