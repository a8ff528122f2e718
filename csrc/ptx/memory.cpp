// Loads, stores, atomics, and the matrix loads and stores of shared memory.

#include "decode.h"
#include "lanes.h"

namespace fastbert::ptx {

// Sectors of 32 bytes that a warp touches, and the fewest that hold as many bytes.
void count_global(Block& b, Mask m, const uint64_t* address, uint32_t size) {
  uint64_t sectors[kLanes * 4];
  int n = 0;
  each_lane(m, [&](int l) {
    for (uint64_t s = address[l] / 32; s <= (address[l] + size - 1) / 32; ++s) sectors[n++] = s;
  });
  std::sort(sectors, sectors + n);
  const uint64_t lanes_on = (uint64_t)__builtin_popcount(m);
  b.counts.global_sectors += (uint64_t)(std::unique(sectors, sectors + n) - sectors);
  b.counts.global_bytes += lanes_on * size;
  b.counts.global_least_sectors += (lanes_on * size + 31) / 32;
}

namespace {

enum class Space : int32_t { generic, global, shared, local, param };

// Stands for a value of which no byte is valid.
const uint8_t nothing_written = 0;
const uint8_t* const kNothing = &nothing_written;

struct Place {
  uint8_t* at;
  uint8_t* valid;  // null: all bytes are
};

// Whether a write leaves the place as another thread has made it without being ordered after:
// threads may write the same value, or all of them a value that nobody has written, in any order.
// value is null where the write changes what it finds, and kNothing where no byte of it is valid.
bool repeats(const Block& b, const Warp& w, int lane, uint32_t offset, uint32_t size,
             const uint8_t* value) {
  const Stamp& last = b.cells[offset / (uint32_t)b.launch->program->granule].write;
  if (!value || last.time == kPending || b.after(w, lane, last)) return false;
  const uint8_t* valid = b.shared_valid.data() + offset;
  if (value == kNothing) return std::all_of(valid, valid + size, [](uint8_t v) { return v == 0; });
  return std::memcmp(b.shared.data() + offset, value, size) == 0;
}

// The place of an access after all checks; notes it for the races.
Place reach(Warp& w, int lane, Space space, uint64_t address, uint32_t size, bool write,
            bool atomic, const uint8_t* value = nullptr) {
  Block& b = *w.block;
  w.lane = lane, w.lane_at = w.executed;
  if (space == Space::generic) {
    const uint64_t window = address & kWindowMask;
    space = window == kSharedWindow  ? Space::shared
            : window == kLocalWindow ? Space::local
            : window == kParamWindow ? Space::param
                                     : Space::global;
  }
  if (space != Space::global) address &= ~kWindowMask;
  switch (space) {
    case Space::shared: {
      const uint32_t o = b.shared_offset(address, size, size);
      uint8_t* at = b.shared.data() + o;
      if (!write) {
        b.note_read(w, lane, o, size, b.now(w, lane));
      } else if (b.launch->options.races && !repeats(b, w, lane, o, size, value)) {
        Stamp stamp = b.now(w, lane);
        stamp.atomic = atomic;
        b.note_write(w, lane, o, size, stamp);
      }
      return {at, b.shared_valid.data() + o};
    }
    case Space::local: {
      std::vector<uint8_t>& memory = b.local[w.thread(lane)];
      const uint64_t half = memory.size() / 2;
      if (address + size > half)
        fault("out of bounds", "local memory has " + std::to_string(half) + " bytes", lane);
      if (address % size) fault("misaligned", "local address " + std::to_string(address), lane);
      return {memory.data() + address, memory.data() + half + address};
    }
    case Space::param: {
      std::vector<uint8_t>& params = b.launch->params;
      if (write || address + size > params.size())
        fault("out of bounds", "parameter byte " + std::to_string(address), lane);
      return {params.data() + address, nullptr};
    }
    default:
      break;
  }
  Allocation* a = b.global(w, address, size, size, write);
  b.note_global(w, lane, *a, address, size, write, atomic);
  return {a->host + (address - a->begin),
          a->valid.empty() ? nullptr : a->valid.data() + (address - a->begin)};
}

// Wavefronts of shared memory: a phase serves 128 bytes; lanes that ask for other words of one of
// the 32 banks wait for the next.
void count_shared(Block& b, Mask m, const uint64_t* address, uint32_t size) {
  const int group = size <= 4 ? 32 : size == 8 ? 16 : 8;
  for (int first = 0; first < kLanes; first += group) {
    std::array<std::vector<uint64_t>, 32> banks;
    size_t most = 0;
    uint64_t words = 0;
    for (int l = first; l < first + group; ++l) {
      if (!(m >> l & 1)) continue;
      for (uint64_t word = address[l] / 4; word <= (address[l] + size - 1) / 4; ++word) {
        std::vector<uint64_t>& bank = banks[word % 32];
        if (std::find(bank.begin(), bank.end(), word) != bank.end()) continue;
        bank.push_back(word), ++words;
        most = std::max(most, bank.size());
      }
    }
    b.counts.shared_wavefronts += most;
    b.counts.shared_least_wavefronts += (words + 31) / 32;
  }
}

void count(Warp& w, const Instr& i, Mask m, const uint64_t* address, uint32_t size) {
  if (!w.block->launch->options.count || m == 0) return;
  if (i.pipe == Pipe::global) count_global(*w.block, m, address, size);
  if (i.pipe == Pipe::shared) count_shared(*w.block, m, address, size);
}

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

// The order of a strong access; 0 stands for a weak one.
enum Order : int32_t { kWeak = 0, kRelaxed = 1, kAcquire = 2, kRelease = 4 };

int32_t order_of(const Mnemonic& name, bool strong) {
  if (name.has("acq_rel")) return kRelaxed | kAcquire | kRelease;
  if (name.has("acquire")) return kRelaxed | kAcquire;
  if (name.has("release")) return kRelaxed | kRelease;
  return strong ? kRelaxed : kWeak;
}

// Strong accesses of all blocks happen one after another, together with what they pass on.
std::mutex atomics;

// The place of a strong access; shared memory is told apart by its block.
uint64_t key_of(const Warp& w, const Instr& i, uint64_t address) {
  const bool shared = (Space)i.arg[0] == Space::shared || (address & kWindowMask) == kSharedWindow;
  return shared ? kSharedWindow | (uint64_t)(w.block->number + 1) << 20 | (address & 0xfffff)
                : address;
}

void acquire_at(Warp& w, const Instr& i, int lane, uint64_t address) {
  w.block->observe(w, lane, key_of(w, i, address), i.arg[2] & kAcquire);
}

void release_at(Warp& w, const Instr& i, int lane, uint64_t address, bool reads) {
  w.block->publish(w, lane, key_of(w, i, address), i.arg[2] & kRelease, reads);
}

// ld: arg 0 space, 1 elements, 2 order; the address follows the registers of the elements.
void load(Warp& w, const Instr& i, Mask m) {
  const int n = i.arg[1];
  const uint32_t size = (uint32_t)bytes_of(i.type);
  w.need(i.reg[n], m, "an address");
  uint64_t address[kLanes];
  uint8_t valid[16][kLanes];
  each_lane(m, [&](int l) {
    address[l] = w.get(i.reg[n], l) + (uint64_t)i.offset;
    const Place p = reach(w, l, (Space)i.arg[0], address[l], size * n, false, i.arg[2] != 0);
    std::unique_lock<std::mutex> guard(atomics, std::defer_lock);
    if (i.arg[2]) guard.lock(), acquire_at(w, i, l, address[l]);
    for (int e = 0; e < n; ++e) {
      uint64_t bits = 0;
      std::memcpy(&bits, p.at + e * size, size);
      uint8_t ok = 0xff;
      for (uint32_t k = 0; p.valid && k < size; ++k)
        if (!p.valid[e * size + k]) ok &= (uint8_t)~(1u << k);
      // In a register that is wider than the element, all bytes come from all of the element.
      if (i.reg[e].id >= 0 && 8 * size != i.reg[e].bits && ok != 0xff) ok = 0;
      valid[e][l] = ok;
      if (i.reg[e].id >= 0) w.set(i.reg[e], l, sign_extended(i.type, bits));
    }
  });
  for (int e = 0; e < n; ++e)
    if (i.reg[e].id >= 0) w.wrote_bytes(i.reg[e], m, valid[e]);
  count(w, i, m, address, size * n);
}

// Of lanes that write to one address in one instruction, which one wins is not defined: the seed
// chooses the first or the last. Returns the winners, and counts the losers with another value.
// Each lane has local memory of its own.
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

// st: the address comes first; arg 0 to 2 as for ld.
void store(Warp& w, const Instr& i, Mask m) {
  const int n = i.arg[1];
  const uint32_t size = (uint32_t)bytes_of(i.type);
  w.need(i.reg[0], m, "an address");
  uint64_t address[kLanes];
  uint8_t value[64];
  each_lane(m, [&](int l) { address[l] = w.get(i.reg[0], l) + (uint64_t)i.offset; });
  each_lane(winners(w, i, m, address), [&](int l) {
    bool all = true, any = false;
    for (int e = 0; e < n; ++e) {
      const uint64_t bits = w.get(i.reg[e + 1], l);
      std::memcpy(value + e * size, &bits, size);
      all = all && w.ok(i.reg[e + 1]) >> l & 1;
      any = any || w.valid_bytes(i.reg[e + 1], l);
    }
    const Place p = reach(w, l, (Space)i.arg[0], address[l], size * n, true, i.arg[2] != 0,
                          any ? value : kNothing);
    if (!all && i.pipe == Pipe::global)
      for (int e = 0; e < n; ++e)
        w.need(i.reg[e + 1], 1u << l, "a value that is stored to global memory");
    std::unique_lock<std::mutex> guard(atomics, std::defer_lock);
    if (i.arg[2]) guard.lock(), release_at(w, i, l, address[l], false);
    std::memcpy(p.at, value, size * n);
    for (uint32_t at = 0; p.valid && at < size * n; ++at)
      p.valid[at] = w.valid_bytes(i.reg[at / size + 1], l) >> (at % size) & 1;
  });
  count(w, i, m, address, size * n);
}

// Atomics
// ------------------------------------------------------------------------------------------

enum class Atom : int32_t { add, min, max, inc, dec, exch, cas, and_, or_, xor_ };

template <class T>
T combined(Atom op, T old, T b, T c) {
  switch (op) {
    case Atom::add:
      return old + b;
    case Atom::min:
      return b < old ? b : old;
    case Atom::max:
      return old < b ? b : old;
    case Atom::exch:
      return b;
    case Atom::cas:
      return old == b ? c : old;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case Atom::inc:
        return old >= b ? 0 : old + 1;
      case Atom::dec:
        return old == 0 || old > b ? b : old - 1;
      case Atom::and_:
        return old & b;
      case Atom::or_:
        return old | b;
      case Atom::xor_:
        return old ^ b;
      default:
        break;
    }
  }
  return old;
}

uint64_t combined(Type type, Atom op, uint64_t old, uint64_t b, uint64_t c) {
  switch (type) {
    case Type::f32:
      return bits_as<uint32_t>(combined<float>(op, bits_as<float>((uint32_t)old),
                                               bits_as<float>((uint32_t)b),
                                               bits_as<float>((uint32_t)c)));
    case Type::f64:
      return bits_as<uint64_t>(
          combined<double>(op, bits_as<double>(old), bits_as<double>(b), bits_as<double>(c)));
    case Type::s32:
      return (uint32_t)combined<int32_t>(op, (int32_t)old, (int32_t)b, (int32_t)c);
    case Type::s64:
      return (uint64_t)combined<int64_t>(op, (int64_t)old, (int64_t)b, (int64_t)c);
    case Type::u64:
    case Type::b64:
      return combined<uint64_t>(op, old, b, c);
    case Type::b16:
    case Type::u16:
      return (uint16_t)combined<uint16_t>(op, (uint16_t)old, (uint16_t)b, (uint16_t)c);
    case Type::f16:
      return to_half(combined<double>(op, to_float(Half{(uint16_t)old}),
                                      to_float(Half{(uint16_t)b}), 0))
          .bits;
    case Type::bf16:
      return to_brain(combined<double>(op, to_float(Brain{(uint16_t)old}),
                                       to_float(Brain{(uint16_t)b}), 0))
          .bits;
    case Type::f16x2:
    case Type::bf16x2: {
      const Type half = type == Type::f16x2 ? Type::f16 : Type::bf16;
      return combined(half, op, old & 0xffff, b & 0xffff, 0) |
             combined(half, op, old >> 16, b >> 16, 0) << 16;
    }
    default:
      return (uint32_t)combined<uint32_t>(op, (uint32_t)old, (uint32_t)b, (uint32_t)c);
  }
}

// atom and red: arg 1 elements, each of which is one atomic operation; arg 2 order; arg 3
// operation, 4 whether it returns the old values. Registers: old values, address, b, c.
void atomic(Warp& w, const Instr& i, Mask m) {
  const uint32_t size = (uint32_t)bytes_of(i.type);
  const int n = i.arg[1];
  const Reg* source = i.reg + (i.arg[4] ? n : 0);
  w.need(source[0], m, "an address");
  for (int e = 0; e < n; ++e) w.need(source[1 + e], m, "an operand of an atomic");
  const Atom op = (Atom)i.arg[3];
  Mask valid[8] = {};
  each_lane(m, [&](int l) {
    const uint64_t address = w.get(source[0], l) + (uint64_t)i.offset;
    const Place p = reach(w, l, (Space)i.arg[0], address, size * n, true, true);
    std::lock_guard<std::mutex> guard(atomics);
    acquire_at(w, i, l, address);
    for (int e = 0; e < n; ++e) {
      uint64_t old = 0;
      std::memcpy(&old, p.at + e * size, size);
      valid[e] |= (Mask)(!p.valid || all_valid(p.valid + e * size, size)) << l;
      const uint64_t next = combined(i.type, op, old, w.get(source[1 + e], l),
                                     op == Atom::cas ? w.get(source[2], l) : 0);
      std::memcpy(p.at + e * size, &next, size);
      if (i.arg[4] && i.reg[e].id >= 0) w.set(i.reg[e], l, old);
    }
    release_at(w, i, l, address, true);
  });
  for (int e = 0; e < n; ++e)
    if (i.arg[4] && i.reg[e].id >= 0) w.wrote(i.reg[e], m, valid[e]);
}

// ldmatrix, stmatrix
// ------------------------------------------------------------------------------- Lane 8 j + r
// gives the address of row r of matrix j; lane l holds elements 2 (l % 4) and its neighbour of row
// l / 4, or of column l / 4 when transposed.

// arg 0 matrices, 1 transposed
void load_matrix(Warp& w, const Instr& i, Mask m) {
  Block& b = *w.block;
  const int n = i.arg[0];
  const Reg base = i.reg[n];
  w.need(base, n == 4 ? m : m & ((1u << (8 * n)) - 1), "an address");
  uint64_t address[kLanes] = {};
  for (int j = 0; j < n; ++j) {
    const uint8_t* row[8];
    const uint8_t* ok[8];
    for (int r = 0; r < 8; ++r) {
      const int l = 8 * j + r;
      address[l] = w.get(base, l) + (uint64_t)i.offset;
      const uint32_t o = b.shared_offset(address[l], 16, 16);
      b.note_read(w, l, o, 16, b.now(w, l));
      row[r] = b.shared.data() + o, ok[r] = b.shared_valid.data() + o;
    }
    Mask valid = 0;
    for (int l = 0; l < kLanes; ++l) {
      uint32_t value = 0;
      bool all = true;
      for (int e = 0; e < 2; ++e) {
        const int r = i.arg[1] ? 2 * (l % 4) + e : l / 4, c = i.arg[1] ? l / 4 : 2 * (l % 4) + e;
        uint16_t x;
        std::memcpy(&x, row[r] + 2 * c, 2);
        all = all && ok[r][2 * c] && ok[r][2 * c + 1];
        value |= (uint32_t)x << (16 * e);
      }
      w.set(i.reg[j], l, value);
      valid |= (Mask)all << l;
    }
    w.wrote(i.reg[j], kAll, valid);
  }
  count(w, i, n == 4 ? kAll : (1u << (8 * n)) - 1, address, 16);
}

void store_matrix(Warp& w, const Instr& i, Mask m) {
  const int n = i.arg[0];
  w.need(i.reg[0], n == 4 ? m : m & ((1u << (8 * n)) - 1), "an address");
  uint64_t address[kLanes] = {};
  for (int j = 0; j < n; ++j) {
    uint8_t data[8][16], ok[8][16];
    for (int l = 0; l < kLanes; ++l)
      for (int e = 0; e < 2; ++e) {
        const int r = i.arg[1] ? 2 * (l % 4) + e : l / 4, c = i.arg[1] ? l / 4 : 2 * (l % 4) + e;
        const uint16_t x = (uint16_t)(w.word(i.reg[j + 1])[l] >> (16 * e));
        std::memcpy(data[r] + 2 * c, &x, 2);
        ok[r][2 * c] = ok[r][2 * c + 1] = w.ok(i.reg[j + 1]) >> l & 1;
      }
    for (int r = 0; r < 8; ++r) {
      const int l = 8 * j + r;
      address[l] = w.get(i.reg[0], l) + (uint64_t)i.offset;
      const Place p = reach(w, l, Space::shared, address[l], 16, true, false, data[r]);
      std::memcpy(p.at, data[r], 16);
      std::memcpy(p.valid, ok[r], 16);
    }
  }
  count(w, i, n == 4 ? kAll : (1u << (8 * n)) - 1, address, 16);
}

bool space_of(Instr& i, const Mnemonic& name) {
  Space space = Space::generic;
  if (name.any({"global", "const"})) space = Space::global;
  if (name.any({"shared", "shared::cta", "shared::cluster"})) space = Space::shared;
  if (name.has("local")) space = Space::local;
  if (name.any({"param", "param::entry"})) space = Space::param;
  i.arg[0] = (int)space;
  i.pipe = space == Space::shared || space == Space::local ? Pipe::shared
           : space == Space::param                         ? Pipe::alu
                                                           : Pipe::global;
  return true;
}

}  // namespace

void reduce_element(Type type, int32_t op, uint8_t* to, uint64_t value) {
  uint64_t old = 0;
  const size_t size = (size_t)bytes_of(type);
  std::lock_guard<std::mutex> guard(atomics);
  std::memcpy(&old, to, size);
  const uint64_t next = combined(type, (Atom)op, old, value, 0);
  std::memcpy(to, &next, size);
}

int32_t reduction_of(const Mnemonic& name) {
  static const std::pair<const char*, Atom> ops[] = {
      {"add", Atom::add}, {"min", Atom::min},   {"max", Atom::max}, {"inc", Atom::inc},
      {"dec", Atom::dec}, {"exch", Atom::exch}, {"cas", Atom::cas}, {"and", Atom::and_},
      {"or", Atom::or_},  {"xor", Atom::xor_}};
  for (const auto& [text, op] : ops)
    if (name.has(text)) return (int32_t)op;
  return -1;
}

Element element_at(Warp& w, int lane, int space, uint64_t address, uint32_t size) {
  const Place p = reach(w, lane, (Space)space, address, size, false, false);
  Element e = {0, !p.valid || all_valid(p.valid, size)};
  std::memcpy(&e.bits, p.at, size);
  return e;
}

void put_element(Warp& w, int lane, int space, uint64_t address, uint32_t size, uint64_t bits,
                 bool ok) {
  const Place p = reach(w, lane, (Space)space, address, size, true, false, (const uint8_t*)&bits);
  if (!ok && space == kElementGlobal)
    fault("uninitialised", "a fragment stores to global memory", lane);
  std::memcpy(p.at, &bits, size);
  if (p.valid) std::memset(p.valid, ok, size);
}

bool decode_memory(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  const std::string& base = name.base();
  i.type = name.last();
  if (base == "ld" || base == "st" || base == "ldu") {
    space_of(i, name);
    i.arg[1] = name.has("v2") ? 2 : name.has("v4") ? 4 : name.has("v8") ? 8 : 1;
    // An element in braces of its own, as { %r1 }, is a vector of one.
    const size_t data = base == "st" ? 1 : 0;
    if (raw.operands.size() != 2) return false;
    const int given = raw.operands[data].kind == 'v' ? (int)raw.operands[data].parts.size() : 1;
    if (given != i.arg[1]) return false;
    i.arg[2] = order_of(name, name.any({"volatile", "relaxed", "mmio"}));
    i.run = base == "st" ? store : load;
    return i.type != Type::none && i.type != Type::b128;
  }
  if (base == "atom" || base == "red") {
    if (name.has("async")) return false;
    space_of(i, name);
    i.arg[3] = reduction_of(name);
    i.arg[1] = name.has("v2") ? 2 : name.has("v4") ? 4 : name.has("v8") ? 8 : 1;
    i.arg[2] = order_of(name, true);
    i.arg[4] = base == "atom";
    i.run = atomic;
    return i.arg[3] >= 0;
  }
  if (base == "ldmatrix" || base == "stmatrix") {
    if (!name.has("b16") || !name.has("m8n8")) return false;
    i.arg[0] = name.has("x4") ? 4 : name.has("x2") ? 2 : 1;
    i.arg[1] = name.has("trans");
    i.aligned = true;
    i.pipe = Pipe::shared;
    i.run = base == "ldmatrix" ? load_matrix : store_matrix;
    return true;
  }
  if (base == "prefetch" || base == "prefetchu" || base == "discard" || base == "applypriority") {
    i.run = nothing, i.pipe = Pipe::control;
    return true;
  }
  return false;
}

}  // namespace fastbert::ptx
