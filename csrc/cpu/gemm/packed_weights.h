// Prepacked weights: copies of weights in the layout that the CPU's products read, kept for the
// next call.
//
// A copy belongs to the weight's storage but does not keep the storage alive; a later look-up frees
// the copies of freed storages. A copy is made again when the fingerprint of the weight
// (fingerprint.h) or the instruction-set level has changed. fp32 weights get an fp32 copy for
// products in fp32. A product that read them in place would sum over k by lanes with few rows, and
// would lay them out in panels with many rows. A row's result would then depend on its batch.

#pragma once

#include <ATen/core/Tensor.h>

#include "../isa/kernels.h"

namespace fastbert::cpu {

// Returns the prepacked bytes of a weight (n, k) with any strides, valid for as long as the caller
// holds them. The `rows` of the product decide how much of the weight is read to see whether it has
// changed.
at::Tensor packed(const at::Tensor& weight, Format to, int64_t rows);

// Packs an operand that is used once, without the cache.
at::Tensor pack_once(const at::Tensor& weight, Format to);

int64_t packed_total();
void forget_packed();

}  // namespace fastbert::cpu
