// The part of the backward of attention that is the same for all head dims: the work of a group of
// four warps on its 64 keys of each block of keys. The group holds the sums of dk and dv of these
// keys, computes the weights and gradients of a tile, and stores the results.

#pragma once

#include <algorithm>

#include "../attention_products.cuh"
#include "../launch.cuh"
#include "../mma.cuh"
#include "backward_tiles.cuh"
#include "device.cuh"
#include "dropout.cuh"
#include "wgmma.cuh"

namespace fastbert::cuda::backward {

constexpr int kGroupKeys = kKeyRows / kConsumers, kWarpRows = 16;

// The number of scores of a lane: 16 queries for each of two keys.
constexpr int kTileScores = kTileQueries / 2;

template <class T, int kHeadDim, bool kPairs, bool kDropout>
class KeyGroup {
 protected:
  using M = Memory<kHeadDim>;
  using Row = typename M::Row;
  using Kept = KeptWeights<kDropout>;
  static constexpr int kAllRows = 0xffff;
  // The number of columns of dq that the group computes: half of the columns for every tile, or at
  // head dim 32 all columns for every second tile.
  static constexpr int kColumns = kHeadDim == 32 ? 32 : kHeadDim / 2;
  static constexpr bool kAlternates = kHeadDim == kColumns;

  __device__ KeyGroup(const Params& p, uint32_t shared, const unsigned char* memory)
      : p_(p), shared_(shared), memory_(memory), group_(uniform(threadIdx.x / kGroup) - 1) {}

  // Calls body(item, block) for each item and for each block of keys in the item.
  template <class Body>
  __device__ void each_block(const Heads& items, const Body& body) {
    items.each([&](const Item& of_lane) {
      Item item = of_lane;
      Head& h = item.head;
      for (int* x : {&h.batch, &h.head, &h.first_q, &h.first_k, &h.queries, &h.keys})
        *x = uniform(*x);
      item.key_tiles = uniform(item.key_tiles);
      // An item without keys has no block of keys that would write dq, so dq is set to 0 here.
      if (item.key_tiles == 0 && group_ == 0)
        zero_rows<T, kHeadDim>(p_.call.dq, h, h.first_q, h.first_q + h.queries, warp(),
                               kGroup / 32);
      for (int block = 0; block < item.key_tiles; ++block) body(item, block);
    });
  }

  __device__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) % kGroup / 32; }
  // Returns the first row of the warp in a block of keys.
  __device__ int key_row() const { return group_ * kGroupKeys + warp() * kWarpRows; }
  __device__ uint32_t keys_at() const { return shared_ + place_.stage * M::kPlaceBytes; }
  __device__ int first_column() const { return kAlternates ? 0 : group_ * kColumns; }
  __device__ uint32_t tile_at(int stage) const {
    return shared_ + M::kRing + stage * M::kStageBytes;
  }

  __device__ void await_keys() { wait(shared_ + M::kKeysFull + 8 * place_.stage, place_.parity); }

  __device__ void clear_keys() {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk_[i] = dv_[i] = 0.0f;
  }

  // Ends a block of keys: frees the buffer of its keys and values, and stores their gradients.
  __device__ void finish_keys(const Item& item, int block) {
    __syncwarp();
    if (lane() == 0) arrive(shared_ + M::kKeysEmpty + 8 * place_.stage);
    place_.advance();
    store_keys(item, block);
  }

  // Determines which weights of a tile dropout keeps. This is the first step of a tile, because few
  // registers are in use then.
  __device__ Kept draw(const Item& item, int block, int tile) {
    return Kept(p_.call.dropout, block * kKeyRows + key_row(), tile * kTileQueries, item.head.head,
                item.head.batch);
  }

  // Sets attended_ to the bits of the attended keys among the 16 keys of the warp.
  __device__ void find_attended(const Item& item, int block) {
    uint32_t bits;
    if (p_.call.mask.data) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(memory_ + M::kBits);
      bits = words[place_.stage * kKeyWords + key_row() / 32] >> key_row() % 32;
    } else {
      bits = first_bits(item.head.keys - block * kKeyRows - key_row());
    }
    attended_ = uniform(bits & kAllRows);
  }

  // Waits for the log-sum-exp and delta of the tile's queries, and returns them.
  __device__ const Statistics& await_statistics() const {
    wait(shared_ + M::kStatisticsFull + 8 * stage_.stage, stage_.parity);
    return reinterpret_cast<const Statistics*>(memory_ + M::kStatistics)[stage_.stage];
  }

  // Writes -inf in place of the scores of keys that are not attended.
  __device__ void hide_keys() {
    if (attended_ == kAllRows) return;
    const int of_lane = attended_ >> lane() / 4;
#pragma unroll
    for (int i = 0; i < kTileScores; ++i)
      if (!(of_lane >> (i / 2 % 2 * 8) & 1)) scores_[i] = -INFINITY;
  }

  // Writes -inf in place of the scores of query-key pairs that are not attended. If all pairs of
  // the warp are attended, the function returns early.
  __device__ void hide_pairs() {
    const uint2* rows =
        reinterpret_cast<const uint2*>(memory_ + M::kPairs + stage_.stage * BackwardPairs::kBytes) +
        key_row() + lane() / 4;
    const uint2 upper = rows[0], lower = rows[8];
    if (__all_sync(0xffffffffu, (upper.x & upper.y & lower.x & lower.y) == ~0u)) return;
    const int first = lane() % 4 * 2;
    const uint32_t bits[2][2] = {{upper.x >> first, upper.y >> first},
                                 {lower.x >> first, lower.y >> first}};
#pragma unroll
    for (int i = 0; i < kTileScores; ++i) {
      const int column = i / 4 * 8 + i % 2;
      if (!(bits[i / 2 % 2][column / 32] >> column % 32 & 1)) scores_[i] = -INFINITY;
    }
  }

  // Turns the scores of a tile into softmax weights.
  __device__ void exponentiate(const Statistics& statistics) {
    const float factor = p_.call.scale * kLog2E;
    const int first = lane() % 4 * 2;
    if constexpr (kPairs)
      hide_pairs();
    else
      hide_keys();
#pragma unroll
    for (int j = 0; j < kTileQueries / 8; ++j) {
      const float2 logarithms =
          *reinterpret_cast<const float2*>(statistics.logarithm + 8 * j + first);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores_[4 * j + i];
        score = exp2_fast(fmaf(score, factor, i % 2 ? -logarithms.y : -logarithms.x));
      }
    }
  }

  // Turns the gradients of the weights into gradients of the scores, and applies dropout to the
  // weights.
  __device__ void differentiate_weights(const Kept& kept, const Statistics& statistics) {
    const int first = lane() % 4 * 2;
    const float scale = kDropout ? p_.call.dropout.scale : 1.0f;
#pragma unroll
    for (int j = 0; j < kTileQueries / 8; ++j) {
      const float2 deltas = *reinterpret_cast<const float2*>(statistics.delta + 8 * j + first);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        const float delta = i % 2 ? deltas.y : deltas.x;
        const float dweight = kept.kept(i) ? dweights_[i] * scale : 0.0f;
        dweights_[i] = scores_[i] * (dweight - delta);
        if (!kept.kept(i)) scores_[i] = 0.0f;
      }
    }
  }

  __device__ uint32_t gradient_pair(int i) const {
    return pair(dweights_[2 * i], dweights_[2 * i + 1], T{});
  }

  // Stores the gradients of the scores of the group's keys in one of the buffers for ds in shared
  // memory. Both groups read the buffer.
  __device__ void publish(int turn) {
    const uint32_t to = shared_ + M::kGradients + turn * M::kGradientBytes;
    // `opaque` makes the compiler compute the addresses again for each tile. Addresses that stay in
    // registers would cause spills at head dim 128 with a mask of query-key pairs (kPairs).
    const int at = static_cast<int>(opaque(threadIdx.x)) % 32;
#pragma unroll
    for (int step = 0; step < kTileQueries / 16; ++step) {
      const uint32_t pairs[4] = {gradient_pair(4 * step), gradient_pair(4 * step + 1),
                                 gradient_pair(4 * step + 2), gradient_pair(4 * step + 3)};
      store_matrices(to + M::GradientRow::offset(key_row() + at % 16, 2 * step + at / 16), pairs);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane() == 0) arrive(shared_ + M::kGradientsFull + 8 * turn);
  }

  // Frees the stage of a tile. Each warp arrives at the barrier separately, because a warp knows
  // only that its own products have ended.
  __device__ void release_tile(int stage) {
    __syncwarp();
    if (lane() == 0) arrive(shared_ + M::kTileEmpty + 8 * stage);
  }

  // Returns the factor by which dq and dk are multiplied. The softmax over a single key is
  // constant, so for one key the factor is 0; the computed gradient would differ from 0 because of
  // rounding.
  __device__ float scale(const Item& item) const {
    return item.head.keys == 1 ? 0.0f : p_.call.scale;
  }

  // Calls body(query, half, whether the query exists) for the lane's two rows of a tile.
  template <class Body>
  __device__ void each_query(const Item& item, int tile, const Body& body) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int thread = static_cast<int>(opaque(threadIdx.x));
      const int query =
          tile * kTileQueries + thread % kGroup / 32 * kWarpRows + 8 * half + thread % 32 / 4;
      body(query, half, query < item.head.queries);
    }
  }

  // Returns the address in dq_sums of the sums for the row `query`, from the lane's first column
  // on. A lane stores four of its columns next to each other, so that four lanes cover 64 bytes.
  __device__ float4* sums_of(const Item& item, int query) const {
    const AttentionBackward& call = p_.call;
    const Head& h = item.head;
    const int64_t row = static_cast<int>(opaque(h.batch)) * call.lse_stride_batch +
                        h.head * call.lse_stride_head + h.first_q + query;
    return reinterpret_cast<float4*>(call.dq_sums + row * kHeadDim + first_column()) + lane() % 4;
  }

  // Calls body(element, sum) for the lane's part of a tile, where `element` is an element of dq and
  // `sum` is its sum over the earlier blocks of keys.
  template <class Body>
  __device__ void each_sum(const Item& item, int tile, const Body& body) {
    each_query(item, tile, [&](int query, int half, bool exists) {
      const float4* from = sums_of(item, query);
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        const float4 sums = exists ? from[4 * i] : float4{0.0f, 0.0f, 0.0f, 0.0f};
        body(dq_[8 * i + 2 * half], sums.x);
        body(dq_[8 * i + 2 * half + 1], sums.y);
        body(dq_[8 * i + 2 * half + 4], sums.z);
        body(dq_[8 * i + 2 * half + 5], sums.w);
      }
    });
  }

  // After the last block of keys, stores dq of a tile. After an earlier block, stores the sums of
  // dq.
  __device__ void store_queries(const Item& item, int block, int tile) {
    const AttentionBackward& call = p_.call;
    if (block + 1 < item.key_tiles) {
      each_query(item, tile, [&](int query, int half, bool exists) {
        float4* to = sums_of(item, query);
#pragma unroll
        for (int i = 0; i < kColumns / 16; ++i)
          if (exists)
            to[4 * i] = {dq_[8 * i + 2 * half], dq_[8 * i + 2 * half + 1],
                         dq_[8 * i + 2 * half + 4], dq_[8 * i + 2 * half + 5]};
      });
    } else {
      T* rows = rows_of<T>(call.dq, item.head, static_cast<int>(opaque(item.head.first_q))) +
                first_column();
      each_query(item, tile, [&](int query, int half, bool exists) {
        store_row<T>(rows + query * call.dq.stride_row,
                     reinterpret_cast<const float (&)[kColumns / 8][4]>(dq_), half, scale(item),
                     exists);
      });
    }
  }

  // Stores dk and dv of the group's keys.
  __device__ void store_keys(const Item& item, int block) {
    const AttentionBackward& call = p_.call;
    const int first = static_cast<int>(opaque(item.head.first_k));
    T* dk = rows_of<T>(call.dk, item.head, first);
    T* dv = rows_of<T>(call.dv, item.head, first);
    const float keep_scale = kDropout ? call.dropout.scale : 1.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = block * kKeyRows + key_row() + 8 * half + lane() / 4;
      const bool exists = key < item.head.keys;
      store_row<T>(dk + key * call.dk.stride_row,
                   reinterpret_cast<const float (&)[kHeadDim / 8][4]>(dk_), half, scale(item),
                   exists);
      store_row<T>(dv + key * call.dv.stride_row,
                   reinterpret_cast<const float (&)[kHeadDim / 8][4]>(dv_), half, keep_scale,
                   exists);
    }
  }

  const Params& p_;
  const uint32_t shared_;
  const unsigned char* const memory_;
  const int group_;
  Place<M::kPlaces> place_;
  Place<M::kStages> stage_;
  int attended_ = 0;  // bit n for row n of the warp
  float scores_[kTileScores], dweights_[kTileScores];
  uint32_t weights_[kTileScores / 2], gradients_[kTileScores / 2];
  float dk_[kHeadDim / 2], dv_[kHeadDim / 2], dq_[kColumns / 2];
};

// Runs a thread block. `Consumer` is the class that does the work of a group on its keys.
template <class Consumer, class T, int kHeadDim, bool kPairs>
__device__ void run_block(const Params& p, unsigned char* memory) {
  const uint32_t shared = shared_address(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&p.q, &p.k, &p.v, &p.out, &p.dout}) prefetch(*map);
    init_barriers<kHeadDim>(shared);
  }
  Order& order = *reinterpret_cast<Order*>(memory + Memory<kHeadDim>::kOrder);
  if (warp == 1 && Order::serves(p.call.sequences)) sort(order, p.call.sequences);
  __syncthreads();
  const Heads items(p.call.sequences, order);
  if (warp < kGroup / 32) {
    give_registers();
    if (warp == 0 && lane == 0) load_tiles<kHeadDim>(p, shared, items);
    if (warp == 1) {
      if (p.call.mask.data) zero_unattended<kHeadDim, kPairs>(p, shared, memory, items);
      if (p.call.sequences.cu_seqlens_q) zero_slack<T, kHeadDim>(p.call);
    }
    if (warp >= kFirstPreparer) prepare_statistics<T, kHeadDim, kPairs>(p, shared, memory, items);
  } else {
    take_registers();
    Consumer(p, shared, memory).run(items);
  }
}

// Launches the kernel of a head dim, with at most one persistent thread block on each
// multiprocessor.
template <int kHeadDim>
cudaError_t launch_blocks(void (*kernel)(Params), const Params& params, cudaStream_t stream) {
  const Sequences& s = params.call.sequences;
  const int64_t items = static_cast<int64_t>(s.heads) * s.batches;
  const unsigned blocks = static_cast<unsigned>(
      std::clamp<int64_t>(items, 1, attribute(cudaDevAttrMultiProcessorCount)));
  return launch<Params>(kernel, dim3(blocks), kThreads, params, stream, Memory<kHeadDim>::kBytes);
}

}  // namespace fastbert::cuda::backward
