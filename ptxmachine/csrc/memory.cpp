// Loads and stores, and hints such as prefetch, which have no effect.

#include "access.h"

namespace ptxmachine {
namespace {

uint64_t sign_extended(Type type, uint64_t bits) {
  switch (type) {
    case Type::s8:
      return (uint64_t)(int64_t)(int8_t)bits;
    case Type::s16:
      return (uint64_t)(int64_t)(int16_t)bits;
    case Type::s32:
      return (uint64_t)(int64_t)(int32_t)bits;
    default:
      return bits;
  }
}

// ld. arg 0: state space. arg 1: the number of elements. arg 2: Order flags. The register of the
// address comes after the registers of the elements.
void load(Warp& w, const Instr& i, Mask m) {
  const int n = i.arg[1];
  const uint32_t size = (uint32_t)bytes_of(i.type);
  w.need(i.reg[n], m, "an address");
  uint64_t address[kLanes];
  uint8_t valid[16][kLanes];
  each_lane(m, [&](int l) {
    address[l] = w.address(i.reg[n], l, i.offset);
    const Place p = reach(w, l, (Space)i.arg[0], address[l], size * n, false, scope_of(i));
    std::unique_lock<std::mutex> guard(strong_accesses, std::defer_lock);
    if (i.arg[2]) guard.lock(), acquire_at(w, i, l, address[l]);
    for (int e = 0; e < n; ++e) {
      uint64_t bits = 0;
      std::memcpy(&bits, p.at + e * size, size);
      uint8_t ok = 0xff;
      for (uint32_t k = 0; p.valid && k < size; ++k)
        if (!p.valid[e * size + k]) ok &= (uint8_t)~(1u << k);
      // An element that is narrower than its register is extended to the register. If one byte of
      // such an element is invalid, all bytes of the register are invalid.
      if (i.reg[e].id >= 0 && 8 * size != i.reg[e].bits && ok != 0xff) ok = 0;
      valid[e][l] = ok;
      if (i.reg[e].id >= 0) w.set(i.reg[e], l, sign_extended(i.type, bits));
    }
  });
  for (int e = 0; e < n; ++e)
    if (i.reg[e].id >= 0) w.wrote_bytes(i.reg[e], m, valid[e]);
  count(w, i, m, address, size * n);
}

// Returns the lanes whose stores take effect. If several lanes of an instruction store to one
// address, PTX does not define which value is stored. An odd seed chooses the last of these lanes,
// and an even seed the first. Each other lane with a different value adds one to
// Counts::conflicting_stores. Local memory is private to a lane, so no lanes conflict there.
Mask winners(Warp& w, const Instr& i, Mask m, const uint64_t* address) {
  const bool local = (Space)i.arg[0] == Space::local ||
                     ((Space)i.arg[0] == Space::generic &&
                      (address[__builtin_ctz(m)] & kWindowMask) == kLocalWindow);
  if (local) return m;
  uint64_t sorted[kLanes];
  int n = 0;
  each_lane(m, [&](int l) { sorted[n++] = address[l]; });
  std::sort(sorted, sorted + n);
  if (std::adjacent_find(sorted, sorted + n) == sorted + n) return m;
  Mask kept = 0;
  const bool last = w.block->launch->options.seed % 2 == 1;
  each_lane(m, [&](int l) {
    bool wins = true;
    each_lane(m & ~(1u << l), [&](int k) {
      if (address[k] != address[l] || (last ? k < l : k > l) || !wins) return;
      wins = false;
      for (int e = 0; e < i.arg[1]; ++e)
        if (w.get(i.reg[e + 1], l) != w.get(i.reg[e + 1], k)) {
          ++w.block->counts.conflicting_stores;
          break;
        }
    });
    kept |= (Mask)wins << l;
  });
  return kept;
}

// st. The first register is the address. arg 0, 1 and 2 have the same meaning as for ld.
void store(Warp& w, const Instr& i, Mask m) {
  const int n = i.arg[1];
  const uint32_t size = (uint32_t)bytes_of(i.type);
  w.need(i.reg[0], m, "an address");
  uint64_t address[kLanes];
  uint8_t value[64];
  each_lane(m, [&](int l) { address[l] = w.address(i.reg[0], l, i.offset); });
  each_lane(winners(w, i, m, address), [&](int l) {
    bool all = true, any = false;
    for (int e = 0; e < n; ++e) {
      const uint64_t bits = w.get(i.reg[e + 1], l);
      std::memcpy(value + e * size, &bits, size);
      all = all && w.ok(i.reg[e + 1]) >> l & 1;
      any = any || w.valid_bytes(i.reg[e + 1], l);
    }
    const Place p = reach(w, l, (Space)i.arg[0], address[l], size * n, true, scope_of(i),
                          any ? value : kNothing);
    if (!all && i.pipe == Pipe::global)
      for (int e = 0; e < n; ++e)
        w.need(i.reg[e + 1], 1u << l, "a value that is stored to global memory");
    std::unique_lock<std::mutex> guard(strong_accesses, std::defer_lock);
    if (i.arg[2]) guard.lock(), release_at(w, i, l, address[l], false);
    std::memcpy(p.at, value, size * n);
    for (uint32_t at = 0; p.valid && at < size * n; ++at)
      p.valid[at] = w.valid_bytes(i.reg[at / size + 1], l) >> (at % size) & 1;
  });
  count(w, i, m, address, size * n);
}

}  // namespace

Known decode_memory(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  const std::string& base = name.base();
  i.type = name.last();
  if (base == "ld" || base == "st" || base == "ldu") {
    const int bits = bits_of(i.type);
    set_space(i, name);
    i.arg[1] = name.has("v2") ? 2 : name.has("v4") ? 4 : name.has("v8") ? 8 : 1;
    i.arg[2] = order_of(name, name.any({"volatile", "relaxed", "mmio"}));
    i.run = base == "st" ? store : load;
    if (bits < 8 || bits > 64 || bits * i.arg[1] > 256) return kUnknown;
    // The register of an element may be wider than the element.
    if (base == "st")
      return with_policy({address(), vector(i.arg[1], source(bits).or_more())}, name);
    return with_policy({vector(i.arg[1], result(bits).or_more().or_sink()), address()}, name);
  }
  i.run = nothing, i.pipe = Pipe::control;
  if (base == "prefetch" || base == "prefetchu") return with_policy({address()}, name);
  return Shape{address(), constant(128, 128)};
}

}  // namespace ptxmachine
