// Decode kernel, first stage: the item's queries, and this step's keys and values, which also go to the cache.
#pragma once
#include "attention_decode_state.cuh"

namespace exl2nb {

// The item's rows, warp by warp: queries, new keys, new values.
template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::make_rows(bool wait) {
  const AttentionArgs& a = p.a;
  const int D3 = (a.cache.num_heads + 2 * a.cache.num_kv_heads) * D, chunk_last = chunk_start + it.chunks.size;
  const int new_from = max(first_new, chunk_start), fresh = max(min(it.context, chunk_last) - new_from, 0);
  const float factor = a.softcap > 0.f ? a.scale : a.scale * kLog2e;
  for (int i = rows * kQStride / 2 + threadIdx.x; i < kRows * kQStride / 2; i += kThreads) reinterpret_cast<uint32_t*>(sh.in.q)[i] = 0;
#pragma unroll 1
  for (int r = warp; r < rows + 2 * fresh; r += kWarps) {
    const bool is_query = r < rows, is_key = !is_query && r < rows + fresh;
    const int i = is_query ? token_of(first_row + r) : r - rows - (is_key ? 0 : fresh) + new_from - first_new;
    const int head = is_query ? it.kv_head * q_per_kv + first_row + r - i * q_per_kv : it.kv_head, token = it.first_token + i;
    Turn<kSlots> turn;
    if (!a.q) turn.load(a.rope, a.rope.positions ? a.rope.positions[token] : it.context - it.queries + i);
    if (wait) wait_for_predecessor();
    wait = false;
    Row<kSlots> row;
    const int place_in_row = is_query ? head : a.cache.num_heads + (is_key ? 0 : a.cache.num_kv_heads) + head;
    row.load(a.q ? a.q + (static_cast<int64_t>(token) * a.cache.num_heads + head) * D
                 : a.qkv + static_cast<int64_t>(token) * D3 + place_in_row * D,
             D);
    if (is_query || is_key) {
      if (!a.q) prepare(row, a.rope, is_query ? a.rope.q_norm : a.rope.k_norm, head, turn, sh.in.scratch[warp], D);
    } else if (!a.rope.norm_whole) {
      row.clip(a.rope.clip);
    }
    if (is_query) {
#pragma unroll
      for (int s = 0; s < kSlots; s++) {
        float x = row.x[s] * factor;
        if constexpr (is_rotated(KF)) x = hadamard<scale_group(D)>(x);
        if (lane + 32 * s < D) sh.in.q[r * kQStride + Key::place(lane + 32 * s)] = saturated(x);
      }
    } else {
      row.store(sh.in.fresh[is_key ? i : kMaxNew + i], D);
    }
  }
  if (wait) wait_for_predecessor();
  __syncthreads();
  if (!fresh) return;
  // 32 dims of a new key and of its value at a time: as the cache holds them into shared memory and, once, into the cache.
#pragma unroll 1
  for (int j = warp; j < fresh * kSlots; j += kWarps) {
    const int i = j / kSlots + new_from - first_new, d = j % kSlots * 32 + lane;
    const Numbers<2> x = {d < D ? sh.in.fresh[i][d] : 0.f, d < D ? sh.in.fresh[kMaxNew + i][d] : 0.f};
    Coded made[2];
    if constexpr (KF == VF) {
      encode<KF, scale_group(D), 2>(x, made);
    } else {
      made[0] = encode<KF, scale_group(D)>(x[0]), made[1] = encode<VF, scale_group(D)>(x[1]);
    }
    if (d >= D) continue;
    keep<KF>(made[0], i, d, a.cache.k_pool, sh.in.k, sh.in.k_scale);
    keep<VF>(made[1], i, d, a.cache.v_pool, sh.in.v, sh.in.v_scale);
  }
  __syncthreads();
}

template <int KF, int VF, int D, int NT>
template <int F>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::keep(const Coded& made, int i, int d, void* pool, uint8_t* codes,
                                                            uint8_t* scales) const {
  constexpr int row_bytes = D * bits_of(F) / 8, head_bytes = page_bytes(F, D), G = scale_group(D);
  put<F, G>(made, d, codes + i * row_bytes, scales + i * kGroups * 2);
  if (it.block) return;
  const int at = it.context - it.queries + i;
  const int64_t number =
      static_cast<int64_t>(at / kPage == (it.context - 1) / kPage ? last_page : first_page) * p.a.cache.num_kv_heads + it.kv_head;
  uint8_t* const page = static_cast<uint8_t*>(pool) + number * head_bytes;
  put<F, G>(made, d, page + at % kPage * row_bytes, page + kPage * row_bytes + at % kPage * kGroups * 2);
}

template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::fetch_queries() {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int pair = 0; pair < (D + 31) / 32; pair++) {
      const uint4 x = *reinterpret_cast<const uint4*>(sh.in.q + (n * 8 + g) * kQStride + pair * 32 + t * 8);
      q[n][2 * pair][0] = x.x, q[n][2 * pair][1] = x.y, q[n][2 * pair + 1][0] = x.z, q[n][2 * pair + 1][1] = x.w;
    }
}

}  // namespace exl2nb
