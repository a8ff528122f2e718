// A collective of CUTLASS 3 for sm_90 computes the matrix product D = A B + C.

#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

using namespace cute;

template <class A, class B, class D, class Sum, class LayoutA, class LayoutB, class Tile,
          class Schedule, class Epilogue, class Cluster = Shape<_1, _1, _1>,
          int kAlignA = 16 / sizeof(A), int kAlignB = 16 / sizeof(B)>
int multiply(const void* a, const void* b, const void* c, void* d, int m, int n, int k, int sms) {
  using Row = cutlass::layout::RowMajor;
  constexpr int kAlignD = 16 / sizeof(D);
  using Arch = cutlass::arch::Sm90;
  using Class = cutlass::arch::OpClassTensorOp;
  using EpilogueOp = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, Class, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, Sum, Sum, D, Row,
      kAlignD, D, Row, kAlignD, Epilogue>::CollectiveOp;
  using Stages = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
      sizeof(typename EpilogueOp::SharedStorage))>;
  using Mainloop =
      typename cutlass::gemm::collective::CollectiveBuilder<Arch, Class, A, LayoutA, kAlignA, B,
                                                            LayoutB, kAlignB, Sum, Tile, Cluster,
                                                            Stages, Schedule>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, EpilogueOp>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  auto stride_a = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1});
  auto stride_b = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1});
  auto stride_d = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1});
  cutlass::KernelHardwareInfo hardware;
  hardware.device_id = 0;
  hardware.sm_count = sms;
  typename Gemm::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {m, n, k, 1},
      {static_cast<const A*>(a), stride_a, static_cast<const B*>(b), stride_b},
      {{Sum(1), Sum(1)}, static_cast<const D*>(c), stride_d, static_cast<D*>(d), stride_d},
      hardware};
  // CUTLASS encodes tensor maps with the driver, which needs a CUDA context in this thread.
  if (cudaSetDevice(hardware.device_id) != cudaSuccess) return 5;
  Gemm gemm;
  if (gemm.can_implement(arguments) != cutlass::Status::kSuccess) return 1;
  if (Gemm::get_workspace_size(arguments) != 0) return 2;
  if (gemm.initialize(arguments, nullptr) != cutlass::Status::kSuccess) return 3;
  return gemm.run() == cutlass::Status::kSuccess ? 0 : 4;
}

using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using PingPong = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using Cooperative = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using Specialized = cutlass::gemm::KernelTmaWarpSpecialized;
using Tma = cutlass::epilogue::TmaWarpSpecialized;
using TmaCooperative = cutlass::epilogue::TmaWarpSpecializedCooperative;
using NoTma = cutlass::epilogue::NoSmemWarpSpecialized;

// This macro defines the function extern "C" int NAME(a, b, c, d, m, n, k, sms).
#define FASTBERT_PRODUCT(NAME, ...)                                                              \
  extern "C" int NAME(const void* a, const void* b, const void* c, void* d, int m, int n, int k, \
                      int sms) {                                                                 \
    return multiply<__VA_ARGS__>(a, b, c, d, m, n, k, sms);                                      \
  }
