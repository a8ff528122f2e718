// The kernels for ARM processors with products of unsigned by signed bytes (FEAT_I8MM: USMMLA) in
// addition to those of bf16.

#if defined(__aarch64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("bf16,i8mm"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+bf16+i8mm")
#endif

#define FASTBERT_LEVEL neon_i8mm
#define FASTBERT_LEVEL_BYTES 16
#define FASTBERT_LEVEL_BASE neon
#define FASTBERT_LEVEL_NEON 1
#define FASTBERT_LEVEL_DOTS 1
#define FASTBERT_LEVEL_MATRICES 1
#define FASTBERT_LEVEL_I8MM 1
#include "level.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
