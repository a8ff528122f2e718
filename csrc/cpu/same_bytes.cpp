// The comparison of tensors byte by byte, which tells whether a kept result is still valid.

#include <atomic>
#include <cstring>
#include <vector>

#include "operands.h"
#include "operators.h"

namespace fastbert::cpu {

bool same_bytes(at::TensorList a, at::TensorList b) {
  TORCH_CHECK_VALUE(a.size() == b.size(), "b: got ", b.size(), " tensors, allowed: ", a.size(),
                    ", as a");
  struct Piece {
    const char *a, *b;
    size_t bytes;
  };
  constexpr size_t kPiece = 1 << 18;
  std::vector<at::Tensor> alive;
  std::vector<Piece> pieces;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].scalar_type() != b[i].scalar_type() || a[i].sizes() != b[i].sizes()) return false;
    check_device("b", b[i], a[i]);
    alive.push_back(a[i].contiguous());
    const auto* left = static_cast<const char*>(alive.back().const_data_ptr());
    alive.push_back(b[i].contiguous());
    const auto* right = static_cast<const char*>(alive.back().const_data_ptr());
    for (size_t at = 0; at < a[i].nbytes(); at += kPiece) {
      pieces.push_back({left + at, right + at, std::min(kPiece, a[i].nbytes() - at)});
    }
  }
  std::atomic<bool> same{true};
  parallel_for((int64_t)pieces.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && same.load(std::memory_order_relaxed); ++i) {
      if (std::memcmp(pieces[i].a, pieces[i].b, pieces[i].bytes) != 0) same = false;
    }
  });
  return same;
}

}  // namespace fastbert::cpu
