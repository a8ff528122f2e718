// Turned products (kernel.h) of a few rows of x, such as the rows of one step of a decoder. Their
// time is the time to read the weight.
//
// A tile of kernel.h multiplies each element of W by a whole panel of x, most of which is padding
// if x has a few rows. Here, the lanes of a register hold rows of W instead: a square block of W is
// transposed in registers, and each of its columns is multiplied by one element of each row of x. A
// row of W is read once, from its first element to its last. x is read as it is stored, because a
// panel is 32 rows wide: writing the panel, and fetching its lines from the cache of the processor
// that wrote them, takes as long as reading half a megabyte of W. Each sum adds the same terms in
// the same order as in kernel.h, so the result of a row of x has the same bits.

#pragma once

#include "task_block.h"

namespace fastbert::cpu::FASTBERT_LEVEL {

// W is stored as words (F32), or as bf16 that becomes fp32 when it is loaded (BF16). Rows of W are
// `stride` elements apart.

#if FASTBERT_LEVEL_BYTES == 32
typedef float HalfVector __attribute__((vector_size(kBytes / 2)));

template <class Stored>
FASTBERT_INLINE HalfVector load_half(const typename Stored::Storage* p) {
  HalfVector words;
  if constexpr (kIsBF16<Stored>) {
    typedef uint16_t Bits __attribute__((vector_size(8)));
    typedef uint32_t Wide __attribute__((vector_size(16)));
    Bits bits;
    __builtin_memcpy(&bits, p, sizeof(bits));
    words = (HalfVector)(__builtin_convertvector(bits, Wide) << 16);
  } else {
    __builtin_memcpy(&words, p, sizeof(words));
  }
  return words;
}
#endif

// Loads a square block of W, and returns its columns.
template <class Stored>
FASTBERT_INLINE void load_columns(const typename Stored::Storage* block, int64_t stride,
                                  Vec (&columns)[kLanes]) {
#if FASTBERT_LEVEL_BYTES == 32
  // One register gets the halves of two rows, so that no shuffle crosses a half of a register.
  const auto half = [&](int row, int first) __attribute__((always_inline)) {
    return load_half<Stored>(block + row * stride + first);
  };
#pragma GCC unroll 2
  for (int first = 0; first < kLanes; first += 4) {
    Vec rows[4], pairs[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      rows[i] = __builtin_shufflevector(half(i, first), half(i + 4, first), 0, 1, 2, 3, 4, 5, 6, 7);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      pairs[i] = __builtin_shufflevector(rows[i], rows[i + 2], 0, 8, 1, 9, 4, 12, 5, 13);
      pairs[i + 2] = __builtin_shufflevector(rows[i], rows[i + 2], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Vec a = pairs[2 * i], b = pairs[2 * i + 1];
      columns[first + 2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
      columns[first + 2 * i + 1] = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    }
  }
#else
  for (int i = 0; i < kLanes; ++i) columns[i] = Stored::load(block + i * stride, kLanes);
  transpose(columns);
#endif
}

// Computes the sums of kLanes rows of W and kRows rows of x. Lane i of sums[r] belongs to row i of
// W and row r of x. Rows of x are `words` words long. The next kLanes rows of W are prefetched,
// past the second-level cache if `streams`.
template <class Operand, class Stored, int kRows>
FASTBERT_INLINE void multiply_columns(const typename Stored::Storage* w, int64_t stride,
                                      const float* x, int64_t words, int64_t chunk, bool streams,
                                      Vec (&sums)[kRows]) {
  for (int64_t begin = 0; begin < words; begin += chunk) {
    const int64_t end = begin + chunk < words ? begin + chunk : words;
    Vec total[kRows] = {};
    const auto add = [&](const Vec(&columns)[kLanes], int64_t k,
                         int count) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (i >= count) break;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          total[r] = multiply_add<Operand>(x + r * words + k + i, columns[i], total[r]);
        }
      }
    };
    int64_t k = begin;
    for (; k + kLanes <= end; k += kLanes) {
      Vec columns[kLanes];
      // The next rows are prefetched in the order of memory, so that the processor's own
      // prefetching recognises the order and runs ahead.
      const char* next = (const char*)(w + kLanes * stride + k * kLanes);
      const auto prefetch = [next](auto locality) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int64_t line = 0; line < (int64_t)(kLanes * kLanes * sizeof(*w)); line += kCacheLine) {
          __builtin_prefetch(next + line, 0, decltype(locality)::value);
        }
      };
      streams ? prefetch(Count<0>{}) : prefetch(Count<2>{});
      load_columns<Stored>(w + k, stride, columns);
      add(columns, k, kLanes);
    }
    if (k < end) {
      Vec columns[kLanes];
      for (int i = 0; i < kLanes; ++i)
        columns[i] = Stored::load(w + i * stride + k, (int)(end - k));
      transpose(columns);
      add(columns, k, (int)(end - k));
    }
    for (int r = 0; r < kRows; ++r) sums[r] = begin > 0 ? sums[r] + total[r] : total[r];
  }
}

// Returns whether W is bf16 that needs no rounding, and products are in fp32.
FASTBERT_INLINE bool lies_in_bf16(const Gemm& g) {
  return g.a_column == 1 && g.format == fastbert::cpu::Format::bf16 &&
         g.rounded != fastbert::cpu::Format::f16;
}

// Returns whether a product has few rows of x, and a weight that is read as it is stored.
template <class Operand>
FASTBERT_INLINE bool has_few_rows(const Gemm& g) {
  constexpr bool kWide = !kIsDots<Operand> && sizeof(typename Operand::Storage) == 4;
  if (!kWide && !kIsDots<Operand>) return false;
  return g.turned && g.m <= kFewRows && (lies_in_words<Operand>(g) || (kWide && lies_in_bf16(g)));
}

// Returns the size in words of the scratch memory for the rows of x in a task.
FASTBERT_INLINE int64_t few_rows_words(const Gemm& g) {
  return g.turned && g.m <= kFewRows ? kFewRows * g.k : 0;
}

// Writes the sums of kLanes rows of W and of up to kFewRows rows of x. Rows of sums are
// `sums_row` elements apart.
template <class Operand, class Stored>
FASTBERT_INLINE void multiply_block(const typename Stored::Storage* w, int64_t stride,
                                    const float* x, int rows, int64_t words, int64_t chunk,
                                    bool streams, float* sums, int64_t sums_row) {
  const auto multiply_some = [&](auto count) __attribute__((always_inline)) {
    constexpr int kRows = decltype(count)::value;
    Vec sum[kRows];
    multiply_columns<Operand, Stored, kRows>(w, stride, x, words, chunk, streams, sum);
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kLanes; ++i) sums[i * sums_row + r] = sum[r][i];
    }
  };
  if (rows > 2) return multiply_some(Count<kFewRows>{});
  if (rows == 2) return multiply_some(Count<2>{});
  multiply_some(Count<1>{});
}

// Returns whether a product reads the rows of x as they are stored (isa/kernels.h). The last task
// of such a product has at least kLanes rows of W too.
bool reads_rows(const Gemm& g, const Packing& x) {
  bool few = false;
  with_operand(g.packed_format, [&](auto type) { few = has_few_rows<decltype(type)>(g); });
  return few && x.column == 1 && (g.n % kPanel == 0 || g.n % kPanel >= kLanes);
}

// Copies the rows of x to words in the format of `Operand`.
template <class Operand>
FASTBERT_INLINE void copy_rows(const Gemm& g, int64_t words, float* x) {
  with_format(g.few_format, [&](auto type) {
    using From = decltype(type);
    constexpr int64_t kElements = kIsDots<Operand> ? kLine : kLanes;  // in a register of words
    for (int64_t r = 0; r < g.m; ++r) {
      const auto* row = (const typename From::Storage*)g.few.data + r * g.few.stride;
      for (int64_t word = 0; word < words; word += kLanes) {
        const int64_t first = word / kLanes * kElements;
        const int count = clamp_count(g.k - first, (int)kElements);
        Vec v;
        if constexpr (kIsDots<Operand>) {
          v = load_line<From>(row + first, count);
        } else {
          v = From::load(row + first, count);
        }
        store(x + r * words + word, v, clamp_count(words - word, kLanes));
      }
    }
  });
}

// Computes a task, which has at least kLanes rows of W. `x` is scratch memory for kFewRows rows of
// x.
template <class Operand, class Stored>
void multiply_few_rows(const Gemm& g, const Task& task, float* x) {
  using Storage = typename Stored::Storage;
  const int64_t words = words_of<Operand>(g.k), chunk = chunk_of(g.n, g.k);
  const TaskBlock<Operand> block = {g, task, words, 0, words};
  if (g.few.data != nullptr) {
    copy_rows<Operand>(g, words, x);
  } else {
    const auto* panel = (const float*)g.packed;
    const auto place = [&](int64_t k, int64_t r) {
#if defined(FASTBERT_LEVEL_MATRICES)
      if (kIsDots<Operand>) return place_of_word(k, r, words);
#endif
      return k * kPanel + r;
    };
    for (int64_t r = 0; r < g.m; ++r) {
      for (int64_t k = 0; k < words; ++k) x[r * words + k] = panel[place(k, r)];
    }
  }
  if (g.m == 3) {  // Three rows are multiplied as four.
    for (int64_t k = 0; k < words; ++k) x[3 * words + k] = 0.0f;
  }
  const auto* w = (const Storage*)block.left(0);
  const int64_t stride = (block.left(1) - block.left(0)) / (int64_t)sizeof(Storage);
  const bool streams = kLanes * stride * (int64_t)sizeof(Storage) <= g.streamed_bytes;
  for (int64_t row = 0; row < task.rows; ++row) {
    store(task.sums + row * task.stride, Vec{});
    store(task.sums + row * task.stride + kLanes, Vec{});
  }
  int64_t computed = 0;
  for (int64_t row = 0; row < task.rows; row += kPanel) {
    block.fetch_outputs(row, 0);
    for (; computed < row + kPanel && computed < task.rows; computed += kLanes) {
      // The last block overlaps the block before it, so that it ends with the last row of the task.
      const int64_t first = computed + kLanes > task.rows ? task.rows - kLanes : computed;
      multiply_block<Operand, Stored>(w + first * stride, stride, x, (int)g.m, words, chunk,
                                      streams, task.sums + first * task.stride, task.stride);
    }
    block.finish_outputs(row, 0);
  }
}

template <class Operand>
void run_few_rows(const Gemm& g, const Task& task, float* x) {
  if (lies_in_words<Operand>(g)) {
    multiply_few_rows<Operand, F32>(g, task, x);
  } else {
    multiply_few_rows<Operand, BF16>(g, task, x);
  }
}

}  // namespace fastbert::cpu::FASTBERT_LEVEL
