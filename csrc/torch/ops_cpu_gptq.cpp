// gptq_quantize on the CPU: checks, allocation, call.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "../cpu/gptq.h"
#include "check.h"

namespace exl2nb {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> gptq_quantize(const Tensor& weight, const Tensor& factor, const Tensor& column_weight,
                                                         const Tensor& groups, const std::optional<Tensor>& coupling,
                                                         const std::optional<Tensor>& spread) {
  const char* op = "gptq_quantize";
  const float* w = data_f32(op, "weight", weight, {-1, -1});
  const int64_t K = weight.size(0), N = weight.size(1);
  EXL2NB_CHECK(op, K <= 1 << 20 && N <= 1 << 24, "weight is ", K, " x ", N, "; expected at most 2^20 x 2^24");
  const float* u = data_f32(op, "factor", factor, {K, K});
  const float* columns = data_f32(op, "column_weight", column_weight, {N});
  const int32_t* table = data_i32(op, "groups", groups, {-1});
  EXL2NB_CHECK(op, groups.size(0) % 2 == 0, "groups has ", groups.size(0), " numbers; expected pairs of bits and rows");
  const int64_t G = groups.size(0) / 2;
  int64_t rows = 0;
  for (int64_t g = 0; g < G; g++) {
    EXL2NB_CHECK(op, table[2 * g] >= 2 && table[2 * g] <= 8 && table[2 * g + 1] > 0, "group ", g, " is ", table[2 * g], " bits, ",
                 table[2 * g + 1], " rows; expected 2 to 8 bits and at least one row");
    rows += table[2 * g + 1];
  }
  EXL2NB_CHECK(op, rows == K, "rows of all groups is ", rows, "; expected ", K, " in all");
  EXL2NB_CHECK(op, coupling.has_value() == spread.has_value(), "coupling and spread: expected both or neither");
  const float* coupled = data_f32(op, "coupling", coupling, {-1, -1, -1});
  const int64_t B = coupling ? coupling->size(2) : 0;
  if (coupling)
    EXL2NB_CHECK(op, B > 0 && B % gptq::LANES == 0 && coupling->size(1) == B && coupling->size(0) * B == N, "coupling has blocks of ", B,
                 "; expected square blocks of a multiple of ", gptq::LANES, " that make up N = ", N);
  Tensor codes = torch::stable::empty({K, N}, ScalarType::Byte), index = torch::stable::empty({G, N}, ScalarType::Byte);
  Tensor scale_max = torch::stable::empty({G}, ScalarType::Half), loss = torch::stable::empty({G, N}, ScalarType::Float);
  gptq::quantize({w, u, columns, table, coupled, data_f32(op, "spread", spread, {N}), int(K), int(N), int(G), int(B),
                  codes.mutable_data_ptr<uint8_t>(), index.mutable_data_ptr<uint8_t>(),
                  static_cast<uint16_t*>(scale_max.mutable_data_ptr()), loss.mutable_data_ptr<float>()});
  return {codes, index, scale_max, loss};
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CPU, m) { m.impl("gptq_quantize", TORCH_BOX(&exl2nb::gptq_quantize)); }
