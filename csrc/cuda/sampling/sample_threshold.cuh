// Sampling, second stage: top_k and top_p as thresholds, from a coarse histogram and the few logits of one bin, or by the bits.
#pragma once
#include "cuda/sampling/sample_state.cuh"

namespace exl2nb {

// The largest value v with sum(weight of all values >= v) >= need(sum over all), among values >= floor_value; weight 1 or weight_of.
template <bool COUNT, class Need>
__device__ __forceinline__ float Sampler::threshold(Need need_of) {
  uint32_t (&bins)[3][kBins] = sh.bins[0];
  for (int i = threadIdx.x; i < 3 * kBins; i += kSampleThreads) (&bins[0][0])[i] = 0;
  __syncthreads();
  for (int id = begin + threadIdx.x; id < end; id += kSampleThreads) {
    const float v = y(id);
    if (!(v >= floor_value)) continue;
    const int bin = bin_of(v);
    if constexpr (COUNT) {
      if (bin < kBins - 1) atomicAdd(&bins[0][bin], 1);  // most of a sharp distribution lies in the last bin
    } else {
      add(bins, bin, weight_of(v));
    }
  }
  team.sync();
  if (threadIdx.x == 0) sh.num_listed = 0, sh.bin = -1;  // nobody reads the former ones any more
  uint64_t here[4], before, total;
  gather<COUNT>(bins, here);
  scan(here, before, total);
  const uint64_t need = need_of(total);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (before < need && before + here[i] >= need) sh.bin = 4 * threadIdx.x + i, sh.before = before;
    before += here[i];
  }
  __syncthreads();
  const int hit = sh.bin;
  const uint64_t above = sh.before;
  if (hit >= 0)
    for (int id = begin + threadIdx.x; id < end; id += kSampleThreads) {
      const float v = y(id);
      if (!(v >= floor_value) || bin_of(v) != hit) continue;
      const int at = atomicAdd(&sh.num_listed, 1);
      if (at < kSampleThreads) sh.listed[at] = v;
    }
  team.sync();
  const int lane_listed = lane < team.size() ? *team.of(&sh.num_listed, lane) : 0;
  int many = 0, mine = threadIdx.x, rank = -1;
#pragma unroll
  for (int i = 0; i < kMaxTeam; i++) {
    const int n = __shfl_sync(kAll, lane_listed, i);
    if (rank < 0 && mine < n) rank = i;
    if (rank < 0) mine -= n;
    many += n;
  }
  if (hit < 0 || many > kSampleThreads) return select<COUNT>([&](uint64_t all) { return all - min(COUNT ? need : need_of(all), all); });
  float v = -INFINITY;
  if (static_cast<int>(threadIdx.x) < many) {
    v = team.of(sh.listed, rank)[mine];
    sh.all[threadIdx.x] = v, sh.all_weight[threadIdx.x] = COUNT ? 1 : weight_of(v);
  }
  __syncthreads();
  uint64_t through = above;
  for (int j = 0; j < many; j++) through += sh.all[j] >= v ? sh.all_weight[j] : 0;
  const bool enough = static_cast<int>(threadIdx.x) < many && through >= need;
  const uint64_t best =
      all_threads(static_cast<uint64_t>(enough ? ordered(v) : 0), sh.reduce, [](uint64_t p, uint64_t q) { return max(p, q); });
  return unordered(static_cast<uint32_t>(best));
}

__device__ __forceinline__ void Sampler::add(uint32_t (&bins)[3][kBins], int bin, uint64_t w) {
  constexpr uint32_t part = (1u << kPartBits) - 1;
  const uint32_t w0 = w & part, w1 = w >> kPartBits & part, w2 = static_cast<uint32_t>(w >> 2 * kPartBits);
  if (w0) atomicAdd(&bins[0][bin], w0);
  if (w1) atomicAdd(&bins[1][bin], w1);
  if (w2) atomicAdd(&bins[2][bin], w2);
}

// Bins 4 t to 4 t + 3 of thread t, over all slices.
template <bool COUNT>
__device__ __forceinline__ void Sampler::gather(uint32_t (&bins)[3][kBins], uint64_t (&here)[4]) const {
  here[0] = here[1] = here[2] = here[3] = 0;
#pragma unroll
  for (int i = 0; i < kMaxTeam; i++) {
    if (i >= team.size()) break;
    const uint32_t* other = team.of(&bins[0][0], i);
#pragma unroll
    for (int p = 0; p < (COUNT ? 1 : 3); p++) {
      const uint4 n = reinterpret_cast<const uint4*>(other + p * kBins)[threadIdx.x];
      here[0] += static_cast<uint64_t>(n.x) << kPartBits * p, here[1] += static_cast<uint64_t>(n.y) << kPartBits * p;
      here[2] += static_cast<uint64_t>(n.z) << kPartBits * p, here[3] += static_cast<uint64_t>(n.w) << kPartBits * p;
    }
  }
}

// The sum of all bins before the thread's, and of all.
__device__ __forceinline__ void Sampler::scan(const uint64_t (&here)[4], uint64_t& before, uint64_t& total) const {
  const uint64_t mine = here[0] + here[1] + here[2] + here[3];
  uint64_t through = mine;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const uint64_t other = __shfl_up_sync(kAll, through, i);
    if (lane >= i) through += other;
  }
  __syncthreads();
  if (lane == 31) sh.scan[warp] = through;
  __syncthreads();
  uint64_t warps = lane < kSampleWarps ? sh.scan[lane] : 0;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const uint64_t other = __shfl_up_sync(kAll, warps, i);
    if (lane >= i) warps += other;
  }
  const uint64_t earlier = __shfl_sync(kAll, warps, warp > 0 ? warp - 1 : 0);
  total = __shfl_sync(kAll, warps, 31);
  before = through - mine + (warp > 0 ? earlier : 0);
}

// By the bits, for any number of equal or close values: the smallest v with sum(weight of all values <= v) > limit(sum over all).
template <bool COUNT, class Limit>
__device__ __forceinline__ float Sampler::select(Limit limit_of) {
  uint32_t prefix = 0, mask = 0;
  uint64_t before = 0, limit = 0;
  constexpr int shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
#pragma unroll 1
  for (int round = 0; round < 3; round++) {
    const int shift = round == 0 ? shifts[0] : round == 1 ? shifts[1] : shifts[2];
    const uint32_t low = (1u << (round < 2 ? widths[0] : widths[2])) - 1;
    uint32_t (&bins)[3][kBins] = sh.bins[histogram];
    histogram ^= 1;
    for (int i = threadIdx.x; i < 3 * kBins; i += kSampleThreads) (&bins[0][0])[i] = 0;
    __syncthreads();
    for (int id = begin + threadIdx.x; id < end; id += kSampleThreads) {
      const float v = y(id);
      const uint32_t key = ordered(v), bin = key >> shift & low;
      if ((key & mask) != prefix || !(v >= floor_value)) continue;
      if constexpr (COUNT) {
        atomicAdd(&bins[0][bin], 1);
      } else {
        add(bins, bin, weight_of(v));
      }
    }
    team.sync();
    uint64_t here[4], below, total;
    gather<COUNT>(bins, here);
    scan(here, below, total);
    if (round == 0) limit = min(limit_of(total), total - 1);
    below += before;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (below <= limit && below + here[i] > limit) sh.bin = 4 * threadIdx.x + i, sh.before = below;
      below += here[i];
    }
    __syncthreads();
    prefix |= static_cast<uint32_t>(sh.bin) << shift, mask |= low << shift, before = sh.before;
  }
  team.sync();  // nobody reads this slice's bins any more
  return unordered(prefix);
}

}  // namespace exl2nb
