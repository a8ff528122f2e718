#include "packed_weights.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <pthread.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../isa/dispatch.h"
#include "../operands.h"
#include "../tensors.h"
#include "fingerprint.h"

namespace fastbert::cpu {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// A part of a storage, seen as a matrix.
struct View {
  const void* data;
  std::array<int64_t, 4> geometry;
  at::ScalarType dtype;
  Format to;
};

bool operator==(const View& a, const View& b) {
  return a.data == b.data && a.geometry == b.geometry && a.dtype == b.dtype && a.to == b.to;
}

// `fingerprint` and `bytes` are both set, or both empty while the copy is being made.
struct Copy {
  View view;
  const Kernels* kernels;
  std::shared_ptr<Fingerprint> fingerprint;
  at::Tensor bytes;
};

struct Copies {
  WeakStorage storage;
  std::vector<Copy> copies;
};

struct Cache {
  std::mutex mutex;
  uint64_t lookups = 0;
  std::unordered_map<const c10::StorageImpl*, Copies> weights;
};

// The cache is never destroyed, because threads may still compute while the process ends.
Cache& cache() {
  static Cache* const instance = [] {
    // The child of a fork must not inherit a mutex that another thread held.
    pthread_atfork([] { cache().mutex.lock(); }, [] { cache().mutex.unlock(); },
                   [] { cache().mutex.unlock(); });
    return new Cache;
  }();
  return *instance;
}

void forget_freed(Cache& c) {
  for (auto it = c.weights.begin(); it != c.weights.end();) {
    it = it->second.storage.expired() ? c.weights.erase(it) : std::next(it);
  }
}

void pack_into(const at::Tensor& weight, Format to, const Kernels& k, void* packed) {
  const Packing packing = {format_of(weight),       to,
                           weight.const_data_ptr(), weight.stride(0),
                           weight.stride(1),        weight.size(0),
                           weight.size(1),          packed};
  const int64_t units = k.pack_units(packing.n);
  const int64_t grain = std::max<int64_t>(1, kGrain * units / std::max<int64_t>(1, weight.numel()));
  parallel_for(units, grain, [&](int64_t begin, int64_t end) { k.pack(packing, begin, end); });
}

#if defined(__linux__)
constexpr size_t kLargePage = 2 << 20;

// Allocates large pages for all bytes but a rest smaller than one page. A product with few rows
// reads weights as fast as they come from memory, and with pages of 4 KiB every panel waits for a
// dozen address translations. Returns an undefined tensor if the system gives no memory.
at::Tensor in_large_pages(int64_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE), size = ((size_t)bytes + page - 1) / page * page;
  void* const reserved =
      mmap(nullptr, size + kLargePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return {};
  const size_t before = kLargePage - (size_t)reserved % kLargePage;
  char* const begin = (char*)reserved + before;
  munmap(reserved, before);
  if (before < kLargePage) munmap(begin + size, kLargePage - before);
  madvise(begin, size, MADV_HUGEPAGE);  // a request: small pages work as well
  return from_memory(begin, bytes, [size](void* p) { munmap(p, size); });
}
#endif

at::Tensor bytes_for(const at::Tensor& weight, Format to, const Kernels& k) {
  return empty({k.packed_bytes(to, weight.size(0), weight.size(1))},
               at::TensorOptions().dtype(at::kByte));
}

// Allocates memory for a copy that is kept.
at::Tensor lasting_bytes_for(const at::Tensor& weight, Format to, const Kernels& k) {
#if defined(__linux__)
  const int64_t bytes = k.packed_bytes(to, weight.size(0), weight.size(1));
  if (bytes >= (int64_t)kLargePage) {
    if (auto large = in_large_pages(bytes); large.defined()) return large;
  }
#endif
  return bytes_for(weight, to, k);
}

// Returns the copy of one view, which may still be empty; the caller holds the mutex. A storage
// that many weights share has as many copies. Copies of overlapping views, such as a window that
// moves over a buffer, must not pile up.
Copy& copy_of(Cache& c, const View& view, const at::Tensor& weight, const Kernels& k) {
  constexpr int64_t kSlack = 1 << 20;
  if (++c.lookups % 64 == 0) forget_freed(c);
  const auto* impl = weight.storage().unsafeGetStorageImpl();
  auto found = c.weights.find(impl);
  if (found == c.weights.end() || found->second.storage.expired()) {
    forget_freed(c);
    const auto weak = weight.storage().getWeakStorageImpl();
    found = c.weights.emplace(impl, Copies{weak, {}}).first;
  }
  auto& copies = found->second.copies;
  int64_t total = k.packed_bytes(view.to, view.geometry[0], view.geometry[1]);
  for (Copy& copy : copies) {
    if (copy.view == view) return copy;
    total += copy.bytes.defined() ? copy.bytes.numel() : 0;
  }
  if (total > 2 * (int64_t)weight.storage().nbytes() + kSlack) copies.clear();
  return copies.emplace_back(Copy{view, &k, nullptr, {}});
}

// A copy outside of the cache. The cache's mutex is not held while the copy is compared or made.
struct Found {
  std::shared_ptr<Fingerprint> fingerprint;
  at::Tensor bytes;
};

Found look_up(const View& view, const at::Tensor& weight, const Kernels& k) {
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  const Copy& copy = copy_of(c, view, weight, k);
  if (copy.kernels != &k) return {};
  return {copy.fingerprint, copy.bytes};
}

// Takes the memory of a copy out of the cache. If a product on another thread still reads the copy,
// that product keeps the memory, and the result is an undefined tensor.
at::Tensor take_memory(const View& view, const at::Tensor& weight, const Kernels& k) {
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  Copy& copy = copy_of(c, view, weight, k);
  at::Tensor bytes = std::move(copy.bytes);
  const bool own = copy.kernels == &k && bytes.defined() && bytes.use_count() == 1;
  std::atomic_thread_fence(std::memory_order_acquire);
  copy.kernels = &k;
  copy.fingerprint.reset();
  copy.bytes = at::Tensor();
  return own ? bytes : at::Tensor();
}

void keep(const View& view, const at::Tensor& weight, const Kernels& k, const Found& made) {
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  Copy& copy = copy_of(c, view, weight, k);
  copy = {view, &k, made.fingerprint, made.bytes};
}

}  // namespace

at::Tensor packed(const at::Tensor& weight, Format to, int64_t rows) {
  const Kernels& k = kernels();
  const View view = {weight.const_data_ptr(),
                     {weight.size(0), weight.size(1), weight.stride(0), weight.stride(1)},
                     weight.scalar_type(),
                     to};
  {
    const Found kept = look_up(view, weight, k);
    if (kept.fingerprint &&
        matches(kept.fingerprint->data(), kept.fingerprint->size(), weight, rows)) {
      return kept.bytes;
    }
  }
  Found made = {nullptr, take_memory(view, weight, k)};
  if (!made.bytes.defined()) made.bytes = lasting_bytes_for(weight, to, k);
  // The fingerprint is taken first. After a write between the two steps, the next call sees that
  // the fingerprint does not match.
  made.fingerprint = std::make_shared<Fingerprint>(fingerprint_of(weight));
  pack_into(weight, to, k, made.bytes.mutable_data_ptr());
  keep(view, weight, k, made);
  return made.bytes;
}

at::Tensor pack_once(const at::Tensor& weight, Format to) {
  const Kernels& k = kernels();
  auto bytes = bytes_for(weight, to, k);
  pack_into(weight, to, k, bytes.mutable_data_ptr());
  return bytes;
}

int64_t packed_total() {
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  forget_freed(c);
  int64_t total = 0;
  for (const auto& [impl, entry] : c.weights) {
    for (const Copy& copy : entry.copies) total += copy.bytes.defined() ? copy.bytes.numel() : 0;
  }
  return total;
}

void forget_packed() {
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  c.weights.clear();
  expire_fingerprints();
}

}  // namespace fastbert::cpu
