// EXL2 tensors to fp16 weights, exactly as quant/FORMAT.md, "Reconstruction". A CTA owns one original row: it finds the stored row and
// group once, then each thread decodes whole columns. Reads each packed word up to 32 / bits times, mostly from L2; writes 2 * K * N bytes.
// A stored row outside the matrix gives a row of NaN, no access outside.
#include "cuda/runtime/types.h"

namespace exl2nb {

__global__ void reconstruct_rows(const uint32_t* __restrict__ q_weight, int R, const uint32_t* __restrict__ q_scale,
                                 const half* __restrict__ q_scale_max, const int16_t* __restrict__ q_groups, int G,
                                 const int32_t* __restrict__ q_invperm, int K, int N, half* __restrict__ out) {
  __shared__ int bits, word, bit, group;
  const int row = blockIdx.x;
  if (threadIdx.x == 0) {
    int left = q_invperm[row];
    group = -1;
    for (int g = 0; g < G && left >= 0; g++) {
      const int first = uint16_t(q_groups[2 * g + 1]), end = g + 1 < G ? uint16_t(q_groups[2 * g + 3]) : R;
      const int b = q_groups[2 * g], rows = (end - first) * 32 / b;
      if (left < rows) {
        group = g, bits = b, word = first + left * b / 32, bit = left * b % 32;
        break;
      }
      left -= rows;
    }
  }
  __syncthreads();
  half* const to = out + int64_t(row) * N;
  if (group < 0) {
    for (int n = threadIdx.x; n < N; n += blockDim.x) to[n] = __ushort_as_half(0x7e00);
    return;
  }
  const half m = __float2half_rn(__half2float(q_scale_max[group]) * (1.0f / 256.0f));
  for (int n = threadIdx.x; n < N; n += blockDim.x) {
    const uint32_t low = q_weight[int64_t(word) * N + n];
    const uint32_t high = bit + bits > 32 ? q_weight[int64_t(word + 1) * N + n] : 0;
    const int code = int(__funnelshift_r(low, high, bit) & ((1u << bits) - 1));
    const int index = int(q_scale[int64_t(group) * (N / 8) + n / 8] >> (4 * (n % 8))) & 15;
    const half s = __hmul(__int2half_rn((index + 1) * (index + 1)), m);
    to[n] = __hmul(__int2half_rn(code - (1 << (bits - 1))), s);
  }
}

}  // namespace exl2nb
