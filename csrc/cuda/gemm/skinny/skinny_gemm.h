// Skinny GEMM: host interface. Arguments are in skinny_gemm.cuh.
#pragma once
#include <cuda_runtime.h>

#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/runtime/device.cuh"
#include "format/gpu_blob.h"

namespace exl2nb {

// Halves per row of a matrix's input: whole units plus 32, which the missing half of a last unit reads (finite numbers times zero weights)
// and which put rows into different shared-memory banks.
inline int input_stride(const GpuHeader& h) { return (h.stored + 63) / 64 * 64 + 32; }
void set_weights(GemmArgs& a, const uint8_t* head, const uint8_t* blob);
// Input buffer of a blob: x is half[num_perms][rows][input_stride], not grouped.
void set_input(MatrixInput& in, const uint8_t* head, const uint8_t* blob, half* x, int tokens);
int skinny_grid(const GemmArgs& a, Epilogue e);
// Sets epilogue, grid and flush for at most eight rows. Returns the bytes of staged activations.
int skinny_split(GemmArgs& a, Epilogue e);
// Whether the GEMM may compute its inputs from rows of `width` numbers itself (GemmArgs::from).
bool skinny_fuses_norm(GemmArgs a, Epilogue e, int width);
int copy_path();
// Launches a kernel; on the first call raises its limit of dynamic shared memory to `most` bytes.
template <auto kernel, class Args>
const char* launch_gemm(const Args& args, dim3 grid, int threads, int shared, int most, cudaStream_t stream, bool pdl) {
  static const cudaError_t ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (ready != cudaSuccess) return error_text(ready);
  return launch_kernel(kernel, grid, static_cast<unsigned>(threads), static_cast<size_t>(shared), stream, pdl, 1, args);
}
// Calls f with the copy path as a compile-time constant.
template <class F>
auto with_copy_path(F f) {
  switch (copy_path()) {
    case kBulk:
      return f(std::integral_constant<int, kBulk>{});
    case kAsync:
      return f(std::integral_constant<int, kAsync>{});
    default:
      return f(std::integral_constant<int, kPlain>{});
  }
}
// Moves all row pointers of `a` by `first` rows. grid: CTAs of the launch.
void skip_rows(GemmArgs& a, int first, int grid);
// Any number of rows, in launches of at most eight.
const char* skinny_launch(GemmArgs a, Epilogue e, cudaStream_t stream, bool pdl);

}  // namespace exl2nb
