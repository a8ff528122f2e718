#include "isa.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>

namespace fastbert::cpu {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports asks CPUID, and XGETBV whether the operating system saves the registers.
const Level kLevels[] = {
    {&baseline::kKernels, __builtin_cpu_supports("sse4.2") != 0},
    {&avx2::kKernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c")},
    {&avx512::kKernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vl")},
};
#else
const Level kLevels[] = {{&baseline::kKernels, true}};
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
    if (level.supported) best = level.kernels;
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

void set_level(const char* name) {
  current.store(name == nullptr ? choose() : named("level", name), std::memory_order_release);
}

}  // namespace fastbert::cpu
