// Sampling, third stage: the token at which the cumulative weight passes the random number.
#pragma once
#include "cuda/sampling/sample_state.cuh"

namespace exl2nb {

__device__ __forceinline__ void Sampler::draw() {
  const int per = ((end - begin + kSampleWarps - 1) / kSampleWarps + 31) / 32 * 32;
  const int first = begin + warp * per, last = min(first + per, end);
  uint64_t mine = 0;
  for (int id = first + lane; id < last; id += 32) {
    const float v = y(id);
    if (stays(v)) mine += weight_of(v);
  }
#pragma unroll
  for (int i = 16; i; i /= 2) mine += __shfl_xor_sync(kAll, mine, i);
  const uint64_t slice = sum(lane == 0 ? mine : 0);
  if (lane == 0) sh.scan[warp] = mine;
  if (threadIdx.x == 0) sh.weight = slice;
  team.sync();
  uint64_t before;
  const uint64_t total = of_team(&sh.weight, &before);
  const uint64_t target = __umul64hi(random_bits(row.seed, row.counter) << 11, total);
  for (int w = 0; w < warp; w++) before += sh.scan[w];
  if (before > target || before + mine <= target) return;  // another warp's
  for (int base = first; base < last; base += 32) {
    const int id = base + lane;
    const float v = id < last ? y(id) : -INFINITY;
    uint64_t through = id < last && stays(v) ? weight_of(v) : 0;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const uint64_t other = __shfl_up_sync(kAll, through, i);
      if (lane >= i) through += other;
    }
    const unsigned passed = __ballot_sync(kAll, before + through > target);
    if (passed) {
      if (lane == __ffs(passed) - 1) announce(id, logits[id]);
      return;
    }
    before += __shfl_sync(kAll, through, 31);
  }
}

__device__ __forceinline__ void Sampler::announce(int token, float value) const {
  for (int i = 0; i < team.size(); i++) *team.of(&sh.token, i) = token, *team.of(&sh.value, i) = value;
}

}  // namespace exl2nb
