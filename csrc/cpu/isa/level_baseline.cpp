// The kernels that every build has. On x86-64, they use x86-64-v2; on other processors, they use
// only the compiler's vector extensions.

#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("sse4.2"))), apply_to = function)
#elif defined(__x86_64__)
#pragma GCC target("sse4.2")
#endif

#define FASTBERT_LEVEL baseline
#define FASTBERT_LEVEL_BYTES 16
#include "level.h"

#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute pop
#endif
