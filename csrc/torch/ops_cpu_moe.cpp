// The routed MLP of the CPU library: checks, output tensor, registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "../cpu/moe.h"
#include "check.h"

namespace exl2nb {
namespace {

constexpr const char* kOp = "routed_mlp";

const uint8_t* check_shape(const char* name, const Tensor& blob, int64_t K, int64_t N) {
  const uint8_t* w = check_weight(kOp, blob, true);
  STD_TORCH_CHECK(header(w).K == K && (N < 0 || header(w).N == N), kOp, ": ", name, " is (", header(w).K, ", ", header(w).N,
                  "); expected (", K, ", ", N < 0 ? std::string("*") : std::to_string(N), ")");
  return w;
}

Tensor routed_mlp_cpu(Tensor x, const std::optional<Tensor>& norm, double eps, const Tensor& router, std::vector<Tensor> up,
                      std::vector<Tensor> down, int64_t top_k, double renormalize, int64_t activation,
                      const std::optional<Tensor>& norm_bias, bool layer_norm, const std::optional<Tensor>& shared_up,
                      const std::optional<Tensor>& shared_down, const std::optional<Tensor>& shared_gate,
                      const std::optional<Tensor>& post_norm, double post_eps, double scale) {
  data_f32(kOp, "x", x, {-1, -1});
  const int64_t T = x.size(0), H = x.size(1), count = int64_t(up.size());
  STD_TORCH_CHECK(count > 0 && up.size() == down.size(), kOp, ": there are ", up.size(), " up and ", down.size(),
                  " down matrices; expected one of each per expert");
  STD_TORCH_CHECK(top_k >= 1 && top_k <= count, kOp, ": top_k is ", top_k, "; expected 1 to ", count, " (the experts)");
  STD_TORCH_CHECK(activation >= 0 && activation <= 2, kOp, ": activation is ", activation,
                  "; expected 0 (silu), 1 (gelu) or 2 (gelu_tanh)");
  STD_TORCH_CHECK(norm || !norm_bias, kOp, ": norm_bias without norm");
  STD_TORCH_CHECK(shared_up.has_value() == shared_down.has_value() && (shared_up || !shared_gate), kOp,
                  ": a shared expert needs shared_up and shared_down");
  const int64_t I = header(check_weight(kOp, down[0], false)).K;
  std::vector<int64_t> table;
  for (size_t i = 0; i < up.size(); i++) {
    table.push_back(reinterpret_cast<int64_t>(check_shape("up", up[i], H, 2 * I)));
    table.push_back(reinterpret_cast<int64_t>(check_shape("down", down[i], I, H)));
  }
  Experts e{check_shape("router", router, H, count),
            table.data(),
            int(count),
            int(top_k),
            float(renormalize),
            int(activation),
            nullptr,
            nullptr,
            nullptr,
            {data_f32(kOp, "post_norm", post_norm, {H}), float(post_eps)},
            float(scale)};
  if (shared_up) {
    e.shared_up = check_shape("shared_up", *shared_up, H, -1);
    STD_TORCH_CHECK(header(e.shared_up).N % 2 == 0, kOp, ": shared_up has ", header(e.shared_up).N, " outputs; expected an even number");
    e.shared_down = check_shape("shared_down", *shared_down, header(e.shared_up).N / 2, H);
    if (shared_gate) e.shared_gate = check_shape("shared_gate", *shared_gate, H, 1);
  }
  const Norm n{data_f32(kOp, "norm", norm, {H}), float(eps), data_f32(kOp, "norm_bias", norm_bias, {H}), layer_norm};
  const std::vector<int64_t> sizes{T, top_k};
  Tensor chosen = torch::stable::empty(sizes, ScalarType::Int);
  routed_mlp(static_cast<float*>(x.mutable_data_ptr()), int(T), n, e, static_cast<int32_t*>(chosen.mutable_data_ptr()));
  return chosen;
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CPU, m) { m.impl("routed_mlp", TORCH_BOX(&exl2nb::routed_mlp_cpu)); }
