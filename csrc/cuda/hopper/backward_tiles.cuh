// The layout of the shared memory in the backward of attention, and the work of the group of warps
// that fills it. This group copies tiles, zeroes keys that are not attended, and computes the
// statistics of the queries.

#pragma once

#include "../attention.cuh"
#include "../attention_tile.cuh"
#include "../softmax.cuh"
#include "groups.cuh"
#include "hidden.cuh"
#include "pairs.cuh"
#include "pipeline.cuh"
#include "schedule.cuh"
#include "statistics.cuh"
#include "tma.cuh"

namespace fastbert::cuda::backward {

// In the first group, one thread of warp 0 starts the copies, warp 1 zeroes rows, and warps 2 and 3
// prepare statistics.
constexpr int kFirstPreparer = 2, kPreparers = 2;

// Offsets in shared memory, from an address that is a multiple of 1024.
template <int kHeadDim>
struct Memory {
  using Row = BoxRow<kHeadDim>;
  // Rows of 128 columns have two parts, one after the other.
  static constexpr int kKeyPart = kKeyRows * Row::kBytes, kTilePart = kTileQueries * Row::kBytes;
  static constexpr int kKeyBytes = Row::kParts * kKeyPart, kTileBytes = Row::kParts * kTilePart;
  static constexpr bool kWide = kHeadDim == 128;
  static constexpr int kPlaces = kWide ? 1 : 2, kStages = kWide ? 2 : 4, kTurns = kWide ? 2 : 3;
  // A place is a buffer for keys and values, and a stage is a buffer for queries, dout and out.
  static constexpr int kPlaceBytes = 2 * kKeyBytes, kStageBytes = 3 * kTileBytes;
  static constexpr int kRing = kPlaces * kPlaceBytes;
  // The buffers for ds of a tile, with keys as rows. The tiles use kTurns buffers in turn. Three
  // buffers are needed if a group writes ds before it has waited for the products of the previous
  // tile, because the other group may then still work on an earlier tile.
  using GradientRow = BoxRow<kTileQueries>;
  static constexpr int kGradients = kRing + kStages * kStageBytes;
  static constexpr int kGradientBytes = kKeyRows * GradientRow::kBytes;
  static constexpr int kStatistics = kGradients + kTurns * kGradientBytes;
  static constexpr int kBits = kStatistics + kStages * static_cast<int>(sizeof(Statistics));
  static constexpr int kBarriers = kBits + kPlaces * kKeyWords * 4;
  // Each place has three barriers: keys landed (their copy has ended), keys full and keys empty.
  // Each stage has three barriers: tile landed, statistics full and tile empty. Each buffer of ds
  // has one barrier, which completes when the buffer is full.
  static constexpr int kKeysLanded = kBarriers, kKeysFull = kKeysLanded + 8 * kPlaces;
  static constexpr int kKeysEmpty = kKeysFull + 8 * kPlaces;
  static constexpr int kTileLanded = kKeysEmpty + 8 * kPlaces;
  static constexpr int kStatisticsFull = kTileLanded + 8 * kStages;
  static constexpr int kTileEmpty = kStatisticsFull + 8 * kStages;
  static constexpr int kGradientsFull = kTileEmpty + 8 * kStages;
  static constexpr int kOrder = kGradientsFull + 8 * kTurns;
  // The bits of the attended query-key pairs of each stage. They are used only under a mask that
  // differs between queries.
  static constexpr int kPairs = (kOrder + sizeof(Order) + 15) / 16 * 16;
  static constexpr int kBytes = kPairs + kStages * BackwardPairs::kBytes;
};

struct Params {
  CUtensorMap q, k, v, out, dout;
  AttentionBackward call;
  BackwardPairs pairs;
};

// Launches the kernel of head dim 128.
cudaError_t launch_wide(const Params& params, cudaStream_t stream);

inline __device__ int tiles_of(const Head& head) {
  return (head.queries + kTileQueries - 1) / kTileQueries;
}

template <int kHeadDim>
__device__ void init_barriers(uint32_t shared) {
  using M = Memory<kHeadDim>;
  for (int place = 0; place < M::kPlaces; ++place) {
    init_barrier(shared + M::kKeysLanded + 8 * place, 1);
    init_barrier(shared + M::kKeysFull + 8 * place, 1);
    init_barrier(shared + M::kKeysEmpty + 8 * place, kConsumerWarps);
  }
  for (int stage = 0; stage < M::kStages; ++stage) {
    init_barrier(shared + M::kTileLanded + 8 * stage, 1);
    init_barrier(shared + M::kStatisticsFull + 8 * stage, kPreparers);
    init_barrier(shared + M::kTileEmpty + 8 * stage, kConsumerWarps);
  }
  for (int turn = 0; turn < M::kTurns; ++turn)
    init_barrier(shared + M::kGradientsFull + 8 * turn, kConsumerWarps);
  fence_barrier_init();
}

// Starts the copies of all keys, values and tiles of queries that a thread block reads. One thread
// calls this function.
template <int kHeadDim>
__device__ void load_tiles(const Params& p, uint32_t shared, const Heads& items) {
  using M = Memory<kHeadDim>;
  // Under a mask, the copies of keys complete the barrier kKeysLanded. The barrier kKeysFull
  // completes after zero_unattended has zeroed the rows that are not attended.
  const uint32_t keys_full = shared + (p.call.mask.data ? M::kKeysLanded : M::kKeysFull);
  Place<M::kPlaces> place;
  Place<M::kStages> stage;
  const auto load = [&](uint32_t to, int part_bytes, const CUtensorMap& map, const RowAt& at,
                        uint32_t barrier) {
#pragma unroll
    for (int part = 0; part < M::Row::kParts; ++part)
      load_box(to + part * part_bytes, map, part * kBoxColumns, at, barrier);
  };
  items.each([&](const Item& item) {
    for (int block = 0; block < item.key_tiles; ++block, place.advance()) {
      const uint32_t keys = shared + place.stage * M::kPlaceBytes;
      const uint32_t full = keys_full + 8 * place.stage;
      wait(shared + M::kKeysEmpty + 8 * place.stage, place.parity ^ 1);
      arrive_expecting(full, M::kPlaceBytes);
      load(keys, M::kKeyPart, p.k, item.key(block * kKeyRows), full);
      load(keys + M::kKeyBytes, M::kKeyPart, p.v, item.key(block * kKeyRows), full);
      for (int tile = 0; tile < tiles_of(item.head); ++tile, stage.advance()) {
        const uint32_t to = shared + M::kRing + stage.stage * M::kStageBytes;
        const uint32_t landed = shared + M::kTileLanded + 8 * stage.stage;
        const RowAt at = item.query(tile * kTileQueries);
        wait(shared + M::kTileEmpty + 8 * stage.stage, stage.parity ^ 1);
        // Only delta needs out, and delta is computed in the first block of keys only.
        arrive_expecting(landed, block == 0 ? M::kStageBytes : 2 * M::kTileBytes);
        load(to, M::kTilePart, p.q, at, landed);
        load(to + M::kTileBytes, M::kTilePart, p.dout, at, landed);
        if (block == 0) load(to + 2 * M::kTileBytes, M::kTilePart, p.out, at, landed);
      }
    }
  });
}

// Sets `bits` to the keys of a block that at least one query attends. All lanes of a warp call this
// function.
inline __device__ void attended_keys(KeyBits (&bits)[kKeyWords], const BackwardPairs& pairs,
                                     const Item& item, int block) {
  const uint2* from =
      reinterpret_cast<const uint2*>(pairs.row(item.head, block)) + threadIdx.x % 32;
  uint32_t any[kKeyWords] = {};
#pragma unroll 2
  for (int tile = 0; tile < tiles_of(item.head); ++tile, from += BackwardPairs::kRows) {
#pragma unroll
    for (int word = 0; word < kKeyWords; ++word) any[word] |= from[32 * word].x | from[32 * word].y;
  }
#pragma unroll
  for (int word = 0; word < kKeyWords; ++word)
    bits[word] = __ballot_sync(0xffffffffu, any[word] != 0);
}

// Under a mask, writes the bits of the attended keys of each block to shared memory, and sets the
// other keys and their values to 0, because they may be NaN. One warp calls this function.
template <int kHeadDim, bool kPairs>
__device__ void zero_unattended(const Params& p, uint32_t shared, unsigned char* memory,
                                const Heads& items) {
  using M = Memory<kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Place<M::kPlaces> place;
  items.each([&](const Item& item) {
    for (int block = 0; block < item.key_tiles; ++block, place.advance()) {
      KeyBits bits[kKeyWords];
      if constexpr (kPairs)
        attended_keys(bits, p.pairs, item, block);
      else
        attended_keys(bits, p.call.mask, item, block);
      wait(shared + M::kKeysLanded + 8 * place.stage, place.parity);
      unsigned char* keys = memory + place.stage * M::kPlaceBytes;
      zero_unattended_rows<kHeadDim>(keys, bits);
      zero_unattended_rows<kHeadDim>(keys + M::kKeyBytes, bits);
      if (lane == 0)
        *reinterpret_cast<uint4*>(memory + M::kBits + place.stage * kKeyWords * 4) = {
            bits[0], bits[1], bits[2], bits[3]};
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) arrive(shared + M::kKeysFull + 8 * place.stage);
    }
  });
}

// Writes the log-sum-exp and delta of the queries of each tile to shared memory, and under a mask
// of query-key pairs also the bits of the pairs. delta is computed in the first block of keys.
// kPreparers warps call this function, and each warp prepares 32 queries of each tile.
template <class T, int kHeadDim, bool kPairs>
__device__ void prepare_statistics(const Params& p, uint32_t shared, unsigned char* memory,
                                   const Heads& items) {
  using M = Memory<kHeadDim>;
  static_assert(kTileQueries == 32 * kPreparers);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = (static_cast<int>(threadIdx.x) / 32 - kFirstPreparer) * 32;
  const AttentionBackward& call = p.call;
  static_assert(BackwardPairs::kBytes == 16 * 32 * kPreparers);
  Place<M::kStages> stage;
  items.each([&](const Item& item) {
    const Head& h = item.head;
    const int64_t row = h.batch * call.lse_stride_batch + h.head * call.lse_stride_head + h.first_q;
    for (int block = 0; block < item.key_tiles; ++block) {
      for (int tile = 0; tile < tiles_of(h); ++tile, stage.advance()) {
        if constexpr (kPairs) {
          wait(shared + M::kTileEmpty + 8 * stage.stage, stage.parity ^ 1);
          const uint32_t* from = p.pairs.row(h, block) + tile * BackwardPairs::kWords;
          copy_chunk(shared + M::kPairs + stage.stage * BackwardPairs::kBytes + 16 * (first + lane),
                     from + 4 * (first + lane), true);
          commit_copies();
        }
        const int query = tile * kTileQueries + first + lane;
        const bool exists = query < h.queries;
        const float logarithm = exists ? call.lse[row + query] : -INFINITY;
        float delta = exists && block > 0 ? call.delta[row + query] : 0.0f;
        wait(shared + M::kTileLanded + 8 * stage.stage, stage.parity);
        if (block == 0) {
          const unsigned char* dout =
              memory + M::kRing + stage.stage * M::kStageBytes + M::kTileBytes;
          delta = delta_of<T, kHeadDim>(dout, dout + M::kTileBytes, first);
          if (exists && item.key_tiles > 1) call.delta[row + query] = delta;
        }
        Statistics& to = reinterpret_cast<Statistics*>(memory + M::kStatistics)[stage.stage];
        to.logarithm[first + lane] = logarithm == -INFINITY ? INFINITY : logarithm * kLog2E;
        to.delta[first + lane] = delta;
        if constexpr (kPairs) wait_for_copies<0>();
        __syncwarp();
        if (lane == 0) arrive(shared + M::kStatisticsFull + 8 * stage.stage);
      }
    }
  });
}

// Writes 0 to rows `first` to `end` - 1 of the head `h` in `x`. `warps` warps share the work, and
// each of them calls this function with its own number `warp`.
template <class T, int kHeadDim>
__device__ void zero_rows(const HeadRows& x, const Head& h, int64_t first, int64_t end, int warp,
                          int warps) {
  constexpr int kChunks = kHeadDim / 8;
  T* const rows = rows_of<T>(x, h, 0);
#pragma unroll 1
  for (int64_t i = first * kChunks + 32 * warp + threadIdx.x % 32; i < end * kChunks;
       i += 32 * warps)
    *reinterpret_cast<uint4*>(rows + i / kChunks * x.stride_row + i % kChunks * 8) = {0, 0, 0, 0};
}

// Writes 0 to the rows of packed gradients that belong to no sequence. One warp of each thread
// block calls this function.
template <class T, int kHeadDim>
__device__ void zero_slack(const AttentionBackward& p) {
  const Sequences& s = p.sequences;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int64_t queries = s.cu_seqlens_q[s.batches], keys = s.cu_seqlens_k[s.batches];
  for (int head = 0; head < s.heads; ++head) {
    const Head h = {0, head, 0, 0, 0, 0};
    zero_rows<T, kHeadDim>(p.dq, h, queries, s.rows_q, block, blocks);
    zero_rows<T, kHeadDim>(p.dk, h, keys, s.rows_k, block, blocks);
    zero_rows<T, kHeadDim>(p.dv, h, keys, s.rows_k, block, blocks);
  }
}

}  // namespace fastbert::cuda::backward
