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

// In shared memory.
struct Chosen {
  float *logits, *weights;
  int *ranked, *numbers;

  static EXL2NB_BOTH int bytes(const Choice& c) { return ((c.experts + 3) / 4 * 4 + 3 * (c.top_k + 1) + 3) / 4 * 16; }
  __device__ __forceinline__ Chosen(const Choice& c, uint8_t* at) {
    logits = reinterpret_cast<float*>(at);
    weights = logits + (c.experts + 3) / 4 * 4;
    numbers = reinterpret_cast<int*>(weights + c.top_k + 1);
    ranked = numbers + c.top_k + 1;
  }
};

// numbers[top_k] is the expert that every token visits. All are there after the next barrier; WEIGHTS: the weights too.
template <bool WEIGHTS>
__device__ __forceinline__ void choose(const Choice& c, const Chosen& to, int token) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, padded = (c.experts + 3) / 4 * 4;
  const float* const logits = c.logits + static_cast<size_t>(token) * c.stride;
  for (int e = threadIdx.x; e < padded; e += kThreads) to.logits[e] = e < c.experts ? __ldcg(logits + e) : -INFINITY;
  for (int r = threadIdx.x; r < c.top_k; r += kThreads) to.ranked[r] = r;  // should a logit be no number
  __syncthreads();
  for (int e = threadIdx.x; e < c.experts; e += kThreads) {
    const float mine = to.logits[e];
    int rank = 0;
    for (int j = 0; j < padded; j += 4) {
      const float4 l = *reinterpret_cast<const float4*>(to.logits + j);
      const auto before = [&](float other, int i) { return other > mine || (other == mine && i < e); };
      rank += before(l.x, j) + before(l.y, j + 1) + before(l.z, j + 2) + before(l.w, j + 3);
    }
    if (rank < c.top_k) to.ranked[rank] = e;
  }
  __syncthreads();
  for (int r = threadIdx.x; r < c.top_k; r += kThreads) {
    int before = 0;
    for (int q = 0; q < c.top_k; q++) before += to.ranked[q] < to.ranked[r] || (to.ranked[q] == to.ranked[r] && q < r);
    to.numbers[before] = to.ranked[r];
  }
  if (threadIdx.x == 0) to.numbers[c.top_k] = c.experts;
  if constexpr (WEIGHTS) {
    __syncthreads();
    if (warp != 0) return;
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
    if (lane == 0) to.weights[c.top_k] = c.gate ? 1.f / (1.f + expf(-__ldcg(logits + c.experts))) : 1.f;
  }
}

}  // namespace exl2nb
