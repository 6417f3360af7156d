// gptq_block on the GPU: checks, allocation, call.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/gptq/gptq.h"
#include "stream.h"

namespace exl2nb {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void require(const char* name, const Tensor& t, const Tensor& like, const std::vector<int64_t>& shape) {
  bool fits = t.is_cuda() && t.get_device_index() == like.get_device_index() && t.is_contiguous() && t.scalar_type() == ScalarType::Float &&
              t.dim() == int64_t(shape.size());
  for (size_t i = 0; fits && i < shape.size(); i++) fits = t.size(int64_t(i)) == shape[i];
  std::string wanted;
  for (const int64_t n : shape) wanted += (wanted.empty() ? "(" : ", ") + std::to_string(n);
  STD_TORCH_CHECK(fits, "gptq_block: ", name, " has ", t.dim(), " dimensions and ", t.numel(), " elements; expected contiguous f32 ",
                  wanted, ") on the device of w");
}

// The table of groups, checked: rows of the block.
int64_t check_groups(const Tensor& groups) {
  STD_TORCH_CHECK(groups.is_cpu() && groups.is_contiguous() && groups.scalar_type() == ScalarType::Int && groups.dim() == 3 &&
                      groups.size(2) == 2 && groups.size(0) >= 1 && groups.size(0) <= kGptqOptions && groups.size(1) >= 1,
                  "gptq_block: groups: expected contiguous int32 (P, S, 2) on the CPU, P from 1 to ", kGptqOptions);
  const int32_t* table = groups.const_data_ptr<int32_t>();
  int64_t rows = 0;
  for (int64_t p = 0; p < groups.size(0); p++) {
    int64_t sum = 0;
    for (int64_t s = 0; s < groups.size(1); s++) {
      const int32_t* pair = table + 2 * (p * groups.size(1) + s);
      STD_TORCH_CHECK(pair[1] == 0 || (pair[1] > 0 && pair[0] >= 2 && pair[0] <= 8), "gptq_block: group ", s, " of option ", p, " is ",
                      pair[0], " bits, ", pair[1], " rows; expected 2 to 8 bits and no negative number of rows");
      sum += pair[1];
    }
    if (p == 0) rows = sum;
    STD_TORCH_CHECK(sum == rows && rows > 0, "gptq_block: option ", p, " has ", sum, " rows; expected ", rows,
                    " as in option 0, and more than 0");
  }
  return rows;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gptq_block(const Tensor& w, const Tensor& factor, const Tensor& column_weight,
                                                              const Tensor& groups, int64_t first, const std::optional<Tensor>& coupling,
                                                              const std::optional<Tensor>& spread) {
  STD_TORCH_CHECK(w.dim() == 2 && column_weight.dim() == 1, "gptq_block: expected w (K, P * N) and column_weight (N,)");
  const int64_t rows = check_groups(groups), P = groups.size(0), S = groups.size(1);
  const int64_t K = w.size(0), N = column_weight.size(0), C = P * N;
  STD_TORCH_CHECK(K <= 1 << 20 && N >= 1 && N <= 1 << 24 && first >= 0 && first + rows <= K, "gptq_block: rows ", first, " to ",
                  first + rows, " of ", K, " x ", N, "; expected them inside, and at most 2^20 x 2^24");
  require("w", w, w, {K, C});
  require("factor", factor, w, {K, K});
  require("column_weight", column_weight, w, {N});
  STD_TORCH_CHECK(coupling.has_value() == spread.has_value(), "gptq_block: coupling and spread: expected both or neither");
  int64_t B = 0;
  if (coupling) {
    B = coupling->dim() == 3 ? coupling->size(2) : 0;
    STD_TORCH_CHECK(B > 0 && B % 16 == 0 && B <= kGptqMaxCoupled && N % B == 0, "gptq_block: coupling has blocks of ", B,
                    "; expected a multiple of 16, at most ", kGptqMaxCoupled, ", that divides N = ", N);
    require("coupling", *coupling, w, {N / B, B, B});
    require("spread", *spread, w, {N});
  }
  const torch::stable::accelerator::DeviceGuard guard(w.get_device_index());
  const auto make = [&](std::vector<int64_t> shape, ScalarType dtype) { return torch::stable::new_empty(w, shape, dtype); };
  Tensor codes = make({rows, C}, ScalarType::Byte), index = make({S, C}, ScalarType::Byte), scale_max = make({S, P}, ScalarType::Half);
  Tensor loss = make({S, C}, ScalarType::Float), errors = make({rows, C}, ScalarType::Float);
  GptqBlock block{w.mutable_data_ptr<float>(),
                  factor.const_data_ptr<float>(),
                  column_weight.const_data_ptr<float>(),
                  groups.const_data_ptr<int32_t>(),
                  coupling ? coupling->const_data_ptr<float>() : nullptr,
                  spread ? spread->const_data_ptr<float>() : nullptr,
                  int(K),
                  int(N),
                  int(P),
                  int(S),
                  int(first),
                  int(rows),
                  int(B),
                  codes.mutable_data_ptr<uint8_t>(),
                  index.mutable_data_ptr<uint8_t>(),
                  scale_max.mutable_data_ptr(),
                  loss.mutable_data_ptr<float>(),
                  errors.mutable_data_ptr<float>(),
                  nullptr};
  Tensor scratch = make({gptq_scratch_bytes(block)}, ScalarType::Byte);
  block.scratch = scratch.mutable_data_ptr<uint8_t>();
  const char* wrong = gptq_block_launch(block, stream_of(w));
  STD_TORCH_CHECK(!wrong, "gptq_block of rows ", first, " to ", first + rows, " of float32 ", K, " x ", N, " in ", P,
                  " options: ", wrong ? wrong : "");
  return {codes, index, scale_max, loss, errors};
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CUDA, m) { m.impl("gptq_block", TORCH_BOX(&exl2nb::gptq_block)); }
