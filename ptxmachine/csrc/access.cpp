// Checks and counts of memory accesses, and the order of strong accesses.

#include "access.h"

namespace ptxmachine {

static const uint8_t nothing_written = 0;
const uint8_t* const kNothing = &nothing_written;

std::mutex strong_accesses;

namespace {

// Whether a write stores the bytes that an unordered write of another thread has already stored.
// Such writes are not a race: several threads may store the same value in any order, and they may
// all store uninitialized values. `value` is as for `reach`.
bool repeats(const Block& b, const Warp& w, int lane, uint32_t offset, uint32_t size,
             const uint8_t* value) {
  const Stamp& last = b.cells[offset / (uint32_t)b.launch->program->granule].write;
  if (!value || last.time == kPending || b.after(w, lane, last)) return false;
  const uint8_t* valid = b.shared_valid.data() + offset;
  if (value == kNothing) return std::all_of(valid, valid + size, [](uint8_t v) { return v == 0; });
  return std::memcmp(b.shared.data() + offset, value, size) == 0;
}

// Counts wavefronts of shared memory. A wavefront serves one word of each of the 32 banks. Lanes
// that access different words of one bank need several wavefronts.
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

// The key of an address in Launch::released. Equal addresses in the shared memory of different
// blocks have different keys.
uint64_t key_of(const Warp& w, const Instr& i, uint64_t address) {
  const bool shared = (Space)i.arg[0] == Space::shared || (address & kWindowMask) == kSharedWindow;
  return shared ? kSharedWindow | (uint64_t)(w.block->number + 1) << 20 | (address & 0xfffff)
                : address;
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
        Stamp stamp = b.now(w, lane);
        stamp.scope = scope;
        b.note_read(w, lane, o, size, stamp);
      } else if (b.launch->options.races && !repeats(b, w, lane, o, size, value)) {
        Stamp stamp = b.now(w, lane);
        stamp.scope = scope;
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
  b.note_global(w, lane, *a, address, size, write, scope);
  return {a->host + (address - a->begin),
          a->valid.empty() ? nullptr : a->valid.data() + (address - a->begin)};
}

void count(Warp& w, const Instr& i, Mask m, const uint64_t* address, uint32_t size) {
  if (!w.block->launch->options.count || m == 0) return;
  if (i.pipe == Pipe::global) count_global(*w.block, m, address, size);
  if (i.pipe == Pipe::shared) count_shared(*w.block, m, address, size);
}

int32_t order_of(const Mnemonic& name, bool strong) {
  int32_t order = strong ? kRelaxed : kWeak;
  if (name.any({"acq_rel", "acquire"})) order |= kRelaxed | kAcquire;
  if (name.any({"acq_rel", "release"})) order |= kRelaxed | kRelease;
  return order && scope_named(name) == Scope::block ? order | kOfBlock : order;
}

void acquire_at(Warp& w, const Instr& i, int lane, uint64_t address) {
  w.block->observe(w, lane, key_of(w, i, address), scope_of(i), i.arg[2] & kAcquire);
}

void release_at(Warp& w, const Instr& i, int lane, uint64_t address, bool reads) {
  w.block->publish(w, lane, key_of(w, i, address), scope_of(i), i.arg[2] & kRelease, reads);
}

void set_space(Instr& i, const Mnemonic& name) {
  Space space = Space::generic;
  if (name.any({"global", "const"})) space = Space::global;
  if (name.any({"shared", "shared::cta", "shared::cluster"})) space = Space::shared;
  if (name.has("local")) space = Space::local;
  if (name.any({"param", "param::entry"})) space = Space::param;
  i.arg[0] = (int)space;
  i.pipe = space == Space::shared || space == Space::local ? Pipe::shared
           : space == Space::param                         ? Pipe::alu
                                                           : Pipe::global;
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
