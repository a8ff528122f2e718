// Tests features of trapped_tiles.cpp that the compiled kernels do not use: other forms of
// addresses, partial tiles, and errors. An error ends the program, so each error needs its own run.

#include <cstdint>
#include <cstdio>
#include <cstring>

extern "C" int trapped_tiles_begin(char** sites, int count);

namespace {

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  Shapes(int tiles, int r, int b) {
    for (int i = 0; i < tiles; ++i) rows[i] = r, bytes[i] = b;
  }
};

void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

const Shapes full(8, 16, 64);
uint8_t source[64 * 64] asm("source"), result[64 * 16];

// Addresses

bool rows_are(const char* what, int first, int step) {
  asm volatile("tilestored %%tmm3, (%0,%1,1)" ::"r"(result), "r"(64l) : "memory");
  for (int row = 0; row < 16; ++row) {
    if (result[64 * row] == first + step * row && result[64 * row + 63] == first + step * row)
      continue;
    std::printf("%s: wrong row %d\n", what, row);
    return false;
  }
  return true;
}

#define LOADS(base, index, address, displacement, scale, step)                     \
  ([] {                                                                            \
    asm volatile("mov %0, %%" base "\n\tmov %1, %%" index "\n\ttileloadd " address \
                 ", %%tmm3" ::"D"(source + 32 * 64 - (displacement)),              \
                 "S"(64l * (step) / (scale))                                       \
                 : base, index, "memory");                                         \
    return rows_are(address, 32, step);                                            \
  }())

bool addresses() {
  for (int i = 0; i < (int)sizeof(source); ++i) source[i] = i / 64;
  asm volatile("ldtilecfg %0\n\ttilezero %%tmm3" ::"m"(full));  // the usual form of an address
  bool right = rows_are("tilezero", 0, 0);
  right &= LOADS("rax", "rcx", "(%%rax,%%rcx,1)", 0, 1, 1);
  right &= LOADS("rbx", "rdx", "(%%rbx,%%rdx,4)", 0, 4, -2);
  right &= LOADS("r13", "r14", "(%%r13,%%r14,2)", 0, 2, 1);
  right &= LOADS("r11", "r12", "64(%%r11,%%r12,1)", 64, 1, 2);
  right &= LOADS("r12", "r8", "-4096(%%r12,%%r8,8)", -4096, 8, 1);
  right &= LOADS("r9", "r10", "-64(%%r9)", -64, 1, 0);
  right &= LOADS("r15", "rbx", "source+2048(,%%rbx,1)", 0, 1, 1);
  // ldtilecfg has no stride. The following lines use its other forms of addresses. If the handler
  // decodes an address wrongly, it finds no configuration there.
  asm volatile("mov %0, %%rax\n\tldtilecfg (%%rax)" ::"D"(&full) : "rax");
  asm volatile("lea -64(%0), %%r13\n\tldtilecfg 64(%%r13)" ::"D"(&full) : "r13");
  asm volatile("lea 4096(%0), %%r12\n\tldtilecfg -4096(%%r12)" ::"D"(&full) : "r12");
  asm volatile("mov $32, %%r9\n\tldtilecfg -64(%0,%%r9,2)" ::"D"(&full) : "r9");
  asm volatile("ldtilecfg %c0" ::"i"(&full));
  return right;
}

// Products

struct Numbers {
  uint8_t a[16][64], b[16][64];
  int32_t c[16][16];
};

// kM is the number of rows of C, kN the words of a row of C, and kK the words of a row of A.
constexpr int kM = 5, kN = 7, kK = 3;

Numbers draw() {
  Numbers numbers = {};
  uint32_t word = 1;
  const auto next = [&] { return (word = word * 1664525u + 1013904223u) >> 24; };
  for (auto& row : numbers.a) {
    for (uint8_t& x : row) x = next();
  }
  for (auto& row : numbers.b) {
    for (uint8_t& x : row) x = next();
  }
  for (auto& row : numbers.c) {
    for (int32_t& x : row) x = next();
  }
  return numbers;
}

void configure_product() {
  Shapes shapes(3, kM, 4 * kN);
  shapes.bytes[1] = 4 * kK;
  shapes.rows[2] = kK;
  configure(shapes);
}

#define MULTIPLY(instruction, numbers)                                            \
  asm volatile(                                                                   \
      "tileloadd (%0,%3,1), %%tmm0\n\ttileloaddt1 (%1,%3,1), %%tmm1\n\t"          \
      "tileloadd (%2,%3,1), %%tmm2\n\t" instruction                               \
      " %%tmm2, %%tmm1, %%tmm0\n\ttilestored %%tmm0, (%0,%3,1)" ::"r"(numbers.c), \
      "r"(numbers.a), "r"(numbers.b), "r"(64l)                                    \
      : "memory")

template <class A, class B>
bool agrees(const char* name, const Numbers& got) {
  Numbers numbers = draw();
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      for (int k = 0; k < 4 * kK; ++k) {
        numbers.c[m][n] += (A)numbers.a[m][k] * (B)numbers.b[k / 4][4 * n + k % 4];
      }
    }
  }
  if (std::memcmp(numbers.c, got.c, sizeof(got.c)) == 0) return true;
  std::printf("%s: wrong\n", name);
  return false;
}

// The operands are denormals, which count as zeros, and small integers, whose sums are exact in any
// order.
bool bf16_agrees() {
  Numbers numbers = draw();
  float c[16][16];
  const auto small = [](uint8_t& low, uint8_t& high) {
    const float value = (float)(low % 8) - 3.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    low = bits >> 16 & 255, high = bits >> 24;
    return value;
  };
  float a[16][32], b[16][32];
  for (int row = 0; row < 16; ++row) {
    for (int i = 0; i < 32; ++i) {
      a[row][i] = small(numbers.a[row][2 * i], numbers.a[row][2 * i + 1]);
      b[row][i] = small(numbers.b[row][2 * i], numbers.b[row][2 * i + 1]);
    }
    for (int n = 0; n < 16; ++n) c[row][n] = (float)numbers.c[row][n];
  }
  // One product is the largest denormal times 2^120, which must be 0. One column of C becomes NaN.
  numbers.a[1][0] = 127, numbers.a[1][1] = 0, a[1][0] = 0.0f;
  numbers.b[0][12] = 128, numbers.b[0][13] = 123, b[0][6] = 0x1p120f;
  numbers.b[2][2] = 255, numbers.b[2][3] = 127, b[2][1] = 0.0f;
  std::memcpy(numbers.c, c, sizeof(c));
  MULTIPLY("tdpbf16ps", numbers);
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      for (int k = 0; k < 2 * kK; ++k) c[m][n] += a[m][k] * b[k / 2][2 * n + k % 2];
    }
    c[m][0] = 0.0f / 0.0f;
  }
  float got[16][16];
  std::memcpy(got, numbers.c, sizeof(got));
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      if (got[m][n] == c[m][n] || (c[m][n] != c[m][n] && got[m][n] != got[m][n])) continue;
      std::printf("tdpbf16ps: %g at (%d, %d), not %g\n", got[m][n], m, n, c[m][n]);
      return false;
    }
  }
  return true;
}

bool products() {
  configure_product();
  Numbers ss = draw(), su = draw(), us = draw(), uu = draw();
  MULTIPLY("tdpbssd", ss);
  MULTIPLY("tdpbsud", su);
  MULTIPLY("tdpbusd", us);
  MULTIPLY("tdpbuud", uu);
  bool right = agrees<int8_t, int8_t>("tdpbssd", ss) & agrees<int8_t, uint8_t>("tdpbsud", su);
  right &= agrees<uint8_t, int8_t>("tdpbusd", us) & agrees<uint8_t, uint8_t>("tdpbuud", uu);
  return right & bf16_agrees();
}

// Faults

void fault(const char* name) {
  const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
  Shapes shapes = full;
  if (is("palette")) shapes.palette = 2;
  if (is("reserved")) shapes.reserved[3] = 1;
  if (is("ninth")) shapes.rows[8] = shapes.bytes[8] = 1;
  if (is("large")) shapes.rows[7] = 17;
  if (is("bytes")) shapes.rows[7] = 0;
  if (is("misfit")) shapes.bytes[1] = 60;
  if (is("absent")) shapes.rows[1] = shapes.bytes[1] = 0;
  configure(shapes);
  if (is("released")) asm volatile("tilerelease");
  // These bytes are the trapped form of tdpbssd %tmm1, %tmm1, %tmm0, which assemblers refuse.
  if (is("same")) asm volatile(".byte 0x06, 0xe2, 0x73, 0x5e, 0xc1");
  if (is("foreign")) asm volatile("ud2");
  asm volatile("tdpbf16ps %tmm2, %tmm1, %tmm0");
}

}  // namespace

// The arguments are the name of the case and the addresses of the program's tile instructions.
int main(int count, char** arguments) {
  if (count < 3 || trapped_tiles_begin(arguments + 2, count - 2) != 0) return 2;
  if (std::strcmp(arguments[1], "addresses") == 0) return addresses() ? 0 : 1;
  if (std::strcmp(arguments[1], "products") == 0) return products() ? 0 : 1;
  fault(arguments[1]);
  return 0;
}
