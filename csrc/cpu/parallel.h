// The distribution of work to torch's threads.
//
// GNU OpenMP's thread pool does not survive fork(). In a child whose parent has used the pool, in
// these kernels or in torch's operators, the next parallel region waits forever for threads that do
// not exist. The pool is therefore ended before each fork, and parent and child start new threads
// when they need them. The pool cannot be ended if the fork happens inside a parallel region. Such
// a child runs these kernels on one thread and, by torch.set_num_threads(1), torch's operators too.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fastbert::cpu {

// Returns false in a child that was forked inside a parallel region.
bool use_threads();

// Returns memory of the calling thread, aligned to 64 bytes. The memory grows to the largest
// request and stays with the thread; the next call on the same thread returns it again.
void* thread_scratch(int64_t bytes);

// Calls body(begin, end) for ranges that cover [0, count), at most count / `grain` of them, rounded
// up.
template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  if (count <= grain || at::get_num_threads() == 1 || !use_threads()) return body(0, count);
  at::parallel_for(0, count, grain, body);
}

// Calls body(task) once for each of `count` tasks. At most `threads` threads take the tasks in
// order as they become free.
template <class Body>
void for_each_task(int64_t count, int64_t threads, const Body& body) {
  std::atomic<int64_t> next{0};
  parallel_for(std::min(count, threads), 1, [&](int64_t, int64_t) {
    for (int64_t task; (task = next++) < count;) body(task);
  });
}

}  // namespace fastbert::cpu
