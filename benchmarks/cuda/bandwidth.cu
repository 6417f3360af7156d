// The roof of all results: read bandwidth of the GPU, and the gap between two kernels of a graph.
//   nvcc -O3 -std=c++17 -arch=sm_90 bandwidth.cu -o bandwidth && ./bandwidth
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "check.cuh"

__global__ void fill(uint32_t* p, size_t n) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    p[i] = uint32_t(i) * 2654435761u;
}

__global__ void read(const uint4* p, size_t n, uint32_t* out) {
  uint4 sum = make_uint4(0, 0, 0, 0);
  const size_t hop = size_t(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i + 3 * hop < n; i += 4 * hop) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = __ldcs(p + i + j * hop);
#pragma unroll
    for (int j = 0; j < 4; j++) sum.x ^= v[j].x, sum.y ^= v[j].y, sum.z ^= v[j].z, sum.w ^= v[j].w;
  }
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 12345) *out = 1;  // never: keeps the reads
}

__global__ void nothing() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Best of `rounds`, in ms.
template <class Work>
float best(int rounds, cudaStream_t stream, Work work) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  float fastest = 1e9f;
  for (int i = 0; i < rounds; i++) {
    CHECK(cudaEventRecord(begin, stream));
    work();
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaStreamSynchronize(stream));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    fastest = std::min(fastest, ms);
  }
  return fastest;
}

int main() {
  cudaDeviceProp gpu;
  CHECK(cudaGetDeviceProperties(&gpu, 0));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  const size_t bytes = size_t(4) << 30;
  uint32_t *data, *out;
  CHECK(cudaMalloc(&data, bytes));
  CHECK(cudaMalloc(&out, 4));
  fill<<<4096, 256, 0, stream>>>(data, bytes / 4);
  const auto* vectors = reinterpret_cast<const uint4*>(data);
  const float ms = best(8, stream, [&] { read<<<gpu.multiProcessorCount * 8, 512, 0, stream>>>(vectors, bytes / 16, out); });
  std::printf("%s, %d multiprocessors: read %.0f GB/s\n", gpu.name, gpu.multiProcessorCount, bytes / ms * 1e-6);
  for (int dependent = 0; dependent < (gpu.major >= 9 ? 2 : 1); dependent++) {
    constexpr int kKernels = 500;
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < kKernels; i++) {
      cudaLaunchConfig_t config = {};
      config.gridDim = gpu.multiProcessorCount, config.blockDim = 512, config.stream = stream;
      cudaLaunchAttribute attribute[1];
      attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute[0].val.programmaticStreamSerializationAllowed = 1;
      config.attrs = attribute, config.numAttrs = dependent;
      CHECK(cudaLaunchKernelEx(&config, nothing));
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&ready, graph, 0));
    const float all = best(6, stream, [&] { CHECK(cudaGraphLaunch(ready, stream)); });
    std::printf("an empty kernel in a graph%s: %.2f us\n", dependent ? ", dependent launch" : "", all * 1e3f / kKernels);
  }
}
