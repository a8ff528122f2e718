// The kernels of one instruction-set level, and their table. Only level_*.cpp files include this
// header, after they have selected the compiler's target and defined FASTBERT_LEVEL and
// FASTBERT_LEVEL_BYTES.
//
// A level may differ from another level only in its matrix products and attention forward. Such a
// level defines FASTBERT_LEVEL_BASE as the name of the other level. Its table then takes all other
// kernels from the other level, so that these kernels are compiled once.

#include "../gemm/int8_kernel.h"
#include "../gemm/kernel.h"
#include "dispatch.h"
#if defined(FASTBERT_LEVEL_TILES)
#include "../gemm/tile_kernel.h"
#endif
#if defined(FASTBERT_LEVEL_TILES) || defined(FASTBERT_LEVEL_DOTS)
#include "../attention/strip_kernel.h"
#endif

#if defined(FASTBERT_LEVEL_BASE)

namespace fastbert::cpu::FASTBERT_LEVEL_BASE {

template <class Pointer>
struct Pointee;
template <class Function>
struct Pointee<Function*> {
  using Type = Function;
};

#define FASTBERT_DECLARE(kernel) Pointee<decltype(Kernels::kernel)>::Type kernel;

FASTBERT_DECLARE(layer_norm_scratch)
FASTBERT_DECLARE(layer_norm_forward)
FASTBERT_DECLARE(normalise)
FASTBERT_DECLARE(layer_norm_backward)
FASTBERT_DECLARE(activation_forward)
FASTBERT_DECLARE(activation_backward)
FASTBERT_DECLARE(rms_norm_forward)
FASTBERT_DECLARE(rms_norm_backward)
FASTBERT_DECLARE(rotary)
FASTBERT_DECLARE(embedding_forward)
FASTBERT_DECLARE(embedding_backward)
FASTBERT_DECLARE(sum_segments)
FASTBERT_DECLARE(cross_entropy_forward)
FASTBERT_DECLARE(cross_entropy_backward)
FASTBERT_DECLARE(splade_maximum)
FASTBERT_DECLARE(splade_result)
FASTBERT_DECLARE(splade_weight_gradient)
FASTBERT_DECLARE(splade_hidden_gradient)
FASTBERT_DECLARE(sum_rows)
FASTBERT_DECLARE(attention_backward_scratch)
FASTBERT_DECLARE(attention_backward)
FASTBERT_DECLARE(relative_backward)
FASTBERT_DECLARE(attention_bias_scratch)
FASTBERT_DECLARE(attention_bias_gradient)
FASTBERT_DECLARE(attention_weights_scratch)
FASTBERT_DECLARE(attention_weights)
FASTBERT_DECLARE(decode_scratch)
FASTBERT_DECLARE(decode_attention)

}  // namespace fastbert::cpu::FASTBERT_LEVEL_BASE

#else

#define FASTBERT_LEVEL_BASE FASTBERT_LEVEL

#include "../attention/backward_kernel.h"
#include "../attention/decode_kernel.h"
#include "../attention/weights_kernel.h"
#include "../rows/activation_kernel.h"
#include "../rows/cross_entropy_kernel.h"
#include "../rows/embedding_kernel.h"
#include "../rows/layer_norm_kernel.h"
#include "../rows/rms_norm_kernel.h"
#include "../rows/rotary_kernel.h"
#include "../rows/splade_kernel.h"

#endif

#define FASTBERT_STRING_OF(x) #x
#define FASTBERT_STRING(x) FASTBERT_STRING_OF(x)

namespace fastbert::cpu::FASTBERT_LEVEL {

namespace base = FASTBERT_LEVEL_BASE;

extern const Kernels kKernels = {
    FASTBERT_STRING(FASTBERT_LEVEL),
    base::layer_norm_scratch,
    base::layer_norm_forward,
    base::normalise,
    base::layer_norm_backward,
    base::activation_forward,
    base::activation_backward,
    base::rms_norm_forward,
    base::rms_norm_backward,
    base::rotary,
    base::embedding_forward,
    base::embedding_backward,
    base::sum_segments,
    base::cross_entropy_forward,
    base::cross_entropy_backward,
    base::splade_maximum,
    base::splade_result,
    base::splade_weight_gradient,
    base::splade_hidden_gradient,
    base::sum_rows,
#if defined(FASTBERT_LEVEL_TILES)
    right_format_tiled,
    packed_bytes_tiled,
    pack_units,
    pack_tiled,
    round_rows,
    reads_rows_tiled,
    gemm_plan_tiled,
    gemm_tiled,
#else
    right_format,
    packed_bytes,
    pack_units,
    pack,
    round_rows,
    reads_rows,
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
    base::attention_backward_scratch,
    base::attention_backward,
    base::relative_backward,
    base::attention_bias_scratch,
    base::attention_bias_gradient,
    base::attention_weights_scratch,
    base::attention_weights,
    base::decode_scratch,
    base::decode_attention,
    int8_layout,
    int8_quantise,
    int8_gemm,
};

}  // namespace fastbert::cpu::FASTBERT_LEVEL
