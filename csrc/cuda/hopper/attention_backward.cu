// Backward of attention on Hopper GPUs (sm_90a), in 16-bit formats.
//
// A persistent thread block computes the heads of sequences one after the other. For each block of
// 128 keys, it goes through all tiles of 64 queries. One thread of the first group of four warps
// starts the copies. It copies the keys and values of each block of keys, the q and dout of each
// tile, and out if delta must be computed. The tiles go through a ring of stages in shared memory,
// which does not restart at a new block of keys or a new head. Two other warps of the first group
// prepare the log-sum-exp and delta of the queries. Each of the two other groups owns 64 keys of
// the block of keys.
//
// The scores are computed as s = k q^T, so that their rows are keys. The softmax weights p and the
// gradients ds of the scores then have the register layout of a left operand. Therefore the sums dv
// += p dout and dk += ds q stay in the registers of the group that owns the keys. Only ds is
// written to shared memory, for dq = ds^T k. Each group computes half of the columns of dq, or at
// head dim 32 all columns of every second tile. The keys of a group are a left operand in
// registers, too. At head dim 32, the values are also in registers. At head dim 64, they are in
// shared memory, because ptxas would otherwise spill registers.
//
// The products dv, dk and dq of a tile run while the weights of the next tile are computed.
//
// If a sequence has one block of keys, its dq is complete after this block. Otherwise, dq_sums in
// global memory contains the sums of dq over the blocks of keys in fp32, and the thread that wrote
// a sum adds to it for the next block. The kernel uses no atomics, so repeated runs give the same
// bits.
//
// The following counts are for 64 queries and 128 keys of head dim 64 on an H200. The products take
// 1,280 cycles of the tensor cores. The reads of their operands take 1,024 cycles of the shared
// memory, which is busy for 1,420 cycles with statistics, ds and copies. The issue of 445
// instructions by each of eight warps takes 890 cycles of the four schedulers, and 8,192
// exponentials take 512 cycles of the special function units. The shared memory is the limit; below
// about 300 keys, device memory is the limit. At head dim 32 the shared memory is busy for 870
// cycles, the tensor cores for 640, and the issue of instructions takes 857 cycles.

#include "../attention.cuh"
#include "attention.cuh"
#include "backward_keys.cuh"

namespace fastbert::cuda {
namespace {

using namespace backward;

// The work of a group of four warps, which owns 64 keys of each block and computes 32 columns of
// dq. At head dim 64, the group computes these columns for every tile, and at head dim 32, for
// every second tile.
template <class T, int kHeadDim, bool kPairs, bool kDropout>
class Consumer : KeyGroup<T, kHeadDim, kPairs, kDropout> {
  using Base = KeyGroup<T, kHeadDim, kPairs, kDropout>;
  using Base::attended_, Base::dk_, Base::dq_, Base::dv_, Base::dweights_, Base::gradients_,
      Base::group_, Base::place_, Base::scores_, Base::shared_, Base::stage_, Base::weights_;
  using Base::first_column, Base::gradient_pair, Base::key_row, Base::keys_at, Base::lane,
      Base::tile_at;
  using typename Base::Kept;
  using typename Base::M;
  using typename Base::Row;
  static constexpr bool kAlternates = Base::kAlternates;
  // At head dim 64, the values are in shared memory, because ptxas would otherwise spill registers.
  static constexpr bool kValuesInRegisters = kHeadDim == 32;

 public:
  __device__ Consumer(const Params& p, uint32_t shared, const unsigned char* memory)
      : Base(p, shared, memory) {}

  __device__ void run(const Heads& items) {
    this->each_block(items, [&](const Item& item, int block) { differentiate(item, block); });
  }

 private:
  // Returns whether the group computes dq of a tile.
  __device__ bool owns_queries(int tile) const { return !kAlternates || (tile & 1) == group_; }
  // Returns the stage before `stage_`.
  __device__ int last_stage() const { return (stage_.stage + M::kStages - 1) % M::kStages; }

  // Computes the gradients of one block of keys, and adds to dq for all tiles of queries.
  __device__ void differentiate(const Item& item, int block) {
    this->await_keys();
    load_keys();
    this->find_attended(item, block);
    this->clear_keys();
    const int tiles = tiles_of(item.head);
    if (tiles > 0) {
      first_tile(item, block);
      for (int tile = 1; tile < tiles; ++tile) next_tile(item, block, tile);
      start_gradients(block, tiles - 1);
      finish_gradients(last_stage());
      store_queries(item, block, tiles - 1);
    }
    this->finish_keys(item, block);
  }

  __device__ void first_tile(const Item& item, int block) {
    const Kept kept = this->draw(item, block, 0);
    start_scores();
    weigh<0>(kept);
    this->publish(turn_.stage);
    narrow();
    load_sums(item, block, 0);
  }

  // Computes the weights of a tile while the products for the gradients of the previous tile run.
  // ptxas may move arithmetic past a wait for products, but it does not move a result that is
  // stored before the wait. Therefore publish() stores ds before the wait.
  __device__ void next_tile(const Item& item, int block, int tile) {
    const Kept kept = this->draw(item, block, tile);
    start_scores();
    start_gradients(block, tile - 1);
    const int before = last_stage();
    weigh<2>(kept);
    this->publish(turn_.stage);
    finish_gradients(before);
    narrow();
    store_queries(item, block, tile - 1);
    load_sums(item, block, tile);
  }

  // Loads the keys of the group, and at head dim 32 also the values, into registers as left
  // operands.
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

  // Starts the products that give the scores and the products that give the gradients of the
  // weights.
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

  // Turns scores into weights, and the gradients of the weights into gradients of the scores. When
  // the function returns, the last kPending groups of products may still be running.
  template <int kPending>
  __device__ void weigh(const Kept& kept) {
    const Statistics& statistics = this->await_statistics();
    wait_for_products<kPending + 1>();
    pin(scores_);
    this->exponentiate(statistics);
    wait_for_products<kPending>();
    pin(dweights_);
    this->differentiate_weights(kept, statistics);
    stage_.advance();
  }

  // Rounds the weights and the gradients to 16 bits, as left operands. The products that read the
  // operands of the previous tile must have ended before the call. The upper 16 bits of attended_
  // are 0, but ptxas does not know this. Without the XOR with `none`, ptxas would reuse the pairs
  // that publish() stored, which would hinder those products.
  __device__ void narrow() {
    const uint32_t none = attended_ >> 16;
#pragma unroll
    for (int i = 0; i < kTileScores / 2; ++i) {
      weights_[i] = pair(scores_[2 * i], scores_[2 * i + 1], T{});
      gradients_[i] = gradient_pair(i) ^ none;
    }
  }

  // Starts the products that add to dv, dk and dq for `tile`. At head dim 32, a group of warps has
  // no product for dq in every second tile; ptxas then puts a product of 8 columns into the empty
  // group of products.
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

  // Waits for the products that `start_gradients` started, and frees the stage of their tile.
  __device__ void finish_gradients(int stage) {
    wait_for_products<0>();
    pin(weights_);
    pin(gradients_);
    pin(dv_);
    pin(dk_);
    pin(dq_);
    this->release_tile(stage);
  }

  // Loads the sums of dq over the earlier blocks of keys.
  __device__ void load_sums(const Item& item, int block, int tile) {
    discard(dq_);
    if (block == 0 || !owns_queries(tile)) return;
    this->each_sum(item, tile, [](float& to, float sum) { to = sum; });
  }

  __device__ void store_queries(const Item& item, int block, int tile) {
    if (owns_queries(tile)) Base::store_queries(item, block, tile);
  }

  Place<M::kTurns> turn_;
  uint32_t keys_[kHeadDim / 4], values_[kHeadDim / 4];
};

template <class T, int kHeadDim, bool kPairs, bool kDropout>
__global__ void __launch_bounds__(kThreads, 1)
    persistent_backward_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  run_block<Consumer<T, kHeadDim, kPairs, kDropout>, T, kHeadDim, kPairs>(p, memory);
#endif
}

template <class T, int kHeadDim, bool kPairs>
cudaError_t launch_pairs(const Params& params, cudaStream_t stream) {
  return launch_blocks<kHeadDim>(params.call.dropout.seed
                                     ? persistent_backward_kernel<T, kHeadDim, kPairs, true>
                                     : persistent_backward_kernel<T, kHeadDim, kPairs, false>,
                                 params, stream);
}

template <class T, int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  return has_pairs(params.call.mask, params.call.sequences)
             ? launch_pairs<T, kHeadDim, true>(params, stream)
             : launch_pairs<T, kHeadDim, false>(params, stream);
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
  Params params = {{}, {}, {}, {}, {}, p, pair_tiles(p)};
  // If there are no queries, the kernel copies no rows of q, out and dout, and their tensor maps
  // describe the rows of k instead. If there are no keys, the tensor maps of k and v describe the
  // rows of q.
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
  if (!error) error = pack_pairs(p, stream);
  if (error) return error;
  if (p.head_dim == 128) return launch_wide(params, stream);
  return p.format == Format::f16 ? launch_backward<__half>(params, stream)
                                 : launch_backward<__nv_bfloat16>(params, stream);
}

}  // namespace fastbert::cuda
