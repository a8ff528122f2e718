#include "parallel.h"

#include <pthread.h>

#include <atomic>

namespace fastbert::cpu {
namespace {

std::atomic<bool> used{false}, orphaned{false};

void note_fork() { orphaned = used.load(); }

}  // namespace

bool use_threads() {
  static const int registered = pthread_atfork(nullptr, nullptr, note_fork);
  if (registered != 0 || orphaned) return false;
  used = true;
  return true;
}

}  // namespace fastbert::cpu
