// Kernels for any head dim and any format, chosen at run time: RoPE and cache append of prefill, gather of pages, a norm over all heads,
// and attention for what decode.cuh has no variant of. One warp owns one row; lane l holds dims l, l + 32, ... Bytes: each row read once
// and written once; attention_any reads K and V once per query and head.
#include <cmath>

#include "cuda/attention/split_kv.cuh"

namespace exl2nb {

constexpr int kAnySlots = kMaxHeadDim / 32;
using AnyRow = Row<kAnySlots>;

template <class F>
__device__ __forceinline__ void with_group(int D, F&& f) {
  const int G = pool_group(D);
  if (G == 32) return f(std::integral_constant<int, 32>{});
  if (G == 16) return f(std::integral_constant<int, 16>{});
  return f(std::integral_constant<int, 8>{});
}

__device__ __forceinline__ void rotate_groups(AnyRow& row, int D) {
  with_group(D, [&](auto G) {
#pragma unroll
    for (int i = 0; i < kAnySlots; i++)
      if (32 * i < D) row.x[i] = hadamard<decltype(G)::value>(row.x[i]);
  });
}

// Codes and scales of one token and KV head in a pool.
struct Place {
  uint8_t *codes, *scales;
};
__device__ __forceinline__ Place place_of(void* pool, int format, int D, int num_kv_heads, int page, int offset, int head) {
  uint8_t* const base = static_cast<uint8_t*>(pool) + (static_cast<int64_t>(page) * num_kv_heads + head) * page_bytes(format, D);
  const int row_bytes = D * pool_bits(format) / 8;
  return {base + offset * row_bytes, base + kPage * row_bytes + offset * (D / pool_group(D)) * 2};
}

// row: D floats in shared memory.
__device__ __forceinline__ void write_row(const float* row, int format, int D, const Place& to) {
#pragma unroll 1
  for (int first = 0; first < D; first += 32) {
    const int d = first + threadIdx.x % 32;
    const float x = d < D ? row[d] : 0.f;
    const auto keep = [&](auto F, auto G) {
      constexpr int f = decltype(F)::value, g = decltype(G)::value;
      const Coded made = encode<f, g>(x);
      if (d < D) put<f, g>(made, d, to.codes, to.scales);
    };
    if (format == kCacheF16 || format == kCacheF32) {
      const std::integral_constant<int, 32> any{};
      if (format == kCacheF16) keep(std::integral_constant<int, kCacheF16>{}, any);
      if (format == kCacheF32) keep(std::integral_constant<int, kCacheF32>{}, any);
      continue;
    }
    with_group(D, [&](auto G) {
      if (format == kCacheQ8) keep(std::integral_constant<int, kCacheQ8>{}, G);
      if (format == kCacheQ4) keep(std::integral_constant<int, kCacheQ4>{}, G);
      if (format == kCacheFp8) keep(std::integral_constant<int, kCacheFp8>{}, G);
    });
  }
}

// Hadamard-rotated formats stay rotated. Plain loads, not ld.global.nc: other threads of this kernel may have written the row.
__device__ __forceinline__ void read_row(AnyRow& row, int format, int D, const Place& from) {
  const int lane = threadIdx.x % 32, G = pool_group(D);
#pragma unroll
  for (int i = 0; i < kAnySlots; i++) {
    const int d = lane + 32 * i;
    row.x[i] = 0.f;
    if (d >= D) continue;
    if (format == kCacheF32) {
      row.x[i] = reinterpret_cast<const float*>(from.codes)[d];
    } else if (format == kCacheF16) {
      row.x[i] = __half2float(reinterpret_cast<const half*>(from.codes)[d]);
    } else {
      const float scale = __half2float(reinterpret_cast<const half*>(from.scales)[d / G]);
      const uint32_t code = format == kCacheQ4 ? from.codes[d / 2] >> (d % 2 * 4) & 15 : from.codes[d];
      const float level = format == kCacheQ4   ? code - 7.f
                          : format == kCacheQ8 ? code - 127.5f
                                               : __half2float(__ushort_as_half((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.f;
      row.x[i] = level * scale;
    }
  }
}

// Clip, and one norm over all heads of q and of k, in place. Grid (tokens, 3): q, k, v.
__global__ void norm_whole_rows(RopeArgs rope, float* qkv, int num_heads, int num_kv_heads, int D) {
  pdl_launch_dependents();
  pdl_wait();
  const int part = blockIdx.y, n = (part ? num_kv_heads : num_heads) * D;
  float* const x = qkv + static_cast<int64_t>(blockIdx.x) * (num_heads + 2 * num_kv_heads) * D +
                   (part == 0   ? 0
                    : part == 1 ? num_heads
                                : num_heads + num_kv_heads) *
                       D;
  const float* const weight = part == 0 ? rope.q_norm : part == 1 ? rope.k_norm : nullptr;
  const float limit = rope.clip > 0.f ? rope.clip : INFINITY;
  const auto clipped = [&](int i) { return fminf(fmaxf(x[i], -limit), limit); };
  float mean = 0.f, factor = 1.f;
  if (weight) {
    float sum = 0;
    if (rope.layer_norm) {
      for (int i = threadIdx.x; i < n; i += blockDim.x) sum += clipped(i);
      mean = cta_sum<kWholeNormThreads>(sum) / n;
    }
    float squares = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) squares = fmaf(clipped(i) - mean, clipped(i) - mean, squares);
    factor = rsqrtf(cta_sum<kWholeNormThreads>(squares) / n + rope.eps);
  }
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = weight ? (clipped(i) - mean) * factor * weight[i] : clipped(i);
}

// The sequence of a token.
__device__ __forceinline__ int sequence_of(const CacheArgs& c, int token) {
  int b = 0;
  while (b + 1 < c.sequences && c.cu_seqlens[b + 1] <= token) b++;
  return b;
}

// Clip, norm, RoPE, cache append. A warp per (token, head of q, k or v).
__global__ void __launch_bounds__(kGenericWarps * 32) rope_append_rows(const __grid_constant__ RopeAppendArgs a) {
  __shared__ float scratch[kGenericWarps][kMaxHeadDim];
  pdl_launch_dependents();
  pdl_wait();
  const CacheArgs& c = a.cache;
  const int D = c.head_dim, heads = c.num_heads + 2 * c.num_kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kGenericWarps + warp;
  if (number >= static_cast<int64_t>(a.tokens) * heads) return;
  const int token = static_cast<int>(number / heads), h = static_cast<int>(number % heads);
  const bool is_query = h < c.num_heads, is_key = !is_query && h < c.num_heads + c.num_kv_heads;
  const int head = is_query ? h : is_key ? h - c.num_heads : h - c.num_heads - c.num_kv_heads;
  int place = 0, b = 0;
  if (!a.slots || !a.rope.positions) {
    b = sequence_of(c, token);
    place = c.context_lens[b] - c.cu_seqlens[b + 1] + token;
    if (place < 0 || token >= c.cu_seqlens[c.sequences]) return;  // an unused row
  }
  AnyRow row;
  row.load(a.qkv + number * D, D);
  if (is_query || is_key) {
    CosSin<kAnySlots> cos_sin;
    cos_sin.load(a.rope, a.rope.positions ? a.rope.positions[token] : place);
    prepare(row, a.rope, is_query ? a.rope.q_norm : a.rope.k_norm, head, cos_sin, scratch[warp], D);
  } else if (!a.rope.norm_whole) {
    row.clip(a.rope.clip);
  }
  const int64_t at = (static_cast<int64_t>(token) * (is_query ? c.num_heads : c.num_kv_heads) + head) * D;
  half* const copy = static_cast<half*>(is_query ? a.q_f16 : is_key ? a.k_f16 : a.v_f16);
#pragma unroll
  for (int i = 0; i < kAnySlots; i++) {
    const int d = lane + 32 * i;
    if (d >= D) continue;
    if (copy) copy[at + d] = saturated(row.x[i]);
    if (is_query && a.q_f32) a.q_f32[at + d] = row.x[i];
  }
  if (is_query) return;
  const int slot = a.slots ? a.slots[token] : c.block_table[static_cast<int64_t>(b) * c.max_pages + place / kPage] * kPage + place % kPage;
  if (slot < 0) return;
  const int format = is_key ? c.k_format : c.v_format;
  row.store(scratch[warp], D);
  __syncwarp();
  write_row(scratch[warp], format, D, place_of(is_key ? c.k_pool : c.v_pool, format, D, c.num_kv_heads, slot / kPage, slot % kPage, head));
}

// Cache pages to contiguous fp16. A warp per (token, head, K or V).
__global__ void __launch_bounds__(kGenericWarps * 32) gather_rows(CacheArgs c, const int* pages, int length, half* k, half* v) {
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kGenericWarps + threadIdx.x / 32,
                half_way = static_cast<int64_t>(length) * c.num_kv_heads;
  if (number >= 2 * half_way) return;
  const bool is_key = number < half_way;
  const int64_t row_number = is_key ? number : number - half_way;
  const int token = static_cast<int>(row_number / c.num_kv_heads), head = static_cast<int>(row_number % c.num_kv_heads);
  const int format = is_key ? c.k_format : c.v_format, D = c.head_dim, lane = threadIdx.x % 32;
  AnyRow row;
  read_row(row, format, D, place_of(is_key ? c.k_pool : c.v_pool, format, D, c.num_kv_heads, pages[token / kPage], token % kPage, head));
  if (pool_is_rotated(format)) rotate_groups(row, D);
  half* const to = (is_key ? k : v) + row_number * D;
#pragma unroll
  for (int i = 0; i < kAnySlots; i++)
    if (lane + 32 * i < D) to[lane + 32 * i] = saturated(row.x[i]);
}

// Attention with an online softmax over keys one by one. A warp per (token, head).
__global__ void __launch_bounds__(kGenericWarps * 32) attention_any(const __grid_constant__ AttentionArgs a) {
  pdl_launch_dependents();
  pdl_wait();
  const CacheArgs& c = a.cache;
  const int D = c.head_dim, lane = threadIdx.x % 32;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kGenericWarps + threadIdx.x / 32;
  if (number >= static_cast<int64_t>(a.tokens) * c.num_heads) return;
  const int token = static_cast<int>(number / c.num_heads), head = static_cast<int>(number % c.num_heads);
  const int kv_head = head / (c.num_heads / c.num_kv_heads), b = sequence_of(c, token),
            position = c.context_lens[b] - c.cu_seqlens[b + 1] + token;
  if (position < 0 || token >= c.cu_seqlens[c.sequences]) return;
  AnyRow q, sum;
  q.load(a.q + number * D, D);
#pragma unroll
  for (int i = 0; i < kAnySlots; i++) q.x[i] *= a.scale, sum.x[i] = 0.f;
  if (pool_is_rotated(c.k_format)) rotate_groups(q, D);
  float highest = kLowest, total = 0.f;
  for (int j = a.window > 0 && position - a.window + 1 > 0 ? position - a.window + 1 : 0; j <= position; j++) {
    const int page = c.block_table[static_cast<int64_t>(b) * c.max_pages + j / kPage];
    AnyRow k, v;
    read_row(k, c.k_format, D, place_of(c.k_pool, c.k_format, D, c.num_kv_heads, page, j % kPage, kv_head));
    read_row(v, c.v_format, D, place_of(c.v_pool, c.v_format, D, c.num_kv_heads, page, j % kPage, kv_head));
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < kAnySlots; i++) score = fmaf(q.x[i], k.x[i], score);
    score = warp_sum(score);
    if (a.softcap > 0.f) score = a.softcap * tanhf(score / a.softcap);
    const float higher = fmaxf(highest, score), shrink = expf(highest - higher), weight = expf(score - higher);
    highest = higher, total = total * shrink + weight;
#pragma unroll
    for (int i = 0; i < kAnySlots; i++) sum.x[i] = sum.x[i] * shrink + weight * v.x[i];
  }
#pragma unroll
  for (int i = 0; i < kAnySlots; i++) sum.x[i] /= total;
  if (pool_is_rotated(c.v_format)) rotate_groups(sum, D);
#pragma unroll
  for (int i = 0; i < kAnySlots; i++) {
    const int d = lane + 32 * i;
    if (d >= D) continue;
    const int feature = head * D + d;
    if (a.to.out) a.to.out[static_cast<int64_t>(token) * c.num_heads * D + feature] = sum.x[i];
    for (int n = 0; n < a.to.num_perms; n++) {
      const int stored = a.to.inverse[n] ? a.to.inverse[n][feature] : feature;
      a.to.x[static_cast<int64_t>(n) * a.to.perm_stride + token_place(a.to.group, a.to.stride, token) + row_place(a.to.group, stored)] =
          saturated(sum.x[i]);
    }
  }
}

}  // namespace exl2nb
