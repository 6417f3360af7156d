// One token from one row of logits, by a team of CTAs (a cluster where the hardware has them, else one CTA).
//
// Each CTA owns a slice of the vocabulary, penalised logits in shared memory where they fit. Thresholds of top_k and top_p are found from a
// coarse histogram, of counts or of weights, and the few logits of the bin that is hit; where those are many, by radix selection on the
// bits of the floats (11, 11 and 10 of them). Weights are integers, exp(y - max) * 2^40, so that sums do not depend on their order and a
// draw is exact: the first id, in order, at which the cumulative weight passes floor(u * total). What is summed in floats (log
// probabilities) has a fixed order. Bytes: the logits once (twice with penalties or a bias), counts and bias once.
#pragma once
#include "cuda/sampling/sample_draw.cuh"
#include "cuda/sampling/sample_look.cuh"
#include "cuda/sampling/sample_report.cuh"
#include "cuda/sampling/sample_threshold.cuh"

namespace exl2nb {

__device__ __forceinline__ void Sampler::run() {
  const bool speaks = team.rank() == 0 && threadIdx.x == 0;
  // What the step before has written: its last kernel ended before this step's first one let others start.
  Next next;
  if (speaks) next = look_ahead();
  row = a.params[r];
  pdl_wait();
  penalised = counts && (row.repetition_penalty != 1.f || row.presence_penalty != 0.f || row.frequency_penalty != 0.f);
  altered = penalised || bias;
  look();
  team.sync();
  const Summary all = together();
  const bool bad = all.bad || !isfinite(all.raw_max);
  const float log_total = all.raw_max + logf(all.raw_sum);
  int token = id_of(all.best), rank = 1;
  float value = bad ? 0.f : altered ? logits[token] : unordered(static_cast<uint32_t>(all.best >> 32));
  const bool drawn = row.temperature != 0.f;
  if (!bad && drawn) {
    const float best = penalise(value, token);
    highest = row.temperature == 1.f ? best : __fdiv_rn(best, row.temperature), floor_value = -INFINITY;
    if (row.top_k > 0 && row.top_k < a.vocab) floor_value = threshold<true>([&](uint64_t) { return static_cast<uint64_t>(row.top_k); });
    if (row.top_p < 1.f) {
      const double cut = 1.0 - static_cast<double>(row.top_p);
      floor_value = fmaxf(floor_value, threshold<false>([&](uint64_t total) {
                            return total - min(static_cast<uint64_t>(cut * static_cast<double>(total)), total - 1);
                          }));
    }
    draw();
    __syncwarp();
    team.sync();
    token = sh.token, value = sh.value;
  }
  if (!bad && (drawn || altered)) {
    const int above = count_above(value);
    if (threadIdx.x == 0) sh.above = above;
    team.sync();
    rank = 1 + static_cast<int>(of_team(&sh.above));
  }
  const int top = bad ? 0 : min(row.top, min(kMaxTop, a.vocab));
  if (top > 0 && (a.top_ids || a.top_logprobs)) list_top(top, log_total);
  if (speaks) hand_over(next, bad ? -1 : token, rank, bad ? NAN : value - log_total);  // nobody has read counts since the last sync()
  team.sync();                                                                         // nobody leaves while others read its memory
}

__global__ void __launch_bounds__(kSampleThreads, 2) sample_rows(const __grid_constant__ SampleArgs args, bool keep) {
  extern __shared__ __align__(16) uint8_t room[];
  pdl_launch_dependents();
  SampleShared& shared = *reinterpret_cast<SampleShared*>(room);
  Sampler sampler(args, shared, keep ? reinterpret_cast<float*>(room + (sizeof(SampleShared) + 15) / 16 * 16) : nullptr);
  sampler.run();
}

}  // namespace exl2nb
