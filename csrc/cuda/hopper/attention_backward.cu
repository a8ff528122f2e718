// Backward of attention on Hopper GPUs (sm_90a), in 16-bit formats.
//
// A persistent block takes one head of a sequence after the other. It walks over blocks of 128
// keys, and for each over tiles of 64 queries. One thread of the first group of four warps feeds
// the copy engine: keys and values of a block, and q, dout and, for delta, out of a tile through a
// ring of stages that runs on across blocks and heads. Two further warps prepare the statistics of
// a tile. Each of the two other groups owns 64 keys of the block.
//
// Keys are the rows of the scores, s = k q^T, so that weights and their gradients are left operands
// as they come out of the products: dv += p dout and dk += ds q stay in the registers of the group
// that owns the keys. Only ds passes through shared memory, for dq = ds^T k, of which each group
// computes half of the columns, or at head dim 32 all columns of every second tile. The keys of a
// group are a left operand in registers, too, and the values only at head dim 32, because ptxas
// would spill at head dim 64.
//
// The products dv, dk and dq of a tile run while the weights of the next tile are computed.
//
// dq of a sequence with one block of keys is complete at once. Otherwise its sums over the blocks
// of keys are kept in fp32 in global memory, where the thread that wrote a sum adds to it. There
// are no atomics, and reruns agree bit for bit.
//
// Time by unit on an H200, per 64 queries and 128 keys of head dim 64: the products take 1,280
// cycles of the tensor cores, and their operands 1,024 of the shared memory, which is busy for
// 1,420 with statistics, ds and copies; the issue of 439 instructions by each of eight warps takes
// 878 cycles of the four schedulers, and 8,192 exponentials 512 of the MUFU. The shared memory
// binds. Device memory binds below about 300 keys. At head dim 32 the shared memory is busy for 870
// cycles, the tensor cores for 640, and the issue takes 841.

#include <algorithm>

#include "../attention.cuh"
#include "../attention_products.cuh"
#include "../launch.cuh"
#include "../mma.cuh"
#include "attention.cuh"
#include "backward_tiles.cuh"
#include "device.cuh"
#include "dropout.cuh"
#include "wgmma.cuh"

namespace fastbert::cuda {
namespace {

using namespace backward;

constexpr int kGroupKeys = kKeyRows / kConsumers, kWarpRows = 16;
// Of 65,536 registers, 128 threads have 48 and 256 have 232 each.
constexpr int kProducerRegisters = 48, kConsumerRegisters = 232;

// Scores of a lane: two rows of 16 queries.
constexpr int kTileScores = kTileQueries / 2;

// A consumer: 64 keys of each block, and 32 columns of dq. At head dim 64 these are half of the
// columns of each tile, and at head dim 32 all columns of every second tile.
template <class T, int kHeadDim, bool kDropout>
class Consumer {
  using M = Memory<kHeadDim>;
  using Row = typename M::Row;
  using Kept = KeptWeights<kDropout>;
  static constexpr int kAllRows = 0xffff;
  static constexpr int kColumns = 32;
  static constexpr bool kAlternates = kHeadDim == kColumns;
  // At head dim 64, ptxas would spill with the values in registers.
  static constexpr bool kValuesInRegisters = kHeadDim == 32;

 public:
  __device__ Consumer(const Params& p, uint32_t shared, const unsigned char* memory)
      : p_(p), shared_(shared), memory_(memory), group_(uniform(threadIdx.x / kGroup) - 1) {}

  __device__ void run(const Heads& items) {
    items.each([&](const Item& of_lane) {
      Item item = of_lane;
      Head& h = item.head;
      for (int* x : {&h.batch, &h.head, &h.first_q, &h.first_k, &h.queries, &h.keys})
        *x = uniform(*x);
      item.key_tiles = uniform(item.key_tiles);
      // Without a key, no block writes dq.
      if (item.key_tiles == 0 && group_ == 0)
        zero_rows<T, kHeadDim>(p_.call.dq, h, h.first_q, h.first_q + h.queries, warp(),
                               kGroup / 32);
      for (int block = 0; block < item.key_tiles; ++block) differentiate(item, block);
    });
  }

 private:
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) % kGroup / 32; }
  // The first of the warp's rows in a block of keys.
  __device__ int key_row() const { return group_ * kGroupKeys + warp() * kWarpRows; }
  __device__ uint32_t keys_at() const { return shared_ + place_.stage * M::kPlaceBytes; }
  // Returns whether the group computes dq of a tile.
  __device__ bool owns_queries(int tile) const { return !kAlternates || (tile & 1) == group_; }
  __device__ int first_column() const { return kAlternates ? 0 : group_ * kColumns; }
  // The stage before the next one.
  __device__ int last_stage() const { return (stage_.stage + M::kStages - 1) % M::kStages; }
  __device__ uint32_t tile_at(int stage) const {
    return shared_ + M::kRing + stage * M::kStageBytes;
  }

  // One block of keys, with all tiles of queries.
  __device__ void differentiate(const Item& item, int block) {
    wait(shared_ + M::kKeysFull + 8 * place_.stage, place_.parity);
    load_keys();
    find_attended(item, block);
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk_[i] = dv_[i] = 0.0f;
    const int tiles = tiles_of(item.head);
    if (tiles > 0) {
      first_tile(item, block);
      for (int tile = 1; tile < tiles; ++tile) next_tile(item, block, tile);
      start_gradients(block, tiles - 1);
      finish_gradients(last_stage());
      store_queries(item, block, tiles - 1);
    }
    __syncwarp();
    if (lane() == 0) arrive(shared_ + M::kKeysEmpty + 8 * place_.stage);
    place_.advance();
    store_keys(item, block);
  }

  __device__ void first_tile(const Item& item, int block) {
    const Kept kept = draw(item, block, 0);
    start_scores();
    weigh<0>(kept);
    publish();
    narrow();
    load_sums(item, block, 0);
  }

  // The weights of a tile, with the gradients of the tile before it in the background. ptxas moves
  // arithmetic past a wait for products, but not what it stores before.
  __device__ void next_tile(const Item& item, int block, int tile) {
    const Kept kept = draw(item, block, tile);
    start_scores();
    start_gradients(block, tile - 1);
    const int before = last_stage();
    weigh<2>(kept);
    publish();
    finish_gradients(before);
    narrow();
    store_queries(item, block, tile - 1);
    load_sums(item, block, tile);
  }

  // Draws the verdicts of dropout. This comes first, because few registers are in use then.
  __device__ Kept draw(const Item& item, int block, int tile) {
    return Kept(p_.call.dropout, block * kKeyRows + key_row(), tile * kTileQueries, item.head.head,
                item.head.batch);
  }

  // Loads the group's keys, and at head dim 32 its values, as left operands.
  __device__ void load_keys() {
    load_rows(keys_, keys_at());
    if constexpr (kValuesInRegisters) load_rows(values_, keys_at() + M::kKeyBytes);
  }

  __device__ void load_rows(uint32_t (&rows)[kHeadDim / 4], uint32_t from) const {
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      uint32_t pairs[4];
      load_matrices(pairs, from + Row::offset(key_row() + lane() % 16, 2 * step + lane() / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[4 * step + i] = pairs[i];
    }
  }

  // Finds the attended keys of the warp.
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

  // Starts the products of the scores, and those of the gradients of the weights.
  __device__ void start_scores() {
    wait(shared_ + M::kTileLanded + 8 * stage_.stage, stage_.parity);
    const uint32_t tile = uniform(tile_at(stage_.stage));
    const uint64_t queries = descriptor<Row::kBytes>(tile);
    const uint64_t douts = descriptor<Row::kBytes>(tile + M::kTileBytes);
    const uint64_t values =
        descriptor<Row::kBytes>(keys_at() + M::kKeyBytes + group_ * kGroupKeys * Row::kBytes);
    pin(keys_);
    if constexpr (kValuesInRegisters) pin(values_);
    discard(scores_);
    discard(dweights_);
    begin_products();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step)
      multiply(scores_, keys_ + 4 * step, moved(queries, step * 32), step > 0, T{});
    end_products();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      if constexpr (kValuesInRegisters)
        multiply(dweights_, values_ + 4 * step, moved(douts, step * 32), step > 0, T{});
      else
        multiply(dweights_, moved(values, step * 32), moved(douts, step * 32), step > 0, T{});
    }
    end_products();
  }

  // Turns scores into weights, and the gradients of the weights into those of the scores. Of the
  // products, kPending later groups may go on.
  template <int kPending>
  __device__ void weigh(const Kept& kept) {
    const float factor = p_.call.scale * kLog2E;
    wait(shared_ + M::kStatisticsFull + 8 * stage_.stage, stage_.parity);
    const Statistics& statistics =
        reinterpret_cast<const Statistics*>(memory_ + M::kStatistics)[stage_.stage];
    const int first = lane() % 4 * 2;
    wait_for_products<kPending + 1>();
    pin(scores_);
    if (attended_ != kAllRows) {
      const int of_lane = attended_ >> lane() / 4;
#pragma unroll
      for (int i = 0; i < kTileScores; ++i)
        if (!(of_lane >> (i / 2 % 2 * 8) & 1)) scores_[i] = -INFINITY;
    }
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
    wait_for_products<kPending>();
    pin(dweights_);
    differentiate_weights(kept, statistics);
    stage_.advance();
  }

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

  // Rounds weights and gradients to left operands, after the products that read the former ones.
  // The bits above attended_ are 0. ptxas does not know that, and would otherwise take the pairs
  // that publish() stored, which stand in the way of these products.
  __device__ void narrow() {
    const uint32_t none = attended_ >> 16;
#pragma unroll
    for (int i = 0; i < kTileScores / 2; ++i) {
      weights_[i] = pair(scores_[2 * i], scores_[2 * i + 1], T{});
      gradients_[i] = gradient_pair(i) ^ none;
    }
  }

  // Stores the gradients of the group's keys in shared memory, where both groups read them.
  __device__ void publish() {
    const uint32_t to = shared_ + M::kGradients + turn_.stage * M::kGradientBytes;
#pragma unroll
    for (int step = 0; step < kTileQueries / 16; ++step) {
      const uint32_t pairs[4] = {gradient_pair(4 * step), gradient_pair(4 * step + 1),
                                 gradient_pair(4 * step + 2), gradient_pair(4 * step + 3)};
      store_matrices(to + M::GradientRow::offset(key_row() + lane() % 16, 2 * step + lane() / 16),
                     pairs);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane() == 0) arrive(shared_ + M::kGradientsFull + 8 * turn_.stage);
  }

  // Starts the products of the gradients of values, keys and queries of the last tile. Where groups
  // alternate, ptxas fills the group of products of dq that would be empty with one of 8 columns.
  __device__ void start_gradients(int block, int tile) {
    const uint64_t queries = descriptor<Row::kBytes>(uniform(tile_at(last_stage())));
    const uint64_t douts = moved(queries, M::kTileBytes);
    pin(weights_);
    pin(gradients_);
    pin(dv_);
    pin(dk_);
    pin(dq_);
    begin_products();
#pragma unroll
    for (int step = 0; step < kTileQueries / 16; ++step)
      accumulate_rows(dv_, weights_ + 4 * step, moved(douts, step * 16 * Row::kBytes), T{});
#pragma unroll
    for (int step = 0; step < kTileQueries / 16; ++step)
      accumulate_rows(dk_, gradients_ + 4 * step, moved(queries, step * 16 * Row::kBytes), T{});
    end_products();
    wait(shared_ + M::kGradientsFull + 8 * turn_.stage, turn_.parity);
    if (owns_queries(tile)) {
      begin_products();
      const uint64_t left = descriptor(shared_ + M::kGradients + turn_.stage * M::kGradientBytes);
      const uint64_t right = descriptor<Row::kBytes>(keys_at() + first_column() * 2);
#pragma unroll
      for (int step = 0; step < kKeyRows / 16; ++step)
        multiply_rows(dq_, moved(left, step * 16 * M::GradientRow::kBytes),
                      moved(right, step * 16 * Row::kBytes), step > 0 || block > 0, T{});
    }
    end_products();
    turn_.advance();
  }

  // Ends these products, and gives the tile back. Each warp does so, because it knows of its own
  // products alone.
  __device__ void finish_gradients(int stage) {
    wait_for_products<0>();
    pin(weights_);
    pin(gradients_);
    pin(dv_);
    pin(dk_);
    pin(dq_);
    __syncwarp();
    if (lane() == 0) arrive(shared_ + M::kTileEmpty + 8 * stage);
  }

  // The factor of dq and dk. The softmax of a single key is constant, so its gradient is 0, which
  // rounding would miss.
  __device__ float scale(const Item& item) const {
    return item.head.keys == 1 ? 0.0f : p_.call.scale;
  }

  // Calls body(query, half) for the lane's rows of a tile, and with whether the query exists.
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

  // The sums of dq of a row in global memory, from the lane's first column on. A lane keeps its
  // columns next to each other in fours, so that four lanes cover 64 bytes.
  __device__ float4* sums_of(const Item& item, int query) const {
    const AttentionBackward& call = p_.call;
    const Head& h = item.head;
    const int64_t row = static_cast<int>(opaque(h.batch)) * call.lse_stride_batch +
                        h.head * call.lse_stride_head + h.first_q + query;
    return reinterpret_cast<float4*>(call.dq_sums + row * kHeadDim + first_column()) + lane() % 4;
  }

  // Loads the sums of dq over the blocks of keys so far.
  __device__ void load_sums(const Item& item, int block, int tile) {
    discard(dq_);
    if (block == 0 || !owns_queries(tile)) return;
    each_query(item, tile, [&](int query, int half, bool exists) {
      const float4* from = sums_of(item, query);
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        const float4 sums = exists ? from[4 * i] : float4{0.0f, 0.0f, 0.0f, 0.0f};
        dq_[8 * i + 2 * half] = sums.x;
        dq_[8 * i + 2 * half + 1] = sums.y;
        dq_[8 * i + 2 * half + 4] = sums.z;
        dq_[8 * i + 2 * half + 5] = sums.w;
      }
    });
  }

  // Stores dq of a tile, or its sums so far.
  __device__ void store_queries(const Item& item, int block, int tile) {
    if (!owns_queries(tile)) return;
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
  Place<M::kTurns> turn_;
  int attended_ = 0;  // bit n for row n of the warp
  float scores_[kTileScores], dweights_[kTileScores];
  uint32_t keys_[kHeadDim / 4], values_[kHeadDim / 4];
  uint32_t weights_[kTileScores / 2], gradients_[kTileScores / 2];
  float dk_[kHeadDim / 2], dv_[kHeadDim / 2], dq_[kColumns / 2];
};

template <class T, int kHeadDim, bool kDropout>
__global__ void __launch_bounds__(kThreads, 1)
    persistent_backward_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
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
    give_registers<kProducerRegisters>();
    if (warp == 0 && lane == 0) load_tiles<kHeadDim>(p, shared, items);
    if (warp == 1) {
      if (p.call.mask.data) zero_unattended<kHeadDim>(p, shared, memory, items);
      if (p.call.sequences.cu_seqlens_q) zero_slack<T, kHeadDim>(p.call);
    }
    if (warp >= kFirstPreparer) prepare_statistics<T, kHeadDim>(p, shared, memory, items);
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<T, kHeadDim, kDropout>(p, shared, memory).run(items);
  }
#endif
}

template <class T, int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  const Sequences& s = params.call.sequences;
  const int64_t items = static_cast<int64_t>(s.heads) * s.batches;
  const unsigned blocks = static_cast<unsigned>(
      std::clamp<int64_t>(items, 1, attribute(cudaDevAttrMultiProcessorCount)));
  const auto kernel = params.call.dropout.seed ? persistent_backward_kernel<T, kHeadDim, true>
                                               : persistent_backward_kernel<T, kHeadDim, false>;
  return launch<Params>(kernel, dim3(blocks), kThreads, params, stream, Memory<kHeadDim>::kBytes);
}

template <class T>
cudaError_t launch_backward(const Params& params, cudaStream_t stream) {
  return params.call.head_dim == 32 ? launch_head_dim<T, 32>(params, stream)
                                    : launch_head_dim<T, 64>(params, stream);
}

}  // namespace

cudaError_t hopper_attention_backward(const AttentionBackward& p, cudaStream_t stream) {
  const Sequences& s = p.sequences;
  if (s.batches == 0 || (s.rows_q == 0 && s.rows_k == 0)) return cudaSuccess;
  Params params = {{}, {}, {}, {}, {}, p};
  // Without queries or without keys there are no copies of them.
  const bool queries = s.max_q > 0, keys = s.max_k > 0;
  const int64_t rows_q = queries ? s.rows_q : s.rows_k, rows_k = keys ? s.rows_k : s.rows_q;
  const auto map = [&](CUtensorMap& to, const HeadRows& x, int64_t rows, int box_rows) {
    return encode(to, x, p.format, p.head_dim, s, rows, box_rows);
  };
  cudaError_t error = map(params.q, queries ? p.q : p.k, rows_q, kTileQueries);
  if (!error) error = map(params.out, queries ? p.out : p.k, rows_q, kTileQueries);
  if (!error) error = map(params.dout, queries ? p.dout : p.k, rows_q, kTileQueries);
  if (!error) error = map(params.k, keys ? p.k : p.q, rows_k, kKeyRows);
  if (!error) error = map(params.v, keys ? p.v : p.q, rows_k, kKeyRows);
  if (error) return error;
  return p.format == Format::f16 ? launch_backward<__half>(params, stream)
                                 : launch_backward<__nv_bfloat16>(params, stream);
}

}  // namespace fastbert::cuda
