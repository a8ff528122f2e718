#include "parallel.h"

#include <pthread.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

namespace fastbert::cpu {
namespace {

// Whether the child of the current fork gets the pool without its threads, and whether this process
// is such a child.
std::atomic<bool> inherited{false}, orphaned{false};

// Ends the threads of the pool; the next parallel region starts new threads. OpenMP refuses to end
// threads inside a parallel region.
void before_fork() {
#if defined(_OPENMP)
  inherited = omp_pause_resource_all(omp_pause_hard) != 0;
#endif
}

// torch's own operators, such as the pooler's tanh, would wait too, so they also get one thread.
void in_child() {
  if (!inherited) return;
  orphaned = true;
  at::set_num_threads(1);
}

// The handlers are registered when the library is loaded, because a parent may have used torch's
// threads and none of our kernels.
[[maybe_unused]] const int registered = pthread_atfork(before_fork, nullptr, in_child);

}  // namespace

bool use_threads() { return !orphaned; }

void* thread_scratch(int64_t bytes) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local int64_t held = 0;
  if (bytes > held) {
    constexpr int64_t kUnit = 4096;
    const int64_t rounded = (bytes + kUnit - 1) / kUnit * kUnit;
    memory.reset();
    held = 0;
    memory.reset(std::aligned_alloc(64, rounded));
    if (!memory) throw std::bad_alloc();
    held = rounded;
  }
  return memory.get();
}

}  // namespace fastbert::cpu
