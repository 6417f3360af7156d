// What a team of CTAs holds of its row of logits: the class whose methods stand in the files of the stages.
#pragma once
#include <cooperative_groups.h>

#include "cuda/attention/attention_rows.cuh"
#include "cuda/sampling/sample.h"

namespace exl2nb {

constexpr int kSampleThreads = 512, kSampleWarps = kSampleThreads / 32, kMaxTeam = 8, kBins = 2048, kMaxTop = 20, kPartBits = 14;
constexpr float kBinsPerLogit = 64.f;
constexpr float kWeightUnit = 1099511627776.f;  // 2^40

// Random number `index` of the stream `seed`, 53 bits: sampling/draw.py.
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
__device__ __forceinline__ float unordered(uint32_t key) { return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key); }
// Larger is better: the value, then the lower id.
__device__ __forceinline__ uint64_t rating(float v, int id) { return static_cast<uint64_t>(ordered(v)) << 32 | (0xffffffffu - id); }
__device__ __forceinline__ int id_of(uint64_t rating) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(rating)); }

struct Summary {           // of a slice
  float raw_max, raw_sum;  // sum of exp(raw - raw_max)
  uint64_t best;           // rating of the best penalised logit
  int bad;                 // a NaN
};
__device__ __forceinline__ Summary both(const Summary& p, const Summary& q) {
  const float high = fmaxf(p.raw_max, q.raw_max);
  const float a = p.raw_sum > 0.f ? p.raw_sum * expf(p.raw_max - high) : 0.f,
              b = q.raw_sum > 0.f ? q.raw_sum * expf(q.raw_max - high) : 0.f;
  return {high, a + b, max(p.best, q.best), p.bad | q.bad};
}
__device__ __forceinline__ Summary from_lane(const Summary& s, int mask) {
  return {__shfl_xor_sync(kAll, s.raw_max, mask), __shfl_xor_sync(kAll, s.raw_sum, mask), __shfl_xor_sync(kAll, s.best, mask),
          __shfl_xor_sync(kAll, s.bad, mask)};
}

struct SampleShared {
  uint32_t bins[2][3][kBins];
  uint64_t scan[kSampleWarps];
  uint64_t reduce[kSampleWarps];
  Summary warps[kSampleWarps], summary;
  float listed[kSampleThreads], all[kSampleThreads];  // logits of the bin that was hit: of the slice, of all slices
  uint64_t all_weight[kSampleThreads];
  int num_listed;
  uint64_t weight, top[kMaxTop];
  int token, above, bin;
  float value;
  uint64_t before;
};

struct Sampler {
  const SampleArgs& a;
  SampleShared& sh;
  float* kept;  // penalised logits of the slice, or null where they do not fit
  Team team;
  SampleRow row;
  const float* logits;
  const uint16_t* counts;
  const float* bias;
  int r, begin, end, lane, warp, histogram = 0;
  bool penalised, altered;     // altered: by penalties or a bias
  float highest, floor_value;  // of y = penalised / temperature

  __device__ __forceinline__ Sampler(const SampleArgs& args, SampleShared& shared, float* room) : a(args), sh(shared), kept(room) {
    r = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int per = ((a.vocab + team.size() - 1) / team.size() + 3) / 4 * 4;
    begin = min(team.rank() * per, a.vocab), end = min(begin + per, a.vocab);
    logits = a.logits + r * a.row_stride;
    counts = a.counts ? a.counts + static_cast<int64_t>(r) * a.vocab : nullptr;
    bias = a.bias ? a.bias + static_cast<int64_t>(r) * a.vocab : nullptr;
  }

  __device__ __forceinline__ float penalise(float v, int id) const {
    if (!altered) return v;
    if (penalised) v = counted(v, counts[id]);
    return bias ? __fadd_rn(v, bias[id]) : v;
  }
  __device__ __forceinline__ float counted(float v, unsigned n) const {
    if (!n) return v;
    if (row.repetition_penalty != 1.f) v = v < 0.f ? __fmul_rn(v, row.repetition_penalty) : __fdiv_rn(v, row.repetition_penalty);
    const unsigned times = n & 0x7fffu;
    if (times && row.presence_penalty != 0.f) v = __fsub_rn(v, row.presence_penalty);
    if (times && row.frequency_penalty != 0.f) v = __fsub_rn(v, static_cast<float>(static_cast<double>(row.frequency_penalty) * times));
    return v;
  }
  __device__ __forceinline__ float raw(int id) const { return kept && !altered ? kept[id - begin] : logits[id]; }
  __device__ __forceinline__ float y(int id) const {
    const float z = kept ? kept[id - begin] : penalise(logits[id], id);
    return row.temperature == 1.f ? z : __fdiv_rn(z, row.temperature);
  }
  __device__ __forceinline__ uint64_t weight_of(float v) const { return __float2ull_rn(expf(v - highest) * kWeightUnit); }
  // Whether the cuts leave a token: top_k and top_p as one threshold, min_p as its share of the best.
  __device__ __forceinline__ bool stays(float v) const { return v >= floor_value && (row.min_p <= 0.f || expf(v - highest) >= row.min_p); }

  // --- over the CTA, then over the team; known to all threads ---
  template <class T, class Op>
  __device__ __forceinline__ T all_threads(T v, T* room, Op op) const {
#pragma unroll
    for (int i = 16; i; i /= 2) v = op(v, __shfl_xor_sync(kAll, v, i));
    __syncthreads();
    if (lane == 0) room[warp] = v;
    __syncthreads();
    T total = room[lane % kSampleWarps];
#pragma unroll
    for (int i = kSampleWarps / 2; i; i /= 2) total = op(total, __shfl_xor_sync(kAll, total, i));
    return total;
  }
  __device__ __forceinline__ uint64_t sum(uint64_t v) const {
    return all_threads(v, sh.reduce, [](uint64_t p, uint64_t q) { return p + q; });
  }
  // After team.sync(): the sum of a number of every slice, and of those before this one.
  template <class T>
  __device__ __forceinline__ uint64_t of_team(T* mine, uint64_t* before = nullptr) const {
    const uint64_t n = lane < team.size() ? static_cast<uint64_t>(*team.of(mine, lane)) : 0;
    uint64_t total = n, first = lane < team.rank() ? n : 0;
#pragma unroll
    for (int i = 16; i; i /= 2) total += __shfl_xor_sync(kAll, total, i), first += __shfl_xor_sync(kAll, first, i);
    if (before) *before = first;
    return total;
  }

  // --- first look: largest, sum of exponentials, best id: sample_look.cuh ---
  __device__ __forceinline__ void look();
  __device__ __forceinline__ Summary together() const;

  // --- top_k and top_p: sample_threshold.cuh ---
  template <bool COUNT, class Need>
  __device__ __forceinline__ float threshold(Need need_of);
  __device__ __forceinline__ int bin_of(float v) const {
    return static_cast<int>(fminf((highest - v) * kBinsPerLogit, static_cast<float>(kBins - 1)));
  }
  static __device__ __forceinline__ void add(uint32_t (&bins)[3][kBins], int bin, uint64_t w);
  template <bool COUNT>
  __device__ __forceinline__ void gather(uint32_t (&bins)[3][kBins], uint64_t (&here)[4]) const;
  __device__ __forceinline__ void scan(const uint64_t (&here)[4], uint64_t& before, uint64_t& total) const;
  template <bool COUNT, class Limit>
  __device__ __forceinline__ float select(Limit limit_of);

  // --- the draw: sample_draw.cuh ---
  __device__ __forceinline__ void draw();
  __device__ __forceinline__ void announce(int token, float value) const;

  // --- what is told about it, and what the next step needs: sample_report.cuh ---
  __device__ __forceinline__ int count_above(float value) const;
  __device__ __forceinline__ void list_top(int n, float log_total);
  // What the next step needs to know of this one; only thread 0 of the team asks, early.
  struct Next {
    int step = 0, context = 1, position = 0, slot = -1;
  };
  __device__ __forceinline__ Next look_ahead() const;
  __device__ __forceinline__ void hand_over(const Next& n, int id, int rank, float logprob) const;

  __device__ __forceinline__ void run();
};

}  // namespace exl2nb
