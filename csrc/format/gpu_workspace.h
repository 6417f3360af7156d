// Sizes of what the steps of a GPU keep between kernels. sms: its multiprocessors. No CUDA headers: the CPU library tells them too.
#pragma once
#include <cstdint>

#include "format/gpu_blob.h"

namespace exl2nb {

constexpr int kStreamKTokens = 64;  // rows of a stream-K launch
constexpr int kStreamKStrips = 16;  // strips of a stream-K tile

// Rows that a stream-K GEMM computes together; its inputs are stored in such groups (cuda/gemm/fragment.cuh).
inline int stream_k_group(int tokens) { return tokens <= 16 ? 16 : tokens <= 32 ? 32 : kStreamKTokens; }
// Bytes of partial sums: each CTA may begin and end within a tile, and a tile may have two parts.
inline int64_t stream_k_bytes(int tokens, int sms) {
  return int64_t{4} * sms * (kStreamKStrips * kStripColumns * stream_k_group(tokens)) * int64_t{sizeof(float)};
}

// A router fused into the GEMM in front of it: CTAs of that GEMM, which has K outputs; each leaves sums for every row.
inline int router_parts(int K, int sms) {
  const int strips = (K + kStripColumns - 1) / kStripColumns;
  return sms < strips ? sms : strips;
}
// Floats of the router's N outputs in one row.
inline int router_row(int N) { return (N + 3) / 4 * 4; }
// Bytes of these sums. terms: sums per output, more than one where the norm is a LayerNorm.
inline int64_t router_bytes(int tokens, int K, int N, int terms, int sms) {
  return int64_t{tokens} * router_parts(K, sms) * (terms * router_row(N) + 4) * int64_t{sizeof(float)};
}

}  // namespace exl2nb
