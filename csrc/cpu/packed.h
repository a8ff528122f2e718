// Weights in the layout of the products' kernels, kept for the next call.
//
// A copy belongs to the weight's storage, which it does not keep alive: when that is freed, the
// copy goes with the next product (or the next question for the total). It is packed again when the
// tensor's version counter, its address or the instruction-set level has changed. Writes through
// `.data` and to inference tensors count no version, so a fingerprint of sampled elements is
// compared too: that sees an optimizer's step or a loaded checkpoint, but not a change to a few
// elements alone. fp32 weights get an fp32 copy for products in fp32: to read them as they lie, a
// product would have to sum over k by lanes when there are few rows and pack them anew when there
// are many, and then a row's result would depend on its batch.

#pragma once

#include <ATen/core/Tensor.h>

#include "kernels.h"

namespace fastbert::cpu {

// The packed bytes of weight (n, k) of any strides, for as long as the caller holds them.
at::Tensor packed(const at::Tensor& weight, Format to);

// The same without a cache, for an operand that is used once.
at::Tensor pack_once(const at::Tensor& weight, Format to);

// Tells one state of these tensors (1-D or 2-D, on the CPU) from another, by all that the cache
// goes by.
int64_t state_of(at::TensorList tensors);

int64_t packed_total();
void forget_packed();

}  // namespace fastbert::cpu
