#include "parallel.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

namespace fastbert::cpu {
namespace {

std::atomic<bool> used{false}, orphaned{false};

// torch's own operators would wait too (the pooler's tanh): they get one thread as well.
void note_fork() {
  orphaned = used.load();
  if (orphaned) at::set_num_threads(1);
}

}  // namespace

bool use_threads() {
  static const int registered = pthread_atfork(nullptr, nullptr, note_fork);
  if (registered != 0 || orphaned) return false;
  used = true;
  return true;
}

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
