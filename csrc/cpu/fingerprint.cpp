#include "fingerprint.h"

#include <ATen/MapAllocator.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "operands.h"

namespace fastbert::cpu {
namespace {

constexpr int64_t kWord = sizeof(uint64_t);
constexpr int64_t kPiece = 64 / kWord;  // words of one row that a cheap look reads
constexpr int64_t kRowsAhead = 16;

// From so many rows on, reading the whole weight takes less than 5 % of its product.
constexpr int64_t kRowsThatPay = 512;

// A band of rows has checksums of its own, so that threads can share a weight.
constexpr int64_t kBandRows = 256;

std::atomic<uint64_t> epoch{1};
std::atomic<bool> writes_expected{false};

// Every fingerprint begins with these two words.
constexpr int64_t kEpoch = 0, kCalls = 1, kPrefix = 2;

// A weight as rows of bytes: a matrix with unit columns as it is, with unit rows as its transpose.
struct Bytes {
  const char* data;
  int64_t rows, row_bytes, stride_bytes;

  int64_t bands() const { return (rows + kBandRows - 1) / kBandRows; }
  int64_t words() const { return (row_bytes + kWord - 1) / kWord; }
  int64_t checksums() const { return bands() * words(); }
};

Bytes bytes_of(const at::Tensor& matrix) {
  const int64_t size = matrix.element_size();
  const bool by_rows = matrix.stride(1) == 1 || matrix.size(1) == 1;
  const int64_t across = by_rows ? 0 : 1, along = 1 - across;
  return {(const char*)matrix.const_data_ptr(), matrix.size(across), matrix.size(along) * size,
          matrix.stride(across) * size};
}

// Two dimensions, one of them without gaps.
at::Tensor matrix_of(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && (tensor.dim() == 1 || tensor.dim() == 2),
                    "tensors: got shape ", tensor.sizes(), " on ", tensor.device(),
                    ", allowed: 1 or 2 dimensions on the CPU");
  const auto matrix = tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor;
  const bool dense = matrix.stride(0) == 1 || matrix.stride(1) == 1 || matrix.size(1) == 1;
  return dense ? matrix : matrix.contiguous();
}

// Each step is a bijection of the checksum for a given word and of the word for a given checksum.
// The rotation brings the highest bits, where a product loses them, to where the next one mixes
// them.
inline uint64_t mixed(uint64_t checksum, uint64_t word) {
  const uint64_t product = (checksum ^ word) * 0x9e3779b97f4a7c15u;
  return product << 32 | product >> 32;
}

// Words [first, last) of each row of a band, one checksum per word, summed down the rows. Pieces of
// rows lie too far apart for the processor to fetch them by itself.
void add_band(const Bytes& b, int64_t band, int64_t first, int64_t last, uint64_t* checksums) {
  const int64_t whole = std::min(last, b.row_bytes / kWord);
  const int64_t end = std::min(b.rows, (band + 1) * kBandRows);
  for (int64_t row = band * kBandRows; row < end; ++row) {
    const char* from = b.data + row * b.stride_bytes;
    __builtin_prefetch(from + kRowsAhead * b.stride_bytes + first * kWord);
    for (int64_t i = first; i < whole; ++i) {
      uint64_t word;
      std::memcpy(&word, from + i * kWord, kWord);
      checksums[i - first] = mixed(checksums[i - first], word);
    }
    if (whole < last) {
      uint64_t word = 0;
      std::memcpy(&word, from + whole * kWord, b.row_bytes - whole * kWord);
      checksums[whole - first] = mixed(checksums[whole - first], word);
    }
  }
}

template <class Body>
void for_each_band(const Bytes& b, const Body& body) {
  const int64_t bytes = std::max<int64_t>(1, kBandRows * b.row_bytes);
  const int64_t grain = std::max<int64_t>(1, 4 * kGrain / bytes);
  parallel_for(b.bands(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t band = begin; band < end; ++band) body(band);
  });
}

void add_all(const Bytes& b, uint64_t* checksums) {
  for_each_band(
      b, [&](int64_t band) { add_band(b, band, 0, b.words(), checksums + band * b.words()); });
}

bool all_match(const Bytes& b, const uint64_t* checksums) {
  std::atomic<bool> same{true};
  for_each_band(b, [&](int64_t band) {
    if (!same) return;
    std::vector<uint64_t> now(b.words());
    add_band(b, band, 0, b.words(), now.data());
    if (!std::equal(now.begin(), now.end(), checksums + band * b.words())) same = false;
  });
  return same;
}

bool piece_matches(const Bytes& b, const uint64_t* checksums, uint64_t call) {
  const int64_t pieces = (b.words() + kPiece - 1) / kPiece;
  if (pieces == 0) return true;
  const int64_t first = (int64_t)(call % (uint64_t)pieces) * kPiece;
  const int64_t last = std::min(b.words(), first + kPiece);
  for (int64_t band = 0; band < b.bands(); ++band) {
    uint64_t now[kPiece] = {};
    add_band(b, band, first, last, now);
    if (!std::equal(now, now + (last - first), checksums + band * b.words() + first)) return false;
  }
  return true;
}

// All that is known of a tensor without reading its elements.
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

// Another process may write there.
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
    if (tensor.numel() > 0) add_all(bytes, made.data() + before);
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
    const bool same =
        tensor.numel() == 0 ||
        (read_whole(tensor, rows) ? all_match(bytes, next) : piece_matches(bytes, next, call));
    if (!same) return false;
    next += bytes.checksums();
  }
  return next == end;
}

void expire_fingerprints() { ++epoch; }

void expect_writes(bool expected) { writes_expected = expected; }

namespace {

at::Tensor fingerprint(at::TensorList tensors) {
  const Fingerprint made = fingerprint_of(tensors);
  auto out = at::empty({(int64_t)made.size()}, at::TensorOptions().dtype(at::kLong));
  std::memcpy(out.mutable_data_ptr(), made.data(), made.size() * kWord);
  return out;
}

bool has_fingerprint(at::TensorList tensors, const at::Tensor& fingerprint, int64_t rows) {
  TORCH_CHECK_TYPE(fingerprint.scalar_type() == at::kLong, "fingerprint: got dtype ",
                   fingerprint.scalar_type(), ", allowed: Long");
  TORCH_CHECK_VALUE(fingerprint.dim() == 1 && fingerprint.is_contiguous(),
                    "fingerprint: got shape ", fingerprint.sizes(),
                    ", allowed: what fastbert_C::fingerprint returned");
  return matches((uint64_t*)fingerprint.mutable_data_ptr(), fingerprint.numel(), tensors, rows);
}

}  // namespace

TORCH_LIBRARY_IMPL(fastbert_C, CPU, m) {
  m.impl("fingerprint", fingerprint);
  m.impl("has_fingerprint", has_fingerprint);
}

}  // namespace fastbert::cpu
