// Sampling, last stage: rank, log probability and best alternatives of the token; the next step's inputs.
#pragma once
#include "cuda/sampling/sample_state.cuh"

namespace exl2nb {

__device__ __forceinline__ int Sampler::count_above(float value) const {
  int n = 0;
  for (int id = begin + threadIdx.x; id < end; id += kSampleThreads) n += raw(id) > value;
  return static_cast<int>(sum(static_cast<uint64_t>(n)));
}

__device__ __forceinline__ void Sampler::list_top(int n, float log_total) {
  uint64_t last = ~0ull;
  for (int i = 0; i < n; i++) {
    uint64_t best = 0;
    for (int id = begin + threadIdx.x; id < end; id += kSampleThreads) {
      const uint64_t k = rating(raw(id), id);
      if (k < last) best = max(best, k);
    }
    last = all_threads(best, sh.reduce, [](uint64_t p, uint64_t q) { return max(p, q); });
    if (threadIdx.x == 0) sh.top[i] = last;
  }
  team.sync();
  if (team.rank() == 0 && warp == 0) {
    last = ~0ull;
    for (int i = 0; i < n; i++) {
      uint64_t best = 0;
      for (int j = lane; j < n * team.size(); j += 32) {
        const uint64_t k = team.of(sh.top, j / n)[j % n];
        if (k < last) best = max(best, k);
      }
#pragma unroll
      for (int s = 16; s; s /= 2) best = max(best, __shfl_xor_sync(kAll, best, s));
      last = best;
      if (lane == 0) {
        const int id = best ? id_of(best) : -1;
        if (a.top_ids) a.top_ids[r * kMaxTop + i] = id;
        if (a.top_logprobs) a.top_logprobs[r * kMaxTop + i] = id < 0 ? -INFINITY : logits[id] - log_total;
      }
    }
  }
}

__device__ __forceinline__ Sampler::Next Sampler::look_ahead() const {
  Next n;
  const AdvanceArgs& next = a.advance;
  if (a.step) n.step = a.step[r];
  if (next.context_lens) n.context = next.context_lens[r];
  if (next.positions) n.position = next.positions[r] + 1;
  if (next.positions && next.block_table && n.position / kPage < next.max_pages)
    n.slot = next.block_table[static_cast<int64_t>(r) * next.max_pages + n.position / kPage] * kPage + n.position % kPage;
  return n;
}

__device__ __forceinline__ void Sampler::hand_over(const Next& n, int id, int rank, float logprob) const {
  if (a.results) {
    const int4 all = make_int4(id, rank, __float_as_int(logprob), n.step);
    *reinterpret_cast<int4*>(a.results + static_cast<int64_t>(n.step % a.ring) * a.rows + r) = all;
  }
  if (a.step) a.step[r] = n.step + 1;
  a.params[r].counter = row.counter + 1;
  if (a.counts && id >= 0) {
    uint16_t& times = a.counts[static_cast<int64_t>(r) * a.vocab + id];
    if ((times & 0x7fff) != 0x7fff) times++;
  }
  const AdvanceArgs& next = a.advance;
  if (n.context <= 0) return;
  if (next.ids) next.ids[r] = id < 0 ? 0 : id;
  if (next.context_lens) next.context_lens[r] = n.context + 1;
  if (next.positions) next.positions[r] = n.position;
  if (next.positions && next.block_table && next.slots) next.slots[r] = n.slot;
}

}  // namespace exl2nb
