// Sampling, first stage: one pass over the slice for what every row needs, and the team's results together.
#pragma once
#include "cuda/sampling/sample_state.cuh"

namespace exl2nb {

__device__ __forceinline__ void Sampler::look() {
  Summary s = {-INFINITY, 0.f, 0, 0};
  float best = -INFINITY;
  int best_id = -1;
  const auto take = [&](int id, float v) {
    s.bad |= isnan(v);
    s.raw_max = fmaxf(s.raw_max, v);
    const float z = penalise(v, id);
    if (kept) kept[id - begin] = z;
    if (z > best || best_id < 0) best = z, best_id = id;  // ids come in order
  };
  // A thread's numbers come in fours; so many fours are asked for before the first is looked at, and stay in registers for the sum.
  constexpr int kHeld = 8, kHop = 4 * kSampleThreads;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
  const int first = begin + 4 * static_cast<int>(threadIdx.x);
  float v[kHeld][4];
  const auto load = [&](int at) {
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const int id = at + i * kHop;
      if (aligned && id + 4 <= end) {
        const float4 four = __ldcg(reinterpret_cast<const float4*>(logits + id));
        v[i][0] = four.x, v[i][1] = four.y, v[i][2] = four.z, v[i][3] = four.w;
      } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
          if (id + k < end) v[i][k] = logits[id + k];
      }
    }
  };
  const auto each_held = [&](int at, auto f) {
#pragma unroll
    for (int i = 0; i < kHeld; i++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        if (at + i * kHop + k < end) f(at + i * kHop + k, v[i][k]);
  };
#pragma unroll 1
  for (int at = first; at < end; at += kHeld * kHop) load(at), each_held(at, take);
  if (s.raw_max > -INFINITY)
#pragma unroll 1
    for (int at = first; at < end; at += kHeld * kHop) {
      if (end - first > kHeld * kHop) load(at);
      each_held(at, [&](int, float x) { s.raw_sum += __expf(x - s.raw_max); });
    }
  if (best_id >= 0) s.best = rating(best, best_id);
#pragma unroll
  for (int i = 16; i; i /= 2) s = both(s, from_lane(s, i));
  if (lane == 0) sh.warps[warp] = s;
  __syncthreads();
  s = sh.warps[lane % kSampleWarps];
#pragma unroll
  for (int i = kSampleWarps / 2; i; i /= 2) s = both(s, from_lane(s, i));
  if (threadIdx.x == 0) sh.summary = s;
}

__device__ __forceinline__ Summary Sampler::together() const {
  Summary s = {-INFINITY, 0.f, 0, 0};
  if (lane < team.size()) s = *team.of(&sh.summary, lane);
#pragma unroll
  for (int i = kMaxTeam / 2; i; i /= 2) s = both(s, from_lane(s, i));
  return {__shfl_sync(kAll, s.raw_max, 0), __shfl_sync(kAll, s.raw_sum, 0), __shfl_sync(kAll, s.best, 0), __shfl_sync(kAll, s.bad, 0)};
}

}  // namespace exl2nb
