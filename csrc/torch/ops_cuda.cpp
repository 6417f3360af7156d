// The ops of the CUDA library: checks, output tensors, the current stream, registration.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "cuda/runtime/launch.h"
#include "format/gpu_layout.h"
#include "stream.h"
#include "text.h"

namespace exl2nb {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check(const char* name, const Tensor& t, const Tensor& like, ScalarType dtype, int64_t dims, int64_t elements) {
  const bool fits = t.is_cuda() && t.get_device_index() == like.get_device_index() && t.is_contiguous() && t.scalar_type() == dtype &&
                    t.dim() == dims && t.numel() == elements;
  STD_TORCH_CHECK(fits, "reconstruct: ", name, " has ", t.dim(), " dimensions and ", t.numel(), " elements; expected ", dims, " and ",
                  elements, " of the format's dtype, contiguous, on the device of q_weight");
}

Tensor reconstruct_cuda(const Tensor& q_weight, const Tensor& q_scale, const Tensor& q_scale_max, const Tensor& q_groups,
                        const Tensor& q_invperm) {
  check("q_weight", q_weight, q_weight, ScalarType::Int, 2, q_weight.numel());
  const int64_t R = q_weight.size(0), N = q_weight.size(1), G = q_scale_max.numel(), K = q_invperm.numel();
  STD_TORCH_CHECK(N > 0 && N % 32 == 0 && K > 0 && K <= 65536, "reconstruct: got ", K, " rows, ", N,
                  " columns; expected 1 to 65536, a multiple of 32");
  check("q_scale", q_scale, q_weight, ScalarType::Int, 2, G * (N / 8));
  check("q_scale_max", q_scale_max, q_weight, ScalarType::Half, 1, G);
  check("q_groups", q_groups, q_weight, ScalarType::Short, 1, 2 * G);
  check("q_invperm", q_invperm, q_weight, ScalarType::Int, 1, K);
  const torch::stable::accelerator::DeviceGuard guard(q_weight.get_device_index());
  const std::vector<int64_t> shape{K, N};
  Tensor out = torch::stable::new_empty(q_weight, shape, ScalarType::Half);
  const auto require_done = [&](const char* wrong) {
    STD_TORCH_CHECK(!wrong, "reconstruct of q_weight ", text_of(q_weight), " to ", text_of(out), " in ", G, " groups: ", wrong);
  };
  std::vector<uint16_t> table(size_t(2 * G));
  require_done(copy_out(table.data(), q_groups.const_data_ptr(), 4 * G, stream_of(q_weight)));
  std::vector<Group> groups;
  const std::string damage = read_groups(table, R, K, groups);
  STD_TORCH_CHECK(damage.empty(), "reconstruct: ", damage);
  require_done(reconstruct_launch(q_weight.const_data_ptr<int32_t>(), R, q_scale.const_data_ptr<int32_t>(), q_scale_max.const_data_ptr(),
                                  q_groups.const_data_ptr<int16_t>(), G, q_invperm.const_data_ptr<int32_t>(), K, N, out.mutable_data_ptr(),
                                  stream_of(q_weight)));
  return out;
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CUDA, m) { m.impl("reconstruct", TORCH_BOX(&exl2nb::reconstruct_cuda)); }
