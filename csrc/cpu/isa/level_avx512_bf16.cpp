// The kernels for processors with AVX512_BF16 and AVX512_VNNI in addition to x86-64-v4: Cooper
// Lake, Zen 4 and later, and Sapphire Rapids if the operating system does not grant the use of AMX
// tiles.

#if defined(__x86_64__)

#if defined(FASTBERT_EMULATE)
// The flags of the build select the processor's features.
#elif defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((                                                                         \
        target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")
#endif

#define FASTBERT_LEVEL avx512_bf16
#define FASTBERT_LEVEL_BYTES 64
#define FASTBERT_LEVEL_BASE avx512
#define FASTBERT_LEVEL_DOTS 1
#include "level.h"

#if defined(__clang__) && !defined(FASTBERT_EMULATE)
#pragma clang attribute pop
#endif

#endif
