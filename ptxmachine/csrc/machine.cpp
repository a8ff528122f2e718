// Runs the warps and the barriers of a block. cluster.cpp chooses the warp that runs next. The
// lanes of a warp execute together as long as they take the same branches.
//
// A warp whose lanes take different branches is divided into fragments. The fragment with the
// lowest instruction number runs first, and fragments at the same instruction are joined. Lanes
// therefore execute together again after their paths have met.

#include "machine.h"

namespace ptxmachine {

void Counts::add(const Counts& o) {
  for (int p = 0; p < kPipes; ++p) warp[p] += o.warp[p];
  instructions += o.instructions;
  tensor_flops += o.tensor_flops;
  tensor_shared_bytes += o.tensor_shared_bytes;
  global_bytes += o.global_bytes;
  global_sectors += o.global_sectors;
  global_least_sectors += o.global_least_sectors;
  shared_wavefronts += o.shared_wavefronts;
  shared_least_wavefronts += o.shared_least_wavefronts;
  barriers += o.barriers;
  conflicting_stores += o.conflicting_stores;
}

void Warp::in_flight() {
  fault("in flight", "a register is written while a wgmma that uses it has not been waited for");
}

void Warp::wrote_bytes(Reg r, Mask mask, const uint8_t* bytes) {
  const uint8_t all = (uint8_t)((1u << (r.bits / 8)) - 1);
  std::array<uint8_t, kLanes> kept{};
  Mask whole = 0;
  bool some = false;
  for (int l = 0; l < kLanes; ++l) {
    kept[l] = mask >> l & 1 ? bytes[l] & all : valid_bytes(r, l);
    if (kept[l] == all) whole |= 1u << l;
    some = some || (mask >> l & 1 && kept[l] && kept[l] != all);
  }
  wrote(r, mask, whole);
  if (some) partial[r.id] = kept;
}

void Warp::need(Reg r, Mask mask, const char* use) {
  const Mask bad = mask & ~valid[r.id];
  if (bad)
    fault("uninitialised",
          std::string(use) +
              " is a value that nothing has written, or that a wgmma in flight will write",
          __builtin_ctz(bad));
}

namespace {

struct Start {
  std::vector<uint32_t> file;
  std::vector<Mask> valid;
};

void fill(Warp& w, Reg r, uint64_t value) {
  for (int l = 0; l < kLanes; ++l) w.set(r, l, value);
  w.valid[r.id] = kAll;
}

void set_special(Warp& w, Special s, uint64_t value) {
  fill(w, w.program->registers[(size_t)(w.program->first_special + s)], value);
}

void start(Block& b, Warp& w, int index) {
  const Launch& launch = *b.launch;
  const Program& p = *launch.program;
  w.block = &b, w.program = &p, w.index = index, w.registers = launch.registers;
  w.first = (int32_t)(b.rank * launch.entries());
  // Uninitialized registers have a random value, which depends on the seed.
  w.file.assign((size_t)p.words, (uint32_t)b.random());
  w.valid.assign((size_t)p.ids, 0);
  w.locked.assign((size_t)p.ids, 0);
  w.written.assign((size_t)p.ids, 0);
  const int threads = std::min(kLanes, launch.threads - index * kLanes);
  w.live = threads == kLanes ? kAll : (1u << threads) - 1;
  w.fragments = {{0, w.live}};
  for (const Constant& c : p.constants) {
    fill(w, c.reg, c.value);
    w.written[(size_t)c.reg.id] = kAlways;
  }
  const auto zero = std::make_shared<const Times>(launch.clock_size(), 0u);
  for (int l = 0; l < kLanes; ++l) w.base[l] = w.fenced[l] = zero, w.time[l] = 1;
  const auto special = [&](Special s, uint64_t v) { set_special(w, s, v); };
  for (int s = 0; s < kSpecials; ++s) special((Special)s, 0);
  for (int d = 0; d < 3; ++d) {
    special((Special)(kNtidX + d), launch.block[d]);
    special((Special)(kCtaidX + d), b.id[d]);
    special((Special)(kNctaidX + d), launch.grid[d]);
    special((Special)(kClusterIdX + d), b.id[d] / launch.cluster[d]);
    special((Special)(kNclusterIdX + d), launch.grid[d] / launch.cluster[d]);
  }
  special(kClusterCtaid, b.id[0] % launch.cluster[0]);
  special(kClusterCtaidY, b.id[1] % launch.cluster[1]);
  special(kClusterCtaidZ, b.id[2] % launch.cluster[2]);
  special(kClusterCtarank, b.rank);
  special(kWarpId, (uint64_t)index);
  special(kNwarpId, (uint64_t)launch.warps);
  special(kNsmId, 132);
  special(kSmId, b.number % 132);
  special(kClusterNctaid, launch.cluster[0]);
  special(kClusterNctarank, launch.cluster_size());
  special(kClusterNctaidY, launch.cluster[1]);
  special(kClusterNctaidZ, launch.cluster[2]);
  special(kDynamicSmem, launch.shared_bytes - launch.static_shared);
  special(kTotalSmem, launch.shared_bytes);
  for (int l = 0; l < kLanes; ++l) {
    const uint32_t t = (uint32_t)(index * kLanes + l);
    const auto lane = [&](Special s, uint64_t v) {
      w.set(p.registers[(size_t)(p.first_special + s)], l, v);
    };
    lane(kTidX, t % launch.block[0]);
    lane(kTidY, t / launch.block[0] % launch.block[1]);
    lane(kTidZ, t / launch.block[0] / launch.block[1]);
    lane(kLaneId, (uint64_t)l);
    lane(kLanemaskEq, 1u << l);
    lane(kLanemaskLt, (1u << l) - 1);
    lane(kLanemaskLe, (2u << l) - 1);
    lane(kLanemaskGe, ~((1u << l) - 1));
    lane(kLanemaskGt, ~((2u << l) - 1));
  }
}

template <class F>
void drop(std::vector<Fragment>& fragments, F&& f) {
  fragments.erase(std::remove_if(fragments.begin(), fragments.end(), f), fragments.end());
}

// Returns the fragment to run next: the fragment with the lowest instruction number, joined with
// all other fragments at the same instruction. Returns null if all fragments wait.
Fragment* choose(Warp& w) {
  Fragment* best = nullptr;
  for (Fragment& f : w.fragments)
    if (!f.waits && (!best || f.pc < best->pc)) best = &f;
  if (!best) return nullptr;
  const int32_t pc = best->pc;
  Mask mask = 0;
  for (Fragment& f : w.fragments)
    if (f.pc == pc) mask |= f.mask;
  drop(w.fragments, [&](const Fragment& f) { return f.pc == pc; });
  w.fragments.push_back({pc, mask});
  return &w.fragments.back();
}

Mask guarded(Warp& w, const Instr& i, Mask mask) {
  if (i.guard < 0) return mask;
  const Mask bad = mask & ~w.valid[(size_t)i.guard_id];
  if (bad)
    fault("uninitialised", "a predicate decides that nothing has written", __builtin_ctz(bad));
  const Mask p = w.file[(size_t)i.guard];
  return mask & (i.negated ? ~p : p);
}

void branch(Warp& w, Fragment* f, const Instr& i, Mask taken) {
  const Mask rest = f->mask & ~taken;
  if (!rest) {
    f->pc = i.target;
  } else if (!taken) {
    ++f->pc;
  } else {
    *f = {f->pc + 1, rest};
    w.fragments.push_back({i.target, taken});
  }
}

// Runs a warp-level synchronisation for each complete group of lanes, and returns the lanes of the
// complete groups. A group is complete if all live lanes of its member mask have arrived with the
// same member mask. The groups of a warp are independent of each other.
Mask run_groups(Warp& w, const Instr& i, Mask mask) {
  const Reg members = i.reg[i.regs - 1];
  w.need(members, mask, "a member mask");
  Mask done = 0;
  for (Mask left = mask; left;) {
    const Mask all = (Mask)w.get(members, __builtin_ctz(left));
    Mask group = 0;
    each_lane(left, [&](int l) { group |= (Mask)((Mask)w.get(members, l) == all) << l; });
    left &= ~group;
    if ((all & w.live & ~group) != 0) continue;
    i.run(w, i, group);
    done |= group;
  }
  return done;
}

void leave(Warp& w, Fragment* f, Mask gone) {
  w.live &= ~gone;
  f->mask &= ~gone;
  ++f->pc;
  drop(w.fragments, [](const Fragment& g) { return g.mask == 0; });
  // Other lanes need not wait for lanes that have exited, so waiting fragments try again.
  for (Fragment& g : w.fragments) g.waits = false;
}

}  // namespace

Block::Block(Cluster& c, uint32_t n, uint32_t r)
    : launch(c.launch),
      cluster(&c),
      number(n),
      rank(r),
      random(c.launch->options.seed * 1000003 + n) {
  const Launch& l = *launch;
  id[0] = n % l.grid[0], id[1] = n / l.grid[0] % l.grid[1], id[2] = n / l.grid[0] / l.grid[1];
  shared.resize(l.shared_bytes);
  for (uint8_t& byte : shared) byte = 0xff;  // NaN in fp16, bf16, fp32, fp64, e4m3 and e5m2
  shared_valid.assign(l.shared_bytes, 0);
  if (l.options.races) cells.resize(l.shared_bytes / (uint32_t)l.program->granule + 1);
  slot_time.assign(kSlots, 1);
  local.resize((size_t)l.warps * kLanes);
  for (auto& memory : local) memory.assign(2 * l.local_bytes, 0);
  late = l.options.seed != 0 && chance(0.5);
  warps.resize((size_t)l.warps);
  for (int w = 0; w < l.warps; ++w) start(*this, warps[(size_t)w], w);
}

bool Block::live() const {
  return std::any_of(warps.begin(), warps.end(), [](const Warp& w) { return w.live != 0; });
}

// After every kStopEvery instructions, a warp checks whether a fault of another block has stopped
// the launch.
constexpr uint64_t kStopEvery = 4096;

// Runs a warp for `quantum` instructions, or until the warp waits or ends.
void Block::step(Warp& w, int64_t quantum) {
  const Instr* code = launch->program->code.data();
  const int32_t size = (int32_t)launch->program->code.size();
  while (quantum-- > 0) {
    Fragment* f = w.fragments.size() == 1 && !w.fragments[0].waits ? &w.fragments[0] : choose(w);
    if (!f) fault("deadlock", "the lanes of a warp wait for each other");
    if (f->pc >= size) fault("trap", "the kernel ran past its end");
    const Instr& i = code[f->pc];
    w.pc = f->pc;
    ++w.executed;
    counts.warp[(int)i.pipe] += 1;
    ++counts.instructions;
    if (w.executed % kStopEvery == 0 && launch->stopped) throw Stopped();
    if (launch->options.limit && (int64_t)w.executed > launch->options.limit)
      fault("limit", "a warp executed more instructions than the limit");
    const Mask mask = guarded(w, i, f->mask);
    switch (i.flow) {
      case Flow::next:
      case Flow::retry:
        if (i.aligned && mask != w.live && mask)
          fault("divergence", "a part of the warp executes an aligned instruction");
        if (mask) i.run(w, i, mask);
        if (i.flow == Flow::retry && mask && w.polls) return;
        ++f->pc;
        break;
      case Flow::branch:
        branch(w, f, i, mask);
        break;
      case Flow::exit:
        leave(w, f, mask);
        cluster->leave(w);
        if (w.live == 0) {
          for (int b = 0; b < 16; ++b) finish_barrier(b);
          return;
        }
        break;
      case Flow::warp_sync: {
        if (!mask) {
          ++f->pc;
          break;
        }
        const Mask done = run_groups(w, i, mask);
        if (done == 0) {
          if (mask != f->mask)
            fault("divergence", "a guard keeps lanes from a warp-level synchronisation");
          f->waits = true;
          break;
        }
        const Mask stay = mask & ~done;
        *f = {f->pc + 1, f->mask & ~stay};
        for (Fragment& g : w.fragments) g.waits = false;
        if (stay) w.fragments.push_back({w.pc, stay, true});
        break;
      }
      case Flow::barrier:
        if (mask == 0) {
          ++f->pc;
          break;
        }
        ++f->pc;
        i.run(w, i, mask);
        if (w.barrier >= 0) return;
        break;
      case Flow::poll:
        if (mask) i.run(w, i, mask);
        ++f->pc;
        if (w.polls) return;
        break;
    }
  }
}

void Block::arrive(Warp& w, int number_, int32_t expected, bool wait, const Instr* vote, Mask yes) {
  Barrier& b = barriers[(size_t)number_];
  if ((!b.waiting.empty() || !b.passed.empty()) && b.expected != expected)
    fault("divergence", "barrier " + std::to_string(number_) + " is met with different counts");
  b.expected = expected;
  if (wait) {
    b.waiting.push_back(w.index);
    b.votes.emplace_back(vote, yes);
    w.barrier = number_;
  } else {
    b.passed.push_back(w.index);
    each_lane(w.live, [&](int l) { release(w, l, b.times, b.fenced); });
  }
  finish_barrier(number_);
}

void Block::finish_barrier(int number_) {
  Barrier& b = barriers[(size_t)number_];
  if (b.waiting.empty() && b.passed.empty()) return;
  int32_t needed = b.expected / kLanes;
  if (b.expected == 0) {
    needed = 0;
    for (const Warp& w : warps) needed += w.live != 0;
  }
  if ((int32_t)(b.waiting.size() + b.passed.size()) < needed) return;
  // A barrier may be complete even if all its warps only arrive (bar.arrive). A completed barrier
  // starts its next phase.
  if (launch->options.races && !b.waiting.empty()) {
    std::vector<std::pair<Warp*, int>> threads;
    for (int32_t index : b.waiting)
      each_lane(warps[(size_t)index].live,
                [&](int l) { threads.emplace_back(&warps[(size_t)index], l); });
    join(threads);
    if (!b.passed.empty())
      for (auto& [w, lane] : threads) acquire(*w, lane, b.times, b.fenced);
  }
  uint64_t yes = 0, all = 0;
  for (size_t k = 0; k < b.waiting.size(); ++k) {
    yes += (uint64_t)__builtin_popcount(b.votes[k].second);
    all += (uint64_t)__builtin_popcount(warps[(size_t)b.waiting[k]].live);
  }
  for (size_t k = 0; k < b.waiting.size(); ++k) {
    Warp& w = warps[(size_t)b.waiting[k]];
    w.barrier = -1;
    const Instr* vote = b.votes[k].first;
    if (!vote) continue;
    const uint64_t answer = vote->arg[2] == 0 ? yes : vote->arg[2] == 1 ? yes == all : yes > 0;
    each_lane(w.live, [&](int l) { w.set(vote->reg[0], l, answer); });
    w.wrote(vote->reg[0], w.live, w.live);
  }
  b = Barrier();
}

void Block::finish_copy(AsyncCopy& c) {
  std::memset(shared.data() + c.to, 0, c.filled);
  if (c.bytes) {
    const Allocation* a = launch->find(c.from, c.bytes, last);
    std::memcpy(shared.data() + c.to, a->host + (c.from - a->begin), c.bytes);
  }
  c.done = true;
}

void Block::check_phase(MBarrier& b) {
  if (std::abs(b.transactions) > kMostArrivals)
    fault("out of bounds", "an mbarrier waits for " + std::to_string(b.transactions) +
                               " bytes, allowed: at most 2^20 - 1");
  if (b.pending || b.transactions) return;
  ++b.phase;
  b.pending = b.expected;
  b.completed = b.arrivals, b.completed_fenced = b.arrivals_fenced;
  // A warp whose polls of an mbarrier have failed may succeed after this phase.
  for (Warp& w : warps) w.polls = 0;
}

void Block::turn(Warp& w, int64_t quantum) {
  try {
    step(w, quantum);
  } catch (Fault& f) {
    f.block = (int32_t)number;
    f.warp = w.index;
    f.instr = w.pc;
    if (f.lane < 0 && w.lane_at == w.executed) f.lane = w.lane;
    throw;
  }
}

}  // namespace ptxmachine
