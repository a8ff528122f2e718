// The work items of attention, and the order in which persistent blocks take them.
//
// Block b of the grid takes the items b, b + blocks, and so on of one order that all blocks know.
// Neighbouring items share the keys of a head, which are thus in the L2 cache. Items of packed
// sequences come longest first, so that no block ends with a long item: over 64 sequences of 32 to
// 512 tokens and 16 heads, the longest of 132 blocks then works 3 % longer than the mean, and 45 %
// longer in the order of the batch. Every block sorts for itself, because a kernel before this one
// would take longer to launch.

#pragma once

#include "../attention_tile.cuh"
#include "tma.cuh"

namespace fastbert::cuda {

constexpr int kQueryRows = 128, kKeyRows = 128;

// 128 queries of one head of one sequence, and all its keys.
struct Item {
  Head head;
  int first_query, key_tiles;
  bool packed;

  __device__ RowAt row(int first, int rows, int row) const {
    if (packed) return {kEnd - rows + row, head.head, first + rows, kEnd};
    return {row, head.head, head.batch, 0};
  }
  __device__ RowAt query(int row) const {
    return this->row(head.first_q, head.queries, first_query + row);
  }
  __device__ RowAt key(int row) const { return this->row(head.first_k, head.keys, row); }
};

// The order of packed sequences, in shared memory. A class has the sequences with the same number
// of tiles of queries; the first class has the most. The last has those without queries, too.
struct Order {
  static constexpr int kClasses = 32, kSequences = 2048;

  uint16_t sequence[kSequences];
  // Of each class, and of the end: the first place in `sequence`, and the first item.
  int first[kClasses + 1], first_item[kClasses + 1];

  static __device__ bool serves(const Sequences& s) {
    return s.cu_seqlens_q && s.batches <= kSequences && s.max_q <= kClasses * kQueryRows;
  }
};

inline __device__ int query_tiles(int queries) { return (queries + kQueryRows - 1) / kQueryRows; }

// A sequence without queries is of the same class as a short one.
inline __device__ int class_tiles(int queries) { return max(query_tiles(queries), 1); }

// Sorts the sequences by their classes, stably. One warp calls this.
inline __device__ void sort(Order& order, const Sequences& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32, classes = class_tiles(s.max_q);
  // Calls body(class, place among the lane's class of these 32, lanes of the class).
  const auto each = [&](const auto& body) {
    for (int first = 0; first < s.batches; first += 32) {
      const int number = first + lane;
      const int rows = number < s.batches ? s.cu_seqlens_q[number + 1] - s.cu_seqlens_q[number] : 0;
      const int of_class = number < s.batches ? classes - class_tiles(rows) : -1;
      const unsigned peers = __match_any_sync(0xffffffffu, of_class);
      const int before = __popc(peers & ((1u << lane) - 1));
      body(number, of_class, before, __popc(peers));
      __syncwarp();
    }
  };
  // `first_item` counts the sequences of each class, and then holds the next place of each.
  if (lane <= classes) order.first_item[lane] = 0;
  if (lane == 0) order.first_item[classes] = 0;
  __syncwarp();
  each([&](int, int of_class, int before, int peers) {
    if (of_class >= 0 && before == 0) order.first_item[of_class] += peers;
  });
  if (lane == 0) {
    int place = 0;
    for (int i = 0; i < classes; ++i) {
      order.first[i] = place;
      place += order.first_item[i];
      order.first_item[i] = order.first[i];
    }
    order.first[classes] = place;
  }
  __syncwarp();
  each([&](int number, int of_class, int before, int peers) {
    const int next = of_class >= 0 ? order.first_item[of_class] : 0;
    __syncwarp();
    if (of_class < 0) return;
    order.sequence[next + before] = static_cast<uint16_t>(number);
    if (before == 0) order.first_item[of_class] = next + peers;
  });
  if (lane == 0) {
    int items = 0;
    for (int i = 0; i < classes; ++i) {
      order.first_item[i] = items;
      items += (order.first[i + 1] - order.first[i]) * (classes - i) * s.heads;
    }
    order.first_item[classes] = items;
  }
}

// The items of a block, one after the other.
class Items {
 public:
  __device__ Items(const Sequences& sequences, const Order* order)
      : sequences_(sequences),
        order_(order),
        tiles_(class_tiles(sequences.max_q)),
        count_(order ? order->first_item[tiles_] : tiles_ * sequences.heads * sequences.batches),
        next_(static_cast<int>(blockIdx.x)) {}

  // Sets the block's next item, and returns false if there is none.
  __device__ bool next(Item& item) {
    for (; next_ < count_; next_ += static_cast<int>(gridDim.x)) {
      int tiles = tiles_, of_class = next_, first = 0;
      if (order_) {
        while (next_ >= order_->first_item[class_ + 1]) ++class_;
        tiles -= class_;
        of_class -= order_->first_item[class_];
        first = order_->first[class_];
      }
      const int head = of_class / tiles, sequence = first + head / sequences_.heads;
      item.head = head_of(sequences_, order_ ? order_->sequence[sequence] : sequence,
                          head % sequences_.heads);
      item.first_query = of_class % tiles * kQueryRows;
      if (item.first_query >= item.head.queries) continue;
      item.key_tiles = (item.head.keys + kKeyRows - 1) / kKeyRows;
      item.packed = sequences_.cu_seqlens_q != nullptr;
      next_ += static_cast<int>(gridDim.x);
      return true;
    }
    return false;
  }

 private:
  const Sequences& sequences_;
  const Order* const order_;
  int tiles_, count_, next_, class_ = 0;
};

// Whole heads of sequences: the items of the backward. A block takes the items b, b + blocks, and
// so on.
class Heads {
 public:
  // `order` is sorted if it serves these sequences.
  __device__ Heads(const Sequences& sequences, const Order& order)
      : sequences_(sequences), order_(order) {}

  // Calls body(item) for each item of the block.
  template <class Body>
  __device__ void each(const Body& body) const {
    const Sequences& s = sequences_;
    const int sequences = Order::serves(s) ? order_.first[class_tiles(s.max_q)] : s.batches;
    for (int number = static_cast<int>(blockIdx.x); number < sequences * s.heads;
         number += static_cast<int>(gridDim.x)) {
      // Asked anew for each item, because a flag would take a register that the body needs.
      Sequences asked = s;
      asked.max_q = static_cast<int>(opaque(static_cast<uint32_t>(asked.max_q)));
      const int place = number / s.heads;
      const int sequence = Order::serves(asked) ? order_.sequence[place] : place;
      Item item;
      item.head = head_of(s, sequence, number % s.heads);
      item.first_query = 0;
      item.key_tiles = (item.head.keys + kKeyRows - 1) / kKeyRows;
      item.packed = s.cu_seqlens_q != nullptr;
      body(item);
    }
  }

 private:
  const Sequences& sequences_;
  const Order& order_;
};

}  // namespace fastbert::cuda
