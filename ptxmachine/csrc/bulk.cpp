// Bulk copies of the asynchronous proxy (TMA): cp.async.bulk copies bytes, and cp.async.bulk.tensor
// copies a box of a tensor.
//
// The seed of the launch determines the moment at which a load writes shared memory. The load then
// counts its bytes at its mbarrier. A store may read shared memory at any time until a wait for its
// group. In the happens-before order, a load is an access by an extra thread, a thread of the copy
// engine. A kernel thread that waits for the mbarrier acquires the time of this extra thread.

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {
namespace {

// Returns the offset in shared memory of a piece of 16 bytes of a copy. `offset` is the offset that
// the piece would have without the swizzle.
uint32_t piece(const Block& b, const BulkCopy& c, uint32_t offset) {
  const uint32_t base = b.launch->shared_base;
  return swizzled(offset + base, c.swizzle) - base;
}

// Reports a fault unless fence.proxy.tensormap comes after the last write of the kernel to a tensor
// map.
void check_fence(Warp& w, int lane, Allocation& a, uint64_t address) {
  Block& b = *w.block;
  if (!b.launch->options.races || !a.writable) return;
  b.note_global(w, lane, a, address, 128, false, Scope::weak);
  const Cell& cell = a.cells[a.cell_of(address, b.launch->program->global_granule)];
  if (!cell.write.cluster) return;
  const auto fence = b.map_fences.find(address);
  if (fence == b.map_fences.end() || !b.after(w, lane, fence->second))
    fault("missing fence", "a tensor map is used without fence.proxy.tensormap after its writing",
          lane);
}

// Checks the rules of cuTensorMapEncodeTiled, because a kernel may have changed a tensor map so
// that the map breaks them.
void check_map(const TensorMap& map, int lane) {
  const auto need = [&](bool good, const std::string& what) {
    if (!good) fault("tensor map", what, lane);
  };
  for (int d = 0; d < map.rank; ++d) {
    need(map.box[d] >= 1 && map.box[d] <= 256, "a side of the box is not 1 to 256");
    need(d == 0 || (map.stride[d - 1] % 16 == 0 && map.stride[d - 1] < kStrideEnd),
         "a stride is not a multiple of 16 below 2^40");
  }
  const uint32_t row = (uint32_t)map.box[0] * map.element_bytes;
  need(map.address % 16 == 0, "the address of the tensor is not a multiple of 16");
  need(row % 16 == 0, "a row of the box has " + std::to_string(row) + " bytes, no multiple of 16");
  need(!map.swizzle || row <= map.swizzle, "a row of the box has " + std::to_string(row) +
                                               " bytes, more than the swizzle's " +
                                               std::to_string(map.swizzle));
}

const TensorMap map_at(Warp& w, uint64_t address, int lane) {
  TensorMap map;
  const uint64_t window = address & kWindowMask;
  const uint8_t* at;
  if (window == kParamWindow) {
    const uint64_t offset = address & ~kWindowMask;
    if (offset + 128 > w.block->launch->params.size())
      fault("out of bounds", "a tensor map among the parameters", lane);
    if (offset % kMapAlignment)
      fault("misaligned",
            "a tensor map at byte " + std::to_string(offset) +
                " of the parameters, which is not a multiple of 64",
            lane);
    at = w.block->launch->params.data() + offset;
  } else {
    Allocation* a = w.block->global(w, address, 128, kMapAlignment, false);
    check_fence(w, lane, *a, address);
    at = a->host + (address - a->begin);
  }
  std::memcpy(&map, at, sizeof(map));
  if (std::memcmp(map.magic, "ptxm", 4) != 0)
    fault("uninitialised", "the tensor map was not made by ptxmachine.tensor_map", lane);
  if (map.rank < 1 || map.rank > 5 || map.element_bytes == 0)
    fault("uninitialised", "the tensor map has no rank or no type of its elements", lane);
  check_map(map, lane);
  return map;
}

// Adds the rows of a box to the copy c. `at` has the coordinates of the box, which may be partly or
// wholly outside the tensor.
void add_rows(BulkCopy& c, const TensorMap& map, const int64_t* at, uint32_t shared) {
  const uint32_t size = map.element_bytes;
  c.row_bytes = map.box[0] * size;
  c.swizzle = map.swizzle;
  uint32_t count = 1;
  for (int d = 1; d < map.rank; ++d) count *= map.box[d];
  for (uint32_t n = 0; n < count; ++n) {
    uint32_t rest = n;
    bool inside = true;
    uint64_t address = map.address;
    for (int d = 1; d < map.rank; ++d) {
      const int64_t position = at[d] + rest % map.box[d];
      rest /= map.box[d];
      inside = inside && position >= 0 && position < (int64_t)map.size[d];
      address += (uint64_t)(position * (int64_t)map.stride[d - 1]);
    }
    const int64_t first = std::max<int64_t>(at[0], 0);
    const int64_t end = std::min<int64_t>(at[0] + map.box[0], map.size[0]);
    BulkRow row = {0, shared + n * c.row_bytes, c.row_bytes, 0};
    if (inside && end > first) {
      row.global = address + (uint64_t)first * size;
      row.before = (uint32_t)(first - at[0]) * size;
      row.inside = (uint32_t)(end - first) * size;
    }
    c.rows.push_back(row);
  }
}

// Calls f(offset in the row, offset in shared memory, bytes) for each piece of 16 bytes of a row.
template <class F>
void each_piece(const Block& b, const BulkCopy& c, const BulkRow& row, F&& f) {
  for (uint32_t byte = 0; byte < c.row_bytes; byte += 16)
    f(byte, piece(b, c, row.shared + byte), std::min(16u, c.row_bytes - byte));
}

uint16_t slot_of(Block& b, uint32_t barrier) {
  const auto [it, fresh] = b.slots.try_emplace(barrier, (uint16_t)b.slots.size());
  if (fresh && it->second >= kSlots) fault("unsupported", "more than 64 mbarriers count bytes");
  return (uint16_t)(b.rank * b.launch->entries() + (uint32_t)b.launch->warps * kLanes + it->second);
}

// Issues a load into the shared memory of the block `to`. The load counts its bytes at an mbarrier
// of the same block.
void issue_part(Warp& w, int l, BulkCopy c, Block& to) {
  existing(w, to, c.barrier, l);
  c.slot = slot_of(to, c.barrier);
  Stamp engine = to.pending(w, l, true);
  engine.thread = c.slot;
  for (const BulkRow& row : c.rows)
    each_piece(to, c, row, [&](uint32_t, uint32_t o, uint32_t n) {
      to.note_write(w, l, o, n, engine);
      std::memset(to.shared.data() + o, 0xff, n);
      std::memset(to.shared_valid.data() + o, 0, n);
    });
  to.bulk.push_back(std::move(c));
  if (!to.late && to.launch->options.seed == 0) to.complete_load(to.bulk.size() - 1);
}

// Issues a load into the block of `address`. With a multicast, the load goes to all blocks of the
// mask in the register `multicast`, and reads global memory once.
void issue_load(Warp& w, int l, const BulkCopy& c, uint64_t address, const Reg* multicast) {
  Block& b = *w.block;
  for (const BulkRow& row : c.rows) {
    if (!row.inside) continue;
    Allocation* a = b.global(w, row.global, row.inside, 1, false);
    b.note_global(w, l, *a, row.global, row.inside, false, Scope::weak);
    b.counts.global_bytes += row.inside;
    b.counts.global_sectors += (row.inside + 31) / 32;
    b.counts.global_least_sectors += (row.inside + 31) / 32;
  }
  if (!multicast) return issue_part(w, l, c, b.cluster->home(w, l, address));
  w.need(*multicast, 1u << l, "the mask of a multicast");
  const auto mask = (uint32_t)w.get(*multicast, l);
  if (mask == 0) fault("out of bounds", "the mask of a multicast has no block", l);
  for (uint32_t left = mask; left; left &= left - 1)
    issue_part(w, l, c, b.cluster->member(w, l, (uint32_t)__builtin_ctz(left)));
}

// Returns the offset of an address in the shared memory of its own block. All blocks of a cluster
// have the same layout, so any block b of the cluster gives the offset.
uint32_t offset_in_home(const Block& b, uint64_t given, uint64_t bytes, uint64_t align) {
  return b.shared_offset(in_block(given), bytes, align);
}

// Returns the offset of the mbarrier of a load. Reports a fault if the mbarrier is not in the block
// of the destination.
uint32_t barrier_of(Warp& w, int l, uint64_t to, uint64_t barrier) {
  const Cluster& c = *w.block->cluster;
  if (&c.home(w, l, to) != &c.home(w, l, barrier))
    fault("out of bounds", "a bulk copy and its mbarrier are in different blocks", l);
  return offset_in_home(*w.block, barrier, 8, 8);
}

void copy_in(Block& b, const BulkCopy& c) {
  std::vector<uint8_t> bytes(c.row_bytes);
  for (const BulkRow& row : c.rows) {
    std::fill(bytes.begin(), bytes.end(), c.nan ? 0xff : 0);
    if (row.inside)
      std::memcpy(bytes.data() + row.before, reinterpret_cast<void*>(row.global), row.inside);
    each_piece(b, c, row, [&](uint32_t byte, uint32_t o, uint32_t n) {
      std::memcpy(b.shared.data() + o, bytes.data() + byte, n);
      std::memset(b.shared_valid.data() + o, 1, n);
    });
  }
}

void copy_out(Warp& w, BulkCopy& c) {
  Block& b = *w.block;
  std::vector<uint8_t> bytes(c.row_bytes);
  for (const BulkRow& row : c.rows) {
    if (!row.inside) continue;
    each_piece(b, c, row, [&](uint32_t byte, uint32_t o, uint32_t n) {
      std::memcpy(bytes.data() + byte, b.shared.data() + o, n);
      if (!all_valid(b.shared_valid.data() + o, n) && byte + n > row.before &&
          byte < row.before + row.inside)
        fault("uninitialised",
              "a bulk store writes bytes to global memory that nothing has written", c.lane);
    });
    Allocation* a = b.global(w, row.global, row.inside, 1, true);
    b.note_global(w, c.lane, *a, row.global, row.inside, true,
                  c.reduction >= 0 ? Scope::device : Scope::weak);
    uint8_t* to = a->host + (row.global - a->begin);
    const uint32_t size = (uint32_t)bytes_of(c.type);
    if (c.reduction < 0) std::memcpy(to, bytes.data() + row.before, row.inside);
    for (uint32_t at = 0; c.reduction >= 0 && at < row.inside; at += size) {
      uint64_t value = 0;
      std::memcpy(&value, bytes.data() + row.before + at, size);
      reduce_element(c.type, c.reduction, to + at, value);
    }
    if (!a->valid.empty()) std::memset(a->valid.data() + (row.global - a->begin), 1, row.inside);
    b.counts.global_bytes += row.inside;
    b.counts.global_sectors += (row.inside + 31) / 32;
    b.counts.global_least_sectors += (row.inside + 31) / 32;
  }
  c.done = true;
}

// Returns whether two stores of one instruction write the same bytes of shared memory to the same
// global addresses.
bool same(const BulkCopy& a, const BulkCopy& c) {
  return a.reduction < 0 && c.reduction < 0 && a.rows.size() == c.rows.size() &&
         a.row_bytes == c.row_bytes && a.swizzle == c.swizzle &&
         std::equal(
             a.rows.begin(), a.rows.end(), c.rows.begin(),
             [](const BulkRow& x, const BulkRow& y) {
               return x.global == y.global && x.shared == y.shared && x.before == y.before &&
                      x.inside == y.inside;
             });
}

// All lanes of a warp may issue the same store, as in CUTLASS. Global memory is then written once,
// as if several lanes stored the same value to one address in one instruction. `issued` has the
// stores that lower lanes of this instruction have issued.
void issue_store(Warp& w, int l, BulkCopy c, std::vector<BulkCopy>& issued) {
  Block& b = *w.block;
  c.store = true;
  for (const BulkCopy& other : issued) c.done = c.done || same(other, c);
  if (!c.done) issued.push_back(c);
  for (const BulkRow& row : c.rows)
    each_piece(b, c, row, [&](uint32_t, uint32_t o, uint32_t n) {
      b.note_read(w, l, o, n, b.pending(w, l, true));
    });
  auto& groups = w.stores[l];
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back(std::move(c));
  if (!b.late && !groups.back().back().done) copy_out(w, groups.back().back());
}

void settle(Warp& w, int l, std::vector<BulkCopy>& group) {
  Block& b = *w.block;
  for (BulkCopy& c : group) {
    if (!c.done) copy_out(w, c);
    for (const BulkRow& row : c.rows)
      each_piece(b, c, row, [&](uint32_t, uint32_t o, uint32_t n) { b.settle_read(w, l, o, n); });
  }
}

uint64_t address(Warp& w, Reg r, int l, int64_t offset) {
  w.need(r, 1u << l, "an address");
  return w.address(r, l, offset);
}

// Returns the element type for a value of .elemtype in tensormap.replace.
Type map_type(uint32_t number) {
  static const Type types[] = {Type::u8,   Type::u16, Type::u32, Type::s32, Type::u64,
                               Type::s64,  Type::f16, Type::f32, Type::f32, Type::f64,
                               Type::bf16, Type::f32, Type::f32};
  if (number >= sizeof(types) / sizeof(types[0]))
    fault("out of bounds", "type " + std::to_string(number) + " of a tensor map, allowed: 0 to 12");
  return types[number];
}

// cp.async.bulk and cp.reduce.async.bulk. arg 0: whether it is a store. arg 2: the reduction or -1.
// arg 3: whether it is a multicast. The operands of a load are [to], [from], bytes, [mbarrier]{,
// mask}. A store has no mbarrier.
void bulk(Warp& w, const Instr& i, Mask m) {
  Block& b = *w.block;
  std::vector<BulkCopy> issued;
  each_lane(m, [&](int l) {
    w.need(i.reg[2], 1u << l, "the size of a bulk copy");
    const uint32_t bytes = (uint32_t)w.get(i.reg[2], l);
    if (bytes == 0 || bytes % 16)
      fault("misaligned",
            "a bulk copy of " + std::to_string(bytes) + " bytes, allowed: multiples of 16", l);
    const uint64_t to = address(w, i.reg[0], l, i.offsets[0]),
                   from = address(w, i.reg[1], l, i.offsets[1]);
    BulkCopy c;
    c.warp = w.index, c.lane = l, c.row_bytes = bytes;
    const uint64_t global = i.arg[0] ? to : from;
    const uint32_t shared =
        i.arg[0] ? b.shared_offset(from, bytes, 16) : offset_in_home(b, to, bytes, 16);
    if (global % 16)
      fault("misaligned", "the global address of a bulk copy is not a multiple of 16", l);
    c.rows = {{global, shared, 0, bytes}};
    c.reduction = i.arg[2], c.type = i.type;
    if (i.arg[0]) return issue_store(w, l, std::move(c), issued);
    c.barrier = barrier_of(w, l, to, address(w, i.reg[3], l, i.offsets[2]));
    issue_load(w, l, c, to, i.arg[3] ? &i.reg[4] : nullptr);
  });
}

// cp.async.bulk.tensor and cp.reduce.async.bulk.tensor. arg 0: whether it is a store. arg 1: the
// number of dimensions. arg 2: the reduction or -1. arg 3: whether it is a multicast. The operands
// of a load are [to], [map, {...}], [mbarrier]{, mask}. The operands of a store are [map, {...}],
// [from].
void tensor(Warp& w, const Instr& i, Mask m) {
  Block& b = *w.block;
  std::vector<BulkCopy> issued;
  const int rank = i.arg[1];
  each_lane(m, [&](int l) {
    const Reg* map_reg = i.reg + (i.arg[0] ? 0 : 1);
    const TensorMap map = map_at(w, address(w, map_reg[0], l, 0), l);
    if (map.rank != rank)
      fault("out of bounds", "the tensor map has another number of dimensions than the copy", l);
    int64_t at[5] = {};
    for (int d = 0; d < rank; ++d) {
      w.need(map_reg[1 + d], 1u << l, "a coordinate");
      at[d] = (int32_t)w.get(map_reg[1 + d], l);
    }
    const uint64_t given =
        address(w, i.arg[0] ? i.reg[1 + rank] : i.reg[0], l, i.offsets[i.arg[0] ? 1 : 0]);
    uint64_t bytes = map.element_bytes;
    for (int d = 0; d < rank; ++d) bytes *= map.box[d];
    const uint32_t align = kTensorAlignment;
    // A swizzle permutes 16-byte pieces within each 128 bytes. A swizzled copy therefore needs
    // whole units of 128 bytes in shared memory.
    if (map.swizzle) bytes = (bytes + align - 1) / align * align;
    const uint32_t shared =
        i.arg[0] ? b.shared_offset(given, bytes, 1) : offset_in_home(b, given, bytes, 1);
    if ((shared + b.launch->shared_base) % align)
      fault("misaligned", "the shared address of a tensor copy is not a multiple of 128", l);
    BulkCopy c;
    c.warp = w.index, c.lane = l, c.nan = map.fill_nan;
    c.reduction = i.arg[2], c.type = map_type(map.type);
    add_rows(c, map, at, shared);
    if (i.arg[0]) return issue_store(w, l, std::move(c), issued);
    c.barrier = barrier_of(w, l, given, address(w, i.reg[2 + rank], l, i.offsets[2]));
    issue_load(w, l, c, given, i.arg[3] ? &i.reg[3 + rank] : nullptr);
  });
}

void commit(Warp& w, const Instr&, Mask m) {
  each_lane(m, [&](int l) {
    if (w.stores[l].empty()) w.stores[l].emplace_back();
    w.stores[l].emplace_back();
  });
}

// cp.async.bulk.wait_group. arg 0: the number of groups that may stay in flight. The stores of all
// earlier groups complete at this wait, both with and without .read.
void wait(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) {
    auto& groups = w.stores[l];
    if (groups.empty()) return;
    const int complete = (int)groups.size() - 1 - i.arg[0];
    for (int g = 0; g < complete; ++g) settle(w, l, groups[g]);
    if (complete > 0) groups.erase(groups.begin(), groups.begin() + complete);
  });
}

}  // namespace

void Block::complete_load(size_t index) {
  BulkCopy c = std::move(bulk[index]);
  bulk.erase(bulk.begin() + (std::ptrdiff_t)index);
  copy_in(*this, c);
  const size_t slot = c.slot % launch->entries() - (size_t)launch->warps * kLanes;
  const uint32_t time = slot_time[slot]++;
  uint32_t bytes = 0;
  for (const BulkRow& row : c.rows) {
    bytes += c.row_bytes;
    each_piece(*this, c, row,
               [&](uint32_t, uint32_t o, uint32_t n) { settle_write(c.slot, o, n, time); });
  }
  auto found = mbarriers.find(c.barrier);
  if (found == mbarriers.end())
    fault("uninitialised", "a bulk copy counts at an mbarrier that was never initialised");
  MBarrier& mb = found->second;
  mb.transactions -= bytes;
  if (launch->options.races) {
    if (mb.arrivals.empty()) {
      mb.arrivals.assign(launch->clock_size(), 0);
      mb.arrivals_fenced = mb.arrivals;
    }
    mb.arrivals[c.slot] = std::max(mb.arrivals[c.slot], time);
    mb.arrivals_fenced[c.slot] = mb.arrivals[c.slot];
  }
  check_phase(mb);
}

namespace {

// Returns the number of dimensions of a tensor copy, or 0 for a copy of bytes.
int rank_of(const Mnemonic& name) {
  static const char* ranks[] = {"1d", "2d", "3d", "4d", "5d"};
  for (int d = 0; d < 5; ++d)
    if (name.has(ranks[d])) return d + 1;
  return 0;
}

}  // namespace

Known decode_bulk(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  if (!name.has("bulk")) return kUnknown;
  if (name.has("commit_group")) return i.pipe = Pipe::sync, i.run = commit, Shape{};
  if (name.has("wait_group")) {
    i.pipe = Pipe::sync;
    i.arg[0] = (int)raw.operand(0).value;
    i.run = wait;
    return Shape{constant(0, INT32_MAX)};
  }
  i.pipe = Pipe::global;
  const int rank = rank_of(name);
  if (name.has("tensor") != (rank > 0) || name.has("im2col")) return kUnknown;
  if (name.has("prefetch")) {
    i.run = nothing;
    return with_policy(rank ? Shape{address(rank)} : Shape{address(), source(32)}, name);
  }
  // The first state space in the mnemonic is the destination.
  for (const std::string& part : name.parts) {
    if (part == "global") i.arg[0] = 1;
    if (part == "global" || part.rfind("shared", 0) == 0) break;
  }
  i.arg[2] = -1;
  if (name.parts[1] == "reduce") {
    i.arg[2] = reduction_of(name), i.type = name.last();
    // The mnemonic of a tensor copy needs no type, because the tensor map has the type of the
    // elements.
    if (!i.arg[0] || i.arg[2] < 0 || (!rank && bytes_of(i.type) < 1)) return kUnknown;
  }
  // The machine does not support a copy from shared memory to the shared memory of another block.
  const bool from_shared = name.has("shared::cta") && name.has("shared::cluster");
  if (from_shared || (i.arg[0] && name.has("multicast::cluster"))) return kUnknown;
  i.arg[1] = rank;
  i.arg[3] = name.has("multicast::cluster");
  i.run = rank ? tensor : bulk;
  Shape shape = {address(i.arg[0] ? rank : 0), address(i.arg[0] ? 0 : rank)};
  if (!rank) shape.push_back(source(32));
  if (!i.arg[0]) shape.push_back(address());
  if (i.arg[3]) shape.push_back(source(16));
  return with_policy(std::move(shape), name);
}

}  // namespace ptxmachine
