// y += (scale * (x a)) b for rows with adapters of their own, as in Punica's BGMV (Chen et al., 2023, arXiv:2310.18547): each row finds its
// matrices through a table. A row's bits do not depend on the other rows.
//
// lora_shrink, lora_sums: a CTA takes 256 inputs of a row and every gridDim.y-th 16 columns of a; its sums go to memory, chunk by chunk.
// Two lanes hold a row of 16 columns. lora_expand: a thread takes a column of y (two where [gate; up] becomes one input), its CTA first
// adds the chunks up in order. Bytes: a and b of every row once, rows with the same adapter from L2; y twice. Adapters and table are
// written before the step, so they are read ahead of griddepcontrol.wait. Every CTA waits there, even with nothing to do: the next kernel
// relies on it, as this kernel's predecessors are complete when this one is.
#include "cuda/gemm/lora.h"
#include "cuda/runtime/pdl.cuh"

namespace exl2nb {

__device__ __forceinline__ int padded_rank(const LoraPart& p) { return static_cast<int>(p.rank + 15) & ~15; }

// This CTA's share of a row's matrices b into the L2 cache, unless an earlier row brings the same.
__device__ __forceinline__ void prefetch_b(const LoraRows& of, int row, const LoraChange& change) {
#if __CUDA_ARCH__ >= 900
  bool known = false;
  for (int other = threadIdx.x & 31; other < row; other += 32) known |= of.of(other) == &change;
  if (__any_sync(~0u, known) || threadIdx.x >= change.num_parts) return;
  const LoraPart part = change.parts[threadIdx.x];
  const int64_t pieces = gridDim.x * gridDim.y, piece = blockIdx.x * gridDim.y + blockIdx.y, bytes = part.rank * part.columns * 2;
  const int64_t each = (bytes / 16 + pieces - 1) / pieces * 16, from = piece * each, count = min(each, (bytes & ~15) - from);
  if (count > 0)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(reinterpret_cast<const uint8_t*>(part.b) + from),
                 "r"(static_cast<uint32_t>(count))
                 : "memory");
#endif
}
// The CTA that is the last to have its chunk's sums of a tile adds all chunks up, in order.
__device__ __forceinline__ void finish_tile(const LoraArgs& a, const LoraPart& part, int column, int row, int tile) {
  constexpr int kGroups = kLoraThreads / 16;
  __shared__ float partial[kGroups][16];
  __shared__ bool last;
  unsigned* const arrived = a.arrived + row * (a.width / 16) + tile;
  if (threadIdx.x == 0) last = atomicAdd(arrived, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const int own = threadIdx.x & 15, group = threadIdx.x >> 4, chunks = gridDim.x;
  const float* const sums = a.sums + static_cast<int64_t>(row) * chunks * a.width + 16 * tile + own;
  float sum = 0.f;
  for (int q = group; q < chunks; q += kGroups) sum += __ldcg(sums + static_cast<int64_t>(q) * a.width);
  partial[group][own] = sum;
  __syncthreads();
  if (group) return;
  float all = 0.f;
#pragma unroll
  for (int n = 0; n < kGroups; n++) all += partial[n][own];
  a.low[static_cast<int64_t>(row) * a.width + 16 * tile + own] = column + own < part.rank ? all * __ldg(part.scale + column + own) : 0.f;
  if (own == 0) *arrived = 0;
}

// ALL: the sums over all chunks, too.
template <bool ALL>
__device__ __forceinline__ void shrink(const LoraArgs& a) {
  constexpr int kWarps = kLoraThreads / 32, kEach = kLoraChunk / (16 * kWarps);
  __shared__ float partial[kWarps][16];
  const int chunk = blockIdx.x, row = blockIdx.z, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  pdl_launch_dependents();
  const LoraChange* const change = a.of.of(row);
  const half* const x = a.x.x + token_place(a.x.group, a.x.stride, row);
  const int first = chunk * kLoraChunk + warp * 16 * kEach + (lane >> 1);  // input of this lane, and every 16th after it
  float* const sums = a.sums + (static_cast<int64_t>(row) * gridDim.x + chunk) * a.width;
  if (ALL && change) prefetch_b(a.of, row, *change);
  bool waited = false;
  int tile = 0;  // 16 columns, counted over all parts
  for (int64_t i = 0; change && i < change->num_parts; i++) {
    const LoraPart part = change->parts[i];
    const int width = padded_rank(part);
    for (int column = 0; column < width; column += 16, tile++) {
      if (tile % gridDim.y != blockIdx.y) continue;
      uint4 w[kEach];
      int place[kEach];
#pragma unroll
      for (int j = 0; j < kEach; j++) {
        const int k = first + 16 * j;
        w[j] = uint4{0, 0, 0, 0}, place[j] = 0;
        if (k < a.K) {
          w[j] = __ldg(reinterpret_cast<const uint4*>(part.a + static_cast<int64_t>(k) * width + column) + (lane & 1));
          place[j] = row_place(a.x.group, a.x.inverse[0] ? __ldg(a.x.inverse[0] + k) : k);
        }
      }
      if (!waited) pdl_wait(), waited = true;
      float sum[8] = {};
#pragma unroll
      for (int j = 0; j < kEach; j++) {
        const float v =
            first + 16 * j < a.K ? __half2float(__ushort_as_half(__ldcg(reinterpret_cast<const uint16_t*>(x) + place[j]))) : 0.f;
        const uint32_t words[4] = {w[j].x, w[j].y, w[j].z, w[j].w};
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const float low = __half2float(__ushort_as_half(static_cast<uint16_t>(words[n])));
          const float high = __half2float(__ushort_as_half(static_cast<uint16_t>(words[n] >> 16)));
          sum[2 * n] = fmaf(v, low, sum[2 * n]), sum[2 * n + 1] = fmaf(v, high, sum[2 * n + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int d = 16; d > 1; d >>= 1) sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], d);
        if (lane < 2) partial[warp][8 * lane + n] = sum[n];
      }
      __syncthreads();
      if (threadIdx.x < 16) {
        float all = 0.f;
#pragma unroll
        for (int n = 0; n < kWarps; n++) all += partial[n][threadIdx.x];
        sums[16 * tile + threadIdx.x] = all;
        if (ALL) __threadfence();
      }
      __syncthreads();
      if (ALL) finish_tile(a, part, column, row, tile);
    }
  }
  if (!waited) pdl_wait();
}
__global__ void __launch_bounds__(kLoraThreads) lora_shrink(const __grid_constant__ LoraArgs a) { shrink<false>(a); }
__global__ void __launch_bounds__(kLoraThreads) lora_sums(const __grid_constant__ LoraArgs a) { shrink<true>(a); }

__global__ void __launch_bounds__(kLoraThreads) lora_expand(const __grid_constant__ LoraArgs a) {
  constexpr int kLow = 64, kGroups = kLoraThreads / 16;  // ranks at a time; threads that share a sum
  __shared__ float partial[kGroups][16], low[kLow];
  const bool gates = a.next.x != nullptr;
  const int row = blockIdx.y, columns = gates && a.gated ? a.N / 2 : a.N, begin = blockIdx.x * kLoraThreads, c = begin + threadIdx.x;
  const int halves = columns < a.N ? 2 : 1, chunks = (a.K + kLoraChunk - 1) / kLoraChunk;
  pdl_launch_dependents();
  const LoraChange* const change = a.of.of(row);
  for (int64_t i = 0; change && i < change->num_parts; i++) {  // its columns of b into the L2 cache, 64 at a time
    const LoraPart& part = change->parts[i];
    for (int h = 0; h < halves; h++) {
      const int64_t at = h * columns + begin + 64 * (threadIdx.x & 3) - part.first;
      if (threadIdx.x >> 2 < part.rank && at > -64 && at < part.columns)
        prefetch_line(part.b + (threadIdx.x >> 2) * part.columns + (at < 0 ? 0 : at));
    }
  }
  pdl_wait();
  if (!change && !gates) return;
  float* const y = a.y + row * a.stride;
  float v[2] = {};
#pragma unroll
  for (int h = 0; h < 2; h++) v[h] = h < halves && c < columns ? __ldcg(y + h * columns + c) : 0.f;
  const int id = a.ids ? min(max(__ldcg(a.ids + row), 0), a.K - 1) : 0;
  const float* sums = a.sums + static_cast<int64_t>(row) * chunks * a.width;
  for (int64_t i = 0; change && i < change->num_parts; i++) {
    const LoraPart part = change->parts[i];
    const int width = padded_rank(part), rank = static_cast<int>(part.rank);
    bool mine = false;  // the same in the whole CTA
    for (int h = 0; h < halves; h++)
      mine |= part.first < h * columns + min(begin + kLoraThreads, columns) && part.first + part.columns > h * columns + begin;
    for (int r0 = 0; mine && r0 < rank; r0 += kLow) {
      const int count = min(kLow, rank - r0);
      for (int r = 0; r < count; r += 16) {
        const int own = threadIdx.x & 15, group = threadIdx.x >> 4;
        float sum = 0.f;
        if (a.ids)
          sum = group ? 0.f : __half2float(__ushort_as_half(__ldg(part.a + static_cast<int64_t>(id) * width + r0 + r + own)));
        else
          for (int q = group; q < chunks; q += kGroups) sum += __ldcg(sums + static_cast<int64_t>(q) * a.width + r0 + r + own);
        partial[group][own] = sum;
        __syncthreads();
        if (threadIdx.x < 16 && r + own < count) {
          float all = 0.f;
#pragma unroll
          for (int n = 0; n < kGroups; n++) all += partial[n][own];
          low[r + own] = all * __ldg(part.scale + r0 + r + own);
        }
        __syncthreads();
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int64_t at = h * columns + c - part.first;
        if (h >= halves || c >= columns || at < 0 || at >= part.columns) continue;
        const uint16_t* const b = part.b + r0 * part.columns + at;
#pragma unroll 8
        for (int r = 0; r < count; r++) v[h] = fmaf(low[r], __half2float(__ushort_as_half(__ldg(b + r * part.columns))), v[h]);
      }
      __syncthreads();
    }
    sums += width;
  }
  if (c >= columns) return;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if (!change || h >= halves) continue;
    if (change->gain) v[h] += __ldg(change->gain + h * columns + c) * v[h];
    if (change->bias) v[h] += __ldg(change->bias + h * columns + c);
  }
  if (!gates) {
    y[c] = v[0];
    return;
  }
  const half out = saturated(activation(v[0], a.activation) * (halves == 2 ? v[1] : 1.f));
  half* const to = a.next.x + token_place(a.next.group, a.next.stride, row);
  for (int p = 0; p < a.next.num_perms; p++)
    to[static_cast<size_t>(p) * a.next.perm_stride + row_place(a.next.group, a.next.inverse[p] ? __ldg(a.next.inverse[p] + c) : c)] = out;
}

}  // namespace exl2nb
