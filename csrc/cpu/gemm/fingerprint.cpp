#include "fingerprint.h"

#include <ATen/MapAllocator.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "../isa/dispatch.h"
#include "../operands.h"
#include "../operators.h"
#include "../tensors.h"

namespace fastbert::cpu {
namespace {

constexpr int64_t kWord = sizeof(uint32_t);
constexpr int64_t kPiece = 64 / kWord;  // words of a row that one cheap check reads

// From this many rows on, reading the whole weight takes less than 5 % of the product's time.
constexpr int64_t kRowsThatPay = 1024;

// Each band of rows has checksums of its own, so that threads can share a weight.
constexpr int64_t kBandRows = 128;

std::atomic<uint64_t> epoch{1};
std::atomic<bool> writes_expected{false};

// Every fingerprint begins with two words, the epoch and the number of calls.
constexpr int64_t kEpoch = 0, kCalls = 1, kPrefix = 2;

// A weight as rows of bytes. A matrix with contiguous rows is taken as it is, and a matrix with
// contiguous columns as its transpose.
struct Bytes {
  const char* data;
  int64_t rows, row_bytes, stride_bytes;

  int64_t bands() const { return (rows + kBandRows - 1) / kBandRows; }
  int64_t words() const { return (row_bytes + kWord - 1) / kWord; }
  // The checksums of all bands, in 64-bit words of the fingerprint.
  int64_t checksums() const { return (bands() * words() + 1) / 2; }
};

Bytes bytes_of(const at::Tensor& matrix) {
  const int64_t size = matrix.element_size();
  const bool by_rows = matrix.stride(1) == 1 || matrix.size(1) == 1;
  const int64_t across = by_rows ? 0 : 1, along = 1 - across;
  return {(const char*)matrix.const_data_ptr(), matrix.size(across), matrix.size(along) * size,
          matrix.stride(across) * size};
}

// Returns the tensor as a matrix whose rows or columns are contiguous.
at::Tensor matrix_of(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && (tensor.dim() == 1 || tensor.dim() == 2),
                    "tensors: got shape ", tensor.sizes(), " on ", tensor.device(),
                    ", allowed: 1 or 2 dimensions on the CPU");
  const auto matrix = tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor;
  const bool dense = matrix.stride(0) == 1 || matrix.stride(1) == 1 || matrix.size(1) == 1;
  return dense ? matrix : matrix.contiguous();
}

void add_band(const Bytes& b, int64_t band, int64_t first, int64_t last, uint32_t* sums) {
  const int64_t begin = band * kBandRows, rows = std::min(b.rows - begin, kBandRows);
  kernels().checksums(
      {b.data + begin * b.stride_bytes, rows, b.stride_bytes, b.row_bytes, first, last, sums});
}

template <class Body>
void for_each_band(const Bytes& b, int64_t row_bytes, const Body& body) {
  const int64_t bytes = std::max<int64_t>(1, kBandRows * row_bytes);
  const int64_t grain = std::max<int64_t>(1, 2 * kGrain / bytes);
  parallel_for(b.bands(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t band = begin; band < end; ++band) body(band);
  });
}

void add_all(const Bytes& b, uint32_t* sums) {
  for_each_band(b, b.row_bytes,
                [&](int64_t band) { add_band(b, band, 0, b.words(), sums + band * b.words()); });
}

// Returns whether words [first, last) of every row still have their checksums.
bool same_words(const Bytes& b, const uint32_t* sums, int64_t first, int64_t last) {
  std::atomic<bool> same{true};
  for_each_band(b, (last - first) * kWord, [&](int64_t band) {
    if (!same) return;
    std::vector<uint32_t> now(last - first);
    add_band(b, band, first, last, now.data());
    if (!std::equal(now.begin(), now.end(), sums + band * b.words() + first)) same = false;
  });
  return same;
}

bool same_piece(const Bytes& b, const uint32_t* sums, uint64_t call) {
  const uint64_t pieces = (b.words() + kPiece - 1) / kPiece;
  const int64_t first = (int64_t)(call % pieces) * kPiece;
  return same_words(b, sums, first, std::min(b.words(), first + kPiece));
}

// A tensor's identity holds all facts that need none of its elements.
constexpr size_t kIdentity = 8;

std::array<uint64_t, kIdentity> identity_of(const at::Tensor& tensor, const at::Tensor& matrix) {
  return {(uint64_t)tensor.storage().unsafeGetStorageImpl(),
          (uint64_t)tensor.const_data_ptr(),
          (uint64_t)tensor.scalar_type(),
          tensor.is_inference() ? ~(uint64_t)0 : (uint64_t)tensor._version(),
          (uint64_t)matrix.size(0),
          (uint64_t)matrix.size(1),
          (uint64_t)matrix.stride(0),
          (uint64_t)matrix.stride(1)};
}

// Returns whether another process may write to the memory of `tensor`.
bool in_shared_memory(const at::Tensor& tensor) {
  const auto* mapped = at::MapAllocator::fromDataPtr(tensor.storage().data_ptr());
  constexpr int kShared = at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM;
  return mapped != nullptr && (mapped->flags() & kShared) != 0;
}

bool read_whole(const at::Tensor& tensor, int64_t rows) {
  return rows >= kRowsThatPay || writes_expected || tensor.is_inference() ||
         in_shared_memory(tensor);
}

}  // namespace

Fingerprint fingerprint_of(at::TensorList tensors) {
  Fingerprint made = {epoch.load(), 0};
  for (const at::Tensor& tensor : tensors) {
    const auto matrix = matrix_of(tensor);
    const auto identity = identity_of(tensor, matrix);
    made.insert(made.end(), identity.begin(), identity.end());
    const Bytes bytes = bytes_of(matrix);
    const size_t before = made.size();
    made.resize(before + bytes.checksums());
    if (tensor.numel() > 0) add_all(bytes, (uint32_t*)(made.data() + before));
  }
  return made;
}

bool matches(uint64_t* fingerprint, int64_t size, at::TensorList tensors, int64_t rows) {
  if (size < kPrefix || fingerprint[kEpoch] != epoch.load()) return false;
  const uint64_t call = __atomic_fetch_add(&fingerprint[kCalls], 1, __ATOMIC_RELAXED);
  const uint64_t *next = fingerprint + kPrefix, *const end = fingerprint + size;
  for (const at::Tensor& tensor : tensors) {
    const auto matrix = matrix_of(tensor);
    const auto identity = identity_of(tensor, matrix);
    if (end - next < (int64_t)kIdentity) return false;
    if (!std::equal(identity.begin(), identity.end(), next)) return false;
    next += kIdentity;
    const Bytes bytes = bytes_of(matrix);
    if (end - next < bytes.checksums()) return false;
    const auto* sums = (const uint32_t*)next;
    if (tensor.numel() > 0 && !(read_whole(tensor, rows) ? same_words(bytes, sums, 0, bytes.words())
                                                         : same_piece(bytes, sums, call))) {
      return false;
    }
    next += bytes.checksums();
  }
  return next == end;
}

void expire_fingerprints() { ++epoch; }

void expect_writes(bool expected) { writes_expected = expected; }

at::Tensor fingerprint(at::TensorList tensors) {
  const Fingerprint made = fingerprint_of(tensors);
  auto out = empty({(int64_t)made.size()}, at::TensorOptions().dtype(at::kLong));
  std::memcpy(out.mutable_data_ptr(), made.data(), made.size() * sizeof(uint64_t));
  return out;
}

bool has_fingerprint(at::TensorList tensors, const at::Tensor& fingerprint, int64_t rows) {
  TORCH_CHECK_TYPE(fingerprint.scalar_type() == at::kLong, "fingerprint: got dtype ",
                   fingerprint.scalar_type(), ", allowed: Long");
  TORCH_CHECK_VALUE(fingerprint.dim() == 1 && fingerprint.is_contiguous(),
                    "fingerprint: got shape ", fingerprint.sizes(),
                    ", allowed: a result of fastbert_C::fingerprint");
  return matches((uint64_t*)fingerprint.mutable_data_ptr(), fingerprint.numel(), tensors, rows);
}

}  // namespace fastbert::cpu
