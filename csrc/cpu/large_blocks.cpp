#include "large_blocks.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <mutex>

namespace fastbert::cpu {
namespace {

constexpr size_t kSmallPage = 4096;

// Returns the size of the mapping for `bytes` bytes. Sizes have eight steps between a power of two
// and the next one, so a block serves all tensors that are at most an eighth smaller.
size_t mapping_of(size_t bytes) {
  size_t power = kLargeBlock;
  while (power <= bytes / 2) power *= 2;
  const size_t step = std::max(power / 8, kSmallPage);
  return (bytes + step - 1) / step * step;
}

// Maps memory that begins at a multiple of a huge page and asks for huge pages where `bytes` bytes
// fill them. Returns null if the system has no memory.
void* map(size_t size, size_t bytes) {
  const size_t whole = size + kLargeBlock;
  void* mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const auto from = reinterpret_cast<uintptr_t>(mapped);
  const auto begin = (from + kLargeBlock - 1) / kLargeBlock * kLargeBlock;
  if (begin > from) munmap(mapped, begin - from);
  if (from + whole > begin + size) {
    munmap(reinterpret_cast<void*>(begin + size), from + whole - begin - size);
  }
  void* memory = reinterpret_cast<void*>(begin);
  madvise(memory, bytes / kLargeBlock * kLargeBlock, MADV_HUGEPAGE);
  return memory;
}

class Keeper {
 public:
  // A fork waits until no other thread changes the keeper, so the child's copy is whole.
  Keeper() {
    pthread_atfork([] { keeper().mutex_.lock(); }, [] { keeper().mutex_.unlock(); },
                   [] { keeper().mutex_.unlock(); });
  }

  // The keeper is never destroyed, because a tensor may be freed when the process ends.
  static Keeper& keeper() {
    static Keeper& made = *new Keeper;
    return made;
  }

  void* take(size_t bytes) {
    const size_t size = mapping_of(bytes);
    {
      const std::lock_guard lock(mutex_);
      in_use_ += size;
      most_ = std::max(most_, in_use_);
      for (auto block = kept_.end(); block != kept_.begin();) {
        if ((--block)->size != size) continue;
        void* memory = block->memory;
        kept_bytes_ -= size;
        kept_.erase(block);
        return memory;
      }
      return_surplus();
    }
    void* memory = map(size, bytes);
    if (!memory) {
      const std::lock_guard lock(mutex_);
      in_use_ -= size;
    }
    return memory;
  }

  void give(void* memory, size_t bytes) {
    const size_t size = mapping_of(bytes);
    madvise(memory, size, MADV_FREE);
    const std::lock_guard lock(mutex_);
    in_use_ -= size;
    kept_bytes_ += size;
    kept_.push_back({memory, size});
    return_surplus();
  }

 private:
  struct Kept {
    void* memory;
    size_t size;
  };

  void return_surplus() {
    while (kept_bytes_ + in_use_ > most_) {
      munmap(kept_.front().memory, kept_.front().size);
      kept_bytes_ -= kept_.front().size;
      kept_.pop_front();
    }
  }

  std::mutex mutex_;
  std::list<Kept> kept_;  // The block that has been free for the longest time comes first.
  size_t kept_bytes_ = 0;
  size_t in_use_ = 0;
  size_t most_ = 0;  // largest value that in_use_ had
};

}  // namespace

#if defined(__SANITIZE_ADDRESS__)
// AddressSanitizer finds a wrong access only in memory of the C library.
void* take_large_block(size_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); }

void give_large_block(void* memory, size_t) { std::free(memory); }
#else
void* take_large_block(size_t bytes) { return Keeper::keeper().take(bytes); }

void give_large_block(void* memory, size_t bytes) { Keeper::keeper().give(memory, bytes); }
#endif

}  // namespace fastbert::cpu
