// Backward of attention at head dim 128 on Hopper GPUs (sm_90a), in 16-bit formats.
//
// The tiles, the producer and the groups of keys are the same as in attention_backward.cu. At head
// dim 128, the sums of dk and dv for 64 keys take 128 registers of each lane. Therefore no weights
// or gradients of a tile stay in registers while the scores of the next tile are computed, and the
// keys and values are left operands in shared memory. The steps of a tile are ordered so that
// products run during most of the arithmetic:
//
//   scores; gradients of weights     as two products, one after the other
//   weights                          while the product for the gradients of weights runs
//   dv += weights dout
//   gradients of the scores          while the product for dv runs
//   dq = ds^T k; dk += ds q          once ds of both groups has arrived
//   dq is added up and stored        while the product for dk runs
//
// Each group computes half of the columns of dq. The groups wait for each other in every tile, so
// that two buffers for ds are enough.
//
// The following counts are for 64 queries and 128 keys on an H200. The products take 2,560 cycles
// of the tensor cores, and the reads of their operands take 2,048 cycles of the shared memory. The
// issue of 475 instructions by each of eight warps takes 950 cycles of the four schedulers. The
// tensor cores are the limit. README.md lists variants of this kernel for which ptxas would spill
// registers.

#include "../attention.cuh"
#include "attention.cuh"
#include "backward_keys.cuh"

namespace fastbert::cuda::backward {
namespace {

// The work of a group of four warps, which owns 64 keys of each block and computes 64 columns of
// dq.
template <class T, bool kPairs, bool kDropout>
class Consumer : KeyGroup<T, 128, kPairs, kDropout> {
  using Base = KeyGroup<T, 128, kPairs, kDropout>;
  using Base::dk_, Base::dq_, Base::dv_, Base::dweights_, Base::gradients_, Base::group_,
      Base::scores_, Base::shared_, Base::stage_, Base::weights_;
  using typename Base::Kept;
  using typename Base::M;
  using typename Base::Row;

 public:
  __device__ Consumer(const Params& p, uint32_t shared, const unsigned char* memory)
      : Base(p, shared, memory) {}

  __device__ void run(const Heads& items) {
    this->each_block(items, [&](const Item& item, int block) { differentiate(item, block); });
  }

 private:
  // Computes the gradients of one block of keys, and adds to dq for all tiles of queries.
  __device__ void differentiate(const Item& item, int block) {
    this->await_keys();
    this->find_attended(item, block);
    this->clear_keys();
    const int tiles = tiles_of(item.head);
    for (int tile = 0; tile < tiles; ++tile) {
      const Kept kept = this->draw(item, block, tile);
      start_scores();
      weigh(kept);
      this->publish(stage_.stage);
      start_gradients();
      wait_for_products<1>();
      pin(dq_);
      if (block > 0) this->each_sum(item, tile, [](float& to, float sum) { to += sum; });
      this->store_queries(item, block, tile);
      wait_for_products<0>();
      pin(weights_);
      pin(gradients_);
      pin(dv_);
      pin(dk_);
      this->release_tile(stage_.stage);
      stage_.advance();
    }
    this->finish_keys(item, block);
  }

  // Returns the descriptor of the keys from row `row` on, for the part `part` of their columns. The
  // address is computed again in each tile, because the descriptors of all steps would otherwise
  // take registers.
  __device__ uint64_t keys(int row, int part) const {
    return descriptor<Row::kBytes>(
        uniform(opaque(this->keys_at() + part * M::kKeyPart + row * Row::kBytes)));
  }

  // Returns the descriptor of the queries of the tile.
  __device__ uint64_t queries() const {
    return descriptor<Row::kBytes>(uniform(this->tile_at(stage_.stage)), M::kTilePart);
  }

  // Starts the products that give the scores and the products that give the gradients of the
  // weights.
  __device__ void start_scores() {
    wait(shared_ + M::kTileLanded + 8 * stage_.stage, stage_.parity);
    const uint64_t left = keys(group_ * kGroupKeys, 0), right = queries();
    discard(scores_);
    discard(dweights_);
    begin_products();
    multiply_tile(scores_, left, right);
    multiply_tile(dweights_, moved(left, M::kKeyBytes), moved(right, M::kTileBytes));
  }

  __device__ void multiply_tile(float (&sums)[kTileScores], uint64_t left, uint64_t right) {
#pragma unroll
    for (int step = 0; step < 128 / 16; ++step)
      multiply(sums, moved(left, step / 4 * M::kKeyPart + step % 4 * 32),
               moved(right, step / 4 * M::kTilePart + step % 4 * 32), step > 0, T{});
    end_products();
  }

  // Turns scores into weights, starts the product that adds to dv, and turns the gradients of the
  // weights into gradients of the scores.
  __device__ void weigh(const Kept& kept) {
    const Statistics& statistics = this->await_statistics();
    wait_for_products<1>();
    pin(scores_);
    this->exponentiate(statistics);
#pragma unroll
    for (int i = 0; i < kTileScores / 2; ++i)
      weights_[i] = pair(kept.kept(2 * i) ? scores_[2 * i] : 0.0f,
                         kept.kept(2 * i + 1) ? scores_[2 * i + 1] : 0.0f, T{});
    pin(weights_);
    pin(dv_);
    begin_products();
    accumulate_tile(dv_, weights_, moved(queries(), M::kTileBytes));
    wait_for_products<1>();
    pin(dweights_);
    this->differentiate_weights(kept, statistics);
  }

  // Computes sums += left right over the 64 queries of a tile.
  __device__ void accumulate_tile(float (&sums)[64], const uint32_t (&left)[kTileScores / 2],
                                  uint64_t right) {
#pragma unroll
    for (int step = 0; step < kTileQueries / 16; ++step)
      accumulate_rows(sums, left + 4 * step, moved(right, step * 16 * Row::kBytes), T{});
    end_products();
  }

  // Starts the products that add to dq and dk.
  __device__ void start_gradients() {
#pragma unroll
    for (int i = 0; i < kTileScores / 2; ++i) gradients_[i] = this->gradient_pair(i);
    wait(shared_ + M::kGradientsFull + 8 * stage_.stage, stage_.parity);
    const uint64_t left = descriptor(shared_ + M::kGradients + stage_.stage * M::kGradientBytes);
    const uint64_t right = keys(0, group_);
    discard(dq_);
    pin(gradients_);
    pin(dk_);
    begin_products();
#pragma unroll
    for (int step = 0; step < kKeyRows / 16; ++step)
      multiply_rows(dq_, moved(left, step * 16 * M::GradientRow::kBytes),
                    moved(right, step * 16 * Row::kBytes), step > 0, T{});
    end_products();
    accumulate_tile(dk_, gradients_, queries());
  }
};

template <class T, int kHeadDim, bool kPairs, bool kDropout>
__global__ void __launch_bounds__(kThreads, 1)
    persistent_backward_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  run_block<Consumer<T, kPairs, kDropout>, T, kHeadDim, kPairs>(p, memory);
#endif
}

template <class T, bool kPairs>
cudaError_t launch_pairs(const Params& params, cudaStream_t stream) {
  return launch_blocks<128>(params.call.dropout.seed
                                ? persistent_backward_kernel<T, 128, kPairs, true>
                                : persistent_backward_kernel<T, 128, kPairs, false>,
                            params, stream);
}

template <class T>
cudaError_t launch_format(const Params& params, cudaStream_t stream) {
  return has_pairs(params.call.mask, params.call.sequences)
             ? launch_pairs<T, true>(params, stream)
             : launch_pairs<T, false>(params, stream);
}

}  // namespace

cudaError_t launch_wide(const Params& params, cudaStream_t stream) {
  return params.call.format == Format::f16 ? launch_format<__half>(params, stream)
                                           : launch_format<__nv_bfloat16>(params, stream);
}

}  // namespace fastbert::cuda::backward
