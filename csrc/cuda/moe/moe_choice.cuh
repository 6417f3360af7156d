// Which experts a token visits, worked out by a whole CTA from what its router left: the top_k largest logits, of equal ones the first, in
// the order of their numbers; and their weights, a softmax over all experts, divided by the norm of the chosen ones of order `renormalize`
// where that is not 0. Every CTA that asks gets the same answer: sums run in one order, written with roundings that no compiler moves.
#pragma once
#include "cuda/gemm/skinny/gemv.cuh"

namespace exl2nb {

struct Choice {
  const float* sums;  // (tokens, parts, size) of router.cuh; of a router that was a product of its own one part, whose row is the logits
  int parts, stride, rows, experts, top_k, kind;  // kind: NormKind of the norm in front, kNoNorm where it is in them
  bool gate;                                      // one more output behind the experts', for the expert that every token visits
  float eps, inverse_width, renormalize;

  EXL2NB_BOTH int size() const { return rows * stride + 4; }
  EXL2NB_BOTH int bytes() const { return parts * size() * 4; }  // of a token's sums
};

// In shared memory. ranked: by falling logit; numbers: rising, behind them the expert that every token visits; places: their ranks.
struct Chosen {
  float *sums, *logits, *weights;
  int *ranked, *numbers, *places;

  static EXL2NB_BOTH int bytes(const Choice& c) { return (c.size() + (c.experts + 3) / 4 * 4 + 4 * (c.top_k + 1) + 3) / 4 * 16; }
  __device__ __forceinline__ Chosen(const Choice& c, uint8_t* at) {
    sums = reinterpret_cast<float*>(at);
    logits = sums + c.size();
    weights = logits + (c.experts + 3) / 4 * 4;
    numbers = reinterpret_cast<int*>(weights + c.top_k + 1);
    ranked = numbers + c.top_k + 1;
    places = ranked + c.top_k + 1;
  }
};

// to.sums from number `first` on. near: the token's sums in shared memory, or null. A barrier follows.
__device__ __forceinline__ void add_up(const Choice& c, const Chosen& to, const float* near, int token, int first) {
  const int lane = threadIdx.x & 31, size = c.size();
  const float* const far = c.sums + static_cast<size_t>(token) * c.parts * size;
#pragma unroll 1
  for (int f = first + (threadIdx.x >> 5); f < size; f += kWarps) {
    float s = 0.f;
#pragma unroll 1
    for (int p = lane; p < c.parts; p += 32) s = __fadd_rn(s, near ? near[p * size + f] : __ldcg(far + p * size + f));
    s = warp_sum(s);
    if (lane == 0) to.sums[f] = s;
  }
}

// What the norm in front of the router takes off and multiplies by; behind `add_up`.
struct Scale {
  float mean, factor;
};
__device__ __forceinline__ Scale scale_of(const Choice& c, const Chosen& to) {
  if (c.kind == kNoNorm) return {0.f, 1.f};
  const float* const stats = to.sums + c.rows * c.stride;
  const float mean = c.kind == kLayerNorm ? __fmul_rn(stats[0], c.inverse_width) : 0.f;
  const float var = __fmaf_rn(-mean, mean, __fmul_rn(stats[1], c.inverse_width));
  return {mean, rsqrtf(__fadd_rn(fmaxf(var, 0.f), c.eps))};
}

// to.ranked, for every thread; behind `add_up`.
__device__ __forceinline__ void rank(const Choice& c, const Chosen& to, const Scale& norm) {
  const int padded = (c.experts + 3) / 4 * 4;
  for (int r = threadIdx.x; r < c.top_k; r += kThreads) to.ranked[r] = r;  // should a logit be no number
#pragma unroll 1
  for (int e = threadIdx.x; e < c.stride; e += kThreads) {
    float v = to.sums[e];
    if (c.kind == kLayerNorm) v = __fmaf_rn(-norm.mean, to.sums[c.stride + e], v);
    v = __fmul_rn(v, norm.factor);
    if (c.kind == kLayerNorm && c.rows > 2) v = __fadd_rn(v, to.sums[2 * c.stride + e]);
    if (e < padded) to.logits[e] = e < c.experts ? v : -INFINITY;
    if (e == c.experts) to.sums[e] = v;  // the gate's
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < (c.experts + 7) / 8 * 32; i += kThreads) {  // four lanes an expert
    const int e = i >> 2, q = i & 3;
    const float mine = e < c.experts ? to.logits[e] : -INFINITY;
    int before = 0;
#pragma unroll 1
    for (int j = 4 * q; j < padded; j += 16) {
      const float4 l = *reinterpret_cast<const float4*>(to.logits + j);
      const auto ahead = [&](float other, int k) { return other > mine || (other == mine && k < e); };
      before += ahead(l.x, j) + ahead(l.y, j + 1) + ahead(l.z, j + 2) + ahead(l.w, j + 3);
    }
    before += __shfl_xor_sync(0xffffffffu, before, 1);
    before += __shfl_xor_sync(0xffffffffu, before, 2);
    if (q == 0 && e < c.experts && before < c.top_k) to.ranked[before] = e;
  }
  __syncthreads();
}

// Behind `rank`: after the next barrier all of `to`.
__device__ __forceinline__ void weigh(const Choice& c, const Chosen& to) {
  const int lane = threadIdx.x & 31;
  if (threadIdx.x >= 32) return;
  for (int r = lane; r < c.top_k; r += 32) {
    int before = 0;
    for (int q = 0; q < c.top_k; q++) before += to.ranked[q] < to.ranked[r] || (to.ranked[q] == to.ranked[r] && q < r);
    to.numbers[before] = to.ranked[r], to.places[before] = r;
  }
  __syncwarp();
  const float top = to.logits[to.ranked[0]];
  float sum = 0.f, norm = 0.f;
  for (int e = lane; e < c.experts; e += 32) sum += expf(to.logits[e] - top);
  sum = warp_sum(sum);
  for (int r = lane; r < c.top_k; r += 32) {
    const float p = expf(to.logits[to.numbers[r]] - top) / sum;
    to.weights[r] = p;
    if (c.renormalize > 0.f) norm += c.renormalize == 1.f ? p : powf(p, c.renormalize);
  }
  norm = warp_sum(norm);
  if (c.renormalize > 0.f && c.renormalize != 1.f) norm = powf(norm, 1.f / c.renormalize);
  __syncwarp();
  for (int r = lane; r < c.top_k && c.renormalize > 0.f; r += 32) to.weights[r] /= norm;
  if (lane == 0) {
    to.numbers[c.top_k] = c.experts, to.places[c.top_k] = c.top_k;
    to.weights[c.top_k] = c.gate ? 1.f / (1.f + expf(-to.sums[c.experts])) : 1.f;
  }
}

}  // namespace exl2nb
