// One token from one row of logits, by a team of CTAs (a cluster where the hardware has them, else one CTA).
//
// Each CTA owns a slice of the vocabulary, penalised logits in shared memory where they fit. Thresholds of top_k and top_p are found by
// radix selection on the bits of the floats: three histograms of 11, 11 and 10 bits, of counts or of weights. Weights are integers, exp(y -
// max) * 2^40, so that sums do not depend on their order and a draw is exact: the first id, in order, at which the cumulative weight passes
// floor(u * total). What is summed in floats (log probabilities) has a fixed order. Bytes: the logits once (twice with penalties), the
// counts once with penalties.
#pragma once
#include <cooperative_groups.h>

#include "attention_rows.cuh"
#include "sample.h"

namespace exl2nb {

constexpr int kThreads = 1024, kSampleWarps = kThreads / 32, kMaxTeam = 8, kBins = 2048, kMaxTop = 20, kPartBits = 14;
constexpr float kWeightUnit = 1099511627776.f;  // 2^40

// Random number `index` of the stream `seed`, 53 bits: sampling/rng.py.
__device__ __forceinline__ uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
__device__ __forceinline__ uint64_t random_bits(uint64_t seed, uint64_t index) {
  return mix(mix(seed) + (index + 1) * 0x9E3779B97F4A7C15ull) >> 11;
}

// The CTAs of a row.
struct Team {
#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ int rank() const { return static_cast<int>(cooperative_groups::this_cluster().block_rank()); }
  __device__ __forceinline__ int size() const { return static_cast<int>(cooperative_groups::this_cluster().num_blocks()); }
  __device__ __forceinline__ void sync() const { cooperative_groups::this_cluster().sync(); }
  template <class T>
  __device__ __forceinline__ T* of(T* mine, int rank) const {
    return cooperative_groups::this_cluster().map_shared_rank(mine, rank);
  }
#else
  __device__ __forceinline__ int rank() const { return 0; }
  __device__ __forceinline__ int size() const { return 1; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  template <class T>
  __device__ __forceinline__ T* of(T* mine, int) const {
    return mine;
  }
#endif
};

// Floats in an order that integers compare.
__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t u = __float_as_uint(v + 0.f);  // -0 is 0
  return u ^ (u >> 31 ? 0xffffffffu : 0x80000000u);
}
// Larger is better: the value, then the lower id.
__device__ __forceinline__ uint64_t rating(float v, int id) { return static_cast<uint64_t>(ordered(v)) << 32 | (0xffffffffu - id); }
__device__ __forceinline__ int id_of(uint64_t rating) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(rating)); }

struct Summary {           // of a slice
  float raw_max, raw_sum;  // sum of exp(raw - raw_max)
  uint64_t best;           // rating of the best penalised logit
  int bad;                 // a NaN
};

struct SampleShared {
  uint32_t bins[2][3][kBins];
  uint64_t scan[kSampleWarps];
  uint64_t reduce[kSampleWarps];
  float reduce_f[kSampleWarps];
  Summary summary;
  uint64_t weight, top[kMaxTop];
  int token, above, bin, found;
  float value;
  uint64_t before, all;
};

struct Sampler {
  const SampleArgs& a;
  SampleShared& sh;
  float* kept;  // penalised logits of the slice, or null where they do not fit
  Team team;
  SampleRow row;
  const float* logits;
  const uint16_t* counts;
  int r, begin, end, lane, warp, histogram = 0;
  bool penalised;
  float highest, floor_value;  // of y = penalised / temperature

  __device__ __forceinline__ Sampler(const SampleArgs& args, SampleShared& shared, float* room) : a(args), sh(shared), kept(room) {
    r = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int per = ((a.vocab + team.size() - 1) / team.size() + 3) / 4 * 4;
    begin = min(team.rank() * per, a.vocab), end = min(begin + per, a.vocab);
    logits = a.logits + r * a.row_stride;
    counts = a.counts ? a.counts + static_cast<int64_t>(r) * a.vocab : nullptr;
  }

  __device__ __forceinline__ float penalise(float v, int id) const {
    if (!penalised) return v;
    const unsigned n = counts[id];
    if (!n) return v;
    if (row.repetition_penalty != 1.f) v = v < 0.f ? __fmul_rn(v, row.repetition_penalty) : __fdiv_rn(v, row.repetition_penalty);
    const unsigned times = n & 0x7fffu;
    if (times && row.presence_penalty != 0.f) v = __fsub_rn(v, row.presence_penalty);
    if (times && row.frequency_penalty != 0.f) v = __fsub_rn(v, static_cast<float>(static_cast<double>(row.frequency_penalty) * times));
    return v;
  }
  __device__ __forceinline__ float raw(int id) const { return kept && !penalised ? kept[id - begin] : logits[id]; }
  __device__ __forceinline__ float y(int id) const {
    const float z = kept ? kept[id - begin] : penalise(logits[id], id);
    return row.temperature == 1.f ? z : __fdiv_rn(z, row.temperature);
  }
  __device__ __forceinline__ uint64_t weight_of(float v) const { return __float2ull_rn(expf(v - highest) * kWeightUnit); }
  // Whether the cuts leave a token: top_k and top_p as one threshold, min_p as its share of the best.
  __device__ __forceinline__ bool stays(float v) const { return v >= floor_value && (row.min_p <= 0.f || expf(v - highest) >= row.min_p); }

  // --- sums over the CTA, known to all its threads ---
  template <class T, class Op>
  __device__ __forceinline__ T all_threads(T v, T* room, Op op) const {
#pragma unroll
    for (int i = 16; i; i /= 2) v = op(v, __shfl_xor_sync(kAll, v, i));
    __syncthreads();
    if (lane == 0) room[warp] = v;
    __syncthreads();
    T total = room[lane];
#pragma unroll
    for (int i = 16; i; i /= 2) total = op(total, __shfl_xor_sync(kAll, total, i));
    return total;
  }
  __device__ __forceinline__ uint64_t sum(uint64_t v) const {
    return all_threads(v, sh.reduce, [](uint64_t p, uint64_t q) { return p + q; });
  }

  // --- first look: largest, sum of exponentials, best id ---
  __device__ __forceinline__ void look() {
    const float none = -INFINITY;
    float high = none;
    uint64_t best = 0;
    bool bad = false;
    const auto take = [&](int id, float v) {
      bad |= isnan(v);
      high = fmaxf(high, v);
      const float z = penalise(v, id);
      if (kept) kept[id - begin] = z;
      best = max(best, rating(z, id));
    };
    if (reinterpret_cast<uintptr_t>(logits) % 16 == 0) {
      for (int id = begin + 4 * threadIdx.x; id < end; id += 4 * kThreads) {
        if (id + 4 <= end) {
          const float4 v = *reinterpret_cast<const float4*>(logits + id);
          take(id, v.x), take(id + 1, v.y), take(id + 2, v.z), take(id + 3, v.w);
        } else {
          for (int i = id; i < end; i++) take(i, logits[i]);
        }
      }
    } else {
      for (int id = begin + threadIdx.x; id < end; id += kThreads) take(id, logits[id]);
    }
    high = all_threads(high, sh.reduce_f, [](float p, float q) { return fmaxf(p, q); });
    best = all_threads(best, sh.reduce, [](uint64_t p, uint64_t q) { return max(p, q); });
    float total = 0.f;
    if (high > none)
      for (int id = begin + threadIdx.x; id < end; id += kThreads) total += expf(raw(id) - high);
    total = all_threads(total, sh.reduce_f, [](float p, float q) { return p + q; });
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0) sh.summary = {high, total, best, bad};
  }
  __device__ __forceinline__ Summary together() const {
    Summary all = {-INFINITY, 0.f, 0, 0};
    for (int i = 0; i < team.size(); i++) {
      const Summary& s = *team.of(&sh.summary, i);
      all.raw_max = fmaxf(all.raw_max, s.raw_max), all.best = max(all.best, s.best), all.bad |= s.bad;
    }
    for (int i = 0; i < team.size(); i++) {
      const Summary& s = *team.of(&sh.summary, i);
      if (s.raw_sum > 0.f) all.raw_sum += s.raw_sum * expf(s.raw_max - all.raw_max);
    }
    return all;
  }

  // --- thresholds ---
  // The smallest value v with sum(weight of all values <= v) > limit(total), among values >= floor_value; weight 1 or weight_of.
  template <bool COUNT, class Limit>
  __device__ __forceinline__ float select(Limit limit_of) {
    uint32_t prefix = 0, mask = 0;
    uint64_t before = 0, limit = 0;
    constexpr int shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
#pragma unroll 1
    for (int round = 0; round < 3; round++) {
      const int shift = round == 0 ? shifts[0] : round == 1 ? shifts[1] : shifts[2];
      const uint32_t low = (1u << (round < 2 ? widths[0] : widths[2])) - 1;
      uint32_t (&bins)[3][kBins] = sh.bins[histogram];
      histogram ^= 1;
      for (int i = threadIdx.x; i < 3 * kBins; i += kThreads) (&bins[0][0])[i] = 0;
      __syncthreads();
      for (int id = begin + threadIdx.x; id < end; id += kThreads) {
        const float v = y(id);
        const uint32_t key = ordered(v), bin = key >> shift & low;
        if ((key & mask) != prefix || !(v >= floor_value)) continue;
        if constexpr (COUNT) {
          atomicAdd(&bins[0][bin], 1);
        } else {
          const uint64_t w = weight_of(v);
          if (!w) continue;
          constexpr uint32_t part = (1u << kPartBits) - 1;
          const uint32_t w0 = w & part, w1 = w >> kPartBits & part, w2 = static_cast<uint32_t>(w >> 2 * kPartBits);
          if (w0) atomicAdd(&bins[0][bin], w0);
          if (w1) atomicAdd(&bins[1][bin], w1);
          if (w2) atomicAdd(&bins[2][bin], w2);
        }
      }
      team.sync();
      uint64_t here[2] = {0, 0};  // bins 2 t and 2 t + 1, of all slices
      for (int i = 0; i < team.size(); i++) {
        const uint32_t* other = team.of(&bins[0][0], i);
#pragma unroll
        for (int p = 0; p < (COUNT ? 1 : 3); p++) {
          const uint2 n = reinterpret_cast<const uint2*>(other + p * kBins)[threadIdx.x];
          here[0] += static_cast<uint64_t>(n.x) << kPartBits * p, here[1] += static_cast<uint64_t>(n.y) << kPartBits * p;
        }
      }
      uint64_t through = here[0] + here[1];
#pragma unroll
      for (int i = 1; i < 32; i *= 2) {
        const uint64_t other = __shfl_up_sync(kAll, through, i);
        if (lane >= i) through += other;
      }
      __syncthreads();
      if (lane == 31) sh.scan[warp] = through;
      __syncthreads();
      uint64_t warps = sh.scan[lane];
#pragma unroll
      for (int i = 1; i < 32; i *= 2) {
        const uint64_t other = __shfl_up_sync(kAll, warps, i);
        if (lane >= i) warps += other;
      }
      if (warp) through += __shfl_sync(kAll, warps, warp - 1);
      const uint64_t total = __shfl_sync(kAll, warps, 31);
      if (round == 0) limit = min(limit_of(total), total - 1);
      const uint64_t first = before + through - here[0] - here[1];  // all below this thread's bins
      if (first <= limit && before + through > limit) {
        const bool second = first + here[0] <= limit;
        sh.bin = 2 * threadIdx.x + second, sh.before = second ? first + here[0] : first;
      }
      __syncthreads();
      prefix |= static_cast<uint32_t>(sh.bin) << shift, mask |= low << shift, before = sh.before;
    }
    const uint32_t u = prefix >> 31 ? prefix ^ 0x80000000u : ~prefix;
    return __uint_as_float(u);
  }

  // --- the draw ---
  __device__ __forceinline__ void draw() {
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
    uint64_t before = 0, total = 0;
    for (int i = 0; i < team.size(); i++) {
      const uint64_t w = *team.of(&sh.weight, i);
      before += i < team.rank() ? w : 0, total += w;
    }
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
  __device__ __forceinline__ void announce(int token, float value) const {
    for (int i = 0; i < team.size(); i++) *team.of(&sh.token, i) = token, *team.of(&sh.value, i) = value;
  }

  // --- what is told about it ---
  __device__ __forceinline__ int count_above(float value) const {
    int n = 0;
    for (int id = begin + threadIdx.x; id < end; id += kThreads) n += raw(id) > value;
    return static_cast<int>(sum(static_cast<uint64_t>(n)));
  }
  __device__ __forceinline__ void list_top(int n, float log_total) {
    uint64_t last = ~0ull;
    for (int i = 0; i < n; i++) {
      uint64_t best = 0;
      for (int id = begin + threadIdx.x; id < end; id += kThreads) {
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
  __device__ __forceinline__ void hand_over(int id, int rank, float logprob) const {
    const int step = a.step ? a.step[r] : 0, token = id < 0 ? 0 : id;
    if (a.results) {
      const int4 all = make_int4(id, rank, __float_as_int(logprob), step);
      *reinterpret_cast<int4*>(a.results + static_cast<int64_t>(step % a.ring) * a.rows + r) = all;
    }
    if (a.step) a.step[r] = step + 1;
    a.params[r].counter = row.counter + 1;
    if (a.counts && id >= 0) {
      uint16_t& n = a.counts[static_cast<int64_t>(r) * a.vocab + id];
      if ((n & 0x7fff) != 0x7fff) n++;
    }
    const AdvanceArgs& next = a.advance;
    if (next.context_lens && next.context_lens[r] <= 0) return;
    if (next.ids) next.ids[r] = token;
    if (next.context_lens) next.context_lens[r]++;
    if (!next.positions) return;
    const int position = ++next.positions[r];
    if (next.slots && next.block_table)
      next.slots[r] = position / kPage < next.max_pages
                          ? next.block_table[static_cast<int64_t>(r) * next.max_pages + position / kPage] * kPage + position % kPage
                          : -1;
  }

  __device__ __forceinline__ void run() {
    row = a.params[r];
    penalised = counts && (row.repetition_penalty != 1.f || row.presence_penalty != 0.f || row.frequency_penalty != 0.f);
    look();
    team.sync();
    const Summary all = together();
    const bool bad = all.bad || !isfinite(all.raw_max);
    const float log_total = all.raw_max + logf(all.raw_sum);
    int token = id_of(all.best), rank = 1;
    float value = bad ? 0.f : logits[token];
    const bool drawn = row.temperature != 0.f;
    if (!bad && drawn) {
      const float best = penalise(value, token);
      highest = row.temperature == 1.f ? best : __fdiv_rn(best, row.temperature), floor_value = -INFINITY;
      if (row.top_k > 0 && row.top_k < a.vocab) floor_value = select<true>([&](uint64_t n) { return n - row.top_k; });
      if (row.top_p < 1.f)
        floor_value = fmaxf(floor_value, select<false>([&](uint64_t total) {
                              return static_cast<uint64_t>((1.0 - static_cast<double>(row.top_p)) * static_cast<double>(total));
                            }));
      draw();
      __syncwarp();
      team.sync();
      token = sh.token, value = sh.value;
    }
    if (!bad && (drawn || penalised)) {
      const int above = count_above(value);
      if (threadIdx.x == 0) sh.above = above;
      team.sync();
      rank = 1;
      for (int i = 0; i < team.size(); i++) rank += *team.of(&sh.above, i);
    }
    const int top = bad ? 0 : min(row.top, min(kMaxTop, a.vocab));
    if (top > 0 && (a.top_ids || a.top_logprobs)) list_top(top, log_total);
    team.sync();  // nobody leaves while others read its memory; nobody reads counts any more
    if (team.rank() == 0 && threadIdx.x == 0) hand_over(bad ? -1 : token, rank, bad ? NAN : value - log_total);
  }
};

__global__ void __launch_bounds__(kThreads) sample_rows(const __grid_constant__ SampleArgs args, bool keep) {
  extern __shared__ __align__(16) uint8_t room[];
  let_successor_start();
  wait_for_predecessor();
  SampleShared& shared = *reinterpret_cast<SampleShared*>(room);
  Sampler sampler(args, shared, keep ? reinterpret_cast<float*>(room + (sizeof(SampleShared) + 15) / 16 * 16) : nullptr);
  sampler.run();
}

}  // namespace exl2nb
