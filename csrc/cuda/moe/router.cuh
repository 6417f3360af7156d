// Router fused into a residual GEMM: the CTA that owns columns of the residual also multiplies them, times the next norm's weights, with
// the router's rows of these columns, so routing costs no launch. Each CTA leaves partial sums over its columns, which the experts' kernels
// add up (moe_gemm.cuh); norm factor and mean follow from two more sums. The router is dense fp16: 16 columns x 16 experts are 512 bytes.
#pragma once
#include "cuda/blob/item_mma.cuh"
#include "cuda/runtime/pdl.cuh"

namespace exl2nb {

// out: [token][CTA][rows * stride + 4] floats; null: no router. Rows: columns x norm weights; with a mean (LayerNorm): the weights alone;
// with a bias: the bias. Then sum and sum of squares.
struct RouterTap {
  struct Part {
    const uint8_t* data;
    int strips, outputs, first_column, strip_bytes;
  } part[2];
  int strips, stride, rows;  // strips of both parts
  const float* bias;
  float* out;

  EXL2NB_BOTH int size() const { return rows * stride + 4; }
  // Bytes of shared memory for `columns` columns.
  EXL2NB_BOTH int bytes(int columns) const { return out ? columns / 16 * strips * 512 : 0; }
};

#ifdef __CUDACC__
// Loads the router's rows of this CTA's columns; tap_router waits for them.
template <int PATH>
__device__ __forceinline__ void fetch_router(const RouterTap& R, uint8_t* to, int owned_strips, int block, int grid) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
  for (int q = 0; q < owned_strips; q++) {
    const int k16 = block + q * grid, at = (k16 >> 2) * 2048 + (k16 & 3) * 512 + lane * 16;
#pragma unroll 1
    for (int j = warp; j < R.strips; j += kWarps) {
      const int p = j >= R.part[0].strips;
      const uint8_t* const strip = R.part[p].data + static_cast<size_t>(j - (p ? R.part[0].strips : 0)) * R.part[p].strip_bytes;
      copy16<PATH != kPlain>(to + (q * R.strips + j) * 512 + lane * 16, strip + at);
    }
  }
  if constexpr (PATH != kPlain) async_commit();
}

// kept: new residual [token][owned]; norms: norm weights of this CTA's columns; both written before the barrier in here. Runs once: short
// code.
template <int PATH>
__device__ __forceinline__ void tap_router(const RouterTap& R, const float* kept, const float* norms, const uint8_t* rows, int tokens,
                                           int owned, int owned_strips, int block, int grid, int warp, int lane) {
  if constexpr (PATH != kPlain) async_wait<0>();
  __syncthreads();
  const int g = lane >> 2, t = lane & 3, size = R.size(), hop = grid * size;
  float* const out = R.out + static_cast<size_t>(block) * size;
  if (const int m = kWarps - 1 - warp; m < tokens) {  // the last warps have the least to do
    float sum = 0.f, squares = 0.f;
#pragma unroll 1
    for (int i = lane; i < owned_strips * 16; i += 32) {
      const float v = kept[m * owned + i];
      sum += v, squares = fmaf(v, v, squares);
    }
    sum = warp_sum(sum), squares = warp_sum(squares);
    if (lane == 0) *reinterpret_cast<float4*>(out + m * hop + size - 4) = float4{sum, squares, 0, 0};
  }
  const float* const mine = kept + min(g, tokens - 1) * owned + 2 * t;
#pragma unroll 1
  for (int j = warp; j < R.strips; j += kWarps) {
    const int p = j >= R.part[0].strips, column = (j - (p ? R.part[0].strips : 0)) * 16 + g;
#pragma unroll 1
    for (int row = 0; row < R.rows; row++) {
      float c[4] = {0, 0, 0, 0};
#pragma unroll 1
      for (int q = 0; q < owned_strips; q++) {
        const uint4 a = reinterpret_cast<const uint4*>(rows)[(q * R.strips + j) * 32 + lane];
        uint32_t b[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int i = q * 16 + 8 * h;
          float2 v = *reinterpret_cast<const float2*>(norms + i + 2 * t);
          if (row == 0) {
            const float2 x = *reinterpret_cast<const float2*>(mine + i);
            v.x *= x.x, v.y *= x.y;
          } else if (row == 2) {
            v = __ldg(reinterpret_cast<const float2*>(R.bias + (block + q * grid) * 16 + 8 * h + 2 * t));
          }
          const half2 two{saturated(v.x), saturated(v.y)};
          b[h] = *reinterpret_cast<const uint32_t*>(&two);
        }
        mma<PATH, false>(c, &a.x, b[0], b[1]);
      }
      float* const to = out + row * R.stride + R.part[p].first_column + column + 2 * t * hop;
#pragma unroll
      for (int k = 0; k < 4; k++)
        if (2 * t + (k & 1) < tokens && column + (k >> 1 << 3) < R.part[p].outputs) to[(k & 1) * hop + (k >> 1 << 3)] = c[k];
    }
  }
}

#endif  // __CUDACC__

}  // namespace exl2nb
