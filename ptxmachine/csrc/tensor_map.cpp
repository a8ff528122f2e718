// Instructions with which a kernel changes tensor maps: tensormap.replace, tensormap.cp_fenceproxy
// and fence.proxy.tensormap.
//
// The layout of a tensor map that a driver writes is not documented. The machine has its own layout
// of 128 bytes, which is `TensorMap` in machine.h. A kernel must therefore change a map only with
// these instructions. A kernel may also copy a whole map, and may fill a map with zeros before the
// first tensormap.replace.

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {
namespace {

enum class Field : int32_t {
  address,
  rank,
  box,
  size,
  stride,
  element_stride,
  type,
  interleave,
  swizzle,
  fill
};
const std::pair<const char*, Field> kFields[] = {{"global_address", Field::address},
                                                 {"rank", Field::rank},
                                                 {"box_dim", Field::box},
                                                 {"global_dim", Field::size},
                                                 {"global_stride", Field::stride},
                                                 {"element_stride", Field::element_stride},
                                                 {"elemtype", Field::type},
                                                 {"interleave_layout", Field::interleave},
                                                 {"swizzle_mode", Field::swizzle},
                                                 {"fill_mode", Field::fill}};

void read(Warp& w, int lane, int space, uint64_t address, uint8_t* to) {
  for (int at = 0; at < 128; at += 8) {
    const Element e = element_at(w, lane, space, address + at, 8);
    if (!e.ok) fault("uninitialised", "a tensor map has bytes that nothing has written", lane);
    std::memcpy(to + at, &e.bits, 8);
  }
}

void write(Warp& w, int lane, int space, uint64_t address, const uint8_t* from) {
  for (int at = 0; at < 128; at += 8) {
    uint64_t bits;
    std::memcpy(&bits, from + at, 8);
    put_element(w, lane, space, address + at, 8, bits, true);
  }
  w.block->map_fences.erase(address);
}

void set(TensorMap& map, Field field, uint32_t ordinal, uint64_t value, int lane) {
  static const uint8_t bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};  // of an element, by type
  const auto allow = [&](bool good, const char* what) {
    if (!good) fault("out of bounds", std::string(what) + " of a tensor map", lane);
  };
  std::memcpy(map.magic, "ptxm", 4);
  switch (field) {
    case Field::address:
      allow(value % 16 == 0, "an address that is not a multiple of 16");
      map.address = value;
      break;
    case Field::rank:  // the value is the rank minus 1
      allow(value < 5, "a rank above 5");
      map.rank = (uint8_t)(value + 1);
      break;
    case Field::box:
      allow(value >= 1 && value <= 256, "a side of the box that is not 1 to 256");
      map.box[ordinal] = (uint16_t)value;
      break;
    case Field::size:
      map.size[ordinal] = (uint32_t)value;
      break;
    case Field::stride:
      allow(ordinal < 4 && value % 16 == 0, "a stride that is not a multiple of 16");
      allow(value < kStrideEnd, "a stride of 2^40 bytes or more");
      map.stride[ordinal] = value;
      break;
    case Field::element_stride:
      allow(value == 1, "an element stride other than 1");
      break;
    case Field::type:
      allow(value <= 12, "a type that is not 0 to 12");
      map.type = (uint32_t)value, map.element_bytes = bytes[value];
      break;
    case Field::interleave:
      allow(value == 0, "an interleaved layout");
      break;
    case Field::swizzle:
      allow(value <= 3, "a swizzle that is not 0 to 3");
      map.swizzle = value ? (uint8_t)(16 << value) : 0;
      break;
    case Field::fill:
      allow(value <= 1, "a fill mode that is not 0 or 1");
      map.fill_nan = (uint8_t)value;
      break;
  }
}

// tensormap.replace [map]{, ordinal}, value. arg 0: field. arg 1: whether there is an ordinal. arg
// 2: state space.
void replace(Warp& w, const Instr& i, Mask m) {
  const Reg value = i.reg[1 + i.arg[1]];
  w.need(i.reg[0], m, "an address");
  w.need(value, m, "a value for a tensor map");
  each_lane(m, [&](int l) {
    const uint64_t address = w.address(i.reg[0], l, i.offset);
    uint8_t bytes[128];
    TensorMap map;
    read(w, l, i.arg[2], address, bytes);
    std::memcpy(&map, bytes, sizeof(map));
    const uint64_t ordinal = i.arg[1] ? w.get(i.reg[1], l) : 0;
    if (ordinal > 4) fault("out of bounds", "a dimension of a tensor map above 4", l);
    set(map, (Field)i.arg[0], (uint32_t)ordinal, w.get(value, l), l);
    std::memcpy(bytes, &map, sizeof(map));
    write(w, l, i.arg[2], address, bytes);
  });
}

// tensormap.cp_fenceproxy [global], [shared], 128. The warp copies the map once. arg 0: the scope.
void copy_map(Warp& w, const Instr& i, Mask m) {
  w.need(i.reg[0], m, "an address");
  w.need(i.reg[1], m, "an address");
  const int lane = __builtin_ctz(m);
  uint8_t bytes[128];
  read(w, lane, kElementShared, w.address(i.reg[1], lane, i.offsets[1]), bytes);
  w.block->sync_lanes(w, m);
  write(w, lane, kElementGlobal, w.address(i.reg[0], lane, i.offset), bytes);
  w.block->sync_lanes(w, m);
  each_lane(m, [&](int l) { w.block->fence(w, l, (Scope)i.arg[0]); });
}

// fence.proxy.tensormap::generic.acquire [map], 128. arg 0: the scope.
void acquire_map(Warp& w, const Instr& i, Mask m) {
  w.need(i.reg[0], m, "an address");
  each_lane(m, [&](int l) {
    w.block->fence(w, l, (Scope)i.arg[0]);
    w.block->map_fences[w.address(i.reg[0], l, i.offset)] = w.block->now(w, l);
  });
}

void release_map(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) { w.block->fence(w, l, (Scope)i.arg[0]); });
}

}  // namespace

Known decode_tensor_map(Instr& i, const Mnemonic& name, const RawInstr&) {
  i.pipe = Pipe::sync;
  const Slot size = constant(128, 128);
  if (name.base() == "fence") {
    if (!name.has("tensormap::generic")) return kUnknown;
    i.arg[0] = (int)scope_named(name);
    if (name.has("acquire")) return i.run = acquire_map, Shape{address(), size};
    if (name.has("release")) return i.run = release_map, Shape{};
    return kUnknown;
  }
  if (name.has("cp_fenceproxy")) {
    i.aligned = true;
    i.arg[0] = (int)scope_named(name);
    i.run = copy_map;
    return Shape{address(), address(), size};
  }
  const int bits = bits_of(name.last());
  if (!name.has("replace") || (bits != 32 && bits != 64)) return kUnknown;
  bool found = false;
  for (const auto& [text, field] : kFields)
    if (name.has(text)) i.arg[0] = (int)field, found = true;
  if (!found) return kUnknown;
  const Field field = (Field)i.arg[0];
  i.arg[1] = field == Field::box || field == Field::size || field == Field::stride ||
             field == Field::element_stride;
  i.arg[2] = name.any({"shared", "shared::cta"}) ? kElementShared
             : name.has("global")                ? kElementGlobal
                                                 : kElementGeneric;
  i.run = replace;
  if (i.arg[1]) return Shape{address(), source(32), source(bits)};
  return Shape{address(), source(bits)};
}

}  // namespace ptxmachine
