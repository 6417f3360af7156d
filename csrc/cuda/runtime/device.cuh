// Launching: the device's size, errors as text, programmatic dependent launch.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>

namespace exl2nb {

inline const char* error_text(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

inline int multiprocessors() {
  static int count[64] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return 1;
  if (!count[device] && cudaDeviceGetAttribute(&count[device], cudaDevAttrMultiProcessorCount, device) != cudaSuccess) count[device] = 1;
  return count[device];
}

// Tests take a newer GPU for an older one: EXL2NB_CUDA_PATH is 1 for one of sm_80 to 89, 2 for one of sm_75, in code and in memory.
inline int pretended() {
  static const int path = [] {
    const char* const text = std::getenv("EXL2NB_CUDA_PATH");
    return text ? std::clamp(std::atoi(text), 0, 2) : 0;
  }();
  return path;
}
inline int compute_major() {
  static int major[64] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return 0;
  if (!major[device] && cudaDeviceGetAttribute(&major[device], cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return 0;
  return pretended() ? std::min(major[device], 9 - pretended()) : major[device];
}
// Bytes of shared memory: what a kernel may ask for, and what the CTAs of a multiprocessor share. 0: the device does not tell.
inline int shared_per_block() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return pretended() ? std::min(bytes, pretended() == 1 ? 99 << 10 : 64 << 10) : bytes;
}
inline int shared_per_multiprocessor() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  return pretended() ? std::min(bytes, pretended() == 1 ? 100 << 10 : 64 << 10) : bytes;
}

// cluster: CTAs that may read one another's shared memory, 1 = none.
template <class... Parameters, class... Arguments>
const char* launch_kernel(void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared, void* stream, bool pdl,
                          unsigned cluster, const Arguments&... arguments) {
  // As in every kernel of a step: another share for shared memory would empty the multiprocessors first.
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared,
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (pdl && compute_major() >= 9) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {cluster, 1, 1};
    config.numAttrs++;
  }
  return error_text(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace exl2nb
