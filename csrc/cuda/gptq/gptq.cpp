#include "cuda/gptq/gptq.h"

#include <algorithm>
#include <cmath>

#include "cuda/runtime/device.h"
#include "cuda/runtime/kernel.h"

namespace exl2nb {
namespace {

constexpr const char* kSource = "gptq/gptq.cu";
const Kernel<const float*, const float*, Step, Sizes, float*, unsigned*> best_steps{kSource, "best_steps", false};
const Kernel<const float*, const float*, const float*, Step, Spread, Sizes, const float*, const unsigned*, uint8_t*, double*> candidates{
    kSource, "candidates", false};
const Kernel<const double*, int, Step, Spread, const unsigned*, int*, half*> pick{kSource, "pick", false};
const Kernel<const float*, const float*, Step, Sizes, Chosen> round_rows{kSource, "round_rows", false};
const Kernel<float*, const float*, Step, Sizes, const float*, int, int> compensate{kSource, "compensate", false};
const Kernel<const float*, const float*, Step, Sizes, const float*, const float*, int, Chosen, float4*, bool> round_coupled[] = {
    {kSource, "round_coupled<512>", false}, {kSource, "round_coupled<1024>", false}};

constexpr float kLow = 0.5f, kHigh = 1.3f;  // the maxima tried, relative to the largest column's best step

int tiles_of(const GptqBlock& b) { return (b.N + kLanes - 1) / kLanes; }

// Scratch memory between the kernels.
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

}  // namespace

int64_t gptq_scratch_bytes(const GptqBlock& block) { return Scratch(block).bytes; }

const char* gptq_block_launch(const GptqBlock& b, void* stream) {
  const Scratch scratch(b);
  const Sizes size{b.K, b.N, b.P};
  const int64_t columns = static_cast<int64_t>(b.P) * b.N;
  Spread spread;
  for (int c = 0; c < kCandidates; c++)
    spread.factor[c] = kLow * std::pow(kHigh / kLow, static_cast<float>(c) / static_cast<float>(kCandidates - 1));
  const auto cleared =
      driver()->fill(reinterpret_cast<uintptr_t>(scratch.top), 0, sizeof(unsigned) * b.S * b.P, static_cast<CudaStream>(stream));
  if (const char* wrong = error_text(cleared)) return wrong;
  Step step = {};
  std::fill(step.first, step.first + kGptqOptions, b.first);
  const Launch tiles{Dim(tiles_of(b), b.P), Dim(kLanes, kGptqWarps), 0, stream},
      bands{Dim((b.N + kGptqThreads - 1) / kGptqThreads, b.P), kGptqThreads, 0, stream};
  const int threads = (b.B + 31) / 32 * 32, own = threads * 32 * static_cast<int>(sizeof(float));
  const char* wrong = nullptr;
  const auto run = [&](const auto& kernel, const Launch& how, const auto&... arguments) {
    if (!wrong) wrong = kernel(how, arguments...);
  };
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
    run(best_steps, tiles, b.w, b.factor, step, size, scratch.best, top);
    run(candidates, tiles, b.w, b.factor, b.column_weight, step, spread, size, scratch.best, top, scratch.code, scratch.partial);
    run(pick, {unsigned(b.P), Dim(kLanes, kCandidates), 0, stream}, scratch.partial, tiles_of(b), step, spread, top, scratch.picked,
        scale_max);
    if (b.coupling) {
      const auto& kernel = round_coupled[threads > 512];
      const int fixed = kernel.static_shared();
      const bool staged = fixed >= 0 && fixed + own <= this_device().shared_per_block;
      const Launch how{Dim(b.N / b.B, b.P), unsigned(threads), staged ? size_t(own) : 0, stream};
      run(kernel, how, b.w, b.factor, step, size, b.coupling, b.spread, b.B, to, scratch.pushes, staged);
    } else {
      run(round_rows, bands, b.w, b.factor, step, size, to);
    }
    if (behind) run(compensate, bands, b.w, b.factor, step, size, b.errors, b.first, b.first + b.rows);
  }
  return wrong;
}

}  // namespace exl2nb
