// Makes a Program from a parsed kernel: gives registers and constants their places in the register
// file, and finds the handlers.

#include "decode.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

namespace ptxmachine {

int bytes_of(Type type) {
  switch (type) {
    case Type::b8:
    case Type::u8:
    case Type::s8:
    case Type::e4m3:
    case Type::e5m2:
      return 1;
    case Type::b16:
    case Type::u16:
    case Type::s16:
    case Type::f16:
    case Type::bf16:
      return 2;
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64:
      return 8;
    case Type::b128:
      return 16;
    case Type::none:
    case Type::pred:
      return 0;
    default:
      return 4;
  }
}

bool is_signed(Type type) {
  return type == Type::s8 || type == Type::s16 || type == Type::s32 || type == Type::s64;
}

bool is_float(Type type) { return type >= Type::f16; }

Type type_of(const std::string& suffix) {
  static const std::map<std::string, Type> types = {
      {"pred", Type::pred},   {"b8", Type::b8},         {"b16", Type::b16},   {"b32", Type::b32},
      {"b64", Type::b64},     {"b128", Type::b128},     {"u8", Type::u8},     {"u16", Type::u16},
      {"u32", Type::u32},     {"u64", Type::u64},       {"s8", Type::s8},     {"s16", Type::s16},
      {"s32", Type::s32},     {"s64", Type::s64},       {"f16", Type::f16},   {"bf16", Type::bf16},
      {"f16x2", Type::f16x2}, {"bf16x2", Type::bf16x2}, {"tf32", Type::tf32}, {"f32", Type::f32},
      {"f64", Type::f64},     {"e4m3", Type::e4m3},     {"e5m2", Type::e5m2}};
  const auto found = types.find(suffix);
  return found == types.end() ? Type::none : found->second;
}

bool Mnemonic::has(const char* part) const {
  return std::find(parts.begin() + 1, parts.end(), part) != parts.end();
}
bool Mnemonic::any(std::initializer_list<const char*> names) const {
  return std::any_of(names.begin(), names.end(), [&](const char* n) { return has(n); });
}
Type Mnemonic::last() const {
  for (size_t k = parts.size(); k-- > 1;)
    if (type_of(parts[k]) != Type::none) return type_of(parts[k]);
  return Type::none;
}
Type Mnemonic::before() const {
  bool seen = false;
  for (size_t k = parts.size(); k-- > 1;) {
    const Type type = type_of(parts[k]);
    if (type == Type::none) continue;
    if (seen) return type;
    seen = true;
  }
  return Type::none;
}

namespace {

Mnemonic split(const std::string& text) {
  Mnemonic name;
  size_t begin = 0;
  for (;;) {
    const size_t dot = text.find('.', begin);
    name.parts.push_back(text.substr(begin, dot - begin));
    if (dot == std::string::npos) return name;
    begin = dot + 1;
  }
}

Width width_of(int bits) {
  return bits == 1 ? Width::pred : bits == 64 ? Width::wide : Width::narrow;
}

struct Builder {
  Program& program;
  std::map<std::pair<uint64_t, Width>, Reg> constants;

  Reg place(Width width, uint8_t bits) {
    Reg r{program.words, program.ids++, width, bits};
    program.words += width == Width::wide ? 64 : width == Width::narrow ? 32 : 1;
    // Each register begins at a multiple of 64 bytes, so a predicate takes 16 words.
    program.words = (program.words + 15) / 16 * 16;
    return r;
  }

  Reg constant(uint64_t value, Width width) {
    if (width == Width::pred) value = value != 0;
    auto [it, fresh] = constants.try_emplace({value, width});
    if (fresh) {
      it->second = place(width, width == Width::wide ? 64 : width == Width::pred ? 1 : 32);
      program.constants.push_back({it->second, value});
    }
    return it->second;
  }

  // Appends the registers of operand `o` to `to`. The operand must fit the slot.
  void add(std::vector<Reg>& to, const RawOperand& o, const Slot& slot) {
    if (slot.kind == Slot::Kind::constant) return;
    switch (o.kind) {
      case 'r':
        to.push_back(program.registers[(size_t)o.value]);
        break;
      case 'i':
        to.push_back(constant((uint64_t)o.value, width_of(slot.bits)));
        break;
      case '_':
        to.push_back(Reg{});
        break;
      case 'v':
        for (size_t k = 0; k < o.parts.size(); ++k) add(to, o.parts[k], slot.parts[k]);
        break;
      case 'm':
        add(to, o.parts[0], source(64));
        for (size_t k = 0; k < slot.parts.size(); ++k) add(to, o.parts[1].parts[k], slot.parts[k]);
        break;
      default:
        break;  // a label needs no register
    }
  }

  // Appends the registers of all operands to `to`, and sets the registers and the address offsets
  // of `i`. `mismatch` has already checked that the operands fit `shape`.
  void add(std::vector<Reg>& to, Instr& i, const RawInstr& raw, const Shape& shape) {
    int addresses = 0;
    for (size_t at = 0; at < raw.operands.size(); ++at) {
      const RawOperand& o = raw.operands[at];
      // A vector of one element may be written without braces.
      const bool bare = shape[at].kind == Slot::Kind::vector && o.kind != 'v';
      add(to, o, bare ? shape[at].parts[0] : shape[at]);
      if (o.kind == 'm' && addresses < 4) i.offsets[addresses++] = o.offset;
    }
    if (addresses) i.offset = i.offsets[0];
    i.reg = to.data();
    i.regs = (int32_t)to.size();
  }
};

Known decode_flow(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  i.pipe = Pipe::control;
  if (name.base() == "bra") {
    i.flow = Flow::branch;
    i.target = (int32_t)raw.operand(0).value;
    return Shape{label()};
  }
  i.flow = Flow::exit;
  return Shape{};
}

// The registry of instructions: each family with the first parts of its mnemonics. The decode
// function of a family uses the other parts to decide whether it supports a mnemonic.
struct Family {
  Known (*decode)(Instr&, const Mnemonic&, const RawInstr&);
  std::vector<std::string> names;
};
const Family kFamilies[] = {
    {decode_flow, {"bra", "ret", "exit"}},
    {decode_compare, {"selp", "slct", "testp", "setp", "set"}},
    {decode_convert, {"cvt", "cvta", "isspacep", "mov"}},
    {decode_cluster, {"barrier", "mapa", "getctarank"}},
    {decode_memory, {"ld", "ldu", "st", "prefetch", "prefetchu", "discard", "applypriority"}},
    {decode_atomic, {"atom", "red"}},
    {decode_ldmatrix, {"ldmatrix", "stmatrix"}},
    {decode_mma, {"mma"}},
    {decode_wgmma, {"wgmma"}},
    {decode_wmma, {"wmma"}},
    {decode_bulk, {"cp"}},
    {decode_tensor_map, {"tensormap", "fence"}},
    {decode_async,
     {"cp", "mbarrier", "bar", "barrier", "setmaxnreg", "fence", "membar", "griddepcontrol",
      "nanosleep", "pmevent", "trap", "brkpt"}},
    {decode_warp, {"activemask", "shfl", "vote", "redux", "elect", "match", "bar"}},
    {decode_float,
     {"add", "sub", "mul", "fma", "mad", "div", "min", "max", "neg", "abs", "copysign", "rcp",
      "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"}},
    {decode_integer,
     {"add", "addc",  "sub",  "subc", "mul", "mad",  "madc", "div",  "rem", "min", "max",
      "neg", "abs",   "sad",  "and",  "or",  "xor",  "not",  "cnot", "shl", "shr", "popc",
      "clz", "bfind", "brev", "bfe",  "bfi", "prmt", "lop3", "bmsk", "shf", "dp4a"}},
};

Known find_handler(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  for (const Family& family : kFamilies) {
    const auto& names = family.names;
    if (std::find(names.begin(), names.end(), name.base()) == names.end()) continue;
    Instr attempt = i;
    Known shape = family.decode(attempt, name, raw);
    // Branches and exits have no handler.
    const bool runs = attempt.run || attempt.flow == Flow::branch || attempt.flow == Flow::exit;
    if (!shape || !runs) continue;
    i = attempt;
    return shape;
  }
  return kUnknown;
}

// Reduces the granule of shared or global memory to the size of this instruction's write, if the
// granule is larger. A granule is the unit of memory in which races are detected.
void note_granule(Program& p, const Instr& i, const Mnemonic& name) {
  const bool writes = name.base() == "st" || name.base() == "atom" || name.base() == "red";
  const bool generic =
      !name.any({"global", "shared", "shared::cta", "shared::cluster", "local", "param"});
  int32_t bytes = 0;
  if (writes) bytes = bytes_of(i.type) * std::max(i.arg[1], 1);
  if (name.base() == "wmma" && name.has("store")) bytes = bytes_of(i.type);
  if (bytes) {
    if (generic || name.has("global")) p.global_granule = std::min(p.global_granule, bytes);
    if (generic || !name.has("global")) p.granule = std::min(p.granule, bytes);
  }
  if (name.base() == "cp" && i.pipe == Pipe::global && !name.has("bulk"))
    p.granule = std::min(p.granule, i.arg[0]);
  if (name.base() == "mbarrier" || name.has("bulk")) p.granule = std::min(p.granule, 8);
  if (name.base() == "tensormap") {
    p.granule = std::min(p.granule, 8);
    p.global_granule = std::min(p.global_granule, 8);
  }
}

// Sets the bits and the `special` flag of each register operand.
void describe(RawOperand& o, const Program& p, size_t declared) {
  if (o.kind == 'r') {
    o.bits = p.registers.at((size_t)o.value).bits;
    o.special = (size_t)o.value >= declared;
  }
  for (RawOperand& part : o.parts) describe(part, p, declared);
}

}  // namespace

const RawOperand& RawInstr::operand(size_t at) const {
  static const RawOperand none{' ', 0, 0, {}, false, 0, false};
  return at < operands.size() ? operands[at] : none;
}

std::vector<std::string> mnemonics() {
  std::vector<std::string> found;
  for (const Family& family : kFamilies)
    for (const std::string& name : family.names)
      if (std::find(found.begin(), found.end(), name) == found.end()) found.push_back(name);
  return found;
}

Program* decode(std::vector<RawInstr> code, const std::vector<int>& bits) {
  auto program = std::make_unique<Program>();
  Builder builder{*program, {}};
  for (int b : bits) program->registers.push_back(builder.place(width_of(b), (uint8_t)b));
  program->first_special = (int32_t)program->registers.size();
  for (int s = 0; s < kSpecials; ++s) {
    const bool wide = s == kClock64 || s == kGlobaltimer || s == kGridId;
    program->registers.push_back(builder.place(wide ? Width::wide : Width::narrow, wide ? 64 : 32));
  }
  program->code.resize(code.size());
  program->operands.resize(code.size());
  program->texts.reserve(code.size());
  for (size_t k = 0; k < code.size(); ++k) {
    RawInstr& raw = code[k];
    Instr& i = program->code[k];
    const Mnemonic name = split(raw.mnemonic);
    program->texts.push_back(raw.mnemonic);
    i.text = program->texts.back().c_str();
    i.line = raw.line;
    if (raw.guard >= 0) {
      const Reg guard = program->registers.at((size_t)raw.guard);
      i.guard = guard.at, i.guard_id = guard.id, i.negated = raw.negated;
      raw.guard_bits = guard.bits;
    }
    for (RawOperand& o : raw.operands) describe(o, *program, bits.size());
    const Known shape = find_handler(i, name, raw);
    if (!shape) {
      program->unsupported.emplace_back(raw.line, raw.mnemonic);
      continue;
    }
    const std::string wrong = mismatch(raw, *shape);
    if (!wrong.empty()) {
      program->misfits.emplace_back(raw.line, raw.mnemonic + ": " + wrong);
      continue;
    }
    builder.add(program->operands[k], i, raw, *shape);
    note_granule(*program, i, name);
  }
  return program.release();
}

}  // namespace ptxmachine
