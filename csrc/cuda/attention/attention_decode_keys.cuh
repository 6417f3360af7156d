// Decode kernel, second stage: scores of a tile, softmax under the running maximum, products with the values.
#pragma once
#include "cuda/attention/attention_decode_state.cuh"

namespace exl2nb {

constexpr float kShift = 8.f;  // probabilities are held times 2^8, so that small ones keep their bits in fp16
constexpr float kSlack = 6.f;  // they may reach 2^14

template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::clear() {
#pragma unroll
  for (int n = 0; n < kN; n++) {
    row_max[n][0] = row_max[n][1] = kLowest, row_sum[n][0] = row_sum[n][1] = 0.f;
#pragma unroll
    for (int i = 0; i < (kGroups + 1) / 2; i++) level[n][i][0] = level[n][i][1] = level[n][i][2] = level[n][i][3] = 0.f;
#pragma unroll
    for (int i = 0; i < D / 16; i++) o[n][i][0] = o[n][i][1] = o[n][i][2] = o[n][i][3] = 0.f;
  }
}

// N scales in a row, as floats.
template <int N>
__device__ __forceinline__ void load_scales(const uint8_t* from, float unit, float (&to)[N]) {
  if constexpr (N % 2 == 0) {
    uint32_t w[N / 2];
    load_bytes<2 * N>(from, w);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = __half22float2(as_half2(w[i / 2]));
      to[i] = pair.x * unit, to[i + 1] = pair.y * unit;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = __half2float(reinterpret_cast<const half*>(from)[i]) * unit;
  }
}

template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::scores(const uint8_t* at, float (&s)[kSubs][kN][4]) {
  if constexpr (has_scales(KF)) {
    constexpr bool kPairs = Key::kGroupBytes == 16 && kGroups % 2 == 0;  // of groups
    float scale[kSubs][2][kGroups];
    [[maybe_unused]] uint32_t both[kSubs][4];
    const uint8_t* const scales = at + KeyTile::kScalesAt + g * KeyTile::kScaleRow;
    const uint32_t row = shared_address(at) + lane % 16 * KeyTile::kStride + (kPairs ? lane / 16 * 16 : 0);
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
      for (int i = 0; i < 2; i++) load_scales(scales + (sub * kTile + i * 8) * KeyTile::kScaleRow, Key::kUnit, scale[sub][i]);
    static_for<kGroups>([&](auto group) {
      constexpr int G = decltype(group)::value;
      uint32_t w[kSubs][Key::kWords][2];  // of rows g and g + 8
      float sum[kSubs][kN][4];
#pragma unroll
      for (int sub = 0; sub < kSubs; sub++) {
        if constexpr (kPairs) {
          if constexpr (G % 2 == 0) load_matrices<false>(both[sub], row + sub * kTile * KeyTile::kStride + G * 16);
          w[sub][0][0] = both[sub][G % 2 * 2], w[sub][0][1] = both[sub][G % 2 * 2 + 1];
        } else if constexpr (Key::kMatrices) {
#pragma unroll
          for (int i = 0; i < Key::kWords; i++)
            load_matrices<false>(w[sub][i], row + sub * kTile * KeyTile::kStride + G * Key::kGroupBytes + i * 16);
        } else {
#pragma unroll
          for (int i = 0; i < 2; i++)
            load_bytes<2>(at + (sub * kTile + g + 8 * i) * KeyTile::kStride + G * Key::kGroupBytes + t * 2, &w[sub][0][i]);
        }
#pragma unroll
        for (int n = 0; n < kN; n++) sum[sub][n][0] = sum[sub][n][2] = zero[n][G][0], sum[sub][n][1] = sum[sub][n][3] = zero[n][G][1];
      }
      static_for<Key::kSteps>([&](auto step) {
        constexpr int S = decltype(step)::value, kStepOfAll = G * Key::kSteps + S, W = S % Key::kWords;
#pragma unroll
        for (int sub = 0; sub < kSubs; sub++) {
          uint32_t a0, a1, a2, a3;
          Key::template get<S>(w[sub][W][0], a0, a2), Key::template get<S>(w[sub][W][1], a1, a3);
#pragma unroll
          for (int n = 0; n < kN; n++) mma16816(sum[sub][n], a0, a1, a2, a3, q[n][kStepOfAll][0], q[n][kStepOfAll][1]);
        }
      });
#pragma unroll
      for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
        for (int n = 0; n < kN; n++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            s[sub][n][i] = G ? fmaf(scale[sub][i / 2][G], sum[sub][n][i], s[sub][n][i]) : scale[sub][i / 2][G] * sum[sub][n][i];
    });
  } else {
    static_assert(kSubs == 1, "tiles of 16 keys");
    const uint32_t row = shared_address(at) + (lane % 16) * KeyTile::kStride + lane / 16 * 16;
    float odd[kN][4];
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[0][n][i] = odd[n][i] = 0.f;
    static_for<D / 16>([&](auto step) {
      constexpr int K = decltype(step)::value;
      uint32_t a[4];
      load_matrices<false>(a, row + K * 32);
#pragma unroll
      for (int n = 0; n < kN; n++) mma16816(K % 2 ? odd[n] : s[0][n], a[0], a[1], a[2], a[3], q[n][K][0], q[n][K][1]);
    });
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[0][n][i] += odd[n][i];
  }
}

// Soft cap and mask.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::shape(int token, float (&s)[kN][4]) {
  if (p.a.softcap > 0.f) {
    const float inverse = 1.f / p.a.softcap, cap = p.a.softcap * kLog2e;
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] = cap * tanh_exact(s[n][i] * inverse);
  }
  const int oldest = it.context - it.queries + token_of(first_row), newest = it.context - it.queries + token_of(first_row + rows - 1);
  if (token + kTile - 1 <= oldest && (p.a.window <= 0 || newest - token < p.a.window)) return;
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int distance = position[n][i % 2] - (token + g + i / 2 * 8);
      if (distance < 0 || (p.a.window > 0 && distance >= p.a.window)) s[n][i] = -INFINITY;
    }
}

// Scores to probabilities times 2^8 under a running maximum, which follows where a score passes it by more than kSlack: a row's own affair.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::softmax(float (&s)[kSubs][kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; n++) {
    float high[2] = {fmaxf(s[0][n][0], s[0][n][2]), fmaxf(s[0][n][1], s[0][n][3])};
#pragma unroll
    for (int sub = 1; sub < kSubs; sub++)
#pragma unroll
      for (int j = 0; j < 2; j++) high[j] = fmaxf(high[j], fmaxf(s[sub][n][j], s[sub][n][j + 2]));
    if (__any_sync(kAll, high[0] > row_max[n][0] + kSlack || high[1] > row_max[n][1] + kSlack)) {
#pragma unroll
      for (int i = 4; i < 32; i *= 2)
#pragma unroll
        for (int j = 0; j < 2; j++) high[j] = fmaxf(high[j], __shfl_xor_sync(kAll, high[j], i));
#pragma unroll
      for (int j = 0; j < 2; j++) high[j] = high[j] > row_max[n][j] + kSlack ? high[j] : row_max[n][j];
      const float f[2] = {exp2_fast(row_max[n][0] - high[0]), exp2_fast(row_max[n][1] - high[1])};
#pragma unroll
      for (int j = 0; j < 2; j++) row_max[n][j] = high[j], row_sum[n][j] *= f[j];
#pragma unroll
      for (int i = 0; i < D / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) o[n][i][j] *= f[j % 2];
      scale_levels(n, f);
    }
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[sub][n][i] = exp2_fast(s[sub][n][i] - (row_max[n][i % 2] - kShift));
        row_sum[n][i % 2] += s[sub][n][i];
      }
  }
}

// Where a row's probability times a value's scale would pass fp16's largest number, what the row holds is divided by 2^14: a row's own
// affair, and rare.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::make_room(const uint8_t* scales, float (&s)[kSubs][kN][4]) {
  constexpr int kWords = kStep * ValueTile::kScaleRow / 4;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < (kWords + 31) / 32; i++)
    if (kWords % 32 == 0 || lane + 32 * i < kWords) bits |= reinterpret_cast<const uint32_t*>(scales)[lane + 32 * i];
  if (!__any_sync(kAll, bits & 0x40004000u)) return;  // all of them below 2
#pragma unroll
  for (int n = 0; n < kN; n++) {
    float most = 0.f;  // of row g
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 p = __half22float2(as_half2(transposed(bits_of_half2(__floats2half2_rn(s[sub][n][2 * i], s[sub][n][2 * i + 1])))));
        const half* const of = reinterpret_cast<const half*>(scales + (sub * kTile + 2 * t + 8 * i) * ValueTile::kScaleRow);
#pragma unroll 1
        for (int group = 0; group < kGroups; group++)
          most = fmaxf(most, fmaxf(p.x * fabsf(__half2float(of[group])), p.y * fabsf(__half2float(of[kGroups + group]))));
      }
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 1)), most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
    float f[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const bool full = __shfl_sync(kAll, most, (2 * t + j) * 4) > 65000.f;
      f[j] = full ? 1.f / (1 << int(kShift + kSlack)) : 1.f;
      row_max[n][j] += full ? kShift + kSlack : 0.f, row_sum[n][j] *= f[j];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int sub = 0; sub < kSubs; sub++) s[sub][n][i] *= f[i % 2];
    }
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) o[n][i][j] *= f[j % 2];
    scale_levels(n, f);
  }
}

template <int NT>
__device__ __forceinline__ void to_fragments(const float (&s)[NT][4], uint32_t (&probs)[NT][2]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) probs[n][i] = transposed(bits_of_half2(__floats2half2_rn(s[n][2 * i], s[n][2 * i + 1])));
}

template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::values(const uint8_t* at, [[maybe_unused]] const uint8_t* scales,
                                                                    const float (&s)[kN][4]) {
  uint32_t probs[kN][2];
  to_fragments(s, probs);
  if constexpr (VF == kCacheF16) {
    const uint32_t row = shared_address(at) + (lane % 8 + lane / 16 * 8) * ValueTile::kStride + lane / 8 % 2 * 16;
    static_for<D / 16>([&](auto tile) {
      constexpr int I = decltype(tile)::value;
      uint32_t a[4];
      load_matrices<true>(a, row + I * 32);
#pragma unroll
      for (int n = 0; n < kN; n++) mma16816(o[n][I], a[0], a[1], a[2], a[3], probs[n][0], probs[n][1]);
    });
  } else if constexpr (scales_in_probs(VF, D)) {
    uint32_t scale[4][(kGroups + 1) / 2];  // of tokens 2t, 2t + 1, 2t + 8, 2t + 9: pairs of groups
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint8_t* const from = scales + (2 * t + i % 2 + i / 2 * 8) * ValueTile::kScaleRow;
      if constexpr (kGroups % 2 == 0) {
        load_bytes<2 * kGroups>(from, scale[i]);
      } else {
#pragma unroll
        for (int group = 0; group < kGroups; group++) {
          const uint32_t one = reinterpret_cast<const uint16_t*>(from)[group];
          scale[i][group / 2] = group % 2 ? scale[i][group / 2] | one << 16 : one;
        }
      }
    }
    const uint32_t row = shared_address(at) + lane % 16 * ValueTile::kStride;
    [[maybe_unused]] uint32_t both[4];
    static_for<kGroups>([&](auto group) {
      constexpr int G = decltype(group)::value;
      uint32_t w[2], scaled[kN][2];
      if constexpr (kGroups % 2 == 0) {
        if constexpr (G % 2 == 0) load_matrices<true>(both, row + lane / 16 * 16 + G * 16);
        w[0] = both[G % 2 * 2], w[1] = both[G % 2 * 2 + 1];
      } else {
        load_matrices<true>(w, row + G * 16);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const half2 pair = as_half2(permute(scale[2 * i][G / 2], scale[2 * i + 1][G / 2], G % 2 ? 0x7632 : 0x5410));
#pragma unroll
        for (int n = 0; n < kN; n++) scaled[n][i] = bits_of_half2(__hmul2(as_half2(probs[n][i]), pair));
      }
      static_for<2>([&](auto half_of) {
        constexpr int H = decltype(half_of)::value;
        const uint32_t v0 = H ? w[0] >> 8 : w[0], v1 = H ? w[1] >> 8 : w[1];
        const uint32_t a0 = v0 & 0x000f000fu, a1 = v0 & 0x00f000f0u, a2 = v1 & 0x000f000fu, a3 = v1 & 0x00f000f0u;
#pragma unroll
        for (int n = 0; n < kN; n++) mma16816(o[n][2 * G + H], a0, a1, a2, a3, scaled[n][0], scaled[n][1]);
      });
#pragma unroll
      for (int n = 0; n < kN; n++)  // in rows g and g + 8: groups G and G + 1, or G - 1 and G
        mma16816(level[n][G / 2], G % 2 ? 0u : kSeven, G % 2 ? kSeven : 0u, G % 2 ? 0u : kSeven, G % 2 ? kSeven : 0u, scaled[n][0],
                 scaled[n][1]);
    });
  } else {
    Share<VF, D, 8> v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = 2 * t + i % 2 + i / 2 * 8;
      v[i].load(at + token * ValueTile::kStride, scales + token * ValueTile::kScaleRow, g);
    }
    static_for<D / 16>([&](auto tile) {
      constexpr int I = decltype(tile)::value;
      uint32_t a0, a1, a2, a3;
      Value::template get<I>(v[0], v[1], a0, a1);
      Value::template get<I>(v[2], v[3], a2, a3);
#pragma unroll
      for (int n = 0; n < kN; n++) mma16816(o[n][I], a0, a1, a2, a3, probs[n][0], probs[n][1]);
    });
  }
}

}  // namespace exl2nb
