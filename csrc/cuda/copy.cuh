// Tiles of 16-bit rows in shared memory, and the asynchronous copies that fill them.
//
// ldmatrix reads eight rows of 16 bytes at once. Rows in the same memory banks would be read one
// after another, so the 16-byte chunks of a row are permuted: chunk c of row r is at index c XOR
// turn(r). SharedTile::offset computes turn(r), which differs between rows that would otherwise use
// the same banks. Then both ldmatrix and the copies, which write eight neighbouring chunks, access
// every bank once.

#pragma once

#include <cstdint>

namespace fastbert::cuda {

inline __device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Returns x, but hides from the compiler that the result equals x. Values that depend on x are
// computed again in every iteration of a loop, instead of staying in registers that the loop needs.
inline __device__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The layout of a tile of rows of kColumns 16-bit elements.
template <int kColumns>
struct SharedTile {
  static constexpr int kChunks = kColumns / 8;  // chunks of 16 bytes in a row
  static_assert(kColumns % 32 == 0 && kColumns <= 128);

  static constexpr int kRowBytes = kColumns * 2;

  // Returns the byte offset of a chunk in the tile. The turn repeats every eight rows, so
  // offset(row + n, chunk) is offset(row, chunk) + n * kRowBytes if n is a multiple of 8. The
  // permutation is a XOR, so offset(row, chunk ^ c) is offset(row, chunk) ^ (16 * c). Therefore a
  // lane computes one offset, and derives the offsets of its other chunks with constants.
  static __device__ uint32_t offset(uint32_t row, uint32_t chunk) {
    constexpr int kRows = kChunks < 8 ? 8 / kChunks : 1;  // rows in the 128 bytes of all banks
    const uint32_t turn = row / kRows % (kChunks < 8 ? kChunks : 8);
    return (row * kChunks + (chunk ^ turn)) * 16;
  }
};

// Starts an asynchronous copy of 16 bytes from global to shared memory. If `exists` is false, the
// copy writes zeros and reads nothing.
inline __device__ void copy_chunk(uint32_t to, const void* from, bool exists) {
  const int bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// Closes a group. The group has the asynchronous copies that the calling thread has started since
// its previous group.
inline __device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of copies of the calling thread are unfinished.
template <int kPending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fastbert::cuda
