// What the CUDA kernels offer: plain functions without a torch header. Each returns nullptr, or what went wrong.
#pragma once
#include <cstdint>

namespace exl2nb {

// EXL2 tensors on the device -> f16 (K, N), rows in original order. q_groups is read back and checked before the kernel is launched.
const char* reconstruct_launch(const int32_t* q_weight, int64_t R, const int32_t* q_scale, const void* q_scale_max, const int16_t* q_groups,
                               int64_t G, const int32_t* q_invperm, int64_t K, int64_t N, void* out, void* stream);

}  // namespace exl2nb
