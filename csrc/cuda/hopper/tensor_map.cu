// The host code for tma.cuh, which encodes tensor maps with a function of the driver.

#include "../driver.cuh"
#include "tma.cuh"

namespace fastbert::cuda {
namespace {

constexpr uint64_t kUnbounded = 0x7fff0000, kAnyStride = 16;
constexpr int64_t kWrap = int64_t{1} << 34, kLargestStride = int64_t{1} << 40;

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// Encodes a map of 16-bit elements. Elements that are adjacent in a box are adjacent in memory,
// too.
cudaError_t encode_tiled(CUtensorMap& map, Format format, int rank, const void* data,
                         const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                         CUtensorMapSwizzle swizzle) {
  static const auto function = reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled"));
  if (function == nullptr) return cudaErrorNotSupported;
  const cudaError_t error = bind_context();
  if (error != cudaSuccess) return error;
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  return error_of(function(
      &map,
      format == Format::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      rank, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

bool describable(int64_t size, int64_t stride) {
  return size == 1 || (stride > 0 && 2 * stride < kLargestStride);
}

}  // namespace

bool has_tensor_map(const HeadRows& x, const Sequences& s, int64_t rows) {
  if (s.cu_seqlens_q)
    return describable(s.heads, x.stride_head) && x.stride_row > 0 && 2 * x.stride_row < kWrap &&
           rows < kEnd;
  return describable(s.batches, x.stride_batch) && describable(s.heads, x.stride_head) &&
         describable(rows, x.stride_row);
}

cudaError_t encode(CUtensorMap& map, const HeadRows& x, Format format, int head_dim,
                   const Sequences& s, int64_t rows, int box_rows) {
  const bool packed = s.cu_seqlens_q != nullptr;
  // The stride of a dimension of size 1 is not used, but the driver requires a multiple of 16
  // bytes.
  const auto bytes = [](int64_t size, int64_t stride) {
    return size == 1 ? kAnyStride : static_cast<cuuint64_t>(2 * stride);
  };
  const cuuint64_t row = bytes(packed ? 2 : rows, x.stride_row),
                   head = bytes(s.heads, x.stride_head);
  const cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(head_dim),
      packed ? static_cast<cuuint64_t>(kEnd) : static_cast<cuuint64_t>(rows),
      static_cast<cuuint64_t>(s.heads), packed ? kUnbounded : static_cast<cuuint64_t>(s.batches),
      packed ? kUnbounded : 1};
  const cuuint64_t strides[] = {row, head, packed ? row : bytes(s.batches, x.stride_batch),
                                packed ? kWrap - row : kAnyStride};
  const cuuint32_t columns = box_columns(head_dim);
  const cuuint32_t box[] = {columns, static_cast<cuuint32_t>(box_rows), 1, 1, 1};
  return encode_tiled(
      map, format, 5, x.data, sizes, strides, box,
      columns == kBoxColumns ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

cudaError_t encode_matrix(CUtensorMap& map, const ConstMatrix& x, Format format, int64_t rows,
                          int64_t columns, int box_rows) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {rows == 1 ? kAnyStride : static_cast<cuuint64_t>(2 * x.stride)};
  const cuuint32_t box[] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
  return encode_tiled(map, format, 2, x.data, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

cudaError_t encode_vector(CUtensorMap& map, const void* data, Format format, int64_t size,
                          int box_elements) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(size)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_elements)};
  return encode_tiled(map, format, 1, data, sizes, sizes, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace fastbert::cuda
