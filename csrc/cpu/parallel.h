// Sharing rows out to torch's threads.
//
// GNU OpenMP's thread pool does not survive fork(): in a child whose parent has used it, in these
// kernels or in torch's operators, the next parallel region waits forever for threads that do not
// exist there. So the pool is ended before each fork, and parent and child start new ones when they
// need them. Where that is impossible, because the fork happens inside a parallel region, the child
// runs the kernels, and with torch.set_num_threads(1) torch's operators, on one thread.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fastbert::cpu {

// False in a child that was forked inside a parallel region.
bool use_threads();

// Memory of the calling thread, aligned to 64 bytes; it grows to the largest request and stays with
// the thread. The next call on this thread hands it out again.
void* thread_scratch(int64_t bytes);

// Calls body(begin, end) for ranges that cover [0, count), of at least `grain` elements where
// threads share.
template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  if (count <= grain || at::get_num_threads() == 1 || !use_threads()) return body(0, count);
  at::parallel_for(0, count, grain, body);
}

// Calls body(task) for each of `count` tasks once, on at most `threads` threads, which take them in
// order as they become free.
template <class Body>
void for_each_task(int64_t count, int64_t threads, const Body& body) {
  std::atomic<int64_t> next{0};
  parallel_for(std::min(count, threads), 1, [&](int64_t, int64_t) {
    for (int64_t task; (task = next++) < count;) body(task);
  });
}

}  // namespace fastbert::cpu
