// The Python module ptxmachine._machine: it decodes a parsed kernel, runs a launch, and reads
// buffers and DLPack capsules.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "machine.h"

namespace ptxmachine {
namespace {

namespace py = pybind11;

// Converts an operand from the Python tuple (kind, value, offset, parts, negated).
RawOperand operand_of(const py::handle& object) {
  const py::tuple t = py::reinterpret_borrow<py::tuple>(object);
  RawOperand o;
  o.kind = t[0].cast<std::string>()[0];
  o.value = (int64_t)t[1].cast<py::int_>().attr("__and__")(py::int_(~0ull)).cast<uint64_t>();
  o.offset = t[2].cast<int64_t>();
  for (const py::handle part : t[3]) o.parts.push_back(operand_of(part));
  o.negated = t[4].cast<bool>();
  return o;
}

// Decodes a list of instructions, each a tuple (mnemonic, operands, guard or -1, negated, line).
Program* decode_list(const py::list& code, const std::vector<int>& bits) {
  std::vector<RawInstr> raw;
  for (const py::handle item : code) {
    const py::tuple t = py::reinterpret_borrow<py::tuple>(item);
    RawInstr i;
    i.mnemonic = t[0].cast<std::string>();
    for (const py::handle o : t[1]) i.operands.push_back(operand_of(o));
    i.guard = t[2].cast<int32_t>();
    i.negated = t[3].cast<bool>();
    i.line = t[4].cast<int32_t>();
    raw.push_back(std::move(i));
  }
  return decode(std::move(raw), bits);
}

py::dict dict_of(const Counts& c) {
  static const char* names[] = {"control", "alu",    "fma",    "fp64",   "mufu", "convert",
                                "shuffle", "shared", "global", "tensor", "sync"};
  py::dict pipes;
  for (int p = 0; p < kPipes; ++p) pipes[names[p]] = c.warp[p];
  py::dict d;
  d["pipes"] = pipes;
  d["instructions"] = c.instructions;
  d["tensor_flops"] = c.tensor_flops;
  d["tensor_shared_bytes"] = c.tensor_shared_bytes;
  d["global_bytes"] = c.global_bytes;
  d["global_sectors"] = c.global_sectors;
  d["global_least_sectors"] = c.global_least_sectors;
  d["shared_wavefronts"] = c.shared_wavefronts;
  d["shared_least_wavefronts"] = c.shared_least_wavefronts;
  d["barriers"] = c.barriers;
  d["conflicting_stores"] = c.conflicting_stores;
  return d;
}

// Runs a launch. Each element of `memory` is a tuple (address, bytes, writable, name, whether it is
// uninitialized). Returns the counts, and the fault as a tuple (kind, message, instruction, block,
// warp, lane), or None without a fault.
py::tuple run_launch(
    const Program& program, const std::array<uint32_t, 3>& grid,
    const std::array<uint32_t, 3>& cluster, const std::array<uint32_t, 3>& block,
    const py::bytes& params, uint32_t shared_bytes, uint32_t static_shared, uint32_t local_bytes,
    const std::vector<std::tuple<uint64_t, uint64_t, bool, std::string, bool>>& memory,
    uint64_t seed, double approximate, int accumulate, bool races, bool count, int64_t limit,
    int threads, const std::vector<uint32_t>& blocks, int registers) {
  if (!program.runs()) throw std::invalid_argument("program: it has instructions that cannot run");
  Launch launch;
  launch.program = &program;
  launch.registers = registers;
  std::copy(grid.begin(), grid.end(), launch.grid);
  std::copy(cluster.begin(), cluster.end(), launch.cluster);
  std::copy(block.begin(), block.end(), launch.block);
  launch.threads = (int32_t)(block[0] * block[1] * block[2]);
  launch.warps = (launch.threads + kLanes - 1) / kLanes;
  const std::string bytes = params;
  launch.params.assign(bytes.begin(), bytes.end());
  launch.shared_bytes = shared_bytes, launch.static_shared = static_shared;
  launch.local_bytes = local_bytes;
  launch.blocks = blocks;
  launch.options = {seed, approximate, (Accumulate)accumulate, races, count, limit};
  for (const auto& [address, size, writable, name, empty] : memory) {
    auto a = std::make_unique<Allocation>();
    a->begin = address, a->bytes = size, a->writable = writable, a->name = name;
    a->host = reinterpret_cast<uint8_t*>(address);
    if (empty) a->valid.assign(size, 0);
    if (races && writable) {
      a->cells.resize(a->cell_of(address + size, (uint32_t)program.global_granule) + 1);
      a->locks = std::make_unique<std::array<std::mutex, 64>>();
    }
    launch.memory.push_back(std::move(a));
  }
  std::sort(launch.memory.begin(), launch.memory.end(),
            [](const auto& a, const auto& b) { return a->begin < b->begin; });
  py::object found = py::none();
  try {
    py::gil_scoped_release release;
    run(launch, threads);
  } catch (const Fault& f) {
    found = py::make_tuple(f.kind, std::string(f.what()), f.instr, f.block, f.warp, f.lane);
  } catch (const std::bad_alloc&) {
    found = py::make_tuple("memory", "the launch needs more memory than there is", -1, -1, -1, -1);
  }
  return py::make_tuple(dict_of(launch.counts), found);
}

// The start of DLManagedTensor, as DLPack documents it.
struct DlTensor {
  void* data;
  int32_t device_type, device_id, dims;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null: the array is contiguous
  uint64_t byte_offset;
};

// Returns the address, the shape and the strides in elements of an array, and the code, the bits
// and the lanes of its DLPack type.
py::tuple read_capsule(const py::capsule& capsule) {
  const auto* t = static_cast<const DlTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (!t) throw py::error_already_set();
  std::vector<int64_t> shape(t->shape, t->shape + t->dims), strides((size_t)t->dims, 1);
  if (t->strides) std::copy(t->strides, t->strides + t->dims, strides.begin());
  for (int d = t->dims - 2; !t->strides && d >= 0; --d)
    strides[(size_t)d] = strides[(size_t)d + 1] * shape[(size_t)d + 1];
  const uint64_t address = reinterpret_cast<uint64_t>(t->data) + t->byte_offset;
  return py::make_tuple(address, shape, strides, t->code, t->bits, t->lanes);
}

// Returns the address, the shape and the strides in bytes of a buffer, the size in bytes and the
// format of an element, and whether the memory is read-only.
py::tuple read_buffer(const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  return py::make_tuple(reinterpret_cast<uint64_t>(info.ptr), info.shape, info.strides,
                        info.itemsize, info.format, info.readonly);
}

}  // namespace
}  // namespace ptxmachine

PYBIND11_MODULE(_machine, m) {
  using namespace ptxmachine;
  py::class_<Program>(m, "Program", "A kernel that the machine can run.")
      .def_property_readonly("unsupported", [](const Program& p) { return p.unsupported; })
      .def_property_readonly("misfits", [](const Program& p) { return p.misfits; });
  m.def("decode", decode_list, py::arg("code"), py::arg("bits"),
        "Lays out registers, finds handlers and checks operands.");
  m.def("mnemonics", mnemonics, "Returns the first parts of all mnemonics.");
  m.def("run", run_launch, "Runs a launch.");
  m.def("read_capsule", read_capsule, py::arg("capsule"),
        "Returns what a DLPack capsule says of an array.");
  m.def("read_buffer", read_buffer, py::arg("buffer"),
        "Returns what the buffer protocol says of an array.");
}
