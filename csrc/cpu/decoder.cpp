// One step of a decoder: all layers, for one new token of every hypothesis. The operators of a
// layer run in one parallel region, without Python or a dispatcher between them.
//
// The cache holds the keys and values of earlier tokens in slots. In a beam search, a hypothesis
// often continues another one. A table therefore says which slot holds each earlier token of a
// hypothesis. The search changes this table, and never moves keys and values.

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "isa/dispatch.h"
#include "operands.h"
#include "operators.h"
#include "recycling.h"
#include "rows/sums.h"

namespace fastbert::cpu {
namespace {

// The parameters of a layer. Each pointer points to a weight and the bias that follows the weight.
struct DecoderLayer {
  static constexpr size_t kCount = 18;
  const at::Tensor *qkv, *projection, *norm;
  const at::Tensor *cross_query, *cross_projection, *cross_norm;
  const at::Tensor *inner, *outer, *last_norm;

  explicit DecoderLayer(const at::Tensor* p)
      : qkv(p),
        projection(p + 2),
        norm(p + 4),
        cross_query(p + 6),
        cross_projection(p + 8),
        cross_norm(p + 10),
        inner(p + 12),
        outer(p + 14),
        last_norm(p + 16) {}
};

// The positions [begin, end) to which each hypothesis attends.
struct Positions {
  std::vector<int32_t> begin, end;
  int64_t longest = 0;

  void add(int32_t first, int32_t last) {
    begin.push_back(first), end.push_back(last);
    longest = std::max<int64_t>(longest, last - first);
  }
};

struct Step {
  const at::Tensor &cache, &source_cache;
  int64_t position, heads;
  bool pre_norm;
  double eps;
  const std::string& activation;
  std::vector<int32_t> slots;  // (rows, position + 1)
  Positions own, source;
};

void check_int(const char* name, const at::Tensor& t, const at::Tensor& like) {
  check_device(name, t, like);
  TORCH_CHECK_TYPE(t.scalar_type() == at::kInt, name, ": got dtype ", t.scalar_type(),
                   ", allowed: Int");
}

// Checks a cache: contiguous, with the dtype of `hidden` and the shape (layers, 2, ..., heads,
// positions, head_dim).
void check_cache(const char* name, const at::Tensor& t, int64_t dims, int64_t layers,
                 const at::Tensor& hidden, const Step& s) {
  check_device(name, t, hidden);
  check_dtype_of(name, t, hidden.scalar_type(), "hidden");
  TORCH_CHECK_VALUE(t.dim() == dims && t.is_contiguous() && t.size(0) == layers && t.size(1) == 2 &&
                        t.size(dims - 3) == s.heads && t.size(dims - 1) == hidden.size(1) / s.heads,
                    name, ": got shape ", t.sizes(), ", allowed: contiguous (", layers, ", 2, ",
                    dims == 6 ? "slots, " : "", s.heads, ", positions, ", hidden.size(1) / s.heads,
                    ")");
}

void check(const at::Tensor& hidden, at::TensorList parameters, const at::Tensor& slots,
           const at::Tensor& cu_seqlens, const at::Tensor& sources, const Step& s) {
  check_matrix("hidden", hidden);
  const int64_t rows = hidden.size(0), columns = hidden.size(1);
  TORCH_CHECK_VALUE(!parameters.empty() && parameters.size() % DecoderLayer::kCount == 0,
                    "parameters: got ", parameters.size(),
                    " tensors, allowed: ", (int64_t)DecoderLayer::kCount, " for each layer");
  const auto layers = (int64_t)(parameters.size() / DecoderLayer::kCount);
  TORCH_CHECK_VALUE(s.heads >= 1 && columns >= s.heads && columns % s.heads == 0, "heads: got ",
                    s.heads, ", allowed: a divisor of ", columns,
                    ", the number of columns of hidden");
  check_cache("cache", s.cache, 6, layers, hidden, s);
  check_cache("source_cache", s.source_cache, 5, layers, hidden, s);
  TORCH_CHECK_VALUE(rows <= s.cache.size(2), "hidden: got ", rows, " rows, allowed: at most ",
                    s.cache.size(2), ", the number of slots of cache");
  TORCH_CHECK_VALUE(s.position >= 0 && s.position < s.cache.size(4), "position: got ", s.position,
                    ", allowed: 0 to ", s.cache.size(4) - 1);
  check_int("slots", slots, hidden);
  TORCH_CHECK_VALUE(slots.dim() == 2 && slots.size(0) >= rows && slots.size(1) >= s.position,
                    "slots: got shape ", slots.sizes(), ", allowed: at least (", rows, ", ",
                    s.position, ")");
  check_int("cu_seqlens", cu_seqlens, hidden);
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.numel() >= 1, "cu_seqlens: got shape ",
                    cu_seqlens.sizes(), ", allowed: (S + 1,)");
  check_int("sources", sources, hidden);
  check_shape("sources", sources, {rows});
  check_eps(s.eps);
  epilogue_activation(s.activation);
}

// Copies the numbers of the tables and checks them, so that no other thread can change a number
// that was checked.
void read_tables(Step& s, int64_t rows, const at::Tensor& slots_in, const at::Tensor& cu_seqlens_in,
                 const at::Tensor& sources_in) {
  const auto slots = private_copy(slots_in.narrow(0, 0, rows).narrow(1, 0, s.position), at::kInt);
  const auto cu_seqlens = private_copy(cu_seqlens_in, at::kInt);
  const auto sources = private_copy(sources_in, at::kInt);
  const auto* slot = slots.const_data_ptr<int32_t>();
  const auto* lengths = cu_seqlens.const_data_ptr<int32_t>();
  const auto* source = sources.const_data_ptr<int32_t>();
  const int64_t count = cu_seqlens.numel() - 1, keys = s.source_cache.size(3);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < s.position; ++i, ++slot) {
      TORCH_CHECK_VALUE(*slot >= 0 && *slot < s.cache.size(2), "slots: got ", *slot,
                        ", allowed: 0 to ", s.cache.size(2) - 1);
      s.slots.push_back(*slot);
    }
    s.slots.push_back((int32_t)row);
    s.own.add(0, (int32_t)s.position + 1);
    TORCH_CHECK_VALUE(source[row] >= 0 && source[row] < count, "sources: got ", source[row],
                      ", allowed: 0 to ", count - 1);
    const int32_t begin = lengths[source[row]], end = lengths[source[row] + 1];
    TORCH_CHECK_VALUE(begin >= 0 && begin <= end && end <= keys, "cu_seqlens: got ", begin, " and ",
                      end, ", allowed: ascending numbers from 0 to ", keys,
                      ", the positions of source_cache");
    s.source.add(begin, end);
  }
}

// Computes attention of single queries. `cache` has keys and values, one after another, in the
// shape (2, slots, heads, positions, head_dim), where the dimension of slots may be absent.
at::Tensor attend(const at::Tensor& q, const at::Tensor& cache, const int32_t* slots,
                  const Positions& positions, const Step& s) {
  const int64_t rows = q.size(0), head_dim = cache.size(-1), length = cache.size(-2);
  auto out = empty({rows, s.heads * head_dim}, q.options());
  const int64_t head = length * head_dim, slot = s.heads * head;
  const auto of = [&](int64_t i) {
    return ConstRows{cache.select(0, i).const_data_ptr(), slot, head, head_dim};
  };
  const DecodeAttention a = {format_of(q),
                             s.heads,
                             head_dim,
                             matrix(q),
                             of(0),
                             of(1),
                             slots,
                             s.position + 1,
                             positions.begin.data(),
                             positions.end.data(),
                             (float)(1.0 / std::sqrt((double)head_dim)),
                             out.mutable_data_ptr()};
  const Kernels& k = kernels();
  const int64_t floats = k.decode_scratch(a, positions.longest);
  const int64_t work = std::max<int64_t>(1, positions.longest * head_dim);
  parallel_for(
      rows * s.heads, std::max<int64_t>(1, kGrain / work), [&](int64_t begin, int64_t end) {
        k.decode_attention(a, begin, end, (float*)thread_scratch(floats * (int64_t)sizeof(float)));
      });
  return out;
}

// Writes the keys and values of the new tokens into the cache. Each row of `qkv` has q, k and v one
// after another.
void store_new(const at::Tensor& qkv, const at::Tensor& cache, const Step& s) {
  const int64_t slots = cache.size(1), length = cache.size(3), head_dim = cache.size(4);
  const auto bytes = (size_t)(head_dim * qkv.element_size());
  const auto* from = (const char*)qkv.const_data_ptr();
  auto* to = (char*)cache.mutable_data_ptr();
  for (int64_t row = 0; row < qkv.size(0); ++row) {
    for (int64_t part = 0; part < 2; ++part) {
      for (int64_t head = 0; head < s.heads; ++head) {
        const int64_t source = (row * 3 + part + 1) * s.heads + head;
        const int64_t place = ((part * slots + row) * s.heads + head) * length + s.position;
        std::memcpy(to + place * bytes, from + source * bytes, bytes);
      }
    }
  }
}

at::Tensor product(const at::Tensor& x, const at::Tensor* p) {
  return std::get<0>(linear(x, p[0], present(p[1]), std::nullopt, "none", false));
}

at::Tensor normalised(const at::Tensor& x, const at::Tensor* norm, const Step& s) {
  return std::get<0>(layer_norm_forward(x, norm[0], present(norm[1]), std::nullopt, std::nullopt,
                                        std::nullopt, 0.0, s.eps));
}

// Returns the output of self-attention over the earlier tokens and the new token, before its
// projection, and stores the keys and values of the new token.
at::Tensor attend_to_own(const at::Tensor& x, const DecoderLayer& layer, int64_t number,
                         const Step& s) {
  const auto qkv = product(x, layer.qkv);
  const auto cache = s.cache.select(0, number);
  store_new(qkv, cache, s);
  return attend(qkv.narrow(1, 0, x.size(1)), cache, s.slots.data(), s.own, s);
}

at::Tensor attend_to_source(const at::Tensor& x, const DecoderLayer& layer, int64_t number,
                            const Step& s) {
  return attend(product(x, layer.cross_query), s.source_cache.select(0, number), nullptr, s.source,
                s);
}

at::Tensor through(const at::Tensor& hidden, const DecoderLayer& layer, int64_t number,
                   const Step& s) {
  const auto add_and_norm = [&](const at::Tensor& x, const at::Tensor* p,
                                const at::Tensor& residual, const at::Tensor* norm) {
    return linear_layer_norm(x, p[0], present(p[1]), residual, norm[0], norm[1], s.eps);
  };
  const auto own =
      add_and_norm(attend_to_own(hidden, layer, number, s), layer.projection, hidden, layer.norm);
  const auto crossed = add_and_norm(attend_to_source(own, layer, number, s), layer.cross_projection,
                                    own, layer.cross_norm);
  return feed_forward_layer_norm(crossed, layer.inner[0], present(layer.inner[1]), layer.outer[0],
                                 present(layer.outer[1]), crossed, layer.last_norm[0],
                                 layer.last_norm[1], s.activation, s.eps);
}

at::Tensor through_pre_norm(const at::Tensor& hidden, const DecoderLayer& layer, int64_t number,
                            const Step& s) {
  const auto add = [&](const at::Tensor& x, const at::Tensor* p, const at::Tensor& residual) {
    return std::get<0>(linear(x, p[0], present(p[1]), residual, "none", false));
  };
  const auto own = add(attend_to_own(normalised(hidden, layer.norm, s), layer, number, s),
                       layer.projection, hidden);
  const auto crossed = add(attend_to_source(normalised(own, layer.cross_norm, s), layer, number, s),
                           layer.cross_projection, own);
  const auto inner =
      std::get<0>(linear(normalised(crossed, layer.last_norm, s), layer.inner[0],
                         present(layer.inner[1]), std::nullopt, s.activation, false));
  return add(inner, layer.outer, crossed);
}

}  // namespace

at::Tensor decoder_step(const at::Tensor& hidden, at::TensorList parameters,
                        const at::Tensor& cache, const at::Tensor& slots, int64_t position,
                        const at::Tensor& source_cache, const at::Tensor& cu_seqlens,
                        const at::Tensor& sources, int64_t heads, bool pre_norm, double eps,
                        const std::string& activation) {
  Step s = {cache, source_cache, position, heads, pre_norm, eps, activation, {}, {}, {}};
  check(hidden, parameters, slots, cu_seqlens, sources, s);
  read_tables(s, hidden.size(0), slots, cu_seqlens, sources);
  at::Tensor rows = hidden;
  if (rows.size(0) == 0) return rows;
  const auto layers = [&] {
    read_in_order(parameters);
    for (size_t i = 0; i < parameters.size() / DecoderLayer::kCount; ++i) {
      const DecoderLayer layer(&parameters[i * DecoderLayer::kCount]);
      try {
        rows = pre_norm ? through_pre_norm(rows, layer, (int64_t)i, s)
                        : through(rows, layer, (int64_t)i, s);
      } catch (c10::Error& error) {
        error.add_context("in layer " + std::to_string(i) + " of parameters");
        throw;
      }
    }
  };
  const Recycling recycling;
  worth_a_team(hidden.size(0), parameters) ? together(layers) : layers();
  return rows;
}

}  // namespace fastbert::cpu
