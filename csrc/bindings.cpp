// The schemas of the C++ operators, implemented for the CPU in cpu/ and for CUDA in
// cuda/cuda_ops.cpp, and the Python module fastbert._C, which says how they were built.
//
// Outputs that a call does not produce (dx without dropout, dx_bias or dbias without that bias) are
// empty. The public operators, with their gradients, are registered in fastbert/ops.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>
#include <torch/version.h>

#include <optional>
#include <string>

#include "cpu/fingerprint.h"
#include "cpu/isa.h"
#include "cpu/packed.h"

TORCH_LIBRARY(fastbert_C, m) {
  m.def(
      "layer_norm_forward(Tensor x, Tensor weight, Tensor bias, Tensor? residual, Tensor? x_bias, "
      "Tensor? seed, float dropout_p, float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, "
      "Tensor? residual, Tensor? x_bias, Tensor? seed, float dropout_p) "
      "-> (Tensor dsum, Tensor dx, Tensor dweight, Tensor dbias, Tensor dx_bias)");
  m.def("bias_gelu_forward(Tensor h, Tensor? bias, str approximate) -> Tensor");
  m.def(
      "bias_gelu_backward(Tensor dy, Tensor h, Tensor? bias, str approximate) "
      "-> (Tensor dh, Tensor dbias)");
  m.def("activation_forward(Tensor h, Tensor? bias, str activation) -> Tensor");
  m.def(
      "activation_backward(Tensor dy, Tensor h, Tensor? bias, str activation, bool sum_rows, "
      "bool recompute) -> (Tensor dh, Tensor dbias, Tensor a)");
  m.def(
      "rms_norm_forward(Tensor x, Tensor weight, Tensor? residual, float eps) "
      "-> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, Tensor? residual) "
      "-> (Tensor dsum, Tensor dweight)");
  m.def("rotary(Tensor x, Tensor cos, Tensor sin, int heads, bool inverse) -> Tensor");
  m.def(
      "embedding_forward(Tensor ids, Tensor token_types, Tensor positions, Tensor word_table, "
      "Tensor type_table, Tensor position_table, Tensor weight, Tensor bias, Tensor? seed, "
      "float eps, float dropout_p) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "embedding_backward(Tensor dy, Tensor ids, Tensor token_types, Tensor positions, "
      "Tensor word_table, Tensor type_table, Tensor position_table, Tensor weight, Tensor mean, "
      "Tensor rstd, Tensor? seed, float dropout_p, int padding_idx) "
      "-> (Tensor dword, Tensor dtype, Tensor dposition, Tensor dweight, Tensor dbias)");
  m.def(
      "linear_cross_entropy_forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, "
      "int ignore_index, str reduction) -> (Tensor loss, Tensor statistics, Tensor order)");
  m.def(
      "linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor? bias, "
      "Tensor labels, Tensor statistics, Tensor order, str reduction) "
      "-> (Tensor dhidden, Tensor dweight, Tensor dbias)");
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str activation, bool save) "
      "-> (Tensor y, Tensor h)");
  m.def(
      "linear_layer_norm(Tensor x, Tensor weight, Tensor? bias, Tensor residual, "
      "Tensor norm_weight, Tensor norm_bias, float eps) -> Tensor");
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, int max_seqlen_q, "
      "int max_seqlen_k, float dropout_p, float scale, int left, int right) "
      "-> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dbias, "
      "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, int max_seqlen_q, "
      "int max_seqlen_k, float dropout_p, float scale, int left, int right) -> ()");
  m.def(
      "attention_weights(Tensor q, Tensor k, Tensor? mask, Tensor? bias, Tensor? cu_seqlens_q, "
      "Tensor? cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, int[]? heads, int[]? rows, "
      "float scale, int left, int right) -> Tensor");
  m.def("matmul(Tensor a, Tensor b, Tensor? addend, ScalarType dtype) -> Tensor");
  m.def(
      "int8_linear(Tensor x, Tensor packed, Tensor scale, Tensor column_sum, int n, Tensor? bias, "
      "Tensor? residual, str activation, ScalarType dtype) -> Tensor");
  m.def("int8_layout() -> (int lanes, int group)");
  m.def(
      "encoder(Tensor hidden, Tensor[] parameters, Tensor[] scales, Tensor? cu_seqlens, "
      "Tensor? mask, Tensor? bias, int batch, int max_seqlen, int heads, float eps, "
      "str activation, ScalarType dtype, bool all_states) -> Tensor[]");
  m.def("fingerprint(Tensor[] tensors) -> Tensor");
  m.def("has_fingerprint(Tensor[] tensors, Tensor(a!) fingerprint, int rows) -> bool");
  m.def("any_outside(Tensor index, int size, int? ignored) -> bool");
  m.def("unpad_indices(Tensor mask) -> (Tensor indices, Tensor cu_seqlens, int max_seqlen)");
  m.def("scatter_rows(Tensor values, Tensor indices, int rows) -> Tensor");
}

namespace {

namespace py = pybind11;

// FASTBERT_CUDA_ARCHS comes from setup.py when CUDA code is built.
#if defined(FASTBERT_CUDA_ARCHS)
constexpr bool kCuda = true;
#else
constexpr bool kCuda = false;
#define FASTBERT_CUDA_ARCHS ""
#endif

py::dict build_info() {
  py::list built, supported;
  for (auto* level = fastbert::cpu::levels_begin(); level != fastbert::cpu::levels_end(); ++level) {
    built.append(level->kernels->name);
    if (level->supported) supported.append(level->kernels->name);
  }
  py::dict info;
  info["torch"] = TORCH_VERSION;
  info["compiler"] = __VERSION__;
  info["cuda"] = kCuda;
  info["cuda_archs"] = FASTBERT_CUDA_ARCHS;
  info["cpu_isas"] = built;
  info["cpu_isas_supported"] = supported;
  return info;
}

void set_cpu_isa(const std::optional<std::string>& level) {
  fastbert::cpu::set_level(level ? level->c_str() : nullptr);
}

// c10's exceptions are not pybind11's; without this they would all arrive as RuntimeError.
void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const c10::ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what_without_backtrace());
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::register_local_exception_translator(translate);
  m.def(
      "build_info", build_info,
      "What this extension was built with: torch (version), compiler, cuda (bool), cuda_archs, and "
      "the instruction-set levels in it (cpu_isas) and usable here (cpu_isas_supported).");
  m.def(
      "cpu_isa", [] { return std::string(fastbert::cpu::kernels().name); },
      "The instruction-set level in use. Raises ValueError when FASTBERT_CPU_ISA cannot be "
      "honoured.");
  m.def("set_cpu_isa", set_cpu_isa, py::arg("level"),
        "Sets the instruction-set level of this process; None goes back to FASTBERT_CPU_ISA or, "
        "without "
        "it, the best one. Raises ValueError on a level that this processor lacks.");
  m.def("packed_bytes", fastbert::cpu::packed_total,
        "Bytes held in copies of weights in the layout of the CPU's products; a copy goes with its "
        "weight.");
  m.def("forget_packed", fastbert::cpu::forget_packed,
        "Frees these copies and puts fingerprints (fastbert_C::fingerprint) out of date; the next "
        "product with a weight packs it again.");
  m.def("expire_packed", fastbert::cpu::expire_fingerprints,
        "Puts these copies and all fingerprints out of date, but keeps the memory for the next.");
  m.def("expect_writes", fastbert::cpu::expect_writes, py::arg("expected"),
        "Whether each product in this process reads its whole weight before it takes a copy.");
}
