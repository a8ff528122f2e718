// Pages of 2 MiB for the memory of weights.
//
// A product with few rows reads each weight once per call. With pages of 4 KiB, this reading is
// limited by the speed at which the processor translates addresses. With pages of 2 MiB, a call of
// an encoder with 32 tokens takes 10 % less time. The operating system moves the memory to such
// pages without changing an address or a value.
//
// Moving the weights of BERT-base takes 0.4 s, as long as tens of calls, so a thread of its own
// moves them while the calls run. The thread needs no tensor to stay alive: the system refuses an
// address that is no longer mapped, and moving memory that now belongs to something else changes
// no value either.

#if defined(__linux__)
#include <pthread.h>
#include <sys/mman.h>
#endif

#include <atomic>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>

#include "operators.h"

namespace fastbert::cpu {

#if defined(__linux__)
namespace {

constexpr uintptr_t kPage = uintptr_t{2} << 20;
constexpr int kCollapse = 25;  // MADV_COLLAPSE since Linux 6.1; older headers do not define it

// After a fork, parent and child share memory, and moving the memory would copy it. So a process
// that was created by a fork moves nothing, and its parent moves no page that was waiting.
bool forked = false;
std::atomic<int> forks{0};
[[maybe_unused]] const int registered =
    pthread_atfork([] { ++forks; }, nullptr, [] { forked = true; });

// Returns whether the system settings allow programs to use huge pages.
bool allowed() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string text;
  return std::getline(file, text) && text.find("[never]") == std::string::npos;
}

// The numbers of the pages that wait to be moved, and the thread that moves them.
class Mover {
 public:
  void add(const std::set<uintptr_t>& pages) {
    const std::lock_guard lock(mutex_);
    forget_before_fork();
    waiting_.insert(pages.begin(), pages.end());
    if (running_ || waiting_.empty()) return;
    try {
      std::thread thread([this] { run(); });
      pthread_setname_np(thread.native_handle(), "fastbert-pages");
      thread.detach();
      running_ = true;
    } catch (const std::system_error&) {
      waiting_.clear();  // The process may have no further thread, so the pages stay as they are.
    }
  }

 private:
  void run() {
    for (uintptr_t page; take(page);) {
      // A page at the end of a mapping, or of a file, cannot be moved and stays as it is.
      madvise(reinterpret_cast<void*>(page * kPage), kPage, kCollapse);
    }
  }

  // Takes a page out of those that wait. Returns false, and ends the thread, if there is none.
  bool take(uintptr_t& page) {
    const std::lock_guard lock(mutex_);
    forget_before_fork();
    running_ = !waiting_.empty();
    if (running_) page = waiting_.extract(waiting_.begin()).value();
    return running_;
  }

  void forget_before_fork() {
    if (forks != seen_) waiting_.clear(), seen_ = forks;
  }

  std::mutex mutex_;
  std::set<uintptr_t> waiting_;
  int seen_ = forks;  // number of forks when the waiting pages were added
  bool running_ = false;
};

// The mover is never destroyed, because its thread may still run when the process ends.
Mover& mover() {
  static Mover& made = *new Mover;
  return made;
}

}  // namespace

void use_huge_pages(at::TensorList weights) {
  static const bool is_allowed = allowed();
  if (!is_allowed || forked) return;
  std::set<uintptr_t> pages;
  for (const at::Tensor& weight : weights) {
    if (!weight.device().is_cpu() || weight.nbytes() == 0) continue;
    const auto begin = reinterpret_cast<uintptr_t>(weight.const_data_ptr());
    for (uintptr_t page = begin / kPage; page <= (begin + weight.nbytes() - 1) / kPage; ++page) {
      pages.insert(page);
    }
  }
  mover().add(pages);
}
#else
void use_huge_pages(at::TensorList) {}
#endif

}  // namespace fastbert::cpu
