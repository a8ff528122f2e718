// The comparison of Python objects with a record of them, for fastbert/modules/snapshot.py.

#pragma once

#include <pybind11/pybind11.h>

namespace fastbert {

// Adds to a pybind11 module the class `Tags` and the functions `version_of` and `unchanged`.
void bind_unchanged(pybind11::module_& m);

}  // namespace fastbert
