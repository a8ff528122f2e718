// Checksums of a weight, one for each 32-bit word of a row, carried down the rows. The checksums of
// different words are independent, so a weight is read as fast as it comes from memory.

#pragma once

#include <algorithm>

#include "../isa/kernels.h"
#include "../isa/vec.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// A bijection of the checksum for a given word, and of the word for a given checksum, so no change
// of a single word goes unseen. In a product, the highest bits influence no other bits. The
// rotation moves them down to where the next product mixes them.
FASTBERT_INLINE uint32_t mixed(uint32_t checksum, uint32_t word) {
  const uint32_t product = (checksum ^ word) * 0x9e3779b1u;
  return product << 16 | product >> 16;
}

FASTBERT_INLINE uint32_t word_at(const char* row, int64_t i) {
  uint32_t word;
  __builtin_memcpy(&word, row + 4 * i, 4);
  return word;
}

void checksums(const Checksums& params) {
  const Checksums p = params;  // a local copy, which no store to the sums can change
  constexpr int64_t kTogether = 4, kAhead = 16;
  const int64_t whole = std::min(p.last, p.row_bytes / 4);
  uint32_t* __restrict sums = p.sums;
  const char* row = p.data;
  int64_t r = 0;
  for (; r + kTogether <= p.rows; r += kTogether, row += kTogether * p.stride) {
    // Pieces of rows are too far apart for the processor to prefetch them by itself.
    for (int64_t i = 0; i < kTogether; ++i) {
      __builtin_prefetch(row + (kAhead + i) * p.stride + 4 * p.first);
    }
    for (int64_t i = p.first; i < whole; ++i) {
      uint32_t sum = sums[i - p.first];
      sum = mixed(sum, word_at(row, i));
      sum = mixed(sum, word_at(row + p.stride, i));
      sum = mixed(sum, word_at(row + 2 * p.stride, i));
      sums[i - p.first] = mixed(sum, word_at(row + 3 * p.stride, i));
    }
  }
  for (; r < p.rows; ++r, row += p.stride) {
    for (int64_t i = p.first; i < whole; ++i) {
      sums[i - p.first] = mixed(sums[i - p.first], word_at(row, i));
    }
  }
  if (whole == p.last) return;
  // The bytes of a row after its last whole word.
  row = p.data;
  for (r = 0; r < p.rows; ++r, row += p.stride) {
    uint32_t word = 0;
    __builtin_memcpy(&word, row + 4 * whole, p.row_bytes - 4 * whole);
    sums[whole - p.first] = mixed(sums[whole - p.first], word);
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
