#include "packed.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <pthread.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../register.h"
#include "isa.h"
#include "operands.h"

namespace fastbert::cpu {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Everything that tells one state of a weight from another.
struct State {
  const Kernels* kernels;
  uint64_t version, fingerprint;
};

bool operator==(const State& a, const State& b) {
  return a.kernels == b.kernels && a.version == b.version && a.fingerprint == b.fingerprint;
}

// Which part of a storage, as which matrix.
struct View {
  const void* data;
  std::array<int64_t, 4> geometry;
  at::ScalarType dtype;
  Format to;
};

bool operator==(const View& a, const View& b) {
  return a.data == b.data && a.geometry == b.geometry && a.dtype == b.dtype && a.to == b.to;
}

struct Copy {
  View view;
  State state;
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

// Never destroyed: threads may still compute while the process ends.
Cache& cache() {
  static Cache* const instance = [] {
    // The child of a fork must not inherit a mutex that another thread held.
    pthread_atfork([] { cache().mutex.lock(); }, [] { cache().mutex.unlock(); },
                   [] { cache().mutex.unlock(); });
    return new Cache;
  }();
  return *instance;
}

uint64_t mixed(uint64_t hash, uint64_t bits) {
  hash = (hash ^ bits) * 0x9e3779b97f4a7c15u;
  return hash ^ hash >> 29;
}

uint64_t version_of(const at::Tensor& weight) {
  return weight.is_inference() ? 0 : (uint64_t)weight._version();
}

// Of the bits of elements spread over the whole matrix.
uint64_t fingerprint(const at::Tensor& weight) {
  constexpr int kSamples = 16;
  const int64_t rows = weight.size(0), columns = weight.size(1), size = weight.element_size();
  const char* data = (const char*)weight.const_data_ptr();
  uint64_t hash = 0;
  for (int i = 0; i < kSamples; ++i) {
    const int64_t row = rows * i / kSamples, column = columns * (i * 7 % kSamples) / kSamples;
    uint64_t bits = 0;
    std::memcpy(&bits, data + (row * weight.stride(0) + column * weight.stride(1)) * size, size);
    hash = mixed(hash, bits);
  }
  return hash;
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

// Large pages for all of it but a rest smaller than one: a few rows of activations meet weights as
// fast as these come from memory, and at 4 KiB a page every panel waits for a dozen translations.
// An undefined tensor where the system gives none.
at::Tensor in_large_pages(int64_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE), size = ((size_t)bytes + page - 1) / page * page;
  void* const reserved =
      mmap(nullptr, size + kLargePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return {};
  const size_t before = kLargePage - (size_t)reserved % kLargePage;
  char* const begin = (char*)reserved + before;
  munmap(reserved, before);
  if (before < kLargePage) munmap(begin + size, kLargePage - before);
  madvise(begin, size, MADV_HUGEPAGE);  // a wish: small pages do as well
  return at::from_blob(
      begin, {bytes}, [size](void* p) { munmap(p, size); }, at::TensorOptions().dtype(at::kByte));
}
#endif

at::Tensor bytes_for(const at::Tensor& weight, Format to, const Kernels& k) {
  return at::empty({k.packed_bytes(to, weight.size(0), weight.size(1))},
                   at::TensorOptions().dtype(at::kByte));
}

// For a copy that is kept.
at::Tensor lasting_bytes_for(const at::Tensor& weight, Format to, const Kernels& k) {
#if defined(__linux__)
  const int64_t bytes = k.packed_bytes(to, weight.size(0), weight.size(1));
  if (bytes >= (int64_t)kLargePage) {
    if (auto large = in_large_pages(bytes); large.defined()) return large;
  }
#endif
  return bytes_for(weight, to, k);
}

// The copy of one view, perhaps still empty. A storage that many weights share has as many; but
// views that overlap, a window that moves over a buffer, must not pile up copies.
Copy& copy_of(Copies& owner, const View& view, const at::Tensor& weight, const Kernels& k) {
  constexpr int64_t kSlack = 1 << 20;
  auto& copies = owner.copies;
  int64_t total = k.packed_bytes(view.to, view.geometry[0], view.geometry[1]);
  for (Copy& copy : copies) {
    if (copy.view == view) return copy;
    total += copy.bytes.defined() ? copy.bytes.numel() : 0;
  }
  if (total > 2 * (int64_t)weight.storage().nbytes() + kSlack) copies.clear();
  return copies.emplace_back(Copy{view, {}, {}});
}

}  // namespace

at::Tensor packed(const at::Tensor& weight, Format to) {
  const Kernels& k = kernels();
  const auto* impl = weight.storage().unsafeGetStorageImpl();
  const View view = {weight.const_data_ptr(),
                     {weight.size(0), weight.size(1), weight.stride(0), weight.stride(1)},
                     weight.scalar_type(),
                     to};
  const State state = {&k, version_of(weight), fingerprint(weight)};
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  if (++c.lookups % 64 == 0) forget_freed(c);
  auto found = c.weights.find(impl);
  if (found != c.weights.end() && found->second.storage.expired()) {
    c.weights.erase(found);
    found = c.weights.end();
  }
  if (found == c.weights.end()) {
    forget_freed(c);
    const auto weak = weight.storage().getWeakStorageImpl();
    found = c.weights.emplace(impl, Copies{weak, {}}).first;
  }
  Copy& copy = copy_of(found->second, view, weight, k);
  if (copy.bytes.defined() && copy.state == state) return copy.bytes;
  // A copy that a product on another thread still reads is left to it.
  const bool own = copy.bytes.defined() && copy.bytes.use_count() == 1;
  std::atomic_thread_fence(std::memory_order_acquire);
  if (!own || copy.state.kernels != &k) {
    copy.bytes = at::Tensor();
    copy.bytes = lasting_bytes_for(weight, to, k);
  }
  copy.state = {};  // until it is packed
  pack_into(weight, to, k, copy.bytes.mutable_data_ptr());
  copy.state = state;
  return copy.bytes;
}

at::Tensor pack_once(const at::Tensor& weight, Format to) {
  const Kernels& k = kernels();
  auto bytes = bytes_for(weight, to, k);
  pack_into(weight, to, k, bytes.mutable_data_ptr());
  return bytes;
}

int64_t state_of(at::TensorList tensors) {
  uint64_t hash = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor matrix = tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor;
    hash = mixed(hash, (uint64_t)matrix.const_data_ptr());
    hash = mixed(hash, (uint64_t)tensor.scalar_type());
    hash = mixed(hash, version_of(tensor));
    hash = mixed(hash, (uint64_t)matrix.size(0) << 32 | (uint64_t)matrix.size(1));
    hash = mixed(hash, matrix.numel() ? fingerprint(matrix) : 0);
  }
  return (int64_t)hash;
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
}

TORCH_LIBRARY_IMPL(fastbert_C, CPU, m) { implement<state_of>(m, "state_of"); }

}  // namespace fastbert::cpu
