// fastbert._C with the PTX machine alone. mutate.py links the machine's faults into this module,
// because the rest of the extension takes minutes to compile.

#include <pybind11/pybind11.h>
#include <torch/library.h>
#include <torch/version.h>

#include <string>

#include "../../csrc/ptx/bindings.h"

namespace {

pybind11::dict build_info() {
  pybind11::dict info;
  info["torch"] = TORCH_VERSION;
  info["cuda"] = false;
  return info;
}

}  // namespace

// fastbert/ops registers a fake for these operators when it is imported. No test of the machine
// calls them.
TORCH_LIBRARY(fastbert_C, m) {
  m.def("sum_rows() -> ()");
  m.def("linear() -> ()");
  m.def("matmul() -> ()");
}

PYBIND11_MODULE(_C, m) {
  m.def("build_info", build_info);
  // fastbert/ops sets the schedule of the tiles when it is imported.
  m.def("set_tile_schedule", [](const std::string&) {});
  fastbert::ptx::bind(m);
}
