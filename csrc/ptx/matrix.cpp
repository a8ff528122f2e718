// Matrix instructions: mma.sync, wmma and wgmma.
//
// Every product of two operands of at most 16 bits (or tf32) is exact in fp32; the order of the sum
// is not documented, so that Options::accumulate chooses it. Fragment layouts and descriptors are
// those of the PTX ISA, sections "Warp Level Matrix Instructions" and "Asynchronous Warpgroup Level
// Matrix Instructions".

#include "decode.h"
#include "lanes.h"

namespace fastbert::ptx {
namespace {

// A and B as fp32 with a flag per row of A and column of B that says whether all of it is valid.
struct Operands {
  int rows, columns, depth;
  std::vector<float> a, b;  // a (rows, depth), b (depth, columns)
  std::vector<uint8_t> a_ok, b_ok;
  Operands(int m, int n, int k)
      : rows(m), columns(n), depth(k), a(m * k), b(k * n), a_ok(m, 1), b_ok(n, 1) {}
};

float toward_zero(double x) {
  const float f = (float)x;
  return std::isfinite(f) && std::fabs((double)f) > std::fabs(x) ? std::nextafterf(f, 0.0f) : f;
}

// d (rows, columns) += a b
FASTBERT_PTX_SIMD void multiply(const Operands& o, float* d, Accumulate order) {
  const int n = o.columns, depth = o.depth;
  if (order == Accumulate::forward || order == Accumulate::reverse) {
    for (int r = 0; r < o.rows; ++r)
      for (int s = 0; s < depth; ++s) {
        const int k = order == Accumulate::forward ? s : depth - 1 - s;
        const float x = o.a[r * depth + k];
        const float* y = &o.b[k * n];
        float* to = d + r * n;
        for (int c = 0; c < n; ++c) to[c] = __builtin_fmaf(x, y[c], to[c]);
      }
    return;
  }
  for (int r = 0; r < o.rows; ++r)
    for (int c = 0; c < n; ++c) {
      double sum = d[r * n + c];
      for (int k = 0; k < depth; ++k) sum += (double)o.a[r * depth + k] * o.b[k * n + c];
      d[r * n + c] = order == Accumulate::exact ? (float)sum : toward_zero(sum);
    }
}

float element(Type type, uint32_t bits) {
  switch (type) {
    case Type::f16:
      return to_float(Half{(uint16_t)bits});
    case Type::bf16:
      return to_float(Brain{(uint16_t)bits});
    case Type::e4m3:
    case Type::e5m2:
      return float_of_8_bits(type, (uint8_t)bits);
    // The tensor core reads the upper 19 bits.
    case Type::tf32:
      return bits_as<float>(bits & 0xffffe000u);
    default:
      return (float)(type == Type::s8 ? (int)(int8_t)bits : (int)(uint8_t)bits);
  }
}

int element_bytes(Type type) {
  return type == Type::tf32 ? 4 : type == Type::f16 || type == Type::bf16 ? 2 : 1;
}

// The types of a mnemonic in their order, as D, A, B (and C).
std::vector<Type> types_of(const Mnemonic& name) {
  std::vector<Type> types;
  for (const std::string& part : name.parts)
    if (type_of(part) != Type::none) types.push_back(type_of(part));
  return types;
}

// d (rows, columns) += a b of integers, which wrap around or, if so asked, stay at the limits.
void multiply_integers(const Operands& o, int32_t* d, bool saturate) {
  for (int r = 0; r < o.rows; ++r)
    for (int c = 0; c < o.columns; ++c) {
      int64_t sum = d[r * o.columns + c];
      for (int k = 0; k < o.depth; ++k)
        sum += (int64_t)o.a[r * o.depth + k] * (int64_t)o.b[k * o.columns + c];
      if (saturate) sum = std::min<int64_t>(std::max<int64_t>(sum, INT32_MIN), INT32_MAX);
      d[r * o.columns + c] = (int32_t)sum;
    }
}

struct Shape {
  int m = 0, n = 0, k = 0;
};
bool shape_of(const Mnemonic& name, Shape& s) {
  for (const std::string& part : name.parts)
    if (std::sscanf(part.c_str(), "m%dn%dk%d", &s.m, &s.n, &s.k) == 3) return true;
  return false;
}

// Registers of D and C: accumulator element (row, column) of lane and register, 16 rows per warp.
struct Accumulators {
  static int row(int lane, int e) { return lane / 4 + (e & 2 ? 8 : 0); }
  static int column(int lane, int e) { return 8 * (e / 4) + 2 * (lane % 4) + (e & 1); }
};

void read_accumulators(Warp& w, const Reg* c, bool half, int n, float* d, uint8_t* ok,
                       const Mask* valid) {
  for (int e = 0; e < n / 2; ++e)
    for (int l = 0; l < kLanes; ++l) {
      const int at = Accumulators::row(l, e) * n + Accumulators::column(l, e);
      const int r = half ? e / 2 : e;
      const uint32_t bits = w.word(c[r])[l];
      d[at] = half ? to_float(Half{(uint16_t)(bits >> (16 * (e & 1)))}) : bits_as<float>(bits);
      ok[at] = valid[r] >> l & 1;
    }
}

// Returns the valid lanes by register.
std::vector<Mask> write_accumulators(Warp& w, const Reg* to, bool half, int n, const float* d,
                                     const uint8_t* ok) {
  const int count = half ? n / 4 : n / 2;
  std::vector<Mask> valid(count, kAll);
  for (int e = 0; e < n / 2; ++e) {
    const int r = half ? e / 2 : e;
    uint32_t* word = w.word(to[r]);
    for (int l = 0; l < kLanes; ++l) {
      const int at = Accumulators::row(l, e) * n + Accumulators::column(l, e);
      if (half) {
        const int shift = 16 * (e & 1);
        word[l] = (word[l] & ~(0xffffu << shift)) | (uint32_t)to_half(d[at]).bits << shift;
      } else {
        word[l] = bits_as<uint32_t>(d[at]);
      }
      if (!ok[at]) valid[r] &= ~(1u << l);
    }
  }
  return valid;
}

// A (16, k) in registers: register r holds, of elements of so many bytes, those of 4 bytes at row
// lane / 4 (+ 8 in odd registers) and the (lane % 4)-th word of half r / 2 of k.
void read_a(Operands& o, Type type, int registers, const uint32_t* const* word, const Mask* valid) {
  const int per = 4 / element_bytes(type), bits = 32 / per;
  for (int r = 0; r < registers; ++r)
    for (int l = 0; l < kLanes; ++l) {
      const int row = l / 4 + (r & 1 ? 8 : 0), k = (r / 2) * 4 * per + (l % 4) * per;
      for (int e = 0; e < per; ++e)
        o.a[row * o.depth + k + e] = element(type, word[r][l] >> (bits * e));
      if (!(valid[r] >> l & 1)) o.a_ok[row] = 0;
    }
}

// mma.sync.aligned.m16n8kK; arg 0 K, 1 half accumulators, 2 registers of A, 3 of B
void mma(Warp& w, const Instr& i, Mask) {
  const int k = i.arg[0], accumulators = i.arg[1] ? 2 : 4;
  const Reg *d = i.reg, *a = d + accumulators, *b = a + i.arg[2], *c = b + i.arg[3];
  Operands o(16, 8, k);
  const uint32_t* words[4];
  Mask valid[4];
  for (int r = 0; r < i.arg[2]; ++r) words[r] = w.word(a[r]), valid[r] = w.ok(a[r]);
  read_a(o, i.type, i.arg[2], words, valid);
  const int per = 4 / element_bytes(i.type), bits = 32 / per;
  for (int r = 0; r < i.arg[3]; ++r)
    for (int l = 0; l < kLanes; ++l) {
      const int column = l / 4, first = r * 4 * per + (l % 4) * per;
      for (int e = 0; e < per; ++e)
        o.b[(first + e) * 8 + column] = element(i.source, w.word(b[r])[l] >> (bits * e));
      if (!(w.ok(b[r]) >> l & 1)) o.b_ok[column] = 0;
    }
  float sum[16 * 8];
  uint8_t ok[16 * 8];
  Mask c_valid[4];
  for (int r = 0; r < accumulators; ++r) c_valid[r] = w.ok(c[r]);
  read_accumulators(w, c, i.arg[1], 8, sum, ok, c_valid);
  if (i.arg[4])  // s32, whose bits are read as those of floats
    multiply_integers(o, reinterpret_cast<int32_t*>(sum), i.arg[5]);
  else
    multiply(o, sum, w.block->launch->options.accumulate);
  for (int r = 0; r < 16; ++r)
    for (int n = 0; n < 8; ++n) ok[r * 8 + n] &= o.a_ok[r] & o.b_ok[n];
  const std::vector<Mask> result = write_accumulators(w, d, i.arg[1], 8, sum, ok);
  for (int r = 0; r < accumulators; ++r) w.wrote(d[r], kAll, result[r]);
  w.block->counts.tensor_flops += 2ull * 16 * 8 * k;
}

// wgmma
// --------------------------------------------------------------------------------------------

struct Descriptor {
  uint32_t start, leading, stride, width;  // width: bytes of a swizzled row, 16 without swizzle
  explicit Descriptor(uint64_t d)
      : start((uint32_t)(d & 0x3fff) << 4),
        leading((uint32_t)(d >> 16 & 0x3fff) << 4),
        stride((uint32_t)(d >> 32 & 0x3fff) << 4) {
    static const uint32_t widths[] = {16, 128, 64, 32};
    width = widths[d >> 62];
    if (d >> 49 & 7) fault("unsupported", "a matrix descriptor with a base offset");
  }
  // The address of 16 bytes: those of row r at byte 16 c of its part of k.
  uint32_t along_k(int r, int c) const {
    if (width == 16) return start + (r / 8) * stride + (r % 8) * 16 + c * leading;
    return swizzled(start + (r / 8) * stride + (r % 8) * width + c * 16, width);
  }
  // Of rows 8 j to 8 j + 7 (of 16 bits) at position k.
  uint32_t along_rows(int j, int k) const {
    const int per = (int)width / 16;
    if (width == 16) return start + j * stride + (k % 8) * 16 + (k / 8) * leading;
    return swizzled(
        start + (j % per) * 16 + (j / per) * leading + (k % 8) * width + (k / 8) * stride, width);
  }
};

// Calls f(row, k, bits, valid) for elements of rows first to first + count, and each(address) for
// their pieces of 16 bytes.
template <class F>
void read_tile(Block& b, Warp& w, const Descriptor& d, Type type, bool transposed, int first,
               int count, int depth, F&& f) {
  const int size = element_bytes(type), per = 16 / size;
  auto piece = [&](uint32_t address) { return b.shared_offset(address, 16, 16); };
  auto value = [&](uint32_t o, int e) {
    uint32_t bits = 0;
    std::memcpy(&bits, b.shared.data() + o + e * size, size);
    return bits;
  };
  auto valid = [&](uint32_t o, int e) {
    return all_valid(b.shared_valid.data() + o + e * size, (uint32_t)size);
  };
  if (!transposed) {
    for (int r = first; r < first + count; ++r)
      for (int c = 0; c < depth / per; ++c) {
        const uint32_t o = piece(d.along_k(r, c));
        for (int e = 0; e < per; ++e) f(r - first, c * per + e, value(o, e), valid(o, e));
      }
    return;
  }
  for (int j = first / 8; j < (first + count) / 8; ++j)
    for (int k = 0; k < depth; ++k) {
      const uint32_t o = piece(d.along_rows(j, k));
      for (int e = 0; e < 8; ++e) f(8 * j + e - first, k, value(o, e), valid(o, e));
    }
}

void note_tile(Block& b, Warp& w, const Descriptor& d, Type type, bool transposed, int first,
               int count, int depth, std::vector<Range>& ranges) {
  const int per = 16 / element_bytes(type);
  auto note = [&](uint32_t address) {
    const uint32_t o = b.shared_offset(address, 16, 16);
    b.note_read(w, 0, o, 16, b.pending(w, 0, true));
    ranges.push_back({o, 16});
  };
  if (!transposed) {
    for (int r = first; r < first + count; ++r)
      for (int c = 0; c < depth / per; ++c) note(d.along_k(r, c));
  } else {
    for (int j = first / 8; j < (first + count) / 8; ++j)
      for (int k = 0; k < depth; ++k) note(d.along_rows(j, k));
  }
}

// Instr: arg 0 n, 1 k, 2 half accumulators, 3 A in registers, 4 bits: 1 transposes A, 2 B, 4
// negates A, 8 B; 5 integers: 1 wrap around, 2 saturate; reg: accumulators, A, B, scale-d.
struct Wgmma {
  const Instr& i;
  int n, k, accumulators;
  bool half, a_registers;
  explicit Wgmma(const Instr& instr)
      : i(instr),
        n(instr.arg[0]),
        k(instr.arg[1]),
        accumulators(instr.arg[2] ? n / 4 : n / 2),
        half(instr.arg[2]),
        a_registers(instr.arg[3]) {}
  int a_count() const { return a_registers ? 4 : 1; }
  const Reg* a() const { return i.reg + accumulators; }
  const Reg& b() const { return a()[a_count()]; }
  const Reg& scale() const { return a()[a_count() + 1]; }
};

void execute(Warp& w, PendingMma& p) {
  const Wgmma op(*p.instr);
  Block& b = *w.block;
  Operands o(16, op.n, op.k);
  const int first = 16 * (w.index % 4);
  const float sign_a = op.i.arg[4] & 4 ? -1.0f : 1.0f, sign_b = op.i.arg[4] & 8 ? -1.0f : 1.0f;
  if (op.a_registers) {
    const uint32_t* words[4];
    Mask valid[4];
    for (int r = 0; r < 4; ++r) {
      words[r] = p.operand_a.data() + r * (kLanes + 1);
      valid[r] = words[r][kLanes];
    }
    read_a(o, op.i.type, 4, words, valid);
    if (sign_a < 0)
      for (float& x : o.a) x = -x;
  } else {
    read_tile(b, w, Descriptor(p.a), op.i.type, op.i.arg[4] & 1, first, 16, op.k,
              [&](int r, int k, uint32_t bits, bool ok) {
                o.a[r * op.k + k] = sign_a * element(op.i.type, bits);
                o.a_ok[r] &= ok;
              });
  }
  read_tile(b, w, Descriptor(p.b), op.i.source, op.i.arg[4] & 2, 0, op.n, op.k,
            [&](int c, int k, uint32_t bits, bool ok) {
              o.b[k * op.n + c] = sign_b * element(op.i.source, bits);
              o.b_ok[c] &= ok;
            });
  auto& hidden = w.hidden;
  std::vector<float> sum(16 * op.n, 0.0f);
  std::vector<uint8_t> ok(16 * op.n, 1);
  if (p.scale_d) {
    std::vector<Mask> valid(op.accumulators);
    for (int r = 0; r < op.accumulators; ++r) valid[r] = hidden[op.i.reg[r].id];
    read_accumulators(w, op.i.reg, op.half, op.n, sum.data(), ok.data(), valid.data());
  }
  if (op.i.arg[5])
    multiply_integers(o, reinterpret_cast<int32_t*>(sum.data()), op.i.arg[5] == 2);
  else
    multiply(o, sum.data(), b.launch->options.accumulate);
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < op.n; ++c) ok[r * op.n + c] &= o.a_ok[r] & o.b_ok[c];
  const std::vector<Mask> result =
      write_accumulators(w, op.i.reg, op.half, op.n, sum.data(), ok.data());
  for (int r = 0; r < op.accumulators; ++r) hidden[op.i.reg[r].id] = result[r];
  b.counts.tensor_flops += 2ull * 16 * op.n * op.k;
  p.done = true;
}

void issue(Warp& w, const Instr& i, Mask m) {
  const Wgmma op(i);
  if (w.block->launch->warps % 4) fault("divergence", "wgmma needs a multiple of four warps");
  // The manual demands it also where nothing has touched the registers before.
  if (w.mma_fence == 0)
    fault("missing fence", "the first wgmma of a warp comes before any wgmma.fence");
  PendingMma p;
  p.instr = &i;
  auto& hidden = w.hidden;
  auto fenced = [&](Reg r, const char* what) {
    if (w.written[r.id] > w.mma_fence)
      fault("missing fence", std::string(what) + " was written after the last wgmma.fence");
  };
  if (op.a_registers) {
    p.operand_a.resize(4 * (kLanes + 1));
    for (int r = 0; r < 4; ++r) {
      const Reg a = op.a()[r];
      fenced(a, "a register of A");
      uint32_t* to = p.operand_a.data() + r * (kLanes + 1);
      std::memcpy(to, w.word(a), kLanes * 4);
      to[kLanes] = hidden.count(a.id) ? 0 : w.ok(a);
      ++w.locked[a.id], ++w.locks;
    }
  } else {
    w.need(op.a()[0], m, "a matrix descriptor");
    p.a = w.get(op.a()[0], 0);
  }
  w.need(op.b(), m, "a matrix descriptor");
  w.need(op.scale(), m, "scale-d");
  p.b = w.get(op.b(), 0);
  p.scale_d = w.get(op.scale(), 0) != 0;
  for (int r = 0; r < op.accumulators; ++r) {
    const Reg d = i.reg[r];
    fenced(d, "an accumulator");
    if (!hidden.count(d.id)) hidden[d.id] = w.valid[d.id];
    w.valid[d.id] = 0;
    ++w.locked[d.id], ++w.locks;
  }
  const uint64_t row_bytes = (uint64_t)op.k * (uint64_t)bytes_of(i.type);
  w.block->counts.tensor_shared_bytes +=
      (op.a_registers ? 0 : 16 * row_bytes) + (w.index % 4 ? 0 : (uint64_t)op.n * row_bytes);
  if (!op.a_registers)
    note_tile(*w.block, w, Descriptor(p.a), i.type, i.arg[4] & 1, 16 * (w.index % 4), 16, op.k,
              p.reads);
  note_tile(*w.block, w, Descriptor(p.b), i.source, i.arg[4] & 2, 0, op.n, op.k, p.reads);
  if (w.products.empty()) w.products.emplace_back();
  w.products.back().push_back(std::move(p));
  // The product is computed now, or when it is waited for; never before an earlier one.
  bool behind = false;
  for (auto& group : w.products)
    for (PendingMma& q : group) behind = behind || (!q.done && &q != &w.products.back().back());
  if (!behind && !w.block->late) execute(w, w.products.back().back());
}

void settle(Warp& w, PendingMma& p) {
  if (!p.done) execute(w, p);
  for (const Range& r : p.reads) w.block->settle_read(w, 0, r.begin, r.bytes);
  const Wgmma op(*p.instr);
  auto& hidden = w.hidden;
  if (op.a_registers)
    for (int r = 0; r < 4; ++r) --w.locked[op.a()[r].id], --w.locks;
  for (int r = 0; r < op.accumulators; ++r) {
    const int32_t id = op.i.reg[r].id;
    --w.locks;
    if (--w.locked[id] == 0) w.valid[id] = hidden[id], hidden.erase(id);
  }
}

void mma_fence(Warp& w, const Instr&, Mask) { w.mma_fence = w.executed; }

void mma_commit(Warp& w, const Instr&, Mask) { w.products.emplace_back(); }

// arg 0: groups that may stay in flight
void mma_wait(Warp& w, const Instr& i, Mask) {
  if (w.products.empty()) return;
  const int complete = (int)w.products.size() - 1 - i.arg[0];
  for (int g = 0; g < complete; ++g)
    for (PendingMma& p : w.products[g]) settle(w, p);
  if (complete > 0) w.products.erase(w.products.begin(), w.products.begin() + complete);
}

bool decode_wgmma(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  i.aligned = true;
  i.pipe = Pipe::tensor;
  if (name.has("fence")) return i.pipe = Pipe::sync, i.run = mma_fence, true;
  if (name.has("commit_group")) return i.pipe = Pipe::sync, i.run = mma_commit, true;
  if (name.has("wait_group")) {
    i.pipe = Pipe::sync;
    i.arg[0] = (int)raw.operands[0].value;
    i.run = mma_wait;
    return true;
  }
  Shape s;
  if (!name.has("mma_async") || name.has("sp") || !shape_of(name, s)) return false;
  i.arg[0] = s.n, i.arg[1] = s.k;
  const std::vector<Type> types = types_of(name);  // D, A, B
  if (types.size() != 3) return false;
  i.type = types[1], i.source = types[2];
  i.arg[2] = types[0] == Type::f16;
  i.arg[3] = raw.operands[1].kind == 'v';
  i.arg[5] = types[0] != Type::s32 ? 0 : name.has("satfinite") ? 2 : 1;
  auto immediate = [&](size_t at) {
    return at < raw.operands.size() ? (int)raw.operands[at].value : 0;
  };
  if (immediate(4) == -1) i.arg[4] |= 4;
  if (immediate(5) == -1) i.arg[4] |= 8;
  // A in registers has no flag of its own.
  if (!i.arg[3] && immediate(6)) i.arg[4] |= 1;
  if (immediate(i.arg[3] ? 6 : 7)) i.arg[4] |= 2;
  i.run = issue;
  if (i.arg[5])
    return (i.type == Type::s8 || i.type == Type::u8) &&
           (i.source == Type::s8 || i.source == Type::u8);
  return i.type == Type::f16 || i.type == Type::bf16 || i.type == Type::tf32 ||
         i.type == Type::e4m3 || i.type == Type::e5m2;
}

// wmma
// --------------------------------------------------------------------------------------------- The
// manual leaves the fragments' layout open: element e of lane l is number 32 e + l, row by row.

int fragment_elements(int rows, int columns) { return rows * columns / kLanes; }

// arg 0 rows, 1 columns of the fragment, 2 whether memory is column by column, 3 registers
void wmma_load(Warp& w, const Instr& i, Mask m) {
  const Reg address = i.reg[i.arg[3]];
  w.need(address, m, "an address");
  const int rows = i.arg[0], columns = i.arg[1], size = bytes_of(i.type), per = 4 / size;
  const uint64_t stride =
      i.regs > i.arg[3] + 1 ? w.get(i.reg[i.arg[3] + 1], 0) : (uint64_t)(i.arg[2] ? rows : columns);
  std::vector<Mask> valid(i.arg[3], kAll);
  for (int r = 0; r < i.arg[3]; ++r) std::memset(w.word(i.reg[r]), 0, 4 * kLanes);
  for (int e = 0; e < fragment_elements(rows, columns); ++e)
    for (int l = 0; l < kLanes; ++l) {
      const int number = 32 * e + l, row = number / columns, column = number % columns;
      const uint64_t at = i.arg[2] ? column * stride + row : row * stride + column;
      const Element x =
          element_at(w, l, (int)i.arg[4], w.get(address, l) + i.offset + at * size, size);
      if (!x.ok) valid[e / per] &= ~(1u << l);
      w.word(i.reg[e / per])[l] |= (uint32_t)x.bits << (8 * size * (e % per));
    }
  for (int r = 0; r < i.arg[3]; ++r) w.wrote(i.reg[r], kAll, valid[r]);
}

void wmma_store(Warp& w, const Instr& i, Mask m) {
  const Reg address = i.reg[0];
  w.need(address, m, "an address");
  const int rows = i.arg[0], columns = i.arg[1], size = bytes_of(i.type), per = 4 / size;
  const uint64_t stride =
      i.regs > i.arg[3] + 1 ? w.get(i.reg[i.arg[3] + 1], 0) : (uint64_t)(i.arg[2] ? rows : columns);
  for (int e = 0; e < fragment_elements(rows, columns); ++e)
    for (int l = 0; l < kLanes; ++l) {
      const int number = 32 * e + l, row = number / columns, column = number % columns;
      const uint64_t at = i.arg[2] ? column * stride + row : row * stride + column;
      const Reg r = i.reg[1 + e / per];
      put_element(w, l, (int)i.arg[4], w.get(address, l) + i.offset + at * size, size,
                  w.word(r)[l] >> (8 * size * (e % per)), w.ok(r) >> l & 1);
    }
}

// arg 0 m, 1 n, 2 k, 3 registers of A, 4 of B; arg 5 bits: 1 half C, 2 half D
void wmma_mma(Warp& w, const Instr& i, Mask) {
  const int m = i.arg[0], n = i.arg[1], k = i.arg[2];
  const int d_count = i.arg[5] & 2 ? m * n / 64 : m * n / 32;
  const Reg *a = i.reg + d_count, *b = a + i.arg[3], *c = b + i.arg[4];
  Operands o(m, n, k);
  const int per = i.type == Type::tf32 ? 1 : 2;
  auto read = [&](const Reg* r, int count, auto&& f) {
    for (int e = 0; e < count; ++e)
      for (int l = 0; l < kLanes; ++l)
        f(32 * e + l, element(i.type, w.word(r[e / per])[l] >> (16 * (e % per))),
          w.ok(r[e / per]) >> l & 1);
  };
  read(a, fragment_elements(m, k),
       [&](int at, float x, bool ok) { o.a[at] = x, o.a_ok[at / k] &= ok; });
  read(b, fragment_elements(k, n),
       [&](int at, float x, bool ok) { o.b[at] = x, o.b_ok[at % n] &= ok; });
  std::vector<float> sum(m * n);
  std::vector<uint8_t> ok(m * n);
  for (int at = 0; at < m * n; ++at) {
    const int e = at / 32, l = at % 32;
    const Reg r = c[i.arg[5] & 1 ? e / 2 : e];
    const uint32_t bits = w.word(r)[l];
    sum[at] =
        i.arg[5] & 1 ? to_float(Half{(uint16_t)(bits >> (16 * (e % 2)))}) : bits_as<float>(bits);
    ok[at] = w.ok(r) >> l & 1;
  }
  multiply(o, sum.data(), w.block->launch->options.accumulate);
  std::vector<Mask> valid(d_count, kAll);
  for (int at = 0; at < m * n; ++at) {
    const int e = at / 32, l = at % 32, r = i.arg[5] & 2 ? e / 2 : e;
    uint32_t* word = w.word(i.reg[r]) + l;
    if (i.arg[5] & 2) {
      const int shift = 16 * (e % 2);
      *word = (*word & ~(0xffffu << shift)) | (uint32_t)to_half(sum[at]).bits << shift;
    } else {
      *word = bits_as<uint32_t>(sum[at]);
    }
    if (!(ok[at] & o.a_ok[at / n] & o.b_ok[at % n])) valid[r] &= ~(1u << l);
  }
  for (int r = 0; r < d_count; ++r) w.wrote(i.reg[r], kAll, valid[r]);
  w.block->counts.tensor_flops += 2ull * m * n * k;
}

bool decode_wmma(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  Shape s;
  if (!shape_of(name, s)) return false;
  i.aligned = true;
  i.pipe = Pipe::tensor;
  if (name.has("mma")) {
    i.arg[0] = s.m, i.arg[1] = s.n, i.arg[2] = s.k;
    i.arg[3] = (int)raw.operands[1].parts.size(), i.arg[4] = (int)raw.operands[2].parts.size();
    const size_t types = name.parts.size();
    // .f32.f32 or .d.f16.f16.c: without the types of A and B these are f16.
    const bool named = name.any({"bf16", "tf32"});
    i.type = name.has("tf32") ? Type::tf32 : name.has("bf16") ? Type::bf16 : Type::f16;
    const std::string d = named ? "f32" : name.parts[types - 2], c = name.parts[types - 1];
    i.arg[5] = (c == "f16" ? 1 : 0) | (d == "f16" ? 2 : 0);
    i.run = wmma_mma;
    return !name.any({"s8", "u8", "s4", "u4", "b1"});
  }
  const bool is_a = name.has("a"), is_b = name.has("b");
  i.arg[0] = is_b ? s.k : s.m, i.arg[1] = is_a ? s.k : s.n;
  i.arg[2] = name.has("col");
  const bool stores = name.has("store");
  i.arg[3] = (int)raw.operands[stores ? 1 : 0].parts.size();
  i.arg[4] = name.any({"shared", "shared::cta"}) ? kElementShared
             : name.has("global")                ? kElementGlobal
                                                 : kElementGeneric;
  i.type = name.last();
  i.run = stores ? wmma_store : wmma_load;
  return true;
}

}  // namespace

bool decode_matrix(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  if (name.base() == "wgmma") return decode_wgmma(i, name, raw);
  if (name.base() == "wmma") return decode_wmma(i, name, raw);
  if (name.base() != "mma") return false;
  Shape s;
  if (!shape_of(name, s) || s.m != 16 || s.n != 8 || !name.has("row") || !name.has("col"))
    return false;
  if (name.any({"sp", "sp::ordered_metadata", "b1", "s4", "u4", "f64"})) return false;
  const size_t types = name.parts.size();  // .d.a.b.c
  i.type = type_of(name.parts[types - 3]), i.source = type_of(name.parts[types - 2]);
  i.arg[0] = s.k, i.arg[1] = name.parts[types - 4] == "f16";
  i.arg[2] = (int)raw.operands[1].parts.size();
  i.arg[3] = raw.operands[2].kind == 'v' ? (int)raw.operands[2].parts.size() : 1;
  i.arg[4] = name.parts[types - 4] == "s32", i.arg[5] = name.has("satfinite");
  i.aligned = true;
  i.pipe = Pipe::tensor;
  i.run = mma;
  return i.type != Type::none && i.source != Type::none;
}

}  // namespace fastbert::ptx
