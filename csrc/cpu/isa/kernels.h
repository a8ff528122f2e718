// The operands of the CPU kernels, and the table through which the kernels of one instruction set
// are reached.
//
// The kernels know nothing of torch. They take pointers, strides and sizes, and write results to
// memory that the caller owns. Each instruction-set level (level_*.cpp) compiles the same kernels
// and fills one Kernels table; dispatch.cpp picks a table at run time. This header holds plain data
// only. A function here could be compiled with one level's instructions, and the linker could then
// share it with the other levels.

#pragma once

#include <cstdint>

#include "../../activations.h"

namespace fastbert::cpu {

// The storage format of activations. Arithmetic and statistics are fp32 in every format.
enum class Format : int32_t { f32, bf16, f16 };

// How kernels on tiles arrange their work. The results have the same bits. `in_turn`: products and
// vector work alternate. `overlapped`: vector work of attention and int8 products runs between the
// steps of a product. `fetched`: the rows of a bf16 product's weight are also fetched into the
// first-level cache two steps ahead.
enum class TileSchedule : int32_t { in_turn, overlapped, fetched };

inline TileSchedule tile_schedule = TileSchedule::overlapped;  // of the process

// A row-major matrix whose rows are `stride` elements apart; `data` is null for an absent operand.
struct ConstMatrix {
  const void* data;
  int64_t stride;
};

// Element (r, n) is kept iff word n % 4 of Philox(key, counter = (n / 4, r, 0, 0)) >> 8 >=
// threshold (Salmon et al. 2011).
struct Dropout {
  bool enabled;
  uint32_t key[2];
  uint32_t threshold;
  float scale;
};

// y = LN(residual + dropout(x + x_bias)) over rows of `columns` elements; y is contiguous.
struct LayerNormForward {
  Format format, x_format;  // of y and the residual, and of x, which may be narrower than fp32
  int64_t columns;
  ConstMatrix x, residual;
  const float *weight, *bias, *x_bias;
  Dropout dropout;
  float eps;
  void* y;
  float *mean, *rstd;
};

// y = LN(sums) for contiguous rows of sums; y is contiguous.
struct RowNorm {
  Format format;  // of y
  int64_t columns;
  const float *sums, *weight, *bias;
  float eps;
  void* y;
};

// The gradients of the sum (dsum) and, under dropout, of x (dx); both are contiguous. Each chunk of
// rows adds to its own partial sums: `columns` doubles for dweight, as many for dbias with
// `has_bias`, and as many for dx_bias with x_bias.
struct LayerNormBackward {
  Format format, x_format;  // of dy, the residual and dsum, and of x and dx
  int64_t columns;
  ConstMatrix dy, x, residual;
  const float *weight, *x_bias, *mean, *rstd;
  bool has_bias;
  Dropout dropout;
  void *dsum, *dx;
};

// y = weight s / sqrt(mean(s^2) + eps) with s = x + residual; y is contiguous.
struct RmsNormForward {
  Format format;
  int64_t columns;
  ConstMatrix x, residual;
  const float* weight;
  float eps;
  void* y;
  float* rstd;
};

// dsum, the gradient of the sum, is contiguous. dweight is summed by chunks, as in layer norm.
struct RmsNormBackward {
  Format format;
  int64_t columns;
  ConstMatrix dy, x, residual;
  const float *weight, *rstd;
  void* dsum;
};

// Turns the first `turned` heads of each row of x (tokens, heads, 2 half) and copies the others.
// The cosines and sines of the angles are contiguous (tokens, half); a `direction` of -1 turns
// backwards. Strides are in elements, 1 inside a head; y is contiguous.
struct Rotary {
  Format format;
  int64_t heads, turned, half;
  const void* x;
  int64_t stride_row, stride_head;
  const float *cos, *sin;
  float direction;
  void* y;
};

// The rows that are summed for each token, one from each of `count` tables. The word table comes
// first, then the type table and the position table if they exist.
struct Lookup {
  int count;
  const int64_t* indices[3];
  ConstMatrix tables[3];
};

// y = dropout(LN(sum of the token's rows)); y is contiguous.
struct EmbeddingForward {
  Format format;
  int64_t columns;
  Lookup lookup;
  const float *weight, *bias;
  Dropout dropout;
  float eps;
  void* y;
  float *mean, *rstd;
};

// dsum, the gradient of the sum, is contiguous fp32. dweight and, with `has_bias`, dbias are summed
// by chunks.
struct EmbeddingBackward {
  Format format;
  int64_t columns;
  Lookup lookup;
  ConstMatrix dy;
  const float *weight, *mean, *rstd;
  bool has_bias;
  Dropout dropout;
  float* dsum;
};

// Row targets[s] of out is the sum of the rows order[i] for starts[s] <= i < starts[s + 1], lowest
// i first. If `order` is null, the rows are the numbers i themselves. A unit of work is a strip of
// kStripColumns columns of one segment.
constexpr int64_t kStripColumns = 128;
struct SegmentSums {
  Format format, out_format;  // of the rows and of out
  int64_t columns;
  const void* rows;
  int64_t stride;
  const int64_t *order, *starts, *targets;
  void* out;
  int64_t out_stride;
};

// Logits, contiguous and without their bias, of the classes [first, first + columns). Each row has
// its label, the running maximum, the sum of exponentials relative to the maximum, and the logit of
// the label.
struct CrossEntropyForward {
  int64_t first, columns;
  const float *logits, *bias;
  const int64_t* labels;
  float *highest, *total, *own;
};

// The logits are replaced by their gradients, scale (softmax - onehot). If `rounded` is not null,
// it gets the gradients in `format`.
struct CrossEntropyBackward {
  Format format;
  int64_t first, columns;
  float* logits;
  const float* bias;
  const int64_t* labels;
  const float *highest, *total, *scale;
  void* rounded;
};

// y = f(h + bias), contiguous, in rows of `columns` elements. If f is gated, h and bias have twice
// as many columns.
struct ActivationForward {
  Format format;
  Activation activation;
  int64_t columns;
  ConstMatrix h;
  const float* bias;
  void* y;
};

// dh is the gradient of h, and `a`, unless it is null, gets y again; both are contiguous. Partial
// sums, if given, are as long as a row of h and get the sum of dh over a chunk's rows.
struct ActivationBackward {
  Format format;
  Activation activation;
  int64_t columns;  // of dy
  ConstMatrix dy, h;
  const float* bias;
  void *dh, *a;
};

// Lays out W (n, k), with any strides in elements, as the right operand of a product. `packed` has
// the level's own layout. A unit of work is a panel of columns.
struct Packing {
  Format from, to;
  const void* weight;
  int64_t row, column;
  int64_t n, k;
  void* packed;
};

// The steps after the sums of a product with n columns. `bias` (n) is added, the sum is stored in
// `pre_activation` unless that is null, the activation is applied, and `residual` is added.
struct Epilogue {
  int64_t n;
  const float* bias;
  Activation activation;
  Format residual_format;
  ConstMatrix residual;
  Format pre_activation_format, out_format;
  void* pre_activation;  // or null
  void* out;
  int64_t out_row;  // elements between rows of `out` and of `pre_activation`
  // If `next` is not null, the result goes there instead of `out`, rounded to `out_format`, as the
  // packed right operand of another product. The product is turned, without a residual and a
  // pre-activation, and n is a multiple of 32.
  void* next;
  Format next_format;
};

// out = epilogue(x Wᵀ) for x (m, k) and W (n, k). The kernels multiply the rows of a left operand,
// which has any strides, by the packed rows of a right operand. The left operand is x and the right
// operand is W or, if `turned`, W is on the left and x is packed. Elements of the left operand are
// rounded to `rounded` if their own format is wider. Sums over k have the same order for every m
// and every number of threads.
struct Gemm : Epilogue {
  Format format, rounded, packed_format;  // of the left operand, twice, and of the right operand
  int64_t m, k;
  const void* a;  // the left operand
  int64_t a_row, a_column;
  const void* packed;
  bool turned;
};

// The division of a product into independent tasks, and the bytes (aligned to 64) that one thread
// needs to work on them.
struct GemmPlan {
  int64_t tasks, scratch;
  int64_t rows, columns;  // of the largest block of results that a task forms
  int64_t long_blocks;    // blocks of `rows` rows; later blocks have `short_rows`
  int64_t short_rows;
};

// The layout of a prepacked int8 weight: panels of `lanes` columns, [k / group][lanes][group].
struct Int8Layout {
  int64_t lanes, group;
};

// The rows of x as integers: x = (q - zero) scale. q (rows, depth) is 0 from `columns` on. For
// groups of four, q is uint8_t; for pairs, q is int16_t with the zero already subtracted.
struct Int8Rows {
  Format format;
  int64_t columns, depth, group;
  ConstMatrix x;
  void* q;
  float* scale;
  int32_t* zero;
};

// out = epilogue(x Wᵀ) by an integer product. column_scale and column_sum are padded to whole
// panels, and q to a multiple of 16 rows.
struct Int8Gemm : Epilogue {
  int64_t depth, group;
  const void* q;
  const float* row_scale;
  const int32_t* zero;
  const int8_t* packed;
  const float* column_scale;
  const int32_t* column_sum;
};

// A task of an int8 product. panel_begin is a multiple of 4, and row_begin is a multiple of 16.
struct Int8Block {
  int64_t row_begin, row_end, panel_begin, panel_end;
};

// Rows of `head_dim` elements, indexed by (batch, head, row) with strides in elements. All
// sequences of a packed batch are in batch 0.
struct ConstRows {
  const void* data;
  int64_t batch, head, row;
};

struct Rows {
  void* data;
  int64_t batch, head, row;
};

// One element for every (batch, head, query, key). Strides are in elements, and 0 where the tensor
// is broadcast; `data` is null for an absent tensor. Masks are bytes, nonzero where a query may
// attend.
struct ConstPairs {
  const void* data;
  Format format;
  int64_t batch, head, row, key;
};

// out = softmax(q kᵀ scale + bias) v over the keys that may be attended. lse is the natural
// log-sum-exp of each row of logits, and -inf for a row that attends nothing. Sequence b has max_q
// queries and max_k keys or, if packed, the rows from cu_q[b] (cu_k[b]) to the next entry. Query i
// has the position of key i + offset, where offset = keys - queries of the sequence. The query
// attends to at most `left` keys before its position and `right` keys after it; -1 removes the
// limit. Weight (b, h, i, j) is kept iff word j % 4 of Philox(key, counter = (j / 4, i, h, b)) >> 8
// >= threshold.
struct Attention {
  Format format;
  int64_t batch, heads, head_dim;
  int64_t max_q, max_k;
  const int32_t *cu_q, *cu_k;  // null if dense
  ConstRows q, k, v;
  Rows out;
  float* lse;
  int64_t lse_batch, lse_head;
  ConstPairs mask, bias;
  int64_t left, right;
  Dropout dropout;
  float scale;
};

// The numbers of queries and of keys in a block of attention.
constexpr int64_t kAttentionQueries = 96, kAttentionKeys = 128;

// A piece of work: the queries [begin, end) of a head, where `begin` is a multiple of
// kAttentionQueries. In an item by keys, the range holds keys, and `begin` is a multiple of
// kAttentionKeys.
struct AttentionItem {
  int64_t sequence, head, begin, end;
};

// The gradients of an Attention, whose `out` and `lse` are not read. Each gradient has the shape of
// its tensor. Items by keys and the bias gradient read three statistics that earlier items store in
// fp32, laid out as lse: the maximum of a row's logits, the sum of its exponentials, and delta. The
// pointers are null if every item is a whole head and no gradient of the bias is wanted. dbias is
// contiguous fp32 in the shape of the bias; its strides are 0 where the bias is broadcast.
struct AttentionBackward {
  Attention forward;
  ConstRows dout;
  Rows dq, dk, dv;
  float *maximum, *sum, *delta;
  float* dbias;
  int64_t dbias_batch, dbias_head, dbias_row, dbias_key;
};

// The gradients that an item computes: all of a whole head, dq of some queries, or dk and dv of
// some keys.
enum class AttentionPass : int32_t { whole, queries, keys };

// The functions of one level. A range [begin, end) counts rows, units or tasks.
struct Kernels {
  const char* name;
  // Floats of scratch memory that the norms and the embedding need for rows of this length.
  int64_t (*layer_norm_scratch)(int64_t columns);
  void (*layer_norm_forward)(const LayerNormForward&, int64_t begin, int64_t end, float* scratch);
  void (*normalise)(const RowNorm&, int64_t begin, int64_t end);
  void (*layer_norm_backward)(const LayerNormBackward&, int64_t begin, int64_t end, float* scratch,
                              double* partial);
  void (*activation_forward)(const ActivationForward&, int64_t begin, int64_t end);
  void (*activation_backward)(const ActivationBackward&, int64_t begin, int64_t end,
                              double* partial);
  void (*rms_norm_forward)(const RmsNormForward&, int64_t begin, int64_t end, float* scratch);
  void (*rms_norm_backward)(const RmsNormBackward&, int64_t begin, int64_t end, float* scratch,
                            double* partial);
  void (*rotary)(const Rotary&, int64_t begin, int64_t end);
  void (*embedding_forward)(const EmbeddingForward&, int64_t begin, int64_t end, float* scratch);
  void (*embedding_backward)(const EmbeddingBackward&, int64_t begin, int64_t end, float* scratch,
                             double* partial);
  void (*sum_segments)(const SegmentSums&, int64_t begin, int64_t end);
  void (*cross_entropy_forward)(const CrossEntropyForward&, int64_t begin, int64_t end);
  void (*cross_entropy_backward)(const CrossEntropyBackward&, int64_t begin, int64_t end);
  // out[n] = sum over the rows of a contiguous (rows, columns) matrix, first row first.
  void (*sum_rows)(const double* matrix, int64_t rows, int64_t columns, float* out);
  // The format in which the rows of x, stored in `format`, are the right operand of a turned
  // product.
  Format (*right_format)(Format format);
  // The bytes of a packed (n, k) operand, and the units into which `pack` can be divided.
  int64_t (*packed_bytes)(Format to, int64_t n, int64_t k);
  int64_t (*pack_units)(int64_t n);
  void (*pack)(const Packing&, int64_t begin, int64_t end);
  // For m and n >= 1. `gemm` does the tasks [begin, end) in `scratch`.
  GemmPlan (*gemm_plan)(const Gemm&, int threads);
  void (*gemm)(const Gemm&, const GemmPlan&, int64_t begin, int64_t end, void* scratch);
  // Bytes of memory, aligned to 64, that a thread needs for items of up to `rows` queries.
  int64_t (*attention_scratch)(const Attention&, int64_t rows);
  void (*attention_forward)(const Attention&, const AttentionItem&, void* scratch);
  // The same for items of up to `keys` keys.
  int64_t (*attention_backward_scratch)(const AttentionBackward&, int64_t keys);
  void (*attention_backward)(const AttentionBackward&, AttentionPass, const AttentionItem&,
                             void* scratch);
  // Computes one block of dbias: queries from item.begin on, keys from item.end on. If the bias is
  // broadcast over sequences, the block of the first sequence holds the sum over all sequences; the
  // same holds for heads, queries and keys.
  int64_t (*attention_bias_scratch)(const AttentionBackward&);
  void (*attention_bias_gradient)(const AttentionBackward&, const AttentionItem&, void* scratch);
  // Writes the softmax weights of queries[begin] to queries[end - 1] of a head, in ascending order,
  // to rows of max_k elements from `out` on. Weights beyond the sequence's lengths are 0.
  int64_t (*attention_weights_scratch)(const Attention&);
  void (*attention_weights)(const Attention&, const AttentionItem&, const int64_t* queries,
                            void* out, void* scratch);
  // The layout that this level prefers. The level also takes groups of two with the same lanes.
  Int8Layout (*int8_layout)();
  void (*int8_quantise)(const Int8Rows&, int64_t begin, int64_t end);
  void (*int8_gemm)(const Int8Gemm&, const Int8Block&);
};

}  // namespace fastbert::cpu
