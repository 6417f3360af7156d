// What the CUDA kernels offer: plain functions without a torch header. Each returns nullptr, or what went wrong.
#pragma once
#include <cstdint>
#include <vector>

#include "cuda/blob/blob.h"

namespace exl2nb {

// EXL2 tensors on the device -> f16 (K, N), rows in original order. The caller has checked q_groups (read_groups, gpu_layout.h).
const char* reconstruct_launch(const int32_t* q_weight, int64_t R, const int32_t* q_scale, const void* q_scale_max, const int16_t* q_groups,
                               int64_t G, const int32_t* q_invperm, int64_t K, int64_t N, void* out, void* stream);

// Into the strips of a part of a blob (gpu_blob.h): EXL2 codes, GPTQ codes, or weights (N, K), dtype 0 f32, 1 f16, 2 bf16, as fp16.
const char* pack_exl2_launch(const PackSource& source, const PackTarget& to, void* stream);
const char* pack_gptq_launch(const GptqPacking& source, const PackTarget& to, void* stream);
const char* pack_dense_launch(const void* weight, int dtype, int N, int K, const PackTarget& to, void* stream);

// A blob's matrix, on the device -> f16 (K, N), rows in original order, values as the format rounds them. head: a host copy of its header
// and parts, as for everything below.
const char* unpack_launch(const uint8_t* head, const uint8_t* blob, void* out, void* stream);

// The table (moe.h) of the experts whose blobs' heads (step.h) and images (gpu_blob.h) are given, of `parts` parts each; or what is wrong.
const char* make_expert_table(const std::vector<const uint8_t*>& heads, const std::vector<std::vector<uint8_t>>& images, int parts,
                              std::vector<uint8_t>& table);

// Between host and device, in the order of the stream; done when they return.
const char* copy_out(void* host, const void* device, int64_t bytes, void* stream);
const char* copy_in(void* device, const void* host, int64_t bytes, void* stream);
const char* copy_within(void* to, const void* from, int64_t bytes, void* stream);  // on the device; may still run when it returns

// out f32 (tokens, N) = x f32 (tokens, K) times the blob's matrix, plus bias. workspace: zeroed, linear_workspace bytes. stream_k: more
// than kSkinnyTokens may go through stream_k_gemm.cuh.
int64_t linear_workspace(const uint8_t* head, int64_t tokens, bool stream_k);
const char* linear_launch(const uint8_t* head, const uint8_t* blob, const float* x, int64_t tokens, const float* bias, float* out,
                          void* workspace, void* stream, bool stream_k);

}  // namespace exl2nb
