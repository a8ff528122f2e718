// Barriers between the warps of a block: mbarriers in shared memory, which also count the bytes of
// copies, and named barriers between groups of warps.

#pragma once

#include <cstdint>

namespace fastbert::cuda {

// An mbarrier is 8 bytes of shared memory. A phase completes when all threads have arrived and all
// announced bytes have been copied. A wait for parity p ends when a phase of parity p has
// completed.
inline __device__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialization of the barriers visible to the copies.
inline __device__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

inline __device__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces the number of bytes that copies will write in the same phase.
inline __device__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Returns whether a phase of parity `parity` has completed, without waiting for it.
inline __device__ bool has_completed(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

inline __device__ void wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// Makes the calling thread's writes to shared memory visible to copies and to wgmma after the next
// barrier.
inline __device__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits at the named barrier `id` until `threads` threads have arrived; arrive_group arrives and
// does not wait.
inline __device__ void sync_group(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
inline __device__ void arrive_group(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A position in a ring of stages. The parity of a stage changes with each turn of the ring. A
// thread that fills a stage waits for the opposite parity of its "empty" barrier, so that it does
// not wait in the first turn.
template <int kStages>
struct Place {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace fastbert::cuda
