// Decode kernel, first stage: the item's queries, and this step's keys and values, which also go to the cache.
#pragma once
#include "cuda/attention/attention_decode_state.cuh"

namespace exl2nb {

// Row r of the item: its queries, the chunk's new keys, its new values.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ typename Decode<KF, VF, D, NT, RUNS>::Place Decode<KF, VF, D, NT, RUNS>::place_of(int r) const {
  Place x;
  x.is_query = r < rows, x.is_key = !x.is_query && r < rows + fresh;
  x.i = x.is_query ? token_of(first_row + r) : r - rows - (x.is_key ? 0 : fresh) + new_from - first_new;
  x.head = x.is_query ? it.kv_head * q_per_kv + first_row + r - x.i * q_per_kv : it.kv_head;
  return x;
}
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ const float* Decode<KF, VF, D, NT, RUNS>::row_at(int r) const {
  const AttentionArgs& a = p.a;
  const Place x = place_of(r);
  const int of_token = a.cache.num_heads + 2 * a.cache.num_kv_heads;
  const int number = x.is_query ? x.head : a.cache.num_heads + (x.is_key ? 0 : a.cache.num_kv_heads) + x.head;
  const int64_t token = it.first_token + x.i;
  return a.q ? a.q + (token * a.cache.num_heads + x.head) * D : a.qkv + (token * of_token + number) * D;
}
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::load_turn(int r) {
  const AttentionArgs& a = p.a;
  if (a.q || r >= rows + 2 * fresh) return;
  const int i = place_of(r).i;
  if (i == turn_of) return;
  turn_of = i;
  turn.load(a.rope, a.rope.positions ? a.rope.positions[it.first_token + i] : it.context - it.queries + i);
}

// The item's rows, warp by warp. A warp asks for two rows at once, for the third when it works on the first.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::make_rows(bool wait) {
  const AttentionArgs& a = p.a;
  const int all = rows + 2 * fresh;
  const float factor = a.softcap > 0.f ? a.scale : a.scale * kLog2e;
  for (int i = rows * kQStride / 2 + thread; i < kRows * kQStride / 2; i += blockDim.x) reinterpret_cast<uint32_t*>(sh.q)[i] = 0;
  if (kPacked && thread >= rows && thread < kRows) sh.unit[thread] = 0.f;
  if (kPacked && thread < 12) {
    const bool there = thread < 8 ? thread % 2 == thread / 4 : thread % 2;
    reinterpret_cast<uint32_t*>(sh.fours)[thread] = there ? thread < 8 ? kSeven : kWholeBits : 0u;
  }
  Row<kSlots> next, second;
  const float *const first = row_at(min(warp, all - 1)), *const then = warp + warps < all ? row_at(warp + warps) : nullptr;
  if (wait && !a.early) wait_for_predecessor();
  EXL2NB_MARK(a, 2);
  if (warp < all || a.early) next.load(first, D);
  if (then) second.load(then, D);
  if (a.early) next.await_rest(first, D, &second, then);  // a warp without a row, too: nothing else is asked for meanwhile
  fetch_ahead(true);
#pragma unroll 1
  for (int r = warp; r < all; r += warps) {
    const Place x = place_of(r);
    Row<kSlots> row = next;
    next = second;
    if (a.early && r >= warp + 2 * warps) row.await_rest(row_at(r), D);
    if (r + 2 * warps < all) second.load(row_at(r + 2 * warps), D);
    if (r > warp) load_turn(r);
    if (x.is_query || x.is_key) {
      if (!a.q) prepare(row, a.rope, x.is_query ? a.rope.q_norm : a.rope.k_norm, x.head, turn, sh.scratch[warp], D);
    } else if (!a.rope.norm_whole) {
      row.clip(a.rope.clip);
    }
    if (x.is_query) {
#pragma unroll
      for (int s = 0; s < kSlots; s++) {
        row.x[s] *= factor;
        if constexpr (is_rotated(KF)) row.x[s] = hadamard<scale_group(D)>(row.x[s]);
        if constexpr (!kPacked)
          if (lane + 32 * s < D) sh.q[r * kQStride + Key::place(lane + 32 * s)] = saturated(row.x[s]);
      }
      if constexpr (kPacked) keep_whole(r, row.x);
    } else if constexpr (kCoded) {
      row.store(sh.fresh[x.is_key ? x.i : kMaxNew + x.i], D);
    } else {
#pragma unroll
      for (int s = 0; s < kSlots; s++)
        if (lane + 32 * s < D) keep<kCacheF16>({half(), __half_as_ushort(__float2half_rn(row.x[s]))}, x.i, lane + 32 * s, x.is_key);
    }
  }
  __syncthreads();
  EXL2NB_MARK(a, 3);
  if constexpr (kCoded) {
    if (!fresh) return;
    // 32 dims of a new key or value at a time: as the cache holds them into shared memory and, once, into the cache.
#pragma unroll 1
    for (int j = warp; j < 2 * fresh * kSlots; j += warps) {
      const bool key = j < fresh * kSlots;
      const int i = (key ? j : j - fresh * kSlots) / kSlots + new_from - first_new, slot = j % kSlots;
      if (KF == VF || key)
        encode_row<KF>(i, slot, key);
      else
        encode_row<VF>(i, slot, key);
    }
    __syncthreads();
    EXL2NB_MARK(a, 4);
  }
}

template <int KF, int VF, int D, int NT, bool RUNS>
template <int F>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::encode_row(int i, int slot, bool key) {
  const int d = slot * 32 + lane;
  const Coded made = encode<F, scale_group(D)>(d < D ? sh.fresh[key ? i : kMaxNew + i][d] : 0.f);
  if (d < D) keep<F>(made, i, d, key);
}

// Dim d of new token i into shared memory and, once, into the cache.
template <int KF, int VF, int D, int NT, bool RUNS>
template <int F>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::keep(const Coded& made, int i, int d, bool key) {
  constexpr int row_bytes = D * bits_of(F) / 8, head_bytes = page_bytes(F, D), G = scale_group(D);
  put<F, G>(made, d, (key ? sh.k : sh.v) + i * row_bytes, (key ? sh.k_scale : sh.v_scale) + i * kGroups * 2);
  if (it.block) return;
  const int at = it.context - it.queries + i;
  const int64_t number =
      static_cast<int64_t>(at / kPage == (it.context - 1) / kPage ? last_page : first_page) * p.a.cache.num_kv_heads + it.kv_head;
  uint8_t* const page = static_cast<uint8_t*>(key ? p.a.cache.k_pool : p.a.cache.v_pool) + number * head_bytes;
  put<F, G>(made, d, page + at % kPage * row_bytes, page + kPage * row_bytes + at % kPage * kGroups * 2);
}

// Queries as B fragments; and what the sums of their products with codes begin with, by the same products.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::fetch_queries() {
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int pair = 0; pair < kSlots; pair++) {
      const uint4 x = *reinterpret_cast<const uint4*>(sh.q + (n * 8 + g) * kQStride + pair * 32 + t * 8);
      q[n][2 * pair][0] = x.x, q[n][2 * pair][1] = x.y, q[n][2 * pair + 1][0] = x.z, q[n][2 * pair + 1][1] = x.w;
    }
  if constexpr (has_scales(KF)) {
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int group = 0; group < kGroups; group++) {
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int k = group * Key::kSteps; KF != kCacheFp8 && k < (group + 1) * Key::kSteps; k++) {
          mma16816(sum, Key::kZeroLow, Key::kZeroLow, Key::kZeroHigh, Key::kZeroHigh, q[n][k][0], q[n][k][1]);
          if (KF == kCacheQ8) mma16816(sum, 0x38003800u, 0x38003800u, 0x38003800u, 0x38003800u, q[n][k][0], q[n][k][1]);
        }
        zero[n][group][0] = sum[0], zero[n][group][1] = sum[1];
      }
  }
}

}  // namespace exl2nb
