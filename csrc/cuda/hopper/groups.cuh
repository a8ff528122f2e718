// The groups of four warps in a persistent thread block. The first group starts the copies, and the
// other groups multiply. In gemm.cu, the first group also computes the epilogue. In attention, it
// gives some of its registers to the other groups.

#pragma once

namespace fastbert::cuda {

constexpr int kGroup = 128, kConsumers = 2, kThreads = kGroup * (1 + kConsumers);
constexpr int kConsumerWarps = kConsumers * kGroup / 32;

// A multiprocessor has 65,536 registers. ptxas gives each of the 384 threads of a block the same
// number of registers, a multiple of 8, so a single block gets 64,512 registers. A group that
// requests more registers than the block has left waits forever.
constexpr int kThreadRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
              (1 + kConsumers) * kThreadRegisters);

// The first group calls this function. Each thread of this group then has kProducerRegisters
// registers.
inline __device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
}
// The other groups call this function. Each thread of these groups then has kConsumerRegisters
// registers.
inline __device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
}

}  // namespace fastbert::cuda
