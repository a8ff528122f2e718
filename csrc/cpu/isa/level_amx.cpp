// The kernels for processors with AMX tiles in bf16 and int8 in addition to x86-64-v4, AVX512_BF16
// and AVX512_VNNI (Sapphire Rapids and later).

#if defined(__x86_64__)

#if defined(FASTBERT_EMULATE)
// The flags of the build select the processor's features.
#elif defined(__clang__)
#pragma clang attribute push(                                                                                   \
    __attribute__((target(                                                                                      \
        "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8,avx2,fma,f16c")
#endif

#define FASTBERT_LEVEL amx
#define FASTBERT_LEVEL_BYTES 64
#define FASTBERT_LEVEL_BASE avx512
#define FASTBERT_LEVEL_TILES 1
#include "level.h"

#if defined(__clang__) && !defined(FASTBERT_EMULATE)
#pragma clang attribute pop
#endif

#endif
