// Finds the attended keys of a tile, and writes 0 to the rows of the other keys, which the mask
// hides or which are beyond the end of the sequence.

#pragma once

#include "../attention_tile.cuh"
#include "schedule.cuh"
#include "tma.cuh"

namespace fastbert::cuda {

constexpr int kKeyWords = kKeyRows / 32;

// Returns 32 bits, of which the lowest `count` bits are 1. `count` may be below 0 or above 32.
inline __device__ KeyBits first_bits(int count) {
  return count >= 32 ? kAllKeys : count <= 0 ? 0 : (1u << count) - 1;
}

// Sets `bits` to the attended keys of a tile. All lanes of a warp call this function.
inline __device__ void attended_keys(KeyBits (&bits)[kKeyWords], const AttentionMask& mask,
                                     const Item& item, int tile) {
  const uint8_t* of_head =
      mask.data + item.head.batch * mask.stride_batch + item.head.head * mask.stride_head;
#pragma unroll
  for (int word = 0; word < kKeyWords; ++word)
    bits[word] =
        attended_keys(of_head, mask.stride_key, tile * kKeyRows + 32 * word, item.head.keys);
}

// Writes 0 to the rows of a tile whose keys are not attended, because these rows may contain NaN.
// One warp calls this function.
template <int kHeadDim>
__device__ void zero_unattended_rows(unsigned char* tile, const KeyBits (&bits)[kKeyWords]) {
  using Row = BoxRow<kHeadDim>;
#pragma unroll
  for (int word = 0; word < kKeyWords; ++word) {
    if (bits[word] == kAllKeys) continue;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % 32; i < 32 * Row::kParts * Row::kChunks; i += 32) {
      const int row = i / Row::kChunks % 32, part = i / (32 * Row::kChunks);
      if (bits[word] >> row & 1) continue;
      *reinterpret_cast<uint4*>(tile + (part * kKeyRows + 32 * word + row) * Row::kBytes +
                                i % Row::kChunks * 16) = {0, 0, 0, 0};
    }
  }
}

}  // namespace fastbert::cuda
