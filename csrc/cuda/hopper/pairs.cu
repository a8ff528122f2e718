// Packs a mask of query-key pairs into tiles of bits.
//
// A warp packs 32 rows of a tile, in squares of 32 queries and 32 keys. A lane reads the
// bytes that the mask has for one key and 32 queries. In each read, the warp thus covers 32
// neighbouring bytes of the mask of one query, and all 32 reads are in flight. If keys are the rows
// of the tile, the bytes of a lane become the bits of its word. If queries are the rows, the warp
// builds the words with ballots.
//
// A mask that is the same for all heads is packed once. Without packing, the attention kernels
// would read the bytes of the mask again for each head. Device memory is the limit: a mask of one
// byte for each of 16,384 x 512 pairs takes at least 2 us on an H200.

#include "pairs.cuh"

#include "attention.cuh"
#include "hidden.cuh"
#include "wgmma.cuh"

namespace fastbert::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

template <int kColumns>
struct PackParams {
  Sequences sequences;
  AttentionMask mask;
  PairTiles<kColumns> tiles;
};

// Returns the lane's word of a square of 32 queries and 32 keys. The bits of the word are the keys
// that the lane's query attends or, if kKeysAreRows is true, the queries that attend the lane's
// key. A lane whose key or query does not exist reads the mask of the last key or query instead, so
// that no read waits for a branch.
template <bool kKeysAreRows>
__device__ uint32_t pack_square(const AttentionMask& mask, const Head& h, int first_query,
                                int first_key) {
  const int queries = h.queries - first_query, keys = h.keys - first_key;
  if (queries <= 0 || keys <= 0) return 0;
  const int lane = static_cast<int>(threadIdx.x) % 32, key = first_key + min(lane, keys - 1);
  const uint8_t* pair = mask.data + h.batch * mask.stride_batch + h.head * mask.stride_head +
                        first_query * mask.stride_row + key * mask.stride_key;
  uint32_t attended[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    attended[i] = *pair;
    if (i + 1 < queries) pair += mask.stride_row;
  }
  pin(attended);  // all reads are in flight before the first result is used
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (kKeysAreRows) {
      word |= (attended[i] != 0 ? 1u : 0u) << i;
    } else {
      const uint32_t of_query = __ballot_sync(0xffffffffu, attended[i] != 0);
      if (lane == i) word = of_query;
    }
  }
  const int rows = kKeysAreRows ? keys : queries, columns = kKeysAreRows ? queries : keys;
  return lane < rows ? word & first_bits(columns) : 0;
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads) pack_pairs_kernel(PackParams<kColumns> p) {
  using Tiles = PairTiles<kColumns>;
  constexpr bool kKeysAreRows = kColumns == kTileQueries;
  constexpr int kStrips = Tiles::kRows / 32;  // strips of a tile
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t strip = blockIdx.x * kWarps + threadIdx.x / 32, tile = strip / kStrips;
  const uint32_t row = tile / p.tiles.columns, head = row / p.tiles.rows;
  const int batch = static_cast<int>(head / p.tiles.heads);
  if (batch >= p.tiles.batches) return;
  const Head h = head_of(p.sequences, batch, static_cast<int>(head % p.tiles.heads));
  const int first_row =
      static_cast<int>(row % p.tiles.rows) * Tiles::kRows + static_cast<int>(strip % kStrips) * 32;
  const int first_column = static_cast<int>(tile % p.tiles.columns) * kColumns;
  uint32_t* const to = p.tiles.data + (static_cast<int64_t>(strip) * 32 + lane) * Tiles::kRowWords;
  uint32_t words[Tiles::kRowWords];
#pragma unroll
  for (int i = 0; i < Tiles::kRowWords; ++i) {
    const int column = first_column + 32 * i;
    words[i] = kKeysAreRows ? pack_square<true>(p.mask, h, column, first_row)
                            : pack_square<false>(p.mask, h, first_row, column);
  }
  if constexpr (kKeysAreRows)
    *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
  else
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
}

// Returns the PairTiles of a call for heads of `rows` x `columns` pairs. Packed sequences have
// different lengths, so the pairs of each sequence are packed separately, even if all sequences
// have the same mask.
template <int kColumns, class Call>
PairTiles<kColumns> tiles_of(const Call& p, int64_t rows, int64_t columns) {
  const Sequences& s = p.sequences;
  const bool same = p.mask.stride_batch == 0 && !s.cu_seqlens_q;
  return {p.pair_bits, same ? 1 : s.batches, p.mask.stride_head == 0 ? 1 : s.heads,
          static_cast<int32_t>(ceil_div(rows, PairTiles<kColumns>::kRows)),
          static_cast<int32_t>(ceil_div(columns, kColumns))};
}

template <int kColumns>
int64_t count(const PairTiles<kColumns>& tiles) {
  return static_cast<int64_t>(tiles.batches) * tiles.heads * tiles.rows * tiles.columns;
}

template <int kColumns, class Call>
cudaError_t pack(const Call& p, const PairTiles<kColumns>& tiles, cudaStream_t stream) {
  if (!has_pairs(p.mask, p.sequences)) return cudaSuccess;
  const int64_t warps = count(tiles) * (PairTiles<kColumns>::kRows / 32);
  return launch<PackParams<kColumns>>(pack_pairs_kernel<kColumns>,
                                      dim3(static_cast<unsigned>(ceil_div(warps, kWarps))),
                                      kThreads, {p.sequences, p.mask, tiles}, stream);
}

template <class Call>
int64_t words(const Call& p) {
  if (hopper_attention_refuses(p) || !has_pairs(p.mask, p.sequences)) return 0;
  const auto tiles = pair_tiles(p);
  return count(tiles) * tiles.kWords;
}

}  // namespace

ForwardPairs pair_tiles(const AttentionForward& p) {
  return tiles_of<kKeyRows>(p, p.sequences.max_q, p.sequences.max_k);
}
BackwardPairs pair_tiles(const AttentionBackward& p) {
  return tiles_of<kTileQueries>(p, p.sequences.max_k, p.sequences.max_q);
}

cudaError_t pack_pairs(const AttentionForward& p, cudaStream_t stream) {
  return pack(p, pair_tiles(p), stream);
}
cudaError_t pack_pairs(const AttentionBackward& p, cudaStream_t stream) {
  return pack(p, pair_tiles(p), stream);
}

int64_t attention_pair_words(const AttentionForward& p) { return words(p); }
int64_t attention_pair_words(const AttentionBackward& p) { return words(p); }

}  // namespace fastbert::cuda
