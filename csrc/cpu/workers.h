// The cores on which the worker threads of OpenMP wake up.
//
// A worker that has had no work for a few milliseconds sleeps. When a thread enters a parallel
// region, Linux often wakes the workers on the core of that thread, although other cores are idle.
// A worker then waits for the core, while the thread waits for the worker at the end of the region.
// A call after a pause can thus take longer than on one thread. Here, each worker is forbidden the
// core of the thread that will wake it.

#pragma once

#include <sched.h>
#include <sys/types.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace fastbert::cpu {

// A thread that takes part in parallel regions and does not enter them itself.
class Worker {
 public:
  // Returns the calling thread as a worker.
  static const std::shared_ptr<Worker>& self();

  // Forbids the thread to run on the core `core`, and allows the core that was forbidden before.
  // Does nothing if the thread has ended, or if it may run on no other core. A set of cores that
  // another program gave to the thread since the last call takes the place of the earlier set.
  void avoid(int core);

  // Returns the core that the last call of `avoid` named, or -1.
  int avoided() const { return avoided_; }

  explicit Worker(pid_t thread) : thread_(thread) {}
  void ended();

 private:
  // The mutex is locked while the affinity is set, because the system may give the id of a thread
  // that has ended to a thread of another process.
  std::mutex mutex_;
  const pid_t thread_;
  bool alive_ = true;
  std::atomic<int> avoided_{-1};
  cpu_set_t allowed_ = {}, given_ = {};
};

// The workers of the regions that one thread enters, by their number in the region.
class Workers {
 public:
  // Returns the workers of the calling thread.
  static Workers& mine();

  // Prepares a region of `threads` threads: each worker of the last region avoids this core.
  void prepare(int threads);

  // Stores the calling thread as the worker of this number; the workers may call this at once.
  void join(int number);

  // Forgets the workers. A child calls this after a fork, because the fork copied no worker.
  void forget() { known_.clear(); }

 private:
  std::vector<std::shared_ptr<Worker>> known_;
};

}  // namespace fastbert::cpu
