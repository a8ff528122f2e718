// The distribution of work to torch's threads.
//
// The thread pool of GNU OpenMP does not survive fork(). If a parent has used the pool, in these
// kernels or in torch's operators, the next parallel region of the child waits forever for threads
// that do not exist. The pool is therefore ended before each fork, and parent and child start new
// threads when they need them. Inside a parallel region, the pool cannot be ended. A child that is
// forked there runs these kernels on one thread and also calls torch.set_num_threads(1).
//
// OpenMP's threads wait for each other at the end of a parallel region. If other programs use the
// cores, a thread may arrive late by a scheduler time slice, which is longer than all products of a
// small model. A call with many loops is therefore one parallel region, in which the threads take
// the tasks of one loop after another (`together`). No loop waits for a thread that has no task. A
// separate thread pool would have to share the cores with OpenMP's threads, which keep polling for
// work for milliseconds after each of torch's operators. workers.h says where the threads wake up
// after a pause.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

namespace fastbert::cpu {

// Each call waits for a short time. After calls that took about 0.1 ms in total, each further call
// yields the core to other programs. The first calls do not, because a thread that yields its core
// may not get a core again for many milliseconds.
class Pause {
 public:
  void operator()();

 private:
  int spins_ = 0;
};

// Returns whether these kernels may use several threads. The result is false in a process that was
// forked inside a parallel region.
bool use_threads();

// Returns memory that belongs to the calling thread, aligned to 64 bytes. The next call on the same
// thread returns the same memory, which grows to the largest request.
void* thread_scratch(int64_t bytes);

// Calls body() in one parallel region. The threads of the region share the loops that body() runs
// on the calling thread, but not loops nested in such a loop. An operator of torch that body()
// calls runs on one thread.
void together(const std::function<void()>& body);

// The body of a loop, and the function `call`, which calls the body for a task.
struct Loop {
  const void* body;
  void (*call)(const void* body, int64_t task);
};

// Returns whether the calling thread leads a team, which would share the next loop of this thread.
bool leads_team();

struct Memory {
  const void* begin;
  int64_t bytes;
};

// Names the memory that the loops of the calling thread's team read one after another, such as the
// weights of all layers. While the leader is between two loops, threads without a task bring the
// beginning of the next memory to their caches. Does nothing without a team.
void read_in_order(std::vector<Memory> order);

// Says that the next loop reads the memory that begins here, so what follows it in the order is
// read after that.
void reads(const void* memory);

// The threads of a team are already awake. In a team, a thread is therefore used for 1 / kAwake of
// the work for which a sleeping thread would be woken.
constexpr int64_t kAwake = 8;

// Returns the smallest amount of work for which a thread is used. `asleep` is the smallest amount
// for which a sleeping thread is woken.
inline int64_t worth_a_thread(int64_t asleep) {
  return leads_team() ? std::max<int64_t>(1, asleep / kAwake) : asleep;
}

// Returns false if the calling thread is not in `together`, or is already in a loop. Otherwise
// calls the body once for each of `count` tasks, which the threads take in order as they become
// free, and returns true. Rethrows an exception that a body throws.
bool shared_with_team(int64_t count, Loop loop);

template <class Body>
Loop loop_of(const Body& body) {
  return {&body, [](const void* b, int64_t task) { (*(const Body*)b)(task); }};
}

// Calls body(begin, end) for ranges that cover [0, count). The number of ranges is at most count /
// `asleep`, rounded up. In a team, the number may be kAwake times as large.
template <class Body>
void parallel_for(int64_t count, int64_t asleep, const Body& body) {
  if (count <= 0) return;
  const int64_t grain = worth_a_thread(asleep);
  if (count > grain) {
    const int64_t ranges = std::min<int64_t>((count + grain - 1) / grain, at::get_num_threads());
    const int64_t length = (count + ranges - 1) / ranges;
    const auto range = [&](int64_t i) {
      if (i * length < count) body(i * length, std::min(count, (i + 1) * length));
    };
    if (shared_with_team(ranges, loop_of(range))) return;
  }
  if (count <= grain || at::get_num_threads() == 1 || !use_threads()) return body(0, count);
  at::parallel_for(0, count, grain, body);
}

// Calls body(task) once for each of `count` tasks. At most `threads` threads take the tasks in
// order as they become free.
template <class Body>
void for_each_task(int64_t count, int64_t threads, const Body& body) {
  if (threads > 1 && count > 1 && shared_with_team(count, loop_of(body))) return;
  std::atomic<int64_t> next{0};
  parallel_for(std::min(count, threads), 1, [&](int64_t, int64_t) {
    for (int64_t task; (task = next++) < count;) body(task);
  });
}

}  // namespace fastbert::cpu
