// The fingerprint of weights, which shows whether a copy of the weights is out of date.
//
// A fingerprint holds each weight's address, geometry, version counter and checksums of all its
// bits. Fused optimizers, writes through `.data`, writes through NumPy and writes to
// inference tensors change no version counter, so the checksums decide. Reading a whole weight in
// every call would take half of the time of a product with few rows. `matches` therefore reads
//
//   the whole weight       if the product has enough rows to hide the reading, in every process
//                          with an optimizer step or a computed gradient, and for weights without
//                          a version counter or in shared memory;
//   64 bytes of each row   otherwise, and the next 64 bytes of each row in the next call. A change
//                          that touches every column is found at once. Any other change is found
//                          within as many calls as a row has pieces of 64 bytes.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fastbert::cpu {

using Fingerprint = std::vector<uint64_t>;

// Takes tensors of one or two dimensions on the CPU and reads all of them.
Fingerprint fingerprint_of(at::TensorList tensors);

// Returns whether `fingerprint` was taken of `tensors` and the part of them that is read for a
// product with `rows` rows is unchanged. A word of the fingerprint counts the calls.
bool matches(uint64_t* fingerprint, int64_t size, at::TensorList tensors, int64_t rows);

// Makes every fingerprint taken so far out of date.
void expire_fingerprints();

// Sets whether `matches` reads whole weights in this process, because the weights are trained.
void expect_writes(bool expected);

}  // namespace fastbert::cpu
