// GPTQ (Frantar et al., 2022) with EXL2 scales: for each group of rows, scale search, rounding, and compensation of the remaining rows; all
// options (ways to group the rows) at once.
#include "cuda/gptq/gptq.h"

namespace exl2nb {

// Scale search of a group: the shared maximum, and each column's 4-bit scale code under it.
//
// Local loss sum_r (w - q)^2 / U_rr^2: each column's best free step (16 tried), then 24 shared maxima around the largest of them; per
// maximum a column takes the best of 4 codes; the maximum with the least weighted sum over columns wins. Lane: a column; warp: a share of
// the candidates; CTA: 32 columns, rows staged in shared memory. Sums over columns run in fixed order. Bytes: a group's weights twice.
__device__ __forceinline__ float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }  // |x| < 2^22
__device__ __forceinline__ float reciprocal(float x) { return x > 0.0f ? 1.0f / x : 0.0f; }
__device__ __forceinline__ float nearest(float x, float lo, float hi) { return round_even(fminf(fmaxf(x, lo), hi)); }

__device__ __forceinline__ half maximum(unsigned top, float factor, int bits) {
  const float largest = 65504.0f / static_cast<float>(1 << (bits - 1)) * 0.999f;
  return __float2half_rn(fminf(fmaxf(__uint_as_float(top) * factor, 1.52587890625e-05f), largest));
}

// One CTA's 32 columns of up to kStage rows.
struct Stage {
  float w[kStage][kLanes], weight[kStage];

  __device__ int load(const float* from, const float* factor, Sizes size, int64_t column, bool inside, int row, int end) {
    const int count = min(kStage, end - row);
    for (int r = threadIdx.y; r < count; r += kGptqWarps) w[r][threadIdx.x] = inside ? from[(row + r) * size.columns() + column] : 0.0f;
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
__global__ void __launch_bounds__(kLanes* kGptqWarps)
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
  for (int r = a + warp; r < e; r += kGptqWarps) m = inside ? fmaxf(m, fabsf(w[r * size.columns() + column])) : 0.0f;
  part[warp][lane] = m;
  __syncthreads();
  for (int i = 0; i < kGptqWarps; i++) m = fmaxf(m, part[i][lane]);
  __syncthreads();
  const float largest = m / (hi + 0.5f), low = bits <= 3 ? 0.35f : bits == 4 ? 0.45f : 0.6f;
  float s[2], inv[2], sum[2] = {};
  for (int i = 0; i < 2; i++) {
    s[i] = largest * (low + (1.1f - low) * static_cast<float>(warp + i * kGptqWarps) / static_cast<float>(kGrid - 1));
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
  for (int i = 0; i < 2; i++) part[warp + i * kGptqWarps][lane] = sum[i];
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
__global__ void __launch_bounds__(kLanes* kGptqWarps)
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

// Rounding and compensation of one group. One thread owns a column.
//
// round_rows: columns independent. round_coupled: a column's error is also pushed onto the later columns of its coupling block. Column m of
// row r depends on column m of row r - 1 and on the columns before m in row r; so warps (32 columns) form a wavefront over kTurn rows at a
// time, and in a warp row i runs i columns behind row 0. Bytes: a group's weights once, its errors once per kPanel rows, V once per kTurn
// rows (L2).

// Rows [row, row + kDeep) x columns [from, from + kPanel) of U, zero outside [.., row_end) x [.., end).
struct Panel {
  float u[kDeep][kPanel];

  __device__ void load(const float* factor, int K, int row, int row_end, int from, int end) {
    __syncthreads();
    for (int i = threadIdx.x; i < kDeep * kPanel; i += kGptqThreads) {
      const int r = row + i / kPanel, t = from + i % kPanel;
      u[i / kPanel][i % kPanel] = r < row_end && t < end ? factor[static_cast<int64_t>(r) * K + t] : 0.0f;
    }
    __syncthreads();
  }
  // x[i] -= sum over rows of error * U[row][from + i]. errors: at the first of `count` rows.
  __device__ void apply(const float* errors, int64_t stride, int count, float (&x)[kPanel]) const {
#pragma unroll 4
    for (int r = 0; r < count; r++) {
      const float d = errors[r * stride];
#pragma unroll
      for (int i = 0; i < kPanel; i++) x[i] -= d * u[r][i];
    }
  }
};

__global__ void __launch_bounds__(kGptqThreads) round_rows(const float* w, const float* factor, Step step, Sizes size, Chosen to) {
  __shared__ Panel panel;
  const int p = blockIdx.y, n = blockIdx.x * kGptqThreads + threadIdx.x;
  const int a = step.first[p], e = a + step.rows[p], bits = step.bits[p];
  if (a == e) return;
  const bool inside = n < size.N;
  const int64_t stride = size.columns(), column = static_cast<int64_t>(p) * size.N + (inside ? n : 0);
  const float lo = -static_cast<float>(1 << (bits - 1)), hi = -lo - 1.0f;
  const float s = to.step(size, p, column, inside), inv = reciprocal(s);
  float* const errors = to.errors + (a - to.first) * stride + column;
  uint8_t* const codes = to.codes + (a - to.first) * stride + column;
  float sum = 0.0f;
  for (int b = a; b < e; b += kPanel) {
    float x[kPanel];
#pragma unroll
    for (int i = 0; i < kPanel; i++) x[i] = inside && b + i < e ? w[(b + i) * stride + column] : 0.0f;
    for (int row = a; row < b; row += kDeep) {
      panel.load(factor, size.K, row, b, b, e);
      if (inside) panel.apply(errors + (row - a) * stride, stride, min(kDeep, b - row), x);
    }
    panel.load(factor, size.K, b, e, b, e);
    if (!inside) continue;
#pragma unroll
    for (int i = 0; i < kPanel; i++) {
      if (b + i >= e) break;
      const float q = nearest(x[i] * inv, lo, hi), d = (x[i] - round_half(q * s)) / panel.u[i][i];
      errors[(b + i - a) * stride] = d;
      codes[(b + i - a) * stride] = static_cast<uint8_t>(static_cast<int>(q - lo));
      sum += d * d;
#pragma unroll
      for (int j = i + 1; j < kPanel; j++) x[j] -= d * panel.u[i][j];
    }
  }
  if (inside) to.loss[column] = sum;
}

// Later rows of the block: w[t] -= sum over the group's rows of U[r][t] * error.
__global__ void __launch_bounds__(kGptqThreads)
    compensate(float* w, const float* factor, Step step, Sizes size, const float* errors, int first, int end) {
  __shared__ Panel panel;
  const int p = blockIdx.y, n = blockIdx.x * kGptqThreads + threadIdx.x;
  const int a = step.first[p], e = a + step.rows[p];
  if (a == e) return;
  const bool inside = n < size.N;
  const int64_t stride = size.columns(), column = static_cast<int64_t>(p) * size.N + (inside ? n : 0);
  errors += (a - first) * stride + column;
  for (int t = e; t < end; t += kPanel) {
    float x[kPanel] = {};
    for (int row = a; row < e; row += kDeep) {
      panel.load(factor, size.K, row, e, t, end);
      if (inside) panel.apply(errors + (row - a) * stride, stride, min(kDeep, e - row), x);
    }
    if (!inside) continue;
#pragma unroll
    for (int i = 0; i < kPanel; i++)
      if (t + i < end) w[(t + i) * stride + column] += x[i];
  }
}

// One CTA per block of B coupled columns, one thread per column. pushes: [rows / kTurn][P * N], column errors. staged: dynamic shared
// memory holds each warp's own 32 x 32 block of V, on the critical path.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) round_coupled(const float* w, const float* factor, Step step, Sizes size, const float* coupling,
                                                          const float* spread, int B, Chosen to, float4* pushes, bool staged) {
  extern __shared__ float own_blocks[];
  __shared__ float4 pushed[kThreads / 32][32];  // errors of the warp being applied
  __shared__ int done[kThreads / 32];           // turns finished per warp; atomics
  const int p = blockIdx.y, m = threadIdx.x, warp = m >> 5, lane = m & 31;
  const int a = step.first[p], e = a + step.rows[p], bits = step.bits[p];
  if (a == e) return;
  if (lane == 0) done[warp] = 0;
  const bool inside = m < B;
  const int mine = inside ? m : B - 1, width = min(32, B - warp * 32);
  const int64_t stride = size.columns(), start = static_cast<int64_t>(p) * size.N + static_cast<int64_t>(blockIdx.x) * B;
  const int64_t column = start + mine;
  const float* const v = coupling + static_cast<int64_t>(blockIdx.x) * B * B + mine;
  const float* own = v + static_cast<int64_t>(warp) * 32 * B;
  int own_stride = B;
  if (staged) {
    float* const to_block = own_blocks + warp * 1024 + lane;
#pragma unroll 8
    for (int l = 0; l < width; l++) to_block[l * 32] = own[static_cast<int64_t>(l) * B];
    own = to_block, own_stride = 32;
  }
  __syncthreads();
  const float lo = -static_cast<float>(1 << (bits - 1)), hi = -lo - 1.0f;
  const float s = to.step(size, p, column, inside), inv = reciprocal(s), share_of = spread[static_cast<int64_t>(blockIdx.x) * B + mine];
  float* const errors = to.errors + (a - to.first) * stride + column;
  uint8_t* const codes = to.codes + (a - to.first) * stride + column;
  float sum = 0.0f;
  for (int b = a, turn = 1; b < e; b += kTurn, turn++) {
    float x[kTurn], t[kTurn], off[kTurn] = {}, error[kTurn] = {}, level[kTurn] = {}, u[kTurn][kTurn], rdiag[kTurn];
#pragma unroll
    for (int i = 0; i < kTurn; i++) {
      x[i] = b + i < e ? w[(b + i) * stride + column] : 0.0f;
#pragma unroll
      for (int j = 0; j < kTurn; j++) u[i][j] = i <= j && b + j < e ? factor[static_cast<int64_t>(b + i) * size.K + b + j] : 0.0f;
      rdiag[i] = reciprocal(u[i][i]);
    }
#pragma unroll 8
    for (int r = a; r < b; r++) {
      const float d = errors[(r - a) * stride];
      const float* const ur = factor + static_cast<int64_t>(r) * size.K + b;
#pragma unroll
      for (int i = 0; i < kTurn; i++)
        if (b + i < e) x[i] -= d * ur[i];
    }
#pragma unroll
    for (int i = 0; i < kTurn; i++) t[i] = x[i];
    float4* const row = pushes + (turn - 1) * stride + start;
    for (int before = 0; before < warp; before++) {
      constexpr int kAhead = kThreads > 512 ? 4 : 16;  // rows of V prefetched before the errors arrive
      const float* const vb = v + static_cast<int64_t>(before) * 32 * B;
      float c[kAhead];
#pragma unroll
      for (int l = 0; l < kAhead; l++) c[l] = vb[static_cast<int64_t>(l) * B];
      if (lane == 0)
        while (atomicAdd(&done[before], 0) < turn) __nanosleep(20);
      __threadfence_block();
      __syncwarp();
      pushed[warp][lane] = row[before * 32 + lane];
      __syncwarp();
#pragma unroll
      for (int l = 0; l < 32; l += kAhead)
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
          const float4 d = pushed[warp][l + i];
          t[0] -= d.x * c[i], t[1] -= d.y * c[i], t[2] -= d.z * c[i], t[3] -= d.w * c[i];
          if (l + kAhead < 32) c[i] = vb[static_cast<int64_t>(l + kAhead + i) * B];
        }
      __syncwarp();
    }
    float c[kTurn] = {};  // rows of V at the wavefront
    for (int tau = 0; tau < width + kTurn - 1; tau++) {
#pragma unroll
      for (int i = kTurn - 1; i > 0; i--) c[i] = c[i - 1];
      c[0] = tau < width ? own[tau * own_stride] : 0.0f;
#pragma unroll
      for (int i = 0; i < kTurn; i++) {
        const int at = tau - i;
        if (at < 0 || at >= width || b + i >= e) continue;
        const float q = nearest(t[i] * inv, lo, hi), h = round_half(q * s), d = t[i] - h;
        const float found = __shfl_sync(~0u, d, at);
        if (lane == at) {
          off[i] = d, level[i] = q, error[i] = (x[i] - h) * rdiag[i];
#pragma unroll
          for (int j = i + 1; j < kTurn; j++) x[j] -= error[i] * u[i][j], t[j] -= error[i] * u[i][j];
        } else {
          t[i] -= found * c[i];  // V is zero for earlier columns
        }
      }
    }
    if (inside) row[m] = make_float4(off[0], off[1], off[2], off[3]);
    __threadfence_block();
    __syncwarp();
    if (lane == 0) atomicExch(&done[warp], turn);
    if (!inside) continue;
#pragma unroll
    for (int i = 0; i < kTurn; i++) {
      if (b + i >= e) break;
      errors[(b + i - a) * stride] = error[i];
      codes[(b + i - a) * stride] = static_cast<uint8_t>(static_cast<int>(level[i] - lo));
      const float share = off[i] * share_of * rdiag[i];
      sum += share * share;
    }
  }
  if (inside) to.loss[column] = sum;
}

}  // namespace exl2nb
