// Which experts a token visits, worked out by a whole CTA from the router's logits: the top_k largest, of equal ones the first, in the
// order of their numbers; and their weights, a softmax over all experts, divided by the norm of the chosen ones of order `renormalize`
// where that is not 0.
#pragma once
#include "gemv.cuh"

namespace exl2nb {

struct Choice {
  const float* logits;  // (tokens, stride), one more behind the experts' where the shared expert has a gate
  int stride, experts, top_k;
  bool gate;
  float renormalize;
};

// In shared memory. ranked: by falling logit; numbers: rising, behind them the expert that every token visits; places: their ranks.
struct Chosen {
  float *logits, *weights;
  int *ranked, *numbers, *places;

  static EXL2NB_BOTH int bytes(const Choice& c) { return ((c.experts + 3) / 4 * 4 + 4 * (c.top_k + 1) + 3) / 4 * 16; }
  __device__ __forceinline__ Chosen(const Choice& c, uint8_t* at) {
    logits = reinterpret_cast<float*>(at);
    weights = logits + (c.experts + 3) / 4 * 4;
    numbers = reinterpret_cast<int*>(weights + c.top_k + 1);
    ranked = numbers + c.top_k + 1;
    places = ranked + c.top_k + 1;
  }
};

// to.ranked, for every thread.
__device__ __forceinline__ void rank(const Choice& c, const Chosen& to, int token) {
  const int padded = (c.experts + 3) / 4 * 4;
  const float* const logits = c.logits + static_cast<size_t>(token) * c.stride;
  for (int e = threadIdx.x; e < padded; e += kThreads) to.logits[e] = e < c.experts ? __ldcg(logits + e) : -INFINITY;
  for (int r = threadIdx.x; r < c.top_k; r += kThreads) to.ranked[r] = r;  // should a logit be no number
  __syncthreads();
  for (int e = threadIdx.x; e < c.experts; e += kThreads) {
    const float mine = to.logits[e];
    int before = 0;
    for (int j = 0; j < padded; j += 4) {
      const float4 l = *reinterpret_cast<const float4*>(to.logits + j);
      const auto ahead = [&](float other, int i) { return other > mine || (other == mine && i < e); };
      before += ahead(l.x, j) + ahead(l.y, j + 1) + ahead(l.z, j + 2) + ahead(l.w, j + 3);
    }
    if (before < c.top_k) to.ranked[before] = e;
  }
  __syncthreads();
}

// The same, and after the next barrier all of `to`.
__device__ __forceinline__ void choose(const Choice& c, const Chosen& to, int token) {
  rank(c, to, token);
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
    const float gate = __ldcg(c.logits + static_cast<size_t>(token) * c.stride + (c.gate ? c.experts : 0));
    to.numbers[c.top_k] = c.experts, to.places[c.top_k] = c.top_k;
    to.weights[c.top_k] = c.gate ? 1.f / (1.f + expf(-gate)) : 1.f;
  }
}

}  // namespace exl2nb
