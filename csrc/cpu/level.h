// The kernels of one instruction-set level and the table that leads to them. Included by
// level_*.cpp only, after FASTBERT_LEVEL and FASTBERT_LEVEL_BYTES are defined and the target is
// selected.

#include "feed_forward_kernel.h"
#include "isa.h"
#include "layer_norm_kernel.h"

#define FASTBERT_STRING_OF(x) #x
#define FASTBERT_STRING(x) FASTBERT_STRING_OF(x)

namespace fastbert::cpu::FASTBERT_LEVEL {

extern const Kernels kKernels = {
    FASTBERT_STRING(FASTBERT_LEVEL),
    layer_norm_scratch,
    layer_norm_forward,
    layer_norm_backward,
    bias_gelu_forward,
    bias_gelu_backward,
    sum_rows,
};

}  // namespace fastbert::cpu::FASTBERT_LEVEL
