// What the matrix instructions share: products of small matrices, and the fragments of registers.
//
// Every product of two operands of at most 16 bits (or tf32) is exact in fp32. The order of the sum
// is not documented, so Options::accumulate chooses it. Fragment layouts are those of the PTX ISA,
// section "Warp Level Matrix Instructions".

#pragma once

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {

// A and B as fp32 with a flag per row of A and column of B that says whether all of it is valid.
struct Operands {
  int rows, columns, depth;
  std::vector<float> a, b;  // a (rows, depth), b (depth, columns)
  std::vector<uint8_t> a_ok, b_ok;
  Operands(int m, int n, int k)
      : rows(m), columns(n), depth(k), a(m * k), b(k * n), a_ok(m, 1), b_ok(n, 1) {}
};

// d (rows, columns) += a b, in the order that the launch asks for.
void multiply(const Operands& o, float* d, Accumulate order);

// The same for integers, which wrap around or, if so asked, stay at the limits.
void multiply_integers(const Operands& o, int32_t* d, bool saturate);

// The value of an element in the low bits.
float element(Type type, uint32_t bits);

inline int element_bytes(Type type) {
  return type == Type::tf32 ? 4 : type == Type::f16 || type == Type::bf16 ? 2 : 1;
}

struct MatrixShape {
  int m = 0, n = 0, k = 0;
};
bool shape_of(const Mnemonic& name, MatrixShape& shape);

// Whether elements of these types of A and B are multiplied, as integers or as floats.
bool multiplies(Type a, Type b, bool integers);

// Reads n columns of accumulators, of 16 rows, into d (16, n) and, for each element, whether it is
// valid.
void read_accumulators(Warp& w, const Reg* c, bool half, int n, float* d, uint8_t* ok,
                       const Mask* valid);

// Writes them, and returns the valid lanes by register.
std::vector<Mask> write_accumulators(Warp& w, const Reg* to, bool half, int n, const float* d,
                                     const uint8_t* ok);

// A (16, k) in registers: register r holds, of elements of so many bytes, those of 4 bytes at row
// lane / 4 (+ 8 in odd registers) and the (lane % 4)-th word of half r / 2 of k.
void read_a(Operands& o, Type type, int registers, const uint32_t* const* word, const Mask* valid);

}  // namespace ptxmachine
