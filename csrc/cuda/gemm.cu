// Matrix products with an activation in the epilogue, in 16-bit formats, for sm_80 and later.
//
// A block of four warps computes a tile of 128 x 128. cp.async copies slices of both operands, each
// 32 elements of the depth, to a ring of three stages in shared memory, and each warp computes 64 x
// 64 elements of the tile from these slices. The sums start from the bias. At the end, they are
// rounded and stored in the same shared memory. From there, each lane reads 16 bytes at a time,
// applies the activation and writes whole sectors. Two blocks share a multiprocessor, even if it
// has only 100 KB of shared memory: the epilogue of one block runs while the other block
// multiplies.
//
// On an A100 and at a depth of 768, the products of one tile take 12,288 cycles of the tensor
// cores. The ldmatrix instructions take 6,144 cycles of the shared memory.

#include "gemm.cuh"

#include "copy.cuh"
#include "gemm_epilogue.cuh"
#include "hopper/gemm.cuh"
#include "mma.cuh"
#include "reduce.cuh"

namespace fastbert::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kRows = kGemmRows, kColumns = 128, kDepth = 32, kStages = 3;
constexpr int kWarpRows = 64, kWarpColumns = 64;

using Slice = SharedTile<kDepth>;          // 128 rows of kDepth elements
using SliceByRows = SharedTile<kColumns>;  // kDepth rows of 128 elements
using Result = SharedTile<kColumns>;
constexpr int kSliceBytes = kRows * Slice::kRowBytes;
static_assert(kSliceBytes == kColumns * Slice::kRowBytes &&
              kSliceBytes == kDepth * SliceByRows::kRowBytes);
constexpr int kSharedBytes = kStages * 2 * kSliceBytes;
constexpr int kColumnSums = kRows * Result::kRowBytes;  // offset of the column sums of the warps
static_assert(kColumnSums + kWarps * kColumns * 4 <= kSharedBytes);

template <class Call>
struct Params {
  ConstMatrix left, right;
  Call call;
  const void* bias;
  int row_tiles, column_tiles;
};

// Starts the copy of kTileRows rows of the matrix `x` to a tile, from (first_row, first_column) on.
// `x` has `height` rows and `width` columns.
template <class Tile, int kTileRows>
__device__ void copy_slice(uint32_t to, const ConstMatrix& x, int first_row, int first_column,
                           int64_t height, int64_t width) {
  constexpr int kRowsAtOnce = kThreads / Tile::kChunks;
  const int thread = static_cast<int>(threadIdx.x);
  const int chunk = thread % Tile::kChunks, column = first_column + chunk * kChunk;
#pragma unroll
  for (int i = 0; i < kTileRows / kRowsAtOnce; ++i) {
    const int inside = thread / Tile::kChunks + i * kRowsAtOnce, row = first_row + inside;
    const uint16_t* from = static_cast<const uint16_t*>(x.data) + row * x.stride + column;
    copy_chunk(to + Tile::offset(inside, chunk), from, row < height && column < width);
  }
}

// Starts the copies of the slices of both operands for one step. If kByRows is true, the right
// operand is stored as (depth, columns), and otherwise as (columns, depth).
template <class Params, bool kByRows>
__device__ void copy_stage(const Params& p, uint32_t to, const TileAt& at, int step) {
  const int depth = step * kDepth, column = at.column * kColumns;
  copy_slice<Slice, kRows>(to, p.left, at.row * kRows, depth, p.call.rows, p.call.depth);
  if (kByRows)
    copy_slice<SliceByRows, kDepth>(to + kSliceBytes, p.right, depth, column, p.call.depth,
                                    p.call.columns);
  else
    copy_slice<Slice, kColumns>(to + kSliceBytes, p.right, column, depth, p.call.columns,
                                p.call.depth);
}

using Sums = float[kWarpRows / 16][kWarpColumns / 8][4];

// Sets the sums of a warp to the bias, or to 0 if `bias` is null. `column` is the first column of
// the warp.
template <class T>
__device__ void start_sums(Sums& sums, const void* bias, int column, int64_t columns) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int j = 0; j < kWarpColumns / 8; ++j) {
    float2 both = {0.0f, 0.0f};
    const int first = column + 8 * j + 2 * t;
    if (bias && first < columns)
      both = unpack(*reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(bias) + first),
                    T{});
#pragma unroll
    for (int m = 0; m < kWarpRows / 16; ++m) {
      sums[m][j][0] = sums[m][j][2] = both.x;
      sums[m][j][1] = sums[m][j][3] = both.y;
    }
  }
}

// Computes sums += left right from the operands of one stage, for the 64 x 64 elements of a warp.
template <class T, bool kByRows>
__device__ void multiply_stage(Sums& sums, uint32_t stage, int warp) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t left =
      stage + warp / 2 * kWarpRows * Slice::kRowBytes + Slice::offset(lane % 16, lane / 16);
  // One ldmatrix loads four 8 x 8 matrices, which are two right operands of 8 columns each.
  uint32_t right = stage + kSliceBytes;
  if (kByRows)
    right = (right + SliceByRows::offset(lane % 16, lane / 16)) ^ (warp % 2 * kWarpColumns * 2);
  else
    right += warp % 2 * kWarpColumns * Slice::kRowBytes +
             Slice::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    LeftFragment rows[kWarpRows / 16];
#pragma unroll
    for (int m = 0; m < kWarpRows / 16; ++m)
      load_matrices(rows[m].pairs, (left ^ (32 * step)) + 16 * m * Slice::kRowBytes);
#pragma unroll
    for (int j = 0; j < kWarpColumns / 8; j += 2) {
      uint32_t pairs[4];
      if (kByRows)
        load_transposed_matrices(pairs, (right ^ (16 * j)) + 16 * step * SliceByRows::kRowBytes);
      else
        load_matrices(pairs, (right ^ (32 * step)) + 8 * j * Slice::kRowBytes);
#pragma unroll
      for (int m = 0; m < kWarpRows / 16; ++m) {
        multiply(sums[m][j], rows[m], {{pairs[0], pairs[1]}}, T{});
        multiply(sums[m][j + 1], rows[m], {{pairs[2], pairs[3]}}, T{});
      }
    }
  }
}

// Rounds the sums of a warp, and stores them in the tile of the result in shared memory.
template <class T>
__device__ void store_sums(const Sums& sums, unsigned char* result, int warp) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < kWarpRows / 16; ++m)
#pragma unroll
    for (int j = 0; j < kWarpColumns / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp / 2 * kWarpRows + 16 * m + 8 * half + lane / 4;
        const int chunk = warp % 2 * kWarpColumns / 8 + j;
        *reinterpret_cast<uint32_t*>(result + Result::offset(row, chunk) + lane % 4 * 4) =
            pair(sums[m][j][2 * half], sums[m][j][2 * half + 1], T{});
      }
}

// Applies the activation, or its gradient, to the tile in shared memory, and writes the results to
// global memory. Each warp of the block calls this function and computes 32 rows. In the backward,
// the function also writes the sums of dh over the rows of the tile.
template <class T, class Store>
__device__ void finish(const typename Store::Params& p, unsigned char* memory, const TileAt& at,
                       int warp) {
  constexpr int kWarpsRows = kRows / kWarps, kRounds = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32, chunk = lane % Result::kChunks;
  const int first = warp * kWarpsRows + lane / Result::kChunks;
  const Chunks chunks(p, at.row * kRows + first, at.column * kColumns + chunk * kChunk);
  float sums[kChunk] = {};
#pragma unroll 1
  for (int row = 0; row < kWarpsRows; row += 2 * kRounds) {
    uint4 saved[kRounds];
    if constexpr (Store::kReadsSaved) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) saved[i] = saved_chunk(p, chunks.at(row + 2 * i, 0));
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const uint4 sum =
          *reinterpret_cast<const uint4*>(memory + Result::offset(first + row + 2 * i, chunk));
      Store::store(p, chunks.at(row + 2 * i, 0), sum, saved[i], sums);
    }
  }
  if constexpr (Store::kReadsSaved) {
    if (!p.dbias) return;
    float* const columns = reinterpret_cast<float*>(memory + kColumnSums);
    write_sums<Result::kChunks>(columns + warp * kColumns, sums);
    __syncthreads();
    const int column = at.column * kColumns + static_cast<int>(threadIdx.x);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += columns[i * kColumns + threadIdx.x];
    if (column < p.columns) p.partial[at.row * p.columns + column] = total;
  }
}

template <class T, class Store, bool kByRows>
__global__ void __launch_bounds__(kThreads, 2)
    gemm_kernel(const __grid_constant__ Params<typename Store::Params> p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const TileAt at = tile_at(static_cast<int>(blockIdx.x), p.row_tiles, p.column_tiles);
  const int steps = static_cast<int>((p.call.depth + kDepth - 1) / kDepth);
  using Kernel = Params<typename Store::Params>;
  const auto start_copy = [&](int step) {
    if (step < steps)
      copy_stage<Kernel, kByRows>(p, shared + step % kStages * 2 * kSliceBytes, at, step);
    commit_copies();
  };
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) start_copy(step);
  Sums sums;
  start_sums<T>(sums, kByRows ? nullptr : p.bias, at.column * kColumns + warp % 2 * kWarpColumns,
                p.call.columns);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    // After the barrier, all copies of this step have ended, and all warps have read the stage that
    // is filled next.
    __syncthreads();
    start_copy(step + kStages - 1);
    multiply_stage<T, kByRows>(sums, shared + step % kStages * 2 * kSliceBytes, warp);
  }
  wait_for_copies<0>();
  __syncthreads();
  store_sums<T>(sums, memory, warp);
  __syncthreads();
  finish<T, Store>(p.call, memory, at, warp);
}

template <template <class, class> class Store, bool kByRows, class Call>
cudaError_t launch_for(const Params<Call>& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.row_tiles * p.column_tiles));
  const auto run = [&](auto kernel) {
    return launch<Params<Call>>(kernel, grid, kThreads, p, stream, kSharedBytes);
  };
  using bf16 = __nv_bfloat16;
  const bool tanh = p.call.activation == Activation::gelu_tanh;
  if (p.call.format == Format::f16)
    return tanh ? run(gemm_kernel<__half, Store<__half, FastGeluTanh>, kByRows>)
                : run(gemm_kernel<__half, Store<__half, FastGelu>, kByRows>);
  return tanh ? run(gemm_kernel<bf16, Store<bf16, FastGeluTanh>, kByRows>)
              : run(gemm_kernel<bf16, Store<bf16, FastGelu>, kByRows>);
}

template <class Call>
Params<Call> params_of(const Call& call, const ConstMatrix& left, const ConstMatrix& right,
                       const void* bias) {
  return {left,
          right,
          call,
          bias,
          static_cast<int>(ceil_div(call.rows, kRows)),
          static_cast<int>(ceil_div(call.columns, kColumns))};
}

// The numbers of rows and columns of a matrix must be below this limit. The kernels store indices
// in ints, and a tile may extend beyond the last row and column.
constexpr int64_t kLargest = int64_t{1} << 30;

template <class Call>
bool served(const Call& p, const ConstMatrix& left, const ConstMatrix& right) {
  const bool gelu = p.activation == Activation::gelu || p.activation == Activation::gelu_tanh;
  const bool sizes = p.rows >= 0 && p.rows < kLargest && p.columns >= 1 && p.columns < kLargest &&
                     p.depth >= 1 && p.depth < kLargest;
  return gelu && sizes && p.format != Format::f32 && p.columns % kChunk == 0 &&
         p.depth % kChunk == 0 && aligned(left.data, left.stride, 2) &&
         aligned(right.data, right.stride, 2) && left.stride > 0 && right.stride > 0;
}

// Returns whether the kernels in hopper/ compute the products, which is the case if the GPU has
// compute capability 9.0 and the extension has code for it.
bool on_hopper() {
#ifdef FASTBERT_SM90A
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major == 9 && minor == 0;
#else
  return false;
#endif
}

}  // namespace

cudaError_t linear_gelu(const LinearGelu& p, cudaStream_t stream) {
  if (!served(p, p.x, p.weight) || !aligned(p.bias, 0, 2)) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  if (on_hopper()) return hopper_linear_gelu(p, stream);
  return launch_for<StoreGelu, false>(params_of(p, p.x, p.weight, p.bias), stream);
}

cudaError_t linear_gelu_gradient(const LinearGeluGradient& p, cudaStream_t stream) {
  if (!served(p, p.dy, p.weight)) return cudaErrorInvalidValue;
  if (p.rows > 0) {
    const cudaError_t error = on_hopper() ? hopper_linear_gelu_gradient(p, stream)
                                          : launch_for<StoreGradient, true>(
                                                params_of(p, p.dy, p.weight, nullptr), stream);
    if (error != cudaSuccess) return error;
  }
  if (!p.dbias) return cudaSuccess;
  return sum_partials({p.partial, gemm_partials(p.rows), p.columns, p.columns, p.dbias, p.format},
                      stream);
}

}  // namespace fastbert::cuda
