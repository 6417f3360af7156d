// Attention on the device: plain launch functions without a torch header. Each returns nullptr, or what went wrong.
//
// All of them can be captured in a CUDA graph: they neither allocate nor wait, their grids depend on capacities only, and sequence lengths
// are read on the device. `pdl` launches with programmatic stream serialisation (sm_90 and later): the kernel starts while its predecessor
// still runs, asks its own successor to start, and waits before it reads what the predecessor wrote. Block table, lengths, positions, old
// keys and values are read before that wait: they must be older than the predecessor's predecessor, which holds if the first kernel of a
// step waits before it lets its own successor start.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda/gemm/fragment.cuh"
#include "format/pool.h"

namespace exl2nb {

// A layer's pools and the sequences of this step. Pages hold 256 tokens.
struct CacheArgs {
  void* k_pool;  // f16/f32: (num_pages, Hkv, 256, D); quantised: uint8 (num_pages, Hkv, bytes)
  void* v_pool;
  int k_format, v_format;   // CacheFormat, any two; quick where both are fp8, or each is f16, Q8 or Q4
  const int* block_table;   // (sequences, max_pages)
  const int* cu_seqlens;    // (sequences + 1,) first token of each sequence in this step
  const int* context_lens;  // (sequences,), this step's tokens included; 0 = an unused row, nothing is computed for it
  int sequences, max_pages;
  int num_heads, num_kv_heads, head_dim;
};

// What happens to q and k before they are used. Everything may be absent.
struct RopeArgs {
  const float* cos;  // f32 (max_positions, half) or null: nothing rotates
  const float* sin;
  int half;              // rotating pairs: dims 0 to 2 * half - 1
  bool interleaved;      // pairs (2i, 2i + 1) instead of (i, half + i)
  const int* positions;  // (tokens,) row of cos/sin, or null: a token's place in its sequence
  float clip;            // q, k, v cut to [-clip, clip]; 0 = not
  const float* q_norm;   // (D,) or (heads, D), or null
  const float* k_norm;
  bool norm_per_head;  // weights are (heads, D)
  bool norm_whole;     // one norm over all heads together, weights (heads * D,); done by a kernel before, in place in qkv
  bool layer_norm;     // subtract the mean
  float eps;
};

// Where attention writes: the next matrix's input (x null: none), and f32 (tokens, Hq * D) (null: none).
struct AttentionOut : MatrixInput {
  float* out;
};

struct AttentionArgs {
  CacheArgs cache;
  RopeArgs rope;
  AttentionOut to;
  float* qkv;      // f32 (tokens, (Hq + 2 Hkv) * D), bias added: this step's K and V are written to the cache. Read only,
                   // except by norm_whole
  const float* q;  // instead of qkv: f32 (tokens, Hq, D), ready; the cache holds this step's K and V already
  int tokens;      // of all sequences
  float scale;
  int window;       // keys seen at most; 0 = all
  float softcap;    // 0 = none
  void* workspace;  // attention_workspace_bytes(); zeroed once by its owner, then left alone; one for all layers
  size_t workspace_bytes;
  bool lamport_qkv;   // qkv has Lamport flags and is polled before the predecessor has ended: attention_polls()
  bool large_chunks;  // large chunks where there are many sequences: quicker, but bits then depend on how many there are
};

// Bytes for up to `tokens` tokens in a step.
size_t attention_workspace_bytes(int tokens, int num_heads, int num_kv_heads, int head_dim);

struct Device;     // runtime/device.h
class LaunchList;  // runtime/launches.h
// Whether the kernel for these can poll data with Lamport flags.
bool attention_polls(const Device&, const AttentionArgs& args);
// Multiprocessors that a decode step of one sequence takes where the keys of every KV head are one chunk.
int attention_sms(int num_heads, int num_kv_heads, int head_dim);
// One decode step of one layer. With qkv, at most 8 tokens per sequence (the query count may differ between sequences); with q any number.
// The bits of a sequence's result depend on its own tokens and context_len only, unless `large_chunks`.
void plan_attention(LaunchList&, const AttentionArgs& args);

// Prefill: clip, norm, rotation of any number of tokens; K and V go to `slots` (int32 (tokens,), page * 256 + offset) of the cache.
// q_f32, q_f16: (tokens, Hq, D); k_f16, v_f16: (tokens, Hkv, D), the values as attention will read them back except for quantisation.
// Each of the four may be null. cache.block_table, cu_seqlens and context_lens are not read; rope.positions must be given.
struct RopeAppendArgs {
  CacheArgs cache;
  RopeArgs rope;
  float* qkv;        // f32 (tokens, (Hq + 2 Hkv) * D); read only, except by norm_whole
  const int* slots;  // a negative slot is not written
  int tokens;
  float* q_f32;
  void* q_f16;
  void* k_f16;
  void* v_f16;
};
void plan_rope_append(LaunchList&, const RopeAppendArgs& args);

// The first `length` tokens of one sequence -> contiguous f16 k, v (length, Hkv, D). pages: int32 on the device, at least
// ceil(length / 256).
const char* gather_launch(const CacheArgs& cache, const int* pages, int length, void* k, void* v, void* stream);

}  // namespace exl2nb
