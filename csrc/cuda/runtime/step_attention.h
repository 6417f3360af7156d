// What a step's program says of attention.
#pragma once
#include <algorithm>

#include "cuda/attention/attention.h"
#include "cuda/attention/cache_format.cuh"
#include "cuda/gemm/stream_k/stream_k_gemm.cuh"
#include "cuda/runtime/step.h"
#include "cuda/runtime/step_plan.h"
#include "format/program.h"

namespace exl2nb {

// The first keys and values of the attention at w, as many as find room in the L2 cache beside the weights that pass through.
inline StreamKKeys attention_keys(const GpuStep& s, const AttentionOp& op) {
  constexpr int64_t kPrefetchBytes = 24 << 20;
  const CacheArgs& c = s.cache;
  const int64_t layer = op.layer, heads = c.num_kv_heads, dim = c.head_dim;
  if (op.window || layer < 0 || layer >= s.layers) return {};  // a window may have left them behind
  const int64_t k_row = dim * pool_bits(c.k_format) / 8, v_row = dim * pool_bits(c.v_format) / 8;
  const int64_t rows = std::min<int64_t>(kPage, kPrefetchBytes / std::max<int64_t>(1, c.sequences * heads * (k_row + v_row)));
  StreamKKeys keys{};
  keys.k_pool = static_cast<const uint8_t*>(s.k_pools[layer]), keys.v_pool = static_cast<const uint8_t*>(s.v_pools[layer]);
  keys.block_table = c.block_table, keys.context_lens = c.context_lens, keys.max_pages = c.max_pages;
  keys.sequences = c.sequences, keys.heads = c.num_kv_heads, keys.rows = static_cast<int>(rows);
  keys.k_page = page_bytes(c.k_format, c.head_dim), keys.v_page = page_bytes(c.v_format, c.head_dim);
  keys.k_row = static_cast<int>(k_row), keys.v_row = static_cast<int>(v_row);
  return keys;
}
// Multiprocessors for the attention behind the QKV op q, if there is one.
inline int sms_of_attention(const QkvOp* q) {
  return q ? attention_sms(static_cast<int>(q->num_heads), static_cast<int>(q->num_kv_heads), static_cast<int>(q->head_dim)) : 0;
}
// The attention at w with the QKV op q, whose output is `in`. Without qkv and workspace.
inline AttentionArgs attention_args(const GpuStep& s, const AttentionOp& op, const QkvOp& q, const MatrixInput& in) {
  const auto layer = static_cast<size_t>(op.layer);
  AttentionArgs a{};
  a.cache = s.cache, a.cache.k_pool = s.k_pools[layer], a.cache.v_pool = s.v_pools[layer];
  a.cache.num_heads = static_cast<int>(q.num_heads), a.cache.num_kv_heads = static_cast<int>(q.num_kv_heads);
  a.cache.head_dim = static_cast<int>(q.head_dim);
  a.rope.cos = q.cos, a.rope.sin = q.sin, a.rope.half = static_cast<int>(q.rope_half);
  if (a.rope.half == 0) a.rope.cos = a.rope.sin = nullptr;
  a.rope.interleaved = q.interleaved, a.rope.positions = s.positions, a.rope.clip = static_cast<float>(q.clip);
  a.rope.q_norm = q.q_norm, a.rope.k_norm = q.k_norm;
  a.rope.norm_per_head = q.q_norm_stride || q.k_norm_stride, a.rope.norm_whole = q.q_norm_whole || q.k_norm_whole;
  a.rope.layer_norm = q.layer_norm, a.rope.eps = static_cast<float>(q.eps);
  static_cast<MatrixInput&>(a.to) = in;
  a.tokens = s.tokens;
  a.scale = static_cast<float>(op.scale), a.window = static_cast<int>(op.window), a.softcap = static_cast<float>(op.softcap);
  a.large_chunks = s.stream_k_from && s.tokens >= s.stream_k_from;
  return a;
}

}  // namespace exl2nb
