// The kernels for processors with AVX-512 F, BW, DQ and VL (x86-64-v4).

#if defined(__x86_64__)

#if defined(FASTBERT_EMULATE)
// The flags of the build select the processor's features.
#elif defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define FASTBERT_LEVEL avx512
#define FASTBERT_LEVEL_BYTES 64
#include "level.h"

#if defined(__clang__) && !defined(FASTBERT_EMULATE)
#pragma clang attribute pop
#endif

#endif
