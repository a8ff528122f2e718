// The state of a running kernel: the launch, a block, its warps, memory and the happens-before
// order.

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

// Handlers that work on all lanes are compiled for these; machine.cpp refuses to run without them.
#define FASTBERT_PTX_SIMD __attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt")))

// What hardware allows: the limits of instructions, from the PTX ISA. ptxmachine/limits.py has
// those of texts and launches.
constexpr int kBarriers = 16;                                   // named barriers of a block
constexpr int64_t kMostArrivals = (1 << 20) - 1;                // of an mbarrier, and bytes
constexpr uint64_t kStrideEnd = 1ull << 40;                     // bytes of a tensor map's stride
constexpr uint64_t kMapAlignment = 64, kTensorAlignment = 128;  // of a map; in shared memory
constexpr int kGroupWarps = 4;                                  // of a warpgroup
constexpr int32_t kLeastRegisters = 24, kMostRegisters = 256;   // of a thread, for setmaxnreg

struct Fault : std::runtime_error {
  std::string kind;  // "out of bounds", "race", ...
  int32_t instr = -1, block = -1, warp = -1, lane = -1;
  Fault(std::string k, const std::string& what) : std::runtime_error(what), kind(std::move(k)) {}
};

// Vector clocks
// ------------------------------------------------------------------------------------

// clock[t]: the last time of thread t that the owner of this vector is after.
using Times = std::vector<uint32_t>;
using Clock = std::shared_ptr<const Times>;

// What a thread knows of the threads of several blocks: their clocks by number of the block.
using Knowledge = std::shared_ptr<const std::map<uint32_t, Clock>>;

// What a strong access leaves at its place for those that read its value.
struct Released {
  uint32_t block = 0;  // of the last strong write
  Scope scope = Scope::weak;
  Knowledge near, far;  // for threads of the block, and for those of other blocks
};

// When and by whom a place was last accessed: block, thread, time.
struct Stamp {
  uint32_t block = 0;  // 1 + number of the block; 0: never; kMany: by several blocks
  uint16_t thread = 0;
  bool async = false;  // by the async proxy, or the fill of a cp.async
  Scope scope = Scope::weak;
  uint32_t time = 0;  // kPending: not complete
};
constexpr uint32_t kMany = ~0u;
constexpr uint32_t kPending = ~0u;

struct Cell {
  Stamp write, read;
};

// Memory
// -------------------------------------------------------------------------------------------

struct Allocation {
  uint64_t begin = 0, bytes = 0;
  bool writable = true;
  std::string name;
  uint8_t* host = nullptr;
  std::vector<uint8_t> valid;  // one byte per byte; empty: all of it is
  std::unique_ptr<std::array<std::mutex, 64>> locks;
  std::vector<Cell> cells;
  bool holds(uint64_t address, uint64_t size) const {
    return address >= begin && size <= bytes && address - begin <= bytes - size;
  }
  // Cells lie at multiples of the granule, wherever the allocation begins.
  uint64_t cell_of(uint64_t address, uint32_t granule) const {
    return address / granule - begin / granule;
  }
};

// Generic addresses of these windows are shared and local memory; all others are addresses of the
// host.
constexpr uint64_t kSharedWindow = 0x0100000000000000ull;
constexpr uint64_t kLocalWindow = 0x0200000000000000ull;
constexpr uint64_t kParamWindow = 0x0400000000000000ull;
constexpr uint64_t kWindowMask = 0xff00000000000000ull;

struct Counts {
  uint64_t warp[kPipes] = {};  // instructions of warps by pipe
  uint64_t instructions = 0;
  uint64_t tensor_flops = 0;         // 2 per multiplication in a matrix instruction
  uint64_t tensor_shared_bytes = 0;  // that wgmma reads: A by warp, B once by four warps
  uint64_t global_bytes = 0, global_sectors = 0, global_least_sectors = 0;
  uint64_t shared_wavefronts = 0, shared_least_wavefronts = 0;
  uint64_t barriers = 0;
  uint64_t conflicting_stores = 0;  // of lanes that write other values than the winner to its place
  void add(const Counts& other);
};

enum class Accumulate : int32_t { forward, reverse, exact, truncate };

struct Options {
  uint64_t seed = 0;
  double approximate = 0;  // -1, 0 or 1: the share of the documented error that approximations make
  Accumulate accumulate = Accumulate::forward;
  bool races = true;
  bool count = true;
  int64_t limit = 0;  // instructions of a warp, 0: no limit
};

// Ends a block because another one has ended with a fault. The block might wait for that one.
struct Stopped {};

struct Launch {
  const Program* program = nullptr;
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  int32_t threads = 1, warps = 1;
  int32_t registers = 0;  // of a thread at the start; 0: ptxas would ignore setmaxnreg
  std::vector<uint8_t> params;
  uint32_t shared_bytes = 0, static_shared = 0, local_bytes = 0;
  uint32_t shared_base = 1024;   // shared memory's first address; not 0, as on hardware
  std::vector<uint32_t> blocks;  // numbers of the blocks to run; empty: all of the grid
  std::vector<std::unique_ptr<Allocation>> memory;  // sorted by address
  // By the place of strong accesses: what a thread knew that wrote there in order to release it.
  std::unordered_map<uint64_t, Released> released;
  Options options;
  Counts counts;
  std::mutex lock;
  std::atomic<bool> stopped{false};  // a block has ended with a fault

  Allocation* find(uint64_t address, uint64_t size, Allocation* last) const;
};

// Blocks and warps
// ---------------------------------------------------------------------------------

struct Fragment {
  int32_t pc;
  Mask mask;
  bool waits = false;  // at a warp-level synchronisation for its other lanes
};

// A copy that is under way: its bytes arrive in shared memory at completion.
struct AsyncCopy {
  int lane;
  uint32_t to;
  uint64_t from;
  uint32_t bytes, filled;  // bytes copied, bytes written (the rest zero)
  bool done = false;
};

// A range of shared memory that an asynchronous operation reads until it is waited for.
struct Range {
  uint32_t begin, bytes;
};

struct PendingMma {
  const Instr* instr;
  uint64_t a, b;  // descriptors
  bool scale_d;
  bool done = false;
  std::vector<uint32_t> operand_a;  // the registers of A as they were at issue
  std::vector<Range> reads;
};

// A tensor map in the machine's own 128 bytes; src/ptxmachine/tensor_map.py writes them.
struct TensorMap {
  char magic[4];
  uint8_t rank, element_bytes, swizzle, fill_nan;  // swizzle: 0, 32, 64 or 128 bytes
  uint64_t address;
  uint32_t size[5];    // elements, the innermost first
  uint32_t type;       // as .elemtype of tensormap.replace
  uint64_t stride[4];  // bytes, of all but the innermost
  uint16_t box[5];     // elements of a copy
};
static_assert(sizeof(TensorMap) <= 128);

// One row of a bulk copy: contiguous in global memory and, but for the swizzle, in shared memory.
struct BulkRow {
  uint64_t global;          // address; the row's bytes outside the tensor are filled or left out
  uint32_t shared;          // offset before the swizzle
  uint32_t before, inside;  // bytes outside at the front, bytes inside
};

// A bulk copy of the asynchronous proxy that has been issued.
struct BulkCopy {
  int32_t warp, lane;
  bool store = false, done = false, nan = false;
  int32_t reduction = -1;  // of a store, as reduction_of gives it
  Type type = Type::none;  // of the elements of a reduction
  uint32_t swizzle = 0, row_bytes = 0;
  uint32_t barrier = 0;  // offset of the mbarrier that counts the bytes of a load
  uint16_t slot = 0;     // the engine's thread, whose times the accesses have
  std::vector<BulkRow> rows;
};

struct Block;

struct Warp {
  Block* block = nullptr;
  const Program* program = nullptr;
  int32_t index = 0;
  Mask live = 0;
  std::vector<Fragment> fragments;
  int32_t pc = 0;  // of the instruction that runs
  std::vector<uint32_t> file;
  std::vector<Mask> valid;
  // By register, for lanes that valid leaves out: one bit for each byte that is valid.
  std::unordered_map<int32_t, std::array<uint8_t, kLanes>> partial;
  // By register: how many wgmma in flight use it, which of its lanes are valid meanwhile
  // (Warp::valid is 0, so that nothing else can use them), and the number of the instruction that
  // wrote it last.
  std::vector<int32_t> locked;
  std::unordered_map<int32_t, Mask> hidden;
  std::vector<uint64_t> written;
  int32_t locks = 0;
  // Happens-before, by lane.
  std::array<Clock, kLanes> base, fenced;
  std::array<Knowledge, kLanes> others;  // of the threads of other blocks
  // By lane: what a relaxed write passes on since the last fence, and what relaxed reads have met
  // and the next fence acquires. Those of other blocks need a fence of the device's scope.
  std::array<Knowledge, kLanes> offered, met, offered_far, met_far;
  std::array<uint32_t, kLanes> time;
  std::array<std::vector<std::vector<AsyncCopy>>, kLanes> copies;  // groups; the last is open
  std::vector<std::vector<PendingMma>> products;                   // groups; the last is open
  std::array<std::vector<std::vector<BulkCopy>>, kLanes> stores;   // groups of bulk stores
  uint64_t mma_fence = 0;                                          // number of the last wgmma.fence
  int32_t barrier = -1;                                            // that the warp waits at
  uint64_t polls = 0;                                              // unsuccessful polls in a row
  int32_t registers = 0;  // of a thread, as setmaxnreg counts them
  int32_t missing = 0;    // registers that setmaxnreg.inc waits for
  int32_t lane = -1;      // that reached for memory last, in the instruction of that number
  uint64_t lane_at = 0;
  uint64_t executed = 1;
  bool carry[kLanes] = {};

  uint32_t* word(Reg r) { return file.data() + r.at; }
  uint64_t* wide(Reg r) { return reinterpret_cast<uint64_t*>(file.data() + r.at); }
  Mask ok(Reg r) const { return valid[r.id]; }
  int32_t thread(int lane) const { return index * kLanes + lane; }
  uint64_t get(Reg r, int lane) {
    if (r.width == Width::wide) return wide(r)[lane];
    if (r.width == Width::pred) return file[r.at] >> lane & 1;
    return word(r)[lane];
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
  // Notes that the lanes of mask have written r, with these lanes valid.
  void wrote(Reg r, Mask mask, Mask valid_lanes) {
    if (locks && locked[r.id]) in_flight();
    if (!partial.empty()) partial.erase(r.id);
    written[r.id] = executed;
    valid[r.id] = (valid[r.id] & ~mask) | (valid_lanes & mask);
  }
  // The same where the bytes of a lane are valid or not each for itself; bytes by lane.
  void wrote_bytes(Reg r, Mask mask, const uint8_t* bytes);
  uint8_t valid_bytes(Reg r, int lane) const {
    if (valid[r.id] >> lane & 1) return 0xff;
    const auto found = partial.find(r.id);
    return found == partial.end() ? 0 : found->second[lane];
  }
  [[noreturn]] void in_flight();
  // Faults unless the lanes of mask hold a value that was written.
  void need(Reg r, Mask mask, const char* use);
};

struct Barrier {
  int32_t expected = 0;                              // threads; 0: all of the block
  std::vector<int32_t> waiting, passed;              // warps that wait, and that only arrived
  Times times, fenced;                               // released by those that only arrived
  std::vector<std::pair<const Instr*, Mask>> votes;  // of bar.red, by warp of waiting
};

struct MBarrier {
  uint32_t expected = 0, pending = 0;
  int64_t transactions = 0;
  uint64_t phase = 0;
  Times arrivals, completed;  // clocks of this phase's arrivals and of the last complete phase
  Times arrivals_fenced, completed_fenced;
  Stamp made;  // by mbarrier.init
};

struct Block {
  Launch* launch = nullptr;
  uint32_t id[3] = {}, number = 0;
  std::vector<Warp> warps;
  std::vector<uint8_t> shared, shared_valid;
  std::vector<Cell> cells;
  std::unordered_map<uint32_t, std::vector<Stamp>> readers;  // of cells with several
  std::array<Barrier, kBarriers> barriers;
  std::map<uint32_t, MBarrier> mbarriers;
  std::map<uint64_t, Stamp> map_fences;  // fence.proxy.tensormap by the address of the map
  std::vector<BulkCopy> bulk;            // loads under way
  std::vector<uint32_t> slot_time;       // of the engine's threads, one for each mbarrier
  std::map<uint32_t, uint16_t> slots;
  std::vector<std::vector<uint8_t>> local;  // by thread
  std::mt19937_64 random;
  Counts counts;
  int32_t registers = 0;  // that warps have given, and that no warp has taken since
  bool late = false;      // asynchronous operations take effect at the wait, not at issue
  Allocation* last = nullptr;

  Block(Launch& launch, uint32_t number);
  void run();
  void step(Warp& w, int64_t quantum);
  void turn(Warp& w, int64_t quantum);  // step, whose faults name the warp
  bool chance(double p) { return std::uniform_real_distribution<double>()(random) < p; }

  // Happens-before.
  bool after(const Warp& w, int lane, const Stamp& stamp) const;
  bool fenced_after(const Warp& w, int lane, const Stamp& stamp) const;
  Stamp now(const Warp& w, int lane) const {
    return {number + 1, (uint16_t)w.thread(lane), false, Scope::weak, w.time[lane]};
  }
  // Of an asynchronous operation that is not complete.
  Stamp pending(const Warp& w, int lane, bool async) const {
    return {number + 1, (uint16_t)w.thread(lane), async, Scope::weak, kPending};
  }
  void join(const std::vector<std::pair<Warp*, int>>& threads);
  void sync_lanes(Warp& w, Mask mask);
  void acquire(Warp& w, int lane, const Times& times, const Times& fenced_times);
  void release(Warp& w, int lane, Times& times, Times& fenced_times);
  // Strong accesses: a write passes on what its thread knows, a read learns it. fence() makes
  // relaxed writes after it and relaxed reads before it do the same. Between blocks, all of them
  // need the scope of the device.
  Knowledge known(Warp& w, int lane);
  void learn(Warp& w, int lane, const Knowledge& from);
  void publish(Warp& w, int lane, uint64_t place, Scope scope, bool releases, bool reads);
  void observe(Warp& w, int lane, uint64_t place, Scope scope, bool acquires);
  void fence(Warp& w, int lane, Scope scope);
  // Whether strong accesses by this block and another, or a stamp of one, may meet at a place.
  bool morally_strong(Scope scope, uint32_t block, Scope other) const {
    return scope != Scope::weak && other != Scope::weak &&
           (block == number || (scope == Scope::device && other == Scope::device));
  }

  // Shared memory; address counts from shared_base.
  uint32_t shared_offset(uint64_t address, uint64_t size, uint64_t align);
  void note_read(Warp& w, int lane, uint32_t offset, uint32_t size, const Stamp& stamp);
  void note_write(Warp& w, int lane, uint32_t offset, uint32_t size, const Stamp& stamp);
  void settle_read(Warp& w, int lane, uint32_t offset, uint32_t size);
  void settle_write(uint16_t thread, uint32_t offset, uint32_t size, uint32_t time);
  // Global memory.
  Allocation* global(Warp& w, uint64_t address, uint64_t size, uint64_t align, bool write);
  void note_global(Warp& w, int lane, Allocation& a, uint64_t address, uint32_t size, bool write,
                   Scope scope);

  void arrive(Warp& w, int id, int32_t expected, bool wait, const Instr* vote = nullptr,
              Mask yes = 0);
  void finish_barrier(int id);  // if all have arrived
  Fault deadlock(bool at_barriers) const;
  void complete_load(size_t index);
  void finish_copy(AsyncCopy& copy);
  void check_phase(MBarrier& barrier);
};

// One element of a fragment that wmma loads or stores, in the space of that code.
constexpr int kElementGeneric = 0, kElementGlobal = 1, kElementShared = 2;
struct Element {
  uint64_t bits;
  bool ok;
};
Element element_at(Warp& w, int lane, int space, uint64_t address, uint32_t size);
void put_element(Warp& w, int lane, int space, uint64_t address, uint32_t size, uint64_t bits,
                 bool ok);

// One element of a bulk reduction; op as reduction_of gives it.
struct Mnemonic;
int32_t reduction_of(const Mnemonic& name);  // -1: none
void reduce_element(Type type, int32_t op, uint8_t* to, uint64_t value);

// In Warp::written: a register that holds a constant.
constexpr uint64_t kAlways = ~0ull;

// Threads of the copy engine that a vector clock has beside those of the block.
constexpr int kSlots = 64;

// Sectors of 32 bytes that a warp touches, and the fewest that hold as many bytes.
void count_global(Block& b, Mask m, const uint64_t* address, uint32_t size);

// The place of 16 bytes in a swizzle of so many bytes, for a copy and for a matrix descriptor.
inline uint32_t swizzled(uint32_t address, uint32_t width) {
  return width < 32 ? address : address ^ ((address >> 7 & (width / 16 - 1)) << 4);
}

inline bool all_valid(const uint8_t* valid, uint32_t size) {
  return std::memchr(valid, 0, size) == nullptr;
}

// Runs the chosen blocks on this many threads; throws Fault.
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
