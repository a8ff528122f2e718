// The operands of the CPU kernels, and the table of function pointers to the kernels of one
// instruction set.
//
// The kernels do not depend on torch. They take pointers, strides and sizes, and write results to
// memory that the caller owns. Each instruction-set level (level_*.cpp) compiles the same kernels
// and fills one Kernels table; dispatch.cpp chooses a table at run time. This header holds plain
// data only. A function in this header could be compiled with one level's instructions, and the
// linker could then use that code for the other levels too.

#pragma once

#include <cstdint>

#include "../../activations.h"

namespace fastbert::cpu {

// The storage format of activations. Arithmetic and statistics are fp32 in every format.
enum class Format : int32_t { f32, bf16, f16 };

// The order of work in kernels on AMX tiles. The results have the same bits in every order. With
// `in_turn`, the vector instructions of attention and of int8 products run after the product of a
// block. With `overlapped`, they run between the steps of the next product. `fetched` is like
// `overlapped`, but in bf16 products, the rows of the left operand are also prefetched into the
// first-level cache two steps ahead.
enum class TileSchedule : int32_t { in_turn, overlapped, fetched };

inline TileSchedule tile_schedule = TileSchedule::overlapped;  // one setting for the whole process

// A row-major matrix whose rows are `stride` elements apart; `data` is null for an absent operand.
struct ConstMatrix {
  const void* data;
  int64_t stride;
};

// The dropout of a matrix with rows r and columns n. Let w be word n % 4 of Philox(key, counter =
// (n / 4, r, 0, 0)) (Salmon et al. 2011). Element (r, n) is multiplied by `scale` if w >> 8 is at
// least `threshold`, and is dropped otherwise.
struct Dropout {
  bool enabled;
  uint32_t key[2];
  uint32_t threshold;
  float scale;
};

// y = LN(residual + dropout(x + x_bias)) for rows of `columns` elements, where LN is layer norm. y
// is contiguous.
struct LayerNormForward {
  Format format, x_format;  // format: of y and the residual; x_format: of x
  int64_t columns;
  ConstMatrix x, residual;
  const float *weight, *bias, *x_bias;
  Dropout dropout;
  float eps;
  void* y;
  float *mean, *rstd;
};

// y = LN(sums), where LN is layer norm. `sums` and y are contiguous.
struct RowNorm {
  Format format;  // format of y
  int64_t columns;
  const float *sums, *weight, *bias;
  float eps;
  void* y;
};

// The backward of LayerNormForward. `dsum` receives the gradient of residual + dropout(x + x_bias)
// and, under dropout, `dx` receives the gradient of x. Both are contiguous. Each chunk of rows has
// its own partial sums of parameter gradients: `columns` doubles for dweight, as many for dbias if
// `has_bias`, and as many for dx_bias if x_bias is not null.
struct LayerNormBackward {
  Format format, x_format;  // format: of dy, the residual and dsum; x_format: of x and dx
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

// The backward of RmsNormForward. `dsum` receives the gradient of s and is contiguous. Each chunk
// of rows has its own partial sums of dweight, as in LayerNormBackward.
struct RmsNormBackward {
  Format format;
  int64_t columns;
  ConstMatrix dy, x, residual;
  const float *weight, *rstd;
  void* dsum;
};

// Rotates the first `turned` heads of each row of x (tokens, heads, 2 half) and copies the other
// heads. The cosines and sines of the angles are contiguous (tokens, half); a `direction` of -1
// rotates backwards. Strides are in elements and are 1 inside a head; y is contiguous.
struct Rotary {
  Format format;
  int64_t heads, turned, half;
  const void* x;
  int64_t stride_row, stride_head;
  const float *cos, *sin;
  float direction;
  void* y;
};

// The tables of an embedding, which sums one row from each of `count` tables for every token. The
// word table comes first, then the type table and the position table if they exist.
struct Lookup {
  int count;
  const int64_t* indices[3];
  ConstMatrix tables[3];
};

// y = dropout(LN(sum of the token's table rows)), where LN is layer norm. y is contiguous.
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

// The backward of EmbeddingForward. `dsum` receives the gradient of the sum of each token's table
// rows, in contiguous fp32. Each chunk of rows has its own partial sums of dweight and, with
// `has_bias`, of dbias.
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

// Sums of segments of rows. For segment s, row targets[s] of `out` is the sum of the rows order[i]
// for starts[s] <= i < starts[s + 1], in ascending order of i. If `order` is null, order[i] is i. A
// unit of work is a strip of kStripColumns columns of one segment.
constexpr int64_t kStripColumns = 128;
struct SegmentSums {
  Format format, out_format;  // formats of the rows and of out
  int64_t columns;
  const void* rows;
  int64_t stride;
  const int64_t *order, *starts, *targets;
  void* out;
  int64_t out_stride;
};

// One part of a cross entropy: contiguous `logits`, without their bias, of the classes [first,
// first + columns). Each row has a label and three statistics, which each part updates after the
// part before it: `highest`, the running maximum; `total`, the sum of exp(logit - highest); and
// `own`, the logit of the label.
struct CrossEntropyForward {
  int64_t first, columns;
  const float *logits, *bias;
  const int64_t* labels;
  float *highest, *total, *own;
};

// The backward of CrossEntropyForward. The gradients of the logits, scale (softmax - onehot),
// overwrite the logits. If `rounded` is not null, the gradients are also written to `rounded` in
// `format`.
struct CrossEntropyBackward {
  Format format;
  int64_t first, columns;
  float* logits;
  const float* bias;
  const int64_t* labels;
  const float *highest, *total, *scale;
  void* rounded;
};

// The running maxima of the columns of `logits`, whose rows are `stride` elements apart. Row i of
// the logits belongs to token first_row + i. `rows` holds the token of each maximum.
struct SpladeMaximum {
  int64_t columns, stride;
  const float* logits;
  int64_t first_row;
  float* highest;
  int32_t* rows;
};

// y = log(1 + relu(highest + bias)) for the maxima of one sequence. If `logits` is not null, it
// receives highest + bias, and `kept_rows` receives `rows`, or -1 where the logit is not positive.
struct SpladeResult {
  Format format;  // format of y
  int64_t columns;
  const float *highest, *bias;
  const int32_t* rows;
  void* y;
  float* logits;
  int32_t* kept_rows;
};

// The gradients of the weight and of the hidden states from the gradients `scale` of the largest
// logits and the tokens `rows` of these logits. Both are contiguous (classes, sequences). x holds
// the hidden states or the weight, in `format`. `out` is contiguous and has out_rows rows in the
// gradient of the hidden states, and `classes` rows in the gradient of the weight.
constexpr int64_t kSpladeStrip = 64;
struct SpladeGradient {
  Format format, out_format;
  int64_t sequences, classes, columns, out_rows;
  const float* scale;
  const int32_t* rows;
  ConstMatrix x;
  void* out;
};

// y = f(h + bias) for the activation f. y is contiguous and has `columns` columns. If f is gated, h
// and bias have twice as many columns.
struct ActivationForward {
  Format format;
  Activation activation;
  int64_t columns;
  ConstMatrix h;
  const float* bias;
  void* y;
};

// The backward of ActivationForward. `dh` receives the gradient of h. If `a` is not null, y is
// computed again and written to `a`. dh and `a` are contiguous. The argument `partial` of the
// kernel may be null. Otherwise, it has one sum for each column of h, and the kernel adds the rows
// of dh to these sums.
struct ActivationBackward {
  Format format;
  Activation activation;
  int64_t columns;  // columns of dy
  ConstMatrix dy, h;
  const float* bias;
  void *dh, *a;
};

// Packs W (n, k) as the right operand of a product. W may have any strides, which are in elements.
// The layout of `packed` depends on the level. A unit of work is a panel of columns.
struct Packing {
  Format from, to;
  const void* weight;
  int64_t row, column;
  int64_t n, k;
  void* packed;
};

// Rounds the rows of a matrix with `columns` contiguous elements to `format`, in which the rows of
// `to` follow one another without gaps.
struct Rounding {
  const float* from;
  int64_t row, columns;  // elements between rows of `from`, and columns
  Format format;
  void* to;
};

// The steps after the sums of a product with n columns. `bias` (n) is added, the result is stored
// to `pre_activation` if that pointer is not null, the activation is applied, and `residual` is
// added.
struct Epilogue {
  int64_t n;
  const float* bias;
  Activation activation;
  Format residual_format;
  ConstMatrix residual;
  Format pre_activation_format, out_format;
  void* pre_activation;  // null if the pre-activation is not needed
  void* out;
  int64_t out_row;  // elements between rows of `out` and of `pre_activation`
  // If `next` is not null, the result is written to `next` instead of `out`, rounded to
  // `out_format`, as the packed right operand of another product. Such a product is turned, has no
  // residual and no pre-activation, and n is a multiple of 32.
  void* next;
  Format next_format;
};

// The largest number of rows of x for which a turned product multiplies columns of blocks of W by
// single elements of x (gemm/few_rows.h).
constexpr int64_t kFewRows = 4;

// out = epilogue(x Wᵀ) for x (m, k) and W (n, k). The kernels multiply the rows of a left operand,
// which may have any strides, by the packed rows of a right operand. If `turned`, W is the left
// operand and x is packed. Otherwise, x is the left operand and W is packed. Elements of the left
// operand that are wider than `rounded` are rounded to `rounded`. Sums over k have the same order
// for every m and every number of threads.
struct Gemm : Epilogue {
  // The formats of the left operand, as stored and after rounding, and of the right operand.
  Format format, rounded, packed_format;
  int64_t m, k;
  const void* a;  // the left operand
  int64_t a_row, a_column;
  const void* packed;
  bool turned;
  // The rows of x in `few_format`, if the product reads them as they are stored. Otherwise null.
  ConstMatrix few;
  Format few_format;
  // A product with few rows of x reads a block of rows of W of at most this size into the
  // first-level cache only.
  int64_t streamed_bytes;
};

// The division of a product into independent tasks, and the bytes of scratch memory, aligned to 64,
// that each thread needs.
struct GemmPlan {
  int64_t tasks, scratch;
  int64_t rows, columns;  // size of the largest block of results that a task computes
  int64_t long_blocks;    // number of blocks with `rows` rows; later blocks have `short_rows` rows
  int64_t short_rows;
};

// The layout of a prepacked int8 weight. It consists of panels of `lanes` columns, and each panel
// is stored as [k / group][lanes][group].
struct Int8Layout {
  int64_t lanes, group;
};

// The rows of x as integers q, so that x is approximately (q - zero) * scale. q is (rows, depth),
// and its columns from number `columns` on are 0. For groups of four or eight, q is uint8_t. For
// pairs, q is int16_t with the zero point already subtracted.
struct Int8Rows {
  Format format;
  int64_t columns, depth, group;
  ConstMatrix x;
  void* q;
  float* scale;
  int32_t* zero;
};

// out = epilogue(x Wᵀ), computed by a product of the integers q and an int8 weight. column_scale
// and column_sum are padded to whole panels, and q is padded to a multiple of 16 rows.
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

// A mask or a bias, with one element for every (batch, head, query, key). Strides are in elements,
// and are 0 where the tensor is broadcast; `data` is null for an absent tensor. The elements of a
// mask are bytes, which are nonzero where a query may attend to a key.
struct ConstPairs {
  const void* data;
  Format format;
  int64_t batch, head, row, key;
};

// The terms of relative positions in the logits of attention (attention/relative.h). The distance
// of query i and key j of a sequence is the position of the query minus the position of the key.
// The row of a distance d, -most < d < most, in the tables is index[d + most - 1]. With this row t,
// the term of a head is
//
//     q_i · keys[t] + k_j · queries[t] + bias[head, t] + segment_scores[head, i]
//
// where the last summand is present only if the segments of query and key differ. A table or an
// array that is null has no summand. `bias` is (heads, positions); segments and segment scores have
// the layout of lse, where the arrays of segments have one head.
struct RelativeTerms {
  int64_t positions, most;
  const int32_t* index;
  ConstRows keys, queries;
  const float *bias, *segment_scores;
  const int32_t *q_segments, *k_segments;
};

// out = softmax(q kᵀ scale + bias) v over the keys that mask and window allow. lse is the natural
// log-sum-exp of each row of logits, and -inf for a row without any key. A dense sequence has max_q
// queries and max_k keys. A packed sequence b has the query rows from cu_q[b] up to cu_q[b + 1],
// and the key rows from cu_k[b] up to cu_k[b + 1]. Query i has the position of key i + offset,
// where offset is the number of keys minus the number of queries of the sequence. The query attends
// to at most `left` keys before its position and `right` keys after its position; -1 means no
// limit. For the weight of sequence b, head h, query i and key j, let w be word j % 4 of
// Philox(key, counter = (j / 4, i, h, b)). Dropout keeps the weight if w >> 8 is at least
// dropout.threshold. If `relative` is not null, its terms are added to q kᵀ, before the scale.
struct Attention {
  Format format;
  int64_t batch, heads, head_dim;
  int64_t max_q, max_k;
  const int32_t *cu_q, *cu_k;  // null if sequences are dense
  ConstRows q, k, v;
  Rows out;
  float* lse;
  int64_t lse_batch, lse_head;
  ConstPairs mask, bias;
  int64_t left, right;
  Dropout dropout;
  float scale;
  const RelativeTerms* relative;
};

// The number of queries and the number of keys in a block of attention.
constexpr int64_t kAttentionQueries = 96, kAttentionKeys = 128;

// A piece of work: the queries [begin, end) of a head, where `begin` is a multiple of
// kAttentionQueries. With AttentionPass::keys, the range is a range of keys, and `begin` is a
// multiple of kAttentionKeys. With AttentionPass::whole, the range is not read.
struct AttentionItem {
  int64_t sequence, head, begin, end;
};

// The backward of Attention. The members `out` and `lse` of `forward` are not read. Each gradient
// has the shape of its tensor. Items with AttentionPass::keys and the bias gradient read three
// statistics of each row: the maximum of the logits, the sum of the exponentials, and delta
// (attention/backward_kernel.h). Earlier items store these statistics in fp32, in the layout of
// lse. The pointers to the statistics are null if every item is a whole head and no gradient of the
// bias is requested. dbias is contiguous fp32 in the shape of the bias; its strides are 0 where the
// bias is broadcast.
struct AttentionBackward {
  Attention forward;
  ConstRows dout;
  Rows dq, dk, dv;
  float *maximum, *sum, *delta;
  float* dbias;
  int64_t dbias_batch, dbias_head, dbias_row, dbias_key;
};

// The gradients of RelativeTerms; a gradient that is not wanted is null. The tables are contiguous:
// dkeys and dqueries are (heads, positions, head_dim) and dbias is (heads, positions). An item adds
// the sums over its sequences to these tables. dsegment_scores has the layout of lse.
struct RelativeGradients {
  float *dkeys, *dqueries, *dbias, *dsegment_scores;
};

// out = softmax(q kᵀ scale) v for single queries over cached keys and values, in the steps of a
// decoder. q and out have heads * head_dim columns, and out is contiguous. Query i attends to the
// positions [begin[i], end[i]). Its keys and values at position j are those of slot slots[i *
// slots_row + j], or of slot 0 if `slots` is null. The member `batch` of k and v is the distance
// between slots, and `row` is the distance between positions. A unit of work is a head of a query.
struct DecodeAttention {
  Format format;
  int64_t heads, head_dim;
  ConstMatrix q;
  ConstRows k, v;
  const int32_t* slots;
  int64_t slots_row;
  const int32_t *begin, *end;
  float scale;
  void* out;
};

// The gradients that an item computes: all gradients of a whole head, dq of some queries, or dk and
// dv of some keys.
enum class AttentionPass : int32_t { whole, queries, keys };

// The functions of one level. A range [begin, end) counts rows, units or tasks.
struct Kernels {
  const char* name;
  // Returns the number of floats of scratch memory that the norms and the embedding need for rows
  // of `columns` elements.
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
  void (*splade_maximum)(const SpladeMaximum&, int64_t begin, int64_t end);
  void (*splade_result)(const SpladeResult&);
  // A range counts classes in splade_weight_gradient, and strips of kSpladeStrip columns in
  // splade_hidden_gradient, which needs out_rows * kSpladeStrip floats of scratch memory.
  void (*splade_weight_gradient)(const SpladeGradient&, int64_t begin, int64_t end);
  void (*splade_hidden_gradient)(const SpladeGradient&, int64_t begin, int64_t end, float* scratch);
  // Sets out[n] to the sum of column n of a contiguous (rows, columns) matrix. Terms are added from
  // the first row to the last.
  void (*sum_rows)(const double* matrix, int64_t rows, int64_t columns, float* out);
  // Returns the format to which a turned product packs an x that is stored in `format`.
  Format (*right_format)(Format format);
  // packed_bytes returns the size in bytes of a packed (n, k) operand, and pack_units returns the
  // number of units of work of `pack`.
  int64_t (*packed_bytes)(Format to, int64_t n, int64_t k);
  int64_t (*pack_units)(int64_t n);
  void (*pack)(const Packing&, int64_t begin, int64_t end);
  // Rounds the rows [begin, end).
  void (*round_rows)(const Rounding&, int64_t begin, int64_t end);
  // Returns whether a turned product can read the rows of x, which the packing describes, as they
  // are stored. If Gemm::few is set to these rows, they need not be packed.
  bool (*reads_rows)(const Gemm&, const Packing& x);
  // m and n of the product must be at least 1. `gemm` runs the tasks [begin, end) of a plan with
  // the memory `scratch`.
  GemmPlan (*gemm_plan)(const Gemm&, int threads);
  void (*gemm)(const Gemm&, const GemmPlan&, int64_t begin, int64_t end, void* scratch);
  // Returns the bytes of scratch memory, aligned to 64, that a thread needs for items of up to
  // `rows` queries.
  int64_t (*attention_scratch)(const Attention&, int64_t rows);
  void (*attention_forward)(const Attention&, const AttentionItem&, void* scratch);
  // Returns the bytes of scratch memory, aligned to 64, that a thread needs for items of up to
  // `keys` keys.
  int64_t (*attention_backward_scratch)(const AttentionBackward&, int64_t keys);
  void (*attention_backward)(const AttentionBackward&, AttentionPass, const AttentionItem&,
                             void* scratch);
  // relative_backward computes all gradients of one head of the sequences [begin, end) of an item,
  // for attention with relative terms. It needs the scratch memory of attention_backward for max_k
  // keys.
  void (*relative_backward)(const AttentionBackward&, const RelativeGradients&,
                            const AttentionItem&, void* scratch);
  // attention_bias_gradient computes one block of dbias, for the queries from item.begin on and the
  // keys from item.end on. If the bias is broadcast over sequences, the block of the first sequence
  // receives the sum over all sequences. The same holds for a bias that is broadcast over heads,
  // queries or keys.
  int64_t (*attention_bias_scratch)(const AttentionBackward&);
  void (*attention_bias_gradient)(const AttentionBackward&, const AttentionItem&, void* scratch);
  // attention_weights writes softmax weights of one head for the queries queries[begin] to
  // queries[end - 1], which are in ascending order. Each query's row has max_k elements, and the
  // first row is at `out`. Weights of queries or keys after the end of the sequence are 0.
  int64_t (*attention_weights_scratch)(const Attention&);
  void (*attention_weights)(const Attention&, const AttentionItem&, const int64_t* queries,
                            void* out, void* scratch);
  // decode_scratch returns the number of floats of scratch memory for up to `keys` keys of a query.
  int64_t (*decode_scratch)(const DecodeAttention&, int64_t keys);
  void (*decode_attention)(const DecodeAttention&, int64_t begin, int64_t end, float* scratch);
  // Returns the layout in which this level is fastest. The level also accepts groups of two with
  // the same number of lanes.
  Int8Layout (*int8_layout)();
  void (*int8_quantise)(const Int8Rows&, int64_t begin, int64_t end);
  void (*int8_gemm)(const Int8Gemm&, const Int8Block&);
};

}  // namespace fastbert::cpu
