#include "unchanged.h"

#include <cstdint>

namespace fastbert {
namespace {

namespace py = pybind11;

// Returns the number that Python gives to the present attributes of a class and of its bases. Any
// change of an attribute takes the number away, and the next look-up gives a new number. Returns 0
// if the class has no number.
uint64_t version_of(py::handle type) {
  auto* object = reinterpret_cast<PyTypeObject*>(type.ptr());
  // A look-up gives a number to a class without one.
  if (!PyObject_HasAttrString(type.ptr(), "__init__")) return 0;
  return PyType_HasFeature(object, Py_TPFLAGS_VALID_VERSION_TAG) ? object->tp_version_tag : 0;
}

// Returns whether `dict` has the keys and values, compared by identity and in order.
bool same_items(PyObject* dict, PyObject* keys, PyObject* values) {
  if (!PyDict_Check(dict) || PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(keys)) return false;
  PyObject *key, *value;
  for (Py_ssize_t place = 0, i = 0; PyDict_Next(dict, &place, &key, &value); ++i) {
    if (PyTuple_GET_ITEM(keys, i) != key || PyTuple_GET_ITEM(values, i) != value) return false;
  }
  return true;
}

// Takes three entries for each dictionary: the dictionary, its keys and its values. Takes two for
// each object, the object and its class; and two for each class, the class and its version.
bool unchanged(const py::tuple& dicts, const py::tuple& objects, const py::tuple& classes) {
  PyObject* d = dicts.ptr();
  for (Py_ssize_t i = 0; i + 2 < PyTuple_GET_SIZE(d); i += 3) {
    PyObject *keys = PyTuple_GET_ITEM(d, i + 1), *values = PyTuple_GET_ITEM(d, i + 2);
    if (!same_items(PyTuple_GET_ITEM(d, i), keys, values)) return false;
  }
  PyObject* o = objects.ptr();
  for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(o); i += 2) {
    PyObject* kind = PyTuple_GET_ITEM(o, i + 1);
    if ((PyObject*)Py_TYPE(PyTuple_GET_ITEM(o, i)) != kind) return false;
  }
  PyObject* c = classes.ptr();
  for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(c); i += 2) {
    auto* type = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(c, i));
    if (!PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) return false;
    if (type->tp_version_tag != PyLong_AsUnsignedLong(PyTuple_GET_ITEM(c, i + 1))) return false;
  }
  return true;
}

}  // namespace

void bind_unchanged(py::module_& m) {
  m.def("version_of", version_of, py::arg("type"),
        "Returns a number that changes when an attribute of a class or of a base changes, or 0 if "
        "Python has none for the class.");
  m.def("unchanged", unchanged, py::arg("dicts"), py::arg("objects"), py::arg("classes"),
        "Returns whether the dictionaries still have the recorded keys and values, the objects "
        "their classes, and the classes their versions.");
}

}  // namespace fastbert
