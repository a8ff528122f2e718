// The kernels of one instruction-set level and the table that leads to them. Included by
// level_*.cpp only, after FASTBERT_LEVEL and FASTBERT_LEVEL_BYTES are defined and the target is
// selected.

#include "attention_backward_kernel.h"
#include "attention_weights_kernel.h"
#include "cross_entropy_kernel.h"
#include "embedding_kernel.h"
#include "feed_forward_kernel.h"
#include "fingerprint_kernel.h"
#include "gemm_kernel.h"
#include "int8_kernel.h"
#include "isa.h"
#include "layer_norm_kernel.h"
#if defined(FASTBERT_LEVEL_TILES)
#include "gemm_tile_kernel.h"
#endif
#if defined(FASTBERT_LEVEL_TILES) || defined(FASTBERT_LEVEL_DOTS)
#include "attention_strip_kernel.h"
#endif
#include "rms_norm_kernel.h"
#include "rotary_kernel.h"

#define FASTBERT_STRING_OF(x) #x
#define FASTBERT_STRING(x) FASTBERT_STRING_OF(x)

namespace fastbert::cpu::FASTBERT_LEVEL {

extern const Kernels kKernels = {
    FASTBERT_STRING(FASTBERT_LEVEL),
    layer_norm_scratch,
    layer_norm_forward,
    layer_norm_backward,
    activation_forward,
    activation_backward,
    rms_norm_forward,
    rms_norm_backward,
    rotary,
    embedding_forward,
    embedding_backward,
    sum_segments,
    cross_entropy_forward,
    cross_entropy_backward,
    sum_rows,
#if defined(FASTBERT_LEVEL_TILES)
    packed_bytes_tiled,
    pack_units,
    pack_tiled,
    gemm_plan_tiled,
    gemm_tiled,
#else
    packed_bytes,
    pack_units,
    pack,
    gemm_plan,
    gemm,
#endif
#if defined(FASTBERT_LEVEL_TILES) || defined(FASTBERT_LEVEL_DOTS)
    attention_strip_scratch,
    attention_strips,
#else
    attention_scratch,
    attention_forward,
#endif
    attention_backward_scratch,
    attention_backward,
    attention_bias_scratch,
    attention_bias_gradient,
    attention_weights_scratch,
    attention_weights,
    int8_layout,
    int8_quantise,
    int8_gemm,
    checksums,
};

}  // namespace fastbert::cpu::FASTBERT_LEVEL
