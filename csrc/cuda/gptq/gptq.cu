// The launches of gptq.h: groups in turn, per group search (gptq_search.cuh), rounding and compensation (gptq_rows.cuh) of all options at
// once.
#include "cuda/gptq/gptq.h"

#include <algorithm>
#include <cmath>

#include "cuda/gptq/gptq_rows.cuh"
#include "cuda/runtime/device.cuh"

namespace exl2nb {
namespace {

using namespace gptq;
static_assert(kOptions == kGptqOptions);

constexpr float kLow = 0.5f, kHigh = 1.3f;  // the maxima tried, relative to the largest column's best step

int tiles_of(const GptqBlock& b) { return (b.N + kLanes - 1) / kLanes; }

// Memory that the kernels hand to one another.
struct Scratch {
  int64_t bytes = 0;
  uint8_t* base;
  float* best;
  unsigned* top;
  int* picked;
  uint8_t* code;
  double* partial;
  float4* pushes;

  explicit Scratch(const GptqBlock& b) : base(b.scratch) {
    const int64_t columns = static_cast<int64_t>(b.P) * b.N;
    top = take<unsigned>(static_cast<int64_t>(b.S) * b.P);
    best = take<float>(columns);
    picked = take<int>(b.P);
    code = take<uint8_t>(kCandidates * columns);
    partial = take<double>(static_cast<int64_t>(b.P) * tiles_of(b) * kCandidates);
    pushes = take<float4>(b.coupling ? (b.rows + kTurn - 1) / kTurn * columns : 0);
  }

 private:
  template <class T>
  T* take(int64_t count) {
    T* const found = reinterpret_cast<T*>(base + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return found;
  }
};

// Whether a kernel may have so much dynamic shared memory beside its own; from then on it may.
template <class Kernel>
bool shared_fits(Kernel* kernel, int bytes) {
  cudaFuncAttributes found;
  return cudaFuncGetAttributes(&found, kernel) == cudaSuccess && static_cast<int>(found.sharedSizeBytes) + bytes <= shared_per_block() &&
         cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess;
}

}  // namespace

int64_t gptq_scratch_bytes(const GptqBlock& block) { return Scratch(block).bytes; }

const char* gptq_block_launch(const GptqBlock& b, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const Scratch scratch(b);
  const Sizes size{b.K, b.N, b.P};
  const int64_t columns = static_cast<int64_t>(b.P) * b.N;
  Spread spread;
  for (int c = 0; c < kCandidates; c++)
    spread.factor[c] = kLow * std::pow(kHigh / kLow, static_cast<float>(c) / static_cast<float>(kCandidates - 1));
  const cudaError_t cleared = cudaMemsetAsync(scratch.top, 0, sizeof(unsigned) * b.S * b.P, queue);
  if (cleared != cudaSuccess) return error_text(cleared);
  Step step = {};
  std::fill(step.first, step.first + kOptions, b.first);
  const dim3 tiles(tiles_of(b), b.P), lanes(kLanes, kWarps), bands((b.N + kRowThreads - 1) / kRowThreads, b.P);
  for (int s = 0; s < b.S; s++) {
    bool behind = false;
    for (int p = 0; p < b.P; p++) {
      step.first[p] += step.rows[p];
      step.bits[p] = b.groups[(p * b.S + s) * 2];
      step.rows[p] = b.groups[(p * b.S + s) * 2 + 1];
      behind = behind || (step.rows[p] && step.first[p] + step.rows[p] < b.first + b.rows);
    }
    unsigned* const top = scratch.top + s * b.P;
    half* const scale_max = static_cast<half*>(b.scale_max) + s * b.P;
    const Chosen to{scratch.picked, scratch.code, scale_max, b.codes, b.scale_index + s * columns, b.loss + s * columns, b.errors, b.first};
    best_steps<<<tiles, lanes, 0, queue>>>(b.w, b.factor, step, size, scratch.best, top);
    candidates<<<tiles, lanes, 0, queue>>>(b.w, b.factor, b.column_weight, step, spread, size, scratch.best, top, scratch.code,
                                           scratch.partial);
    pick<<<b.P, dim3(kLanes, kCandidates), 0, queue>>>(scratch.partial, tiles_of(b), step, spread, top, scratch.picked, scale_max);
    if (b.coupling) {
      const int threads = (b.B + 31) / 32 * 32, own = threads * 32 * static_cast<int>(sizeof(float));
      auto* const kernel = threads <= 512 ? round_coupled<512> : round_coupled<1024>;
      const bool staged = shared_fits(kernel, own);
      kernel<<<dim3(b.N / b.B, b.P), threads, staged ? own : 0, queue>>>(b.w, b.factor, step, size, b.coupling, b.spread, b.B, to,
                                                                         scratch.pushes, staged);
    } else {
      round_rows<<<bands, kRowThreads, 0, queue>>>(b.w, b.factor, step, size, to);
    }
    if (behind) compensate<<<bands, kRowThreads, 0, queue>>>(b.w, b.factor, step, size, b.errors, b.first, b.first + b.rows);
  }
  return error_text(cudaGetLastError());
}

}  // namespace exl2nb
