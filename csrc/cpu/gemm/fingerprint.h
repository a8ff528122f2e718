// The fingerprint of some weights: by it a copy that was made of them is known to be out of date.
//
// A fingerprint holds where each weight is stored, its geometry, its version counter and checksums
// of all its bits. Fused optimizers, writes through `.data`, writes through NumPy and writes to
// inference tensors change no version counter, so the checksums decide. Reading a whole weight in
// every call would cost a product with few rows half of its time. `matches` therefore reads
//
//   the whole weight       where the product has enough rows to pay for it, in every process in
//                          which an optimizer has stepped or a gradient was computed, and for
//                          weights without a version counter or in memory that processes share;
//   64 bytes of each row   otherwise: the next 64 of each row in the next call. A change that
//                          touches every column is found at once, any other one within as many
//                          calls as a row has pieces of 64 bytes.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fastbert::cpu {

using Fingerprint = std::vector<uint64_t>;

// Of tensors on the CPU of one or two dimensions; reads all of them.
Fingerprint fingerprint_of(at::TensorList tensors);

// Whether `tensors` are the ones that `fingerprint` was taken of, unchanged as far as is read for
// a product with so many rows. Also counts the calls, in a word of the fingerprint.
bool matches(uint64_t* fingerprint, int64_t size, at::TensorList tensors, int64_t rows);

// Makes every fingerprint taken so far out of date.
void expire_fingerprints();

// Whether `matches` reads whole weights from now on, in this process: its weights are trained.
void expect_writes(bool expected);

}  // namespace fastbert::cpu
