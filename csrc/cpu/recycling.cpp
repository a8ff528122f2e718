#include "recycling.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "large_blocks.h"

namespace fastbert::cpu {
namespace {

// The size in bytes of the header of a block. It is a whole cache line, so the elements that follow
// begin at a multiple of the cache line.
constexpr size_t kHeader = 64;
// The smallest size in bytes of a tensor whose memory is recycled. The C library itself keeps freed
// memory of smaller sizes for reuse.
constexpr size_t kLeast = size_t{1} << 16;

thread_local Recycling* active = nullptr;

size_t size_with_header(size_t bytes) {
  return (kHeader + bytes + kHeader - 1) / kHeader * kHeader;
}

Block* new_block(size_t bytes) {
  const size_t size = size_with_header(bytes);
  void* memory = size < kLargeBlock ? std::aligned_alloc(kHeader, size) : take_large_block(size);
  TORCH_CHECK(memory, "can't allocate memory for a tensor of ", bytes, " bytes");
  return new (memory) Block{bytes};
}

void free_block(Block* block) {
  const size_t size = size_with_header(block->bytes);
  if (size < kLargeBlock) {
    std::free(block);
  } else {
    give_large_block(block, size);
  }
}

void release(void* block) {
  if (active) {
    active->give((Block*)block);
  } else {
    free_block((Block*)block);
  }
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Block* block = active ? active->take(bytes) : nullptr;
    if (!block) block = new_block(bytes);
    return {(char*)block + kHeader, block, &release, c10::Device(c10::DeviceType::CPU)};
  }

  // Returns null, because the address of the elements is not the address that has to be freed.
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};

}  // namespace

Recycling::Recycling() : outermost_(active == nullptr) {
  if (outermost_) active = this;
}

Recycling::~Recycling() {
  if (!outermost_) return;
  active = nullptr;
  for (Block* block : free_) free_block(block);
}

c10::Allocator* Recycling::allocator(size_t bytes) {
  static Allocator allocator;
  return bytes >= (active ? kLeast : kLargeBlock) ? &allocator : nullptr;
}

Block* Recycling::take(size_t bytes) {
  size_t best = free_.size();
  for (size_t i = 0; i < free_.size(); ++i) {
    const size_t size = free_[i]->bytes;
    if (size < bytes || size - bytes > bytes / 4) continue;
    if (best == free_.size() || size < free_[best]->bytes) best = i;
  }
  if (best == free_.size()) return nullptr;
  std::swap(free_[best], free_.back());
  Block* block = free_.back();
  free_.pop_back();
  return block;
}

}  // namespace fastbert::cpu
