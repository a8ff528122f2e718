// Backward of attention on Ampere and later GPUs, in 16-bit formats.
//
// A thread block computes one head of one sequence. For each block of keys, it goes through all
// tiles of 32 queries. A block has 128 keys, or 64 keys at head dim 128, and at head dim 64 under
// dropout or a mask of query-key pairs. The scores are computed as s = k q^T, so that their rows
// are keys. The softmax weights p and the gradients ds of the scores then have the register layout
// of a left operand. Therefore the sums dv += p dout and dk += ds q stay in the registers of the
// warp that owns the keys. Only ds is written to shared memory, for dq = ds^T k. A block of keys
// and a tile of queries take five products, and the weights are computed once.
//
// If a sequence has one block of keys, its dq is complete after this block. Otherwise, dq_sums in
// global memory contains the sums of dq over the blocks of keys in fp32, and the thread that wrote
// a sum adds to it for the next block. The kernel uses no atomics, so repeated runs give the same
// bits.
//
// The following counts are for 32 queries and 128 keys of head dim 64 on an A100. The products take
// 1,280 cycles of the tensor cores. The ldmatrix instructions take 960 wavefronts of the shared
// memory. The exponentials take 256 cycles of the special function units. If there are several
// blocks of keys, the sums of dq take 16 KiB of L2 traffic.

#include "access.cuh"
#include "attention.cuh"
#include "attention_products.cuh"
#include "attention_tile.cuh"
#include "hopper/attention.cuh"
#include "softmax.cuh"

namespace fastbert::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kQueries = 32;  // queries of a tile
constexpr int kColumns = kQueries / 8;

// The layout of the shared memory. It holds the keys and values of the block of keys, then two
// stages of queries, dout and out, then the ds of one tile, and then two stages of lse and delta. A
// warp owns kRowTiles tiles of 16 keys, the largest number that its registers hold without
// spilling.
template <int kHeadDim, int kTiles>
struct Memory {
  static constexpr int kRowTiles = kTiles;
  static constexpr int kBlockKeys = 16 * kRowTiles * kWarps;
  static_assert(kBlockKeys >= kAttentionBlockKeys);
  static constexpr int kKeyBytes = kBlockKeys * kHeadDim * 2;
  static constexpr int kTileBytes = kQueries * kHeadDim * 2;
  static constexpr int kStageBytes = 3 * kTileBytes;
  static constexpr int kGradientBytes = kBlockKeys * kQueries * 2;
  static constexpr int kValues = kKeyBytes, kRing = 2 * kKeyBytes;
  static constexpr int kGradients = kRing + 2 * kStageBytes;
  static constexpr int kStatistics = kGradients + kGradientBytes;
  static constexpr int kBytes = kStatistics + 2 * 2 * kQueries * 4;
  static_assert(kBytes <= kSharedLimit);
};

template <int kHeadDim, bool kHasExtras>
constexpr int kRowTilesOf = kHeadDim == 128 || (kHeadDim == 64 && kHasExtras) ? 1 : 2;

// Starts an asynchronous copy of 4 bytes from global to shared memory.
__device__ void copy_word(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Returns whether any query of the sequence attends a key, under a mask that differs between
// queries. `pairs` points to the mask of the head.
__device__ bool attended_by_any(const AttentionMask& mask, const uint8_t* pairs, int key,
                                int queries) {
  for (int64_t query = 0; query < queries; ++query)
    if (pairs[query * mask.stride_row + key * mask.stride_key]) return true;
  return false;
}

// Returns delta of a query, which is the sum of dout * out over the row of the query. Four threads
// share a row, so a block of 128 threads computes the delta of 32 queries.
template <class T, int kHeadDim>
__device__ float row_product(const unsigned char* dout, const unsigned char* out) {
  const int row = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
  float sum = 0.0f;
#pragma unroll
  for (int chunk = part; chunk < kHeadDim / 8; chunk += 4) {
    const uint32_t offset = SharedTile<kHeadDim>::offset(row, chunk);
    const Pack<T, kWidth<T>> a = *reinterpret_cast<const Pack<T, kWidth<T>>*>(dout + offset);
    const Pack<T, kWidth<T>> b = *reinterpret_cast<const Pack<T, kWidth<T>>*>(out + offset);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) sum += to_float(a.values[i]) * to_float(b.values[i]);
  }
  return quad_sum(sum);
}

// Holds one bit for each weight of a lane, which says whether dropout keeps the weight. The rows of
// the weights are keys. Element (query, key) uses word key % 4 of the Philox counter (key / 4,
// query, head, batch). Therefore the lanes of four neighbouring keys use the same counters, and
// each of these lanes computes a quarter of the counters.
template <int kRowTiles>
struct Keep {
  static constexpr int kShare = 4 * kRowTiles;
  // Word i is from the lane with key % 4 == i. Bit 4 c of the word is for counter c of that lane.
  uint32_t words[4];

  __device__ Keep(const Dropout& dropout, uint64_t seed, int first_key, int first_query,
                  const Head& h) {
    const int lane = static_cast<int>(threadIdx.x) % 32, own = lane / 4 % 4;
    uint32_t verdicts = 0;
#pragma unroll 1
    for (int c = 0; c < kShare; ++c) {
      const int e = own * kShare + c, row = e / 8, column = e / 2 % 4;
      const int key = first_key + 8 * row + lane / 16 * 4;
      const int query = first_query + 8 * column + lane % 4 * 2 + e % 2;
      const Words drawn = philox(seed, static_cast<uint32_t>(key / 4), static_cast<uint32_t>(query),
                                 static_cast<uint32_t>(h.head), static_cast<uint32_t>(h.batch));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        verdicts |= (drawn.word[i] >> 8 >= dropout.threshold ? 1u : 0u) << (4 * c + i);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = __shfl_sync(0xffffffffu, verdicts, (lane & ~12) | 4 * i) >> own;
  }

  // Returns whether dropout keeps element [m][j][i] of the weights.
  __device__ bool kept(int m, int j, int i) const {
    const int e = (2 * m + i / 2) * 8 + 2 * j + i % 2;
    return words[e / kShare] >> (4 * (e % kShare)) & 1;
  }
};

// Without dropout, `kept` returns true for every weight.
template <>
struct Keep<0> {
  __device__ Keep(const Dropout&, uint64_t, int, int, const Head&) {}
  __device__ bool kept(int, int, int) const { return true; }
};

// Reads a mask of query-key pairs, and returns one bit for each weight of a lane. Bit 8 (2 m +
// half) + 2 j + i is 1 if query `query` + 8 j + i attends key `key` + 16 m + 8 half.
template <int kRowTiles>
__device__ uint32_t allowed_pairs(const AttentionMask& mask, const uint8_t* pairs, int key,
                                  int keys, int query, int queries) {
  uint32_t allowed = 0;
#pragma unroll 1
  for (int e = 0; e < 16 * kRowTiles; ++e) {
    const int64_t row = query + e / 2 % 4 * 8 + e % 2, column = key + e / 8 * 8;
    if (row < queries && column < keys &&
        pairs[row * mask.stride_row + column * mask.stride_key] != 0)
      allowed |= 1u << e;
  }
  return allowed;
}

// Pointers to the first rows of the head that the thread block computes, and to the mask of this
// head.
template <class T>
struct HeadPointers {
  T *q, *dout, *out, *dq, *k, *v, *dk, *dv;
  const float* lse;
  float *delta, *dq_sums;
  const uint8_t* mask;
};

template <class T, int kHeadDim, bool kPairs, bool kDropout>
__global__ void __launch_bounds__(kThreads, kHeadDim == 128 ? 1 : 2)
    backward_kernel(AttentionBackward p) {
  using M = Memory<kHeadDim, kRowTilesOf<kHeadDim, kPairs || kDropout>>;
  constexpr int kRowTiles = M::kRowTiles;
  using Tile = SharedTile<kHeadDim>;
  using GradientTile = SharedTile<kQueries>;
  extern __shared__ __align__(256) unsigned char shared[];
  const Sequences& s = p.sequences;
  const int item = static_cast<int>(blockIdx.x);
  const Head h = head_of(s, item / s.heads, item % s.heads);
  if (s.cu_seqlens_q && h.batch == s.batches - 1) {
    const int queries = s.cu_seqlens_q[s.batches], keys = s.cu_seqlens_k[s.batches];
    zero_slack<T, kHeadDim, kThreads>(p.dq, h, queries, s.rows_q, 0, 1);
    zero_slack<T, kHeadDim, kThreads>(p.dk, h, keys, s.rows_k, 0, 1);
    zero_slack<T, kHeadDim, kThreads>(p.dv, h, keys, s.rows_k, 0, 1);
  }

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const uint32_t shared_base = shared_address(shared);
  // The pointers stay in shared memory, because the loop over the tiles needs the registers.
  __shared__ volatile HeadPointers<T> head;
  if (thread == 0) {
    const int64_t row = h.batch * p.lse_stride_batch + h.head * p.lse_stride_head + h.first_q;
    head.q = rows_of<T>(p.q, h, h.first_q);
    head.dout = rows_of<T>(p.dout, h, h.first_q);
    head.out = rows_of<T>(p.out, h, h.first_q);
    head.dq = rows_of<T>(p.dq, h, h.first_q);
    head.k = rows_of<T>(p.k, h, h.first_k);
    head.v = rows_of<T>(p.v, h, h.first_k);
    head.dk = rows_of<T>(p.dk, h, h.first_k);
    head.dv = rows_of<T>(p.dv, h, h.first_k);
    head.lse = p.lse + row;
    head.delta = p.delta + row;
    head.dq_sums = p.dq_sums + row * kHeadDim;
    head.mask = p.mask.data == nullptr
                    ? nullptr
                    : p.mask.data + h.batch * p.mask.stride_batch + h.head * p.mask.stride_head;
  }
  __syncthreads();
  const float factor = p.scale * kLog2E;
  const float keep_scale = kDropout ? p.dropout.scale : 1.0f;
  float* const stage_lse = reinterpret_cast<float*>(shared + M::kStatistics);
  float* const stage_delta = stage_lse + 2 * kQueries;

  // A sequence without keys has no tile that would write dq, so dq is set to 0 here.
  if (h.keys == 0) {
    for (int i = thread; i < h.queries * (kHeadDim / 8); i += kThreads) {
      T* row = rows_of<T>(p.dq, h, h.first_q) + i / (kHeadDim / 8) * p.dq.stride_row;
      *reinterpret_cast<uint4*>(row + i % (kHeadDim / 8) * 8) = {0, 0, 0, 0};
    }
  }

  for (int first_key = 0; first_key < h.keys; first_key += M::kBlockKeys) {
    const bool is_first = first_key == 0, is_last = first_key + M::kBlockKeys >= h.keys;

    // Starts the copy of a tile of queries to its stage. For the first block of keys, delta is not
    // copied, because the kernel computes delta during that block.
    const auto fill = [&](int first) {
      if (first < h.queries) {
        const int turn = first / kQueries % 2;
        const uint32_t stage = shared_base + M::kRing + turn * M::kStageBytes;
        const auto exists = [&](int row) { return first + row < h.queries; };
        copy_rows<kQueries, kHeadDim, kThreads>(stage, head.q + first * p.q.stride_row,
                                                p.q.stride_row, exists);
        copy_rows<kQueries, kHeadDim, kThreads>(stage + M::kTileBytes,
                                                head.dout + first * p.dout.stride_row,
                                                p.dout.stride_row, exists);
        if (is_first)
          copy_rows<kQueries, kHeadDim, kThreads>(stage + 2 * M::kTileBytes,
                                                  head.out + first * p.out.stride_row,
                                                  p.out.stride_row, exists);
        const int row = thread % kQueries;
        if (thread < kQueries && exists(row))
          copy_word(shared_address(stage_lse + turn * kQueries + row), head.lse + first + row);
        if (!is_first && thread / kQueries == 1 && exists(row))
          copy_word(shared_address(stage_delta + turn * kQueries + row), head.delta + first + row);
      }
      commit_copies();
    };

    // Keys that no query attends, and their values, become 0 in shared memory, because their global
    // memory may contain NaN. Later, each lane takes the bits of the keys that are its rows.
    KeyBits attended[kRowTiles];
    __shared__ KeyBits attended_of[M::kBlockKeys / kKeys];
    for (int i = thread; i < M::kBlockKeys; i += kThreads) {
      const int key = first_key + i;
      bool is_attended = key < h.keys;
      const uint8_t* mask = head.mask;
      if (is_attended && mask)
        is_attended = kPairs ? attended_by_any(p.mask, mask, key, h.queries)
                             : mask[key * p.mask.stride_key] != 0;
      const KeyBits bits = __ballot_sync(0xffffffffu, is_attended);
      if (lane == 0) attended_of[i / kKeys] = bits;
    }
    __syncthreads();
    const auto key_exists = [&](int row) {
      return (attended_of[row / kKeys] >> row % kKeys & 1) != 0;
    };
    const T* k = head.k + first_key * p.k.stride_row;
    const T* v = head.v + first_key * p.v.stride_row;
    copy_rows<M::kBlockKeys, kHeadDim, kThreads>(shared_base, k, p.k.stride_row, key_exists);
    copy_rows<M::kBlockKeys, kHeadDim, kThreads>(shared_base + M::kValues, v, p.v.stride_row,
                                                 key_exists);
    fill(0);
    const int warp_key = warp * 16 * kRowTiles;  // first key of the warp in the block of keys
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int row = warp_key + 16 * m;
      attended[m] = attended_of[row / kKeys] >> row % kKeys >> lane / 4;
    }

    float dk[kRowTiles][kHeadDim / 8][4] = {}, dv[kRowTiles][kHeadDim / 8][4] = {};
    for (int first_query = 0; first_query < h.queries; first_query += kQueries) {
      const int turn = first_query / kQueries % 2;
      const uint32_t base = opaque(shared_base);
      const uint32_t queries = base + M::kRing + turn * M::kStageBytes;
      const uint32_t douts = queries + M::kTileBytes;
      wait_for_copies<0>();
      __syncthreads();
      fill(first_query + kQueries);
      const float* tile_lse = stage_lse + turn * kQueries;
      float* tile_delta = stage_delta + turn * kQueries;
      if (is_first) {
        const float sum = row_product<T, kHeadDim>(shared + (douts - base),
                                                   shared + (douts - base) + M::kTileBytes);
        const int row = thread / 4;
        if (thread % 4 == 0) {
          tile_delta[row] = sum;
          if (!is_last && first_query + row < h.queries) head.delta[first_query + row] = sum;
        }
      }

      const uint32_t pairs_allowed =
          kPairs ? allowed_pairs<kRowTiles>(p.mask, head.mask, first_key + warp_key + lane / 4,
                                            h.keys, first_query + lane % 4 * 2, h.queries)
                 : 0;
      // The kept weights are determined here, because few registers are in use at this point.
      const volatile int64_t* seed = p.dropout.seed;
      const Keep<kDropout ? kRowTiles : 0> keep(p.dropout, kDropout ? *seed : 0,
                                                first_key + warp_key, first_query, h);
      float weights[kRowTiles][kColumns][4];
      multiply_transposed<T, kHeadDim>(weights, base + warp_key * Tile::kRowBytes, queries);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int column = 8 * j + lane % 4 * 2;
        const float2 logarithms = *reinterpret_cast<const float2*>(tile_lse + column);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            // Queries beyond the end of the sequence are not allowed: shared memory has no lse for
            // them.
            const bool allowed = kPairs ? pairs_allowed >> (8 * (2 * m + i / 2) + 2 * j + i % 2) & 1
                                        : (attended[m] >> (8 * (i / 2)) & 1) &&
                                              first_query + column + i % 2 < h.queries;
            const float logarithm = i % 2 ? logarithms.y : logarithms.x;
            float& weight = weights[m][j][i];
            weight = allowed ? exp2_fast(fmaf(weight, factor, -logarithm * kLog2E)) : 0.0f;
          }
        }
      }

      float gradients[kRowTiles][kColumns][4];
      multiply_transposed<T, kHeadDim>(gradients, base + M::kValues + warp_key * Tile::kRowBytes,
                                       douts);
      if (is_first) __syncthreads();  // all threads have written their delta
      // The softmax over a single key is constant, so its gradient is exactly 0; the formula would
      // give a small number because of rounding. If the query does not attend the key, the weight
      // is 0 and the formula is not used, because `dweight` may be NaN.
      const auto gradient = [&](float weight, float dweight, float row_delta) {
        return weight == 0.0f || h.keys == 1 ? 0.0f : weight * (dweight - row_delta);
      };
      const auto with_delta = [&](const auto& kept) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const int column = 8 * j + lane % 4 * 2;
          const float2 deltas = *reinterpret_cast<const float2*>(tile_delta + column);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const bool keep = kept(m, j, i);
              float& dweight = gradients[m][j][i];
              float& weight = weights[m][j][i];
              dweight =
                  gradient(weight, keep ? dweight * keep_scale : 0.0f, i % 2 ? deltas.y : deltas.x);
              if (!keep) weight = 0.0f;
            }
          }
        }
      };
      with_delta([&](int m, int j, int i) { return keep.kept(m, j, i); });
      accumulate<T, kHeadDim>(dv, weights, douts);
      accumulate<T, kHeadDim>(dk, gradients, queries);

      // The gradients ds of the scores are written to shared memory with keys as rows.
      const uint32_t own =
          opaque(GradientTile::offset(warp_key + lane / 4, 0) + lane % 4 * 4) + M::kGradients;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            const float (&g)[4] = gradients[m][j];
            const uint32_t at = (own ^ (16 * j)) + (16 * m + 8 * half) * GradientTile::kRowBytes;
            *reinterpret_cast<uint32_t*>(shared + at) = pair(g[2 * half], g[2 * half + 1], T{});
          }
        }
      }
      __syncthreads();

      // Each warp computes dq for 16 queries and half of the columns, so two warps share the rows.
      constexpr int kDims = kHeadDim / 2;
      const int dq_row = warp % 2 * 16, dq_dim = warp / 2 * kDims;
      const int dq_lane = static_cast<int>(opaque(lane));
      float sums[kDims / 8][4] = {};
      {
        const uint32_t left =
            base + M::kGradients +
            GradientTile::offset(dq_lane / 16 * 8 + dq_lane % 8, dq_row / 8 + dq_lane / 8 % 2);
        const uint32_t right = base + Tile::offset(dq_lane % 16, dq_dim / 8 + dq_lane / 16);
#pragma unroll
        for (int step = 0; step < M::kBlockKeys / 16; ++step) {
          LeftFragment rows;
          load_transposed_matrices(rows.pairs, left + 16 * step * GradientTile::kRowBytes);
#pragma unroll
          for (int d = 0; d < kDims / 8; d += 2) {
            uint32_t pairs[4];
            load_transposed_matrices(pairs, (right ^ (16 * d)) + 16 * step * Tile::kRowBytes);
            multiply(sums[d], rows, {{pairs[0], pairs[1]}}, T{});
            multiply(sums[d + 1], rows, {{pairs[2], pairs[3]}}, T{});
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = first_query + dq_row + 8 * half + dq_lane / 4;
        const bool exists = row < h.queries;
        float2* kept_sums =
            reinterpret_cast<float2*>(head.dq_sums + row * kHeadDim + dq_dim + dq_lane % 4 * 2);
#pragma unroll
        for (int d = 0; d < kDims / 8; ++d) {
          if (!exists) continue;
          float2 sum = {sums[d][2 * half], sums[d][2 * half + 1]};
          if (!is_first) {
            const float2 before = kept_sums[4 * d];
            sum = {sum.x + before.x, sum.y + before.y};
          }
          if (!is_last) {
            kept_sums[4 * d] = sum;
          } else {
            T* to = head.dq + row * p.dq.stride_row + dq_dim + 8 * d + dq_lane % 4 * 2;
            *reinterpret_cast<uint32_t*>(to) = pair(sum.x * p.scale, sum.y * p.scale, T{});
          }
        }
      }
    }

    T* dk_rows = head.dk + (first_key + warp_key) * p.dk.stride_row;
    T* dv_rows = head.dv + (first_key + warp_key) * p.dv.stride_row;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * m + 8 * half + lane / 4;
        const bool exists = first_key + warp_key + row < h.keys;
        store_row<T>(dk_rows + row * p.dk.stride_row, dk[m], half, p.scale, exists);
        store_row<T>(dv_rows + row * p.dv.stride_row, dv[m], half, keep_scale, exists);
      }
    }
    wait_for_copies<0>();
    __syncthreads();
  }
}

template <class T, int kHeadDim, bool kPairs, bool kDropout>
cudaError_t launch_backward(const AttentionBackward& p, cudaStream_t stream) {
  const int64_t grid = static_cast<int64_t>(p.sequences.heads) * p.sequences.batches;
  return launch(backward_kernel<T, kHeadDim, kPairs, kDropout>, dim3(static_cast<unsigned>(grid)),
                kThreads, p, stream,
                Memory<kHeadDim, kRowTilesOf<kHeadDim, kPairs || kDropout>>::kBytes);
}

template <class T, int kHeadDim>
cudaError_t launch_backward(const AttentionBackward& p, cudaStream_t stream) {
  const bool pairs = p.mask.data && p.mask.stride_row != 0;
  if (p.dropout.seed)
    return pairs ? launch_backward<T, kHeadDim, true, true>(p, stream)
                 : launch_backward<T, kHeadDim, false, true>(p, stream);
  return pairs ? launch_backward<T, kHeadDim, true, false>(p, stream)
               : launch_backward<T, kHeadDim, false, false>(p, stream);
}

template <class T>
cudaError_t launch_backward(const AttentionBackward& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 32:
      return launch_backward<T, 32>(p, stream);
    case 64:
      return launch_backward<T, 64>(p, stream);
    case 128:
      return launch_backward<T, 128>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t attention_backward(const AttentionBackward& p, cudaStream_t stream) {
  if (!(p.scale > 0.0f)) return cudaErrorInvalidValue;
  if (hopper_attention_refuses(p) == nullptr) return hopper_attention_backward(p, stream);
  switch (p.format) {
    case Format::bf16:
      return launch_backward<__nv_bfloat16>(p, stream);
    case Format::f16:
      return launch_backward<__half>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace fastbert::cuda
