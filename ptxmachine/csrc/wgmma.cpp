// wgmma: four warps multiply matrices in shared memory. A may also be in registers. Descriptors and
// layouts are those of the PTX ISA, section "Asynchronous Warpgroup Level Matrix Instructions".
//
// A product is computed at its issue or at its wait. Until the wait, no other instruction may use
// the accumulators, and the operands must not change.

#include "products.h"

namespace ptxmachine {
namespace {

struct Descriptor {
  uint32_t start, leading, stride, width;  // width: bytes of the swizzle; 16: no swizzle
  explicit Descriptor(uint64_t d)
      : start((uint32_t)(d & 0x3fff) << 4),
        leading((uint32_t)(d >> 16 & 0x3fff) << 4),
        stride((uint32_t)(d >> 32 & 0x3fff) << 4) {
    static const uint32_t widths[] = {16, 128, 64, 32};
    width = widths[d >> 62];
    if (d >> 49 & 7) fault("unsupported", "a matrix descriptor with a base offset");
  }
  // K-major matrix: the address of bytes 16 c to 16 c + 15 of row r.
  uint32_t along_k(int r, int c) const {
    if (width == 16) return start + (r / 8) * stride + (r % 8) * 16 + c * leading;
    return swizzled(start + (r / 8) * stride + (r % 8) * width + c * 16, width);
  }
  // M- or N-major matrix with 16-bit elements: the address of the elements of rows 8 j to 8 j + 7
  // at position k.
  uint32_t along_rows(int j, int k) const {
    const int per = (int)width / 16;
    if (width == 16) return start + j * stride + (k % 8) * 16 + (k / 8) * leading;
    return swizzled(
        start + (j % per) * 16 + (j / per) * leading + (k % 8) * width + (k / 8) * stride, width);
  }
};

// Calls f(row, k, bits, valid) for each element of `count` rows from row `first` on. The argument
// `row` is 0 for the row `first`.
template <class F>
void read_tile(Block& b, const Descriptor& d, Type type, bool transposed, int first, int count,
               int depth, F&& f) {
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

template <class F>
void each_of_group(Warp& w, F&& f) {
  const int first = w.index / kGroupWarps * kGroupWarps;
  for (int n = first; n < std::min(first + kGroupWarps, w.block->launch->warps); ++n)
    f(w.block->warps[(size_t)n]);
}

// Returns the index of the entry that a warpgroup has in vector clocks.
size_t entry_of(const Warp& w) {
  const Launch& launch = *w.block->launch;
  return (size_t)(w.first + launch.warps * kLanes + kSlots + w.index / kGroupWarps);
}

// Records the reads of a tile. The stamp names the warpgroup as the reader, so that a wait of one
// warp orders the reads of all warps of the warpgroup.
void note_tile(Block& b, Warp& w, const Descriptor& d, Type type, bool transposed, int first,
               int count, int depth, uint64_t number) {
  const int per = 16 / element_bytes(type);
  Stamp stamp = b.now(w, 0);
  stamp.thread = (uint16_t)entry_of(w), stamp.async = true, stamp.time = (uint32_t)number;
  auto note = [&](uint32_t address) {
    b.note_read(w, 0, b.shared_offset(address, 16, 16), 16, stamp);
  };
  if (!transposed) {
    for (int r = first; r < first + count; ++r)
      for (int c = 0; c < depth / per; ++c) note(d.along_k(r, c));
  } else {
    for (int j = first / 8; j < (first + count) / 8; ++j)
      for (int k = 0; k < depth; ++k) note(d.along_rows(j, k));
  }
}

// The operands of a wgmma. arg 0: the n of the shape m64nNkK. arg 1: the k of the shape. arg 2:
// whether accumulators are fp16. arg 3: whether A is in registers. arg 4, flags: 1 transposes A, 2
// transposes B, 4 negates A, 8 negates B. arg 5: 0 for floats, 1 for integers that wrap around, 2
// for integers that saturate. The registers are those of the accumulators, A, B and scale-d.
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
    read_tile(b, Descriptor(p.a), op.i.type, op.i.arg[4] & 1, first, 16, op.k,
              [&](int r, int k, uint32_t bits, bool ok) {
                o.a[r * op.k + k] = sign_a * element(op.i.type, bits);
                o.a_ok[r] &= ok;
              });
  }
  read_tile(b, Descriptor(p.b), op.i.source, op.i.arg[4] & 2, 0, op.n, op.k,
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
  // The PTX manual requires a wgmma.fence before the first wgmma, even if no instruction has
  // accessed the registers.
  if (w.mma_fence == 0)
    fault("missing fence", "the first wgmma of a warp comes before any wgmma.fence");
  PendingMma p;
  p.instr = &i, p.number = ++w.issued;
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
              p.number);
  note_tile(*w.block, w, Descriptor(p.b), i.source, i.arg[4] & 2, 0, op.n, op.k, p.number);
  each_of_group(w, [](Warp& other) { other.polls = 0; });
  if (w.products.empty()) w.products.emplace_back();
  w.products.back().push_back(std::move(p));
  // The product is computed now or at its wait, but always after the earlier products.
  bool behind = false;
  for (auto& group : w.products)
    for (PendingMma& q : group) behind = behind || (!q.done && &q != &w.products.back().back());
  if (!behind && !w.block->late) execute(w, w.products.back().back());
}

void settle(Warp& w, PendingMma& p) {
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

// wgmma.wait_group. arg 0: the number of groups that may stay in flight. A wgmma completes only
// after all warps of the warpgroup have issued it. After the wait of one warp, the wgmma has
// therefore read its operands for all warps. CUTLASS relies on this: after the wait, one thread of
// a warpgroup tells another block that the memory of the operands may be overwritten.
void mma_wait(Warp& w, const Instr& i, Mask) {
  const int complete = std::max((int)w.products.size() - 1 - i.arg[0], 0);
  uint64_t last = 0;
  for (int g = 0; g < complete; ++g)
    for (const PendingMma& p : w.products[g]) last = p.number;
  bool waits = false;
  each_of_group(w, [&](const Warp& other) {
    if (other.issued >= last) return;
    if (!other.live) fault("divergence", "a wgmma is executed by a part of a warpgroup");
    waits = true;
  });
  w.polls = waits ? w.polls + 1 : 0;
  if (waits) return;
  each_of_group(w, [&](Warp& other) {
    for (auto& group : other.products)
      for (PendingMma& p : group)
        if (!p.done && p.number <= last) execute(other, p);
  });
  for (int g = 0; g < complete; ++g)
    for (PendingMma& p : w.products[g]) settle(w, p);
  w.products.erase(w.products.begin(), w.products.begin() + complete);
  if (!w.block->launch->options.races || last == 0) return;
  // Lanes often share a clock, so a lane with the same clock as the lane before reuses its result.
  Clock before, after;
  each_lane(w.live, [&](int l) {
    if (w.base[l] != before) {
      before = w.base[l];
      auto next = std::make_shared<Times>(*before);
      uint32_t& time = (*next)[entry_of(w)];
      time = std::max(time, (uint32_t)last);
      after = next;
    }
    w.base[l] = after;
  });
}

// Returns the types in a mnemonic in their order: the types of D, A and B, and then the type of C
// if the mnemonic names it.
std::vector<Type> types_of(const Mnemonic& name) {
  std::vector<Type> types;
  for (const std::string& part : name.parts)
    if (type_of(part) != Type::none) types.push_back(type_of(part));
  return types;
}

}  // namespace

Known decode_wgmma(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  i.aligned = true;
  i.pipe = Pipe::sync;
  if (name.has("fence")) return i.run = mma_fence, Shape{};
  if (name.has("commit_group")) return i.run = mma_commit, Shape{};
  if (name.has("wait_group")) {
    i.arg[0] = (int)raw.operand(0).value;
    i.run = mma_wait, i.flow = Flow::retry;
    return Shape{constant(0, 7)};
  }
  i.pipe = Pipe::tensor;
  MatrixShape s;
  if (!name.has("mma_async") || name.has("sp") || !shape_of(name, s)) return kUnknown;
  if (s.m != 64 || s.n < 8 || s.n > 256 || s.n % 8) return kUnknown;
  const std::vector<Type> types = types_of(name);  // D, A, B
  if (types.size() != 3) return kUnknown;
  const bool integers = types[0] == Type::s32;
  if (!integers && types[0] != Type::f16 && types[0] != Type::f32) return kUnknown;
  i.type = types[1], i.source = types[2];
  if (!multiplies(i.type, i.source, integers) || s.k * element_bytes(i.type) != 32) return kUnknown;
  i.arg[0] = s.n, i.arg[1] = s.k;
  i.arg[2] = types[0] == Type::f16;
  i.arg[3] = raw.operand(1).kind == 'v';
  i.arg[5] = !integers ? 0 : name.has("satfinite") ? 2 : 1;
  if (raw.operand(4).value == -1) i.arg[4] |= 4;
  if (raw.operand(5).value == -1) i.arg[4] |= 8;
  // If A is in registers, there is no transpose flag for A.
  if (!i.arg[3] && raw.operand(6).value) i.arg[4] |= 1;
  if (raw.operand(i.arg[3] ? 6 : 7).value) i.arg[4] |= 2;
  i.run = issue;
  Shape shape = {vector(i.arg[2] ? s.n / 4 : s.n / 2, result(32)),
                 i.arg[3] ? vector(4, held(32)) : held(64), held(64), source(1)};
  if (integers) return shape;
  const Slot sign = constant(-1, 1), transposes = constant(0, 1);
  shape.insert(shape.end(), 2, sign);
  // Only matrices with 16-bit elements can be transposed.
  if (element_bytes(i.type) == 2) shape.insert(shape.end(), i.arg[3] ? 1 : 2, transposes);
  return shape;
}

}  // namespace ptxmachine
