// Weights in the layout of the products' kernels, kept for the next call.
//
// A copy belongs to the weight's storage, which it does not keep alive: when that is freed, the
// copy goes with the next product (or the next question for the total). It is packed again when the
// fingerprint of the weight (fingerprint.h) or the instruction-set level has changed. fp32 weights
// get an fp32 copy for products in fp32: to read them as they lie, a product would have to sum over
// k by lanes when there are few rows and pack them anew when there are many, and then a row's
// result would depend on its batch.

#pragma once

#include <ATen/core/Tensor.h>

#include "../isa/kernels.h"

namespace fastbert::cpu {

// The packed bytes of weight (n, k) of any strides, for as long as the caller holds them. `rows` of
// the product with it decide how much of the weight is read to see whether it has changed.
at::Tensor packed(const at::Tensor& weight, Format to, int64_t rows);

// The same without a cache, for an operand that is used once.
at::Tensor pack_once(const at::Tensor& weight, Format to);

int64_t packed_total();
void forget_packed();

}  // namespace fastbert::cpu
