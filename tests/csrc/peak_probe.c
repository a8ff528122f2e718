// This program compares the tile products of benchmarks/cpu/peak.c with plain loops over the same
// random bytes. It draws the operands again, because operands read from peak.c would hide that
// peak.c did not store them.

#include "../../benchmarks/cpu/peak.c"

#include <math.h>
#include <stdio.h>

#if defined(PROBE_TRAPPED)
int trapped_tiles_begin(char** sites, int count);
// This function grants the permission to use tiles, which Linux refuses on a processor without AMX.
long syscall(long number, ...) { return number == SYS_arch_prctl ? 0 : -1; }
#endif

enum { kRounds = 3 };
static uint8_t drawn[4][1024];

static void draw(int is_bf16) {
  uint32_t state = 1;
  for (int tile = 0; tile < 4; ++tile)
    for (int i = 0; i < 1024; i += 2) {
      const uint32_t random = next_random(&state);
      const uint16_t value = is_bf16 ? (uint16_t)((random >> 16 & 0x80ff) | 0x3f00) : random >> 16;
      memcpy(drawn[tile] + i, &value, 2);
    }
}

static float bf16(const uint8_t* p) {
  const uint32_t bits = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// `results` has tile 0, which peak.c stores last. This tile has the sums of the products of the
// first and the third operand.
static int wrong_bf16(void) {
  int wrong = 0;
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      double sum = 0.0, terms = 0.0;
      for (int k = 0; k < 32; ++k) {
        const uint8_t* a = drawn[0] + 64 * m + 2 * k;
        const uint8_t* b = drawn[2] + 64 * (k / 2) + 4 * n + 2 * (k % 2);
        const double term = kRounds * (double)bf16(a) * bf16(b);
        sum += term, terms += fabs(term);
      }
      float found;
      memcpy(&found, results + 64 * m + 4 * n, 4);
      wrong += !(fabs(found - sum) <= 0x1p-18 * terms);
    }
  return wrong;
}

static int wrong_int8(void) {
  int wrong = 0;
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      int32_t sum = 0, found;
      for (int k = 0; k < 64; ++k) {
        const uint8_t* b = drawn[2] + 64 * (k / 4) + 4 * n + k % 4;
        sum += kRounds * drawn[0][64 * m + k] * (int8_t)*b;
      }
      memcpy(&found, results + 64 * m + 4 * n, 4);
      wrong += found != sum;
    }
  return wrong;
}

// The arguments are the addresses of the tile instructions to trap.
int main(int count, char** arguments) {
#if defined(PROBE_TRAPPED)
  if (count < 2 || trapped_tiles_begin(arguments + 1, count - 1)) return 2;
#else
  (void)count, (void)arguments;
#endif
  draw(1);
  const double bf16_operations = peak_bf16(kRounds);
  const int wrong_of_bf16 = wrong_bf16();
  draw(0);
  const double int8_operations = peak_int8(kRounds);
  printf("bf16: %.0f operations, %d wrong; int8: %.0f operations, %d wrong\n", bf16_operations,
         wrong_of_bf16, int8_operations, wrong_int8());
  return 0;
}
