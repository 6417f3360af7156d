// The ops on raw pointers: they share work between threads and call the kernels. No torch, no checks: callers have validated every
// argument.
#pragma once
#include <cstdint>

#include "../format/lora.h"
#include "kernels.h"
#include "memory.h"

namespace exl2nb {

// Tiles of all parts of a blob, and the weights of tile number `tile` of them.
int64_t tiles_of(const uint8_t* blob);
const uint8_t* tile_weights(const uint8_t* blob, int64_t tile);

// Null weight: no norm at all.
struct Norm {
  const float* weight;
  float eps;
  const float* bias = nullptr;
  bool layer = false;  // subtract the mean
};

// What the adapter of each row changes, null for a row without; the whole is null where no row has one.
using Changes = const LoraChange* const*;
// out = x @ blob + bias, or out += for add. x (M, K), out (M, N). next_blob, here and below: the matrix that is read next, or null.
void linear(const float* x, int M, const uint8_t* blob, const float* bias, float* out, bool add, const uint8_t* next_blob = nullptr);
// Several products in one parallel region: each as in linear.
struct Product {
  const float* x;
  int M;
  const uint8_t* blob;
  float* out;
  const float* bias = nullptr;
  bool add = false;
  Changes changes = nullptr;  // of the rows' adapters, which add to out; of one product alone
  float* residual = nullptr;  // then out times scale is added to it
  float scale = 1.0f;
};
void linear_each(const Product* products, int count, const uint8_t* next_blob = nullptr);
// The row's own norm.
inline Norm changed(Norm norm, const LoraChange* change) {
  if (change && change->norm) norm.weight = change->norm, norm.bias = change->norm_bias;
  return norm;
}
// h (change.width) = what all parts make of x (K), or piece number `piece` of it.
void lora_down(const LoraChange& change, const float* x, int K, float* h, int64_t piece = 0, int64_t pieces = 1);
// Adds what the adapters of M rows make of h (M, ldh) to columns [first, first + columns) of a product's output, which are at y (M, ldy).
void lora_up(Changes changes, int M, const float* h, int64_t ldh, int64_t first, int64_t columns, float* y, int64_t ldy);
// Prefetches what lora_up reads for these columns of M rows: short pieces of many rows, which no hardware foresees. Inlined by force: GCC
// takes a function that only prefetches for one without effects, and drops the calls.
__attribute__((always_inline)) inline void expect_up(Changes changes, int M, int64_t first, int64_t columns) {
  for (int m = 0; m < M; m++) {
    if (!changes[m] || (m && changes[m] == changes[m - 1])) continue;
    for (const LoraPart* p = changes[m]->parts; p < changes[m]->parts + changes[m]->num_parts; p++) {
      const int64_t begin = first > p->first ? first : p->first;
      const int64_t end = first + columns < p->first + p->columns ? first + columns : p->first + p->columns;
      const uint16_t* b = p->b + (begin - p->first);
      for (int64_t r = 0; begin < end && r < p->rank; r++, b += p->columns)
        for (int64_t c = 0; c < end - begin; c += 32) __builtin_prefetch(b + c, 0, 2);
    }
  }
}

// residual += scale * norm(x @ blob + bias)
void linear_residual(const float* x, int M, const uint8_t* blob, const float* bias, Norm norm, float scale, float* residual,
                     const uint8_t* next_blob = nullptr, Changes changes = nullptr);
void normalize(const float* x, int M, int H, Norm norm, float* y, Changes changes = nullptr);
void norm_linear(const float* x, int M, Norm norm, const uint8_t* blob, const float* bias, float* out, const uint8_t* next_blob = nullptr,
                 Changes changes = nullptr);
// gated: act(gate) * up of [gate; up]; otherwise act(up). activate_pairs: its second half, both (M, 2 I) or (M, I) -> out (M, I)
void activate_pairs(const float* both, int M, int64_t I, int activation, bool gated, float* out);
void norm_gate_up(const float* x, int M, Norm norm, const uint8_t* blob, const float* bias, int activation, bool gated, float* out,
                  const uint8_t* next_blob = nullptr, Changes changes = nullptr);

struct Rope {
  const float *cos, *sin;  // (max_pos, half)
  const int32_t *positions, *slots;
  float clip = 0.0f;  // q, k and v are cut to [-clip, clip] first; 0: not
};
void norm_qkv_rope(const float* x, int T, Norm norm, const uint8_t* blob, const float* bias, const Rope& rope, const Heads& heads, float* q,
                   void* k_pool, void* v_pool, const uint8_t* next_blob = nullptr, Changes changes = nullptr);

struct Attention {
  const void *k_pool, *v_pool;
  const int32_t *block_table, *cu_seqlens, *context_lens;
  int64_t sequences, max_pages, page_size, window;
  int num_heads, num_kv_heads, head_dim;
  float scale, softcap;
  CacheFormat k_kind, v_kind;
};
void paged_attention(const float* q, const Attention& a, float* out);
// One of its tasks: some queries of a sequence with one KV head; the caller sets `scratch`.
struct Queries {
  int64_t sequence;
  int first, count;
};
int attention_block(const Attention& a);  // queries of a task at most: 64 rows share each load of a key
AttentionTask attention_task(const float* q, const Attention& a, float* out, const Queries& p, int kv_head);
// Learned positions, added to the embedding; null table: none.
struct Places {
  const void* table = nullptr;
  int kind = 0;
  const int32_t* positions = nullptr;
};
void embed(const void* table, int kind, int H, const int32_t* ids, int T, float scale, Places places, float* out);

}  // namespace exl2nb
