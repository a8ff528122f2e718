// Forward of attention on Ampere and later GPUs, in 16-bit formats.
//
// A thread block computes 128 queries of one head. It goes through the keys in tiles of 32 and
// updates a running softmax. Each warp owns 32 of the queries and keeps their scores, weights and
// sums of out in registers. Keys and values go through a ring of three stages in shared memory.
// cp.async fills the ring two tiles ahead, so that each tile needs only one barrier.
//
// The following counts are for one warp and one tile of 32 keys of head dim 64 on an A100. The 64
// products of 16 x 8 x 16 take 512 cycles of a tensor core. The 1,024 exponentials take 256 cycles
// of the special function units. The 24 ldmatrix instructions, of 4 wavefronts each, take 96 cycles
// of the shared memory, which four warps share. The loop has 565 instructions, but a tile without
// hidden keys skips the instructions for masks. Issuing the other instructions takes about as long
// as the products. Below about 300 keys, device memory is the limit.

#include "attention.cuh"
#include "attention_products.cuh"
#include "attention_tile.cuh"
#include "hopper/attention.cuh"
#include "softmax.cuh"

namespace fastbert::cuda {
namespace {

constexpr int kStages = 3;

constexpr int kRowTiles = 2, kWarps = 4, kThreads = 32 * kWarps;
constexpr int kQueries = 16 * kRowTiles * kWarps;
constexpr int kColumns = kKeys / 8;  // column tiles of the right operand

// Returns the number of blocks for the queries of a sequence. It is at least 1, because a block
// writes the rows that belong to no sequence even if no sequence has a query.
inline __host__ __device__ int query_blocks(int max_q) {
  return max_q > kQueries ? (max_q + kQueries - 1) / kQueries : 1;
}

template <int kHeadDim>
struct Memory {
  static constexpr int kQueryBytes = kQueries * kHeadDim * 2;
  static constexpr int kTileBytes = kKeys * kHeadDim * 2;
  static constexpr int kStageBytes = 2 * kTileBytes;  // keys, then values
  static constexpr int kBytes = kQueryBytes + kStages * kStageBytes;
  static_assert(kBytes <= kSharedLimit);
};

// The scores or weights of a warp for 32 queries and 32 keys.
using Scores = float[kRowTiles][kColumns][4];

// Sets a score to -inf if the bit of its key is 0. `upper` has the bits for the row of scores
// [j][0] and [j][1], and `lower` has the bits for the row of scores [j][2] and [j][3]. With t =
// lane % 4, scores [j][i] and [j][i + 2] belong to the key of bit 8 j + 2 t + i, for i = 0 and 1.
__device__ void hide(float (&scores)[kColumns][4], KeyBits upper, KeyBits lower) {
  const uint32_t first = threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const KeyBits bits = i < 2 ? upper : lower;
      if (!(bits >> (8 * j + first + i % 2) & 1)) scores[j][i] = -INFINITY;
    }
  }
}

// Reads a row of a mask of query-key pairs, which is the row of one query. Returns one bit for each
// key of the tile for which the lane holds a score. The bit is 1 if the query attends the key.
__device__ KeyBits attended_pairs(const uint8_t* row, int64_t stride_key, int first, int keys) {
  const int lane_first = static_cast<int>(threadIdx.x) % 4 * 2;
  KeyBits bits = 0;
#pragma unroll 1
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = 8 * j + lane_first + i;
      if (first + key < keys && row[(first + key) * stride_key]) bits |= 1u << key;
    }
  }
  return bits;
}

// Writes 0 to shared memory in place of the values of keys that no query of the block attends,
// because these values may be NaN. `any` has the bits of the keys that the lane's queries attend.
template <int kHeadDim>
__device__ void zero_unattended(unsigned char* values, KeyBits any) {
  constexpr int kChunks = kHeadDim / 8;
  __shared__ KeyBits of_warp[kWarps];
  any = __reduce_or_sync(0xffffffffu, any);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = any;
  __syncthreads();
  any = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) any |= of_warp[i];
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * kChunks; i += kThreads) {
    if (any >> i / kChunks & 1) continue;
    const uint32_t offset = SharedTile<kHeadDim>::offset(i / kChunks, i % kChunks);
    *reinterpret_cast<uint4*>(values + offset) = {0, 0, 0, 0};
  }
  __syncthreads();
}

// Applies dropout without its scale: a weight becomes 0 if dropout drops it. Element (row, key)
// uses word key % 4 of the Philox counter (key / 4, row, head, batch). A lane holds two of the four
// keys of a counter in every column tile. Therefore, of every two column tiles, each lane computes
// the random words of one tile, for itself and for its neighbour. The two lanes then exchange the
// bits that say which weights dropout keeps.
__device__ void drop(float (&weights)[kColumns][4], const Dropout& dropout, int row, int first_key,
                     const Head& h) {
  const volatile int64_t* seed_of_call = dropout.seed;  // is read again in every tile
  const uint64_t seed = static_cast<uint64_t>(*seed_of_call);
  const int t = static_cast<int>(threadIdx.x) % 4;
  uint32_t mine = 0, theirs = 0;
#pragma unroll 1
  for (int j = 0; j < kColumns; j += 2) {
    const int tile = j + t % 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Words words = philox(seed, static_cast<uint32_t>((first_key + 8 * tile) / 4 + t / 2),
                                 static_cast<uint32_t>(row + 8 * half),
                                 static_cast<uint32_t>(h.head), static_cast<uint32_t>(h.batch));
      uint32_t kept = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) kept |= (words.word[i] >> 8 >= dropout.threshold ? 1u : 0u) << i;
      // The even lane of the pair owns words 0 and 1, and the odd lane words 2 and 3.
      const uint32_t own = t % 2 ? kept >> 2 : kept & 3, other = t % 2 ? kept & 3 : kept >> 2;
      mine |= own << (2 * (j + half));
      theirs |= other << (2 * (j + half));
    }
  }
  // `mine` has the bits of tile j + t % 2, and `received` the bits of tile j + 1 - t % 2.
  const uint32_t received = __shfl_xor_sync(0xffffffffu, theirs, 1);
  const uint32_t even = t % 2 ? received : mine, odd = t % 2 ? mine : received;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t verdicts = j % 2 ? odd : even;
      if (!(verdicts >> (2 * (j / 2 * 2 + i / 2) + i % 2) & 1)) weights[j][i] = 0.0f;
    }
  }
}

template <class T, int kHeadDim, bool kPairs, bool kDropout>
__global__ void __launch_bounds__(kThreads, kHeadDim == 128 || kPairs || kDropout ? 2 : 3)
    forward_kernel(AttentionForward p) {
  using M = Memory<kHeadDim>;
  extern __shared__ __align__(256) unsigned char shared[];
  const Sequences& s = p.sequences;
  const int blocks = query_blocks(s.max_q);
  const int block = static_cast<int>(blockIdx.x) % blocks;
  const int item = static_cast<int>(blockIdx.x) / blocks;
  const Head h = head_of(s, item / s.heads, item % s.heads);
  if (s.cu_seqlens_q && h.batch == s.batches - 1) {
    const int first = s.cu_seqlens_q[s.batches];
    zero_slack<T, kHeadDim, kThreads>(p.out, h, first, s.rows_q, block, blocks);
    float* lse = p.lse + h.head * p.lse_stride_head;
    for (int64_t i = first + block * kThreads + threadIdx.x; i < s.rows_q; i += blocks * kThreads)
      lse[i] = -INFINITY;
  }
  const int first_query = block * kQueries;
  if (first_query >= h.queries) return;

  const uint32_t queries = shared_address(shared), ring = queries + M::kQueryBytes;
  const T* k = rows_of<T>(p.k, h, h.first_k);
  const T* v = rows_of<T>(p.v, h, h.first_k);
  const uint8_t* mask = p.mask.data;
  if (mask) mask += h.batch * p.mask.stride_batch + h.head * p.mask.stride_head;
  const uint8_t* key_mask = kPairs ? nullptr : mask;
  const int tiles = (h.keys + kKeys - 1) / kKeys;

  const auto fill = [&](int tile) {
    if (tile < tiles) {
      const int first = tile * kKeys;
      const uint32_t stage = ring + tile % kStages * M::kStageBytes;
      const KeyBits bits = attended_keys(key_mask, p.mask.stride_key, first, h.keys);
      const auto exists = [&](int row) { return (bits >> row & 1) != 0; };
      copy_rows<kKeys, kHeadDim, kThreads>(stage, k + first * p.k.stride_row, p.k.stride_row,
                                           exists);
      copy_rows<kKeys, kHeadDim, kThreads>(stage + M::kTileBytes, v + first * p.v.stride_row,
                                           p.v.stride_row, exists);
    }
    commit_copies();
  };

  copy_rows<kQueries, kHeadDim, kThreads>(queries, rows_of<T>(p.q, h, h.first_q + first_query),
                                          p.q.stride_row,
                                          [&](int row) { return first_query + row < h.queries; });
  fill(0);
  fill(1);

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp * 16 * kRowTiles;
  float out[kRowTiles][kHeadDim / 8][4] = {};
  RowState rows[kRowTiles][2];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[m][half].clear();
  }
  const float factor = p.scale * kLog2E;

  for (int tile = 0; tile < tiles; ++tile) {
    const int first_key = tile * kKeys;
    const uint32_t keys = ring + tile % kStages * M::kStageBytes, values = keys + M::kTileBytes;
    wait_for_copies<1>();
    __syncthreads();
    fill(tile + 2);
    // `row` is the number of the query of the lane's first score. `opaque` makes the compiler
    // compute `row` again in each tile, so that `row` needs no register between tiles.
    const int row = first_query + warp_row + static_cast<int>(opaque(threadIdx.x) % 32 / 4);

    Scores scores;
    multiply_transposed<T, kHeadDim>(scores, queries + warp_row * SharedTile<kHeadDim>::kRowBytes,
                                     keys);
    if (kPairs) {
      KeyBits any = 0;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        KeyBits bits[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t query = row + 16 * m + 8 * half;
          bits[half] = query < h.queries ? attended_pairs(mask + query * p.mask.stride_row,
                                                          p.mask.stride_key, first_key, h.keys)
                                         : 0;
        }
        hide(scores[m], bits[0], bits[1]);
        any |= bits[0] | bits[1];
      }
      zero_unattended<kHeadDim>(shared + (values - queries), any);
    } else {
      const KeyBits bits = attended_keys(mask, p.mask.stride_key, first_key, h.keys);
      if (bits != kAllKeys) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) hide(scores[m], bits, bits);
      }
    }

#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = rows[m][half].maximum;
        const float rescale = rows[m][half].step(scores[m], half, factor);
        if (__any_sync(0xffffffffu, rows[m][half].maximum > before)) {
#pragma unroll
          for (int d = 0; d < kHeadDim / 8; ++d) {
            out[m][d][2 * half] *= rescale;
            out[m][d][2 * half + 1] *= rescale;
          }
        }
      }
      if (kDropout) drop(scores[m], p.dropout, row + 16 * m, first_key, h);
    }
    accumulate<T, kHeadDim>(out, scores, values);
  }

  T* to = rows_of<T>(p.out, h, h.first_q + first_query + warp_row);
  float* lse = p.lse + h.batch * p.lse_stride_batch + h.head * p.lse_stride_head + h.first_q;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float inverse;
      const float logarithm = rows[m][half].finish(inverse);
      const int in_warp = 16 * m + 8 * half + lane / 4;
      const bool exists = first_query + warp_row + in_warp < h.queries;
      store_row<T>(to + in_warp * p.out.stride_row, out[m], half,
                   kDropout ? inverse * p.dropout.scale : inverse, exists);
      if (exists && lane % 4 == 0) lse[first_query + warp_row + in_warp] = logarithm;
    }
  }
}

template <class T, int kHeadDim, bool kPairs, bool kDropout>
cudaError_t launch_forward(const AttentionForward& p, cudaStream_t stream) {
  const auto kernel = forward_kernel<T, kHeadDim, kPairs, kDropout>;
  const int64_t blocks = query_blocks(p.sequences.max_q);
  const int64_t grid = blocks * p.sequences.heads * p.sequences.batches;
  return launch(kernel, dim3(static_cast<unsigned>(grid)), kThreads, p, stream,
                Memory<kHeadDim>::kBytes);
}

template <class T, int kHeadDim>
cudaError_t launch_forward(const AttentionForward& p, cudaStream_t stream) {
  const bool pairs = p.mask.data && p.mask.stride_row != 0;
  if (p.dropout.seed)
    return pairs ? launch_forward<T, kHeadDim, true, true>(p, stream)
                 : launch_forward<T, kHeadDim, false, true>(p, stream);
  return pairs ? launch_forward<T, kHeadDim, true, false>(p, stream)
               : launch_forward<T, kHeadDim, false, false>(p, stream);
}

template <class T>
cudaError_t launch_forward(const AttentionForward& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 32:
      return launch_forward<T, 32>(p, stream);
    case 64:
      return launch_forward<T, 64>(p, stream);
    case 128:
      return launch_forward<T, 128>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t attention_forward(const AttentionForward& p, cudaStream_t stream) {
  if (!(p.scale > 0.0f)) return cudaErrorInvalidValue;
  if (hopper_attention_refuses(p) == nullptr) return hopper_attention_forward(p, stream);
  switch (p.format) {
    case Format::bf16:
      return launch_forward<__nv_bfloat16>(p, stream);
    case Format::f16:
      return launch_forward<__half>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace fastbert::cuda
