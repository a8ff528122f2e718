// What the CPU kernels take, and the table through which one instruction set is reached.
//
// The kernels know nothing of torch: pointers, strides and sizes in, results written to memory that
// the caller owns. Each instruction-set level (level_*.cpp) compiles the same kernels and fills one
// Kernels table; dispatch.cpp picks a table at run time. This header holds plain data only, no
// function that a level could emit with its own instructions and the linker then share with the
// others.

#pragma once

#include <cstdint>

namespace fastbert::cpu {

// Storage format of activations; arithmetic and statistics are fp32 in every format.
enum class Format : int32_t { f32, bf16, f16 };

// The gated ones take twice the columns: f of the first half times the second half.
enum class Activation : int32_t { none, gelu, gelu_tanh, relu, geglu, swiglu };

// A row-major matrix whose rows lie `stride` elements apart; data is null where an operand is
// absent.
struct ConstMatrix {
  const void* data;
  int64_t stride;
};

// Element (r, n) is kept iff word n % 4 of Philox(key, counter = (n / 4, r, 0, 0)) >> 8 >=
// threshold.
struct Dropout {
  bool enabled;
  uint32_t key[2];
  uint32_t threshold;
  float scale;
};

// y = LN(residual + dropout(x + x_bias)) over rows of `columns` elements; y is contiguous.
struct LayerNormForward {
  Format format;
  int64_t columns;
  ConstMatrix x, residual;
  const float *weight, *bias, *x_bias;
  Dropout dropout;
  float eps;
  void* y;
  float *mean, *rstd;
};

// Gradients of the sum (dsum) and, under dropout, of x (dx); both contiguous.
// Each chunk of rows adds into its own partial sums, `columns` doubles each: dweight, dbias with
// has_bias, and dx_bias with x_bias.
struct LayerNormBackward {
  Format format;
  int64_t columns;
  ConstMatrix dy, x, residual;
  const float *weight, *x_bias, *mean, *rstd;
  bool has_bias;
  Dropout dropout;
  void *dsum, *dx;
};

// y = weight s / sqrt(mean(s^2) + eps), s = x + residual; y is contiguous.
struct RmsNormForward {
  Format format;
  int64_t columns;
  ConstMatrix x, residual;
  const float* weight;
  float eps;
  void* y;
  float* rstd;
};

// The gradient of the sum, contiguous; dweight is summed by chunks, as in layer norm.
struct RmsNormBackward {
  Format format;
  int64_t columns;
  ConstMatrix dy, x, residual;
  const float *weight, *rstd;
  void* dsum;
};

// The first `turned` heads of each row of x (tokens, heads, 2 half), turned by the angles whose
// cosines and sines are contiguous (tokens, half), backwards where `direction` is -1; the others
// are copied. Strides in elements, 1 inside a head; y is contiguous.
struct Rotary {
  Format format;
  int64_t heads, turned, half;
  const void* x;
  int64_t stride_row, stride_head;
  const float *cos, *sin;
  float direction;
  void* y;
};

// For each token a row of each of `count` tables: of the words, then of the types and of the
// positions where they exist.
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

// The gradient of the sum, contiguous, in fp32; dweight and, with has_bias, dbias are summed by
// chunks.
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

// Row targets[s] of out = the sum of the rows order[starts[s]] … order[starts[s + 1] - 1], first
// row first; without order the rows are those numbers themselves. Units of work are strips of
// kStripColumns columns of one segment.
constexpr int64_t kStripColumns = 128;
struct SegmentSums {
  Format format;  // of out
  int64_t columns;
  const float* rows;
  int64_t stride;
  const int64_t *order, *starts, *targets;
  void* out;
  int64_t out_stride;
};

// Logits, contiguous and without their bias, of the classes [first, first + columns), and by row
// the labels and the running maximum, sum of exponentials relative to it and label's logit.
struct CrossEntropyForward {
  int64_t first, columns;
  const float *logits, *bias;
  const int64_t* labels;
  float *highest, *total, *own;
};

// The logits become their gradients, scale (softmax - onehot); `rounded`, where it is not null,
// gets them in `format`.
struct CrossEntropyBackward {
  Format format;
  int64_t first, columns;
  float* logits;
  const float* bias;
  const int64_t* labels;
  const float *highest, *total, *scale;
  void* rounded;
};

// y = f(h + bias), contiguous, rows of `columns` elements; gated, h and bias have twice as many.
struct ActivationForward {
  Format format;
  Activation activation;
  int64_t columns;
  ConstMatrix h;
  const float* bias;
  void* y;
};

// The gradient dh of h, and `a` = y again where it is not null; both contiguous. The sum of dh over
// a chunk's rows is added to its partial sums, as long as a row of h, where there are any.
struct ActivationBackward {
  Format format;
  Activation activation;
  int64_t columns;  // of dy
  ConstMatrix dy, h;
  const float* bias;
  void *dh, *a;
};

// The right operand of a product as its kernel wants it: W (n, k) with any strides, in elements,
// into `packed`, whose layout is the level's own. Units of packing are panels of columns.
struct Packing {
  Format from, to;
  const void* weight;
  int64_t row, column;
  int64_t n, k;
  void* packed;
};

// What becomes of the sums of a product with n columns: `bias` (n) is added, the sum stored in
// `pre_activation` where that is asked for, the activation applied, `residual` added, and with
// `norm_weight` each row normalised (layer norm).
struct Epilogue {
  int64_t n;
  const float* bias;
  Activation activation;
  Format residual_format;
  ConstMatrix residual;
  const float *norm_weight, *norm_bias;
  float eps;
  Format pre_activation_format, out_format;
  void* pre_activation;  // contiguous, or null
  void* out;             // contiguous
};

// out = epilogue(a Wᵀ), a (m, k) with any strides. Sums over k run in one order, whatever m and the
// number of threads are.
struct Gemm : Epilogue {
  Format format, packed_format;  // of a, of W
  int64_t m, k;
  const void* a;
  int64_t a_row, a_column;
  const void* packed;
};

// How a product is divided: independent tasks, and the bytes that one thread needs to work on them
// (aligned to 64).
struct GemmPlan {
  int64_t tasks, scratch;
  int64_t rows, columns;  // of the results that a task forms, at most
  int64_t long_blocks;    // blocks of `rows` rows; those that follow have
  int64_t short_rows;
};

// How the weights of int8 products lie: panels of `lanes` columns, [k / group][lanes][group].
struct Int8Layout {
  int64_t lanes, group;
};

// Rows of x as integers: q (rows, depth), zero from `columns` on, uint8_t in groups of four and
// int16_t in pairs; x = (q - zero) scale. In pairs the zero is taken off already.
struct Int8Rows {
  Format format;
  int64_t columns, depth, group;
  ConstMatrix x;
  void* q;
  float* scale;
  int32_t* zero;
};

// out = epilogue(x Wᵀ) by integers. column_scale and column_sum are padded to whole panels, q to 16
// rows.
struct Int8Gemm : Epilogue {
  int64_t depth, group;
  const void* q;
  const float* row_scale;
  const int32_t* zero;
  const int8_t* packed;
  const float* column_scale;
  const int32_t* column_sum;
};

// A task of such a product; the first panel's number divides by four, the first row's by 16.
struct Int8Block {
  int64_t row_begin, row_end, panel_begin, panel_end;
};

// Rows of `head_dim` elements by (batch, head, row), strides in elements; packed sequences all lie
// in batch 0.
struct ConstRows {
  const void* data;
  int64_t batch, head, row;
};

struct Rows {
  void* data;
  int64_t batch, head, row;
};

// An element for every (batch, head, query, key), strides in elements and 0 where it is broadcast;
// data is null where it is absent. Masks are bytes, nonzero where a query may attend.
struct ConstPairs {
  const void* data;
  Format format;
  int64_t batch, head, row, key;
};

// out = softmax(q kᵀ scale + bias) v over the keys that may be attended, and the natural
// log-sum-exp of each row of logits (-inf of a row that attends nothing). Sequence b has max_q
// queries and max_k keys or, packed, the rows from cu_q[b] (cu_k[b]) to the next. Query i stands at
// key i + offset, offset = keys - queries of the sequence, and sees those from `left` before to
// `right` behind it; -1 leaves a side open. Weight (b, h, i, j) is kept iff word j % 4 of
// Philox(key, counter = (j / 4, i, h, b)) >> 8 >= threshold.
struct Attention {
  Format format;
  int64_t batch, heads, head_dim;
  int64_t max_q, max_k;
  const int32_t *cu_q, *cu_k;  // null: dense
  ConstRows q, k, v;
  Rows out;
  float* lse;
  int64_t lse_batch, lse_head;
  ConstPairs mask, bias;
  int64_t left, right;
  Dropout dropout;
  float scale;
};

// The blocks of queries and of keys that attention is worked out in.
constexpr int64_t kAttentionQueries = 96, kAttentionKeys = 128;

// A piece of work: queries [begin, end) of a head, begin a multiple of kAttentionQueries (where it
// is about keys, of kAttentionKeys).
struct AttentionItem {
  int64_t sequence, head, begin, end;
};

// The gradients of an Attention (of which `out` and `lse` are not read), each like its tensor. The
// statistics, fp32 and laid out as lse, pass from items by queries to the others: the maximum of a
// row's logits, the sum of its exponentials, delta. They are null where every item is a whole head
// and no gradient of the bias is wanted. dbias is contiguous fp32, in the shape of the bias;
// strides are 0 where that is broadcast.
struct AttentionBackward {
  Attention forward;
  ConstRows dout;
  Rows dq, dk, dv;
  float *maximum, *sum, *delta;
  float* dbias;
  int64_t dbias_batch, dbias_head, dbias_row, dbias_key;
};

// Which gradients an item finds: all of a whole head, dq of some queries, dk and dv of some keys.
enum class AttentionPass : int32_t { whole, queries, keys };

// Words [first, last), of 32 bits, of `rows` rows: one checksum for each word, which `sums` holds
// for the rows before these.
struct Checksums {
  const char* data;
  int64_t rows, stride, row_bytes;  // stride in bytes
  int64_t first, last;
  uint32_t* sums;
};

// Every function handles the rows [begin, end).
struct Kernels {
  const char* name;
  // Floats of scratch memory that the norms and the embedding need for rows of this length.
  int64_t (*layer_norm_scratch)(int64_t columns);
  void (*layer_norm_forward)(const LayerNormForward&, int64_t begin, int64_t end, float* scratch);
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
  // Bytes of an (n, k) weight packed, and the units in which `pack` can be shared out.
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
  // dbias in one block: queries from item.begin, keys from item.end on; the first sequence (head,
  // query, key) stands for all where the bias is broadcast.
  int64_t (*attention_bias_scratch)(const AttentionBackward&);
  void (*attention_bias_gradient)(const AttentionBackward&, const AttentionItem&, void* scratch);
  // The softmax weights of queries[begin] to queries[end - 1] of a head, ascending, to rows of
  // max_k elements from `out` on; 0 beyond its lengths.
  int64_t (*attention_weights_scratch)(const Attention&);
  void (*attention_weights)(const Attention&, const AttentionItem&, const int64_t* queries,
                            void* out, void* scratch);
  // What this level prefers; with its lanes it takes groups of two as well.
  Int8Layout (*int8_layout)();
  void (*int8_quantise)(const Int8Rows&, int64_t begin, int64_t end);
  void (*int8_gemm)(const Int8Gemm&, const Int8Block&);
  // The same sums on every level.
  void (*checksums)(const Checksums&);
};

}  // namespace fastbert::cpu
