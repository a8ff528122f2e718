// Forward of attention on Hopper GPUs (sm_90a), in 16-bit formats.
//
// A persistent thread block has three groups of four warps. It computes work items of 128 queries
// of one head (schedule.cuh). One thread of the first group starts the copies. The queries of an
// item go through two or three buffers, and tiles of 128 keys and values go through rings of
// stages, which do not restart at a new item. Each of the two other groups owns 64 of the 128
// queries. It multiplies with wgmma, and keeps scores, weights and sums of out in its registers.
// Named barriers make the two groups take turns, so that the products of one group run while the
// other group computes a softmax. Inside a group, two products run at the same time: the scores of
// the next tile, and the product of the last weights with their values. The softmax of the next
// tile overlaps with the second product. The group writes `out` to the shared memory of its
// queries, and the copy engine (TMA) stores it in global memory. Under a mask, another warp of the
// first group writes the attended keys or query-key pairs of each tile to shared memory.
//
// The following counts are for 128 queries and 128 keys of head dim 64 on an H200. The products
// take 1,024 cycles of the tensor cores. Of the 16,384 exponentials, 14,336 take 896 cycles of the
// special function units (MUFU), and the other exponentials are computed as polynomials. The issue
// of 466 instructions by each of eight warps takes 932 cycles of the four schedulers. The tensor
// cores are the limit. The 32 KB of keys and values need 32 bytes per cycle from the L2 cache.
// Below about 400 keys, device memory is the limit. At head dim 32, the products take 512 cycles of
// the tensor cores, the exponentials take 928 cycles of the MUFU, and the issue of instructions
// takes 916 cycles, so the MUFU is the limit.

#include <algorithm>

#include "../attention.cuh"
#include "../attention_tile.cuh"
#include "../launch.cuh"
#include "../mma.cuh"
#include "attention.cuh"
#include "device.cuh"
#include "dropout.cuh"
#include "groups.cuh"
#include "hidden.cuh"
#include "pairs.cuh"
#include "pipeline.cuh"
#include "schedule.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace fastbert::cuda {
namespace {

constexpr int kGroupRows = kQueryRows / kConsumers, kWarpRows = 16;
// The numbers of the named barriers. They start at 1, because __syncthreads uses barrier 0.
constexpr int kTurn = 1, kGroupBarrier = kTurn + kConsumers;

// Offsets in shared memory, from an address that is a multiple of 1024. A tile of 128 rows is
// stored in parts of 64 columns, one after the other, or at head dim 32 in a single part of 32
// columns.
template <int kHeadDim>
struct Memory {
  using Row = BoxRow<kHeadDim>;
  static constexpr int kPartBytes = kKeyRows * Row::kBytes, kTileBytes = Row::kParts * kPartBytes;
  static constexpr int kStages = kHeadDim == 128 ? 2 : 4, kPlaces = kHeadDim == 128 ? 2 : 3;
  static constexpr int kKeys = kPlaces * kTileBytes, kValues = kKeys + kStages * kTileBytes;
  static constexpr int kBits = kValues + kStages * kTileBytes;
  static constexpr int kBarriers = kBits + kStages * kKeyWords * 4;
  // Each stage has five barriers: keys full, values full, keys empty, values empty, and values
  // landed (their copy has ended). Each buffer of queries has two barriers: full and empty.
  static constexpr int kKeysFull = kBarriers, kValuesFull = kKeysFull + 8 * kStages;
  static constexpr int kKeysEmpty = kValuesFull + 8 * kStages;
  static constexpr int kValuesEmpty = kKeysEmpty + 8 * kStages;
  static constexpr int kLanded = kValuesEmpty + 8 * kStages;
  static constexpr int kQueriesFull = kLanded + 8 * kStages;
  static constexpr int kQueriesEmpty = kQueriesFull + 8 * kPlaces;
  static constexpr int kOrder = kQueriesEmpty + 8 * kPlaces;
  // The bits of the attended query-key pairs of each stage. They are used only under a mask that
  // differs between queries.
  static constexpr int kPairs = (kOrder + sizeof(Order) + 15) / 16 * 16;
  static constexpr int kBytes = kPairs + kStages * ForwardPairs::kBytes;
};

struct Params {
  CUtensorMap q, k, v, out;
  AttentionForward call;
  ForwardPairs pairs;
};

// Starts the copies of all queries, keys and values that a thread block reads. One thread calls
// this function.
template <int kHeadDim>
__device__ void load_tiles(const Params& p, uint32_t shared, Items items) {
  using M = Memory<kHeadDim>;
  const auto load = [&](uint32_t to, const CUtensorMap& map, const RowAt& at, uint32_t barrier) {
#pragma unroll
    for (int part = 0; part < M::Row::kParts; ++part)
      load_box(to + part * M::kPartBytes, map, part * kBoxColumns, at, barrier);
  };
  // Under a mask, the copies of values complete the barrier kLanded. The barrier kValuesFull
  // completes after zero_unattended or publish_pairs has zeroed the rows that are not attended.
  const uint32_t values_full = shared + (p.call.mask.data ? M::kLanded : M::kValuesFull);
  Place<M::kPlaces> place;
  Place<M::kStages> stage;
  for (Item item; items.next(item);) {
    const uint32_t queries_full = shared + M::kQueriesFull + 8 * place.stage;
    wait(shared + M::kQueriesEmpty + 8 * place.stage, place.parity ^ 1);
    arrive_expecting(queries_full, M::kTileBytes);
    load(shared + place.stage * M::kTileBytes, p.q, item.query(0), queries_full);
    place.advance();
    for (int tile = 0; tile < item.key_tiles; ++tile) {
      const uint32_t offset = stage.stage * M::kTileBytes;
      const RowAt at = item.key(tile * kKeyRows);
      const uint32_t keys = shared + M::kKeysFull + 8 * stage.stage;
      wait(shared + M::kKeysEmpty + 8 * stage.stage, stage.parity ^ 1);
      arrive_expecting(keys, M::kTileBytes);
      load(shared + M::kKeys + offset, p.k, at, keys);
      const uint32_t values = values_full + 8 * stage.stage;
      wait(shared + M::kValuesEmpty + 8 * stage.stage, stage.parity ^ 1);
      arrive_expecting(values, M::kTileBytes);
      load(shared + M::kValues + offset, p.v, at, values);
      stage.advance();
    }
  }
}

// Under a mask of keys, writes the bits of the attended keys of each tile to shared memory, and
// sets the values of the other keys to 0, because they may be NaN. One warp calls this function.
template <int kHeadDim>
__device__ void zero_unattended(const Params& p, uint32_t shared, unsigned char* memory,
                                Items items) {
  using M = Memory<kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Place<M::kStages> stage;
  for (Item item; items.next(item);) {
    for (int tile = 0; tile < item.key_tiles; ++tile, stage.advance()) {
      KeyBits bits[kKeyWords];
      attended_keys(bits, p.call.mask, item, tile);
      wait(shared + M::kKeysEmpty + 8 * stage.stage, stage.parity ^ 1);
      if (lane == 0) {
        *reinterpret_cast<uint4*>(memory + M::kBits + stage.stage * kKeyWords * 4) = {
            bits[0], bits[1], bits[2], bits[3]};
        arrive(shared + M::kKeysFull + 8 * stage.stage);
      }
      wait(shared + M::kLanded + 8 * stage.stage, stage.parity);
      zero_unattended_rows<kHeadDim>(memory + M::kValues + stage.stage * M::kTileBytes, bits);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) arrive(shared + M::kValuesFull + 8 * stage.stage);
    }
  }
}

// Under a mask of query-key pairs, writes the bits of the attended pairs of each tile to shared
// memory. Also writes 0 in place of the values of keys that no query of the tile attends. One warp
// calls this function.
template <int kHeadDim>
__device__ void publish_pairs(const Params& p, uint32_t shared, unsigned char* memory,
                              Items items) {
  using M = Memory<kHeadDim>;
  constexpr int kLoads = ForwardPairs::kRows / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Place<M::kStages> stage;
  for (Item item; items.next(item);) {
    const uint4* from =
        reinterpret_cast<const uint4*>(p.pairs.row(item.head, item.first_query / kQueryRows)) +
        lane;
    for (int tile = 0; tile < item.key_tiles; ++tile, stage.advance()) {
      uint4 rows[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) rows[i] = from[32 * i];
      from += ForwardPairs::kRows;
      wait(shared + M::kKeysEmpty + 8 * stage.stage, stage.parity ^ 1);
      uint4* const to =
          reinterpret_cast<uint4*>(memory + M::kPairs + stage.stage * ForwardPairs::kBytes) + lane;
      KeyBits bits[kKeyWords] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        to[32 * i] = rows[i];
        bits[0] |= rows[i].x, bits[1] |= rows[i].y, bits[2] |= rows[i].z, bits[3] |= rows[i].w;
      }
#pragma unroll
      for (KeyBits& word : bits) word = __reduce_or_sync(0xffffffffu, word);
      __syncwarp();
      if (lane == 0) arrive(shared + M::kKeysFull + 8 * stage.stage);
      wait(shared + M::kLanded + 8 * stage.stage, stage.parity);
      zero_unattended_rows<kHeadDim>(memory + M::kValues + stage.stage * M::kTileBytes, bits);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) arrive(shared + M::kValuesFull + 8 * stage.stage);
    }
  }
}

// In packed tensors, writes 0 to the rows of out that belong to no sequence, and -inf to the same
// rows of lse. 64 threads of each thread block call this function.
template <int kHeadDim>
__device__ void zero_slack(const AttentionForward& p, int thread) {
  constexpr int kChunks = kHeadDim / 8;
  const Sequences& s = p.sequences;
  const int64_t first = s.cu_seqlens_q[s.batches];
  const int64_t step = 64 * static_cast<int64_t>(gridDim.x);
  for (int head = 0; head < s.heads; ++head) {
    const int64_t start = 64 * static_cast<int64_t>(blockIdx.x) + thread;
    for (int64_t i = first * kChunks + start; i < s.rows_q * kChunks; i += step)
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out.data) + head * p.out.stride_head +
                                i / kChunks * p.out.stride_row + i % kChunks * 8) = {0, 0, 0, 0};
    for (int64_t i = first + start; i < s.rows_q; i += step)
      p.lse[head * p.lse_stride_head + i] = -INFINITY;
  }
}

// Writes -inf in place of the scores of keys that are not attended.
__device__ void hide(float (&scores)[kScores], const KeyBits (&bits)[kKeyWords]) {
  const int first = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int column = i / 4 * 8 + i % 2;
    if (!(bits[column / 32] >> (column % 32 + first) & 1)) scores[i] = -INFINITY;
  }
}

// Writes -inf in place of the scores of query-key pairs that are not attended. `first` points to
// the bits of the pairs of the warp's first query. If all queries of the warp attend all keys of
// the tile, the function returns early.
__device__ void hide_pairs(float (&scores)[kScores], const uint4* first) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint4 upper = first[lane / 4], lower = first[lane / 4 + 8];
  KeyBits bits[2][kKeyWords] = {{upper.x, upper.y, upper.z, upper.w},
                                {lower.x, lower.y, lower.z, lower.w}};
  KeyBits all = kAllKeys;
#pragma unroll
  for (int i = 0; i < 2 * kKeyWords; ++i) all &= bits[i / kKeyWords][i % kKeyWords];
  if (__all_sync(0xffffffffu, all == kAllKeys)) return;
#pragma unroll
  for (int i = 0; i < 2 * kKeyWords; ++i) bits[i / kKeyWords][i % kKeyWords] >>= lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int column = i / 4 * 8 + i % 2;
    if (!(bits[i / 2 % 2][column / 32] >> column % 32 & 1)) scores[i] = -INFINITY;
  }
}

// Starts the products of the group's queries with a tile of keys.
template <class T, int kHeadDim>
__device__ void start_scores(float (&scores)[kScores], uint32_t queries, uint32_t keys) {
  using M = Memory<kHeadDim>;
  const uint64_t left = descriptor<M::Row::kBytes>(queries),
                 right = descriptor<M::Row::kBytes>(keys);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int offset = step / 4 * M::kPartBytes + step % 4 * 32;
    multiply(scores, moved(left, offset), moved(right, offset), step > 0, T{});
  }
  end_products();
}

// Starts the products that compute sums += weights values.
template <class T, int kHeadDim>
__device__ void start_sums(float (&sums)[kHeadDim / 2], const uint32_t (&weights)[kScores / 2],
                           uint32_t values) {
  using M = Memory<kHeadDim>;
  const uint64_t right = descriptor<M::Row::kBytes>(values, M::kPartBytes);
#pragma unroll
  for (int step = 0; step < kKeyRows / 16; ++step)
    accumulate_rows(sums, weights + 4 * step, moved(right, step * 16 * M::Row::kBytes), T{});
  end_products();
}

// The work of a group of four warps, which owns 64 queries of each item.
template <class T, int kHeadDim, bool kPairs, bool kDropout>
class Consumer {
  using M = Memory<kHeadDim>;

 public:
  __device__ Consumer(const Params& p, uint32_t shared, const unsigned char* memory)
      : p_(p), shared_(shared), memory_(memory), group_(uniform(threadIdx.x / kGroup) - 1) {}

  __device__ void run(Items items) {
    // The first of the two groups has the first turn; the second group hands over the turn here.
    if (group_ != 0) end_turn();
    for (Item item; uniform(items.next(item));) {
      item.head.keys = uniform(item.head.keys);
      item.key_tiles = uniform(item.key_tiles);
      attend(item);
    }
    if (group_ == 0) begin_turn();
    wait_for_stores();
  }

 private:
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) % kGroup / 32; }
  __device__ void begin_turn() { sync_group(kTurn + group_, kConsumers * kGroup); }
  __device__ void end_turn() { arrive_group(kTurn + 1 - group_, kConsumers * kGroup); }
  __device__ uint32_t keys_at() const { return shared_ + M::kKeys + keys_.stage * M::kTileBytes; }
  __device__ uint32_t values_at() const {
    return shared_ + M::kValues + values_.stage * M::kTileBytes;
  }

  // Frees a stage of a ring. Each warp arrives at the barrier separately, because a warp knows only
  // that its own products have ended.
  template <int kCount>
  __device__ void give_back(int barriers, Place<kCount>& place) {
    __syncwarp();
    if (lane() == 0) arrive(shared_ + barriers + 8 * place.stage);
    place.advance();
  }

  // Writes -inf in place of the scores of keys or pairs that are not attended, and frees the stage
  // of the keys.
  __device__ void hide_and_release(const Item& item, int tile) {
    const int left = item.head.keys - tile * kKeyRows;
    if constexpr (kPairs) {
      hide_pairs(scores_, reinterpret_cast<const uint4*>(memory_ + M::kPairs +
                                                         keys_.stage * ForwardPairs::kBytes) +
                              group_ * kGroupRows + warp() * kWarpRows);
    } else if (p_.call.mask.data) {
      const uint4 words =
          *reinterpret_cast<const uint4*>(memory_ + M::kBits + keys_.stage * kKeyWords * 4);
      hide(scores_, {words.x, words.y, words.z, words.w});
    } else if (left < kKeyRows) {
      hide(scores_,
           {first_bits(left), first_bits(left - 32), first_bits(left - 64), first_bits(left - 96)});
    }
    give_back(M::kKeysEmpty, keys_);
  }

  // Turns the scores of a tile into weights, and sets `rescale` to the factors for the sums of the
  // lane's two rows. Returns whether any row of the warp has a factor below 1.
  __device__ bool weigh(const Item& item, int tile, float (&rescale)[2]) {
    const float factor = p_.call.scale * kLog2E;
    bool grown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = softmax_.maximum[half];
      rescale[half] = softmax_.step(scores_, half, factor);
      grown = grown || softmax_.maximum[half] > before;
    }
    if (kDropout) {
      const int row = item.first_query + group_ * kGroupRows + warp() * kWarpRows + lane() / 4;
      drop(scores_, p_.call.dropout, tile * kKeyRows, {row, item.head.head, item.head.batch});
    }
    return __any_sync(0xffffffffu, grown);
  }

  // Rounds the weights to 16 bits, as the left operand of the product with the values.
  __device__ void narrow() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      weights_[i] = pair(scores_[2 * i], scores_[2 * i + 1], T{});
  }

  __device__ void attend(const Item& item) {
    softmax_ = TileSoftmax();
#pragma unroll
    for (float& sum : sums_) sum = 0.0f;
    const uint32_t queries =
        shared_ + place_.stage * M::kTileBytes + group_ * kGroupRows * M::Row::kBytes;
    wait(shared_ + M::kQueriesFull + 8 * place_.stage, place_.parity);
    if (item.key_tiles > 0) {
      wait(shared_ + M::kKeysFull + 8 * keys_.stage, keys_.parity);
      begin_turn();
      begin_products();
      start_scores<T, kHeadDim>(scores_, queries, keys_at());
      end_turn();
      release_stored_queries();
      wait_for_products<0>();
      pin(scores_);
      hide_and_release(item, 0);
      float rescale[2];
      weigh(item, 0, rescale);
      narrow();
      for (int tile = 1; tile < item.key_tiles; ++tile) step(item, tile, queries);
      wait(shared_ + M::kValuesFull + 8 * values_.stage, values_.parity);
      pin(weights_);
      pin(sums_);
      begin_products();
      start_sums<T, kHeadDim>(sums_, weights_, values_at());
      finish_sums();
    } else {
      release_stored_queries();
    }
    store(item, queries);
  }

  // Computes the weights of a tile while the product of the previous tile's weights and values
  // runs.
  __device__ void step(const Item& item, int tile, uint32_t queries) {
    wait(shared_ + M::kKeysFull + 8 * keys_.stage, keys_.parity);
    begin_turn();
    pin(scores_);
    pin(weights_);
    pin(sums_);
    begin_products();
    start_scores<T, kHeadDim>(scores_, queries, keys_at());
    wait(shared_ + M::kValuesFull + 8 * values_.stage, values_.parity);
    begin_products();
    start_sums<T, kHeadDim>(sums_, weights_, values_at());
    end_turn();
    wait_for_products<1>();
    pin(scores_);
    hide_and_release(item, tile);
    float rescale[2];
    // Both branches call finish_sums, because ptxas would otherwise move the wait of finish_sums
    // before the softmax.
    if (weigh(item, tile, rescale)) {
      finish_sums();
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) sums_[i] *= rescale[i / 2 % 2];
    } else {
      finish_sums();
    }
    narrow();
  }

  __device__ void finish_sums() {
    wait_for_products<0>();
    pin(weights_);
    pin(sums_);
    give_back(M::kValuesEmpty, values_);
  }

  // Frees the buffer of the previous item's queries after the copy engine has read the `out` of
  // that item from the buffer.
  __device__ void release_stored_queries() {
    if (!stored_) return;
    if (lane() == 0) {
      wait_for_stores();
      arrive(shared_ + M::kQueriesEmpty + 8 * ((place_.stage + M::kPlaces - 1) % M::kPlaces));
    }
    stored_ = false;
  }

  // Writes `out` to the shared memory of the queries, and starts the copy of `out` to global
  // memory.
  __device__ void store(const Item& item, uint32_t queries) {
    float inverse[2];
    const int row = group_ * kGroupRows + warp() * kWarpRows + lane() / 4;
    const Head& h = item.head;
    float* lse = p_.call.lse + h.batch * p_.call.lse_stride_batch +
                 h.head * p_.call.lse_stride_head + h.first_q + item.first_query;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float logarithm = softmax_.finish(half, inverse[half]);
      if (kDropout) inverse[half] *= p_.call.dropout.scale;
      if (lane() % 4 == 0 && item.first_query + row + 8 * half < h.queries)
        lse[row + 8 * half] = logarithm;
    }
    // Waits until all warps of the group have read their queries.
    sync_group(kGroupBarrier + group_, kGroup);
    const uint32_t to = queries + warp() * kWarpRows * M::Row::kBytes;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = pair(sums_[8 * step + 2 * i] * inverse[i % 2],
                        sums_[8 * step + 2 * i + 1] * inverse[i % 2], T{});
      const int chunk = step % 4 * 2 + lane() / 16;
      store_matrices(to + step / 4 * M::kPartBytes + M::Row::offset(lane() % 16, chunk), pairs);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane() == 0) {
      const RowAt at = item.query(group_ * kGroupRows + warp() * kWarpRows);
#pragma unroll
      for (int part = 0; part < M::Row::kParts; ++part)
        store_box(p_.out, part * kBoxColumns, at, to + part * M::kPartBytes);
      commit_stores();
    }
    stored_ = true;
    place_.advance();
  }

  const Params& p_;
  const uint32_t shared_;
  const unsigned char* const memory_;
  const int group_;
  Place<M::kPlaces> place_;
  Place<M::kStages> keys_, values_;
  bool stored_ = false;
  TileSoftmax softmax_;
  float scores_[kScores], sums_[kHeadDim / 2];
  uint32_t weights_[kScores / 2];
};

template <int kHeadDim>
__device__ void init_barriers(uint32_t shared, bool masked) {
  using M = Memory<kHeadDim>;
  for (int stage = 0; stage < M::kStages; ++stage) {
    init_barrier(shared + M::kKeysFull + 8 * stage, masked ? 2 : 1);
    init_barrier(shared + M::kValuesFull + 8 * stage, 1);
    init_barrier(shared + M::kLanded + 8 * stage, 1);
    init_barrier(shared + M::kKeysEmpty + 8 * stage, kConsumerWarps);
    init_barrier(shared + M::kValuesEmpty + 8 * stage, kConsumerWarps);
  }
  for (int place = 0; place < M::kPlaces; ++place) {
    init_barrier(shared + M::kQueriesFull + 8 * place, 1);
    init_barrier(shared + M::kQueriesEmpty + 8 * place, kConsumerWarps);
  }
  fence_barrier_init();
}

template <class T, int kHeadDim, bool kPairs, bool kDropout>
__global__ void __launch_bounds__(kThreads, 1)
    persistent_forward_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const bool masked = p.call.mask.data != nullptr;
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&p.q, &p.k, &p.v, &p.out}) prefetch(*map);
    init_barriers<kHeadDim>(shared, masked);
  }
  Order* order = nullptr;
  if (Order::serves(p.call.sequences)) {
    order = reinterpret_cast<Order*>(memory + Memory<kHeadDim>::kOrder);
    if (warp == 1) sort(*order, p.call.sequences);
  }
  __syncthreads();
  const Items items(p.call.sequences, order);
  if (warp < kGroup / 32) {
    give_registers();
    if (warp == 0 && lane == 0) load_tiles<kHeadDim>(p, shared, items);
    if (warp == 1 && kPairs)
      publish_pairs<kHeadDim>(p, shared, memory, items);
    else if (warp == 1 && masked)
      zero_unattended<kHeadDim>(p, shared, memory, items);
    if (warp >= 2 && p.call.sequences.cu_seqlens_q)
      zero_slack<kHeadDim>(p.call, static_cast<int>(threadIdx.x) - 64);
  } else {
    take_registers();
    Consumer<T, kHeadDim, kPairs, kDropout>(p, shared, memory).run(items);
  }
#endif
}

template <class T, int kHeadDim, bool kPairs>
cudaError_t launch_pairs(const Params& params, cudaStream_t stream) {
  const Sequences& s = params.call.sequences;
  const int64_t items = ceil_div(s.max_q, kQueryRows) * s.heads * s.batches;
  // If there is no item, one block still writes the rows that belong to no sequence.
  const unsigned blocks = static_cast<unsigned>(
      std::clamp<int64_t>(items, 1, attribute(cudaDevAttrMultiProcessorCount)));
  const auto kernel = params.call.dropout.seed
                          ? persistent_forward_kernel<T, kHeadDim, kPairs, true>
                          : persistent_forward_kernel<T, kHeadDim, kPairs, false>;
  return launch<Params>(kernel, dim3(blocks), kThreads, params, stream, Memory<kHeadDim>::kBytes);
}

template <class T, int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  return has_pairs(params.call.mask, params.call.sequences)
             ? launch_pairs<T, kHeadDim, true>(params, stream)
             : launch_pairs<T, kHeadDim, false>(params, stream);
}

template <class T>
cudaError_t launch_forward(const Params& params, cudaStream_t stream) {
  switch (params.call.head_dim) {
    case 32:
      return launch_head_dim<T, 32>(params, stream);
    case 64:
      return launch_head_dim<T, 64>(params, stream);
    default:
      return launch_head_dim<T, 128>(params, stream);
  }
}

}  // namespace

cudaError_t hopper_attention_forward(const AttentionForward& p, cudaStream_t stream) {
  const Sequences& s = p.sequences;
  if (s.batches == 0 || s.rows_q == 0) return cudaSuccess;
  Params params = {{}, {}, {}, {}, p, pair_tiles(p)};
  // If there are no keys, the kernel copies no rows of k and v, and their tensor maps describe the
  // rows of q instead.
  const HeadRows& k = s.max_k ? p.k : p.q;
  const HeadRows& v = s.max_k ? p.v : p.q;
  const int64_t rows_k = s.max_k ? s.rows_k : s.rows_q;
  cudaError_t error = encode(params.q, p.q, p.format, p.head_dim, s, s.rows_q, kQueryRows);
  if (!error) error = encode(params.k, k, p.format, p.head_dim, s, rows_k, kKeyRows);
  if (!error) error = encode(params.v, v, p.format, p.head_dim, s, rows_k, kKeyRows);
  if (!error) error = encode(params.out, p.out, p.format, p.head_dim, s, s.rows_q, kWarpRows);
  if (!error) error = pack_pairs(p, stream);
  if (error) return error;
  return p.format == Format::f16 ? launch_forward<__half>(params, stream)
                                 : launch_forward<__nv_bfloat16>(params, stream);
}

}  // namespace fastbert::cuda
