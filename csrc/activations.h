// The activation functions of a feed-forward layer, by their names in fastbert/activations.py.
//
// The CPU and the CUDA code include this header. It contains data but no functions, because the CPU
// kernels include it once per instruction-set level. The function activation_of in checks.h returns
// the activation that has a given name.

#pragma once

#include <cstdint>

namespace fastbert {

// geglu, geglu_tanh and swiglu are gated activations. They apply GELU, GELU with tanh or SiLU to
// the first half of the columns, and multiply the result by the second half of the columns (Shazeer
// 2020).
enum class Activation : int32_t { none, gelu, gelu_tanh, relu, silu, geglu, geglu_tanh, swiglu };

// The names of the activations, in the order of the enumerators of Activation.
inline constexpr const char* kActivationNames[] = {"none", "gelu",  "gelu_tanh",  "relu",
                                                   "silu", "geglu", "geglu_tanh", "swiglu"};

}  // namespace fastbert
