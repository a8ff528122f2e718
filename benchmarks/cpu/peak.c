// The highest rate of products on one thread of this processor, measured on operands in registers
// or, for tiles, in the L1 cache. The operands are random, because tiles of zeros run faster than
// real data.
//
// ceilings.py compiles this file with -march=native at run time, so that the widest unit of the
// machine counts. Each function runs `rounds` rounds and returns the number of operations, of which
// a multiply and an add are two. It returns 0 if the machine has no such unit.

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
enum { kLanes = VECTOR_BYTES / 4, kChains = VECTOR_BYTES == 64 ? 24 : 12 };

// These chains of dependent additions are enough to hide their latency on any core: two bf16
// products per cycle, of 6 cycles each, need more than 12. Each chain is a variable, because an
// array of them would be in memory.
#define TWELVE_CHAINS(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11)
#if VECTOR_BYTES == 64
#define MORE_CHAINS(f) f(12) f(13) f(14) f(15) f(16) f(17) f(18) f(19) f(20) f(21) f(22) f(23)
#define EACH_CHAIN(f) TWELVE_CHAINS(f) MORE_CHAINS(f)
#define ANY_REGISTER "+v"
#else
#define EACH_CHAIN TWELVE_CHAINS
#define ANY_REGISTER "+x"
#endif
// Prevents the compiler from merging the chains or removing the loop.
#define PIN(i) __asm__ volatile("" : ANY_REGISTER(sum##i));

static volatile float sink;

static uint32_t next_random(uint32_t* state) { return *state = *state * 1664525u + 1013904223u; }

double peak_fp32(int64_t rounds) {
  uint32_t state = 1;
  float values[2 * kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    values[lane] = 0.5f + (float)(next_random(&state) >> 8) * 0x1p-26f;
    values[kLanes + lane] = (float)(next_random(&state) >> 8) * 0x1p-24f;
  }
  Vector factor, term;
  memcpy(&factor, values, sizeof factor);
  memcpy(&term, values + kLanes, sizeof term);
#define BEGIN(i) Vector sum##i = term + (float)i;
#define ADD(i) sum##i = sum##i * factor + term;
#define COLLECT(i) term += sum##i;
  EACH_CHAIN(BEGIN)
  for (int64_t round = 0; round < rounds; ++round) {
    EACH_CHAIN(ADD)
    EACH_CHAIN(PIN)
  }
  EACH_CHAIN(COLLECT)
#undef BEGIN
#undef ADD
#undef COLLECT
  sink = term[0];
  return 2.0 * kLanes * kChains * (double)rounds;
}

#if defined(__AMX_TILE__)
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
} __attribute__((packed)) TileShape;

_Static_assert(sizeof(TileShape) == 64, "the configuring instruction reads 64 bytes");

// The intrinsics of GCC do not state the memory that they access. GCC 12 assumes that the
// configuration has 8 bytes and never stores the rest, so this file uses assembly.
#define TILE_CONFIGURE(shape) __asm__ volatile("ldtilecfg %0" ::"m"(shape))
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile::)
#define TILE_LOAD(tile, from) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(from), "r"((int64_t)64) : "memory")
#define TILE_STORE(tile, to) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)64) : "memory")
#define TILE_PRODUCT(instruction, c, a, b) \
  __asm__ volatile(instruction " %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)

// There are four tiles of sums and two full tiles of each operand; a round has four loads and
// products.
static uint8_t operands[4][1024] __attribute__((aligned(64)));
static int8_t results[1024] __attribute__((aligned(64)));

static int tiles_begin(int is_bf16) {
  // Asks Linux for permission to use AMX: ARCH_REQ_XCOMP_PERM (0x1023) for XTILE_DATA (18).
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return 0;
  uint32_t state = 1;
  for (int tile = 0; tile < 4; ++tile)
    for (int i = 0; i < 1024; i += 2) {
      // The operands are bf16 numbers of both signs between 1/2 and 2, or random bytes.
      const uint32_t drawn = next_random(&state);
      const uint16_t value = is_bf16 ? (uint16_t)((drawn >> 16 & 0x80ff) | 0x3f00) : drawn >> 16;
      memcpy(operands[tile] + i, &value, 2);
    }
  TileShape shape = {.palette = 1};
  for (int tile = 0; tile < 8; ++tile) shape.bytes_per_row[tile] = 64, shape.rows[tile] = 16;
  TILE_CONFIGURE(shape);
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  return 1;
}

static void tiles_end(void) {
  TILE_STORE(0, results);
  sink = results[0];
  __asm__ volatile("tilerelease" ::: "memory");
}

#define TILE_LOOP(instruction)                       \
  for (int64_t round = 0; round < rounds; ++round) { \
    TILE_LOAD(4, operands[0]);                       \
    TILE_LOAD(5, operands[1]);                       \
    TILE_LOAD(6, operands[2]);                       \
    TILE_LOAD(7, operands[3]);                       \
    TILE_PRODUCT(instruction, 0, 4, 6);              \
    TILE_PRODUCT(instruction, 1, 4, 7);              \
    TILE_PRODUCT(instruction, 2, 5, 6);              \
    TILE_PRODUCT(instruction, 3, 5, 7);              \
  }
#endif

double peak_bf16(int64_t rounds) {
#if defined(__AMX_BF16__)
  if (tiles_begin(1)) {
    TILE_LOOP("tdpbf16ps")
    tiles_end();
    return 4.0 * 2 * 16 * 16 * 32 * (double)rounds;
  }
#endif
#if defined(__AVX512BF16__)
  uint32_t state = 1;
  uint16_t values[64];
  for (int i = 0; i < 64; ++i) values[i] = (next_random(&state) >> 16 & 0x80ff) | 0x3f00;
  __m512bh a, b;
  memcpy(&a, values, 64), memcpy(&b, values + 32, 64);
#define BEGIN(i) __m512 sum##i = _mm512_set1_ps(i);
#define ADD(i) sum##i = _mm512_dpbf16_ps(sum##i, a, b);
#define COLLECT(i) total += _mm512_reduce_add_ps(sum##i);
  EACH_CHAIN(BEGIN)
  for (int64_t round = 0; round < rounds; ++round) {
    EACH_CHAIN(ADD)
    EACH_CHAIN(PIN)
  }
  float total = 0;
  EACH_CHAIN(COLLECT)
#undef BEGIN
#undef ADD
#undef COLLECT
  sink = total;
  return 2.0 * 32 * kChains * (double)rounds;
#else
  return 0;
#endif
}

double peak_int8(int64_t rounds) {
#if defined(__AMX_INT8__)
  if (tiles_begin(0)) {
    TILE_LOOP("tdpbusd")
    tiles_end();
    return 4.0 * 2 * 16 * 16 * 64 * (double)rounds;
  }
#endif
#if defined(__AVX2__)
  uint32_t state = 1;
  uint8_t values[128];
  for (int i = 0; i < 128; ++i) values[i] = next_random(&state) >> 24;
#if defined(__AVX512VNNI__)
  typedef __m512i Bytes;
#define ADD_PRODUCTS(sum) _mm512_dpbusd_epi32(sum, a, b)
#elif defined(__AVXVNNI__)
  typedef __m256i Bytes;
#define ADD_PRODUCTS(sum) _mm256_dpbusd_avx_epi32(sum, a, b)
#else
  // Without VNNI, half of the bytes at a time are widened to 16 bits, whose pairs are exact.
  typedef __m256i Bytes;
#define ADD_PRODUCTS(sum) _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
#endif
  Bytes a, b;
  memcpy(&a, values, sizeof a), memcpy(&b, values + 64, sizeof b);
#define BEGIN(i) Bytes sum##i = a;
// Without the pin, the products would be computed once for all chains, because they never change.
#define ADD(i)                            \
  __asm__ volatile("" : ANY_REGISTER(a)); \
  sum##i = ADD_PRODUCTS(sum##i);
#define COLLECT(i) a ^= sum##i;
  EACH_CHAIN(BEGIN)
  for (int64_t round = 0; round < rounds; ++round) {
    EACH_CHAIN(ADD)
    EACH_CHAIN(PIN)
  }
  EACH_CHAIN(COLLECT)
#undef BEGIN
#undef ADD
#undef COLLECT
  sink = (float)a[0];
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return 2.0 * sizeof(Bytes) * kChains * (double)rounds;
#else
  return 1.0 * sizeof(Bytes) * kChains * (double)rounds;
#endif
#else
  return 0;
#endif
}

// The names of the units, for the header of the table.
const char* unit_fp32(void) {
#if defined(__AVX512F__)
  return "AVX-512 FMA";
#elif defined(__FMA__)
  return "AVX2 FMA";
#else
  return "128-bit multiply and add";
#endif
}

const char* unit_bf16(void) {
#if defined(__AMX_BF16__)
  return "AMX-BF16";
#elif defined(__AVX512BF16__)
  return "AVX512-BF16";
#else
  return "";
#endif
}

const char* unit_int8(void) {
#if defined(__AMX_INT8__)
  return "AMX-INT8";
#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return "VNNI";
#elif defined(__AVX2__)
  return "AVX2 16-bit pairs";
#else
  return "";
#endif
}
