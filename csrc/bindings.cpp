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

#include "cpu/isa.h"

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
}
