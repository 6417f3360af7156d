// The scales of one group of rows: which maximum the columns share, and each column's code under it.
//
// Under GPTQ's local loss sum_r (w - what)^2 / U_rr^2: every column's best free step (16 tried), then 24 shared maxima around the largest
// of them, for each of which a column takes the best of 4 codes; the maximum with the least weighted sum over columns wins. A lane owns a
// column, a warp a share of what is tried, a CTA 32 columns, whose rows wait in shared memory. Sums over columns are made in one order
// (lanes of a warp, then CTAs by number), so that the same input gives the same bits.
// Bytes: a group's weights twice.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

namespace exl2nb::gptq {

constexpr int kOptions = 16, kLanes = 32, kWarps = 8, kStage = 64;
constexpr int kGrid = 16, kCandidates = 24, kSpan = 4, kEach = kCandidates / kWarps;

// One group of every option. rows 0: none.
struct Step {
  int bits[kOptions], first[kOptions], rows[kOptions];
};
struct Sizes {
  int K, N, P;
  __device__ int64_t columns() const { return static_cast<int64_t>(P) * N; }
};
// The maxima tried, relative to the largest column's best step.
struct Spread {
  float factor[kCandidates];
};

__device__ __forceinline__ float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }  // right for |x| < 2^22
__device__ __forceinline__ float round_half(float x) { return __half2float(__float2half_rn(x)); }
__device__ __forceinline__ float reciprocal(float x) { return x > 0.0f ? 1.0f / x : 0.0f; }
__device__ __forceinline__ float nearest(float x, float lo, float hi) { return round_even(fminf(fmaxf(x, lo), hi)); }

__device__ __forceinline__ half maximum(unsigned top, float factor, int bits) {
  const float largest = 65504.0f / static_cast<float>(1 << (bits - 1)) * 0.999f;
  return __float2half_rn(fminf(fmaxf(__uint_as_float(top) * factor, 1.52587890625e-05f), largest));
}
__device__ __forceinline__ float unit_of(half scale_max) { return round_half(__half2float(scale_max) / 256.0f); }

// One CTA's 32 columns of up to kStage rows.
struct Stage {
  float w[kStage][kLanes], weight[kStage];

  __device__ int load(const float* from, const float* factor, Sizes size, int64_t column, bool inside, int row, int end) {
    const int count = min(kStage, end - row);
    for (int r = threadIdx.y; r < count; r += kWarps) w[r][threadIdx.x] = inside ? from[(row + r) * size.columns() + column] : 0.0f;
    const int thread = threadIdx.y * kLanes + threadIdx.x;
    if (thread < count) {
      const float d = factor[static_cast<int64_t>(row + thread) * size.K + row + thread];
      weight[thread] = 1.0f / (d * d);
    }
    __syncthreads();
    return count;
  }
};

// best: [P * N], each column's best step; top: [P], the largest of them as bits, 0 before.
__global__ void __launch_bounds__(kLanes* kWarps)
    best_steps(const float* w, const float* factor, Step step, Sizes size, float* best, unsigned* top) {
  __shared__ Stage stage;
  __shared__ float part[kGrid][kLanes];
  const int p = blockIdx.y, lane = threadIdx.x, warp = threadIdx.y, n = blockIdx.x * kLanes + lane;
  const int a = step.first[p], e = a + step.rows[p], bits = step.bits[p];
  if (a == e) return;
  const bool inside = n < size.N;
  const int64_t column = static_cast<int64_t>(p) * size.N + n;
  const float lo = -static_cast<float>(1 << (bits - 1)), hi = -lo - 1.0f;
  float m = 0.0f;
  for (int r = a + warp; r < e; r += kWarps) m = inside ? fmaxf(m, fabsf(w[r * size.columns() + column])) : 0.0f;
  part[warp][lane] = m;
  __syncthreads();
  for (int i = 0; i < kWarps; i++) m = fmaxf(m, part[i][lane]);
  __syncthreads();
  const float largest = m / (hi + 0.5f), low = bits <= 3 ? 0.35f : bits == 4 ? 0.45f : 0.6f;
  float s[2], inv[2], sum[2] = {};
  for (int i = 0; i < 2; i++) {
    s[i] = largest * (low + (1.1f - low) * static_cast<float>(warp + i * kWarps) / static_cast<float>(kGrid - 1));
    inv[i] = reciprocal(s[i]);
  }
  for (int row = a; row < e; row += kStage) {
    const int count = stage.load(w, factor, size, column, inside, row, e);
    for (int r = 0; r < count; r++) {
      const float x = stage.w[r][lane], weight = stage.weight[r];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float d = x - nearest(x * inv[i], lo, hi) * s[i];
        sum[i] += d * d * weight;
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < 2; i++) part[warp + i * kWarps][lane] = sum[i];
  __syncthreads();
  if (warp) return;
  float least = 3.0e38f, found = largest;
  for (int i = 0; i < kGrid; i++)
    if (part[i][lane] < least) {
      least = part[i][lane];
      found = largest * (low + (1.1f - low) * static_cast<float>(i) / static_cast<float>(kGrid - 1));
    }
  if (inside) best[column] = found;
  for (int offset = 16; offset; offset /= 2) found = fmaxf(found, __shfl_xor_sync(~0u, found, offset));
  if (lane == 0) atomicMax(&top[p], __float_as_uint(found));
}

// code: [kCandidates][P * N], the best code under each shared maximum; partial: [P][gridDim.x][kCandidates], weighted losses of a CTA.
__global__ void __launch_bounds__(kLanes* kWarps)
    candidates(const float* w, const float* factor, const float* column_weight, Step step, Spread spread, Sizes size, const float* best,
               const unsigned* top, uint8_t* code, double* partial) {
  __shared__ Stage stage;
  const int p = blockIdx.y, lane = threadIdx.x, n = blockIdx.x * kLanes + lane;
  const int a = step.first[p], e = a + step.rows[p], bits = step.bits[p];
  if (a == e) return;
  const bool inside = n < size.N;
  const int64_t column = static_cast<int64_t>(p) * size.N + n;
  const float lo = -static_cast<float>(1 << (bits - 1)), hi = -lo - 1.0f;
  const float wanted = inside ? best[column] : 0.0f;
  float k[kEach], s[kEach][kSpan], inv[kEach][kSpan], sum[kEach][kSpan] = {};
#pragma unroll
  for (int c = 0; c < kEach; c++) {
    const float unit = unit_of(maximum(top[p], spread.factor[threadIdx.y * kEach + c], bits));
    k[c] = floorf(sqrtf(wanted / unit));
#pragma unroll
    for (int j = 0; j < kSpan; j++) {
      const float tried = fminf(fmaxf(k[c] + static_cast<float>(j - 1), 1.0f), 16.0f);
      s[c][j] = round_half(tried * tried * unit);
      inv[c][j] = reciprocal(s[c][j]);
    }
  }
  for (int row = a; row < e; row += kStage) {
    const int count = stage.load(w, factor, size, column, inside, row, e);
    for (int r = 0; r < count; r++) {
      const float x = stage.w[r][lane], weight = stage.weight[r];
#pragma unroll
      for (int c = 0; c < kEach; c++)
#pragma unroll
        for (int j = 0; j < kSpan; j++) {
          const float d = x - nearest(x * inv[c][j], lo, hi) * s[c][j];
          sum[c][j] += d * d * weight;
        }
    }
    __syncthreads();
  }
#pragma unroll
  for (int c = 0; c < kEach; c++) {
    float least = 3.0e38f, found = 1.0f;
#pragma unroll
    for (int j = 0; j < kSpan; j++)
      if (sum[c][j] < least) {
        least = sum[c][j];
        found = fminf(fmaxf(k[c] + static_cast<float>(j - 1), 1.0f), 16.0f);
      }
    const int candidate = threadIdx.y * kEach + c;
    if (inside) code[candidate * size.columns() + column] = static_cast<uint8_t>(found) - 1;
    double share = inside ? static_cast<double>(least) * static_cast<double>(column_weight[n]) : 0.0;
    for (int offset = 16; offset; offset /= 2) share += __shfl_down_sync(~0u, share, offset);
    if (lane == 0) partial[(static_cast<int64_t>(p) * gridDim.x + blockIdx.x) * kCandidates + candidate] = share;
  }
}

// One CTA per option, a warp per candidate. picked: [P]; scale_max: [P].
__global__ void __launch_bounds__(kLanes* kCandidates)
    pick(const double* partial, int tiles, Step step, Spread spread, const unsigned* top, int* picked, half* scale_max) {
  __shared__ double total[kCandidates];
  const int p = blockIdx.x, lane = threadIdx.x, candidate = threadIdx.y;
  double sum = 0.0;
  if (step.rows[p])
    for (int tile = lane; tile < tiles; tile += kLanes) sum += partial[(static_cast<int64_t>(p) * tiles + tile) * kCandidates + candidate];
  for (int offset = 16; offset; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
  if (lane == 0) total[candidate] = sum;
  __syncthreads();
  if (lane || candidate) return;
  int found = 0;
  for (int c = 1; c < kCandidates; c++)
    if (total[c] < total[found]) found = c;
  picked[p] = found;
  scale_max[p] = step.rows[p] ? maximum(top[p], spread.factor[found], step.bits[p]) : __float2half_rn(0.0f);
}

}  // namespace exl2nb::gptq
