// What a step's workspace holds for a program, and where.
#pragma once
#include <algorithm>
#include <cstring>
#include <string>

#include "cuda/attention/attention.h"
#include "cuda/gemm/persistent/persistent_gemm.cuh"
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/gemm/stream_k/stream_k_gemm.cuh"
#include "cuda/moe/moe.h"
#include "cuda/runtime/device.h"
#include "format/program.h"

namespace exl2nb {

// An op's matrix: the host copy of its head, and the blob on the device.
struct Weight {
  const uint8_t *head, *blob;
  explicit Weight(const uint8_t* host) : head(host + 8), blob(nullptr) {
    int64_t device;
    std::memcpy(&device, host, 8);
    blob = reinterpret_cast<const uint8_t*>(device);
  }
  const GpuHeader& header() const { return *reinterpret_cast<const GpuHeader*>(head); }
  int perms() const { return std::max(1, header().num_perms); }
};

// Pieces of the workspace.
struct Arena {
  size_t at = 0;
  size_t take(size_t bytes) {
    const size_t here = at;
    at = (at + bytes + 255) / 256 * 256;
    return here;
  }
};
struct Layout {
  size_t residual[2], normed, qkv, act[2], sum, wide, squares, attention, routed, stream_k, chain, persistent_bytes, bytes, attention_bytes;
  size_t lamport_qkv[2], lamport_bytes;  // QKV with Lamport flags (lamport.cuh), by turns of layers; zeros between steps
};

inline size_t input_bytes(const Weight& w, int tokens) {
  return static_cast<size_t>(w.perms()) * input_stride(w.header()) * stream_k_rows(tokens) * 2;
}

// The op after `op` that reads buffer `side`, or null.
inline const ResidualOp* reader(const Program& program, const Op* op, int64_t side) {
  while ((op = program.next(op))) {
    const auto* residual = as<ResidualOp>(op);
    if (residual && residual->side == side) return residual;
  }
  return nullptr;
}

// What the ops of a program need, op by op; each call returns what is wrong, or null.
struct LayoutSizes {
  const Device& device;
  const Program& program;
  const int tokens;
  size_t normed = 0, qkv = 0, act[2] = {0, 0}, wide = 0, attention = 0, routed = 0, lamport_qkv = 0;
  int inner = 0, heads = 0;  // heads: numbers of a row of attention's output, the most of all layers

  void matrix(const Weight& weight) { normed = std::max(normed, input_bytes(weight, tokens)); }
  const char* operator()(const EmbedOp&) { return nullptr; }
  const char* operator()(const QkvOp& op) {
    const Weight weight(op.blob);
    const auto outputs = static_cast<size_t>(weight.header().N);
    matrix(weight);
    heads = std::max(heads, static_cast<int>(op.num_heads * op.head_dim));
    qkv = std::max(qkv, outputs * tokens * 4);
    lamport_qkv = std::max(lamport_qkv, outputs * kPersistentTokens * 4);
    attention = std::max(attention, attention_workspace_bytes(tokens, static_cast<int>(op.num_heads), static_cast<int>(op.num_kv_heads),
                                                              static_cast<int>(op.head_dim)));
    return nullptr;
  }
  const char* operator()(const AttentionOp& op) { return reader(program, &op, 0) ? nullptr : "nothing reads the output of attention"; }
  const char* operator()(const ResidualOp& op) {
    const Weight weight(op.blob);
    act[op.side] = std::max(act[op.side], input_bytes(weight, tokens));
    inner = std::max(inner, weight.header().K);
    return nullptr;
  }
  const char* operator()(const GateUpOp& op) {
    const Weight weight(op.blob);
    matrix(weight);
    wide = std::max(wide, static_cast<size_t>(weight.header().N) * std::min(tokens, kStreamKTokens) * 4);
    return reader(program, &op, op.side) ? nullptr : "nothing reads the MLP's result";
  }
  const char* operator()(const RoutedOp& op) {
    const Weight weight(op.blob);
    matrix(weight);
    routed = std::max(routed, routed_bytes(device, op, weight.header(), tokens));
    return nullptr;
  }
  const char* operator()(const HeadOp& op) {
    matrix(Weight(op.blob));
    return nullptr;
  }
  const char* operator()(const ResidualOutOp&) { return nullptr; }
  const char* operator()(const Op&) { return "the GPU's step does not compute this op"; }
};

// Lays the workspace out; what is wrong with the program, or empty.
inline std::string lay_out(const Device& device, const Program& program, int tokens, Layout& layout) {
  if (const char* wrong = program.wrong()) return wrong;
  LayoutSizes sizes{device, program, tokens};
  for (const Op* op = program.first(); op; op = program.next(op))
    if (const char* wrong = visit(op, sizes)) return wrong;
  const int64_t H = program.hidden();
  Arena arena;
  for (size_t& at : layout.residual) at = arena.take(static_cast<size_t>(tokens) * H * 4);
  layout.normed = arena.take(sizes.normed);
  layout.qkv = arena.take(sizes.qkv);
  for (int i = 0; i < 2; i++) layout.act[i] = arena.take(sizes.act[i]);
  layout.sum = arena.take(static_cast<size_t>(tokens) * std::max<int64_t>(H, sizes.heads) * 4);
  layout.wide = arena.take(sizes.wide);
  layout.squares = arena.take(static_cast<size_t>(tokens) * std::max(device.multiprocessors, stream_k_squares(static_cast<int>(H))) * 4);
  layout.attention = arena.take(sizes.attention);
  layout.attention_bytes = sizes.attention;
  layout.routed = arena.take(sizes.routed);
  layout.persistent_bytes = persistent_bytes(device, static_cast<int>(H), sizes.inner);
  layout.chain = arena.take(layout.persistent_bytes);
  layout.stream_k = arena.take(stream_k_workspace(device, tokens));
  for (size_t& at : layout.lamport_qkv) at = arena.take(sizes.lamport_qkv);
  layout.lamport_bytes = sizes.lamport_qkv;
  layout.bytes = arena.at;
  return "";
}

}  // namespace exl2nb
