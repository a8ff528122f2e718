// The kernels for processors with AVX2, FMA and F16C (x86-64-v3).

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define FASTBERT_LEVEL avx2
#define FASTBERT_LEVEL_BYTES 32
#include "level.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
