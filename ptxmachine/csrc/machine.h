// The state of a running kernel: the launch, a block, its warps, memory and the happens-before
// order.
//
// A byte of memory, or a lane of a register, is valid if it holds a value that the host or the
// kernel has written. Otherwise, the byte or the lane is invalid, which means uninitialized.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "program.h"

namespace ptxmachine {

// Handlers that compute all lanes at once are compiled for these instruction sets where the
// compiler's default is SSE2. `run` then reports a fault on a processor without AVX2 or FMA. On
// aarch64, the compiler's default already has fused multiply-add and conversions of fp16.
#if defined(__SSE2__)
#define FASTBERT_PTX_SIMD __attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt")))
#else
#define FASTBERT_PTX_SIMD
#endif

// The limits that hardware sets for instructions, from the PTX ISA. src/ptxmachine/limits.py has
// the limits of PTX texts and of launches.
constexpr int kBarriers = 16;                     // named barriers per block
constexpr int64_t kMostArrivals = (1 << 20) - 1;  // arrivals or bytes per mbarrier
constexpr uint64_t kStrideEnd = 1ull << 40;       // every stride of a tensor map is less than this
// Alignment in bytes of a tensor map, and of the shared memory that a tensor copy accesses.
constexpr uint64_t kMapAlignment = 64, kTensorAlignment = 128;
constexpr int kGroupWarps = 4;                                 // warps per warpgroup
constexpr int32_t kLeastRegisters = 24, kMostRegisters = 256;  // limits of setmaxnreg, per thread

struct Fault : std::runtime_error {
  std::string kind;  // "out of bounds", "race", ...
  int32_t instr = -1, block = -1, warp = -1, lane = -1;
  Fault(std::string k, const std::string& what) : std::runtime_error(what), kind(std::move(k)) {}
};

// The following types belong to the vector clocks.

// A vector clock. Accesses of thread t up to the time in entry t happen before the next access of
// the thread that owns the clock.
using Times = std::vector<uint32_t>;
using Clock = std::shared_ptr<const Times>;

// The vector clocks that a thread has acquired from several clusters, by cluster number.
using Knowledge = std::shared_ptr<const std::map<uint32_t, Clock>>;
// The clocks for each scope except weak: for threads of the same block, of the same cluster, and of
// the device.
using ByScope = std::array<Knowledge, kScopes>;

// The cluster, the thread and the time of an access to a cell, which is one unit of memory in the
// detection of races.
struct Stamp {
  uint32_t cluster = 0;  // 1 + cluster number; 0: no access; kMany: several clusters
  uint16_t thread = 0;   // number in the cluster
  bool async = false;    // an access by the asynchronous proxy
  Scope scope = Scope::weak;
  uint32_t time = 0;  // kPending: the access is not complete
};
constexpr uint32_t kMany = ~0u;
constexpr uint32_t kPending = ~0u;

struct Cell {
  Stamp write, read;
};

// The clocks that a strong write publishes at its address. A strong read of the written value
// acquires the clocks for the smallest scope that includes the writer and the reader.
struct Released {
  Stamp by;
  ByScope clocks;
};

// The following types belong to memory, counts and launches.

struct Allocation {
  uint64_t begin = 0, bytes = 0;
  bool writable = true;
  std::string name;
  uint8_t* host = nullptr;
  std::vector<uint8_t> valid;  // one flag per byte; empty: all bytes are valid
  std::unique_ptr<std::array<std::mutex, 64>> locks;
  std::vector<Cell> cells;
  bool holds(uint64_t address, uint64_t size) const {
    return address >= begin && size <= bytes && address - begin <= bytes - size;
  }
  // The index of the cell of an address. The granule is the number of bytes in a cell. Cells begin
  // at multiples of the granule, even if the allocation does not.
  uint64_t cell_of(uint64_t address, uint32_t granule) const {
    return address / granule - begin / granule;
  }
};

// A generic address in one of these windows is an address of shared memory, local memory or
// parameters. All other generic addresses are addresses of the host.
constexpr uint64_t kSharedWindow = 0x0100000000000000ull;
constexpr uint64_t kLocalWindow = 0x0200000000000000ull;
constexpr uint64_t kParamWindow = 0x0400000000000000ull;
constexpr uint64_t kWindowMask = 0xff00000000000000ull;
// An address in the shared memory of the cluster has 1 + the rank of the block from this bit on, or
// 0 for the block of the thread. The bits below are the address in the shared memory of that block.
constexpr int kRankShift = 24;
constexpr uint64_t kRankMask = 0xffull << kRankShift;
// rank_field returns 1 + the rank in such an address, or 0 for the block of the thread. in_block
// returns the address in the shared memory of that block.
inline uint32_t rank_field(uint64_t address) { return (uint32_t)(address >> kRankShift & 0xff); }
inline uint64_t in_block(uint64_t address) { return address & ~kRankMask; }

struct Counts {
  uint64_t warp[kPipes] = {};  // instructions that warps executed, by pipe
  uint64_t instructions = 0;
  uint64_t tensor_flops = 0;         // 2 per multiplication in a matrix instruction
  uint64_t tensor_shared_bytes = 0;  // operands of wgmma: A once per warp, B per four warps
  uint64_t global_bytes = 0, global_sectors = 0, global_least_sectors = 0;
  uint64_t shared_wavefronts = 0, shared_least_wavefronts = 0;
  uint64_t barriers = 0;
  // Lanes whose value is lost, because another lane of the same instruction stores a different
  // value to the same address.
  uint64_t conflicting_stores = 0;
  void add(const Counts& other);
};

enum class Accumulate : int32_t { forward, reverse, exact, truncate };

struct Options {
  uint64_t seed = 0;
  // The error of approximate instructions, as a share of the documented error: -1 to 1.
  double approximate = 0;
  Accumulate accumulate = Accumulate::forward;
  bool races = true;
  bool count = true;
  int64_t limit = 0;  // most instructions per warp; 0: no limit
};

// The exception that ends a block after a fault of another block. Without it, the block might wait
// forever for the other block.
struct Stopped {};

struct Launch {
  const Program* program = nullptr;
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  uint32_t cluster[3] = {1, 1, 1};  // blocks of a cluster
  int32_t threads = 1, warps = 1;
  int32_t registers = 0;  // registers per thread at the start; 0 if ptxas would ignore setmaxnreg
  std::vector<uint8_t> params;
  uint32_t shared_bytes = 0, static_shared = 0, local_bytes = 0;
  uint32_t shared_base = 1024;   // first address of shared memory; not 0, as on hardware
  std::vector<uint32_t> blocks;  // numbers of the blocks to run; empty: the whole grid
  std::vector<std::unique_ptr<Allocation>> memory;  // sorted by address
  // The clocks that strong writes have published, by the key of their address. key_of in access.cpp
  // gives equal addresses in the shared memory of different blocks different keys.
  std::unordered_map<uint64_t, Released> released;
  Options options;
  Counts counts;
  std::mutex lock;
  std::atomic<bool> stopped{false};  // true after a block had a fault

  Allocation* find(uint64_t address, uint64_t size, Allocation* last) const;
  uint32_t cluster_size() const { return cluster[0] * cluster[1] * cluster[2]; }
  // cluster_of returns the number of the cluster of a block. block_of returns the number of the
  // block with a given rank in a cluster. Numbers count along x first.
  uint32_t cluster_of(uint32_t block) const;
  uint32_t block_of(uint32_t number, uint32_t rank) const;
  // The number of entries that each block has in a vector clock.
  uint32_t entries() const;
  size_t clock_size() const { return (size_t)entries() * cluster_size(); }
};

// The following types belong to blocks and warps.

struct Fragment {
  int32_t pc;
  Mask mask;
  bool waits = false;  // whether it waits for other lanes at a warp-level synchronisation
};

// A cp.async that has been issued and that no wait has completed.
struct AsyncCopy {
  int lane;
  uint32_t to;
  uint64_t from;
  // bytes: the number of bytes that are read from global memory. filled: the number of bytes that
  // are written to shared memory, which are zeros after the first `bytes`.
  uint32_t bytes, filled;
  bool done = false;
};

struct PendingMma {
  const Instr* instr;
  uint64_t a, b;  // matrix descriptors
  bool scale_d;
  bool done = false;
  uint64_t number = 0;              // number of this wgmma among those of its warp, from 1
  std::vector<uint32_t> operand_a;  // copies of the registers of A at issue, and their valid lanes
};

// A tensor map in the machine's own layout of 128 bytes. src/ptxmachine/tensor_map.py writes this
// layout.
struct TensorMap {
  char magic[4];
  uint8_t rank, element_bytes, swizzle, fill_nan;  // swizzle: 0, 32, 64 or 128 bytes
  uint64_t address;
  uint32_t size[5];    // elements per dimension, innermost first
  uint32_t type;       // number as in tensormap.replace.elemtype
  uint64_t stride[4];  // bytes, from the second dimension on; the innermost is contiguous
  uint16_t box[5];     // elements per dimension of a copy
};
static_assert(sizeof(TensorMap) <= 128);

// One row of a bulk copy. A row is contiguous in global memory and, except for the swizzle, in
// shared memory. Bytes outside the tensor are filled by a load and left out by a store.
struct BulkRow {
  uint64_t global;          // address of the first byte inside the tensor
  uint32_t shared;          // offset of the row in shared memory, before the swizzle is applied
  uint32_t before, inside;  // bytes of the row before the tensor, and bytes inside the tensor
};

// A bulk copy of the asynchronous proxy that has been issued.
struct BulkCopy {
  int32_t warp, lane;
  bool store = false, done = false, nan = false;
  int32_t reduction = -1;  // a result of reduction_of; -1: no reduction
  Type type = Type::none;  // element type of a reduction
  uint32_t swizzle = 0, row_bytes = 0;
  uint32_t barrier = 0;  // offset of the mbarrier that counts the bytes of a load
  uint16_t slot = 0;     // entry of the copy engine's thread in vector clocks, for a load's stamps
  std::vector<BulkRow> rows;
};

struct Block;
struct Cluster;

struct Warp {
  Block* block = nullptr;
  const Program* program = nullptr;
  int32_t index = 0;
  int32_t first = 0;  // number of the block's first thread in the cluster
  Mask live = 0;
  std::vector<Fragment> fragments;
  int32_t pc = 0;  // index of the running instruction
  std::vector<uint32_t> file;
  std::vector<Mask> valid;
  // By register, for lanes that are not in `valid`: one bit for each byte of the register, which is
  // set if the byte is valid.
  std::unordered_map<int32_t, std::array<uint8_t, kLanes>> partial;
  // By register. locked: the number of wgmma in flight that use the register. hidden: the valid
  // lanes of an accumulator of a wgmma in flight. The entry of such an accumulator in `valid` is 0,
  // so that a use by another instruction is a fault. written: the value of `executed` at the last
  // write to the register.
  std::vector<int32_t> locked;
  std::unordered_map<int32_t, Mask> hidden;
  std::vector<uint64_t> written;
  int32_t locks = 0;
  // By lane: the two vector clocks of order.cpp, which have the times of threads of this cluster.
  std::array<Clock, kLanes> base, fenced;
  std::array<Knowledge, kLanes> others;  // clocks of threads of other clusters
  // By lane and scope. offered: the clocks at the last fence of this scope or of a larger scope,
  // which later relaxed writes publish. met: the published clocks at the addresses of relaxed
  // reads, which the next fence of this scope or of a larger scope acquires.
  std::array<ByScope, kLanes> offered, met;
  std::array<uint32_t, kLanes> time;
  // The groups of asynchronous operations. The last group is not yet committed.
  std::array<std::vector<std::vector<AsyncCopy>>, kLanes> copies;
  std::vector<std::vector<PendingMma>> products;
  std::array<std::vector<std::vector<BulkCopy>>, kLanes> stores;
  uint64_t mma_fence = 0;  // `executed` at the last wgmma.fence
  uint64_t issued = 0;     // number of the last wgmma
  int32_t barrier = -1;    // number of the barrier at which the warp waits, or -1
  uint64_t polls = 0;      // unsuccessful polls in a row
  int32_t registers = 0;   // registers per thread, as setmaxnreg counts them
  int32_t missing = 0;     // registers that setmaxnreg.inc waits for
  // State of barrier.cluster. arrived: lanes that have arrived in the current phase. passed: lanes
  // that arrived in the last complete phase and have not waited since. waited: lanes that have
  // waited at least once.
  Mask arrived = 0, passed = 0, waited = 0;
  int32_t lane = -1;     // lane of the last memory access
  uint64_t lane_at = 0;  // `executed` at the last memory access
  uint64_t executed = 1;
  bool carry[kLanes] = {};

  uint32_t* word(Reg r) { return file.data() + r.at; }
  uint64_t* wide(Reg r) { return reinterpret_cast<uint64_t*>(file.data() + r.at); }
  Mask ok(Reg r) const { return valid[r.id]; }
  // The number of a thread in its cluster, as in stamps and clocks.
  int32_t thread(int lane) const { return first + index * kLanes + lane; }
  uint64_t get(Reg r, int lane) {
    if (r.width == Width::wide) return wide(r)[lane];
    if (r.width == Width::pred) return file[r.at] >> lane & 1;
    return word(r)[lane];
  }
  // Returns the address [r+offset]. With a register of 32 bits, it is the sum modulo 2^32, so that
  // a negative register and a positive offset may reach shared memory, as compilers assume.
  uint64_t address(Reg r, int lane, int64_t offset) {
    const uint64_t sum = get(r, lane) + (uint64_t)offset;
    return r.width == Width::wide ? sum : (uint32_t)sum;
  }
  void set(Reg r, int lane, uint64_t value) {
    if (r.width == Width::wide) {
      wide(r)[lane] = value;
    } else if (r.width == Width::pred) {
      file[r.at] = (file[r.at] & ~(1u << lane)) | (uint32_t)(value & 1) << lane;
    } else {
      word(r)[lane] = r.bits < 32 ? (uint32_t)value & ((1u << r.bits) - 1) : (uint32_t)value;
    }
  }
  // Records that the lanes of mask have written r, and which of these lanes are valid.
  void wrote(Reg r, Mask mask, Mask valid_lanes) {
    if (locks && locked[r.id]) in_flight();
    if (!partial.empty()) partial.erase(r.id);
    written[r.id] = executed;
    valid[r.id] = (valid[r.id] & ~mask) | (valid_lanes & mask);
  }
  // Records that the lanes of mask have written r, whose lanes may be partly valid. bytes[lane] has
  // one bit for each valid byte.
  void wrote_bytes(Reg r, Mask mask, const uint8_t* bytes);
  uint8_t valid_bytes(Reg r, int lane) const {
    if (valid[r.id] >> lane & 1) return 0xff;
    const auto found = partial.find(r.id);
    return found == partial.end() ? 0 : found->second[lane];
  }
  [[noreturn]] void in_flight();
  // Reports a fault unless all lanes of mask are valid in r. The message names the operand by
  // `use`.
  void need(Reg r, Mask mask, const char* use);
};

struct Barrier {
  int32_t expected = 0;                  // number of threads; 0: all threads of the block
  std::vector<int32_t> waiting, passed;  // warps that wait, and warps that only arrive
  Times times, fenced;                   // clocks of the warps in `passed`
  std::vector<std::pair<const Instr*, Mask>> votes;  // votes of bar.red, in the order of `waiting`
};

struct MBarrier {
  uint32_t expected = 0, pending = 0;
  int64_t transactions = 0;
  uint64_t phase = 0;
  Times arrivals, completed;  // joined clocks of the arrivals in this phase and in the last phase
  Times arrivals_fenced, completed_fenced;
  Stamp made;  // stamp of mbarrier.init
};

struct Block {
  Launch* launch = nullptr;
  Cluster* cluster = nullptr;
  uint32_t id[3] = {}, number = 0, rank = 0;
  std::vector<Warp> warps;
  std::vector<uint8_t> shared, shared_valid;
  std::vector<Cell> cells;
  std::unordered_map<uint32_t, std::vector<Stamp>> readers;  // by cell: reads besides Cell::read
  std::array<Barrier, kBarriers> barriers;
  std::map<uint32_t, MBarrier> mbarriers;
  std::map<uint64_t, Stamp> map_fences;  // last fence.proxy.tensormap, by address of the map
  std::vector<BulkCopy> bulk;            // loads that have not completed
  std::vector<uint32_t> slot_time;       // next time of each thread of the copy engine
  std::map<uint32_t, uint16_t> slots;
  std::vector<std::vector<uint8_t>> local;  // by thread: the bytes, then one valid flag per byte
  std::mt19937_64 random;
  Counts counts;
  int32_t registers = 0;  // registers that warps have released and that no warp has taken since
  bool late = false;      // whether asynchronous operations take effect at the wait, not at issue
  Allocation* last = nullptr;

  Block(Cluster& cluster, uint32_t number, uint32_t rank);
  bool live() const;
  void step(Warp& w, int64_t quantum);
  void turn(Warp& w, int64_t quantum);  // calls step, and names the warp in a fault
  bool chance(double p) { return std::uniform_real_distribution<double>()(random) < p; }

  // The happens-before order. `after` returns whether the access of a stamp happens before the
  // current access of the lane. `fenced_after` returns whether a proxy fence has also made the
  // access visible to the asynchronous proxy.
  bool after(const Warp& w, int lane, const Stamp& stamp) const;
  bool fenced_after(const Warp& w, int lane, const Stamp& stamp) const;
  Stamp now(const Warp& w, int lane, Scope scope = Scope::weak) const;
  // The stamp of an asynchronous operation that is not complete.
  Stamp pending(const Warp& w, int lane, bool async) const;
  // The smallest scope that includes the threads of both stamps.
  Scope between(const Stamp& a, const Stamp& b) const;
  // Whether two accesses are morally strong in the PTX memory model: both are strong, and each
  // scope includes the thread of the other access.
  bool morally_strong(const Stamp& a, const Stamp& b) const {
    return std::min(a.scope, b.scope) >= between(a, b);
  }
  // Returns the name of the thread of a stamp, such as "thread 5" in this block, or "thread 5 of
  // block 3".
  std::string who(const Stamp& stamp) const;
  void join(const std::vector<std::pair<Warp*, int>>& threads);
  void sync_lanes(Warp& w, Mask mask);
  void acquire(Warp& w, int lane, const Times& times, const Times& fenced_times);
  void release(Warp& w, int lane, Times& times, Times& fenced_times);
  // Strong accesses. A releasing write publishes the clocks that its thread knows, and an acquiring
  // read learns the published clocks. fence() learns the clocks that earlier relaxed reads have
  // met, and lets later relaxed writes publish clocks. Clocks pass from one thread to another only
  // if the scopes of the write, the read and the fences include both threads.
  Knowledge known(Warp& w, int lane);
  void learn(Warp& w, int lane, const Knowledge& from);
  void publish(Warp& w, int lane, uint64_t place, Scope scope, bool releases, bool reads);
  void observe(Warp& w, int lane, uint64_t place, Scope scope, bool acquires);
  void fence(Warp& w, int lane, Scope scope);

  // Shared memory. Addresses begin at shared_base, and offsets begin at 0. The functions record
  // accesses by any thread of the cluster to the shared memory of this block.
  uint32_t shared_offset(uint64_t address, uint64_t size, uint64_t align) const;
  void note_read(Warp& w, int lane, uint32_t offset, uint32_t size, const Stamp& stamp);
  void note_write(Warp& w, int lane, uint32_t offset, uint32_t size, const Stamp& stamp);
  void settle_read(Warp& w, int lane, uint32_t offset, uint32_t size);
  void settle_write(uint16_t thread, uint32_t offset, uint32_t size, uint32_t time);
  // Global memory. `global` returns the allocation of an access, and reports a fault if the access
  // is not allowed. `note_global` records the access.
  Allocation* global(Warp& w, uint64_t address, uint64_t size, uint64_t align, bool write);
  void note_global(Warp& w, int lane, Allocation& a, uint64_t address, uint32_t size, bool write,
                   Scope scope);

  void arrive(Warp& w, int id, int32_t expected, bool wait, const Instr* vote = nullptr,
              Mask yes = 0);
  void finish_barrier(int id);  // does nothing before all warps have arrived
  void complete_load(size_t index);
  void finish_copy(AsyncCopy& copy);
  void check_phase(MBarrier& barrier);
};

// The blocks of a cluster, which one thread of the host runs, and their barrier. Without clusters,
// each block is a cluster of its own.
struct Cluster {
  Launch* launch = nullptr;
  uint32_t number = 0;
  std::vector<std::unique_ptr<Block>> blocks;  // by rank
  // The clocks of barrier.cluster: of the arrivals in the current phase, and in the last complete
  // phase.
  Times arrivals, completed, arrivals_fenced, completed_fenced;
  Knowledge arrivals_others, completed_others;

  Cluster(Launch& launch, uint32_t number);
  void run();
  void complete_load(size_t index);  // the index counts the loads of all blocks
  void complete_phase();             // does nothing before all threads have arrived
  void leave(Warp& w);               // is called after lanes of a warp have exited
  // home returns the block in whose shared memory an address is, and member the block of a rank.
  // Both report a fault if that block has ended, or if the thread does not know that it has
  // started.
  Block& home(const Warp& w, int lane, uint64_t address) const;
  Block& member(const Warp& w, int lane, uint32_t rank) const;
  Fault deadlock(bool at_barriers) const;
};

Knowledge joined(const Knowledge& a, const Knowledge& b);

inline Stamp Block::now(const Warp& w, int lane, Scope scope) const {
  return {cluster->number + 1, (uint16_t)w.thread(lane), false, scope, w.time[lane]};
}
inline Stamp Block::pending(const Warp& w, int lane, bool async) const {
  return {cluster->number + 1, (uint16_t)w.thread(lane), async, Scope::weak, kPending};
}

// Returns the mbarrier of the block `home` at the offset `at`. Reports a fault if there is none, or
// if its initialization does not happen before the access of the lane.
MBarrier& existing(Warp& w, Block& home, uint32_t at, int lane);

// Functions for one element in memory, for wmma and for tensor maps. `space` is one of these codes,
// which equal the values of Space in access.h. `ok` tells whether all bytes of the element are
// valid.
constexpr int kElementGeneric = 0, kElementGlobal = 1, kElementShared = 2;
struct Element {
  uint64_t bits;
  bool ok;
};
Element element_at(Warp& w, int lane, int space, uint64_t address, uint32_t size);
void put_element(Warp& w, int lane, int space, uint64_t address, uint32_t size, uint64_t bits,
                 bool ok);

// Combines the element at `to` with `value`, and stores the result at `to`, for a bulk reduction.
// `op` is a result of reduction_of.
struct Mnemonic;
int32_t reduction_of(const Mnemonic& name);  // -1: no reduction
void reduce_element(Type type, int32_t op, uint8_t* to, uint64_t value);

// The entry in Warp::written of a register that holds a constant.
constexpr uint64_t kAlways = ~0ull;

// The number of threads of the copy engine, which stand for bulk loads in the happens-before order.
// Each mbarrier that counts bytes has one of these threads. For each block, a vector clock has
// entries for the threads of the block, then for the threads of the copy engine, then for the
// warpgroups. The time of a warpgroup is the number of its last wgmma that has been waited for.
constexpr int kSlots = 64;

// Counts the sectors of 32 bytes that a warp touches, and the fewest sectors that could hold as
// many bytes.
void count_global(Block& b, Mask m, const uint64_t* address, uint32_t size);

// Returns the address to which a swizzle with a pattern of `width` bytes moves the 16 bytes at
// `address`. Bulk copies and matrix descriptors share this function.
inline uint32_t swizzled(uint32_t address, uint32_t width) {
  return width < 32 ? address : address ^ ((address >> 7 & (width / 16 - 1)) << 4);
}

inline bool all_valid(const uint8_t* valid, uint32_t size) {
  return std::memchr(valid, 0, size) == nullptr;
}

// Runs the blocks in launch.blocks, with the other blocks of their clusters, on `threads` threads
// of the host. Throws Fault if the kernel has a fault.
void run(Launch& launch, int threads);

[[noreturn]] void fault(const char* kind, const std::string& what, int lane = -1);

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class F>
inline void each_lane(Mask mask, F&& f) {
  while (mask) {
    f(__builtin_ctz(mask));
    mask &= mask - 1;
  }
}

}  // namespace ptxmachine
