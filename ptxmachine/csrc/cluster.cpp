// Runs the clusters of a launch. The seed chooses the order in which the warps of a cluster take
// turns.
//
// Threads of a cluster meet at barrier.cluster, and access the shared memory of each other's
// blocks. A block must have started before another block accesses its memory, and it must not end
// before these accesses.

#include <set>
#include <thread>

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {

uint32_t Launch::cluster_of(uint32_t block) const {
  const uint32_t x = block % grid[0] / cluster[0], y = block / grid[0] % grid[1] / cluster[1],
                 z = block / grid[0] / grid[1] / cluster[2];
  return (z * (grid[1] / cluster[1]) + y) * (grid[0] / cluster[0]) + x;
}

uint32_t Launch::block_of(uint32_t number, uint32_t rank) const {
  const uint32_t *c = cluster, across = grid[0] / c[0], down = grid[1] / c[1];
  const uint32_t x = number % across * c[0] + rank % c[0],
                 y = number / across % down * c[1] + rank / c[0] % c[1],
                 z = number / across / down * c[2] + rank / c[0] / c[1];
  return (z * grid[1] + y) * grid[0] + x;
}

uint32_t Launch::entries() const {
  return (uint32_t)(warps * kLanes + kSlots + (warps + kGroupWarps - 1) / kGroupWarps);
}

Cluster::Cluster(Launch& l, uint32_t n) : launch(&l), number(n) {
  for (uint32_t rank = 0; rank < l.cluster_size(); ++rank)
    blocks.push_back(std::make_unique<Block>(*this, l.block_of(n, rank), rank));
}

// The following functions find and check the shared memory of the cluster's blocks.

Block& Cluster::home(const Warp& w, int lane, uint64_t address) const {
  const uint32_t field = rank_field(address);
  return field ? member(w, lane, field - 1) : *w.block;
}

Block& Cluster::member(const Warp& w, int lane, uint32_t rank) const {
  if (rank >= blocks.size())
    fault("out of bounds",
          "the shared memory of rank " + std::to_string(rank) + " in a cluster of " +
              std::to_string(blocks.size()) + " blocks",
          lane);
  Block& b = *blocks[rank];
  if (&b == w.block) return b;
  const std::string what = "the shared memory of block " + std::to_string(b.number);
  if (!b.live()) fault("out of bounds", what + ", which has ended", lane);
  // A thread knows that a block has started if it has acquired a time of a thread of that block, at
  // a barrier or by another release.
  const auto begin = w.base[lane]->begin() + rank * launch->entries();
  const auto end = begin + (std::ptrdiff_t)launch->entries();
  const bool started = std::any_of(begin, end, [](uint32_t time) { return time != 0; });
  if (launch->options.races && !started && !(w.waited >> lane & 1))
    fault("race", what + ", whose start is not ordered before", lane);
  return b;
}

// Completes the phase of barrier.cluster if all live lanes have arrived. If the block of w has no
// live lane, checks the accesses to its shared memory by other blocks and by asynchronous
// operations. Reports a race unless each of these accesses happens before the end of one of the
// block's threads.
void Cluster::leave(Warp& w) {
  complete_phase();
  Block& b = *w.block;
  if (blocks.size() == 1 || b.live() || !launch->options.races) return;
  Times known(launch->clock_size(), 0);
  for (const Warp& other : b.warps)
    for (const Clock& clock : other.base)
      for (size_t t = 0; t < known.size(); ++t) known[t] = std::max(known[t], (*clock)[t]);
  const uint32_t entries = launch->entries(), threads = (uint32_t)launch->warps * kLanes;
  const auto check = [&](uint32_t cell, const Stamp& s) {
    const bool own = s.thread / entries == b.rank && s.thread % entries < threads;
    if (s.cluster == 0 || own || (s.time != kPending && known[s.thread] >= s.time)) return;
    fault("race",
          "the block ends while the access of " + b.who(s) + " to its shared memory at byte " +
              std::to_string(cell * (uint32_t)launch->program->granule + launch->shared_base) +
              " is not ordered before");
  };
  for (uint32_t c = 0; c < b.cells.size(); ++c)
    check(c, b.cells[c].write), check(c, b.cells[c].read);
  for (const auto& [c, list] : b.readers)
    for (const Stamp& s : list) check(c, s);
}

// The following functions belong to barrier.cluster, mapa and getctarank.

void Cluster::complete_phase() {
  Mask arrived = 0;
  for (const auto& b : blocks)
    for (const Warp& w : b->warps) {
      if (w.live & ~w.arrived) return;
      arrived |= w.arrived;
    }
  if (!arrived) return;
  completed.swap(arrivals), completed_fenced.swap(arrivals_fenced);
  arrivals.clear(), arrivals_fenced.clear();
  completed_others = std::move(arrivals_others);
  for (const auto& b : blocks)
    for (Warp& w : b->warps) w.passed = w.arrived, w.arrived = 0, w.polls = 0;
}

namespace {

// barrier.cluster.arrive. arg 0: whether it is relaxed. A relaxed arrival publishes only the clocks
// that the last fence has offered to the cluster.
void arrive(Warp& w, const Instr& i, Mask m) {
  Cluster& c = *w.block->cluster;
  if (const Mask twice = m & (w.arrived | w.passed))
    fault("divergence", "a second barrier.cluster.arrive without barrier.cluster.wait",
          __builtin_ctz(twice));
  if (c.launch->options.races)
    each_lane(m, [&](int l) {
      const Knowledge& offered = w.offered[l][(int)Scope::cluster - 1];
      if (!i.arg[0]) {
        c.arrivals_others = joined(c.arrivals_others, w.others[l]);
        w.block->release(w, l, c.arrivals, c.arrivals_fenced);
      } else if (offered) {
        c.arrivals_others = joined(c.arrivals_others, offered);
      }
    });
  w.arrived |= m;
  c.complete_phase();
}

void wait(Warp& w, const Instr&, Mask m) {
  Cluster& c = *w.block->cluster;
  if (const Mask early = m & ~(w.arrived | w.passed))
    fault("divergence", "barrier.cluster.wait without barrier.cluster.arrive",
          __builtin_ctz(early));
  if (m & w.arrived) {
    if (m != w.live) fault("unsupported", "a part of a warp waits at barrier.cluster");
    ++w.polls;
    return;
  }
  w.polls = 0, w.passed &= ~m, w.waited |= m;
  each_lane(m, [&](int l) {
    w.block->acquire(w, l, c.completed, c.completed_fenced);
    w.block->learn(w, l, c.completed_others);
  });
}

// mapa. The result is the address of the same offset in the shared memory of the block with a given
// rank: the source address with 1 + this rank in the bits from kRankShift on, or with 0 there for
// the block of the thread.
void map_address(Warp& w, const Instr& i, Mask m) {
  const size_t size = w.block->cluster->blocks.size();
  w.need(i.reg[2], m, "the rank of mapa");
  each_lane(m, [&](int l) {
    const uint64_t rank = w.get(i.reg[2], l), address = w.get(i.reg[1], l);
    if (rank >= size)
      fault("out of bounds",
            "mapa: rank " + std::to_string(rank) + " in a cluster of " + std::to_string(size) +
                (size == 1 ? " block" : " blocks"),
            l);
    const uint64_t field = rank == w.block->rank ? 0 : (rank + 1) << kRankShift;
    w.set(i.reg[0], l, in_block(address) | field);
  });
  w.wrote(i.reg[0], m, w.ok(i.reg[1]));
}

void rank_of_address(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) {
    const uint32_t field = rank_field(w.get(i.reg[1], l));
    w.set(i.reg[0], l, field ? field - 1 : w.block->rank);
  });
  w.wrote(i.reg[0], m, w.ok(i.reg[1]));
}

}  // namespace

Known decode_cluster(Instr& i, const Mnemonic& name, const RawInstr&) {
  if (name.base() == "barrier") {
    if (!name.has("cluster") || !name.any({"arrive", "wait"})) return kUnknown;
    i.pipe = Pipe::sync;
    i.aligned = name.has("aligned");
    i.arg[0] = name.has("relaxed");
    i.run = name.has("arrive") ? arrive : wait;
    i.flow = name.has("arrive") ? Flow::next : Flow::retry;
    return Shape{};
  }
  i.pipe = Pipe::alu;
  const int bits = bits_of(name.last());
  if (bits != 32 && bits != 64) return kUnknown;
  if (name.base() == "getctarank") return i.run = rank_of_address, Shape{result(32), source(bits)};
  i.run = map_address;
  return Shape{result(bits), source(bits), source(32)};
}

// The following functions run the clusters, and choose which warp runs next.

// Returns the fault for a cluster in which no warp can continue. The fault names the last warp that
// waits for registers. If no warp waits for registers, it names the last warp that waits at
// barrier.cluster. If there is no such warp either, it names the last live warp.
Fault Cluster::deadlock(bool at_barriers) const {
  std::string what = at_barriers ? "all warps wait at barriers" : "all warps wait at mbarriers";
  const Warp* found = nullptr;
  const auto order = [](const Warp& w) { return w.missing ? 2 : (w.arrived & w.live) != 0; };
  for (const auto& b : blocks)
    for (const Warp& w : b->warps)
      if (w.live && (!found || order(w) >= order(*found))) found = &w;
  if (found->missing)
    what = "a warp waits for " + std::to_string(found->missing) + " registers, and the block has " +
           std::to_string(found->block->registers) + " that no warp owns";
  else if (found->arrived & found->live)
    what = "a warp waits at barrier.cluster, where other threads of the cluster do not arrive";
  else if (std::strncmp(launch->program->code[(size_t)found->pc].text, "wgmma", 5) == 0)
    what = "a warp waits for a wgmma that other warps of its warpgroup do not execute";
  Fault f("deadlock", what);
  f.block = (int32_t)found->block->number, f.warp = found->index, f.instr = found->pc;
  return f;
}

void Cluster::complete_load(size_t index) {
  for (const auto& b : blocks) {
    if (index < b->bulk.size()) return b->complete_load(index);
    index -= b->bulk.size();
  }
}

namespace {

// Reports a fault if a warp of a block that has ended has not waited for a wgmma, or has another
// number of registers than the first warp of its warpgroup.
void check_end(const Block& b, const Warp& w) {
  const auto report = [&](Fault f) {
    f.block = (int32_t)b.number, f.warp = w.index;
    throw f;
  };
  const Warp& first = b.warps[(size_t)(w.index / kGroupWarps * kGroupWarps)];
  if (w.registers != first.registers)
    report({"divergence", "setmaxnreg is executed by a part of a warpgroup: a warp ends with " +
                              std::to_string(w.registers) +
                              " registers of a thread, the first warp of its warpgroup with " +
                              std::to_string(first.registers)});
  for (const auto& group : w.products)
    if (!group.empty()) report({"in flight", "the kernel ends before a wgmma has been waited for"});
}

}  // namespace

void Cluster::run() {
  std::vector<Warp*> ready;
  std::mt19937_64& random = blocks[0]->random;
  for (;;) {
    ready.clear();
    bool left = false, progress = false;
    size_t loads = 0;
    for (const auto& b : blocks) {
      loads += b->bulk.size();
      for (Warp& w : b->warps) {
        left = left || w.live;
        if (w.live && w.barrier < 0) {
          ready.push_back(&w);
          progress = progress || w.polls < 16;
        }
      }
    }
    if (!left) break;
    // A bulk load completes at a moment that depends on the seed, and at the latest when all warps
    // wait.
    if (loads && (!progress || ready.empty() || blocks[0]->chance(0.02))) {
      complete_load(random() % loads);
      for (const auto& b : blocks)
        for (Warp& w : b->warps) w.polls = 0;
      continue;
    }
    if (ready.empty() || !progress) throw deadlock(ready.empty());
    const bool orderly = launch->options.seed == 0;
    Warp& w = *ready[orderly ? 0 : random() % ready.size()];
    w.block->turn(w, orderly ? 1 << 30 : (int64_t)(1 + random() % 200));
    if (orderly && w.polls) {
      // All other warps run before this warp polls again.
      for (Warp* other : ready)
        if (other->barrier < 0 && other->live && other != &w) other->block->turn(*other, 1 << 30);
    }
  }
  for (const auto& b : blocks) {
    while (!b->bulk.empty()) b->complete_load(0);
    for (const Warp& w : b->warps) check_end(*b, w);
  }
}

void run(Launch& launch, int threads) {
#if defined(__SSE2__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    fault("unsupported", "the PTX machine needs a processor with AVX2 and FMA");
#endif
  std::set<uint32_t> numbers;
  for (uint32_t block : launch.blocks) numbers.insert(launch.cluster_of(block));
  const std::vector<uint32_t> chosen(numbers.begin(), numbers.end());
  const bool all = launch.blocks.empty();
  const uint64_t blocks = (uint64_t)launch.grid[0] * launch.grid[1] * launch.grid[2];
  const uint64_t clusters = all ? blocks / launch.cluster_size() : chosen.size();
  std::atomic<uint64_t> next{0};
  std::unique_ptr<Fault> first;
  std::exception_ptr other;
  auto work = [&] {
    for (;;) {
      const uint64_t turn = next++;
      if (turn >= clusters || launch.stopped) return;
      try {
        Cluster cluster(launch, all ? (uint32_t)turn : chosen[turn]);
        try {
          cluster.run();
        } catch (Fault& f) {
          if (f.block < 0) f.block = (int32_t)cluster.blocks[0]->number;
          throw;
        }
        std::lock_guard<std::mutex> guard(launch.lock);
        for (const auto& b : cluster.blocks) launch.counts.add(b->counts);
      } catch (const Stopped&) {
        return;
      } catch (const Fault& f) {
        launch.stopped = true;
        std::lock_guard<std::mutex> guard(launch.lock);
        if (!first || f.block < first->block) first = std::make_unique<Fault>(f);
      } catch (...) {
        launch.stopped = true;
        std::lock_guard<std::mutex> guard(launch.lock);
        other = std::current_exception();
      }
    }
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back(work);
  work();
  for (std::thread& t : pool) t.join();
  if (other) std::rethrow_exception(other);
  if (first) throw *first;
}

}  // namespace ptxmachine
