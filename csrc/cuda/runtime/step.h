// A whole step on the GPU: walks the program of exl2nb/ops/program.py (csrc/format/program.h) and launches its kernels.
//
// Where the program is the common one (RMS norms before, none after), a layer is five kernels: QKV, attention, O, gate/up, down. The
// kernel that adds to the residual also writes the next matrix's input, times the norm's weights but not yet divided by the root mean
// square; the next one multiplies its outputs by that. A LayerNorm, and a norm behind attention or MLP, need the whole row first: for few
// tokens every CTA of the next product makes it (norm.cuh), for more a small kernel in between. Experts: moe.h. More than eight tokens,
// where every product takes them: stream_k_gemm.h, the same five kernels; but the last norm, where not all rows want logits, and norms of
// other kinds, are kernels of their own. One to eight tokens on Hopper: attention, and all products from its output to the next QKV in one
// launch (persistent_gemm.h), the first QKV and the head in ones of their own, where nine or more need not have the same bits; up to four
// tokens' attention takes QKV as the chain writes it. A blob's word is the address of a host copy of its head: int64 address on the device,
// then header and parts (gpu_blob.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "format/program.h"

namespace exl2nb {

struct GpuStep {
  const int32_t *ids, *positions, *block_table, *cu_seqlens, *context_lens, *logit_rows;
  int tokens, sequences, max_pages, logit_count;  // logit_rows null: every token's, so logit_count is tokens
  int capacity;                                   // tokens the workspace was made for
  void* const* k_pools;
  void* const* v_pools;
  int layers, num_kv_heads, head_dim, k_format, v_format;
  float* logits;
  int stream_k_from;  // so many tokens, at least nine, or more go through stream_k_gemm.cuh: faster, but other bits than those of fewer
                      // tokens; 0: never, and no chains (persistent_gemm.h)
};

// Bytes of workspace for up to `capacity` tokens, or what is wrong with the program; vocab: logits per row.
std::string step_workspace(const Program& program, int capacity, size_t& bytes, int64_t& vocab);
// workspace: zeroed once by its owner, then used with one capacity only, by one step at a time. Steps in different streams of one device
// must not overlap where they have chains (persistent_gemm.h) or stream-K GEMMs. Captures into a graph: neither allocates nor
// waits.
std::string step_launch(const Program& program, const GpuStep& step, void* workspace, size_t bytes, void* stream, bool pdl);

}  // namespace exl2nb
