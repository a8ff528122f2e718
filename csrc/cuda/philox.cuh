// Philox4x32 with 7 rounds (Salmon et al. 2011) and the dropout of fastbert.

#pragma once

#include <cstdint>

namespace fastbert::cuda {

// Element (r, n) is kept iff word n % 4 of Philox(key = seed, counter = (n / 4, r, c2, c3)) >> 8 >=
// threshold. In attention, c2 is the head and c3 the sequence; elsewhere both are 0. The seed is
// read on the device, so that no launch waits for it. A null seed means that there is no dropout.
struct Dropout {
  const int64_t* seed;
  uint32_t threshold;
  float scale;
};

struct Words {
  uint32_t word[4];
};

// Of a product of two uint64_t, nvcc 13.0 also adds the upper halves, although they are 0.
inline __device__ uint64_t wide_product(uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

inline __device__ Words philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2 = 0,
                               uint32_t c3 = 0) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint64_t product0 = wide_product(c0, 0xD2511F53u);
    const uint64_t product1 = wide_product(c2, 0xCD9E8D57u);
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Tells which of kCount elements from column `first` on are kept. Both numbers are multiples of 4.
template <int kCount>
__device__ void draw(const Dropout& dropout, uint64_t seed, int64_t row, int first,
                     bool (&kept)[kCount]) {
#pragma unroll
  for (int group = 0; group < kCount; group += 4) {
    const Words words = philox(seed, (first + group) / 4, static_cast<uint32_t>(row));
#pragma unroll
    for (int i = 0; i < 4; ++i) kept[group + i] = words.word[i] >> 8 >= dropout.threshold;
  }
}

}  // namespace fastbert::cuda
