// Element-wise kernels of prefill. Each launch returns nullptr or an error text.
#pragma once
#include <cstdint>

namespace exl2nb {

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

}  // namespace exl2nb
