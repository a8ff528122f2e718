// A whole encoder in one call, for inference: the removal of padding, the embedding, all layers and
// the pooler. On a short sequence, running Python between these steps would take as long as
// computing two layers.

#include <tuple>
#include <vector>

#include "operators.h"
#include "parallel.h"
#include "recycling.h"
#include "tensors.h"

namespace fastbert::cpu {
namespace {

// The indices of the tensors in the argument `embedding` of `bert`. The table of token types comes
// last and may be absent.
enum { kWords, kPositions, kWeight, kBias, kTypes };

// The tokens of a batch without padding. The caller passes a padded batch (B, L), or packed tokens
// (T,) with cumulative lengths.
struct Tokens {
  // The number of sequences, the length L or that of the longest packed sequence, and the length of
  // the longest sequence without padding.
  int64_t batch, length, longest;
  // int64 tensors with one element for each token. `types` is undefined if there is no table of
  // token types.
  at::Tensor ids, types, positions;
  // The indices of the tokens in the flattened batch (B * L,), undefined if the batch has no
  // padding or is packed; and the cumulative lengths of the sequences (B + 1,), undefined if the
  // sequences of a batch (B, L) have no padding.
  at::Tensor indices, cu_seqlens;

  bool padded() const { return indices.defined(); }
};

bool are_integers(const at::Tensor& t, at::IntArrayRef sizes) {
  return t.device().is_cpu() && t.sizes() == sizes &&
         (t.scalar_type() == at::kLong || t.scalar_type() == at::kInt);
}

// Returns a private copy of the elements of `numbers` that belong to tokens. `indices` holds the
// positions of these elements in the flattened batch, and is undefined if there is no padding.
at::Tensor of_tokens(const at::Tensor& numbers, const at::Tensor& indices) {
  const auto flat = private_copy(numbers, at::kLong).view({-1});
  return indices.defined() ? flat.index_select(0, indices) : flat;
}

// Returns the index of each of the `count` tokens in its padded row.
at::Tensor positions_of(const Tokens& tokens, int64_t count) {
  const int64_t length = tokens.length;
  auto positions = empty({count}, at::dtype(at::kLong));
  int64_t* position = positions.mutable_data_ptr<int64_t>();
  const int64_t* place = tokens.padded() ? tokens.indices.const_data_ptr<int64_t>() : nullptr;
  for (int64_t i = 0; i < count; ++i) position[i] = (place ? place[i] : i) % length;
  return positions;
}

// Returns the positions of RoBERTa models, which number the tokens of a row from `first` on. In
// these models, padding has the id first - 1 and the position first - 1.
at::Tensor counted_positions(const at::Tensor& ids_in, const at::Tensor& indices, int64_t first) {
  auto positions = private_copy(ids_in, at::kLong);
  int64_t* position = positions.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < positions.size(0); ++b, position += positions.size(1)) {
    int64_t next = first;
    for (int64_t i = 0; i < positions.size(1); ++i) {
      position[i] = position[i] == first - 1 ? first - 1 : next++;
    }
  }
  return indices.defined() ? positions.view({-1}).index_select(0, indices) : positions.view({-1});
}

// Returns the tokens of a padded batch, without their ids and types.
Tokens padded_tokens(const at::Tensor& ids, const OptionalTensor& mask,
                     std::optional<int64_t> first_position) {
  Tokens tokens = {};
  tokens.batch = ids.size(0), tokens.length = tokens.longest = ids.size(1);
  int64_t count = ids.numel();
  if (mask) {
    auto [indices, cu_seqlens, longest] = unpad_indices(*mask);
    if (indices.size(0) < count) {
      tokens.indices = indices, tokens.cu_seqlens = cu_seqlens, tokens.longest = longest;
      count = indices.size(0);
    }
  }
  tokens.positions = first_position ? counted_positions(ids, tokens.indices, *first_position)
                                    : positions_of(tokens, count);
  return tokens;
}

// Returns the tokens of packed sequences, without their ids and types. Tokens after the last
// sequence have the first position. The result has no cumulative lengths if `bert` cannot process
// `cu_seqlens`.
Tokens packed_tokens(const at::Tensor& ids, const at::Tensor& cu_seqlens, int64_t first_position) {
  Tokens tokens = {};
  const bool are_lengths = cu_seqlens.device().is_cpu() && cu_seqlens.scalar_type() == at::kInt &&
                           cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 2;
  if (!are_lengths) return tokens;
  const auto lengths = private_copy(cu_seqlens, at::kInt);
  const int32_t* end = lengths.const_data_ptr<int32_t>();
  const int64_t count = ids.size(0);
  tokens.batch = lengths.size(0) - 1;
  if (end[0] != 0) return tokens;
  tokens.positions = empty({count}, at::dtype(at::kLong));
  int64_t* position = tokens.positions.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < tokens.batch; ++b) {
    if (end[b + 1] < end[b] || end[b + 1] > count) return tokens;
    for (int64_t i = end[b]; i < end[b + 1]; ++i) position[i] = i - end[b] + first_position;
    tokens.longest = std::max<int64_t>(tokens.longest, end[b + 1] - end[b]);
  }
  for (int64_t i = end[tokens.batch]; i < count; ++i) position[i] = first_position;
  tokens.length = tokens.longest;
  tokens.cu_seqlens = lengths;
  return tokens;
}

// Returns whether `bert` can process the arguments. If not, `bert` returns an empty result, and the
// caller of `bert` reports the error.
bool fits(const at::Tensor& ids, const OptionalTensor& mask, const OptionalTensor& types,
          bool packed, at::TensorList embedding) {
  if (ids.dim() != (packed ? 1 : 2) || ids.numel() == 0) return false;
  if (!are_integers(ids, ids.sizes()) || (packed && mask)) return false;
  if (any_outside(ids, embedding[kWords].size(0), std::nullopt)) return false;
  if (types) {
    if (embedding.size() <= kTypes || !are_integers(*types, ids.sizes())) return false;
    if (any_outside(*types, embedding[kTypes].size(0), std::nullopt)) return false;
  }
  if (!mask) return true;
  const bool is_bool = mask->scalar_type() == at::kBool && mask->device().is_cpu();
  if (!(is_bool && mask->sizes() == ids.sizes()) && !are_integers(*mask, ids.sizes())) return false;
  return !any_outside(*mask, 2, std::nullopt);
}

Tokens tokens_of(const at::Tensor& ids, const OptionalTensor& mask, const OptionalTensor& types,
                 const OptionalTensor& cu_seqlens, bool has_types,
                 std::optional<int64_t> first_position) {
  Tokens tokens = cu_seqlens ? packed_tokens(ids, *cu_seqlens, first_position.value_or(0))
                             : padded_tokens(ids, mask, first_position);
  tokens.ids = of_tokens(ids, tokens.indices);
  if (types) tokens.types = of_tokens(*types, tokens.indices);
  if (has_types && !types) tokens.types = zeros({tokens.ids.size(0)}, tokens.ids.options());
  return tokens;
}

// Calls body(). If an operator fails, its error message names the operator's own arguments. This
// function adds `argument`, the name of the argument of `bert` that contains these arguments.
template <class Body>
void with_context(const char* argument, const Body& body) {
  try {
    body();
  } catch (c10::Error& error) {
    error.add_context(std::string("in ") + argument);
    throw;
  }
}

// Returns one row of `rows` for each sequence: the row of the sequence's first token, or zeros if
// the sequence has no tokens.
at::Tensor first_rows(const at::Tensor& rows, const Tokens& tokens) {
  if (!tokens.cu_seqlens.defined()) {
    return rows.view({tokens.batch, tokens.length, rows.size(1)}).select(1, 0);
  }
  const auto* starts = tokens.cu_seqlens.const_data_ptr<int32_t>();
  auto places = empty({tokens.batch}, tokens.ids.options());
  int64_t* place = places.mutable_data_ptr<int64_t>();
  bool empty_sequence = false;
  for (int64_t b = 0; b < tokens.batch; ++b) {
    place[b] = std::min<int64_t>(starts[b], rows.size(0) - 1);
    empty_sequence |= starts[b] == starts[b + 1];
  }
  auto first = rows.index_select(0, places);
  for (int64_t b = 0; empty_sequence && b < tokens.batch; ++b) {
    if (starts[b] == starts[b + 1]) first.select(0, b).zero_();
  }
  return first;
}

}  // namespace

std::tuple<std::vector<at::Tensor>, int64_t> bert(
    const at::Tensor& ids, const OptionalTensor& mask, const OptionalTensor& token_types,
    const OptionalTensor& cu_seqlens_in, at::TensorList embedding, at::TensorList parameters,
    at::TensorList scales, at::TensorList pooler, std::optional<int64_t> first_position,
    int64_t heads, int64_t projections, double embedding_eps, double eps,
    const std::string& activation, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(embedding.size() == kTypes || embedding.size() == kTypes + 1, "embedding: got ",
                    embedding.size(), " tensors, allowed: ", (int)kTypes, " or ", kTypes + 1);
  if (embedding[kWords].scalar_type() != dtype) return {};
  for (const int table : {kWords, kPositions, kTypes}) {
    if (table == kTypes && embedding.size() == kTypes) continue;
    check_matrix(("embedding[" + std::to_string(table) + "]").c_str(), embedding[table]);
  }
  TORCH_CHECK_VALUE(!first_position || *first_position >= 1, "first_position: got ",
                    first_position.value_or(0), ", allowed: None, or at least 1");
  TORCH_CHECK_VALUE(embedding_eps >= 0.0, "embedding_eps: got ", embedding_eps,
                    ", allowed: at least 0");
  TORCH_CHECK_VALUE(pooler.empty() || pooler.size() == 2, "pooler: got ", pooler.size(),
                    " tensors, allowed: none, or a weight and a bias");
  if (!fits(ids, mask, token_types, cu_seqlens_in.has_value(), embedding)) return {};
  for (const at::Tensor& parameter : parameters) {
    const bool is_weight = scales.empty() && parameter.dim() == 2;
    if (is_weight && parameter.scalar_type() != dtype) return {};
  }
  const bool has_types = embedding.size() > kTypes;
  const Tokens tokens = tokens_of(ids, mask, token_types, cu_seqlens_in, has_types, first_position);
  if (tokens.ids.size(0) == 0) return {};
  if (cu_seqlens_in && !tokens.cu_seqlens.defined()) return {};
  if (tokens.length > embedding[kPositions].size(0) - first_position.value_or(0)) return {};
  at::Tensor rows, pooled;
  const auto embed = [&] {
    OptionalTensor types, type_table;
    if (has_types) types = tokens.types, type_table = embedding[kTypes];
    rows = std::get<0>(embedding_forward(tokens.ids, types, tokens.positions, embedding[kWords],
                                         type_table, embedding[kPositions], embedding[kWeight],
                                         embedding[kBias], std::nullopt, embedding_eps, 0.0));
  };
  const auto pool = [&] {
    const auto first = first_rows(rows, tokens);
    pooled = std::get<0>(linear(first, pooler[0], pooler[1], std::nullopt, "none", false)).tanh();
  };
  const auto run = [&] {
    with_context("embedding", embed);
    OptionalTensor cu_seqlens;
    if (tokens.cu_seqlens.defined()) cu_seqlens = tokens.cu_seqlens;
    rows = encoder(rows, parameters, scales, cu_seqlens, std::nullopt, std::nullopt, {}, {}, {},
                   std::nullopt, tokens.batch, tokens.longest, heads, heads, projections, 1, false,
                   false, eps, activation, dtype, false)
               .back();
    if (!pooler.empty()) with_context("pooler", pool);
  };
  const Recycling recycling;
  if (worth_a_team(tokens.ids.size(0), parameters)) {
    together(run);
  } else {
    run();
  }
  std::vector<at::Tensor> found = {rows};
  if (!pooler.empty()) found.push_back(pooled);
  if (tokens.padded()) {
    found.push_back(tokens.indices);
    found.push_back(tokens.cu_seqlens);
  }
  return {found, tokens.longest};
}

}  // namespace fastbert::cpu
