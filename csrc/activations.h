// The activation functions of a feed-forward, by their names in fastbert/activations.py.
//
// The CPU and the CUDA code include this header. It holds plain data only, because the CPU kernels
// include it once per instruction-set level. activation_of (checks.h) returns the activation of a
// name.

#pragma once

#include <cstdint>

namespace fastbert {

// geglu and swiglu are gated: GELU and SiLU of the first half of the columns, multiplied by the
// second half (Shazeer 2020).
enum class Activation : int32_t { none, gelu, gelu_tanh, relu, geglu, swiglu };

// The names in the order of the enumeration.
inline constexpr const char* kActivationNames[] = {"none", "gelu",  "gelu_tanh",
                                                   "relu", "geglu", "swiglu"};

}  // namespace fastbert
