// Checks and counts of memory accesses, and the order of strong accesses.

#include "access.h"

namespace ptxmachine {

static const uint8_t nothing_written = 0;
const uint8_t* const kNothing = &nothing_written;

std::mutex strong_accesses;

namespace {

// Returns whether a write stores the same bytes that another thread has already stored with an
// unordered write. Such writes are not a race: several threads may store the same value in any
// order, and they may all store uninitialized values. `value` has the meaning that it has in
// `reach`.
bool repeats(const Block& b, const Warp& w, int lane, uint32_t offset, uint32_t size,
             const uint8_t* value) {
  const Stamp& last = b.cells[offset / (uint32_t)b.launch->program->granule].write;
  if (!value || last.time == kPending || b.after(w, lane, last)) return false;
  const uint8_t* valid = b.shared_valid.data() + offset;
  if (value == kNothing) return std::all_of(valid, valid + size, [](uint8_t v) { return v == 0; });
  return std::memcmp(b.shared.data() + offset, value, size) == 0;
}

// Counts wavefronts of shared memory. In one wavefront, each of the 32 banks serves one word. Lanes
// that access different words of the same bank need several wavefronts.
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

// Returns the state space of an address: `space`, or for a generic address the space of its window.
Space space_of(Space space, uint64_t address) {
  if (space != Space::generic) return space;
  const uint64_t window = address & kWindowMask;
  return window == kSharedWindow  ? Space::cluster
         : window == kLocalWindow ? Space::local
         : window == kParamWindow ? Space::param
                                  : Space::global;
}

// Returns the key of an address in Launch::released. Equal addresses in the shared memory of
// different blocks have different keys.
uint64_t key_of(const Warp& w, const Instr& i, int lane, uint64_t address) {
  const Space space = space_of((Space)i.arg[0], address);
  if (space != Space::shared && space != Space::cluster) return address;
  const Block& b = w.block->cluster->home(w, lane, address);
  return kSharedWindow | (uint64_t)(b.number + 1) << 20 | (address & 0xfffff);
}

}  // namespace

// Counts the sectors of 32 bytes that a warp touches, and the fewest sectors that could hold as
// many bytes.
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

Place reach(Warp& w, int lane, Space space, uint64_t address, uint32_t size, bool write,
            Scope scope, const uint8_t* value) {
  Block& b = *w.block;
  w.lane = lane, w.lane_at = w.executed;
  space = space_of(space, address);
  if (space != Space::global) address &= ~kWindowMask;
  switch (space) {
    case Space::shared:
    case Space::cluster: {
      Block& home = space == Space::cluster ? b.cluster->home(w, lane, address) : b;
      if (space == Space::cluster) address = in_block(address);
      const uint32_t o = home.shared_offset(address, size, size);
      uint8_t* at = home.shared.data() + o;
      if (!write) {
        home.note_read(w, lane, o, size, b.now(w, lane, scope));
      } else if (b.launch->options.races && !repeats(home, w, lane, o, size, value)) {
        home.note_write(w, lane, o, size, b.now(w, lane, scope));
      }
      return {at, home.shared_valid.data() + o};
    }
    case Space::local: {
      std::vector<uint8_t>& memory = b.local[(size_t)(w.index * kLanes + lane)];
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
  b.note_global(w, lane, *a, address, size, write, scope);
  return {a->host + (address - a->begin),
          a->valid.empty() ? nullptr : a->valid.data() + (address - a->begin)};
}

void count(Warp& w, const Instr& i, Mask m, const uint64_t* address, uint32_t size) {
  if (!w.block->launch->options.count || m == 0) return;
  if (i.pipe == Pipe::shared) return count_shared(*w.block, m, address, size);
  if (i.pipe != Pipe::global) return;
  if ((Space)i.arg[0] == Space::global) return count_global(*w.block, m, address, size);
  // With generic addresses, some lanes may access global memory and others shared memory.
  Mask global = 0, shared = 0;
  each_lane(m, [&](int l) {
    const Space space = space_of((Space)i.arg[0], address[l]);
    if (space == Space::global) global |= 1u << l;
    if (space == Space::cluster) shared |= 1u << l;
  });
  if (global) count_global(*w.block, global, address, size);
  if (shared) count_shared(*w.block, shared, address, size);
}

int32_t order_of(const Mnemonic& name, bool strong) {
  int32_t order = strong ? kRelaxed : kWeak;
  if (name.any({"acq_rel", "acquire"})) order |= kRelaxed | kAcquire;
  if (name.any({"acq_rel", "release"})) order |= kRelaxed | kRelease;
  return order ? order | (int)scope_named(name) << kScopeShift : kWeak;
}

void acquire_at(Warp& w, const Instr& i, int lane, uint64_t address) {
  w.block->observe(w, lane, key_of(w, i, lane, address), scope_of(i), i.arg[2] & kAcquire);
}

void release_at(Warp& w, const Instr& i, int lane, uint64_t address, bool reads) {
  w.block->publish(w, lane, key_of(w, i, lane, address), scope_of(i), i.arg[2] & kRelease, reads);
}

void set_space(Instr& i, const Mnemonic& name) {
  Space space = Space::generic;
  if (name.any({"global", "const"})) space = Space::global;
  if (name.any({"shared", "shared::cta"})) space = Space::shared;
  if (name.has("shared::cluster")) space = Space::cluster;
  if (name.has("local")) space = Space::local;
  if (name.any({"param", "param::entry"})) space = Space::param;
  i.arg[0] = (int)space;
  const bool shared = space == Space::shared || space == Space::cluster || space == Space::local;
  i.pipe = shared ? Pipe::shared : space == Space::param ? Pipe::alu : Pipe::global;
}

Element element_at(Warp& w, int lane, int space, uint64_t address, uint32_t size) {
  const Place p = reach(w, lane, (Space)space, address, size, false, Scope::weak);
  Element e = {0, !p.valid || all_valid(p.valid, size)};
  std::memcpy(&e.bits, p.at, size);
  return e;
}

void put_element(Warp& w, int lane, int space, uint64_t address, uint32_t size, uint64_t bits,
                 bool ok) {
  const Place p =
      reach(w, lane, (Space)space, address, size, true, Scope::weak, (const uint8_t*)&bits);
  if (!ok && space == kElementGlobal)
    fault("uninitialised", "a fragment stores to global memory", lane);
  std::memcpy(p.at, &bits, size);
  if (p.valid) std::memset(p.valid, ok, size);
}

}  // namespace ptxmachine
