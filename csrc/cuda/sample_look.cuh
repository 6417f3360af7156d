// Sampling, first stage: one pass over the slice for what every row needs, and the team's results together.
#pragma once
#include "sample_state.cuh"

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
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
  if (kept && aligned) {  // all of them asked for before the first is looked at
    each([&](int id, int n) {
      if (n == 4) copy16<true>(kept + (id - begin), logits + id);
    });
    async_commit(), async_wait<0>();
  }
  each([&](int id, int n) {
    if (aligned && n == 4) {
      const float4 v = *reinterpret_cast<const float4*>(kept ? kept + (id - begin) : logits + id);
      take(id, v.x), take(id + 1, v.y), take(id + 2, v.z), take(id + 3, v.w);
    } else {
      for (int i = 0; i < n; i++) take(id + i, logits[id + i]);
    }
  });
  if (s.raw_max > -INFINITY)
    each([&](int id, int n) {
      for (int i = 0; i < n; i++) s.raw_sum += __expf(raw(id + i) - s.raw_max);
    });
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
