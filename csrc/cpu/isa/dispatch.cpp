#include "dispatch.h"

#include <c10/util/Exception.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>

namespace fastbert::cpu {
namespace {

#if defined(__x86_64__)

// Returns whether this process may use AMX tiles in bf16 and int8. Linux grants the use of tiles to
// a process that requests it (arch_prctl ARCH_REQ_XCOMP_PERM, feature 18), and child processes
// inherit the permission.
bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d >> 22 & 1) || !(d >> 24 & 1) || !(d >> 25 & 1)) return false;
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vnni");
}

// Returns whether bf16 dot products are slower than fp32 products of widened operands. Intel cores
// since Golden Cove, which have AMX tiles, start one bf16 dot product in two cycles. In the same
// time, they start four fp32 multiplications of the same width, which do twice the work: 173
// instead of 85 GFLOP/s on one core of an Emerald Rapids. A virtual machine may hide the tiles.
// This function reads the name of the processor instead of measuring times, so that every process
// chooses the same level and computes the same bits.
bool has_slow_dots() { return __builtin_cpu_is("intel") && !__builtin_cpu_is("cooperlake"); }

// __builtin_cpu_supports reads CPUID. It also reads XGETBV, which tells whether the operating
// system saves the registers.
const Level kLevels[] = {
    {&baseline::kKernels, __builtin_cpu_supports("sse4.2") != 0, false},
    {&avx2::kKernels,
     __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c"),
     false},
    {&avx512::kKernels, has_avx512(), false},
    {&avx512_bf16::kKernels, has_avx512_bf16(), has_slow_dots()},
    {&amx::kKernels, has_avx512_bf16() && has_tiles(), false},
};
#elif defined(__aarch64__)

// Returns whether the operating system reports features of the processor: bits of AT_HWCAP2, which
// Linux documents in "ARM64 ELF hwcaps". Headers older than Linux 5.10 do not define the bits.
bool has_features(unsigned long bits) {
#if defined(__linux__)
  return (getauxval(AT_HWCAP2) & bits) == bits;
#else
  return false;
#endif
}

constexpr unsigned long kI8MM = 1ul << 13, kBF16 = 1ul << 14;

const Level kLevels[] = {
    {&baseline::kKernels, true, false},
    {&neon::kKernels, true, false},
    {&neon_bf16::kKernels, has_features(kBF16), false},
    {&neon_i8mm::kKernels, has_features(kBF16 | kI8MM), false},
};
#else
const Level kLevels[] = {{&baseline::kKernels, true, false}};
#endif

std::string supported_names() {
  std::string names;
  for (const Level& level : kLevels) {
    if (level.supported) names += (names.empty() ? "" : ", ") + std::string(level.kernels->name);
  }
  return names;
}

const Kernels* named(const char* source, const char* name) {
  for (const Level& level : kLevels) {
    if (level.supported && std::strcmp(level.kernels->name, name) == 0) return level.kernels;
  }
  TORCH_CHECK_VALUE(false, source, ": got '", name,
                    "', allowed on this processor: ", supported_names());
}

const Kernels* choose() {
  const char* name = std::getenv("FASTBERT_CPU_ISA");
  if (name != nullptr && *name != '\0') return named("FASTBERT_CPU_ISA", name);
  const Kernels* best = nullptr;
  for (const Level& level : kLevels) {
    if (level.supported && !level.slow) best = level.kernels;
  }
  TORCH_CHECK(best != nullptr, "fastbert's CPU kernels need an x86-64-v2 processor (SSE 4.2)");
  return best;
}

std::atomic<const Kernels*> current{nullptr};

}  // namespace

const Level* levels_begin() { return std::begin(kLevels); }
const Level* levels_end() { return std::end(kLevels); }

const Kernels& kernels() {
  const Kernels* chosen = current.load(std::memory_order_acquire);
  if (chosen == nullptr) {
    chosen = choose();
    current.store(chosen, std::memory_order_release);
  }
  return *chosen;
}

void set_level(const char* name) { set_kernels(name == nullptr ? choose() : named("level", name)); }

void set_kernels(const Kernels* table) { current.store(table, std::memory_order_release); }

}  // namespace fastbert::cpu
