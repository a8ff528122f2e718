// Asynchronous copies (cp.async), named barriers, mbarriers, fences and setmaxnreg.

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {
namespace {

// cp.async [to], [from], bytes{, source bytes or ignore-src}. arg 0: bytes. arg 1: which operand
// follows `bytes`: 0 for none, 1 for the number of source bytes, 2 for the predicate ignore-src.
void copy(Warp& w, const Instr& i, Mask m) {
  Block& b = *w.block;
  w.need(i.reg[0], m, "an address");
  const uint32_t bytes = (uint32_t)i.arg[0];
  uint64_t sources[kLanes];
  Mask reads = 0;
  if (i.arg[1]) w.need(i.reg[2], m, "the size of a copy");
  each_lane(m, [&](int l) {
    AsyncCopy c;
    c.lane = l;
    c.to = b.shared_offset(w.address(i.reg[0], l, i.offset), bytes, bytes);
    c.from = w.address(i.reg[1], l, i.offsets[1]);
    c.filled = bytes;
    c.bytes = bytes;
    if (i.arg[1] == 1) c.bytes = (uint32_t)w.get(i.reg[2], l);
    if (i.arg[1] == 2 && w.get(i.reg[2], l)) c.bytes = 0;
    if (c.bytes > bytes)
      fault("out of bounds", "cp.async: the source has more bytes than the copy", l);
    if (c.bytes) {
      w.need(i.reg[1], 1u << l, "an address");
      Allocation* a = b.global(w, c.from, c.bytes, bytes, false);
      b.note_global(w, l, *a, c.from, c.bytes, false, Scope::weak);
      reads |= 1u << l;
      sources[l] = c.from;
    }
    b.note_write(w, l, c.to, bytes, b.pending(w, l, false));
    std::memset(b.shared_valid.data() + c.to, 0, bytes);
    if (w.copies[l].empty()) w.copies[l].emplace_back();
    w.copies[l].back().push_back(c);
    if (!b.late) {
      b.finish_copy(w.copies[l].back().back());
    } else {
      // Until the wait, the destination holds neither its old bytes nor the copied bytes.
      std::memset(b.shared.data() + c.to, 0xff, bytes);
    }
  });
  if (b.launch->options.count && reads) count_global(b, reads, sources, bytes);
}

void copy_commit(Warp& w, const Instr&, Mask m) {
  each_lane(m, [&](int l) {
    if (w.copies[l].empty()) w.copies[l].emplace_back();
    w.copies[l].emplace_back();
  });
}

void settle(Warp& w, int l, std::vector<AsyncCopy>& group) {
  Block& b = *w.block;
  for (AsyncCopy& c : group) {
    if (!c.done) b.finish_copy(c);
    std::memset(b.shared_valid.data() + c.to, 1, c.filled);
    const Allocation* a = c.bytes ? b.launch->find(c.from, c.bytes, b.last) : nullptr;
    if (a && !a->valid.empty())
      std::memcpy(b.shared_valid.data() + c.to, a->valid.data() + (c.from - a->begin), c.bytes);
    b.settle_write((uint16_t)w.thread(l), c.to, c.filled, w.time[l]);
  }
}

// cp.async.wait_group and cp.async.wait_all. arg 0: the number of groups that may stay in flight;
// -1 completes all groups and the copies that are not yet committed to a group.
void copy_wait(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) {
    auto& groups = w.copies[l];
    if (groups.empty()) return;
    const int complete = i.arg[0] < 0 ? (int)groups.size() : (int)groups.size() - 1 - i.arg[0];
    for (int g = 0; g < complete; ++g) settle(w, l, groups[g]);
    if (complete > 0) groups.erase(groups.begin(), groups.begin() + complete);
    if (groups.empty()) groups.emplace_back();
  });
}

// The following function belongs to the named barriers of a block.

// bar and barrier. arg 0: 0 for sync, 1 for arrive, 2 for red. arg 1: the index of the operand with
// the number of the barrier, which is 1 for red and 0 otherwise. arg 2, for red: 0 for popc, 1 for
// and, 2 for or. arg 3: whether there is a count of threads. arg 4: whether the vote is negated.
void barrier(Warp& w, const Instr& i, Mask m) {
  const Reg* r = i.reg + i.arg[1];
  w.need(r[0], m, "the number of a barrier");
  const uint64_t id = w.get(r[0], __builtin_ctz(m));
  if (id >= kBarriers)
    fault("out of bounds", "barrier " + std::to_string(id) + ", allowed: 0 to 15");
  if (m != w.live) fault("divergence", "a barrier is met by a part of a warp");
  int32_t expected = 0;
  if (i.arg[3]) {
    w.need(r[1], m, "the count of a barrier");
    expected = (int32_t)w.get(r[1], __builtin_ctz(m));
    if (expected % kLanes || expected <= 0)
      fault("divergence",
            "a barrier of " + std::to_string(expected) + " threads, allowed: multiples of 32");
    if (expected > w.block->launch->warps * kLanes)
      fault("divergence", "a barrier of " + std::to_string(expected) + " threads in a block of " +
                              std::to_string(w.block->launch->threads));
  }
  Mask yes = 0;
  if (i.arg[0] == 2) {
    const Reg vote = i.reg[i.regs - 1];
    w.need(vote, m, "a vote");
    yes = (i.arg[4] ? ~w.file[vote.at] : w.file[vote.at]) & m;
  }
  ++w.block->counts.barriers;
  w.block->arrive(w, (int)id, expected, i.arg[0] != 1, i.arg[0] == 2 ? &i : nullptr, yes);
}

// The following functions belong to fences.

// fence.proxy.async: the asynchronous proxy sees all writes that happen before a lane executes the
// fence.
void proxy_fence(Warp& w, const Instr&, Mask m) {
  if (!w.block->launch->options.races) return;
  each_lane(m, [&](int l) {
    auto times = std::make_shared<Times>(*w.base[l]);
    (*times)[w.thread(l)] = w.time[l];
    w.fenced[l] = times;
  });
}

// fence and membar, which order strong accesses. arg 0: the scope.
void memory_fence(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) { w.block->fence(w, l, (Scope)i.arg[0]); });
}

void trap(Warp&, const Instr&, Mask m) { fault("trap", "the kernel trapped", __builtin_ctz(m)); }

// The following functions belong to mbarriers.

uint32_t barrier_at(Warp& w, const Instr& i, Reg r, int l) {
  w.need(r, 1u << l, "an address");
  return w.block->shared_offset(w.address(r, l, i.offset), 8, 8);
}

void mbarrier_init(Warp& w, const Instr& i, Mask m) {
  Block& b = *w.block;
  w.need(i.reg[1], m, "the count of an mbarrier");
  each_lane(m, [&](int l) {
    const uint32_t at = barrier_at(w, i, i.reg[0], l);
    b.note_write(w, l, at, 8, b.now(w, l));
    std::memset(b.shared_valid.data() + at, 0, 8);
    MBarrier fresh;
    fresh.expected = fresh.pending = (uint32_t)w.get(i.reg[1], l);
    fresh.made = b.now(w, l);
    if (fresh.expected < 1 || fresh.expected > kMostArrivals)
      fault(
          "out of bounds",
          "an mbarrier of " + std::to_string(fresh.expected) + " arrivals, allowed: 1 to 2^20 - 1",
          l);
    b.mbarriers[at] = fresh;
  });
}

void mbarrier_inval(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) {
    const uint32_t at = barrier_at(w, i, i.reg[0], l);
    existing(w, *w.block, at, l);
    w.block->mbarriers.erase(at);
    w.block->note_write(w, l, at, 8, w.block->now(w, l));
  });
}

// mbarrier operations that change the counts of an mbarrier. arg 0: 0 for arrive, 1 for
// arrive.expect_tx, 2 for expect_tx, 3 for complete_tx, 4 for arrive_drop. arg 1: whether the first
// operand is the state that the operation returns. arg 2: whether there is a count. arg 3: whether
// the mbarrier may be in another block. The scope of an arrival or a wait is ignored, because
// CUTLASS uses the scope of the block even for an mbarrier in another block.
void mbarrier_arrive(Warp& w, const Instr& i, Mask m) {
  const Reg* r = i.reg + i.arg[1];
  if (i.arg[2]) w.need(r[1], m, "the count of an arrival");
  each_lane(m, [&](int l) {
    w.need(r[0], 1u << l, "an address");
    uint64_t address = w.address(r[0], l, i.offset);
    Block& b = i.arg[3] ? w.block->cluster->home(w, l, address) : *w.block;
    if (i.arg[3]) address = in_block(address);
    MBarrier& mb = existing(w, b, b.shared_offset(address, 8, 8), l);
    const uint64_t count = i.arg[2] ? w.get(r[1], l) : 1;
    if (i.arg[1] && i.reg[0].id >= 0) {
      if (&b != w.block)
        fault("out of bounds", "an arrival at an mbarrier of another block returns no state", l);
      w.set(i.reg[0], l, mb.phase);
      w.wrote(i.reg[0], 1u << l, 1u << l);
    }
    if (i.arg[0] == 1 || i.arg[0] == 2) mb.transactions += (int64_t)count;
    if (i.arg[0] == 3) mb.transactions -= (int64_t)count;
    if (i.arg[0] == 0 || i.arg[0] == 1 || i.arg[0] == 4) {
      const uint32_t arrivals = i.arg[0] == 1 ? 1 : (uint32_t)count;
      if (arrivals == 0) fault("out of bounds", "an arrival at an mbarrier with the count 0", l);
      if (arrivals > mb.pending)
        fault("out of bounds", "more arrivals at an mbarrier than it expects", l);
      b.release(w, l, mb.arrivals, mb.arrivals_fenced);
      mb.pending -= arrivals;
      if (i.arg[0] == 4) mb.expected -= arrivals;
    }
    b.check_phase(mb);
  });
}

// mbarrier.test_wait and mbarrier.try_wait. arg 0: whether the operand is the parity of the phase;
// if not, the operand is a state that an arrival has returned.
void mbarrier_wait(Warp& w, const Instr& i, Mask m) {
  Block& b = *w.block;
  w.need(i.reg[2], m, "the phase of an mbarrier");
  Mask done = 0;
  each_lane(m, [&](int l) {
    const MBarrier& mb = existing(w, b, barrier_at(w, i, i.reg[1], l), l);
    const uint64_t asked = w.get(i.reg[2], l);
    if (i.arg[0] ? (mb.phase & 1) != (asked & 1) : mb.phase > asked) {
      done |= 1u << l;
      b.acquire(w, l, mb.completed, mb.completed_fenced);
    }
  });
  uint32_t& p = w.file[i.reg[0].at];
  p = (p & ~m) | done;
  w.wrote(i.reg[0], m, kAll);
  w.polls = done == m ? 0 : w.polls + 1;
}

// cp.async.mbarrier.arrive. arg 0: whether the instruction has .noinc.
void copy_arrive(Warp& w, const Instr& i, Mask m) {
  Block& b = *w.block;
  each_lane(m, [&](int l) {
    // On a GPU, the arrival happens after all earlier copies of the thread have completed. In the
    // machine, these copies complete now, and then the thread arrives.
    for (auto& group : w.copies[l]) settle(w, l, group);
    w.copies[l].clear();
    MBarrier& mb = existing(w, b, barrier_at(w, i, i.reg[0], l), l);
    if (!i.arg[0]) ++mb.pending;
    if (mb.pending == 0) fault("out of bounds", "more arrivals at an mbarrier than it expects", l);
    b.release(w, l, mb.arrivals, mb.arrivals_fenced);
    --mb.pending;
    b.check_phase(mb);
  });
}

// The following functions belong to setmaxnreg.

// Reports a fault if the block could never free enough registers for a warpgroup. All warps of the
// warpgroup take registers, and each warp of another warpgroup can free its registers down to
// kLeastRegisters per thread.
void check_registers(const Warp& w, int32_t count) {
  const Block& b = *w.block;
  int32_t needed = 0, free = b.registers;
  for (const Warp& other : b.warps) {
    if (!other.live) continue;
    if (other.index / kGroupWarps == w.index / kGroupWarps)
      needed += std::max(count - other.registers, 0) * kLanes;
    else
      free += (other.registers - kLeastRegisters) * kLanes;
  }
  if (needed > free)
    fault("registers", "setmaxnreg.inc takes " + std::to_string(needed) +
                           " registers for the warps of a warpgroup, and the block can free at "
                           "most " +
                           std::to_string(free));
}

// setmaxnreg. arg 0: whether the warp takes registers (.inc) instead of releasing them (.dec). arg
// 1: the registers per thread afterwards. Released registers stay with the block until another warp
// takes them. A warp that ends releases no registers, because PTX does not say that other warps may
// rely on them.
void set_registers(Warp& w, const Instr& i, Mask) {
  Block& b = *w.block;
  const int32_t count = i.arg[1];
  const std::string wanted = std::to_string(count) + " registers of a thread";
  if (count < kLeastRegisters || count > kMostRegisters || count % 8)
    fault("out of bounds", "setmaxnreg: " + wanted + ", allowed: multiples of 8 from 24 to 256");
  if (b.launch->registers == 0)
    fault("registers",
          "setmaxnreg has no effect, because the kernel has neither .maxnreg nor .minnctapersm "
          "with .maxntid or .reqntid");
  const int32_t more = (count - w.registers) * kLanes;
  if (i.arg[0] ? more < 0 : more > 0)
    fault("out of bounds", std::string("setmaxnreg.") + (i.arg[0] ? "inc" : "dec") + " sets " +
                               wanted + " that has " + std::to_string(w.registers));
  w.missing = more > b.registers ? more : 0;
  w.polls = w.missing ? w.polls + 1 : 0;
  if (w.missing) return check_registers(w, count);
  b.registers -= more;
  w.registers = count;
  if (more < 0)
    for (Warp& other : b.warps) other.polls = 0;
}

Known decode_registers(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  i.pipe = Pipe::control;
  i.flow = Flow::retry;
  i.aligned = true;
  i.arg[0] = name.has("inc");
  i.run = set_registers;
  i.arg[1] = (int)raw.operand(0).value;
  if (!name.any({"inc", "dec"})) return kUnknown;
  return Shape{constant(0, INT32_MAX)};
}

Known decode_copy(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  if (name.has("bulk")) return kUnknown;
  i.pipe = Pipe::sync;
  if (name.has("commit_group")) return i.run = copy_commit, Shape{};
  if (name.has("wait_group")) {
    i.arg[0] = (int)raw.operand(0).value;
    i.run = copy_wait;
    return Shape{constant(0, INT32_MAX)};
  }
  if (name.has("wait_all")) return i.arg[0] = -1, i.run = copy_wait, Shape{};
  if (name.has("mbarrier")) {
    i.arg[0] = name.has("noinc");
    i.run = copy_arrive;
    return Shape{address()};
  }
  // The operands are [to], [from] and bytes. The number of source bytes or a predicate may follow,
  // and then a cache policy.
  if (!name.any({"ca", "cg"})) return kUnknown;
  i.pipe = Pipe::global;
  const RawOperand& third = raw.operand(3);
  const bool counted = raw.operands.size() > (name.has("L2::cache_hint") ? 4 : 3);
  i.arg[0] = (int)raw.operand(2).value;
  if (counted) i.arg[1] = third.bits == 1 ? 2 : 1;
  // The registers are the two addresses and the optional operand. `bytes` is a constant, so it is
  // no register.
  i.run = copy;
  const Slot size = name.has("cg") ? constant(16, 16) : constant(4, 16).power_of_two();
  Shape shape = {address(), address(), size};
  if (counted) shape.push_back(source(third.bits == 1 ? 1 : 32));
  return with_policy(std::move(shape), name);
}

Known decode_barrier(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  i.pipe = Pipe::sync;
  if (name.any({"cluster", "warp"})) return kUnknown;
  const bool red = name.has("red"), arrive = name.has("arrive");
  if (!red && !arrive && !name.has("sync")) return kUnknown;
  i.arg[0] = red ? 2 : arrive ? 1 : 0;
  i.arg[1] = red ? 1 : 0;
  i.flow = arrive ? Flow::next : Flow::barrier;
  i.aligned = name.base() == "bar" || name.has("aligned");
  i.run = barrier;
  const Slot number = source(32), count = source(32);
  if (!red) {
    i.arg[3] = raw.operands.size() == 2;
    return Shape{number, arrive ? count : count.if_given()};
  }
  if (!name.any({"popc", "and", "or"})) return kUnknown;
  i.arg[2] = name.has("popc") ? 0 : name.has("and") ? 1 : 2;
  i.arg[3] = raw.operands.size() == 4;
  i.arg[4] = raw.operand(i.arg[3] ? 3 : 2).negated;
  Shape shape = {result(i.arg[2] ? 1 : 32), number};
  if (i.arg[3]) shape.push_back(count);
  shape.push_back(source(1).or_not());
  return shape;
}

Known decode_mbarrier(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  i.pipe = Pipe::sync;
  if (name.has("init")) return i.run = mbarrier_init, Shape{address(), source(32)};
  if (name.has("inval")) return i.run = mbarrier_inval, Shape{address()};
  if (name.any({"try_wait", "test_wait"})) {
    i.arg[0] = name.has("parity");
    i.flow = Flow::poll;
    i.run = mbarrier_wait;
    const Slot phase = i.arg[0] ? source(32) : held(64);
    Shape shape = {result(1), address(), phase};
    // The optional operand is the longest time, in nanoseconds, for which hardware may suspend the
    // thread.
    if (name.has("try_wait")) shape.push_back(source(32).if_given());
    return shape;
  }
  const bool state = raw.operand(0).kind != 'm';
  i.arg[1] = state;
  const bool expects = name.has("expect_tx");
  if (name.has("arrive"))
    i.arg[0] = expects ? 1 : 0;
  else if (name.has("arrive_drop"))
    i.arg[0] = 4;
  else if (expects)
    i.arg[0] = 2;
  else if (name.has("complete_tx"))
    i.arg[0] = 3;
  else
    return kUnknown;
  if (i.arg[0] == 4 && expects) return kUnknown;
  i.arg[2] = raw.operands.size() == (size_t)(2 + state);
  i.arg[3] = !name.any({"shared", "shared::cta"});
  i.run = mbarrier_arrive;
  const bool arrives = i.arg[0] == 0 || i.arg[0] == 1 || i.arg[0] == 4;
  const Slot count = source(32);
  Shape shape;
  if (state && arrives) shape.push_back(result(64).or_sink());
  shape.push_back(address());
  shape.push_back(i.arg[0] == 0 || i.arg[0] == 4 ? count.if_given() : count);
  return shape;
}

Known decode_fence(Instr& i, const Mnemonic& name) {
  i.run = memory_fence, i.arg[0] = (int)scope_named(name);
  // Hardware orders only initializations of mbarriers at fence.mbarrier_init. The machine treats
  // this instruction as a fence for all accesses.
  if (name.base() == "membar") return Shape{};
  if (name.any({"async", "proxy"})) {
    i.run = nothing;
    for (const std::string& part : name.parts)
      if (part.rfind("async", 0) == 0) i.run = proxy_fence;
  }
  return Shape{};
}

}  // namespace

MBarrier& existing(Warp& w, Block& home, uint32_t at, int lane) {
  auto found = home.mbarriers.find(at);
  if (found == home.mbarriers.end())
    fault("uninitialised", "an mbarrier that was never initialised", lane);
  if (home.launch->options.races && !home.after(w, lane, found->second.made))
    fault("race", "an mbarrier is used while its initialisation is not ordered before", lane);
  return found->second;
}

Known decode_async(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  const std::string& base = name.base();
  if (base == "cp") return decode_copy(i, name, raw);
  if (base == "mbarrier") return decode_mbarrier(i, name, raw);
  if (base == "bar" || base == "barrier") return decode_barrier(i, name, raw);
  if (base == "setmaxnreg") return decode_registers(i, name, raw);
  i.pipe = Pipe::sync;
  if (base == "fence" || base == "membar") return decode_fence(i, name);
  if (base == "trap" || base == "brkpt") return i.run = trap, Shape{};
  i.pipe = Pipe::control;
  i.run = nothing;
  if (base == "nanosleep") return Shape{source(32)};
  if (base == "pmevent") return Shape{constant(0, INT32_MAX)};
  return Shape{};  // griddepcontrol
}

}  // namespace ptxmachine
