#include "operands.h"

#include <ATen/MemoryOverlap.h>

#include <limits>

namespace fastbert::cpu {
namespace {

ConstPairs pairs_of(const char* name, const at::Tensor& t, const Attention& a) {
  const int64_t shape[] = {a.batch, a.heads, a.max_q, a.max_k};
  TORCH_CHECK_VALUE(t.dim() == 4, name, ": got shape ", t.sizes(), ", allowed: 4 dimensions");
  int64_t strides[4];
  for (int i = 0; i < 4; ++i) {
    TORCH_CHECK_VALUE(t.size(i) == 1 || t.size(i) == shape[i], name, ": got shape ", t.sizes(),
                      ", allowed: broadcastable to ", at::IntArrayRef(shape));
    strides[i] = t.size(i) == 1 ? 0 : t.stride(i);
  }
  return {t.const_data_ptr(), format_of(t), strides[0], strides[1], strides[2], strides[3]};
}

int64_t window_side(const char* name, int64_t side) {
  TORCH_CHECK_VALUE(side >= -1, name, ": got ", side,
                    ", allowed: at least -1, where -1 sets no limit");
  return std::min<int64_t>(side, std::numeric_limits<int32_t>::max());
}

}  // namespace

void check_no_overlap(const char* name, const at::Tensor& written) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(written) != at::MemOverlap::Yes, name,
                    ": got strides ", written.strides(),
                    ", allowed: strides with which no elements share memory");
}

at::Tensor checked_lengths(const char* name, const at::Tensor& cu_seqlens, int64_t rows,
                           const char* longest_name, int64_t longest) {
  TORCH_CHECK_TYPE(cu_seqlens.scalar_type() == at::kInt, name, ": got dtype ",
                   cu_seqlens.scalar_type(), ", allowed: Int");
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1, name, ": got shape ",
                    cu_seqlens.sizes(), ", allowed: (B + 1,)");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(longest >= 0 && longest <= kMost, longest_name, ": got ", longest,
                    ", allowed: 0 to ", kMost);
  const auto copy = private_copy(cu_seqlens, at::kInt);
  const auto* lengths = copy.const_data_ptr<int32_t>();
  const int64_t batch = cu_seqlens.size(0) - 1;
  TORCH_CHECK_VALUE(lengths[0] == 0, name, ": got ", lengths[0],
                    " as the first number, allowed: 0");
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = (int64_t)lengths[b + 1] - lengths[b];
    TORCH_CHECK_VALUE(length >= 0, name, ": got ", lengths[b + 1], " after ", lengths[b],
                      ", allowed: numbers that never fall");
    TORCH_CHECK_VALUE(length <= longest, longest_name, ": got ", longest, ", allowed: at least ",
                      length, ", the length of a sequence");
  }
  TORCH_CHECK_VALUE(lengths[batch] <= rows, name, ": got ", lengths[batch],
                    " as the last number, allowed: at most ", rows,
                    ", the number of rows of the tensor");
  return copy;
}

AttentionProblem::AttentionProblem(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const AttentionArguments& arguments)
    : kernel{} {
  check_dtype("q", q);
  const bool packed = arguments.cu_seqlens_q.has_value();
  TORCH_CHECK_VALUE(arguments.cu_seqlens_k.has_value() == packed, "cu_seqlens_k: got ",
                    packed ? "None" : "a tensor", " with cu_seqlens_q ", packed ? "given" : "None",
                    ", allowed: both or neither");
  TORCH_CHECK_VALUE(q.dim() == (packed ? 3 : 4), "q: got shape ", q.sizes(),
                    ", allowed: ", packed ? "(T, H, D)" : "(B, H, L, D)");
  TORCH_CHECK_VALUE(q.size(-1) >= 1, "q: got shape ", q.sizes(), ", allowed: D >= 1");
  TORCH_CHECK_VALUE(k.dim() == q.dim(), "k: got shape ", k.sizes(), ", allowed: ", q.dim(),
                    " dimensions, as q");
  check_same("v", v, k);
  auto like_q = k.sizes().vec();
  like_q[packed ? 0 : 2] = q.size(packed ? 0 : 2);
  TORCH_CHECK_VALUE(q.sizes() == at::IntArrayRef(like_q), "k: got shape ", k.sizes(),
                    ", allowed: the shape of q, ", q.sizes(), ", except for the length");
  check_dtype_of("k", k, q.scalar_type(), "q");
  check_dropout(arguments.dropout_p, arguments.seed, q);
  q_rows = q.size(packed ? 0 : 2);
  k_rows = k.size(packed ? 0 : 2);
  kernel.format = format_of(q);
  kernel.heads = q.size(1);
  kernel.head_dim = q.size(-1);
  kernel.batch = q.size(0);
  kernel.max_q = packed ? arguments.max_seqlen_q : q_rows;
  kernel.max_k = packed ? arguments.max_seqlen_k : k_rows;
  if (packed) {
    alive.push_back(checked_lengths("cu_seqlens_q", *arguments.cu_seqlens_q, q_rows, "max_seqlen_q",
                                    kernel.max_q));
    kernel.cu_q = alive.back().const_data_ptr<int32_t>();
    alive.push_back(checked_lengths("cu_seqlens_k", *arguments.cu_seqlens_k, k_rows, "max_seqlen_k",
                                    kernel.max_k));
    kernel.cu_k = alive.back().const_data_ptr<int32_t>();
    kernel.batch = arguments.cu_seqlens_q->size(0) - 1;
    check_shape("cu_seqlens_k", alive.back(), {kernel.batch + 1});
  }
  kernel.q = read(q);
  kernel.k = read(k);
  kernel.v = read(v);
  kernel.lse_batch = packed ? 0 : kernel.heads * q_rows;
  kernel.lse_head = q_rows;
  if (arguments.mask) {
    TORCH_CHECK_TYPE(arguments.mask->scalar_type() == at::kBool, "mask: got dtype ",
                     arguments.mask->scalar_type(), ", allowed: Bool");
    kernel.mask = pairs_of("mask", *arguments.mask, kernel);
  }
  if (arguments.bias) {
    const bool narrow = arguments.bias->scalar_type() == at::kDouble;
    alive.push_back(narrow ? arguments.bias->to(at::kFloat) : *arguments.bias);
    check_dtype("bias", alive.back());
    kernel.bias = pairs_of("bias", alive.back(), kernel);
  }
  kernel.left = window_side("left", arguments.left);
  kernel.right = window_side("right", arguments.right);
  kernel.dropout = dropout_of(arguments.dropout_p, arguments.seed);
  kernel.scale = (float)arguments.scale;
}

int64_t AttentionProblem::q_length(int64_t sequence) const {
  return packed() ? kernel.cu_q[sequence + 1] - kernel.cu_q[sequence] : kernel.max_q;
}

int64_t AttentionProblem::k_length(int64_t sequence) const {
  return packed() ? kernel.cu_k[sequence + 1] - kernel.cu_k[sequence] : kernel.max_k;
}

int64_t AttentionProblem::pairs(int64_t sequence) const {
  const int64_t queries = q_length(sequence), keys = k_length(sequence);
  const int64_t before = kernel.left < 0 ? keys : std::min(keys, kernel.left + 1);
  const int64_t behind = kernel.right < 0 ? keys : std::min(keys, kernel.right + 1);
  return queries * std::min(keys, (before + behind + 1) / 2 + kAttentionKeys);
}

ConstRows AttentionProblem::read(const at::Tensor& x) {
  const bool readable = x.size(-1) == 1 || x.stride(-1) == 1;
  alive.push_back(readable ? x : x.contiguous());
  const at::Tensor& t = alive.back();
  return packed() ? ConstRows{t.const_data_ptr(), 0, t.stride(1), t.stride(0)}
                  : ConstRows{t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

Rows AttentionProblem::write(const char* name, const at::Tensor& x) const {
  TORCH_CHECK_VALUE(x.size(-1) == 1 || x.stride(-1) == 1, name, ": got strides ", x.strides(),
                    ", allowed: a contiguous last dimension");
  check_no_overlap(name, x);
  return packed() ? Rows{x.mutable_data_ptr(), 0, x.stride(1), x.stride(0)}
                  : Rows{x.mutable_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

at::Tensor AttentionProblem::empty_result(const at::Tensor& like) const {
  if (packed()) return empty(like.sizes(), like.options());
  return empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options())
      .transpose(1, 2);
}

at::Tensor AttentionProblem::empty_statistic(const at::Tensor& like) const {
  const auto options = like.options().dtype(at::kFloat);
  return packed() ? empty({kernel.heads, q_rows}, options)
                  : empty({kernel.batch, kernel.heads, q_rows}, options);
}

at::Tensor HeadsOfRows::part(const at::Tensor& rows, int64_t number) const {
  const int64_t width = rows.stride(0), first = number * heads * head_dim;
  if (packed) {
    return strided(rows, {rows.size(0), heads, head_dim}, {width, head_dim, 1}, first);
  }
  return strided(rows, {batch, heads, max_seqlen, head_dim},
                 {max_seqlen * width, head_dim, width, 1}, first);
}

}  // namespace fastbert::cpu
