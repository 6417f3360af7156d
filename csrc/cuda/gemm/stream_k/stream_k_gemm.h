// Stream-K GEMM for 9 to 64 rows (stream_k_gemm.cuh): host interface.
#pragma once
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "format/gpu_workspace.h"

namespace exl2nb {

// Rows to allocate for the inputs.
inline int stream_k_rows(int tokens) {
  return tokens <= kSkinnyTokens ? tokens : (tokens + stream_k_group(tokens) - 1) / stream_k_group(tokens) * stream_k_group(tokens);
}
// Whether stream_k_launch supports the GEMM on this GPU.
bool stream_k_takes(const GemmArgs& a);
// Partial sums of squares per row that a residual GEMM with `width` outputs leaves.
inline int stream_k_squares(int width) { return (width + 255) / 256 * 16; }
// Whether it can add to the residual.
bool stream_k_fuses_residual(const GemmArgs& a);
// Whether gate and up run in one launch that writes the next input (no out, no residual).
bool stream_k_fuses_gate(const GemmArgs& a);
// Keys and values to prefetch into L2 for the attention that follows: the first `rows` tokens of each sequence, contiguous in a page of a
// head. rows 0: none.
struct StreamKKeys {
  const uint8_t *k_pool, *v_pool;
  const int *block_table, *context_lens;
  int sequences, max_pages, heads, rows;
  int k_page, v_page, k_row, v_row;  // bytes of a page of a head, of a token of it
};
// What to prefetch into L2 during the GEMM: the next GEMM's image, attention's keys.
struct StreamKNext {
  const uint8_t* image;
  int bytes;
  StreamKKeys keys;
};
// Workspace bytes for up to so many rows: zeroed once; one for all GEMMs of a stream.
size_t stream_k_workspace(int tokens);
// out = x W + bias; without out: residual += that, as in GemmArgs. x is in groups of `group`. CTAs wait for one another: launches in
// different streams of a device must not overlap.
const char* stream_k_launch(const GemmArgs& a, int group, const StreamKNext& next, void* workspace, void* stream, bool pdl);

}  // namespace exl2nb
