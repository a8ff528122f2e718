"""The mistakes that ``make mutate`` inserts into the PTX machine: wrong readings of the PTX manual.

Each fault is one wrong line, as in faults.py. One of two groups of tests must fail: the machine's
own tests, or the kernels of tests/ptx/calibration, which are known to be right on GPUs.
"""

from __future__ import annotations

from extension import Unit
from faults import Fault

PTX = "ptxmachine/csrc"
ROOMS = (
    "access", "async", "atomics", "bulk", "cluster", "compare", "convert", "decode", "float",
    "integer", "ldmatrix", "machine", "memory", "mma", "order", "products", "shape", "tensor_map",
    "warp", "wgmma", "wmma",
)  # fmt: skip
OWN = "ptxmachine/tests/test_"
TRITON = "tests/ptx/calibration/test_triton_calibration.py"

PTX_UNITS: dict[str, Unit] = {f"ptx_{room}": Unit(f"{PTX}/{room}.cpp") for room in ROOMS}


def selected(*names: str, triton: str = "") -> list[str]:
    """Return tests of the PTX machine, and the Triton cases whose names contain `triton`."""
    files = [f"{OWN}{name}.py" for name in names]
    # `TRITON` is always passed, even if no Triton case is selected. It is in tests/, so that pytest
    # loads tests/conftest.py, which adds the options of the command line.
    others = "not triton_calibration"
    return [*files, TRITON, "-k", f"{others} or {triton}" if triton else others]


PTX_SELECTIONS: dict[str, list[str]] = {
    "ptx_access": selected(
        "hardware_rules", "memory", "machine_faults", "meetings", "clusters", triton="locks"
    ),
    "ptx_async": selected(
        "hardware_rules",
        "machine_faults",
        "registers",
        "tensor_copies",
        "matrices",
        "multicasts",
        triton="matmul_bfloat16",
    ),
    "ptx_atomics": selected("memory", "meetings", triton="atomics or locks"),
    "ptx_bulk": selected(
        "hardware_rules", "tensor_copies", "multicasts", triton="boxes or descriptors"
    ),
    "ptx_cluster": selected(
        "clusters", "multicasts", "meetings", "hardware_rules", "machine_faults"
    ),
    "ptx_compare": selected("floats", "integers", triton="bits_of"),
    "ptx_convert": selected("floats", "integers", "clusters", triton="cast"),
    "ptx_decode": selected("control_flow", "floats", "integers"),
    "ptx_float": selected("floats"),
    "ptx_integer": selected("integers", "meetings", triton="bits_of or fp64 or permute"),
    "ptx_ldmatrix": selected("memory", "matrices", triton="matmul"),
    "ptx_machine": selected(
        "hardware_rules",
        "meetings",
        "machine_faults",
        "registers",
        "tensor_copies",
        "control_flow",
    ),
    "ptx_memory": selected("memory", "machine_faults", "meetings", triton="atomics or locks"),
    "ptx_mma": selected("matrices", triton="matmul"),
    "ptx_order": selected(
        "hardware_rules",
        "meetings",
        "machine_faults",
        "tensor_copies",
        "matrices",
        "clusters",
        triton="locks",
    ),
    "ptx_products": selected("matrices", triton="matmul"),
    "ptx_tensor_map": selected("tensor_copies", triton="the_kernel_makes"),
    "ptx_shape": selected("operands"),
    "ptx_warp": selected("meetings", "machine_faults", "integers", triton="scans"),
    "ptx_wgmma": selected("matrices", triton="matmul"),
    "ptx_wmma": selected("matrices"),
}


def fault(room: str, name: str, old: str, new: str) -> Fault:
    return Fault(f"the PTX machine: {name}", f"ptx_{room}", f"{PTX}/{room}.cpp", old, new)


PTX_FAULTS: list[Fault] = [
    # Faults of fragments, matrices and descriptors.
    fault("products", "accumulator rows 8 apart are swapped", "(e & 2 ? 8 : 0)", "(e & 1 ? 8 : 0)"),
    fault(
        "products", "accumulator columns", "2 * (lane % 4) + (e & 1)", "(lane % 4) + 4 * (e & 1)"
    ),
    fault(
        "products", "rows of A by register", "l / 4 + (r & 1 ? 8 : 0)", "l / 4 + (r & 2 ? 8 : 0)"
    ),
    fault("products", "depth of A by register", "(r / 2) * 4 * per", "(r % 2) * 4 * per"),
    fault("mma", "depth of B by lane", "r * 4 * per + (l % 4) * per", "r * 4 * per + (l % 4)"),
    fault("products", "tf32 keeps all bits", "bits & 0xffffe000u", "bits"),
    fault("products", "s8 is read as u8", "type == Type::s8 ?", "type == Type::tf32 ?"),
    fault(
        "wgmma",
        "the stride of a descriptor",
        "stride((uint32_t)(d >> 32",
        "stride((uint32_t)(d >> 16",
    ),
    fault("wgmma", "swizzle codes", "{16, 128, 64, 32}", "{16, 32, 64, 128}"),
    fault(
        "wgmma",
        "rows along k",
        "(r / 8) * stride + (r % 8) * width",
        "(r / 8) * leading + (r % 8) * width",
    ),
    fault(
        "wgmma",
        "transposed without swizzle",
        "(k % 8) * 16 + (k / 8) * leading",
        "(k % 8) * 16 + (k / 8) * stride",
    ),
    fault(
        "wgmma",
        "transposed with swizzle",
        "(j / per) * leading + (k % 8)",
        "(j / per) * stride + (k % 8)",
    ),
    fault(
        "wgmma",
        "the warp's rows of A",
        "const int first = 16 * (w.index % 4);",
        "const int first = 16 * (3 - w.index % 4);",
    ),
    fault("wgmma", "scale-d is ignored", "if (p.scale_d) {", "if (true) {"),
    fault("wgmma", "no need of wgmma.fence", "if (w.written[r.id] > w.mma_fence)", "if (false)"),
    fault("wgmma", "no need of the first wgmma.fence", "if (w.mma_fence == 0)", "if (false)"),
    fault(
        "wgmma",
        "a wait waits for one group less",
        "w.products.size() - 1 - i.arg[0]",
        "w.products.size() - 2 - i.arg[0]",
    ),
    fault("wgmma", "a warp waits alone", "if (other.issued >= last) return;", "if (true) return;"),
    fault(
        "wgmma",
        "a wait orders the reads of nobody",
        "time = std::max(time, (uint32_t)last);",
        "",
    ),
    fault(
        "products",
        "sums of integers lose the old value",
        "int64_t sum = d[r * o.columns + c];",
        "int64_t sum = 0;",
    ),
    fault(
        "wmma",
        "wmma by columns",
        "column * stride + row : row * stride + column;\n      const Element",
        "row * stride + column : row * stride + column;\n      const Element",
    ),
    fault(
        "ldmatrix",
        "ldmatrix transposes nothing",
        "const int r = i.arg[1] ? 2 * (l % 4) + e : l / 4, c = i.arg[1] ? l / 4 : 2 * (l % 4) + e;"
        "\n        uint16_t x;",
        "const int r = l / 4, c = 2 * (l % 4) + e;\n        uint16_t x;",
    ),
    fault(
        "ldmatrix",
        "ldmatrix takes the halves in reverse",
        "value |= (uint32_t)x << (16 * e);",
        "value |= (uint32_t)x << (16 - 16 * e);",
    ),
    # Faults of memory and atomics.
    fault("memory", "local memory is shared by the lanes", "if (local) return m;", ""),
    fault(
        "memory", "s8 is not extended", "return (uint64_t)(int64_t)(int8_t)bits;", "return bits;"
    ),
    fault("atomics", "atomic min is max", "return b < old ? b : old;", "return b < old ? old : b;"),
    fault(
        "atomics",
        "inc wraps around late",
        "return old >= b ? 0 : old + 1;",
        "return old > b ? 0 : old + 1;",
    ),
    fault("atomics", "cas stores without equality", "return old == b ? c : old;", "return c;"),
    fault(
        "access",
        "misaligned vectors pass",
        "home.shared_offset(address, size, size);\n      uint8_t* at",
        "home.shared_offset(address, size, 1);\n      uint8_t* at",
    ),
    fault(
        "access",
        "an acquire acquires nothing",
        "scope_of(i), i.arg[2] & kAcquire",
        "scope_of(i), false",
    ),
    # Faults of integers and bits.
    fault(
        "integer",
        "order of prmt's bytes",
        "(uint64_t)w.word(i.reg[2])[l] << 32 | w.word(i.reg[1])[l];\n    const uint32_t ok",
        "(uint64_t)w.word(i.reg[1])[l] << 32 | w.word(i.reg[2])[l];\n    const uint32_t ok",
    ),
    fault("integer", "prmt without signs", "if (choice & 8) byte =", "if (false) byte ="),
    fault(
        "integer",
        "a clamped funnel shift wraps",
        "i.arg[1] ? std::min(n, 32u) : n & 31u",
        "n & 31u",
    ),
    fault(
        "integer",
        "the halves of a funnel shift",
        "(uint64_t)w.word(i.reg[2])[l] << 32 | w.word(i.reg[1])[l];\n    uint32_t n",
        "(uint64_t)w.word(i.reg[1])[l] << 32 | w.word(i.reg[2])[l];\n    uint32_t n",
    ),
    fault(
        "integer",
        "operands of lop3",
        "(k & 4 ? a[l] : ~a[l]) & (k & 2 ? b[l] : ~b[l])",
        "(k & 4 ? b[l] : ~b[l]) & (k & 2 ? a[l] : ~a[l])",
    ),
    fault("integer", "no carry out", "if (i.arg[2]) w.carry[l] =", "if (false) w.carry[l] ="),
    fault(
        "integer",
        "bfi starts one bit late",
        "const T one = (T)1 << (pos + bit);",
        "const T one = (T)1 << (pos + bit + 1);",
    ),
    # Conversions.
    fault("convert", "the upper half of a pair", "high << shift | low);", "low << shift | high);"),
    fault(
        "convert",
        "rounding to nearest even",
        "bits + 0x7fffu + (bits >> 16 & 1u)",
        "bits + 0x8000u",
    ),
    fault(
        "convert",
        "no saturation of integers",
        "return (uint64_t)std::min(std::max(value, low), top);",
        "return (uint64_t)value;",
    ),
    fault(
        "convert",
        "e4m3 overflows early",
        "rounded_to(x, 3, -6, 448.0, round, false)",
        "rounded_to(x, 3, -6, 240.0, round, false)",
    ),
    fault(
        "convert",
        "vectors are taken apart from the top",
        "whole[l] >> (p * bits) & all",
        "whole[l] >> ((parts - 1 - p) * bits) & all",
    ),
    # Comparisons.
    fault(
        "compare", "unordered comparisons of NaN", "return nan || ordered", "return !nan && ordered"
    ),
    fault(
        "compare",
        "selp",
        "out[l] = p >> l & 1 ? a[l] : b[l];\n  put",
        "out[l] = p >> l & 1 ? b[l] : a[l];\n  put",
    ),
    # Warps.
    fault(
        "warp", "the clamp of shfl", "(l & segment) | (clamp & ~segment)", "(l & segment) | clamp"
    ),
    fault(
        "warp",
        "shfl.up goes down",
        "from = l - b, inside = from >= top;",
        "from = l + b, inside = from >= top;",
    ),
    fault("warp", "shfl ignores segments", "from = bottom | (b & ~segment)", "from = b"),
    fault(
        "warp", "match.all is match.any", "i.arg[0] ? (all ? members : 0) : equal[l]", "equal[l]"
    ),
    # Faults of barriers and asynchronous copies.
    fault(
        "machine",
        "a barrier of some warps",
        "int32_t needed = b.expected / kLanes;",
        "int32_t needed = 1;",
    ),
    fault(
        "machine",
        "a phase completes early",
        "if (b.pending || b.transactions) return;",
        "if (b.pending) return;",
    ),
    fault(
        "machine",
        "a vote counts warps",
        "yes += (uint64_t)__builtin_popcount(b.votes[k].second);",
        "yes += b.votes[k].second != 0;",
    ),
    fault(
        "async",
        "parity of a phase",
        "(mb.phase & 1) != (asked & 1)",
        "(mb.phase & 1) == (asked & 1)",
    ),
    fault("async", "cp.async without zeros", "c.filled = bytes;", "c.filled = bytes / 2;"),
    fault(
        "async",
        "a wait for copies waits for one group less",
        "(int)groups.size() - 1 - i.arg[0];",
        "(int)groups.size() - 2 - i.arg[0];",
    ),
    fault("async", "noinc of cp.async.mbarrier", "if (!i.arg[0]) ++mb.pending;", "++mb.pending;"),
    fault(
        "async",
        "a block has any number of registers",
        "w.missing = more > b.registers ? more : 0;",
        "w.missing = 0;",
    ),
    fault(
        "async",
        "registers that a warp gives are lost",
        "b.registers -= more;",
        "b.registers -= more > 0 ? more : 0;",
    ),
    fault(
        "async",
        "setmaxnreg.inc gives registers",
        "if (i.arg[0] ? more < 0 : more > 0)",
        "if (i.arg[0] ? false : more > 0)",
    ),
    fault(
        "async",
        "a thread has any number of registers",
        "if (count < kLeastRegisters || count > kMostRegisters || count % 8)",
        "if (false)",
    ),
    fault(
        "machine",
        "a warp takes registers that it does not wait for",
        "if (i.flow == Flow::retry && mask && w.polls) return;",
        "",
    ),
    fault("async", "a block frees any number of registers", "if (needed > free)", "if (false)"),
    fault(
        "machine",
        "arrivals alone complete no barrier",
        "if (b.waiting.empty() && b.passed.empty()) return;",
        "if (b.waiting.empty()) return;",
    ),
    fault(
        "bulk",
        "rows of any size in maps",
        "need(!map.swizzle || row <= map.swizzle,",
        "need(true,",
    ),
    fault(
        "access",
        "a scope is not read",
        "(int)scope_named(name) <<",
        "(int)Scope::device <<",
    ),
    fault(
        "order",
        "the scope of a fence",
        "std::fill_n(w.offered[lane].begin(), (int)scope,",
        "std::fill_n(w.offered[lane].begin(), kScopes,",
    ),
    fault(
        "bulk",
        "no swizzle in copies",
        "return swizzled(offset + base, c.swizzle) - base;",
        "return offset;",
    ),
    fault(
        "bulk",
        "rows outside wrap around",
        "inside = inside && position >= 0 &&",
        "inside = inside &&",
    ),
    fault(
        "bulk",
        "bytes before a row",
        "row.before = (uint32_t)(first - at[0]) * size;",
        "row.before = 0;",
    ),
    fault("bulk", "bytes of a copy", "bytes += c.row_bytes;", "bytes += row.inside;"),
    fault("bulk", "lanes repeat a store", "c.done = c.done || same(other, c);", "c.done = c.done;"),
    fault(
        "tensor_map", "strides of maps", "map.stride[ordinal] = value;", "map.stride[0] = value;"
    ),
    fault(
        "tensor_map",
        "the rank of maps",
        "map.rank = (uint8_t)(value + 1);",
        "map.rank = (uint8_t)value;",
    ),
    fault("tensor_map", "swizzles of maps", "(uint8_t)(16 << value)", "(uint8_t)(8 << value)"),
    # Clusters.
    fault(
        "cluster",
        "a block need not have started",
        "if (launch->options.races && !started && !(w.waited >> lane & 1))",
        "if (false)",
    ),
    fault(
        "cluster",
        "a block ends at any time",
        "if (s.cluster == 0 || own ||",
        "if (true || own ||",
    ),
    fault(
        "cluster",
        "barrier.cluster waits for nobody",
        "if (w.live & ~w.arrived) return;",
        "if (w.live & ~w.arrived) continue;",
    ),
    fault(
        "cluster",
        "barrier.cluster orders nothing",
        "w.block->acquire(w, l, c.completed, c.completed_fenced);",
        "",
    ),
    fault(
        "cluster",
        "barrier.cluster forgets other clusters",
        "w.block->learn(w, l, c.completed_others);",
        "",
    ),
    fault("cluster", "a relaxed arrival releases", "if (!i.arg[0]) {", "if (true) {"),
    fault(
        "cluster",
        "fences offer nothing to arrivals",
        "} else if (offered) {",
        "} else if (false) {",
    ),
    fault("cluster", "getctarank counts from 1", "field ? field - 1 :", "field ? field :"),
    fault("cluster", "mapa counts from 1", "(rank + 1) << kRankShift", "(rank + 2) << kRankShift"),
    fault(
        "cluster",
        "blocks of a cluster are apart",
        "number % across * c[0] + rank % c[0]",
        "number % across + rank % c[0] * across",
    ),
    fault("bulk", "a multicast has one block", "left; left &= left - 1)", "left; left = 0)"),
    fault(
        "bulk",
        "an mbarrier in another block than the copy",
        "if (&c.home(w, l, to) != &c.home(w, l, barrier))",
        "if (false)",
    ),
    fault(
        "order",
        "the scope of a block has the cluster",
        "? Scope::block : Scope::cluster;",
        "? Scope::block : Scope::block;",
    ),
    fault(
        "async",
        "states of other blocks",
        "if (&b != w.block)",
        "if (false)",
    ),
    fault(
        "convert",
        "memory of other blocks is of the block",
        "window == kSharedWindow && !i.arg[0] &&",
        "false &&",
    ),
    # Faults of the operands of instructions.
    fault("shape", "an operand may be missing", "given < least", "given + 1 < least"),
    fault("shape", "a register may be wider", "return o.bits == s.bits", "return o.bits >= s.bits"),
    fault("shape", "special registers are written", "(s.written && o.special)", "false"),
    fault("shape", "any operand is negated", "if (o.negated && !s.negatable) return false;", ""),
    fault("shape", "any operand is left out", "return s.sink && !o.negated;", "return true;"),
    fault("shape", "constants of any size", "o.value >= s.low && o.value <= s.high &&", ""),
    # Happens-before.
    fault(
        "order",
        "reads race with nothing",
        "if (!after(w, lane, cell.read) && !strong(cell.read))",
        "if (false)",
    ),
    fault(
        "order",
        "no proxy fence is needed",
        "if (stamp.async && !fenced_after(w, lane, cell.write))",
        "if (false)",
    ),
    fault(
        "order",
        "a barrier orders nothing",
        "w->base[lane] = shared_next, w->fenced[lane] = fenced;",
        "(void)w, (void)lane;",
    ),
    fault(
        "order",
        "what other blocks released is forgotten",
        "w.others[lane] = joined(w.others[lane], from);",
        "",
    ),
]
