// The groups of four warps of a persistent block. The first group copies for the other groups,
// which multiply. In attention, the first group also gives registers to them.

#pragma once

namespace fastbert::cuda {

constexpr int kGroup = 128, kConsumers = 2, kThreads = kGroup * (1 + kConsumers);
constexpr int kConsumerWarps = kConsumers * kGroup / 32;

// Of 65,536 registers, ptxas gives each thread of a block that is alone on a multiprocessor the
// same multiple of 8, so that the block owns 64,512. A group that asks for more registers than the
// block owns waits for ever.
constexpr int kThreadRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
              (1 + kConsumers) * kThreadRegisters);

// The first group calls this, and its threads keep kProducerRegisters each.
inline __device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
}
// The other groups call this, and their threads have kConsumerRegisters each.
inline __device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
}

}  // namespace fastbert::cuda
