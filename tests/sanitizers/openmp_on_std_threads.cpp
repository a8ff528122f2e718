// This file implements the three functions of GNU OpenMP that the CPU operators call, by
// std::thread.
//
// GNU OpenMP is not compiled with ThreadSanitizer. ThreadSanitizer therefore does not see that the
// threads of a parallel loop start after the code before the loop and end before the code after it,
// and would report every loop as a race. ThreadSanitizer sees the threads that this file creates
// and joins. The sanitizer's build links the extension with these functions; torch keeps GNU
// OpenMP.

#include <thread>
#include <vector>

extern "C" int omp_get_max_threads();

namespace {
thread_local int number = 0, count = 1;
}

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

HIDDEN int omp_get_thread_num() { return number; }

HIDDEN int omp_get_num_threads() { return count; }

HIDDEN void GOMP_parallel(void (*body)(void*), void* data, unsigned wanted, unsigned) {
  const int threads = wanted != 0 ? (int)wanted : omp_get_max_threads();
  const auto run = [&](int i) {
    const int outer_number = number, outer_count = count;
    number = i;
    count = threads;
    body(data);
    number = outer_number;
    count = outer_count;
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(run, i);
  run(0);
  for (std::thread& other : others) other.join();
}
