// A model's step as a program: a header, then one struct per op, written by exl2nb/ops/program.py from exl2nb/ops/records.py and read by
// the CPU's and the GPU's walkers.
//
// Every field has 8 bytes, so a program is an int64 tensor. The field lists below are the schema: the structs are made of them, and
// `program_schema()` spells them out for Python, which writes by field name and compares the schema when the library is loaded.
// Pointers: null means that the op has none. On the GPU `blob` points to a host copy of the blob's head: its int64 device address, then the
// header and the parts (format/gpu_blob.h). side 1: the output (input) is in a buffer of its own, so that attention and MLP can both be
// computed before either is added to the residual.
#pragma once
#include <cstdint>
#include <string>
#include <type_traits>

#include "format/pool.h"

namespace exl2nb {

constexpr int64_t kProgramMagic = 0x3147525032584558, kProgramVersion = 4;

struct Op {
  int64_t code;
};

// clang-format off
// The norm in front of a matrix, and the matrix. norm null: none; layer_norm 0: RMS.
#define EXL2NB_NORMED_FIELDS(F) F(const float*, norm) F(double, eps) F(const float*, norm_bias) F(int64_t, layer_norm) F(const uint8_t*, blob)
#define EXL2NB_EMBED_FIELDS(F) F(const void*, table) F(int64_t, dtype) F(int64_t, vocab) F(int64_t, width) F(double, scale) \
  F(const void*, position_table) F(int64_t, position_dtype) F(int64_t, max_positions)
#define EXL2NB_QKV_FIELDS(F) F(const float*, bias) F(const float*, cos) F(const float*, sin) \
  F(int64_t, max_positions) F(int64_t, rope_half) F(int64_t, num_heads) F(int64_t, num_kv_heads) F(int64_t, head_dim) \
  F(const float*, q_norm) F(int64_t, q_norm_stride) F(int64_t, q_norm_whole) F(const float*, k_norm) F(int64_t, k_norm_stride) \
  F(int64_t, k_norm_whole) F(int64_t, layer) F(int64_t, interleaved) F(double, clip)
#define EXL2NB_ATTENTION_FIELDS(F) F(double, scale) F(int64_t, window) F(double, softcap) F(int64_t, layer)
// norm: of the product, before it is added.
#define EXL2NB_RESIDUAL_FIELDS(F) F(const uint8_t*, blob) F(const float*, bias) F(const float*, norm) F(double, eps) F(double, scale) F(int64_t, side)
#define EXL2NB_GATE_UP_FIELDS(F) F(const float*, bias) F(int64_t, activation) F(int64_t, gated) F(int64_t, side)
#define EXL2NB_HEAD_FIELDS(F) F(const float*, bias)
// blob: the router. table: int64 (experts, 2), the addresses of each expert's [gate; up] and down; on the GPU, of cuda/moe/moe.h's tables.
#define EXL2NB_ROUTED_FIELDS(F) F(const int64_t*, table) F(int64_t, experts) F(int64_t, top_k) F(double, renormalize) \
  F(int64_t, activation) F(const uint8_t*, shared_up) F(const uint8_t*, shared_down) F(const uint8_t*, shared_gate) \
  F(const float*, post_norm) F(double, post_eps) F(double, scale)
#define EXL2NB_NO_FIELDS(F)
// Struct, base, the base's fields, code, name in Python, own fields.
#define EXL2NB_OPS(OP) \
  OP(EmbedOp, Op, EXL2NB_NO_FIELDS, 1, embed, EXL2NB_EMBED_FIELDS) \
  OP(QkvOp, NormedOp, EXL2NB_NORMED_FIELDS, 2, norm_qkv_rope, EXL2NB_QKV_FIELDS) \
  OP(AttentionOp, Op, EXL2NB_NO_FIELDS, 3, paged_attention, EXL2NB_ATTENTION_FIELDS) \
  OP(ResidualOp, Op, EXL2NB_NO_FIELDS, 4, linear_residual, EXL2NB_RESIDUAL_FIELDS) \
  OP(GateUpOp, NormedOp, EXL2NB_NORMED_FIELDS, 5, norm_gate_up, EXL2NB_GATE_UP_FIELDS) \
  OP(HeadOp, NormedOp, EXL2NB_NORMED_FIELDS, 6, norm_head, EXL2NB_HEAD_FIELDS) \
  OP(RoutedOp, NormedOp, EXL2NB_NORMED_FIELDS, 7, routed_mlp, EXL2NB_ROUTED_FIELDS) \
  OP(ResidualOutOp, Op, EXL2NB_NO_FIELDS, 8, residual_out, EXL2NB_NO_FIELDS)
// clang-format on

#define EXL2NB_FIELD(type, name) alignas(8) type name;  // a pointer may have 4 bytes (WebAssembly)
#define EXL2NB_COUNT(type, name) +1
#define EXL2NB_STRUCT(Struct, Base, PREFIX, number, name, FIELDS) \
  struct Struct : Base {                                          \
    static constexpr int64_t kCode = number;                      \
    FIELDS(EXL2NB_FIELD)                                          \
  };                                                              \
  static_assert(sizeof(Struct) == 8 * (1 PREFIX(EXL2NB_COUNT) FIELDS(EXL2NB_COUNT)), "fields of 8 bytes");
struct NormedOp : Op {
  EXL2NB_NORMED_FIELDS(EXL2NB_FIELD)
};
EXL2NB_OPS(EXL2NB_STRUCT)
#undef EXL2NB_STRUCT
#undef EXL2NB_COUNT
#undef EXL2NB_FIELD

// Calls visitor(op) with the op as its own struct. The code must be known. A visitor that does not take every struct has an overload for
// `const Op&`, which gets the others and refuses them with a message that names `op_name`.
template <class Visitor>
decltype(auto) visit(const Op* op, Visitor&& visitor) {
  switch (op->code) {
#define EXL2NB_CASE(Struct, Base, PREFIX, number, name, FIELDS) \
  case number:                                                  \
    return visitor(static_cast<const Struct&>(*op));
    EXL2NB_OPS(EXL2NB_CASE)
#undef EXL2NB_CASE
    default:
      return visitor(static_cast<const HeadOp&>(*op));
  }
}
// The op as a T, or null where it is another one, or none.
template <class T>
const T* as(const Op* op) {
  return op && op->code == T::kCode ? static_cast<const T*>(op) : nullptr;
}
// The op as one that begins with a norm and a matrix, or null.
inline const NormedOp* as_normed(const Op* op) {
  if (const auto* qkv = as<QkvOp>(op)) return qkv;
  if (const auto* gate_up = as<GateUpOp>(op)) return gate_up;
  if (const auto* head = as<HeadOp>(op)) return head;
  return as<RoutedOp>(op);
}
// An op's matrix, or null.
inline const uint8_t* matrix_of(const Op* op) {
  if (const auto* normed = as_normed(op)) return normed->blob;
  const auto* residual = as<ResidualOp>(op);
  return residual ? residual->blob : nullptr;
}
#define EXL2NB_ONE(Struct, Base, PREFIX, number, name, FIELDS) +1
inline bool known_op(int64_t code) { return code >= 1 && code <= 0 EXL2NB_OPS(EXL2NB_ONE); }
#undef EXL2NB_ONE
// Bytes of an op with a known code.
inline int64_t op_bytes(const Op* op) {
  return visit(op, [](const auto& o) { return static_cast<int64_t>(sizeof(o)); });
}
inline const char* op_name(const Op* op) {
  switch (op->code) {
#define EXL2NB_CASE(Struct, Base, PREFIX, number, name, FIELDS) \
  case number:                                                  \
    return #name;
    EXL2NB_OPS(EXL2NB_CASE)
#undef EXL2NB_CASE
    default:
      return "";
  }
}

// A view of a program; `first` to the end of `words` int64.
class Program {
 public:
  struct Header {
    int64_t magic, version, words, id, hidden;
  };
  Program(const int64_t* code, int64_t words) : code_(code), words_(words) {}

  // What is wrong with the header or the order of the ops, or null. Everything else may be called when it is null.
  const char* wrong() const {
    constexpr int64_t kHeader = sizeof(Header) / 8;
    if (words_ < kHeader || header().magic != kProgramMagic || header().version != kProgramVersion || header().words != words_)
      return "the program is not the code of a Program";
    constexpr const char* kOrder = "a program starts with embed and ends with norm_head or residual_out";
    bool ended = false;
    for (int64_t at = kHeader; at < words_;) {
      const Op* op = reinterpret_cast<const Op*>(code_ + at);
      if (!known_op(op->code) || at + op_bytes(op) / 8 > words_) return "the program holds an unknown op";
      if (ended || (at == kHeader) != (op->code == EmbedOp::kCode)) return kOrder;
      ended = op->code == HeadOp::kCode || op->code == ResidualOutOp::kCode;
      at += op_bytes(op) / 8;
    }
    return ended ? nullptr : kOrder;
  }
  const Header& header() const { return *reinterpret_cast<const Header*>(code_); }
  int64_t hidden() const { return header().hidden; }
  const Op* first() const { return reinterpret_cast<const Op*>(code_ + sizeof(Header) / 8); }
  const EmbedOp& embed() const { return static_cast<const EmbedOp&>(*first()); }
  // The op that ends it with logits, or null where the residual stream is what it leaves.
  const HeadOp* head() const {
    const Op* last = first();
    for (const Op* op = last; op; op = next(op)) last = op;
    return as<HeadOp>(last);
  }
  // The op after `op`, or null.
  const Op* next(const Op* op) const {
    const auto* after = reinterpret_cast<const Op*>(reinterpret_cast<const uint8_t*>(op) + op_bytes(op));
    return reinterpret_cast<const int64_t*>(after) < code_ + words_ ? after : nullptr;
  }
  // Calls visitor(op) for every op, in order.
  template <class Visitor>
  void each(Visitor&& visitor) const {
    for (const Op* op = first(); op; op = next(op)) visit(op, visitor);
  }

 private:
  const int64_t* code_;
  int64_t words_;
};

// The schema: a line for each op, "name code field:kind ...", kind address, integer or real; then the cache formats, "cache_formats
// name:number ...".
inline std::string program_schema() {
  struct Kind {
    static const char* of(double) { return "real"; }
    static const char* of(int64_t) { return "integer"; }
    static const char* of(const void*) { return "address"; }
  };
  std::string text;
#define EXL2NB_FIELD(type, field) text += std::string(" " #field ":") + Kind::of(static_cast<type>(0));
#define EXL2NB_LINE(Struct, Base, PREFIX, number, name, FIELDS) \
  text += #name " " #number;                                    \
  PREFIX(EXL2NB_FIELD) FIELDS(EXL2NB_FIELD) text += "\n";
  EXL2NB_OPS(EXL2NB_LINE)
#undef EXL2NB_LINE
#undef EXL2NB_FIELD
#define EXL2NB_FORMAT(constant, number, name) " " #name ":" #number
  return text += "cache_formats" EXL2NB_CACHE_FORMATS(EXL2NB_FORMAT) "\n";
#undef EXL2NB_FORMAT
}

}  // namespace exl2nb
