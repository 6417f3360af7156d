// Decode kernel: tiles of 16 cached keys and values on their way from memory to fragment registers.
#pragma once
#include "attention_decode_state.cuh"

namespace exl2nb {

// Old tokens of a tile; where it has newer ones too, the last old token stands in for them: finite numbers under a probability of 0,
// until take_new puts in what is new.
template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::load_keys(int step) {
  constexpr int head_bytes = page_bytes(KF, D), row_bytes = D * bits_of(KF) / 8;
  const int first = tile_token(step, 0), last = tile_token(step, kTiles - 1);
  if (first < chunk_end && last / kPage - page_base > 31) fetch_pages(first);
#pragma unroll
  for (int u = 0; u < kTiles; u++) {
    const int token = tile_token(step, u);
    if (token >= old_end) {
      k[u][0].clear(), k[u][1].clear();
      continue;
    }
    const uint8_t* page = static_cast<const uint8_t*>(p.a.cache.k_pool) + page_at(token) * head_bytes;
    const bool whole = token + kTile <= first_new;
    const uint8_t* row = page + (token % kPage + g) * row_bytes;
    const uint8_t* scales = page + kPage * row_bytes + (token % kPage + g) * (2 * kGroups);
    if (whole) {
#pragma unroll
      for (int i = 0; i < 2; i++) k[u][i].template load<true>(row + 8 * i * row_bytes, scales + 8 * i * 2 * kGroups, t);
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int back = max(token + g + 8 * i - (first_new - 1), 0) - 8 * i;
        k[u][i].template load<true>(row - back * row_bytes, scales - back * 2 * kGroups, t);
      }
    }
  }
}

template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::load_values(int step) {
  constexpr int head_bytes = page_bytes(VF, D), row_bytes = D * bits_of(VF) / 8;
#pragma unroll
  for (int u = 0; u < kTiles; u++) {
    const int token = tile_token(step, u);
    if (token >= old_end) {
#pragma unroll
      for (int i = 0; i < 4; i++) v[u][i].clear();
      continue;
    }
    const uint8_t* page = static_cast<const uint8_t*>(p.a.cache.v_pool) + page_at(token) * head_bytes;
    const bool whole = token + kTile <= first_new;
    const uint8_t* row = page + (token % kPage + 2 * t) * row_bytes;
    const uint8_t* scales = page + kPage * row_bytes + (token % kPage + 2 * t) * (2 * kGroups);
    if (whole) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int on = i % 2 + i / 2 * 8;
        v[u][i].template load<true>(row + on * row_bytes, scales + on * 2 * kGroups, g);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int on = i % 2 + i / 2 * 8, back = max(token + 2 * t + on - (first_new - 1), 0) - on;
        v[u][i].template load<true>(row - back * row_bytes, scales - back * 2 * kGroups, g);
      }
    }
  }
}

template <int KF, int VF, int D, int NT>
template <int F, int LANES>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::take_new(Share<F, D, LANES>& share, const uint8_t* codes, const uint8_t* scales,
                                                                int token, int part) const {
  constexpr int row_bytes = Lanes<F, D, LANES>::kRowBytes;
  const int i = token - first_new;
  if (i >= 0 && token < it.context) share.template load<false>(codes + i * row_bytes, scales + i * kGroups * 2, part);
}

}  // namespace exl2nb
