// Instructions that synchronise the lanes of a warp: shuffles, votes, matches, reductions and
// elections.

#include "decode.h"
#include "lanes.h"

namespace ptxmachine {
namespace {

enum class Shuffle : int32_t { up, down, bfly, idx };

Mask members_of(Warp& w, Reg r, Mask m) {
  w.need(r, m, "a member mask");
  const int first = __builtin_ctz(m);
  const Mask members = (Mask)w.get(r, first);
  each_lane(m, [&](int l) {
    if ((Mask)w.get(r, l) != members)
      fault("divergence", "the lanes give different member masks", l);
    if (!(members >> l & 1)) fault("divergence", "a lane is not in its own member mask", l);
  });
  return members;
}

// shfl.sync d|p, a, b, c, members. arg 0: a value of Shuffle. arg 1: whether the instruction has
// the result p.
void shuffle(Warp& w, const Instr& i, Mask m) {
  const Reg *r = i.reg + 1 + i.arg[1], d = i.reg[0];
  members_of(w, r[3], m);
  w.need(r[1], m, "the lane of a shuffle");
  w.need(r[2], m, "the clamp of a shuffle");
  uint32_t out[kLanes];
  std::memcpy(out, w.word(r[0]), sizeof(out));
  Mask in_range = 0, valid = 0;
  const Mask ok = w.ok(r[0]);
  each_lane(m, [&](int l) {
    const int b = (int)(w.get(r[1], l) & 31), c = (int)w.get(r[2], l);
    const int segment = c >> 8 & 31, clamp = c & 31;
    const int top = (l & segment) | (clamp & ~segment), bottom = l & segment;
    int from = l;
    bool inside = true;
    switch ((Shuffle)i.arg[0]) {
      case Shuffle::up:
        from = l - b, inside = from >= top;
        break;
      case Shuffle::down:
        from = l + b, inside = from <= top;
        break;
      case Shuffle::bfly:
        from = l ^ b, inside = from <= top;
        break;
      case Shuffle::idx:
        from = bottom | (b & ~segment), inside = from <= top;
        break;
    }
    if (!inside) from = l;
    const bool there = m >> from & 1;
    in_range |= (Mask)inside << l;
    valid |= (Mask)(there && (ok >> from & 1)) << l;
    out[l] = w.word(r[0])[from];
  });
  if (d.id >= 0) put(w, d, m, out, valid);
  if (i.arg[1]) {
    uint32_t& p = w.file[i.reg[1].at];
    p = (p & ~m) | (in_range & m);
    w.wrote(i.reg[1], m, kAll);
  }
}

enum class Vote : int32_t { all, any, uni, ballot };

// vote.sync d, p, members. arg 0: a value of Vote. arg 1: whether p is negated.
void vote(Warp& w, const Instr& i, Mask m) {
  const Mask members = members_of(w, i.reg[2], m);
  w.need(i.reg[1], m, "a vote");
  const Mask yes = (i.arg[1] ? ~w.file[i.reg[1].at] : w.file[i.reg[1].at]) & members;
  if ((Vote)i.arg[0] == Vote::ballot) {
    each_lane(m, [&](int l) { w.set(i.reg[0], l, yes); });
  } else {
    const bool answers[] = {yes == members, yes != 0, yes == members || yes == 0};
    const Mask result = answers[i.arg[0]] ? kAll : 0u;
    uint32_t& to = w.file[i.reg[0].at];
    to = (to & ~m) | (result & m);
  }
  w.wrote(i.reg[0], m, kAll);
}

void active_mask(Warp& w, const Instr& i, Mask m) {
  each_lane(m, [&](int l) { w.set(i.reg[0], l, m); });
  w.wrote(i.reg[0], m, kAll);
}

// redux.sync d, a, members. arg 0: the operation, which is an index in `ops` of decode_warp.
void reduce(Warp& w, const Instr& i, Mask m) {
  members_of(w, i.reg[2], m);
  w.need(i.reg[1], m, "an operand of redux");
  int64_t result = 0;
  bool first = true;
  each_lane(m, [&](int l) {
    const uint32_t bits = w.word(i.reg[1])[l];
    const int64_t x = i.type == Type::s32 ? (int64_t)(int32_t)bits : (int64_t)bits;
    if (first)
      result = x;
    else
      switch (i.arg[0]) {
        case 0:
          result += x;
          break;
        case 1:
          result = std::min(result, x);
          break;
        case 2:
          result = std::max(result, x);
          break;
        case 3:
          result &= x;
          break;
        case 4:
          result |= x;
          break;
        default:
          result ^= x;
      }
    first = false;
  });
  each_lane(m, [&](int l) { w.set(i.reg[0], l, (uint32_t)result); });
  w.wrote(i.reg[0], m, kAll);
}

// elect.sync d|p, members. The machine elects the lowest lane of the member mask.
void elect(Warp& w, const Instr& i, Mask m) {
  const Mask members = members_of(w, i.reg[2], m);
  const int leader = __builtin_ctz(members);
  if (i.reg[0].id >= 0) {
    each_lane(m, [&](int l) { w.set(i.reg[0], l, leader); });
    w.wrote(i.reg[0], m, kAll);
  }
  uint32_t& p = w.file[i.reg[1].at];
  p = (p & ~m) | ((1u << leader) & m);
  w.wrote(i.reg[1], m, kAll);
}

// match.any.sync and match.all.sync d|p, a, members. arg 0: whether it is match.all. arg 1: whether
// the instruction has the result p.
void match(Warp& w, const Instr& i, Mask m) {
  const Reg a = i.reg[1 + i.arg[1]];
  const Mask members = members_of(w, i.reg[2 + i.arg[1]], m);
  w.need(a, m, "an operand of match");
  Mask equal[kLanes] = {};
  bool all = true;
  each_lane(m, [&](int l) {
    each_lane(m, [&](int k) { equal[l] |= (Mask)(w.get(a, k) == w.get(a, l)) << k; });
    all = all && equal[l] == members;
  });
  each_lane(m, [&](int l) { w.set(i.reg[0], l, i.arg[0] ? (all ? members : 0) : equal[l]); });
  w.wrote(i.reg[0], m, kAll);
  if (i.arg[1]) {
    uint32_t& p = w.file[i.reg[1].at];
    p = (p & ~m) | (all ? m : 0u);
    w.wrote(i.reg[1], m, kAll);
  }
}

void sync_warp(Warp& w, const Instr& i, Mask m) {
  members_of(w, i.reg[0], m);
  w.block->sync_lanes(w, m);
}

}  // namespace

Known decode_warp(Instr& i, const Mnemonic& name, const RawInstr& raw) {
  const std::string& base = name.base();
  i.pipe = Pipe::shuffle;
  const bool two = raw.operand(0).kind == 'v';
  const Slot members = source(32);
  if (base == "activemask") {
    i.run = active_mask, i.pipe = Pipe::alu;
    return Shape{result(32)};
  }
  if (!name.has("sync")) return kUnknown;
  i.flow = Flow::warp_sync;
  if (base == "shfl") {
    i.arg[0] = (int)(name.has("up")     ? Shuffle::up
                     : name.has("down") ? Shuffle::down
                     : name.has("bfly") ? Shuffle::bfly
                                        : Shuffle::idx);
    i.arg[1] = two;
    i.run = shuffle;
    const Slot d = result(32).or_sink();
    return Shape{two ? pair(d, result(1)) : d, source(32), source(32), source(32), members};
  }
  if (base == "vote") {
    i.arg[0] = (int)(name.has("all")   ? Vote::all
                     : name.has("any") ? Vote::any
                     : name.has("uni") ? Vote::uni
                                       : Vote::ballot);
    i.arg[1] = raw.operand(1).negated;
    i.run = vote;
    return Shape{result((Vote)i.arg[0] == Vote::ballot ? 32 : 1), source(1).or_not(), members};
  }
  if (base == "redux") {
    static const char* ops[] = {"add", "min", "max", "and", "or", "xor"};
    bool found = false;
    for (int k = 0; k < 6; ++k)
      if (name.has(ops[k])) i.arg[0] = k, found = true;
    i.type = name.last();
    i.run = reduce;
    if (!found || (i.type != Type::s32 && i.type != Type::u32 && i.type != Type::b32))
      return kUnknown;
    return Shape{result(32), source(32), members};
  }
  if (base == "elect") {
    i.run = elect;
    return Shape{pair(result(32).or_sink(), result(1)), members};
  }
  if (base == "match") {
    const int bits = bits_of(name.last());
    i.arg[0] = name.has("all"), i.arg[1] = two;
    i.run = match;
    if ((bits != 32 && bits != 64) || (!i.arg[0] && !name.has("any"))) return kUnknown;
    const bool predicate = two && i.arg[0];
    return Shape{predicate ? pair(result(32), result(1)) : result(32), source(bits), members};
  }
  if (!name.has("warp")) return kUnknown;
  i.pipe = Pipe::sync;
  i.run = sync_warp;
  return Shape{members};
}

}  // namespace ptxmachine
