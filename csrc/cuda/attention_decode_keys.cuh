// Decode kernel, second stage: scores of a tile, softmax under the running maximum, products with the values.
#pragma once
#include "attention_decode_state.cuh"

namespace exl2nb {

constexpr float kShift = 8.f;  // probabilities are held times 2^8, so that small ones keep their bits in fp16

template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::clear() {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    row_max[n][0] = row_max[n][1] = kLowest, row_sum[n][0] = row_sum[n][1] = 0.f;
#pragma unroll
    for (int i = 0; i < D / 16; i++) o[n][i][0] = o[n][i][1] = o[n][i][2] = o[n][i][3] = 0.f;
  }
}

template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::scores(int step, float (&s)[kTiles][NT][4]) {
#pragma unroll
  for (int u = 0; u < kTiles; u++) {
    const int token = tile_token(step, u);
    if (token >= chunk_end) {
#pragma unroll
      for (int n = 0; n < NT; n++) s[u][n][0] = s[u][n][1] = s[u][n][2] = s[u][n][3] = -INFINITY;
      continue;
    }
    if (token + kTile > first_new) {
      take_new(k[u][0], sh.in.k, sh.in.k_scale, token + g, t);
      take_new(k[u][1], sh.in.k, sh.in.k_scale, token + g + 8, t);
    }
    float odd[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[u][n][i] = odd[n][i] = 0.f;
    static_for<D / 16>([&](auto kk) {
      constexpr int K = decltype(kk)::value;
      uint32_t a0, a1, a2, a3;
      Key::template get<K>(k[u][0], a0, a2);
      Key::template get<K>(k[u][1], a1, a3);
#pragma unroll
      for (int n = 0; n < NT; n++) mma16816(K % 2 ? odd[n] : s[u][n], a0, a1, a2, a3, q[n][K][0], q[n][K][1]);
    });
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[u][n][i] += odd[n][i];
    shape(token, s[u]);
  }
}

// Soft cap and mask.
template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::shape(int token, float (&s)[NT][4]) {
  if (p.a.softcap > 0.f) {
    const float inverse = 1.f / p.a.softcap, cap = p.a.softcap * kLog2e;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] = cap * tanh_exact(s[n][i] * inverse);
  }
  const int oldest = it.context - it.queries + token_of(first_row), newest = it.context - it.queries + token_of(first_row + rows - 1);
  if (token + kTile - 1 <= oldest && (p.a.window <= 0 || newest - token < p.a.window)) return;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int distance = position[n][i % 2] - (token + g + i / 2 * 8);
      if (distance < 0 || (p.a.window > 0 && distance >= p.a.window)) s[n][i] = -INFINITY;
    }
}

// Scores to probabilities times 2^8 under the running maximum.
template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::softmax(float (&s)[kTiles][NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float high[2] = {row_max[n][0], row_max[n][1]};
#pragma unroll
    for (int u = 0; u < kTiles; u++)
#pragma unroll
      for (int i = 0; i < 4; i++) high[i % 2] = fmaxf(high[i % 2], s[u][n][i]);
#pragma unroll
    for (int i = 4; i < 32; i *= 2)
#pragma unroll
      for (int j = 0; j < 2; j++) high[j] = fmaxf(high[j], __shfl_xor_sync(kAll, high[j], i));
    if (__any_sync(kAll, high[0] > row_max[n][0] || high[1] > row_max[n][1])) {
      const float f[2] = {exp2_fast(row_max[n][0] - high[0]), exp2_fast(row_max[n][1] - high[1])};
#pragma unroll
      for (int j = 0; j < 2; j++) row_max[n][j] = high[j], row_sum[n][j] *= f[j];
#pragma unroll
      for (int i = 0; i < D / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) o[n][i][j] *= f[j % 2];
    }
#pragma unroll
    for (int u = 0; u < kTiles; u++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[u][n][i] = exp2_fast(s[u][n][i] - (high[i % 2] - kShift));
        row_sum[n][i % 2] += s[u][n][i];
      }
  }
}

template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::values(int step, const float (&s)[kTiles][NT][4]) {
#pragma unroll
  for (int u = 0; u < kTiles; u++) {
    const int token = tile_token(step, u);
    if (token >= chunk_end) break;
    if (token + kTile > first_new) {
#pragma unroll
      for (int i = 0; i < 4; i++) take_new(v[u][i], sh.in.v, sh.in.v_scale, token + 2 * t + i % 2 + i / 2 * 8, g);
    }
    uint32_t probs[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) probs[n][i] = transposed(bits_of_half2(__floats2half2_rn(s[u][n][2 * i], s[u][n][2 * i + 1])));
    static_for<D / 16>([&](auto tile) {
      constexpr int I = decltype(tile)::value;
      uint32_t a0, a1, a2, a3;
      Value::template get<I>(v[u][0], v[u][1], a0, a1);
      Value::template get<I>(v[u][2], v[u][3], a2, a3);
#pragma unroll
      for (int n = 0; n < NT; n++) mma16816(o[n][I], a0, a1, a2, a3, probs[n][0], probs[n][1]);
    });
  }
}

}  // namespace exl2nb
