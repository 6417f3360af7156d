// Members of Decode (decode.cuh) where K and V both have 4 bits in groups of 32: integer scores, and four query rows at the cost of four.
//
// Scores: a query row is quantised to integers of 14 bits with one unit, q = 64 h + l, h and l of 8 bits. h and l are columns 2t and 2t + 1
// of an int8 MMA (m16n8k32), for row t or t + 4. The key's codes are the other operand, unchanged, so a group of 32 dims is one MMA with an
// exact sum. The sum starts at a number that makes it the bits of a float; from this float the zero point is subtracted, and the group's
// scale multiplies the difference. A lane then holds row t for keys g and g + 8, and row t + 4 if there are more than four rows: columns 2t
// and 2t + 1 of the second product. A row's arithmetic does not depend on the other rows. Values: the scale multiplies the probability. A
// byte with two codes enters as fp16 subnormals: the whole byte in one row of the result, its upper code in another; the lower code's share
// is their difference. Tile: keys, values, scales of the keys, scales of the values; rows without padding. 16-byte pieces are XOR-swizzled
// against bank conflicts of ldmatrix.
#pragma once
#include "cuda/attention/decode.cuh"

namespace exl2nb {

// Copies both tiles at `token` as one cp.async group.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::fetch_q4(uint8_t* to, int token) {
  constexpr int kRow = D / 2, kCodes = kStep * kRow, kScaleRow = 2 * kGroups, kScales = kStep * kScaleRow;
  if (token < last_end()) {
    if ((token >> 8) - page_base > 31) fetch_pages(token);
    const int inside = token & (kPage - 1), old = first_new - token;
    const int64_t page = static_cast<int64_t>(page_at(token)) * page_bytes(KF, D);
    const uint8_t *const k = static_cast<const uint8_t*>(p.a.cache.k_pool) + page, *const v =
                                                                                       static_cast<const uint8_t*>(p.a.cache.v_pool) + page;
    const int codes = inside * kRow, at = kPage * kRow + inside * kScaleRow;
    if (old >= kStep) {
      const unsigned here = lane * 16;
      uint8_t *const there = to + piece, *const of_scales = to + 2 * kCodes + here;
#pragma unroll
      for (int i = 0; i < kCodes; i += 512) {
        if (kCodes % 512 && i + lane * 16 >= kCodes) break;
        copy16<true>(there + (swizzled<D>(i) ^ i ? (piece ^ swizzled<D>(i)) - piece : i), k + codes + i + here);
        copy16<true>(there + kCodes + (swizzled<D>(i) ^ i ? (piece ^ swizzled<D>(i)) - piece : i), v + codes + i + here);
      }
      if constexpr (kScales == 256) {
        copy16<true>(of_scales, (lane < 16 ? k : v - 256) + at + here);
      } else {
#pragma unroll
        for (int i = 0; i < kScales; i += 512)
          if (i + lane * 16 < kScales)
            copy16<true>(of_scales + i, k + at + i + here), copy16<true>(of_scales + kScales + i, v + at + i + here);
      }
    } else {
      const int fill = min(max(old, 0), kStep);  // zeros behind them: finite numbers under a probability of 0
#pragma unroll 1
      for (int i = lane * 16; i < kCodes; i += 512) {
        const int bytes = min(max(fill * kRow - i, 0), 16);
        copy16_part(to + swizzled<D>(i), k + codes + i, bytes);
        copy16_part(to + kCodes + swizzled<D>(i), v + codes + i, bytes);
      }
#pragma unroll 1
      for (int i = lane * 16; i < kScales; i += 512) {
        const int bytes = min(max(fill * kScaleRow - i, 0), 16);
        copy16_part(to + 2 * kCodes + i, k + at + i, bytes);
        copy16_part(to + 2 * kCodes + kScales + i, v + at + i, bytes);
      }
    }
  }
  async_commit();
}

// Adds this step's rows to tiles that have arrived.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::complete_q4(uint8_t* at, int token) const {
  constexpr int kRow = D / 2, kCodes = kStep * kRow, kScaleRow = 2 * kGroups, kScales = kStep * kScaleRow;
  const int from = max(first_new - token, 0), to = min(it.context - token, kStep), skip = token - first_new;
  if (from >= to) return;
#pragma unroll 1
  for (int i = from * kRow + lane * 16; i < to * kRow; i += 512) {
    *reinterpret_cast<uint4*>(at + swizzled<D>(i)) = *reinterpret_cast<const uint4*>(sh.k + skip * kRow + i);
    *reinterpret_cast<uint4*>(at + kCodes + swizzled<D>(i)) = *reinterpret_cast<const uint4*>(sh.v + skip * kRow + i);
  }
#pragma unroll 1
  for (int i = from * kScaleRow + lane * 2; i < to * kScaleRow; i += 64) {
    *reinterpret_cast<uint16_t*>(at + 2 * kCodes + i) = *reinterpret_cast<const uint16_t*>(sh.k_scale + skip * kScaleRow + i);
    *reinterpret_cast<uint16_t*>(at + 2 * kCodes + kScales + i) = *reinterpret_cast<const uint16_t*>(sh.v_scale + skip * kScaleRow + i);
  }
  __syncwarp();
}

// Quantises query row r, one dim per lane and slot, into shared memory in the order of the MMAs.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::quantise_query(int r, const float (&x)[kSlots]) {
  float most = 0.f;
#pragma unroll
  for (int s = 0; s < kSlots; s++) most = fmaxf(most, fabsf(x[s]));
#pragma unroll
  for (int i = 16; i; i /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, i));
  most = fminf(most, 1e38f);
  const float to = most > 1e-30f ? __fdividef(kQueryMax, most) : 0.f;
  int8_t* const at = reinterpret_cast<int8_t*>(sh.q) + 2 * r * (D + 8) + lane / 8 * 8 + lane % 2 * 4 + lane % 8 / 2;
#pragma unroll
  for (int s = 0; s < kSlots; s++) {
    const int whole = __float2int_rn(fminf(fmaxf(x[s] * to, -kQueryMax), kQueryMax)), high = (whole + 32) >> 6;
    at[s * 32] = static_cast<int8_t>(high), at[s * 32 + D + 8] = static_cast<int8_t>(whole - high * 64);
  }
  if (lane == 0) sh.unit[r] = most * (1.f / kQueryMax);
}

template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::load_integer_queries() {
  const uint8_t* const from = reinterpret_cast<const uint8_t*>(sh.q) + g * (D + 8) + t * 8;
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int i = 0; i < kColumns * kGroups; i++) {
      const int r = n * 8 + i / kGroups * 4;
      const uint2 w = *reinterpret_cast<const uint2*>(from + 2 * r * (D + 8) + i % kGroups * 32);
      q[n][i][0] = w.x, q[n][i][1] = w.y, unit[n][i / kGroups] = sh.unit[r + t];
      constexpr int kNothing[4] = {0, 0, 0, 0};
      int sum[4];
      mma16832(sum, 0x07070707u, 0x07070707u, 0x07070707u, 0x07070707u, w.x, w.y, kNothing);
      zero[n][i][0] = kMagic + static_cast<float>(sum[0] * 64 + sum[1]);
    }
  // Four registers in a row, from memory: the compiler would make constants anew for every product.
  const auto load = [](auto& to, const int4& four) { to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w; };
  load(sevens[0], sh.constants[0]), load(sevens[1], sh.constants[1]), load(begin_of_sums, sh.constants[2]);
}

// Codes of group G: of rows g and g + 8 of a tile of 16, or (TRANS) of token pairs 2t and 2t + 8. row: shared address of the tile.
template <int KF, int VF, int D, int NT, bool RUNS>
template <int G, bool TRANS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::load_codes(uint32_t (&both)[4], uint32_t (&w)[2], uint32_t row,
                                                                        int sub) const {
  constexpr int kRow = D / 2;
  if constexpr (kGroups % 2 == 0) {
    if constexpr (G % 2 == 0) load_matrices<TRANS>(both, row + (place ^ G * 16) + sub * kTile * kRow);
    w[0] = both[G % 2 * 2], w[1] = both[G % 2 * 2 + 1];
  } else {
    load_matrices<TRANS>(w, row + place + (G * 16 + sub * kTile * kRow));
  }
}

template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::scores_q4(const uint8_t* at, float (&s)[kSubs][kN][4]) {
  constexpr int kRow = D / 2, kScaleRow = 2 * kGroups;
  const uint8_t* const scales = at + 2 * kStep * kRow + g * kScaleRow;
  const uint32_t row = shared_address(at);
  float scale[kSubs][2][kGroups];
#pragma unroll
  for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
    for (int i = 0; i < 2; i++) load_scales(scales + (sub * kTile + i * 8) * kScaleRow, 1.f, scale[sub][i]);
  [[maybe_unused]] uint32_t both[kSubs][4];
  static_for<kGroups>([&](auto group) {
    constexpr int G = decltype(group)::value;
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++) {
      uint32_t w[2];
      load_codes<G, false>(both[sub], w, row, sub);
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int j = 0; j < kColumns; j++) {
          const int i = j * kGroups + G;
          int sum[4];
          mma16832(sum, w[0] & 0x0f0f0f0fu, w[1] & 0x0f0f0f0fu, w[0] >> 4 & 0x0f0f0f0fu, w[1] >> 4 & 0x0f0f0f0fu, q[n][i][0], q[n][i][1],
                   begin_of_sums);
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const float whole = __int_as_float(sum[2 * half] * 64 + sum[2 * half + 1]) - zero[n][i][0];
            float& x = s[sub][n][2 * half + j];
            x = G ? fmaf(scale[sub][half][G], whole, x) : scale[sub][half][G] * whole;
          }
        }
    }
  });
#pragma unroll
  for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[sub][n][i] = i % 2 < kColumns ? s[sub][n][i] * unit[n][i % 2] : 0.f;
}

// Multiplies everything that row row_of(n, j) holds by f.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::scale_row(int n, int j, float f) {
  row_sum[n][j] *= f;
#pragma unroll
  for (int i = 0; i < D / 16; i++) o[n][i][j] *= f, o[n][i][2 + j] *= f;
#pragma unroll
  for (int i = 0; i < (kGroups + 1) / 2; i++) level[n][i][j] *= f, level[n][i][2 + j] *= f;
}

// As softmax.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::softmax_q4(float (&s)[kSubs][kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; n++) {
    float high[kColumns];
    bool more = false;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      high[j] = fmaxf(s[0][n][j], s[0][n][2 + j]);
#pragma unroll
      for (int sub = 1; sub < kSubs; sub++) high[j] = fmaxf(high[j], fmaxf(s[sub][n][j], s[sub][n][2 + j]));
      more |= high[j] > row_max[n][j] + kSlack;
    }
    if (__builtin_expect(__any_sync(kAll, more), 0)) {
#pragma unroll
      for (int j = 0; j < kColumns; j++) {
#pragma unroll
        for (int i = 4; i < 32; i *= 2) high[j] = fmaxf(high[j], __shfl_xor_sync(kAll, high[j], i));
        high[j] = high[j] > row_max[n][j] + kSlack ? high[j] : row_max[n][j];
        scale_row(n, j, exp2_fast(row_max[n][j] - high[j]));
        row_max[n][j] = high[j];
      }
    }
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (i % 2 < kColumns) {
          s[sub][n][i] = exp2_fast(s[sub][n][i] - (row_max[n][i % 2] - kShift));
          row_sum[n][i % 2] += s[sub][n][i];
        }
  }
}

// As avoid_overflow. scales: of the values.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::avoid_overflow_q4(const uint8_t* scales, float (&s)[kSubs][kN][4]) {
#pragma unroll 1
  for (int column = 0; column < kN * kColumns; column++) {
    float most = 0.f, f = 1.f;
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int j = 0; j < kColumns; j++)
        if (n * kColumns + j == column) {
#pragma unroll
          for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
            for (int half_of = 0; half_of < 2; half_of++) {
              const half* const of = reinterpret_cast<const half*>(scales) + (sub * kTile + g + 8 * half_of) * kGroups;
              for (int group = 0; group < kGroups; group++) most = fmaxf(most, s[sub][n][2 * half_of + j] * fabsf(__half2float(of[group])));
            }
#pragma unroll
          for (int i = 4; i < 32; i *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, i));
          if (most > 65000.f) f = 1.f / (1 << int(kShift + kSlack)), row_max[n][j] += kShift + kSlack;
          scale_row(n, j, f);
#pragma unroll
          for (int sub = 0; sub < kSubs; sub++) s[sub][n][j] *= f, s[sub][n][2 + j] *= f;
        }
  }
}

// at: the tile of values; scales: its scales.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::values_q4(const uint8_t* at, const uint8_t* scales, float (&s)[kSubs][kN][4]) {
  uint32_t scale[kSubs][2][kGroups];  // halves: of tokens 2t and 2t + 1; 2t + 8 and 2t + 9
  uint32_t any = 0;
#pragma unroll
  for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint8_t* const from = scales + (sub * kTile + i * 8 + 2 * t) * 2 * kGroups;
      constexpr int kPiece = kGroups % 4 == 0 ? 4 : 1;
#pragma unroll
      for (int k = 0; k < kGroups; k += kPiece) load_bytes<4 * kPiece>(from + 4 * k, scale[sub][i] + k);
#pragma unroll
      for (int k = 0; k < kGroups; k++) any |= scale[sub][i][k];
    }
  if (__builtin_expect(__any_sync(kAll, any & 0x40004000u), 0)) avoid_overflow_q4(scales, s);  // else all of them are below 2
  const uint32_t row = shared_address(at);
  [[maybe_unused]] uint32_t both[kSubs][4];
  uint32_t probs[kSubs][kN][2];
#pragma unroll
  for (int sub = 0; sub < kSubs; sub++) to_fragments(s[sub], probs[sub]);
  static_for<kGroups>([&](auto group) {
    constexpr int G = decltype(group)::value, kOther = kGroups + G;
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++) {
      uint32_t w[2], scaled[kN][2];
      load_codes<G, true>(both[sub], w, row, sub);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const half2 pair =
            as_half2(permute(scale[sub][i][G / 2], scale[sub][i][kOther / 2], (G % 2 ? 0x32 : 0x10) | (kOther % 2 ? 0x7600 : 0x5400)));
#pragma unroll
        for (int n = 0; n < kN; n++) scaled[n][i] = bits_of_half2(__hmul2(as_half2(probs[sub][n][i]), pair));
      }
      static_for<2>([&](auto half_of) {
        constexpr int H = decltype(half_of)::value;
        const uint32_t v0 = permute(w[0], 0, H ? 0x4341 : 0x4240), v1 = permute(w[1], 0, H ? 0x4341 : 0x4240);
#pragma unroll
        for (int n = 0; n < kN; n++) mma16816(o[n][2 * G + H], v0, v0 & 0x00f000f0u, v1, v1 & 0x00f000f0u, scaled[n][0], scaled[n][1]);
      });
#pragma unroll
      for (int n = 0; n < kN; n++)  // in rows g and g + 8: groups G and G + 1, or G - 1 and G
        mma16816(level[n][G / 2], sevens[G % 2][0], sevens[G % 2][1], sevens[G % 2][2], sevens[G % 2][3], scaled[n][0], scaled[n][1]);
    }
  });
}

// One tile. PLAIN: no mask, no softcap, no new rows.
template <int KF, int VF, int D, int NT, bool RUNS>
template <bool PLAIN>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::process_tile_q4(uint8_t* at, int token) {
  constexpr int kCodes = kStep * D / 2, kScales = kStep * 2 * kGroups;
  float s[kSubs][kN][4];  // of columns 2t and 2t + 1 of keys g, then of g + 8
  async_wait<kStages - 1>();
  __syncwarp();
  if constexpr (!PLAIN) complete_q4(at, token);
  scores_q4(at, s);
  if constexpr (!PLAIN) {
#pragma unroll
    for (int i = 0; i < kSubs; i++) cap_and_mask(token + i * kTile, s[i]);
  }
  softmax_q4(s);
  values_q4(at + kCodes, at + 2 * kCodes + kScales, s);
  __syncwarp();
  fetch_q4(at, token + ahead);
}

template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::process_chunk_q4(int& stage) {
  const int plain_last = min(plain_end, chunk_end) - kStep;
  int token = chunk_start + warp * kStep;
  const auto next = [&] { token += stride, stage = stage + 1 == kStages ? 0 : stage + 1; };
#pragma unroll 1
  for (; token <= plain_last; next()) process_tile_q4<true>(tiles + stage * kStageBytes, token);
#pragma unroll 1
  for (; token < chunk_end; next()) process_tile_q4<false>(tiles + stage * kStageBytes, token);
}

}  // namespace exl2nb
