// These kernels use block and warp primitives of CUB and cooperative groups, wmma, and asynchronous
// copies with cuda::pipeline and cuda::barrier. Each kernel runs in one block of kThreads threads.

#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cub/block/block_exchange.cuh>
#include <cub/block/block_histogram.cuh>
#include <cub/block/block_load.cuh>
#include <cub/block/block_merge_sort.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>
#include <cub/warp/warp_merge_sort.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <cub/warp/warp_scan.cuh>
#include <cuda/barrier>
#include <cuda/pipeline>

namespace cg = cooperative_groups;

constexpr int kThreads = 128, kItems = 4, kCount = kThreads * kItems;

// The array out gets the sum of x from three algorithms, and the maximum of x.
__global__ void reduce(const int* x, int* out) {
  using Raking = cub::BlockReduce<int, kThreads, cub::BLOCK_REDUCE_RAKING>;
  using Commutative =
      cub::BlockReduce<int, kThreads, cub::BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY>;
  using Warps = cub::BlockReduce<int, kThreads, cub::BLOCK_REDUCE_WARP_REDUCTIONS>;
  __shared__ typename Raking::TempStorage raking;
  __shared__ typename Commutative::TempStorage commutative;
  __shared__ typename Warps::TempStorage warps;
  int items[kItems];
  cub::LoadDirectStriped<kThreads>(threadIdx.x, x, items);
  const int a = Raking(raking).Sum(items), b = Commutative(commutative).Sum(items);
  const int c = Warps(warps).Sum(items);
  __syncthreads();
  const int d = Warps(warps).Reduce(items, [](int p, int q) { return p > q ? p : q; });
  if (threadIdx.x == 0) out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

// The array out gets exclusive sums from two algorithms, and inclusive maxima.
__global__ void scan(const int* x, int* out) {
  using Raking = cub::BlockScan<int, kThreads, cub::BLOCK_SCAN_RAKING>;
  using Warps = cub::BlockScan<int, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  using Load = cub::BlockLoad<int, kThreads, kItems, cub::BLOCK_LOAD_WARP_TRANSPOSE>;
  using Store = cub::BlockStore<int, kThreads, kItems, cub::BLOCK_STORE_TRANSPOSE>;
  __shared__ union {
    typename Raking::TempStorage raking;
    typename Warps::TempStorage warps;
    typename Load::TempStorage load;
    typename Store::TempStorage store;
  } memory;
  int items[kItems], result[kItems];
  Load(memory.load).Load(x, items);
  __syncthreads();
  Raking(memory.raking).ExclusiveSum(items, result);
  __syncthreads();
  Store(memory.store).Store(out, result);
  __syncthreads();
  Warps(memory.warps).ExclusiveSum(items, result);
  __syncthreads();
  Store(memory.store).Store(out + kCount, result);
  __syncthreads();
  Warps(memory.warps).InclusiveScan(items, result, [](int p, int q) { return p > q ? p : q; });
  __syncthreads();
  Store(memory.store).Store(out + 2 * kCount, result);
}

// The array out gets the sorted keys, their original positions, and the keys in descending order.
__global__ void sort(const int* x, int* out) {
  using Sort = cub::BlockRadixSort<int, kThreads, kItems, int>;
  using Merge = cub::BlockMergeSort<int, kThreads, kItems>;
  using Load = cub::BlockLoad<int, kThreads, kItems, cub::BLOCK_LOAD_TRANSPOSE>;
  __shared__ union {
    typename Sort::TempStorage sort;
    typename Merge::TempStorage merge;
    typename Load::TempStorage load;
  } memory;
  int keys[kItems], places[kItems], again[kItems];
  Load(memory.load).Load(x, keys);
  for (int k = 0; k < kItems; ++k) {
    places[k] = threadIdx.x * kItems + k;
    again[k] = keys[k];
  }
  __syncthreads();
  Sort(memory.sort).SortBlockedToStriped(keys, places);
  cub::StoreDirectStriped<kThreads>(threadIdx.x, out, keys);
  cub::StoreDirectStriped<kThreads>(threadIdx.x, out + kCount, places);
  __syncthreads();
  Merge(memory.merge).Sort(again, [](int p, int q) { return p > q; });
  cub::StoreDirectBlocked(threadIdx.x, out + 2 * kCount, again);
}

// x has values from 0 to 63. The array out gets the histogram of these values from two algorithms.
__global__ void histogram(const int* x, int* out) {
  using Atomic = cub::BlockHistogram<unsigned char, kThreads, kItems, 64, cub::BLOCK_HISTO_ATOMIC>;
  using Sort = cub::BlockHistogram<unsigned char, kThreads, kItems, 64, cub::BLOCK_HISTO_SORT>;
  __shared__ typename Atomic::TempStorage atomic;
  __shared__ typename Sort::TempStorage sort;
  __shared__ int bins[2][64];
  unsigned char items[kItems];
  for (int k = 0; k < kItems; ++k) items[k] = (unsigned char)x[threadIdx.x * kItems + k];
  Atomic(atomic).Histogram(items, bins[0]);
  Sort(sort).Histogram(items, bins[1]);
  __syncthreads();
  if (threadIdx.x < 64) {
    out[threadIdx.x] = bins[0][threadIdx.x];
    out[64 + threadIdx.x] = bins[1][threadIdx.x];
  }
}

// Each thread has one item. The array out gets sums over 32 and 16 lanes, scans, and the keys
// sorted by warp.
__global__ void warps(const int* x, int* out) {
  __shared__ typename cub::WarpReduce<int>::TempStorage reduce[kThreads / 32];
  __shared__ typename cub::WarpReduce<int, 16>::TempStorage halves[kThreads / 16];
  __shared__ typename cub::WarpScan<int>::TempStorage scan[kThreads / 32];
  __shared__ typename cub::WarpMergeSort<int, 1, 32>::TempStorage sort[kThreads / 32];
  const int t = threadIdx.x, warp = t / 32;
  int key = x[t];
  const int total = cub::WarpReduce<int>(reduce[warp]).Sum(key);
  const int half = cub::WarpReduce<int, 16>(halves[t / 16]).Sum(key);
  int before, all;
  cub::WarpScan<int>(scan[warp]).ExclusiveSum(key, before, all);
  out[t] = t % 32 == 0 ? total : 0;
  out[kThreads + t] = t % 16 == 0 ? half : 0;
  out[2 * kThreads + t] = before;
  out[3 * kThreads + t] = all;
  int keys[1] = {key};
  cub::WarpMergeSort<int, 1, 32>(sort[warp]).Sort(keys, [](int p, int q) { return p < q; });
  out[4 * kThreads + t] = keys[0];
}

// The array out gets, from tiles of cooperative groups: sums over 8 threads, maxima over 32, scans
// over 16, sums over threads with equal keys, shuffles, ballots, and ranks among the threads with
// an odd value.
__global__ void groups(const int* x, int* out) {
  const cg::thread_block block = cg::this_thread_block();
  const auto tile8 = cg::tiled_partition<8>(block);
  const auto tile16 = cg::tiled_partition<16>(block);
  const auto warp = cg::tiled_partition<32>(block);
  const int t = threadIdx.x, value = x[t];
  out[t] = cg::reduce(tile8, value, cg::plus<int>());
  out[kThreads + t] = cg::reduce(warp, value, cg::greater<int>());
  out[2 * kThreads + t] = cg::inclusive_scan(tile16, value, cg::plus<int>());
  const auto equal = cg::labeled_partition(warp, value & 3);
  out[3 * kThreads + t] = cg::reduce(equal, value, cg::plus<int>());
  out[4 * kThreads + t] = tile8.shfl_xor(value, 3) - tile16.shfl_down(value, 5);
  out[5 * kThreads + t] = (int)tile8.ballot(value & 1) ^ tile16.shfl_up(value, 2);
  if (value & 1) {
    const auto odd = cg::coalesced_threads();
    out[6 * kThreads + t] = odd.thread_rank() * 100 + odd.size();
  } else {
    out[6 * kThreads + t] = -1;
  }
}

// The array out gets 2 x, reversed in each step of a two-stage pipeline; x reversed, by a copy with
// a barrier; and the first part of x with neighbours exchanged, by a copy of a group.
__global__ void copies(const int* x, int* out) {
  __shared__ alignas(16) int stages[2][kThreads];
  __shared__ alignas(16) int whole[kCount];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
  __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
  const cg::thread_block block = cg::this_thread_block();
  auto pipe = cuda::make_pipeline(block, &state);
  if (block.thread_rank() == 0) init(&barrier, kThreads);
  block.sync();
  for (int step = 0; step < kItems + 1; ++step) {
    if (step < kItems) {
      pipe.producer_acquire();
      cuda::memcpy_async(block, stages[step % 2], x + step * kThreads,
                         cuda::aligned_size_t<16>(kThreads * sizeof(int)), pipe);
      pipe.producer_commit();
    }
    if (step > 0) {
      pipe.consumer_wait();
      out[(step - 1) * kThreads + threadIdx.x] =
          2 * stages[(step - 1) % 2][kThreads - 1 - threadIdx.x];
      pipe.consumer_release();
    }
  }
  cuda::memcpy_async(block, whole, x, cuda::aligned_size_t<16>(kCount * sizeof(int)), barrier);
  barrier.arrive_and_wait();
  for (int k = threadIdx.x; k < kCount; k += kThreads) out[kCount + k] = whole[kCount - 1 - k];
  block.sync();
  cg::memcpy_async(block, whole, x, kThreads * sizeof(int));
  cg::wait(block);
  out[2 * kCount + threadIdx.x] = whole[threadIdx.x ^ 1];
}

// One warp computes d = a b + c. The matrix a (16, 32) is row-major, and b (32, 16) is
// column-major.
__global__ void fragments(const __half* a, const __half* b, const float* c, float* d) {
  using namespace nvcuda::wmma;
  if (threadIdx.x >= 32) return;
  fragment<accumulator, 16, 16, 16, float> sum;
  load_matrix_sync(sum, c, 16, mem_row_major);
  for (int k = 0; k < 32; k += 16) {
    fragment<matrix_a, 16, 16, 16, __half, row_major> fa;
    fragment<matrix_b, 16, 16, 16, __half, col_major> fb;
    load_matrix_sync(fa, a + k, 32);
    load_matrix_sync(fb, b + k, 32);
    mma_sync(sum, fa, fb, sum);
  }
  store_matrix_sync(d, sum, 16, mem_row_major);
}

#define LAUNCH(NAME)                                  \
  extern "C" int run_##NAME(const int* x, int* out) { \
    NAME<<<1, kThreads>>>(x, out);                    \
    return (int)cudaGetLastError();                   \
  }
LAUNCH(reduce)
LAUNCH(scan)
LAUNCH(sort)
LAUNCH(histogram)
LAUNCH(warps)
LAUNCH(groups)
LAUNCH(copies)

extern "C" int run_fragments(const void* a, const void* b, const float* c, float* d) {
  fragments<<<1, kThreads>>>((const __half*)a, (const __half*)b, c, d);
  return (int)cudaGetLastError();
}
