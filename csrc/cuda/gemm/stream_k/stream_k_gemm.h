// The matrix product of steps of many tokens.
#pragma once
#include "cuda/gemm/skinny/skinny_gemm.h"

namespace exl2nb {

constexpr int kStreamKTokens = 64;  // of a launch

// How the inputs of so many tokens, more than kSkinnyTokens, are grouped (fragment.cuh), and for how many there must be room.
inline int stream_k_group(int tokens) { return tokens <= 16 ? 16 : tokens <= 32 ? 32 : kStreamKTokens; }
inline int stream_k_rows(int tokens) {
  return tokens <= kSkinnyTokens ? tokens : (tokens + stream_k_group(tokens) - 1) / stream_k_group(tokens) * stream_k_group(tokens);
}
// Whether stream_k_launch does the product of `a` on this GPU.
bool stream_k_takes(const GemmArgs& a);
// Partial squares of a token that a product leaves which adds to the residual of `width` numbers.
inline int stream_k_squares(int width) { return (width + 255) / 256 * 16; }
// Whether it can do that.
bool stream_k_fuses_residual(const GemmArgs& a);
// Whether a product of gate and up, then without out and residual, can write the next product's input itself.
bool stream_k_fuses_gate(const GemmArgs& a);
// Cached keys and values that attention reads behind a product: of `rows` tokens of each sequence, from its first one on, which lie
// together in a page of a head. rows 0: none.
struct StreamKKeys {
  const uint8_t *k_pool, *v_pool;
  const int *block_table, *context_lens;
  int sequences, max_pages, heads, rows;
  int k_page, v_page, k_row, v_row;  // bytes of a page of a head, of a token of it
};
// What comes behind a product: the part of the next blob that its product reads first; attention's keys. While the product works, memory
// has time to bring them near.
struct StreamKNext {
  const uint8_t* image;
  int bytes;
  StreamKKeys keys;
};
// Bytes of the workspace of products of up to so many tokens: zeroed once, then left alone; one for all products of a stream.
size_t stream_k_workspace(int tokens);
// out = x times the matrix, plus bias; or, without out, the residual += that, as GemmArgs says. x lies in groups of `group`. next: may be
// empty. Its CTAs wait for one another: launches in different streams of a device must not overlap.
const char* stream_k_launch(const GemmArgs& a, int group, const StreamKNext& next, void* workspace, cudaStream_t stream, bool pdl);

}  // namespace exl2nb
