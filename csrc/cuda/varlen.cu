// Computes the positions of the tokens in a padded batch, with one launch and without making the
// CPU wait for the GPU.
//
// A block owns consecutive sequences. It first counts the tokens of the whole batch, and separately
// the tokens before its own sequences: each warp reads a sequence at a time. So no block waits for
// another, but each block reads the whole mask. The mask stays in the L2 cache, and few blocks
// share the work. Then the block goes through the positions of its own sequences. In each turn,
// every thread takes one position. A ballot ranks the tokens inside a warp, and the sums of the
// warps rank them inside the turn.
//
// The latency of the GPU is the limit: a mask of 32 × 512 integers of 8 bytes has only 128 KiB.

#include "launch.cuh"
#include "varlen.cuh"

namespace fastbert::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int64_t kMaxBlocks = 16;
constexpr unsigned kAllLanes = ~0u;

template <class Element>
__device__ bool keeps(const MaskPlaces& p, int64_t row, int64_t column) {
  const auto* mask = static_cast<const Element*>(p.mask);
  return mask[row * p.stride_row + column * p.stride_column] != 0;
}

// The number of tokens in all sequences, the number of tokens in the sequences before those of a
// block, and the length of the longest sequence.
struct Counts {
  int32_t total, before, longest;
};

template <class Element>
__device__ Counts count(const MaskPlaces& p, int64_t first) {
  __shared__ Counts of_warp[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Counts own = {0, 0, 0};
  for (int64_t row = warp; row < p.batch; row += kWarps) {
    int32_t tokens = 0;
#pragma unroll 4
    for (int64_t column = lane; column < p.length; column += 32)
      tokens += keeps<Element>(p, row, column);
    tokens = __reduce_add_sync(kAllLanes, tokens);
    own.total += tokens;
    own.before += row < first ? tokens : 0;
    own.longest = max(own.longest, tokens);
  }
  if (lane == 0) of_warp[warp] = own;
  __syncthreads();
  Counts all = of_warp[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) {
    all.total += of_warp[i].total;
    all.before += of_warp[i].before;
    all.longest = max(all.longest, of_warp[i].longest);
  }
  return all;
}

// Each block computes one group of consecutive sequences, and the groups are in the order of the
// blocks.
template <class Element>
__global__ void __launch_bounds__(kThreads) mask_places_kernel(MaskPlaces p) {
  // Successive turns alternate between two arrays, so that one barrier for each turn is enough.
  __shared__ int32_t tokens_of_warp[2][kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t sequences = (p.batch + gridDim.x - 1) / gridDim.x;
  const int64_t first = blockIdx.x * sequences;
  const int64_t last = first + sequences < p.batch ? first + sequences : p.batch;
  const Counts counts = count<Element>(p, first);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    p.cu_seqlens[p.batch] = counts.total;
    p.totals[0] = counts.total;
    p.totals[1] = counts.longest;
  }
  int64_t before = counts.before;
  const int64_t end = last * p.length;
  int parity = 0;
  for (int64_t start = first * p.length; start < end; start += kThreads, parity ^= 1) {
    const int64_t place = start + threadIdx.x;
    const int64_t row = place / p.length, column = place - row * p.length;
    const bool kept = place < end && keeps<Element>(p, row, column);
    const unsigned in_warp = __ballot_sync(kAllLanes, kept);
    if (lane == 0) tokens_of_warp[parity][warp] = __popc(in_warp);
    __syncthreads();
    int64_t rank = before + __popc(in_warp & ((1u << lane) - 1));
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const int32_t tokens = tokens_of_warp[parity][i];
      rank += i < warp ? tokens : 0;
      before += tokens;
    }
    if (place >= end) continue;
    if (column == 0) p.cu_seqlens[row] = static_cast<int32_t>(rank);
    // A position of padding is written after all tokens and after the earlier positions of padding.
    // The number of these earlier positions is place - rank.
    const int64_t to = kept ? rank : counts.total + place - rank;
    if (kept || p.rows != nullptr) p.indices[to] = place;
    if (p.rows != nullptr) p.rows[place] = to;
  }
}

}  // namespace

cudaError_t mask_places(const MaskPlaces& p, cudaStream_t stream) {
  if (p.batch < 1 || p.length < 1 || p.batch * p.length > INT32_MAX) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(p.batch < kMaxBlocks ? p.batch : kMaxBlocks));
  switch (p.element_size) {
    case 1:
      return launch(mask_places_kernel<uint8_t>, grid, kThreads, p, stream);
    case 4:
      return launch(mask_places_kernel<uint32_t>, grid, kThreads, p, stream);
    case 8:
      return launch(mask_places_kernel<uint64_t>, grid, kThreads, p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace fastbert::cuda
