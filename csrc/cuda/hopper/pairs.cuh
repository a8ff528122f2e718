// A mask of query-key pairs as tiles of bits. The attention kernels read the bits of a tile in wide
// loads, whatever the strides of the mask are. pairs.cu packs the tiles before the kernels run.

#pragma once

#include "../attention_tile.cuh"
#include "schedule.cuh"
#include "statistics.cuh"

namespace fastbert::cuda {

// The bits of a mask of query-key pairs, in tiles of kRows x kColumns pairs for each head. A bit is
// 1 if the pair of a query and a key exists and the query attends the key.
template <int kColumns>
struct PairTiles {
  static constexpr int kRows = 128, kRowWords = kColumns / 32, kWords = kRows * kRowWords;
  static constexpr int kBytes = 4 * kWords;

  uint32_t* data;
  int32_t batches, heads;  // each is 1 if all batches, or all heads, have the same pairs
  int32_t rows, columns;   // rows and columns of tiles in a head

  // Returns a pointer to the first tile of a row of tiles.
  __device__ const uint32_t* row(const Head& h, int row) const {
    const int64_t of_batch = batches == 1 ? 0 : h.batch, of_head = heads == 1 ? 0 : h.head;
    return data + ((of_batch * heads + of_head) * rows + row) * columns * kWords;
  }
};

// The forward reads 128 bits of keys for each of 128 queries, and the backward 64 bits of queries
// for each of 128 keys.
using ForwardPairs = PairTiles<kKeyRows>;
using BackwardPairs = PairTiles<kTileQueries>;

// Returns whether the mask can differ between the queries of a sequence. The mask cannot differ if
// there is only one query.
inline bool has_pairs(const AttentionMask& mask, const Sequences& sequences) {
  return mask.data && mask.stride_row != 0 && sequences.max_q > 1;
}

// Return the tiles of a call. The memory of the tiles is params.pair_bits.
ForwardPairs pair_tiles(const AttentionForward& params);
BackwardPairs pair_tiles(const AttentionBackward& params);

// Pack the mask of a call into its tiles. Without a mask that differs between queries, these
// functions do nothing.
cudaError_t pack_pairs(const AttentionForward& params, cudaStream_t stream);
cudaError_t pack_pairs(const AttentionBackward& params, cudaStream_t stream);

}  // namespace fastbert::cuda
