// This file executes AMX in software, for tests of the compiled kernels. The first byte of each
// tile instruction is replaced by an invalid instruction, so that it traps on processors with and
// without AMX. The signal handler decodes the tile instruction, computes it on tiles in memory, and
// continues after the instruction. Each thread has its own tiles.
//
// The code follows Intel's manual (volume 2: instruction format, VEX prefix, pages of instructions)
// and shares nothing with csrc/cpu/isa/tile.h, so that each checks the other. If the manual says
// that an instruction faults, the program stops with a message. The previous signal handler gets
// any other invalid instruction.

#include <immintrin.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace {

constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64, kMostSites = 4096;

// Every tile instruction begins with a three-byte VEX prefix. PUSH ES, which replaces its first
// byte, is invalid in 64-bit mode on every processor.
constexpr uint8_t kVex = 0xc4, kPushEs = 0x06;

enum Kind { kConfigure, kRelease, kZero, kLoad, kLoadOnce, kStore, kBf16, kSS, kSU, kUS, kUU };

struct State {
  bool configured = false;
  int start_row = 0;
  int rows[kTiles] = {}, bytes[kTiles] = {};
  alignas(64) uint8_t data[kTiles][kMostRows][kMostBytes] = {};
};

thread_local State state;
std::atomic<int64_t> configured_threads;
struct sigaction previous;

}  // namespace

// This array has the addresses of the executed instructions in no particular order; unused entries
// are 0.
extern "C" std::atomic<uint64_t> trapped_tiles_sites[kMostSites];
std::atomic<uint64_t> trapped_tiles_sites[kMostSites];

namespace {

[[noreturn]] void fault(const char* what) {
  const char* parts[] = {"trapped tiles: ", what, "\n"};
  for (const char* part : parts) {
    if (write(STDERR_FILENO, part, strlen(part)) < 0) break;
  }
  abort();
}

void require(bool condition, const char* what) {
  if (!condition) fault(what);
}

// Decoding

struct Instruction {
  Kind kind;
  int reg, rm, vvvv;  // ModRM.reg, ModRM.rm if it names a register, VEX.vvvv
  uint64_t address;   // base + displacement of a memory operand
  uint64_t stride;    // scaled index register of a memory operand; 0 if it has none
  const uint8_t* next;
};

// These are the general registers in the order of their encoding.
constexpr int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                REG_R12, REG_R13, REG_R14, REG_R15};

// These are the mandatory prefixes that VEX.pp encodes.
enum Prefix { kNone, k66, kF3, kF2 };

bool find_kind(int opcode, Prefix prefix, bool memory, int reg, int rm, Kind& kind) {
  switch (opcode) {
    case 0x49:
      if (memory && prefix == kNone && reg == 0) return kind = kConfigure, true;
      if (!memory && prefix == kNone && reg == 0 && rm == 0) return kind = kRelease, true;
      if (!memory && prefix == kF2 && rm == 0) return kind = kZero, true;
      return false;
    case 0x4b:
      if (!memory || rm != 4 || prefix == kNone) return false;  // a SIB byte is mandatory
      return kind = prefix == kF2 ? kLoad : prefix == k66 ? kLoadOnce : kStore, true;
    case 0x5c:
      return kind = kBf16, !memory && prefix == kF3;
    case 0x5e:
      kind = prefix == kF2 ? kSS : prefix == kF3 ? kSU : prefix == k66 ? kUS : kUU;
      return !memory;
    default:
      return false;
  }
}

template <class T>
T read(const uint8_t*& p) {
  T value;
  memcpy(&value, p, sizeof(value));
  p += sizeof(value);
  return value;
}

bool decode(const uint8_t* p, const greg_t* registers, Instruction& instruction) {
  if (*p++ != kPushEs) return false;
  const int second = *p++, third = *p++, opcode = *p++, modrm = *p++;
  const bool high_reg = !(second & 0x80), high_index = !(second & 0x40),
             high_base = !(second & 0x20);
  const int map = second & 0x1f, vvvv = ~(third >> 3) & 15;
  const bool w = third & 0x80, l = third & 4;
  if (map != 2 || w || l) return false;
  const int mod = modrm >> 6, reg = modrm >> 3 & 7, rm = modrm & 7;
  const bool memory = mod != 3;
  if (!find_kind(opcode, (Prefix)(third & 3), memory, reg, rm, instruction.kind)) return false;

  const bool product = instruction.kind >= kBf16;
  require(!high_reg && (memory || !high_base), "a register number beyond the eighth tile");
  require(product ? vvvv < kTiles : vvvv == 0, "VEX.vvvv");
  instruction.reg = reg, instruction.rm = rm, instruction.vvvv = vvvv;
  instruction.address = instruction.stride = 0;
  if (memory) {
    const auto value = [&](int number) { return (uint64_t)registers[kRegisters[number]]; };
    bool relative = false, wide = mod == 2;
    if (rm == 4) {
      const int sib = *p++, index = (sib >> 3 & 7) | (high_index ? 8 : 0), base = sib & 7;
      if (index != 4) instruction.stride = value(index) << (sib >> 6);
      if (base == 5 && mod == 0) {
        wide = true;
      } else {
        instruction.address = value(base | (high_base ? 8 : 0));
      }
    } else if (rm == 5 && mod == 0) {
      relative = wide = true;
    } else {
      instruction.address = value(rm | (high_base ? 8 : 0));
    }
    if (wide) {
      instruction.address += (uint64_t)(int64_t)read<int32_t>(p);
    } else if (mod == 1) {
      instruction.address += (uint64_t)(int64_t)read<int8_t>(p);
    }
    if (relative) instruction.address += (uint64_t)p;
    // LDTILECFG has no stride; its index, if any, is part of the address.
    if (instruction.kind == kConfigure) instruction.address += instruction.stride;
  }
  instruction.next = p;
  return true;
}

// Execution

void release() {
  if (state.configured) --configured_threads;
  state.configured = false;
  state.start_row = 0;
  memset(state.rows, 0, sizeof(state.rows));
  memset(state.bytes, 0, sizeof(state.bytes));
  memset(state.data, 0, sizeof(state.data));
}

// Byte 0 of the configuration is the palette, byte 1 the start row, bytes 16 + 2 i and 17 + 2 i the
// bytes per row of tile i, and byte 48 + i the number of rows of tile i. All other bytes are
// reserved.
void configure(const uint8_t* p) {
  release();
  if (p[0] == 0) return;
  require(p[0] == 1, "LDTILECFG: #GP, palette");
  for (int i = 2; i < 64; ++i) {
    const bool reserved = i < 16 || (i >= 32 && i < 48) || i >= 56;
    require(!reserved || p[i] == 0, "LDTILECFG: #GP, a reserved byte is not 0");
  }
  for (int i = 0; i < kTiles; ++i) {
    const int bytes = p[16 + 2 * i] | p[17 + 2 * i] << 8, rows = p[48 + i];
    require(bytes <= kMostBytes && rows <= kMostRows, "LDTILECFG: #GP, a tile is too large");
    require((bytes == 0) == (rows == 0),
            "LDTILECFG: #GP, rows without bytes or bytes without rows");
    state.bytes[i] = bytes;
    state.rows[i] = rows;
  }
  require(p[1] < kMostRows, "LDTILECFG: start row");
  state.start_row = p[1];
  state.configured = true;
  ++configured_threads;
}

void require_valid(int tile) {
  require(state.configured, "#UD, tiles are not configured");
  require(state.rows[tile] != 0 && state.bytes[tile] != 0, "#UD, this tile is not configured");
}

void load(const Instruction& i) {
  require_valid(i.reg);
  int row = state.start_row;
  if (row == 0) memset(state.data[i.reg], 0, sizeof(state.data[i.reg]));
  for (; row < state.rows[i.reg]; ++row) {
    uint8_t* to = state.data[i.reg][row];
    memset(to, 0, kMostBytes);
    memcpy(to, (const void*)(i.address + row * i.stride), state.bytes[i.reg]);
  }
  memset(state.data[i.reg][row], 0, (kMostRows - row) * kMostBytes);
  state.start_row = 0;
}

void store(const Instruction& i) {
  require_valid(i.reg);
  for (int row = state.start_row; row < state.rows[i.reg]; ++row) {
    memcpy((void*)(i.address + row * i.stride), state.data[i.reg][row], state.bytes[i.reg]);
  }
  state.start_row = 0;
}

// This function is make_fp32 of the manual: a bf16 is the upper half of a float. The first bf16 of
// a pair is in the lower half of the word.
float widen_first(uint32_t pair) {
  pair <<= 16;
  float value;
  memcpy(&value, &pair, sizeof(value));
  return value;
}

float widen_second(uint32_t pair) {
  pair &= 0xffff0000u;
  float value;
  memcpy(&value, &pair, sizeof(value));
  return value;
}

// The function is not inlined, so that no operation moves across the change of the rounding mode.
// For speed, it computes whole rows of 16 words. Words after the end of a tile's row are 0, and are
// not written.
__attribute__((noinline)) void multiply_bf16(int c, int a, int b) {
  constexpr int kColumns = kMostBytes / 4;
  const State& t = state;
  const int pairs = t.bytes[a] / 4, columns = t.bytes[c] / 4, rows = t.rows[c];
  uint32_t left[kMostRows][kColumns], right[kMostRows][kColumns];
  memcpy(left, t.data[a], sizeof(left));
  memcpy(right, t.data[b], sizeof(right));
  for (int m = 0; m < rows; ++m) {
    float first[kColumns] = {}, second[kColumns] = {}, sums[kColumns];
    for (int k = 0; k < pairs; ++k) {
      for (int n = 0; n < kColumns; ++n) {
        first[n] = __builtin_fmaf(widen_first(left[m][k]), widen_first(right[k][n]), first[n]);
        second[n] = __builtin_fmaf(widen_second(left[m][k]), widen_second(right[k][n]), second[n]);
      }
    }
    memcpy(sums, t.data[c][m], sizeof(sums));
    for (int n = 0; n < kColumns; ++n) sums[n] += first[n] + second[n];
    memcpy(state.data[c][m], sums, 4 * columns);
  }
}

// Adds four products of a byte of A and a byte of B to each dword of C, modulo 2^32.
template <class Left, class Right>
void multiply_bytes(int c, int a, int b) {
  for (int m = 0; m < state.rows[c]; ++m) {
    for (int k = 0; k < state.bytes[a] / 4; ++k) {
      for (int n = 0; n < state.bytes[c] / 4; ++n) {
        int32_t sum = 0;
        for (int i = 0; i < 4; ++i) {
          sum += (int32_t)(Left)state.data[a][m][4 * k + i] *
                 (int32_t)(Right)state.data[b][k][4 * n + i];
        }
        uint32_t total;
        memcpy(&total, state.data[c][m] + 4 * n, sizeof(total));
        total += (uint32_t)sum;
        memcpy(state.data[c][m] + 4 * n, &total, sizeof(total));
      }
    }
  }
}

// ModRM.reg is the destination, ModRM.rm the first source, and VEX.vvvv the second source.
void multiply(const Instruction& i) {
  const int c = i.reg, a = i.rm, b = i.vvvv;
  require_valid(c);
  require_valid(a);
  require_valid(b);
  require(c != a && a != b && c != b, "#UD, two operands of a product are the same tile");
  require(state.start_row == 0, "#UD, a product after an unfinished load");
  require(state.bytes[c] % 4 == 0 && state.bytes[a] % 4 == 0 && state.bytes[b] % 4 == 0,
          "#UD, a row is no whole number of words");
  require(state.rows[a] == state.rows[c] && state.bytes[a] / 4 == state.rows[b] &&
              state.bytes[b] == state.bytes[c],
          "#UD, the tiles of a product do not fit together");
  switch (i.kind) {
    case kBf16: {
      // The manual prescribes rounding to nearest even, denormals as zeros, and no exceptions,
      // whatever the thread's floating-point mode is.
      const unsigned mode = _mm_getcsr();
      _mm_setcsr(0x9fc0);
      multiply_bf16(c, a, b);
      _mm_setcsr(mode);
      return;
    }
    case kSS:
      return multiply_bytes<int8_t, int8_t>(c, a, b);
    case kSU:
      return multiply_bytes<int8_t, uint8_t>(c, a, b);
    case kUS:
      return multiply_bytes<uint8_t, int8_t>(c, a, b);
    default:
      return multiply_bytes<uint8_t, uint8_t>(c, a, b);
  }
}

void note(uint64_t address) {
  for (int i = 0; i < kMostSites; ++i) {
    std::atomic<uint64_t>& site = trapped_tiles_sites[(address + i) % kMostSites];
    uint64_t seen = 0;
    if (site.compare_exchange_strong(seen, address) || seen == address) return;
  }
  fault("more tile instructions than there is room for");
}

void execute(const Instruction& i) {
  switch (i.kind) {
    case kConfigure:
      return configure((const uint8_t*)i.address);
    case kRelease:
      return release();
    case kZero:
      require_valid(i.reg);
      memset(state.data[i.reg], 0, sizeof(state.data[i.reg]));
      state.start_row = 0;
      return;
    case kLoad:
    case kLoadOnce:
      return load(i);
    case kStore:
      return store(i);
    default:
      return multiply(i);
  }
}

void pass_on(int signal, siginfo_t* info, void* context) {
  if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(signal, info, context);
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    return previous.sa_handler(signal);
  }
  // With the previous action restored, the instruction runs again and ends the process.
  sigaction(SIGILL, &previous, nullptr);
}

// Executes consecutive tile instructions in one call, because a signal takes longer than most tile
// instructions.
void handle(int signal, siginfo_t* info, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  Instruction instruction;
  if (!decode((const uint8_t*)registers[REG_RIP], registers, instruction)) {
    return pass_on(signal, info, context);
  }
  do {
    note((uint64_t)registers[REG_RIP]);
    execute(instruction);
    registers[REG_RIP] = (greg_t)instruction.next;
  } while (decode(instruction.next, registers, instruction));
}

}  // namespace

extern "C" {

int trapped_tiles_install() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGILL, &action, &previous);
}

int trapped_tiles_remove() { return sigaction(SIGILL, &previous, nullptr); }

// Makes the tile instructions at the addresses `sites` trap, or restores them if `trapping` is 0.
int trapped_tiles_set(const uint64_t* sites, int64_t count, int trapping) {
  const uint8_t before = trapping ? kVex : kPushEs, after = trapping ? kPushEs : kVex;
  const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  for (int64_t i = 0; i < count; ++i) {
    void* start = (void*)(sites[i] & ~(page - 1));
    if (*(const uint8_t*)sites[i] != before) return -1;
    if (mprotect(start, page, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) return -1;
    *(volatile uint8_t*)sites[i] = after;
    if (mprotect(start, page, PROT_READ | PROT_EXEC) != 0) return -1;
  }
  return 0;
}

// Installs the handler and traps the instructions at `sites`, which are hexadecimal addresses.
int trapped_tiles_begin(char** sites, int count) {
  if (trapped_tiles_install() != 0) return -1;
  for (int i = 0; i < count; ++i) {
    const uint64_t site = strtoull(sites[i], nullptr, 16);
    if (trapped_tiles_set(&site, 1, 1) != 0) return -1;
  }
  return 0;
}

// Returns the number of threads that have not released their tiles.
int64_t trapped_tiles_configured() { return configured_threads.load(); }
}
