// The fibers behind cuda_runtime.h, and the launchers under C names for ctypes.

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "feed_forward.cuh"
#include "layer_norm.cuh"

dim3 threadIdx, blockIdx, gridDim;

namespace {

enum class State { ready, at_warp_barrier, at_block_barrier, done };

constexpr size_t kStack = 128 * 1024;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  State state = State::ready;
  // Two slots in turn: a lane may write its next value before its neighbours have read the last
  // one.
  float slot[2];
  int turn = 0;
};

std::vector<Fiber> fibers;
ucontext_t scheduler;
const std::function<void()>* body;

void entry() {
  (*body)();
  fibers[threadIdx.x].state = State::done;
}

void wait(State state) {
  const unsigned self = threadIdx.x;
  fibers[self].state = state;
  swapcontext(&fibers[self].context, &scheduler);
}

// Whether the `count` fibers from `first` on all wait at the barrier; they are released then.
bool release(size_t first, size_t count, State barrier) {
  for (size_t i = first; i < first + count; ++i) {
    if (fibers[i].state != barrier) return false;
  }
  for (size_t i = first; i < first + count; ++i) fibers[i].state = State::ready;
  return true;
}

void run_block(size_t threads) {
  for (size_t i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.state = State::ready;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, entry, 0);
  }
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t i = 0; i < threads; ++i) {
      if (fibers[i].state != State::ready) continue;
      threadIdx = dim3(static_cast<unsigned>(i));
      swapcontext(&scheduler, &fibers[i].context);
      progress = true;
    }
    for (size_t i = 0; i < threads; i += 32) {
      progress |= release(i, 32, State::at_warp_barrier);
    }
    progress |= release(0, threads, State::at_block_barrier);
  }
  for (size_t i = 0; i < threads; ++i) {
    if (fibers[i].state == State::done) continue;
    std::fprintf(stderr, "thread %zu waits for threads that never come\n", i);
    std::abort();
  }
}

}  // namespace

void __syncthreads() { wait(State::at_block_barrier); }

float __shfl_xor_sync(unsigned, float value, int lane_mask) {
  const unsigned self = threadIdx.x;
  const int turn = fibers[self].turn;
  fibers[self].slot[turn] = value;
  fibers[self].turn ^= 1;
  wait(State::at_warp_barrier);
  return fibers[self ^ static_cast<unsigned>(lane_mask)].slot[turn];
}

void run_grid(dim3 grid, int threads, const std::function<void()>& kernel) {
  if (fibers.size() < static_cast<size_t>(threads)) fibers.resize(threads);
  body = &kernel;
  gridDim = grid;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = dim3(x, y);
      for (Fiber& fiber : fibers) fiber.turn = 0;
      run_block(threads);
    }
  }
}

using namespace fastbert::cuda;

extern "C" {
int run_layer_norm_forward(const LayerNormForward* p) { return layer_norm_forward(*p, nullptr); }
int run_layer_norm_backward(const LayerNormBackward* p) { return layer_norm_backward(*p, nullptr); }
int run_activation_forward(const ActivationForward* p) { return activation_forward(*p, nullptr); }
int run_activation_backward(const ActivationBackward* p) {
  return activation_backward(*p, nullptr);
}
}
