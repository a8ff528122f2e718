#include "parallel.h"

#include <pthread.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <thread>
#include <utility>

#include "workers.h"

namespace fastbert::cpu {
namespace {

// `inherited` tells whether the fork that is about to happen gives the child a thread pool without
// threads. `orphaned` tells whether this process is such a child.
std::atomic<bool> inherited{false}, orphaned{false};

// Runs before a fork, and ends the threads of OpenMP's pool. The next parallel region starts new
// threads. Inside a parallel region, OpenMP cannot end the threads.
void before_fork() {
#if defined(_OPENMP)
  inherited = omp_pause_resource_all(omp_pause_hard) != 0;
#endif
}

// Runs in the child after a fork. With a thread pool without threads, torch's own operators, such
// as the tanh of the pooler, would also wait forever, so torch is limited to one thread too.
void in_child() {
  Workers::mine().forget();
  if (!inherited) return;
  orphaned = true;
  at::set_num_threads(1);
}

// The handlers are registered when the library is loaded, because a parent may have used torch's
// threads without ever calling these kernels.
[[maybe_unused]] const int registered = pthread_atfork(before_fork, nullptr, in_child);

// A team has a leader, which runs the loops, and helpers. The tasks of a loop are divided into
// claims, and a claim is a few adjacent tasks that one thread runs. The leader waits for claims
// that helpers have taken and not finished, but never for a helper without a claim.
//
// The state of the team is one word, which contains the number of the current loop, the number of
// its claims, and the index of the next claim. A thread takes a claim by adding 1 to this word. The
// leader begins a loop only when all claims of the previous loop are done. The thread that takes a
// claim therefore reads the description of the claim's own loop.
class Team {
 public:
  void run(int64_t count, Loop loop) {
    loop_ = loop;
    count_ = count;
    tasks_of_claim_ = count / (int64_t)kMost + 1;
    const uint64_t claims = (count + tasks_of_claim_ - 1) / tasks_of_claim_;
    unfinished_.store(claims, std::memory_order_relaxed);
    number_ = (number_ + 1) & kMost;
    state_.store(number_ << 2 * kBits | claims << kBits, std::memory_order_release);
    take();
    for (Pause pause; unfinished_.load(std::memory_order_acquire) > 0;) pause();
    if (!failed_.exchange(false)) return;
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  // Runs tasks until the leader ends the team.
  void help() {
    for (Pause pause; state_.load(std::memory_order_acquire) != kEnd;) {
      if (take()) {
        pause = {};
      } else if (!fetch()) {
        pause();
      }
    }
  }

  void read_in_order(std::vector<Memory> order) { order_ = std::move(order), next_ = 0; }

  void reads(const void* memory) {
    constexpr size_t kNear = 4;  // entries of the order that are searched
    for (size_t i = next_; i < std::min(order_.size(), next_ + kNear); ++i) {
      if (order_[i].begin != memory) continue;
      next_ = i + 1;
      return announce();
    }
  }

  void end() { state_.store(kEnd, std::memory_order_release); }

 private:
  // Bytes of a piece, and the most bytes to prefetch: a part of a second-level cache of 512 KiB.
  static constexpr int64_t kPiece = 2048, kMostFetched = 384 << 10;
  static constexpr int kBits = 21;
  static constexpr uint64_t kMost = (1 << kBits) - 1, kEnd = ~uint64_t{0};

  // Lets the helpers prefetch the next memory. They begin with both halves, because the first two
  // tasks of a product read the beginnings of the halves.
  void announce() {
    const Memory next = next_ < order_.size() ? order_[next_] : Memory{nullptr, 0};
    pieces_.store(0, std::memory_order_relaxed);
    begin_.store((const char*)next.begin, std::memory_order_relaxed);
    half_.store(next.bytes / 2, std::memory_order_relaxed);
    fetched_.store(0, std::memory_order_relaxed);
    pieces_.store(std::min(next.bytes, kMostFetched) / kPiece, std::memory_order_release);
  }

  // Prefetches a piece of the next memory. Returns whether a piece was left. If the leader
  // announces other memory meanwhile, the address may be wrong, which a prefetch allows.
  bool fetch() {
    const int64_t pieces = pieces_.load(std::memory_order_acquire);
    if (fetched_.load(std::memory_order_relaxed) >= pieces) return false;
    const int64_t piece = fetched_.fetch_add(1, std::memory_order_relaxed);
    const char* from = begin_.load(std::memory_order_relaxed) + piece / 2 * kPiece +
                       piece % 2 * half_.load(std::memory_order_relaxed);
    for (int64_t line = 0; line < kPiece; line += 64) __builtin_prefetch(from + line, 0, 2);
    return true;
  }

  // Runs claims of the current loop until none is left. Returns whether this thread ran any claim.
  bool take() {
    bool took = false;
    uint64_t state = state_.load(std::memory_order_acquire);
    while (state != kEnd && (state & kMost) < (state >> kBits & kMost)) {
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel,
                                        std::memory_order_acquire)) {
        continue;
      }
      took = true;
      perform((int64_t)(state & kMost) * tasks_of_claim_);
      unfinished_.fetch_sub(1, std::memory_order_release);
      state = state_.load(std::memory_order_acquire);
    }
    return took;
  }

  void perform(int64_t first) {
    const int64_t last = std::min(count_, first + tasks_of_claim_);
    try {
      for (int64_t task = first; task < last; ++task) loop_.call(loop_.body, task);
    } catch (...) {
      // If several tasks fail, only one of their exceptions is stored for `run` to throw.
      if (!failed_.exchange(true)) failure_ = std::current_exception();
    }
  }

  std::atomic<uint64_t> state_{0}, unfinished_{0};
  uint64_t number_ = 0;
  Loop loop_ = {};
  int64_t count_ = 0, tasks_of_claim_ = 1;
  std::vector<Memory> order_;
  size_t next_ = 0;
  std::atomic<const char*> begin_{nullptr};
  std::atomic<int64_t> half_{0}, pieces_{0}, fetched_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
};

// The team whose leader is this thread. The pointer is null if there is no such team, and while the
// thread runs a loop of the team.
thread_local Team* led = nullptr;

}  // namespace

void Pause::operator()() {
  constexpr int kSpins = 2000;  // about 0.1 ms
  if (++spins_ > kSpins) return std::this_thread::yield();
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool use_threads() { return !orphaned; }

void together(const std::function<void()>& body) {
  const int threads = at::get_num_threads();
  if (threads == 1 || !use_threads() || at::in_parallel_region()) return body();
  Team team;
  std::exception_ptr failure;
  Workers& workers = Workers::mine();
  workers.prepare(threads);
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t) {
    if (first > 0) {
      workers.join((int)first);
      return team.help();
    }
    led = &team;
    try {
      body();
    } catch (...) {
      failure = std::current_exception();
    }
    led = nullptr;
    team.end();
  });
  if (failure) std::rethrow_exception(failure);
}

bool leads_team() { return led != nullptr; }

bool shared_with_team(int64_t count, Loop loop) {
  Team* team = std::exchange(led, nullptr);
  if (!team) return false;
  try {
    team->run(count, loop);
  } catch (...) {
    led = team;
    throw;
  }
  led = team;
  return true;
}

void read_in_order(std::vector<Memory> order) {
  if (led) led->read_in_order(std::move(order));
}

void reads(const void* memory) {
  if (led) led->reads(memory);
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
