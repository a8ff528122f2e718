// Functions that the matrix instructions share: products of small matrices, and fragments in
// registers.
//
// A product of two operands of at most 16 bits, or of two tf32 operands, is exact in fp32. NVIDIA
// does not document the order and the rounding of the sum, so Options::accumulate chooses them.
// Fragment layouts are those of the PTX ISA, section "Warp Level Matrix Instructions".

#pragma once

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {

// The matrices A and B in fp32. a_ok has one flag for each row of A, and b_ok one for each column
// of B. A flag tells whether all elements of the row or column are valid.
struct Operands {
  int rows, columns, depth;
  std::vector<float> a, b;  // a (rows, depth), b (depth, columns)
  std::vector<uint8_t> a_ok, b_ok;
  Operands(int m, int n, int k)
      : rows(m), columns(n), depth(k), a(m * k), b(k * n), a_ok(m, 1), b_ok(n, 1) {}
};

// Adds the product of A and B to d, of shape (rows, columns). `order` determines the order and the
// rounding of the sums.
void multiply(const Operands& o, float* d, Accumulate order);

// Adds the product of the integer matrices A and B to d, of shape (rows, columns). Sums that
// overflow wrap around, or are clamped to the range of int32 if `saturate` is true.
void multiply_integers(const Operands& o, int32_t* d, bool saturate);

// Returns the value of an element of a matrix in fp32. The low bits of `bits` are the bits of the
// element in the format `type`.
float element(Type type, uint32_t bits);

inline int element_bytes(Type type) {
  return type == Type::tf32 ? 4 : type == Type::f16 || type == Type::bf16 ? 2 : 1;
}

struct MatrixShape {
  int m = 0, n = 0, k = 0;
};
bool shape_of(const Mnemonic& name, MatrixShape& shape);

// Returns whether a matrix instruction can multiply a matrix A of type `a` by a matrix B of type
// `b`: as integers if `integers` is true, and otherwise as floats.
bool multiplies(Type a, Type b, bool integers);

// Reads accumulators of 16 rows and n columns into d, of shape (16, n). They are fp16 if `half` is
// true, and otherwise fp32. Sets each element of ok, of the same shape, to whether the element is
// valid.
void read_accumulators(Warp& w, const Reg* c, bool half, int n, float* d, uint8_t* ok,
                       const Mask* valid);

// Writes d, of shape (16, n), to the accumulators, and returns the valid lanes of each register.
std::vector<Mask> write_accumulators(Warp& w, const Reg* to, bool half, int n, const float* d,
                                     const uint8_t* ok);

// Reads A, of shape (16, depth), from registers of 4 bytes. Register r of a lane holds word
// 4 (r / 2) + lane % 4 of a row of A. The row is lane / 4 if r is even, and lane / 4 + 8 if r is
// odd.
void read_a(Operands& o, Type type, int registers, const uint32_t* const* word, const Mask* valid);

}  // namespace ptxmachine
