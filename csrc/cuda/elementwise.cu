// The small kernels around the matrix products: embedding, norms into a matrix's input, norms of what is added. One CTA per token.
#include "elementwise.h"

#include "fragment.cuh"
#include "pdl.cuh"

namespace exl2nb {
namespace {

constexpr int kWidth = 512;  // threads

// The same sum in every thread, in a fixed order.
__device__ float block_sum(float v, float* shared) {
  v = warp_sum(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
  __syncthreads();
  v = threadIdx.x < kWidth / 32 ? shared[threadIdx.x] : 0.f;
  if (threadIdx.x < 32) {
    v = warp_sum(v);
    if (threadIdx.x == 0) shared[0] = v;
  }
  __syncthreads();
  return shared[0];
}

__device__ float element(const void* table, int dtype, size_t i) {
  if (dtype == 0) return static_cast<const float*>(table)[i];
  if (dtype == 1) return __half2float(static_cast<const half*>(table)[i]);
  return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(table)[i]) << 16);
}

// A token's row in registers: element i of thread t is threadIdx.x + i * kWidth. Longer rows go through memory for the rest.
constexpr int kHeld = 16;
struct Held {
  float v[kHeld];
  template <class Load>
  __device__ __forceinline__ void fill(int width, Load load) {  // all loads before any use
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const int at = threadIdx.x + i * kWidth;
      v[i] = at < width ? load(at) : 0.f;
    }
  }
};

// The normed row goes to `out`. row: f32 (width,) in global memory, of which `held` holds the first kHeld * kWidth numbers.
__device__ void normed(const Held& held, const float* row, const NormArgs& n, int token, const MatrixInput& out, float* shared) {
  float mean = 0.f, factor = 1.f;
  const int rest = kHeld * kWidth + threadIdx.x;
  if (n.kind == kLayerNorm) {
    float s = 0.f;
#pragma unroll
    for (int i = 0; i < kHeld; i++) s += held.v[i];
    for (int i = rest; i < n.width; i += kWidth) s += __ldcg(row + i);
    mean = block_sum(s, shared) / n.width;
  }
  if (n.kind != kNoNorm) {
    float s = 0.f;
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const float v = static_cast<int>(threadIdx.x) + i * kWidth < n.width ? held.v[i] - mean : 0.f;
      s = fmaf(v, v, s);
    }
    for (int i = rest; i < n.width; i += kWidth) {
      const float v = __ldcg(row + i) - mean;
      s = fmaf(v, v, s);
    }
    factor = rsqrtf(block_sum(s, shared) / n.width + n.eps);
  }
  const auto result = [&](int at, float v) {
    if (n.kind != kNoNorm) v = (v - mean) * factor * n.weight[at] + (n.bias ? n.bias[at] : 0.f);
    out.put(token, at, v);
  };
#pragma unroll
  for (int i = 0; i < kHeld; i++)
    if (static_cast<int>(threadIdx.x) + i * kWidth < n.width) result(threadIdx.x + i * kWidth, held.v[i]);
  for (int i = rest; i < n.width; i += kWidth) result(i, __ldcg(row + i));
}

__global__ void __launch_bounds__(kWidth) embed_kernel(const __grid_constant__ EmbedArgs a) {
  __shared__ float shared[32];
  pdl_wait();  // first, so that no later kernel of this step runs beside the previous step
  pdl_launch_dependents();
  const int token = blockIdx.x;
  int id = __ldcg(a.ids + token), position = a.position_table ? __ldcg(a.positions + token) : 0;
  id = min(max(id, 0), a.vocab - 1), position = min(max(position, 0), a.max_positions - 1);
  float* const row = a.x + static_cast<size_t>(token) * a.width;
  const auto load = [&](int i) {
    const float v = element(a.table, a.dtype, static_cast<size_t>(id) * a.width + i) * a.scale;
    return a.position_table ? v + element(a.position_table, a.position_dtype, static_cast<size_t>(position) * a.width + i) : v;
  };
  Held held;
  held.fill(a.width, load);
#pragma unroll
  for (int i = 0; i < kHeld; i++)
    if (static_cast<int>(threadIdx.x) + i * kWidth < a.width) row[threadIdx.x + i * kWidth] = held.v[i];
  for (int i = threadIdx.x + kHeld * kWidth; i < a.width; i += kWidth) row[i] = load(i);
  if (a.next.x) normed(held, row, a.norm, token, a.next, shared);
}

__global__ void __launch_bounds__(kWidth) prepare_kernel(const __grid_constant__ PrepareArgs a) {
  __shared__ float shared[32];
  pdl_launch_dependents();
  pdl_wait();
  int row = a.rows ? __ldcg(a.rows + blockIdx.x) : blockIdx.x;
  row = min(max(row, 0), a.tokens - 1);
  const float* const x = a.x + static_cast<size_t>(row) * a.norm.width;
  Held held;
  held.fill(a.norm.width, [&](int i) { return __ldcg(x + i); });
  normed(held, x, a.norm, blockIdx.x, a.next, shared);
}

__global__ void __launch_bounds__(kWidth) combine_kernel(const __grid_constant__ CombineArgs a) {
  __shared__ float shared[32];
  pdl_launch_dependents();
  pdl_wait();
  float* const x = a.x + static_cast<size_t>(blockIdx.x) * a.width;
  const float *y = a.y + static_cast<size_t>(blockIdx.x) * a.pairs * a.width, *weights = a.weights + blockIdx.x * a.pairs;
  const auto sum = [&](int i) {
    if (!a.weights) return __ldcg(y + i);
    float v = 0.f;
#pragma unroll 8
    for (int p = 0; p < a.pairs; p++) v = fmaf(__ldcg(weights + p), __ldcg(y + static_cast<size_t>(p) * a.width + i), v);
    return v;
  };
  const int rest = kHeld * kWidth + threadIdx.x;
  Held held;
  held.fill(a.width, sum);
  float factor = 1.f;
  if (a.post_norm) {
    float s = 0.f;
#pragma unroll
    for (int i = 0; i < kHeld; i++) s = fmaf(held.v[i], held.v[i], s);
    for (int i = rest; i < a.width; i += kWidth) {
      const float v = sum(i);
      s = fmaf(v, v, s);
    }
    factor = rsqrtf(block_sum(s, shared) / a.width + a.post_eps);
  }
  const auto added = [&](int i, float v) {
    const float after = __ldcg(x + i) + a.scale * (a.post_norm ? v * factor * a.post_norm[i] : v);
    x[i] = after;
    return after;
  };
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    const int at = threadIdx.x + i * kWidth;
    if (at < a.width) held.v[i] = added(at, held.v[i]);
  }
  for (int i = rest; i < a.width; i += kWidth) added(i, sum(i));
  if (a.next.x) normed(held, x, a.norm, blockIdx.x, a.next, shared);
}

template <auto kernel, class Args>
const char* launched(const Args& args, int blocks, cudaStream_t stream, bool pdl) {
  if (blocks == 0) return nullptr;
  static const cudaError_t ready =
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (ready != cudaSuccess) return cudaGetErrorString(ready);
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks, config.blockDim = kWidth, config.stream = stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute, config.numAttrs = pdl ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* embed_launch(const EmbedArgs& a, int tokens, cudaStream_t stream, bool pdl) {
  return launched<embed_kernel>(a, tokens, stream, pdl);
}
const char* prepare_launch(const PrepareArgs& a, int rows, cudaStream_t stream, bool pdl) {
  return launched<prepare_kernel>(a, rows, stream, pdl);
}
const char* combine_launch(const CombineArgs& a, int tokens, cudaStream_t stream, bool pdl) {
  return launched<combine_kernel>(a, tokens, stream, pdl);
}

}  // namespace exl2nb
