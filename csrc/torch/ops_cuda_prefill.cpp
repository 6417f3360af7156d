// The ops between a prompt's products, on the GPU. Only checks, allocation and registration.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "../cuda/prefill.h"
#include "gpu_blob.h"

namespace exl2nb {
namespace {

Tensor norm_rows_cuda(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps,
                      bool layer_norm) {
  const char* op = "norm_rows";
  STD_TORCH_CHECK(x.dim() == 2, op, ": x has ", x.dim(), " dimensions; expected f32 (tokens, width)");
  require(op, "x", x, ScalarType::Float, -1);
  const int64_t T = x.size(0), width = x.size(1);
  STD_TORCH_CHECK(T < int64_t(1) << 31 && width > 0 && width <= 1 << 24, op, ": x is (", T, ", ", width, "); expected 1 to 2^24 columns");
  if (weight) require(op, "weight", *weight, ScalarType::Float, width);
  if (bias) require(op, "bias", *bias, ScalarType::Float, width);
  const DeviceGuard guard(x.get_device_index());
  Tensor out = empty_on(x, {T, width}, ScalarType::Half);
  const NormRowsArgs args{x.const_data_ptr<float>(),
                          weight ? weight->const_data_ptr<float>() : nullptr,
                          weight && bias ? bias->const_data_ptr<float>() : nullptr,
                          layer_norm,
                          float(eps),
                          T,
                          int(width),
                          out.mutable_data_ptr()};
  require_ok(op, norm_rows_launch(args, stream_of(x)));
  return out;
}

Tensor gate_rows_cuda(const Tensor& y, int64_t activation, bool gated) {
  const char* op = "gate_rows";
  STD_TORCH_CHECK(y.dim() == 2 && !(gated && y.size(1) % 2), op, ": y has ", y.dim(),
                  " dimensions; expected f16 (tokens, width), gated: ", "of an even width");
  require(op, "y", y, ScalarType::Half, -1);
  STD_TORCH_CHECK(activation >= 0 && activation < 3, op, ": activation is ", activation, "; expected 0 to 2");
  const int64_t T = y.size(0), width = y.size(1) / (gated ? 2 : 1);
  STD_TORCH_CHECK(width > 0 && width <= 1 << 24, op, ": width is ", width, "; expected 1 to 2^24");
  const DeviceGuard guard(y.get_device_index());
  Tensor out = empty_on(y, {T, width}, ScalarType::Half);
  require_ok(op, gate_rows_launch(y.const_data_ptr(), T, int(width), gated, int(activation), out.mutable_data_ptr(), stream_of(y)));
  return out;
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CUDA, m) {
  m.impl("norm_rows", TORCH_BOX(&exl2nb::norm_rows_cuda));
  m.impl("gate_rows", TORCH_BOX(&exl2nb::gate_rows_cuda));
}
