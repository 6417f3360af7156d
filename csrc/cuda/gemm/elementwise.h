// The small kernels around the matrix products: of a step (elementwise.cu) and of prefill (prefill.cu). Those of a step are added to a
// list; a launch returns nullptr or an error text.
#pragma once
#include <cstdint>

#include "cuda/gemm/lora.h"
#include "cuda/gemm/norm.cuh"

namespace exl2nb {

// x[token] = table[ids[token]] * scale (+ position_table[positions[token]]); where next.x, normed into it as well.
struct EmbedArgs {
  const int *ids, *positions;
  const void *table, *position_table;  // dtype: 0 f32, 1 f16, 2 bf16
  int dtype, position_dtype, vocab, max_positions, width;
  float scale;
  float* x;
  NormArgs norm;
  MatrixInput next;
};
// Row rows[r] of `from` (norm.cuh), rows null: row r; where next.x, its norm becomes row r of that. lora: adapters that have norms of their
// own; its changes are those of the op that the norm belongs to, the op before it made what is added.
struct RowsArgs {
  RowSource from;
  const int* rows;
  int tokens;
  MatrixInput next;
  LoraRows lora;
};
// act(gate) * up of y's rows [gate; up] of `width` numbers each, or act(y) where not gated, into the next matrix's input.
struct GatesArgs {
  const float* y;
  int64_t stride;
  int width;
  bool gated;
  int activation;
  MatrixInput next;
};
void plan_gates(LaunchList&, const GatesArgs&, int tokens);
void plan_embed(LaunchList&, const EmbedArgs&, int tokens);
void plan_rows(LaunchList&, const RowsArgs&, int rows);

constexpr int kNormThreads = 256, kGateThreads = 256;  // of a CTA

// out f16 (tokens, width) = norm of x f32, clamped to finite values. weight, bias f32 (width,); weight null: no norm; bias may be null.
struct NormRowsArgs {
  const float *x, *weight, *bias;
  bool layer_norm;
  float eps;
  int64_t tokens;
  int width;
  void* out;
};
const char* norm_rows_launch(const NormRowsArgs& args, void* stream);
// y f16 (tokens, 2 * width), gated: out f16 (tokens, width) = act(first half) * second half; otherwise y (tokens, width), out = act(y).
// kind: as in pdl.cuh's activation.
const char* gate_rows_launch(const void* y, int64_t tokens, int width, bool gated, int kind, void* out, void* stream);
// qkv f16 (tokens, (num_heads + 2 * num_kv_heads) * head_dim): rotates q and k in place, pairs (i, head_dim / 2 + i); writes k and v to
// `slots` (page * 256 + offset; negative: skip) of f16 pools (pages, num_kv_heads, 256, head_dim). head_dim: a multiple of 16.
struct RotateRowsArgs {
  void *qkv, *k_pool, *v_pool;
  const float *cos, *sin;  // (positions, head_dim / 2)
  const int *positions, *slots;
  int64_t tokens;
  int num_heads, num_kv_heads, head_dim;
};
const char* rotate_rows_launch(const RotateRowsArgs& args, void* stream);
// Attention over all keys from that over each of `count` runs of them: parts f16 (tokens, heads, head_dim), weighted by the exponentials of
// their lse f32 (heads, tokens), the logarithms of their sums; out as a part. head_dim: a multiple of 8.
constexpr int kMostRuns = 16;
struct MergePartsArgs {
  const void* part[kMostRuns];
  const float* lse[kMostRuns];
  int count, heads, head_dim;
  int64_t tokens;
  void* out;
};
const char* merge_parts_launch(const MergePartsArgs& args, void* stream);

}  // namespace exl2nb
