// Compares Python objects with their recorded state, for fastbert/modules/snapshot.py.

#pragma once

#include <pybind11/pybind11.h>

namespace fastbert {

// Adds the class `Tags` and the functions `version_of`, `tag_of` and `unchanged` to a pybind11
// module.
void bind_unchanged(pybind11::module_& m);

}  // namespace fastbert
