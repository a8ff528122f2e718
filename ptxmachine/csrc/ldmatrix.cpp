// ldmatrix and stmatrix: a warp reads or writes matrices of 8 x 8 elements of 16 bits. Lane 8 j + r
// gives the address of row r of matrix j. Lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row
// l / 4, or of column l / 4 if the matrix is transposed.

#include "access.h"

namespace ptxmachine {
namespace {

// ldmatrix. arg 0: the number of matrices. arg 1: whether the matrices are transposed.
void load_matrix(Warp& w, const Instr& i, Mask m) {
  Block& b = *w.block;
  const int n = i.arg[0];
  const Reg base = i.reg[n];
  w.need(base, n == 4 ? m : m & ((1u << (8 * n)) - 1), "an address");
  uint64_t address[kLanes] = {};
  for (int j = 0; j < n; ++j) {
    const uint8_t* row[8];
    const uint8_t* ok[8];
    for (int r = 0; r < 8; ++r) {
      const int l = 8 * j + r;
      address[l] = w.address(base, l, i.offset);
      const uint32_t o = b.shared_offset(address[l], 16, 16);
      b.note_read(w, l, o, 16, b.now(w, l));
      row[r] = b.shared.data() + o, ok[r] = b.shared_valid.data() + o;
    }
    Mask valid = 0;
    for (int l = 0; l < kLanes; ++l) {
      uint32_t value = 0;
      bool all = true;
      for (int e = 0; e < 2; ++e) {
        const int r = i.arg[1] ? 2 * (l % 4) + e : l / 4, c = i.arg[1] ? l / 4 : 2 * (l % 4) + e;
        uint16_t x;
        std::memcpy(&x, row[r] + 2 * c, 2);
        all = all && ok[r][2 * c] && ok[r][2 * c + 1];
        value |= (uint32_t)x << (16 * e);
      }
      w.set(i.reg[j], l, value);
      valid |= (Mask)all << l;
    }
    w.wrote(i.reg[j], kAll, valid);
  }
  count(w, i, n == 4 ? kAll : (1u << (8 * n)) - 1, address, 16);
}

void store_matrix(Warp& w, const Instr& i, Mask m) {
  const int n = i.arg[0];
  w.need(i.reg[0], n == 4 ? m : m & ((1u << (8 * n)) - 1), "an address");
  uint64_t address[kLanes] = {};
  for (int j = 0; j < n; ++j) {
    uint8_t data[8][16], ok[8][16];
    for (int l = 0; l < kLanes; ++l)
      for (int e = 0; e < 2; ++e) {
        const int r = i.arg[1] ? 2 * (l % 4) + e : l / 4, c = i.arg[1] ? l / 4 : 2 * (l % 4) + e;
        const uint16_t x = (uint16_t)(w.word(i.reg[j + 1])[l] >> (16 * e));
        std::memcpy(data[r] + 2 * c, &x, 2);
        ok[r][2 * c] = ok[r][2 * c + 1] = w.ok(i.reg[j + 1]) >> l & 1;
      }
    for (int r = 0; r < 8; ++r) {
      const int l = 8 * j + r;
      address[l] = w.address(i.reg[0], l, i.offset);
      const Place p = reach(w, l, Space::shared, address[l], 16, true, Scope::weak, data[r]);
      std::memcpy(p.at, data[r], 16);
      std::memcpy(p.valid, ok[r], 16);
    }
  }
  count(w, i, n == 4 ? kAll : (1u << (8 * n)) - 1, address, 16);
}

}  // namespace

Known decode_ldmatrix(Instr& i, const Mnemonic& name, const RawInstr&) {
  i.type = name.last();
  if (!name.has("b16") || !name.has("m8n8")) return kUnknown;
  i.arg[0] = name.has("x4") ? 4 : name.has("x2") ? 2 : 1;
  i.arg[1] = name.has("trans");
  i.aligned = true;
  i.pipe = Pipe::shared;
  const bool loads = name.base() == "ldmatrix";
  i.run = loads ? load_matrix : store_matrix;
  if (loads) return Shape{vector(i.arg[0], result(32)), address()};
  return Shape{address(), vector(i.arg[0], held(32))};
}

}  // namespace ptxmachine
