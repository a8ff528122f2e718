// Philox4x32 with 7 rounds (Salmon et al. 2011) and the dropout of fastbert.

#pragma once

#include <cstdint>

namespace fastbert::cuda {

// Element (r, n) is kept iff word n % 4 of Philox(key = seed, counter = (n / 4, r, 0, 0)) >> 8 >=
// threshold. The seed is read on the device, so that no launch waits for it. A null seed means that
// there is no dropout.
struct Dropout {
  const int64_t* seed;
  uint32_t threshold;
  float scale;
};

struct Words {
  uint32_t word[4];
};

inline __device__ Words philox(uint64_t key, uint32_t c0, uint32_t c1) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  uint32_t c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(c0) * 0xD2511F53u;
    const uint64_t product1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Applies dropout to kCount elements from column `first` on. Both numbers are multiples of 4.
template <int kCount>
__device__ void drop(const Dropout& dropout, int64_t row, int first, float (&x)[kCount]) {
  const uint64_t key = static_cast<uint64_t>(*dropout.seed);
#pragma unroll
  for (int group = 0; group < kCount; group += 4) {
    const Words words = philox(key, (first + group) / 4, static_cast<uint32_t>(row));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool kept = words.word[i] >> 8 >= dropout.threshold;
      x[group + i] = kept ? x[group + i] * dropout.scale : 0.0f;
    }
  }
}

}  // namespace fastbert::cuda
