// From parsed text to a Program: places for the registers, constants, handlers.

#include "decode.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

namespace fastbert::ptx {

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

struct Builder {
  Program& program;
  std::map<std::pair<uint64_t, Width>, Reg> constants;

  Reg place(Width width, uint8_t bits) {
    Reg r{program.words, program.ids++, width, bits};
    program.words += width == Width::wide ? 64 : width == Width::narrow ? 32 : 1;
    // Rows of lanes begin at multiples of 64 bytes, so that a predicate takes a row of 16 words.
    program.words = (program.words + 15) / 16 * 16;
    return r;
  }

  Reg constant(uint64_t value, Width width) {
    auto [it, fresh] = constants.try_emplace({value, width});
    if (fresh) {
      it->second = place(width, width == Width::wide ? 64 : width == Width::pred ? 1 : 32);
      program.constants.push_back({it->second, value});
    }
    return it->second;
  }

  void add(std::vector<Reg>& to, const RawOperand& o, Width immediate) {
    switch (o.kind) {
      case 'r':
        to.push_back(program.registers[(size_t)o.value]);
        break;
      case 'i':
        to.push_back(constant((uint64_t)o.value, immediate));
        break;
      case '_':
        to.push_back(Reg{});
        break;
      case 'v':
        for (const RawOperand& part : o.parts) add(to, part, immediate);
        break;
      case 'm':
        for (const RawOperand& part : o.parts) add(to, part, Width::wide);
        break;
      default:
        break;  // labels
    }
  }
};

// The width of an immediate as operand number `at`.
Width immediate_width(const Mnemonic& name, size_t at) {
  const std::string& base = name.base();
  const Type type = name.last();
  if ((base == "shl" || base == "shr" || base == "bfe" || base == "bfi") && at >= 2) {
    if (base == "bfi" && at == 2) return bytes_of(type) == 8 ? Width::wide : Width::narrow;
    return Width::narrow;
  }
  if (name.has("wide")) {
    return at == 3 && bytes_of(type) == 4 ? Width::wide : Width::narrow;
  }
  if (base == "slct" && at == 3) return Width::narrow;
  if (base == "slct") return bytes_of(name.before()) == 8 ? Width::wide : Width::narrow;
  if (base == "mov" && type == Type::pred) return Width::narrow;
  if (type == Type::pred) return Width::pred;
  if (base == "cp" || base == "mbarrier" || base == "wgmma" || base == "mapa") return Width::narrow;
  return bytes_of(type) == 8 ? Width::wide : Width::narrow;
}

bool decode_flow(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  i.pipe = Pipe::control;
  if (name.base() == "bra") {
    i.flow = Flow::branch;
    i.target = (int32_t)raw.operands[0].value;
    return true;
  }
  if (name.base() == "ret" || name.base() == "exit") {
    i.flow = Flow::exit;
    return true;
  }
  return false;
}

bool find_handler(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  return decode_flow(i, name, raw) || decode_compare(i, name, raw) ||
         decode_convert(i, name, raw) || decode_memory(i, name, raw) ||
         decode_atomic(i, name, raw) || decode_ldmatrix(i, name, raw) || decode_mma(i, name, raw) ||
         decode_wgmma(i, name, raw) || decode_wmma(i, name, raw) || decode_bulk(i, name, raw) ||
         decode_tensor_map(i, name, raw) || decode_async(i, name, raw) ||
         decode_warp(i, name, raw) || decode_float(i, name) || decode_integer(i, name);
}

// The fewest bytes that one write of shared (or global) memory fills.
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
  if (name.base() == "cp" && !name.has("bulk") && i.arg[0] > 0)
    p.granule = std::min(p.granule, i.arg[0]);
  if (name.base() == "mbarrier" || name.has("bulk")) p.granule = std::min(p.granule, 8);
  if (name.base() == "tensormap") {
    p.granule = std::min(p.granule, 8);
    p.global_granule = std::min(p.global_granule, 8);
  }
}

}  // namespace

Program* decode(const std::vector<RawInstr>& code, const std::vector<int>& bits) {
  auto program = std::make_unique<Program>();
  Builder builder{*program, {}};
  for (int b : bits)
    program->registers.push_back(builder.place(b == 1    ? Width::pred
                                               : b == 64 ? Width::wide
                                                         : Width::narrow,
                                               (uint8_t)b));
  program->first_special = (int32_t)program->registers.size();
  for (int s = 0; s < kSpecials; ++s) {
    const bool wide = s == kClock64 || s == kGlobaltimer || s == kGridId;
    program->registers.push_back(builder.place(wide ? Width::wide : Width::narrow, wide ? 64 : 32));
  }
  program->code.resize(code.size());
  program->operands.resize(code.size());
  program->texts.reserve(code.size());
  for (size_t k = 0; k < code.size(); ++k) {
    const RawInstr& raw = code[k];
    Instr& i = program->code[k];
    const Mnemonic name = split(raw.mnemonic);
    program->texts.push_back(raw.mnemonic);
    i.text = program->texts.back().c_str();
    i.line = raw.line;
    if (raw.guard >= 0) {
      i.guard = program->registers[(size_t)raw.guard].at;
      i.guard_id = program->registers[(size_t)raw.guard].id;
      i.negated = raw.negated;
    }
    int addresses = 0;
    for (size_t at = 0; at < raw.operands.size(); ++at) {
      // The size of a cp.async is part of the instruction; that of a bulk copy may be a register.
      if (name.base() == "cp" && at == 2 && raw.operands[at].kind == 'i' && !name.has("bulk"))
        continue;
      builder.add(program->operands[k], raw.operands[at], immediate_width(name, at));
      if (raw.operands[at].kind == 'm' && addresses < 4)
        i.offsets[addresses++] = raw.operands[at].offset;
    }
    i.offset = i.offsets[0];
    i.reg = program->operands[k].data();
    i.regs = (int32_t)program->operands[k].size();
    if (!find_handler(i, name, raw))
      program->unsupported.push_back("line " + std::to_string(raw.line) + ": " + raw.mnemonic);
    note_granule(*program, i, name);
  }
  return program.release();
}

}  // namespace fastbert::ptx
