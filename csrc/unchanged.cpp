#include "unchanged.h"

#include <cstdint>
#include <vector>

namespace fastbert {
namespace {

namespace py = pybind11;

// Returns the version tag that Python assigns to a class. A change of an attribute of the class or
// of a base invalidates the tag, and the next attribute look-up assigns a new tag. Returns 0 if the
// class has no tag.
uint64_t version_of(py::handle type) {
  auto* object = reinterpret_cast<PyTypeObject*>(type.ptr());
  // An attribute look-up assigns a version tag to a class that has none.
  if (!PyObject_HasAttrString(type.ptr(), "__init__")) return 0;
  return PyType_HasFeature(object, Py_TPFLAGS_VALID_VERSION_TAG) ? object->tp_version_tag : 0;
}

// Returns whether `dict` contains exactly the items of `keys` and `values`, in the same order. Keys
// and values are compared by identity.
bool same_items(PyObject* dict, PyObject* keys, PyObject* values) {
  if (PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(keys)) return false;
  PyObject *key, *value;
  for (Py_ssize_t place = 0, i = 0; PyDict_Next(dict, &place, &key, &value); ++i) {
    if (PyTuple_GET_ITEM(keys, i) != key || PyTuple_GET_ITEM(values, i) != value) return false;
  }
  return true;
}

// Returns the version number that Python assigns to a dictionary at each change. The number is
// different for every dictionary and every change. Returns 0 if this Python has no such number.
uint64_t tag_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030D0000 && !defined(PYPY_VERSION)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
  return 0;
#endif
}

// The version tags of the dictionaries that `unchanged` compares. `seen` has the tag that each
// dictionary had when its items were last equal to the recorded items. A dictionary that still has
// this tag has the same items. Comparing the tags of a thousand dictionaries takes a quarter of the
// time that comparing their items takes.
struct Tags {
  std::vector<uint64_t> seen;
};

// Returns whether all recorded objects are unchanged. `dicts` has three entries for each
// dictionary: the dictionary, the tuple of its recorded keys and the tuple of its recorded values.
// `objects` has two entries for each object: the object and its recorded class. `classes` has two
// entries for each class: the class and its recorded version tag. `functions` has four entries for
// each function: the function and its recorded code, defaults and keyword defaults, where None
// stands for absent defaults. If a dictionary has a new tag but the recorded items, the function
// stores the new tag in `tags`.
bool unchanged(const py::tuple& dicts, Tags& tags, const py::tuple& objects,
               const py::tuple& classes, const py::tuple& functions) {
  PyObject* d = dicts.ptr();
  tags.seen.resize((size_t)PyTuple_GET_SIZE(d) / 3);
  for (size_t i = 0; i < tags.seen.size(); ++i) {
    const auto entry = [&](size_t part) { return PyTuple_GET_ITEM(d, 3 * i + part); };
    if (!PyDict_Check(entry(0))) return false;
    const uint64_t tag = tag_of(entry(0));
    if (tag != 0 && tag == tags.seen[i]) continue;
    if (!same_items(entry(0), entry(1), entry(2))) return false;
    tags.seen[i] = tag;
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
  PyObject* f = functions.ptr();
  for (Py_ssize_t i = 0; i + 3 < PyTuple_GET_SIZE(f); i += 4) {
    PyObject* function = PyTuple_GET_ITEM(f, i);
    const auto is = [&](PyObject* now, Py_ssize_t part) {
      return (now ? now : Py_None) == PyTuple_GET_ITEM(f, i + part);
    };
    if (!is(PyFunction_GetCode(function), 1) || !is(PyFunction_GetDefaults(function), 2) ||
        !is(PyFunction_GetKwDefaults(function), 3)) {
      return false;
    }
  }
  return true;
}

}  // namespace

void bind_unchanged(py::module_& m) {
  m.def("version_of", version_of, py::arg("type"),
        "Returns a number that changes when an attribute of a class or of a base changes, or 0 if "
        "Python has none for the class.");
  m.def(
      "tag_of", [](const py::dict& dict) { return tag_of(dict.ptr()); }, py::arg("dict"),
      "Returns a number that changes when a dictionary changes, or 0 if Python has none.");
  py::class_<Tags>(m, "Tags", "The tags of the dictionaries of one record.").def(py::init<>());
  m.def("unchanged", unchanged, py::arg("dicts"), py::arg("tags"), py::arg("objects"),
        py::arg("classes"), py::arg("functions"),
        "Returns whether the dictionaries still have the recorded keys and values, the objects "
        "their classes, the classes their versions, and the functions their code and defaults. "
        "Remembers the tags of the dictionaries.");
}

}  // namespace fastbert
