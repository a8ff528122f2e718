// Matrix products with an activation in the epilogue on Hopper GPUs (sm_90a), in 16-bit formats.
//
// A persistent block has three groups of four warps. Slices of both operands, each 64 elements of
// the depth, go through a ring of three stages in shared memory, which does not restart at a new
// tile of the result. Two groups multiply: each owns 64 of the 128 rows of a tile, and its
// registers hold the sums of all 256 columns. When the sums are complete, the group rounds them,
// stores them in shared memory and begins the next tile immediately. The remaining group, which is
// the first one in the block, does not multiply. It reads the sums from shared memory, applies the
// activation and writes the results, 16 bytes per lane, while the products of the next tile run. So
// the activation costs no time, as long as it takes less time than the products. Between two pieces
// of work, one thread of the first group looks for free stages and starts their copies.
//
// The bias is copied with the first stage of a tile, and the sums start from the bias.
//
// Two groups that take turns in products and epilogues (ping-pong) would hide the epilogue as well.
// But each group would need its own tile, and thus 64 or 80 bytes of operands for each cycle of the
// tensor cores. The tile of 128 x 256 that both groups share needs 48 bytes per cycle, which come
// from the L2 cache. A fourth group that does nothing but copy does not fit: with 512 threads,
// ptxas gives each thread at most 128 registers, and the sums alone need 128. If a warp of the
// first group did nothing but copy, the other three would take longer than the products in the
// backward at a depth of 768.
//
// On an H200 and at a depth of 768, the products of one tile take 12,288 cycles of the tensor
// cores. README.md has the counts of the other units.

#include <algorithm>

#include "../copy.cuh"
#include "../gemm_epilogue.cuh"
#include "gemm.cuh"
#include "gemm_products.cuh"
#include "groups.cuh"
#include "pipeline.cuh"
#include "tma.cuh"

namespace fastbert::cuda {
namespace {

constexpr int kEpilogueWarps = kGroup / 32;
constexpr int kRows = kGemmRows, kColumns = 256, kDepth = 64;
constexpr int kGroupRows = kRows / kConsumers, kWarpRows = 16;
constexpr int kSums = kColumns / 2;  // sums of a lane: 64 columns in each of two rows
constexpr int kEpilogueBarrier = 1;

// Offsets in shared memory, from an address that is a multiple of 1024.
struct Memory {
  static constexpr int kStages = 3;
  static constexpr int kLeftBytes = kRows * kBoxRowBytes, kRightBytes = kColumns * kBoxRowBytes;
  static constexpr int kStageBytes = kLeftBytes + kRightBytes;
  // The rounded sums of each multiplying group, in parts of 64 columns in the layout of tma.cuh.
  static constexpr int kPartBytes = kGroupRows * kBoxRowBytes;
  static constexpr int kResultBytes = kColumns / kBoxColumns * kPartBytes;
  static constexpr int kResults = kStages * kStageBytes;
  static constexpr int kBiasBytes = kColumns * 2;
  static constexpr int kBias = kResults + kConsumers * kResultBytes;  // the bias of each stage
  // The sums of each column over the rows of each warp of the first group. Successive tiles
  // alternate between two buffers.
  static constexpr int kColumnSums = kBias + kStages * kBiasBytes;
  static constexpr int kColumnSumsBytes = kEpilogueWarps * kColumns * 4;
  // Each stage and the results of each multiplying group have two barriers: full and empty.
  static constexpr int kFull = kColumnSums + 2 * kColumnSumsBytes, kEmpty = kFull + 8 * kStages;
  static constexpr int kResultFull = kEmpty + 8 * kStages;
  static constexpr int kResultEmpty = kResultFull + 8 * kConsumers;
  static constexpr int kBytes = kResultEmpty + 8 * kConsumers;
};
static_assert(Memory::kBytes <= 227 * 1024);

template <class Call>
struct Params {
  CUtensorMap left, right, bias;
  Call call;
  bool has_bias;
  int row_tiles, column_tiles, steps;

  __device__ int tiles() const { return row_tiles * column_tiles; }
  __device__ TileAt at(int tile) const { return tile_at(tile, row_tiles, column_tiles); }
};

// Starts copies to all stages that are free, without waiting for a stage. One thread uses this
// class. The right operand is a weight (columns, depth) in the forward, and (depth, columns) in the
// backward.
template <class Call, bool kByRows>
class Copies {
 public:
  __device__ Copies(const Params<Call>& p, uint32_t shared)
      : p_(p), shared_(shared), tile_(static_cast<int>(blockIdx.x)) {
    if (tile_ < p.tiles()) at_ = p.at(tile_);
  }

  __device__ void start() {
    while (tile_ < p_.tiles() &&
           has_completed(shared_ + Memory::kEmpty + 8 * place_.stage, place_.parity ^ 1)) {
      fill_stage();
      place_.advance();
      if (++step_ < p_.steps) continue;
      step_ = 0;
      tile_ += static_cast<int>(gridDim.x);
      if (tile_ < p_.tiles()) at_ = p_.at(tile_);
    }
  }

 private:
  __device__ void fill_stage() const {
    const uint32_t full = shared_ + Memory::kFull + 8 * place_.stage;
    const uint32_t left = shared_ + place_.stage * Memory::kStageBytes;
    const uint32_t right = left + Memory::kLeftBytes;
    const int depth = step_ * kDepth, column = at_.column * kColumns;
    const bool with_bias = !kByRows && p_.has_bias && step_ == 0;
    arrive_expecting(full, Memory::kStageBytes + (with_bias ? Memory::kBiasBytes : 0));
    load_box(left, p_.left, depth, at_.row * kRows, full);
    if (kByRows) {
#pragma unroll
      for (int part = 0; part < kColumns / kBoxColumns; ++part)
        load_box(right + part * kDepth * kBoxRowBytes, p_.right, column + part * kBoxColumns, depth,
                 full);
    } else {
      load_box(right, p_.right, depth, column, full);
    }
    if (with_bias)
      load_vector(shared_ + Memory::kBias + place_.stage * Memory::kBiasBytes, p_.bias, column,
                  full);
  }

  const Params<Call>& p_;
  const uint32_t shared_;
  Place<Memory::kStages> place_;
  TileAt at_;
  int tile_, step_ = 0;
};

// The work of a group that multiplies, which owns 64 rows of each tile.
template <class T, class Call, bool kByRows>
class Consumer {
 public:
  __device__ Consumer(const Params<Call>& p, uint32_t shared, const unsigned char* memory)
      : p_(p), shared_(shared), memory_(memory), group_(uniform(threadIdx.x / kGroup) - 1) {}

  __device__ void run() {
    const int tiles = p_.tiles(), steps = p_.steps;
    uint32_t parity = 0;
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles;
         tile += static_cast<int>(gridDim.x), parity ^= 1) {
      wait_for_stage();
      start_sums();
      start_products();
      for (int step = 1; step < steps; ++step) {
        wait_for_stage();
        start_products();
        // After this wait, the products of the previous stage have ended.
        wait_for_products<1>();
        give_back();
      }
      wait_for_products<0>();
      pin(sums_);
      give_back();
      store(parity);
    }
  }

 private:
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) % kGroup / 32; }

  __device__ void wait_for_stage() {
    wait(shared_ + Memory::kFull + 8 * full_.stage, full_.parity);
  }

  // Sets the sums to the bias, or to 0 if there is none. Only the forward has a bias; kByRows is
  // true in the backward.
  __device__ void start_sums() {
    if (kByRows || !p_.has_bias) {
#pragma unroll
      for (float& sum : sums_) sum = 0.0f;
      return;
    }
    const unsigned char* bias =
        memory_ + Memory::kBias + full_.stage * Memory::kBiasBytes + lane() % 4 * 4;
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const float2 both = unpack(*reinterpret_cast<const uint32_t*>(bias + 16 * i), T{});
      sums_[4 * i] = sums_[4 * i + 2] = both.x;
      sums_[4 * i + 1] = sums_[4 * i + 3] = both.y;
    }
  }

  __device__ void start_products() {
    const uint32_t stage = shared_ + full_.stage * Memory::kStageBytes;
    const uint64_t left = descriptor(stage + group_ * kGroupRows * kBoxRowBytes);
    const uint32_t right = stage + Memory::kLeftBytes;
    pin(sums_);
    begin_products();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      if (kByRows)
        multiply_rows(sums_, moved(left, 32 * step),
                      moved(descriptor(right, kDepth * kBoxRowBytes), step * 16 * kBoxRowBytes),
                      T{});
      else
        multiply(sums_, moved(left, 32 * step), moved(descriptor(right), 32 * step), T{});
    }
    end_products();
    full_.advance();
  }

  // Frees a stage. Each warp arrives at the barrier separately, because a warp knows only that its
  // own products have ended.
  __device__ void give_back() {
    __syncwarp();
    if (lane() == 0) arrive(shared_ + Memory::kEmpty + 8 * used_.stage);
    used_.advance();
  }

  // Rounds the sums and stores them in shared memory, where the epilogue reads them.
  __device__ void store(uint32_t parity) {
    const uint32_t to = shared_ + Memory::kResults + group_ * Memory::kResultBytes +
                        (warp() * kWarpRows + lane() % 16) * kBoxRowBytes;
    wait(shared_ + Memory::kResultEmpty + 8 * group_, parity ^ 1);
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = pair(sums_[8 * step + 2 * i], sums_[8 * step + 2 * i + 1], T{});
      const int chunk = (step % 4 * 2 + lane() / 16) ^ (lane() % 8);
      store_matrices(to + step / 4 * Memory::kPartBytes + chunk * 16, pairs);
    }
    __syncwarp();
    if (lane() == 0) arrive(shared_ + Memory::kResultFull + 8 * group_);
  }

  const Params<Call>& p_;
  const uint32_t shared_;
  const unsigned char* const memory_;
  const int group_;
  Place<Memory::kStages> full_, used_;
  float sums_[kSums];
};

// The work of the first group: all of its threads compute the epilogue, and its first thread also
// starts the copies. Each warp takes 16 rows of each multiplying group, in pieces of 64 columns.
// The pieces that have the same columns come one after the other. A lane takes one chunk of eight
// columns in every fourth row.
template <class T, class Store, bool kByRows>
class Epilogue {
  using Call = typename Store::Params;
  static constexpr int kRounds = 4;  // rounds of four rows, in each of which a lane takes one row
  static constexpr int kParts = kColumns / kBoxColumns;

 public:
  __device__ Epilogue(const Params<Call>& p, uint32_t shared, unsigned char* memory)
      : p_(p), shared_(shared), memory_(memory), copies_(p, shared) {}

  __device__ void run() {
    uint32_t parity = 0;
    for (int tile = static_cast<int>(blockIdx.x); tile < p_.tiles();
         tile += static_cast<int>(gridDim.x), parity ^= 1) {
      const TileAt at = p_.at(tile);
      const Chunks chunks(p_.call, at.row * kRows + warp() * kWarpRows + lane() / 8,
                          at.column * kColumns + lane() % 8 * kChunk);
      read_saved(chunks, 0, 0);
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        float sums[kChunk] = {};
#pragma unroll 1
        for (int half = 0; half < kConsumers; ++half) {
          if (part == 0) wait_for_result(half, parity);
          finish(chunks, half, part, sums);
        }
        if constexpr (Store::kReadsSaved)
          write_sums<8>(column_sums(parity, warp()) + part * kBoxColumns, sums);
      }
      __syncwarp();
      if (lane() < kConsumers) arrive(shared_ + Memory::kResultEmpty + 8 * lane());
      store_columns(at, parity);
    }
  }

 private:
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) / 32; }
  __device__ float* column_sums(uint32_t parity, int of_warp) const {
    return reinterpret_cast<float*>(memory_ + Memory::kColumnSums +
                                    parity * Memory::kColumnSumsBytes) +
           of_warp * kColumns;
  }
  __device__ void start_copies() {
    if (threadIdx.x == 0) copies_.start();
    __syncwarp();
  }

  // Waits until the sums of a multiplying group are in shared memory. The first warp starts further
  // copies while it waits.
  __device__ void wait_for_result(int half, uint32_t parity) {
    const uint32_t full = shared_ + Memory::kResultFull + 8 * half;
    if (warp() > 0) return wait(full, parity);
    do start_copies();
    while (!__all_sync(0xffffffffu, has_completed(full, parity)));
  }

  __device__ void read_saved(const Chunks& chunks, int half, int part) {
    if constexpr (Store::kReadsSaved) {
      if (part == kParts) return;
#pragma unroll
      for (int i = 0; i < kRounds; ++i)
        saved_[i] = saved_chunk(p_.call, chunks.at(half * kGroupRows + 4 * i, part * kBoxColumns));
    }
  }

  __device__ void finish(const Chunks& chunks, int half, int part, float (&sums)[kChunk]) {
    uint4 saved[kRounds];
    if constexpr (Store::kReadsSaved) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) saved[i] = saved_[i];
      // The reads of the next piece overlap with the arithmetic of the current piece.
      read_saved(chunks, half ^ 1, part + half);
    }
    const unsigned char* const from = memory_ + Memory::kResults + half * Memory::kResultBytes +
                                      part * Memory::kPartBytes +
                                      (warp() * kWarpRows + lane() / 8) * kBoxRowBytes;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (i % 2 == 0) start_copies();
      const int place = (lane() % 8) ^ ((4 * i + lane() / 8) % 8);
      const uint4 sum = *reinterpret_cast<const uint4*>(from + 4 * i * kBoxRowBytes + place * 16);
      Store::store(p_.call, chunks.at(half * kGroupRows + 4 * i, part * kBoxColumns), sum, saved[i],
                   sums);
    }
  }

  // Adds the column sums that the warps have computed for a tile, in the order of the warps. The
  // next tile uses the other buffer, so one barrier for each tile is enough.
  __device__ void store_columns(const TileAt& at, uint32_t parity) {
    if constexpr (Store::kReadsSaved) {
      sync_group(kEpilogueBarrier, kGroup);
      if (!p_.call.dbias) return;
#pragma unroll
      for (int i = 0; i < kColumns / kGroup; ++i) {
        const int inside = i * kGroup + static_cast<int>(threadIdx.x);
        const int column = at.column * kColumns + inside;
        float total = 0.0f;
#pragma unroll
        for (int of_warp = 0; of_warp < kEpilogueWarps; ++of_warp)
          total += column_sums(parity, of_warp)[inside];
        if (column < p_.call.columns) p_.call.partial[at.row * p_.call.columns + column] = total;
      }
    }
  }

  const Params<Call>& p_;
  const uint32_t shared_;
  unsigned char* const memory_;
  Copies<Call, kByRows> copies_;
  uint4 saved_[kRounds];
};

template <class T, class Store, bool kByRows>
__global__ void __launch_bounds__(kThreads, 1)
    persistent_gemm_kernel(const __grid_constant__ Params<typename Store::Params> p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Call = typename Store::Params;
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  if (threadIdx.x == 0) {
    prefetch(p.left);
    prefetch(p.right);
    if (p.has_bias) prefetch(p.bias);
    for (int stage = 0; stage < Memory::kStages; ++stage) {
      init_barrier(shared + Memory::kFull + 8 * stage, 1);
      init_barrier(shared + Memory::kEmpty + 8 * stage, kConsumerWarps);
    }
    for (int half = 0; half < kConsumers; ++half) {
      init_barrier(shared + Memory::kResultFull + 8 * half, kConsumerWarps / kConsumers);
      init_barrier(shared + Memory::kResultEmpty + 8 * half, kEpilogueWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kGroup)
    Consumer<T, Call, kByRows>(p, shared, memory).run();
  else
    Epilogue<T, Store, kByRows>(p, shared, memory).run();
#endif
}

int multiprocessors() {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
  return value;
}

// Launches the kernel. The left operand is (rows, depth). The caller must already have encoded the
// tensor maps of both operands in `params`.
template <class T, class Store, bool kByRows>
cudaError_t launch_gemm(Params<typename Store::Params>& params, cudaStream_t stream) {
  const auto& call = params.call;
  params.row_tiles = static_cast<int>(ceil_div(call.rows, kRows));
  params.column_tiles = static_cast<int>(ceil_div(call.columns, kColumns));
  params.steps = static_cast<int>(ceil_div(call.depth, kDepth));
  const int blocks = std::min(params.row_tiles * params.column_tiles, multiprocessors());
  return launch<Params<typename Store::Params>>(persistent_gemm_kernel<T, Store, kByRows>,
                                                dim3(static_cast<unsigned>(blocks)), kThreads,
                                                params, stream, Memory::kBytes);
}

template <template <class, class> class Store, bool kByRows, class Call>
cudaError_t launch_for(Params<Call>& params, cudaStream_t stream) {
  const bool tanh = params.call.activation == Activation::gelu_tanh;
  if (params.call.format == Format::f16)
    return tanh ? launch_gemm<__half, Store<__half, FastGeluTanh>, kByRows>(params, stream)
                : launch_gemm<__half, Store<__half, FastGelu>, kByRows>(params, stream);
  using bf16 = __nv_bfloat16;
  return tanh ? launch_gemm<bf16, Store<bf16, FastGeluTanh>, kByRows>(params, stream)
              : launch_gemm<bf16, Store<bf16, FastGelu>, kByRows>(params, stream);
}

}  // namespace

cudaError_t hopper_linear_gelu(const LinearGelu& p, cudaStream_t stream) {
  Params<LinearGelu> params = {{}, {}, {}, p, p.bias != nullptr, 0, 0, 0};
  cudaError_t error = encode_matrix(params.left, p.x, p.format, p.rows, p.depth, kRows);
  if (!error) error = encode_matrix(params.right, p.weight, p.format, p.columns, p.depth, kColumns);
  if (!error && p.bias) error = encode_vector(params.bias, p.bias, p.format, p.columns, kColumns);
  return error ? error : launch_for<StoreGelu, false>(params, stream);
}

cudaError_t hopper_linear_gelu_gradient(const LinearGeluGradient& p, cudaStream_t stream) {
  Params<LinearGeluGradient> params = {{}, {}, {}, p, false, 0, 0, 0};
  cudaError_t error = encode_matrix(params.left, p.dy, p.format, p.rows, p.depth, kRows);
  if (!error) error = encode_matrix(params.right, p.weight, p.format, p.depth, p.columns, kDepth);
  return error ? error : launch_for<StoreGradient, true>(params, stream);
}

}  // namespace fastbert::cuda
