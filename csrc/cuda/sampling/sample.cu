// Draws one token from each row of logits.
//
// A row belongs to a cluster of 8 CTAs (one CTA before sm_90 and for small vocabularies); a CTA owns a slice of the vocabulary and keeps
// its penalised logits in shared memory if they fit. y = penalised logit / temperature.
//   1. Scan: largest raw logit and sum of exponentials, best penalised logit, NaN check. One pass.
//   2. Thresholds of top_k and top_p: histogram of y over the cluster (counts or weights), then the exact value among the logits of the
//      bin that is hit; radix selection on the bits of the floats (11, 11 and 10) if these are too many.
//   3. Draw: the first id, in order, at which the cumulative weight exceeds floor(u * total), u from uniform(seed, counter).
//   4. Report: rank, log probability, alternatives; the next step's inputs.
// Weights are integers, exp(y - max) * 2^40, so sums do not depend on their order and a draw is exact. Float sums (log probabilities) have
// a fixed order. A row's result does not depend on other rows. Bytes: the logits once, once more for each stage if they do not fit; counts
// and bias once. Limit: 2^17 logits per CTA.
#include <cmath>

#include "cuda/attention/cache_format.cuh"
#include "cuda/runtime/pdl.cuh"
#include "cuda/sampling/sample.h"

namespace exl2nb {

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
struct Cluster {
#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ int rank() const { return static_cast<int>(__clusterRelativeBlockRank()); }
  __device__ __forceinline__ int size() const { return static_cast<int>(__clusterSizeInBlocks()); }
  __device__ __forceinline__ void sync() const {
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
  }
  template <class T>
  __device__ __forceinline__ T* of(T* mine, int rank) const {
    return static_cast<T*>(__cluster_map_shared_rank(mine, rank));
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

struct Sampler {
  const SampleArgs& a;
  SampleShared& sh;
  float* kept;  // penalised logits of the slice, or null where they do not fit
  Cluster cluster;
  SampleRow row;
  const float* logits;
  const uint16_t* counts;
  const float* bias;
  int r, begin, end, columns, lane, warp, histogram = 0;
  bool penalised, altered;     // altered: by penalties, a bias or columns that are never drawn
  float highest, floor_value;  // of y = penalised / temperature

  __device__ __forceinline__ Sampler(const SampleArgs& args, SampleShared& shared, float* room) : a(args), sh(shared), kept(room) {
    r = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int per = ((a.vocab + cluster.size() - 1) / cluster.size() + 3) / 4 * 4;
    begin = min(cluster.rank() * per, a.vocab), end = min(begin + per, a.vocab);
    logits = a.logits + r * a.row_stride;
    counts = a.counts ? a.counts + static_cast<int64_t>(r) * a.vocab : nullptr;
    bias = a.bias ? a.bias + static_cast<int64_t>(r) * a.vocab : nullptr;
  }

  __device__ __forceinline__ float penalise(float v, int id) const {
    if (!altered) return v;
    if (id >= columns) return -INFINITY;
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
  __device__ __forceinline__ float heated(float z) const { return row.temperature == 1.f ? z : __fdiv_rn(z, row.temperature); }
  __device__ __forceinline__ float y(int id) const { return heated(kept ? kept[id - begin] : penalise(logits[id], id)); }
  __device__ __forceinline__ uint64_t weight_of(float v) const { return __float2ull_rn(expf(v - highest) * kWeightUnit); }
  // Whether the cuts leave a token: top_k and top_p as one threshold, min_p as its share of the best.
  __device__ __forceinline__ bool stays(float v) const { return v >= floor_value && (row.min_p <= 0.f || expf(v - highest) >= row.min_p); }

  // --- over the CTA, then over the cluster; known to all threads ---
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
  // After cluster.sync(): the sum of a number of every slice, and of those before this one.
  template <class T>
  __device__ __forceinline__ uint64_t cluster_sum(T* mine, uint64_t* before = nullptr) const {
    const uint64_t n = lane < cluster.size() ? static_cast<uint64_t>(*cluster.of(mine, lane)) : 0;
    if (before) *before = warp_sum(lane < cluster.rank() ? n : 0);
    return warp_sum(n);
  }

  // ---------------------------------------------------------------- 1. scan
  // Over the slice. A thread holds kHeld vectors of four logits in registers: loads in flight, and the second loop needs no reload.
  __device__ __forceinline__ void read_logits() {
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
    // A thread's numbers come in fours; so many fours are loaded before the first is used, and stay in registers for the sum.
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
  __device__ __forceinline__ Summary together() const {
    Summary s = {-INFINITY, 0.f, 0, 0};
    if (lane < cluster.size()) s = *cluster.of(&sh.summary, lane);
#pragma unroll
    for (int i = kMaxCluster / 2; i; i /= 2) s = both(s, from_lane(s, i));
    return {__shfl_sync(kAll, s.raw_max, 0), __shfl_sync(kAll, s.raw_sum, 0), __shfl_sync(kAll, s.best, 0), __shfl_sync(kAll, s.bad, 0)};
  }

  // ---------------------------------------------------------------- 2. thresholds
  __device__ __forceinline__ int bin_of(float v) const {
    return static_cast<int>(fminf((highest - v) * kBinsPerLogit, static_cast<float>(kBins - 1)));
  }
  // The largest value v with sum(weight of all values >= v) >= need(sum over all), among values >= floor_value; weight 1 or weight_of.
  template <bool COUNT, class Need>
  __device__ __forceinline__ float threshold(Need need_of) {
    uint32_t (&bins)[3][kBins] = sh.bins[0];
    for (int i = threadIdx.x; i < 3 * kBins; i += kSampleThreads) (&bins[0][0])[i] = 0;
    __syncthreads();
    for (int id = begin + threadIdx.x; id < end; id += kSampleThreads) {
      const float v = y(id);
      if (!(v >= floor_value)) continue;
      const int bin = bin_of(v);
      if constexpr (COUNT) {
        if (bin < kBins - 1) atomicAdd(&bins[0][bin], 1);  // most of a sharp distribution falls into the last bin
      } else {
        add(bins, bin, weight_of(v));
      }
    }
    cluster.sync();
    if (threadIdx.x == 0) sh.num_listed = 0, sh.bin = -1;  // all CTAs have read the previous values
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
    cluster.sync();
    const int lane_listed = lane < cluster.size() ? *cluster.of(&sh.num_listed, lane) : 0;
    int many = 0, mine = threadIdx.x, rank = -1;
#pragma unroll
    for (int i = 0; i < kMaxCluster; i++) {
      const int n = __shfl_sync(kAll, lane_listed, i);
      if (rank < 0 && mine < n) rank = i;
      if (rank < 0) mine -= n;
      many += n;
    }
    if (hit < 0 || many > kSampleThreads) return select<COUNT>([&](uint64_t all) { return all - min(COUNT ? need : need_of(all), all); });
    float v = -INFINITY;
    if (static_cast<int>(threadIdx.x) < many) {
      v = cluster.of(sh.listed, rank)[mine];
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
  static __device__ __forceinline__ void add(uint32_t (&bins)[3][kBins], int bin, uint64_t w) {
    constexpr uint32_t part = (1u << kPartBits) - 1;
    const uint32_t w0 = w & part, w1 = w >> kPartBits & part, w2 = static_cast<uint32_t>(w >> 2 * kPartBits);
    if (w0) atomicAdd(&bins[0][bin], w0);
    if (w1) atomicAdd(&bins[1][bin], w1);
    if (w2) atomicAdd(&bins[2][bin], w2);
  }
  // Bins 4 t to 4 t + 3 of thread t, over all slices.
  template <bool COUNT>
  __device__ __forceinline__ void gather(uint32_t (&bins)[3][kBins], uint64_t (&here)[4]) const {
    here[0] = here[1] = here[2] = here[3] = 0;
#pragma unroll
    for (int i = 0; i < kMaxCluster; i++) {
      if (i >= cluster.size()) break;
      const uint32_t* other = cluster.of(&bins[0][0], i);
#pragma unroll
      for (int p = 0; p < (COUNT ? 1 : 3); p++) {
        const uint4 n = reinterpret_cast<const uint4*>(other + p * kBins)[threadIdx.x];
        here[0] += static_cast<uint64_t>(n.x) << kPartBits * p, here[1] += static_cast<uint64_t>(n.y) << kPartBits * p;
        here[2] += static_cast<uint64_t>(n.z) << kPartBits * p, here[3] += static_cast<uint64_t>(n.w) << kPartBits * p;
      }
    }
  }
  // The sum of all bins before the thread's, and of all.
  __device__ __forceinline__ void scan(const uint64_t (&here)[4], uint64_t& before, uint64_t& total) const {
    const uint64_t mine = here[0] + here[1] + here[2] + here[3];
    const uint64_t through = warp_prefix_sum(mine);
    __syncthreads();
    if (lane == 31) sh.scan[warp] = through;
    __syncthreads();
    const uint64_t warps = warp_prefix_sum(lane < kSampleWarps ? sh.scan[lane] : 0);
    const uint64_t earlier = __shfl_sync(kAll, warps, warp > 0 ? warp - 1 : 0);
    total = __shfl_sync(kAll, warps, 31);
    before = through - mine + (warp > 0 ? earlier : 0);
  }
  // By the bits, for any number of equal or close values: the smallest v with sum(weight of all values <= v) > limit(sum over all).
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
      cluster.sync();
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
    cluster.sync();  // no CTA reads this slice's bins any more
    return unordered(prefix);
  }

  // ---------------------------------------------------------------- 3. draw
  __device__ __forceinline__ void draw() {
    const int per = ((end - begin + kSampleWarps - 1) / kSampleWarps + 31) / 32 * 32;
    const int first = begin + warp * per, last = min(first + per, end);
    uint64_t mine = 0;
    for (int id = first + lane; id < last; id += 32) {
      const float v = y(id);
      if (stays(v)) mine += weight_of(v);
    }
    mine = warp_sum(mine);
    const uint64_t slice = sum(lane == 0 ? mine : 0);
    if (lane == 0) sh.scan[warp] = mine;
    if (threadIdx.x == 0) sh.weight = slice;
    cluster.sync();
    uint64_t before;
    const uint64_t total = cluster_sum(&sh.weight, &before);
    const uint64_t target = __umul64hi(random_bits(row.seed, row.counter) << 11, total);
    for (int w = 0; w < warp; w++) before += sh.scan[w];
    if (before > target || before + mine <= target) return;  // another warp's
    for (int base = first; base < last; base += 32) {
      const int id = base + lane;
      const float v = id < last ? y(id) : -INFINITY;
      const uint64_t through = warp_prefix_sum(id < last && stays(v) ? weight_of(v) : 0);
      const unsigned passed = __ballot_sync(kAll, before + through > target);
      if (passed) {
        if (lane == __ffs(passed) - 1) publish(id, logits[id]);
        return;
      }
      before += __shfl_sync(kAll, through, 31);
    }
  }
  __device__ __forceinline__ void publish(int token, float value) const {
    for (int i = 0; i < cluster.size(); i++) *cluster.of(&sh.token, i) = token, *cluster.of(&sh.value, i) = value;
  }

  // ---------------------------------------------------------------- 4. report
  __device__ __forceinline__ int count_above(float value) const {
    int n = 0;
    for (int id = begin + threadIdx.x; id < end; id += kSampleThreads) n += raw(id) > value;
    return static_cast<int>(sum(static_cast<uint64_t>(n)));
  }
  __device__ __forceinline__ void list_top(int n, float log_total) {
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
    cluster.sync();
    if (cluster.rank() == 0 && warp == 0) {
      last = ~0ull;
      for (int i = 0; i < n; i++) {
        uint64_t best = 0;
        for (int j = lane; j < n * cluster.size(); j += 32) {
          const uint64_t k = cluster.of(sh.top, j / n)[j % n];
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
  // State of the next step, read early by thread 0 of the cluster.
  struct Next {
    int step = 0, context = 1, position = 0, slot = -1;
  };
  __device__ __forceinline__ Next next_inputs() const {
    Next n;
    const AdvanceArgs& next = a.advance;
    if (a.step) n.step = a.step[r];
    if (next.context_lens) n.context = next.context_lens[r];
    if (next.positions) n.position = next.positions[r] + 1;
    if (next.positions && next.block_table && n.position / kPage < next.max_pages)
      n.slot = next.block_table[static_cast<int64_t>(r) * next.max_pages + n.position / kPage] * kPage + n.position % kPage;
    return n;
  }
  __device__ __forceinline__ void hand_over(const Next& n, int id, int rank, float logprob) const {
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

  __device__ __forceinline__ void run() {
    const bool leader = cluster.rank() == 0 && threadIdx.x == 0;
    // What the step before has written: its last kernel ended before this step's first one let others start.
    Next next;
    if (leader) next = next_inputs();
    row = a.params[r];
    pdl_wait();
    penalised = counts && (row.repetition_penalty != 1.f || row.presence_penalty != 0.f || row.frequency_penalty != 0.f);
    columns = row.columns ? min(static_cast<int>(row.columns), a.vocab) : a.vocab;
    altered = penalised || bias || columns < a.vocab;
    read_logits();
    cluster.sync();
    const Summary all = together();
    const bool bad = all.bad || !isfinite(all.raw_max);
    const float log_total = all.raw_max + logf(all.raw_sum);
    int token = id_of(all.best), rank = 1;
    float value = bad ? 0.f : altered ? logits[token] : unordered(static_cast<uint32_t>(all.best >> 32));
    const bool drawn = !bad && row.temperature != 0.f && isfinite(highest = heated(penalise(value, token)));  // else quotients overflow
    if (drawn) {
      floor_value = -INFINITY;
      if (row.top_k > 0 && row.top_k < a.vocab) floor_value = threshold<true>([&](uint64_t) { return static_cast<uint64_t>(row.top_k); });
      if (row.top_p < 1.f) {
        const double cut = 1.0 - static_cast<double>(row.top_p);
        floor_value = fmaxf(floor_value, threshold<false>([&](uint64_t total) {
                              return total - min(static_cast<uint64_t>(cut * static_cast<double>(total)), total - 1);
                            }));
      }
      draw();
      __syncwarp();
      cluster.sync();
      token = sh.token, value = sh.value;
    }
    if (!bad && (drawn || value < all.raw_max)) {
      const int above = count_above(value);
      if (threadIdx.x == 0) sh.above = above;
      cluster.sync();
      rank = 1 + static_cast<int>(cluster_sum(&sh.above));
    }
    const int top = bad ? 0 : min(static_cast<int>(row.top), min(kMaxTop, a.vocab));
    if (top > 0 && (a.top_ids || a.top_logprobs)) list_top(top, log_total);
    if (leader) hand_over(next, bad ? -1 : token, rank, bad ? NAN : value - log_total);  // counts are not read after the last sync()
    cluster.sync();  // a CTA must not exit while others read its shared memory
  }
};

__global__ void __launch_bounds__(kSampleThreads, 2) sample_rows(const __grid_constant__ SampleArgs args, bool keep) {
  extern __shared__ __align__(16) uint8_t room[];
  pdl_launch_dependents();
  SampleShared& shared = *reinterpret_cast<SampleShared*>(room);
  Sampler sampler(args, shared, keep ? reinterpret_cast<float*>(room + (sizeof(SampleShared) + 15) / 16 * 16) : nullptr);
  sampler.run();
}

}  // namespace exl2nb
