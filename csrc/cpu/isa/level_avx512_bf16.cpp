// The kernels for processors with AVX512_BF16 and AVX512_VNNI beside x86-64-v4: Cooper Lake, Zen 4
// and later, Sapphire Rapids where the operating system hands out no tiles.

#if defined(__x86_64__)

#if defined(FASTBERT_EMULATE)
// The build's flags say what the processor has.
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
