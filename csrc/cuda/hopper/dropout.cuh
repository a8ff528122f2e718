// Dropout of a tile of weights in the registers of a group of four warps.

#pragma once

#include "../philox.cuh"
#include "softmax.cuh"

namespace fastbert::cuda {

// The rows of attention weights that a lane holds: `row` and `row` + 8 of head `head` and sequence
// `batch`. weights[i] is in `row` if i / 2 is even, and otherwise in `row` + 8.
struct DropoutRows {
  int row, head, batch;
};

// Applies dropout without its scale: a weight becomes 0 if dropout drops it. Element (row, key)
// uses word key % 4 of the Philox counter (key / 4, row, head, batch). A lane holds two of the four
// keys of a counter in every group of 8 columns. Therefore, of every two groups, each lane computes
// the random words of one group, for itself and for its neighbour. The two lanes then exchange the
// bits that say which weights dropout keeps.
__device__ inline void drop(float (&weights)[kScores], const Dropout& dropout, int first_key,
                            const DropoutRows& at) {
  const volatile int64_t* seed_of_call = dropout.seed;  // is read again in every tile
  const uint64_t seed = static_cast<uint64_t>(*seed_of_call);
  const int t = static_cast<int>(threadIdx.x) % 4;
  uint32_t mine = 0, theirs = 0;
#pragma unroll 1
  for (int group = 0; group < kScores / 4; group += 2) {
    const int counter = first_key / 4 + 2 * (group + t % 2) + t / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Words words =
          philox(seed, static_cast<uint32_t>(counter), static_cast<uint32_t>(at.row + 8 * half),
                 static_cast<uint32_t>(at.head), static_cast<uint32_t>(at.batch));
      uint32_t kept = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) kept |= (words.word[i] >> 8 >= dropout.threshold ? 1u : 0u) << i;
      // The even lane of the pair owns words 0 and 1, and the odd lane words 2 and 3.
      const uint32_t own = t % 2 ? kept >> 2 : kept & 3, other = t % 2 ? kept & 3 : kept >> 2;
      mine |= own << (2 * (group + half));
      theirs |= other << (2 * (group + half));
    }
  }
  // Of each two groups 2g and 2g + 1, `mine` has the bits of group 2g + t % 2, and `received` has
  // the bits of the other group.
  const uint32_t received = __shfl_xor_sync(0xffffffffu, theirs, 1);
  const uint32_t even = t % 2 ? received : mine, odd = t % 2 ? mine : received;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int group = i / 4, bit = 2 * (group / 2 * 2 + i / 2 % 2) + i % 2;
    if (!((group % 2 ? odd : even) >> bit & 1)) weights[i] = 0.0f;
  }
}

// Holds which weights dropout keeps, for a warp with 16 keys as rows and 64 queries as columns. The
// lanes of four neighbouring keys use the same Philox counters, and each of these lanes computes a
// quarter of the counters.
template <bool kDropout>
class KeptWeights {
 public:
  __device__ KeptWeights(const Dropout& dropout, int first_key, int first_query, int head,
                         int batch) {
    const volatile int64_t* seed_of_call = dropout.seed;  // is read again in every tile
    const uint64_t seed = static_cast<uint64_t>(*seed_of_call);
    const int lane = static_cast<int>(threadIdx.x) % 32, own = lane / 4 % 4;
    uint32_t verdicts = 0;
#pragma unroll 1
    for (int c = 0; c < kShare; ++c) {
      const int e = own * kShare + c;
      const int key = first_key + e / 16 * 8 + lane / 16 * 4;
      const int query = first_query + e / 2 % 8 * 8 + lane % 4 * 2 + e % 2;
      const Words drawn = philox(seed, static_cast<uint32_t>(key / 4), static_cast<uint32_t>(query),
                                 static_cast<uint32_t>(head), static_cast<uint32_t>(batch));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        verdicts |= (drawn.word[i] >> 8 >= dropout.threshold ? 1u : 0u) << (4 * c + i);
    }
    // In the word from the lane with key % 4 == i, bit 4 c + own belongs to the key of the calling
    // lane.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = __shfl_sync(0xffffffffu, verdicts, (lane & ~12) | 4 * i);
      kept_ |= (word >> own & 0x11111111u) << i;
    }
  }

  // Returns whether dropout keeps weight i of the lane.
  __device__ bool kept(int i) const {
    const int e = i / 2 % 2 * 16 + i / 4 * 2 + i % 2;
    return kept_ >> (4 * (e % kShare) + e / kShare) & 1;
  }

 private:
  static constexpr int kShare = 8;
  uint32_t kept_ = 0;  // bit 4 c + i is for counter c of the lane with key % 4 == i
};

// Without dropout, `kept` returns true for every weight.
template <>
class KeptWeights<false> {
 public:
  __device__ KeptWeights(const Dropout&, int, int, int, int) {}
  __device__ bool kept(int) const { return true; }
};

}  // namespace fastbert::cuda
