// The happens-before order: vector clocks of threads, and the accesses that the clocks order.
//
// Each thread has a time, which grows when the thread releases at a barrier, an arrival or a
// warp-level synchronisation. Each thread also has a vector clock: for each other thread, the
// latest time that it has acquired. Each access is stamped with its thread and time. An access is
// ordered after an earlier access if its thread has acquired the time of the earlier access
// (Flanagan and Freund 2009, FastTrack). `fenced` is the vector clock of the writes that the last
// proxy fence has made visible to the asynchronous proxy.

#include "machine.h"

namespace ptxmachine {

void fault(const char* kind, const std::string& what, int lane) {
  Fault f(kind, what);
  f.lane = lane;
  throw f;
}

namespace {

std::string place(uint32_t offset, uint32_t base) {
  return "shared memory at byte " + std::to_string(offset + base);
}

Clock joined(const Clock& a, const Clock& b) {
  if (a == b) return a;
  auto result = std::make_shared<Times>(*a);
  for (size_t t = 0; t < result->size(); ++t) (*result)[t] = std::max((*result)[t], (*b)[t]);
  return result;
}

}  // namespace

Knowledge joined(const Knowledge& a, const Knowledge& b) {
  if (!a || !b || a == b) return a ? a : b;
  auto result = std::make_shared<std::map<uint32_t, Clock>>(*a);
  for (const auto& [cluster, clock] : *b) {
    const auto [it, fresh] = result->try_emplace(cluster, clock);
    if (!fresh) it->second = joined(it->second, clock);
  }
  return result;
}

Scope Block::between(const Stamp& a, const Stamp& b) const {
  if (a.cluster != b.cluster || a.cluster == kMany) return Scope::device;
  const uint32_t entries = launch->entries();
  return a.thread / entries == b.thread / entries ? Scope::block : Scope::cluster;
}

bool Block::after(const Warp& w, int lane, const Stamp& s) const {
  if (s.cluster == 0) return true;
  if (s.time == kPending) return false;
  if (s.cluster != cluster->number + 1) {
    if (s.cluster == kMany || !w.others[lane]) return false;
    const auto found = w.others[lane]->find(s.cluster - 1);
    return found != w.others[lane]->end() && (*found->second)[s.thread] >= s.time;
  }
  return s.thread == w.thread(lane) || (*w.base[lane])[s.thread] >= s.time;
}

bool Block::fenced_after(const Warp& w, int lane, const Stamp& s) const {
  return s.cluster == 0 || s.async || (s.time != kPending && (*w.fenced[lane])[s.thread] >= s.time);
}

// Orders `threads` at a barrier. Each access of one of these threads before the barrier happens
// before each access of any of them after the barrier.
void Block::join(const std::vector<std::pair<Warp*, int>>& threads) {
  Clock base = threads[0].first->base[threads[0].second];
  Clock fenced = threads[0].first->fenced[threads[0].second];
  const Times *last = base.get(), *last_fenced = fenced.get();
  for (const auto& [w, lane] : threads) {
    if (w->base[lane].get() != last) {
      last = w->base[lane].get();
      base = joined(base, w->base[lane]);
    }
    if (w->fenced[lane].get() != last_fenced) {
      last_fenced = w->fenced[lane].get();
      fenced = joined(fenced, w->fenced[lane]);
    }
  }
  Knowledge others;
  for (const auto& [w, lane] : threads) others = joined(others, w->others[lane]);
  if (others)
    for (const auto& [w, lane] : threads) w->others[lane] = others;
  auto next = std::make_shared<Times>(*base);
  for (const auto& [w, lane] : threads) (*next)[w->thread(lane)] = w->time[lane]++;
  const Clock shared_next = next;
  for (const auto& [w, lane] : threads) w->base[lane] = shared_next, w->fenced[lane] = fenced;
}

void Block::sync_lanes(Warp& w, Mask mask) {
  if (!launch->options.races) return;
  std::vector<std::pair<Warp*, int>> threads;
  each_lane(mask, [&](int l) { threads.emplace_back(&w, l); });
  join(threads);
}

void Block::acquire(Warp& w, int lane, const Times& times, const Times& fenced_times) {
  if (!launch->options.races || times.empty()) return;
  auto next = std::make_shared<Times>(*w.base[lane]);
  auto fenced = std::make_shared<Times>(*w.fenced[lane]);
  for (size_t t = 0; t < next->size(); ++t) {
    (*next)[t] = std::max((*next)[t], times[t]);
    (*fenced)[t] = std::max((*fenced)[t], fenced_times[t]);
  }
  w.base[lane] = next, w.fenced[lane] = fenced;
}

void Block::release(Warp& w, int lane, Times& times, Times& fenced_times) {
  if (!launch->options.races) return;
  const Times &base = *w.base[lane], &fenced = *w.fenced[lane];
  if (times.empty()) times.assign(base.size(), 0), fenced_times.assign(base.size(), 0);
  for (size_t t = 0; t < base.size(); ++t) {
    times[t] = std::max(times[t], base[t]);
    fenced_times[t] = std::max(fenced_times[t], fenced[t]);
  }
  times[w.thread(lane)] = std::max(times[w.thread(lane)], w.time[lane]++);
}

// The following functions order strong accesses.

Knowledge Block::known(Warp& w, int lane) {
  auto own = std::make_shared<Times>(*w.base[lane]);
  (*own)[(size_t)w.thread(lane)] = w.time[lane]++;
  auto result = std::make_shared<std::map<uint32_t, Clock>>();
  if (w.others[lane]) *result = *w.others[lane];
  (*result)[cluster->number] = own;
  return result;
}

void Block::learn(Warp& w, int lane, const Knowledge& from) {
  if (!from) return;
  const auto own = from->find(cluster->number);
  if (own != from->end()) w.base[lane] = joined(w.base[lane], own->second);
  w.others[lane] = joined(w.others[lane], from);
}

// If `reads` is true, the access is a read-modify-write. It continues the release sequence of the
// old value: it publishes the clocks that were published with the old value, and its own clocks.
void Block::publish(Warp& w, int lane, uint64_t place, Scope scope, bool releases, bool reads) {
  if (!launch->options.races) return;
  const Stamp stamp = now(w, lane, scope);
  ByScope clocks = w.offered[lane];
  if (releases) std::fill_n(clocks.begin(), (int)scope, known(w, lane));
  const bool any = std::any_of(clocks.begin(), clocks.end(), [](const auto& c) { return !!c; });
  if (!any && launch->released.count(place) == 0) return;
  Released& there = launch->released[place];
  if (reads && morally_strong(stamp, there.by)) {
    const int least = (int)between(stamp, there.by) - 1;
    for (int s = 0; s < kScopes; ++s)
      clocks[s] = joined(clocks[s], there.clocks[std::max(s, least)]);
  }
  there = {stamp, clocks};
}

void Block::observe(Warp& w, int lane, uint64_t place, Scope scope, bool acquires) {
  if (!launch->options.races) return;
  const auto found = launch->released.find(place);
  if (found == launch->released.end()) return;
  const Released& there = found->second;
  const Stamp stamp = now(w, lane, scope);
  if (!morally_strong(stamp, there.by)) return;
  const int least = (int)between(stamp, there.by) - 1;
  const Knowledge& from = there.clocks[least];
  if (acquires) return learn(w, lane, from);
  w.met[lane][least] = joined(w.met[lane][least], from);
}

void Block::fence(Warp& w, int lane, Scope scope) {
  if (!launch->options.races) return;
  for (int s = 0; s < (int)scope; ++s) {
    learn(w, lane, w.met[lane][s]);
    w.met[lane][s] = nullptr;
  }
  std::fill_n(w.offered[lane].begin(), (int)scope, known(w, lane));
}

// The following functions check accesses to shared memory.

uint32_t Block::shared_offset(uint64_t address, uint64_t size, uint64_t align) const {
  address &= ~kWindowMask;
  if (address < launch->shared_base || address + size > launch->shared_base + shared.size())
    fault("out of bounds", "shared memory has bytes " + std::to_string(launch->shared_base) +
                               " to " + std::to_string(launch->shared_base + shared.size()) +
                               "; the access is at " + std::to_string(address) + ", " +
                               std::to_string(size) + " bytes");
  if (address % align)
    fault("misaligned", "shared address " + std::to_string(address) + " is not a multiple of " +
                            std::to_string(align));
  return (uint32_t)(address - launch->shared_base);
}

std::string Block::who(const Stamp& s) const {
  const uint32_t entries = launch->entries();
  const uint32_t block = launch->block_of(s.cluster - 1, s.thread / entries);
  const int32_t thread = (int32_t)(s.thread % entries), copies = launch->warps * kLanes;
  const std::string name = thread < copies            ? "thread " + std::to_string(thread)
                           : thread < copies + kSlots ? "a bulk copy"
                                                      : "a wgmma";
  return name + (block == number ? "" : " of block " + std::to_string(block)) +
         (s.async && thread < copies ? " (asynchronous)" : "") +
         (s.time == kPending ? ", which has not been waited for," : "");
}

void Block::note_read(Warp& w, int lane, uint32_t offset, uint32_t size, const Stamp& stamp) {
  if (!launch->options.races) return;
  const uint32_t granule = launch->program->granule;
  for (uint32_t c = offset / granule; c <= (offset + size - 1) / granule; ++c) {
    Cell& cell = cells[c];
    if (!after(w, lane, cell.write))
      fault("race",
            place(c * granule, launch->shared_base) + " is read while the write of " +
                who(cell.write) + " is not ordered before",
            lane);
    if (stamp.async && !fenced_after(w, lane, cell.write))
      fault("missing fence",
            place(c * granule, launch->shared_base) + ", written by " + who(cell.write) +
                ", is read by the asynchronous proxy without fence.proxy.async",
            lane);
    if (cell.read.cluster == 0 || after(w, lane, cell.read)) {
      cell.read = stamp;
    } else if (cell.read.thread == stamp.thread && cell.read.time == stamp.time) {
      cell.read.scope = std::min(cell.read.scope, stamp.scope);
    } else {
      std::vector<Stamp>& list = readers[c];
      bool known = false;
      for (Stamp& s : list)
        if (s.thread == stamp.thread) {
          s.scope = std::min(s.scope, stamp.scope);
          if (s.time != kPending && stamp.time > s.time) s = stamp;
          known = known || s.time == stamp.time;
        }
      if (!known) list.push_back(stamp);
    }
  }
}

// Completes pending reads of `size` bytes of shared memory from `offset` on. In the stamps of the
// reads by the thread of `lane`, the current time of the thread replaces kPending.
void Block::settle_read(Warp& w, int lane, uint32_t offset, uint32_t size) {
  if (!launch->options.races) return;
  const uint32_t granule = launch->program->granule;
  auto settle = [&](Stamp& s) {
    if (s.thread == w.thread(lane) && s.time == kPending) s.time = w.time[lane];
  };
  for (uint32_t c = offset / granule; c <= (offset + size - 1) / granule; ++c) {
    settle(cells[c].read);
    if (readers.empty()) continue;
    auto list = readers.find(c);
    if (list != readers.end())
      for (Stamp& s : list->second) settle(s);
  }
}

// Completes pending writes of `size` bytes of shared memory from `offset` on. In the stamps of the
// writes by thread number `thread`, `time` replaces kPending.
void Block::settle_write(uint16_t thread, uint32_t offset, uint32_t size, uint32_t time) {
  if (!launch->options.races) return;
  const uint32_t granule = launch->program->granule;
  for (uint32_t c = offset / granule; c <= (offset + size - 1) / granule; ++c) {
    Stamp& s = cells[c].write;
    if (s.time == kPending && s.thread == thread) s.time = time;
  }
}

void Block::note_write(Warp& w, int lane, uint32_t offset, uint32_t size, const Stamp& stamp) {
  if (!launch->options.races) return;
  const uint32_t granule = launch->program->granule;
  for (uint32_t c = offset / granule; c <= (offset + size - 1) / granule; ++c) {
    Cell& cell = cells[c];
    // Whether this write and the access of the stamp s are morally strong, and therefore no race.
    const auto strong = [&](const Stamp& s) { return morally_strong(stamp, s); };
    if (!after(w, lane, cell.write) && !strong(cell.write))
      fault("race",
            place(c * granule, launch->shared_base) + " is written while the write of " +
                who(cell.write) + " is not ordered before",
            lane);
    if (!after(w, lane, cell.read) && !strong(cell.read))
      fault("race",
            place(c * granule, launch->shared_base) + " is written while the read of " +
                who(cell.read) + " is not ordered before",
            lane);
    if (!readers.empty()) {
      auto list = readers.find(c);
      if (list != readers.end()) {
        for (const Stamp& s : list->second)
          if (!after(w, lane, s) && !strong(s))
            fault("race",
                  place(c * granule, launch->shared_base) + " is written while the read of " +
                      who(s) + " is not ordered before",
                  lane);
        readers.erase(list);
      }
    }
    cell.write = stamp;
    cell.read = {};
  }
}

// The following functions check accesses to global memory.

Allocation* Launch::find(uint64_t address, uint64_t size, Allocation* last) const {
  if (last && last->holds(address, size)) return last;
  auto it = std::upper_bound(memory.begin(), memory.end(), address,
                             [](uint64_t a, const auto& m) { return a < m->begin; });
  if (it == memory.begin()) return nullptr;
  Allocation* found = std::prev(it)->get();
  return found->holds(address, size) ? found : nullptr;
}

Allocation* Block::global(Warp&, uint64_t address, uint64_t size, uint64_t align, bool write) {
  Allocation* a = launch->find(address, size, last);
  if (!a) {
    std::string near = "no buffer is there";
    for (const auto& m : launch->memory) {
      const int64_t before = (int64_t)(m->begin - address);
      const int64_t behind = (int64_t)(address - (m->begin + m->bytes));
      if (behind >= 0 && behind < 1 << 20)
        near = std::to_string(behind) + " bytes after the end of " + m->name;
      else if (before > 0 && before < 1 << 20)
        near = std::to_string(before) + " bytes before " + m->name;
      else if (address >= m->begin && address < m->begin + m->bytes)
        near = "the access runs over the end of " + m->name;
    }
    fault("out of bounds", "global access of " + std::to_string(size) + " bytes: " + near);
  }
  if (address % align)
    fault("misaligned",
          "an address in " + a->name + " is not a multiple of " + std::to_string(align));
  if (write && !a->writable) fault("out of bounds", a->name + " is written, but is constant");
  return last = a;
}

void Block::note_global(Warp& w, int lane, Allocation& a, uint64_t address, uint32_t size,
                        bool write, Scope scope) {
  if (!launch->options.races || !a.writable) return;
  const uint32_t granule = launch->program->global_granule;
  const uint64_t first = a.cell_of(address, granule), end = a.cell_of(address + size - 1, granule);
  std::lock_guard<std::mutex> guard((*a.locks)[first / 64 % 64]);
  const Stamp stamp = now(w, lane, scope);
  for (uint64_t c = first; c <= end; ++c) {
    Cell& cell = a.cells[c];
    const uint64_t byte = std::max(a.begin, (a.begin / granule + c) * granule) - a.begin;
    if (!morally_strong(stamp, cell.write) && !after(w, lane, cell.write))
      fault("race",
            a.name + ", byte " + std::to_string(byte) + ": " + (write ? "written" : "read") +
                " while the write of " + who(cell.write) + " is not ordered before",
            lane);
    if (!write) {
      const Stamp before = cell.read;
      cell.read = stamp;
      if (!before.cluster) continue;
      cell.read.scope = std::min(before.scope, scope);
      if (before.cluster != stamp.cluster) cell.read.cluster = kMany;
      continue;
    }
    if (cell.read.cluster && !after(w, lane, cell.read) && !morally_strong(stamp, cell.read))
      fault("race",
            a.name + ", byte " + std::to_string(byte) + ": written while a read of " +
                (cell.read.cluster == kMany ? "other blocks" : who(cell.read)) +
                " is not ordered before",
            lane);
    cell.write = stamp;
    cell.read = {};
  }
}

}  // namespace ptxmachine
