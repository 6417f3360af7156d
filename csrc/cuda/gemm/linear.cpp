// One GEMM by itself: f32 rows are rounded and permuted into the input order, then multiplied.
#include <algorithm>

#include "cuda/gemm/elementwise.h"
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/gemm/stream_k/stream_k_gemm.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/kernel.h"
#include "cuda/runtime/launch.h"

namespace exl2nb {

int64_t linear_workspace(const uint8_t* head, int64_t tokens, bool stream_k) {
  const auto& h = header_of(head);
  const auto T = static_cast<int>(tokens);
  return (static_cast<int64_t>(std::max(1, h.num_perms)) * input_stride(h) * stream_k_rows(T) * 2 + 255) / 256 * 256 +
         (stream_k ? static_cast<int64_t>(stream_k_workspace(this_device(), T)) : 0);
}

const char* linear_launch(const uint8_t* head, const uint8_t* blob, const float* x, int64_t tokens, const float* bias, float* out,
                          void* workspace, void* stream, bool stream_k) {
  const auto& h = header_of(head);
  const int T = static_cast<int>(tokens);
  MatrixInput in;
  set_input(in, head, blob, static_cast<half*>(workspace), stream_k_rows(T));
  uint8_t* const sums = static_cast<uint8_t*>(workspace) + linear_workspace(head, tokens, false);
  LaunchList list(this_device(), false);
  GemmArgs a{};
  set_weights(a, head, blob);
  a.tokens = T;
  in.group = stream_k && T > kSkinnyTokens && stream_k_takes(list.device, a) ? stream_k_group(T) : 0;
  RowsArgs rows{{}, nullptr, T, in};
  rows.from.x = x, rows.from.norm.width = h.K;
  plan_rows(list, rows, T);
  a.x = in.x, a.x_stride = in.stride, a.x_perm_stride = in.perm_stride;
  a.out = out, a.out_stride = h.N, a.bias = bias;
  if (in.group)
    plan_stream_k(list, a, in.group, {}, sums);
  else
    plan_skinny(list, a, kStore);
  return list.run(stream);
}

}  // namespace exl2nb
