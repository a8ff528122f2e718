// The PTX machine in the Python module fastbert._C.

#pragma once

#include <pybind11/pybind11.h>

namespace fastbert::ptx {
void bind(pybind11::module_& m);
}
