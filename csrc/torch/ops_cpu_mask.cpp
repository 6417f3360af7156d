// The mask of the CPU library: checks, output tensor, registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "../cpu/mask.h"
#include "check.h"

namespace exl2nb {
namespace {

Tensor mask_logits_cpu(const Tensor& logits, const Tensor& bits) {
  const float* x = data_f32("mask_logits", "logits", logits, {-1});
  const int64_t V = logits.size(0);
  const int32_t* mask = data_i32("mask_logits", "bits", bits, {(V + 31) / 32});
  const std::vector<int64_t> sizes{V};
  Tensor out = torch::stable::empty(sizes, ScalarType::Float);
  mask_row(x, reinterpret_cast<const uint32_t*>(mask), V, static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CPU, m) { m.impl("mask_logits", TORCH_BOX(&exl2nb::mask_logits_cpu)); }
