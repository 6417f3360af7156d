// gptq_quantize on the CPU: checks, allocation, call.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "../cpu/dispatch.h"
#include "../cpu/gptq.h"
#include "../cpu/parallel.h"

using torch::stable::Tensor;

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> gptq_quantize(const Tensor& weight, const Tensor& factor, const Tensor& column_weight,
                                                         const Tensor& groups, const std::optional<Tensor>& coupling,
                                                         const std::optional<Tensor>& spread) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == ScalarType::Float && weight.is_contiguous(),
                  "gptq_quantize: weight: expected contiguous f32 (K, N)");
  const int64_t K = weight.size(0), N = weight.size(1);
  STD_TORCH_CHECK(factor.dim() == 2 && factor.size(0) == K && factor.size(1) == K && factor.scalar_type() == ScalarType::Float &&
                      factor.is_contiguous(),
                  "gptq_quantize: factor: expected contiguous f32 (K, K), K = ", K);
  STD_TORCH_CHECK(column_weight.dim() == 1 && column_weight.size(0) == N && column_weight.scalar_type() == ScalarType::Float &&
                      column_weight.is_contiguous(),
                  "gptq_quantize: column_weight: expected contiguous f32 (N,), N = ", N);
  STD_TORCH_CHECK(groups.dim() == 1 && groups.size(0) % 2 == 0 && groups.scalar_type() == ScalarType::Int && groups.is_contiguous(),
                  "gptq_quantize: groups: expected contiguous int32 (2 * G,)");
  STD_TORCH_CHECK(K <= 1 << 20 && N <= 1 << 24, "gptq_quantize: weight is ", K, " x ", N, "; expected at most 2^20 x 2^24");
  const int64_t G = groups.size(0) / 2;
  const int32_t* table = groups.const_data_ptr<int32_t>();
  int64_t rows = 0;
  for (int64_t g = 0; g < G; g++) {
    STD_TORCH_CHECK(table[2 * g] >= 2 && table[2 * g] <= 8 && table[2 * g + 1] > 0, "gptq_quantize: group ", g, " is ", table[2 * g],
                    " bits, ", table[2 * g + 1], " rows; expected 2 to 8 bits and at least one row");
    rows += table[2 * g + 1];
  }
  STD_TORCH_CHECK(rows == K, "gptq_quantize: rows of all groups is ", rows, "; expected ", K, " in all");
  int64_t B = 0;
  STD_TORCH_CHECK(coupling.has_value() == spread.has_value(), "gptq_quantize: coupling and spread: expected both or neither");
  if (coupling) {
    STD_TORCH_CHECK(coupling->dim() == 3 && coupling->scalar_type() == ScalarType::Float && coupling->is_contiguous(),
                    "gptq_quantize: coupling: expected contiguous f32 (N / B, B, B)");
    B = coupling->size(2);
    STD_TORCH_CHECK(B > 0 && B % exl2nb::gptq::LANES == 0 && coupling->size(1) == B && coupling->size(0) * B == N,
                    "gptq_quantize: coupling has blocks of ", B, "; expected square blocks of a multiple of ", exl2nb::gptq::LANES,
                    " that make up N = ", N);
    STD_TORCH_CHECK(spread->dim() == 1 && spread->size(0) == N && spread->scalar_type() == ScalarType::Float && spread->is_contiguous(),
                    "gptq_quantize: spread: expected contiguous f32 (N,), N = ", N);
  }
  Tensor codes = torch::stable::empty({K, N}, ScalarType::Byte), index = torch::stable::empty({G, N}, ScalarType::Byte);
  Tensor scale_max = torch::stable::empty({G}, ScalarType::Half), loss = torch::stable::empty({G, N}, ScalarType::Float);
  exl2nb::gptq::Problem problem{weight.const_data_ptr<float>(),
                                factor.const_data_ptr<float>(),
                                column_weight.const_data_ptr<float>(),
                                table,
                                coupling ? coupling->const_data_ptr<float>() : nullptr,
                                spread ? spread->const_data_ptr<float>() : nullptr,
                                int(K),
                                int(N),
                                int(G),
                                int(B),
                                codes.mutable_data_ptr<uint8_t>(),
                                index.mutable_data_ptr<uint8_t>(),
                                static_cast<uint16_t*>(scale_max.mutable_data_ptr()),
                                loss.mutable_data_ptr<float>()};
  exl2nb::gptq::quantize(problem, int(exl2nb::isa()), [](int64_t count, const std::function<void(int64_t, int64_t)>& work) {
    exl2nb::for_each_task(count, true, [&](int64_t i) { work(i, i + 1); });
  });
  return {codes, index, scale_max, loss};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CPU, m) { m.impl("gptq_quantize", TORCH_BOX(&gptq_quantize)); }
