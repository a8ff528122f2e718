// The Python module fastbert._C: how the extension was built, its instruction-set level and its
// copies of weights. The operators are registered in cpu/operators.cpp.

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <optional>
#include <string>

#include "cpu/gemm/fingerprint.h"
#include "cpu/gemm/packed_weights.h"
#include "cpu/isa/dispatch.h"
#include "ptx/bindings.h"

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
  fastbert::ptx::bind(m);
  m.def("expect_writes", fastbert::cpu::expect_writes, py::arg("expected"),
        "Whether each product in this process reads its whole weight before it takes a copy.");
}
