// Rounding the rows of one group, and making up for it in the rows of the block that are still to come. One thread owns a column.
//
// Plain: every column for itself. Coupled: within a row, too, a column's error is pushed onto the columns of its block of coupling that are
// still to come. Column m of row r waits for column m of row r - 1 and for the columns before m of row r, and for nothing else; so warps
// (32 columns each) follow one another through the rows, kTurn of them at a time, and inside a warp row i is i columns behind row 0.
// Bytes: a group's weights once, its errors once per kPanel rows, V once per kTurn rows (from L2).
#pragma once
#include "cuda/gptq/gptq_search.cuh"

namespace exl2nb::gptq {

constexpr int kRowThreads = 64, kPanel = 16, kDeep = 64, kTurn = 4;

// What a group was given, and where its results go; first: of the block.
struct Chosen {
  const int* picked;    // [P]
  const uint8_t* code;  // [kCandidates][P * N]
  const half* scale_max;
  uint8_t *codes, *scale_index;  // [rows of the block][P * N], [P * N]
  float *loss, *errors;          // [P * N], [rows of the block][P * N]
  int first;

  __device__ float step(Sizes size, int p, int64_t column, bool inside) const {
    if (!inside) return 0.0f;
    const uint8_t k = code[picked[p] * size.columns() + column];
    scale_index[column] = k;
    return round_half(static_cast<float>((k + 1) * (k + 1)) * unit_of(scale_max[p]));
  }
};

// Rows [row, row + kDeep) x columns [from, from + kPanel) of U, 0 where there is nothing to compensate: outside [.., row_end) x [.., end).
struct Panel {
  float u[kDeep][kPanel];

  __device__ void load(const float* factor, int K, int row, int row_end, int from, int end) {
    __syncthreads();
    for (int i = threadIdx.x; i < kDeep * kPanel; i += kRowThreads) {
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

__global__ void __launch_bounds__(kRowThreads) round_rows(const float* w, const float* factor, Step step, Sizes size, Chosen to) {
  __shared__ Panel panel;
  const int p = blockIdx.y, n = blockIdx.x * kRowThreads + threadIdx.x;
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

// Rows of the block behind a group: w[t] -= sum over its rows of U[r][t] * error.
__global__ void __launch_bounds__(kRowThreads)
    compensate(float* w, const float* factor, Step step, Sizes size, const float* errors, int first, int end) {
  __shared__ Panel panel;
  const int p = blockIdx.y, n = blockIdx.x * kRowThreads + threadIdx.x;
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

// One CTA per block of B coupled columns, a thread per column. pushes: [rows / kTurn][P * N], what each column was off from its target.
// staged: dynamic shared memory holds every warp's own 32 x 32 of V, which its columns wait for one after the other.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) round_coupled(const float* w, const float* factor, Step step, Sizes size, const float* coupling,
                                                          const float* spread, int B, Chosen to, float4* pushes, bool staged) {
  extern __shared__ float own_blocks[];
  __shared__ float4 pushed[kThreads / 32][32];  // of the warp that is being looked at
  __shared__ int done[kThreads / 32];           // turns that a warp has finished; read and written by atomics while others wait
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
      constexpr int kAhead = kThreads > 512 ? 4 : 16;  // V's rows are fetched before there is anything to multiply them with
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
    float c[kTurn] = {};  // V's rows of the columns that the kTurn rows are at
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
          t[i] -= found * c[i];  // 0 for the columns before it
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

}  // namespace exl2nb::gptq
