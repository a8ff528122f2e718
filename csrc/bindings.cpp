// The Python module fastbert._C. Its functions report how the extension was built, return and set
// the instruction-set level and the tile schedule of the CPU kernels, and compare Python objects
// with their recorded state (unchanged.h). The operators are registered in cpu/operators.cpp and
// cuda/cuda_ops.cpp.

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <iterator>
#include <optional>
#include <string>

#include "cpu/isa/dispatch.h"
#include "unchanged.h"

namespace {

namespace py = pybind11;

// setup.py defines FASTBERT_CUDA_ARCHS if it builds CUDA code. Otherwise it defines
// FASTBERT_WITHOUT_CUDA as a string that says why no CUDA code is built.
#if defined(FASTBERT_CUDA_ARCHS)
constexpr bool kCuda = true;
#else
constexpr bool kCuda = false;
#define FASTBERT_CUDA_ARCHS ""
#endif
#if !defined(FASTBERT_WITHOUT_CUDA)
#define FASTBERT_WITHOUT_CUDA ""
#endif

py::dict build_info() {
  py::list built, supported, slow;
  for (auto* level = fastbert::cpu::levels_begin(); level != fastbert::cpu::levels_end(); ++level) {
    built.append(level->kernels->name);
    if (level->supported) supported.append(level->kernels->name);
    if (level->supported && level->slow) slow.append(level->kernels->name);
  }
  py::dict info;
  info["torch"] = TORCH_VERSION;
  info["compiler"] = __VERSION__;
  info["cuda"] = kCuda;
  info["cuda_archs"] = FASTBERT_CUDA_ARCHS;
  info["without_cuda"] = FASTBERT_WITHOUT_CUDA;
  info["cpu_isas"] = built;
  info["cpu_isas_supported"] = supported;
  info["cpu_isas_slow"] = slow;
  return info;
}

void set_cpu_isa(const std::optional<std::string>& level) {
  fastbert::cpu::set_level(level ? level->c_str() : nullptr);
}

constexpr const char* kSchedules[] = {"in_turn", "overlapped", "fetched"};

void set_tile_schedule(const std::string& name) {
  for (size_t i = 0; i < std::size(kSchedules); ++i) {
    if (name != kSchedules[i]) continue;
    fastbert::cpu::tile_schedule = (fastbert::cpu::TileSchedule)i;
    return;
  }
  TORCH_CHECK_VALUE(false, "name: got '", name, "', allowed: in_turn, overlapped, fetched");
}

// Raises c10::ValueError as ValueError in Python. Without this translator, pybind11 would raise
// RuntimeError, because it does not know c10's exceptions.
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
  m.def("build_info", build_info,
        "Returns the facts of the build as a dict: torch (its version), compiler, cuda (bool), "
        "cuda_archs, without_cuda (the reason, empty with CUDA), cpu_isas (the levels in the "
        "extension), cpu_isas_supported (the levels that "
        "this processor can run) and cpu_isas_slow (those of them that are slower on this "
        "processor than a lower level).");
  m.def(
      "cpu_isa", [] { return std::string(fastbert::cpu::kernels().name); },
      "Returns the instruction-set level in use. Raises ValueError if FASTBERT_CPU_ISA names a "
      "level that is unknown or not supported.");
  m.def("set_cpu_isa", set_cpu_isa, py::arg("level"),
        "Sets the instruction-set level of this process. None restores the level that "
        "FASTBERT_CPU_ISA names or, if it is unset, the fastest level. Raises ValueError if the "
        "level "
        "is unknown or not supported.");
  m.def(
      "tile_schedule", [] { return kSchedules[(size_t)fastbert::cpu::tile_schedule]; },
      "Returns how kernels on AMX tiles arrange their work: in_turn, overlapped or fetched.");
  m.def("set_tile_schedule", set_tile_schedule, py::arg("name"),
        "Sets how kernels on AMX tiles arrange their work in this process. The results keep their "
        "bits. Raises ValueError if the name is unknown.");
  fastbert::bind_unchanged(m);
}
