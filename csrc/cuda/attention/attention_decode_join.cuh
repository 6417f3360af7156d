// Decode kernel, third stage: the warps' results become the item's, the chunks' the row's; the row goes where it is read.
#pragma once
#include "cuda/attention/attention_decode_state.cuh"

namespace exl2nb {

template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ int64_t Decode<KF, VF, D, NT, RUNS>::part_row(int r) const {
  const int row = it.part_token() + sh.token[r] - it.first_token;
  return (static_cast<int64_t>(row) * p.a.cache.num_heads + sh.head[r]) * p.most;
}

// The warps' results where they are read where there is one chunk, else to the workspace. A lane has four dims of a row.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::join_warps() {
  const int vectors = rows * (D / 4);
  const bool single = it.chunks.count == 1;
  if (RUNS && sh.several) __syncthreads();  // the chunk before has been joined
  int4 place = make_int4(0, 0, 0, 0);
  const int mine = thread < vectors ? thread : 0;
  if (single) place = places(mine / (D / 4), mine % (D / 4) * 4);
  float* const to = results(warp);
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      float sum = row_sum[n][j];
#pragma unroll
      for (int i = 4; i < 32; i *= 2) sum += __shfl_xor_sync(kAll, sum, i);
      const int r = row_of(n, j);
      if (g == 0) sh.max[warp][r] = row_max[n][j], sh.sum[warp][r] = sum;
      if (r >= rows) continue;
      static_for<D / 16>([&](auto tile) {
        constexpr int i = decltype(tile)::value;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float x = o[n][i][2 * half + j];
          if constexpr (kPacked) {  // whole bytes, and their upper codes, in units of 2^-24
            x = half ? o[n][i][2 + j] * 0.0625f : o[n][i][j] - o[n][i][2 + j];
            x = (x + level[n][i / 4][i / 2 % 2 * 2 + j]) * 0x1p24f;
          } else if constexpr (scales_in_probs(VF, D)) {  // codes have units of 2^-24 or 2^-20
            x = fmaf(x, half ? 0x1p20f : 0x1p24f, level[n][i / 4][i / 2 % 2 * 2 + j] * 0x1p24f);
          }
          to[r * kOStride + Value::template dim<i>(g, half)] = x;
        }
      });
    }
  __syncthreads();
  const int used = min(warps, (chunk_end - chunk_start + kStep - 1) / kStep);
#pragma unroll 1
  for (int i = thread; i - lane < vectors; i += blockDim.x) {
    const bool inside = i < vectors;
    const int r = inside ? i / (D / 4) : 0, d = inside ? i % (D / 4) * 4 : 0;
    float high = kLowest, sum = 0.f;
    float4 x = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = 0; first < used; first += 8) {
      float m[8];
#pragma unroll
      for (int w = 0; w < 8; w++) m[w] = first + w < used ? sh.max[first + w][r] : kLowest;
      const float before = high;
#pragma unroll
      for (int w = 0; w < 8; w++) high = fmaxf(high, m[w]);
      const float f = exp2_fast(before - high);  // of what comes from the warps before these, if any
      sum *= f, x.x *= f, x.y *= f, x.z *= f, x.w *= f;
#pragma unroll
      for (int w = 0; w < 8; w++) {
        const int from = min(first + w, used - 1);
        const float4 y = *reinterpret_cast<const float4*>(results(from) + r * kOStride + d);
        m[w] = first + w < used ? exp2_fast(m[w] - high) : 0.f;
        sum = fmaf(sh.sum[from][r], m[w], sum);
        x.x = fmaf(m[w], y.x, x.x), x.y = fmaf(m[w], y.y, x.y), x.z = fmaf(m[w], y.z, x.z), x.w = fmaf(m[w], y.w, x.w);
      }
    }
    if (single) {
      const float f = __fdividef(1.f, sum);
      if (i >= static_cast<int>(blockDim.x) && inside) place = places(r, d);
      write(r, d, make_float4(x.x * f, x.y * f, x.z * f, x.w * f), place, inside);
    } else if (inside) {
      const int64_t at = part_row(r) + it.chunk;
      *reinterpret_cast<float4*>(p.part + at * D + d) = x;
      if (d == 0) p.part_ml[at] = make_float2(high, sum);
    }
  }
}

// Whether this CTA is the last of those that have chunks of the item's rows; all of them are in memory then.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ bool Decode<KF, VF, D, NT, RUNS>::comes_last() const {
  __syncthreads();
  if (thread == 0) {
    const int64_t at = (static_cast<int64_t>(it.part_token()) * p.blocks_per_token + it.block) * p.a.cache.num_kv_heads + it.kv_head;
    const int ctas = RUNS ? sh.runs : it.chunks.count;
    sh.last = count_up(p.count + at, ctas - 1) == unsigned(ctas - 1);  // back to 0 with the last one
  }
  __syncthreads();
  return sh.last;
}

// A warp joins the chunks of a row. Many chunks are added up in two halves, by two warps where there are warps to spare: the same sums.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::join_chunks() {
  constexpr int kVectors = (D + 127) / 128, kAhead = 16 / kVectors;  // loads in flight
  const int n = it.chunks.count, middle = n > kAhead ? kAhead * ((n + 2 * kAhead - 1) / (2 * kAhead)) : n;
  const bool shared = n > middle && 2 * rows <= warps;
#pragma unroll 1
  for (int unit = warp; unit < (shared ? warps : rows); unit += warps) {
    const bool second = unit >= rows, idle = second && unit >= 2 * rows;
    const int r = idle ? 0 : second ? unit - rows : unit;
    const int64_t at = part_row(r);
    const float4* from = reinterpret_cast<const float4*>(p.part + at * D) + lane;
    float4 x[kAhead][kVectors], acc[kVectors], total[kVectors];
    int4 place[kVectors];
    const auto fetch = [&](int first) {
#pragma unroll
      for (int s = 0; s < kAhead; s++)
#pragma unroll
        for (int j = 0; j < kVectors; j++) {
          x[s][j] = make_float4(0, 0, 0, 0);
          if (first + s < n && lane + 32 * j < D / 4) x[s][j] = __ldcg(from + (first + s) * (D / 4) + 32 * j);
        }
    };
    const int begin = second ? middle : 0, end = idle ? begin : shared && !second ? middle : n;
    fetch(begin);
    const float2 none = make_float2(kLowest, 0.f);
    const float2 a = lane < n ? __ldcg(p.part_ml + at + lane) : none, b = lane + 32 < n ? __ldcg(p.part_ml + at + lane + 32) : none;
#pragma unroll
    for (int j = 0; j < kVectors; j++) place[j] = places(r, lane + 32 * j < D / 4 ? (lane + 32 * j) * 4 : 0);
    float high = fmaxf(a.x, b.x);
#pragma unroll
    for (int i = 16; i; i /= 2) high = fmaxf(high, __shfl_xor_sync(kAll, high, i));
    const float fa = exp2_fast(a.x - high), fb = exp2_fast(b.x - high), sum = warp_sum(a.y * fa + b.y * fb);
#pragma unroll
    for (int j = 0; j < kVectors; j++) acc[j] = total[j] = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = begin; first < end; first += kAhead) {
      if (first == middle) {
#pragma unroll
        for (int j = 0; j < kVectors; j++) total[j] = acc[j], acc[j] = make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int s = 0; s < kAhead; s++) {
        const float f = __shfl_sync(kAll, first < 32 ? fa : fb, (first + s) % 32);  // 0 past the last chunk
#pragma unroll
        for (int j = 0; j < kVectors; j++) {
          acc[j].x = fmaf(f, x[s][j].x, acc[j].x), acc[j].y = fmaf(f, x[s][j].y, acc[j].y);
          acc[j].z = fmaf(f, x[s][j].z, acc[j].z), acc[j].w = fmaf(f, x[s][j].w, acc[j].w);
        }
      }
      if (first + kAhead < end) fetch(first + kAhead);
    }
    if (shared) {
      float4* const other = reinterpret_cast<float4*>(results(0) + r * kOStride) + lane;
#pragma unroll
      for (int j = 0; j < kVectors; j++)
        if (second && !idle && lane + 32 * j < D / 4) other[32 * j] = acc[j];
      __syncthreads();
      if (second) return;
#pragma unroll
      for (int j = 0; j < kVectors; j++) {
        total[j] = acc[j];
        if (lane + 32 * j < D / 4) acc[j] = other[32 * j];
      }
    }
    const float f = __fdividef(1.f, sum);
#pragma unroll
    for (int j = 0; j < kVectors; j++) {
      const bool inside = lane + 32 * j < D / 4;
      const float4 v =
          make_float4((total[j].x + acc[j].x) * f, (total[j].y + acc[j].y) * f, (total[j].z + acc[j].z) * f, (total[j].w + acc[j].w) * f);
      write(r, inside ? (lane + 32 * j) * 4 : 0, v, place[j], inside);
    }
  }
}

// Where dims d to d + 3 of row r lie in the next matrix's first copy of its input, before their order in it.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ int4 Decode<KF, VF, D, NT, RUNS>::places(int r, int d) const {
  const int feature = sh.head[r] * D + d;
  const int* const inverse = p.a.to.num_perms ? p.a.to.inverse[0] : nullptr;
  if (!inverse) return make_int4(feature, feature + 1, feature + 2, feature + 3);
  return make_int4(__ldg(inverse + feature), __ldg(inverse + feature + 1), __ldg(inverse + feature + 2), __ldg(inverse + feature + 3));
}

// Four dims of a row where they are read. All lanes of a warp take part: a rotated group lies in neighbouring lanes.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::write(int r, int d, float4 v, int4 place, bool inside) const {
  const AttentionOut& to = p.a.to;
  float x[4] = {v.x, v.y, v.z, v.w};
  if constexpr (is_rotated(VF)) {
    constexpr int G = scale_group(D);
    const float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], e = x[2] - x[3];
    x[0] = a + c, x[1] = b + e, x[2] = a - c, x[3] = b - e;
#pragma unroll
    for (int i = 1; i < G / 4; i *= 2)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float other = __shfl_xor_sync(kAll, x[k], i);
        x[k] = lane & i ? other - x[k] : x[k] + other;
      }
#pragma unroll
    for (int k = 0; k < 4; k++) x[k] *= G == 32 ? 0.17677669529663687f : 0.25f;
  }
  if (!inside) return;
  const int64_t token = sh.token[r];
  const int stored[4] = {place.x, place.y, place.z, place.w}, feature = sh.head[r] * D + d;
  half* const row = static_cast<half*>(to.x) + token_place(to.group, to.x_stride, static_cast<int>(token));
  if (to.num_perms) {
#pragma unroll
    for (int k = 0; k < 4; k++) row[row_place(to.group, stored[k])] = saturated(x[k]);
  }
  if (to.out) *reinterpret_cast<float4*>(to.out + token * p.a.cache.num_heads * D + feature) = make_float4(x[0], x[1], x[2], x[3]);
#pragma unroll 1
  for (int copy = 1; copy < to.num_perms; copy++)
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int at = to.inverse[copy] ? to.inverse[copy][feature + k] : feature + k;
      row[static_cast<int64_t>(copy) * to.x_perm_stride + row_place(to.group, at)] = saturated(x[k]);
    }
}

}  // namespace exl2nb
