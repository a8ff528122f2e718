// Philox4x32 with 7 rounds (Salmon et al. 2011), and the dropout that uses these random numbers.

#pragma once

#include <cstdint>

namespace fastbert::cuda {

// Dropout keeps the element in row r and column n if w >> 8 is at least `threshold`, where w is
// word n % 4 of Philox(key = seed, counter = (n / 4, r, c2, c3)). In attention, c2 is the head and
// c3 the sequence; elsewhere both are 0. The seed is read on the device, so that no launch waits
// for it. A null seed means that there is no dropout.
struct Dropout {
  const int64_t* seed;
  uint32_t threshold;
  float scale;
};

struct Words {
  uint32_t word[4];
};

// Returns the 64-bit product of two 32-bit integers. For a product of two uint64_t, nvcc 13.0 also
// adds the products of the upper halves, although these halves are 0.
inline __device__ uint64_t wide_product(uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

constexpr uint32_t kPhilox0 = 0xD2511F53u, kPhilox1 = 0xCD9E8D57u;  // multipliers
constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;      // steps of the key

inline __device__ uint32_t low(uint64_t x) { return static_cast<uint32_t>(x); }
inline __device__ uint32_t high(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

// Computes the rounds kFirst to 6 of Philox for one counter.
template <int kFirst>
__device__ Words philox_rounds(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t key0 = low(key) + kFirst * kWeyl0, key1 = high(key) + kFirst * kWeyl1;
#pragma unroll
  for (int round = kFirst; round < 7; ++round) {
    const uint64_t product0 = wide_product(c0, kPhilox0);
    const uint64_t product1 = wide_product(c2, kPhilox1);
    c0 = high(product1) ^ c1 ^ key0;
    c1 = low(product1);
    c2 = high(product0) ^ c3 ^ key1;
    c3 = low(product0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

inline __device__ Words philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2 = 0,
                               uint32_t c3 = 0) {
  return philox_rounds<0>(key, c0, c1, c2, c3);
}

// Computes Philox for the counters (c0, row, 0, 0) of a fixed c0. In the first three rounds, half
// of the work depends only on c0. A thread that computes the same columns of many rows does this
// half once.
class ColumnPhilox {
 public:
  ColumnPhilox() = default;
  __device__ ColumnPhilox(uint64_t key, uint32_t c0) {
    const uint64_t first = wide_product(c0, kPhilox0);
    const uint64_t second = wide_product(high(first) ^ high(key), kPhilox1);
    const uint64_t third = wide_product(high(second) ^ (low(key) + kWeyl0), kPhilox0);
    word_[0] = low(first) ^ (high(key) + kWeyl1);
    word_[1] = low(second) ^ (low(key) + 2 * kWeyl0);
    word_[2] = high(third) ^ (high(key) + 2 * kWeyl1);
    word_[3] = low(third);
  }
  // Returns philox(key, c0, row).
  __device__ Words of_row(uint64_t key, uint32_t row) const {
    const uint64_t second = wide_product(row ^ low(key), kPhilox0);  // the same in all columns
    const uint64_t third = wide_product(high(second) ^ word_[0], kPhilox1);
    return philox_rounds<3>(key, high(third) ^ word_[1], low(third), low(second) ^ word_[2],
                            word_[3]);
  }

 private:
  uint32_t word_[4];
};

}  // namespace fastbert::cuda
