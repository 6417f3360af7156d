// The ops between a prompt's products, on the GPU. Only checks, allocation and registration.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <optional>
#include <vector>

#include "cuda/gemm/elementwise.h"
#include "cuda/runtime/launch.h"
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
  require_ok(op, norm_rows_launch(args, stream_of(x)), x);
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
  require_ok(op, gate_rows_launch(y.const_data_ptr(), T, int(width), gated, int(activation), out.mutable_data_ptr(), stream_of(y)), y, out);
  return out;
}

void rotate_rows_cuda(Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& positions, const Tensor& slots, Tensor& k_pool,
                      Tensor& v_pool, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
  const char* op = "rotate_rows";
  STD_TORCH_CHECK(num_heads > 0 && num_kv_heads > 0 && head_dim > 0 && head_dim % 16 == 0 && head_dim <= 1024, op, ": got ", num_heads,
                  " heads and ", num_kv_heads, " KV heads of ", head_dim, "; expected a head_dim that is a multiple of 16, at most 1024");
  const int64_t T = positions.numel(), page = num_kv_heads * 256 * head_dim;
  require(op, "qkv", qkv, ScalarType::Half, T * (num_heads + 2 * num_kv_heads) * head_dim);
  require(op, "cos", cos, ScalarType::Float, -1);
  require(op, "sin", sin, ScalarType::Float, cos.numel());
  STD_TORCH_CHECK(cos.dim() == 2 && cos.size(1) == head_dim / 2, op, ": cos has ", cos.dim(), " dimensions; expected (positions, ",
                  head_dim / 2, ")");
  require(op, "positions", positions, ScalarType::Int, T);
  require(op, "slots", slots, ScalarType::Int, T);
  require(op, "k_pool", k_pool, ScalarType::Half, -1);
  require(op, "v_pool", v_pool, ScalarType::Half, k_pool.numel());
  STD_TORCH_CHECK(k_pool.numel() % page == 0, op, ": a pool has ", k_pool.numel(), " numbers; expected pages of ", page);
  const DeviceGuard guard(qkv.get_device_index());
  const RotateRowsArgs args{qkv.mutable_data_ptr(),
                            k_pool.mutable_data_ptr(),
                            v_pool.mutable_data_ptr(),
                            cos.const_data_ptr<float>(),
                            sin.const_data_ptr<float>(),
                            positions.const_data_ptr<int32_t>(),
                            slots.const_data_ptr<int32_t>(),
                            T,
                            int(num_heads),
                            int(num_kv_heads),
                            int(head_dim)};
  require_ok(op, rotate_rows_launch(args, stream_of(qkv)), qkv, k_pool, v_pool);
}

Tensor merge_parts_cuda(std::vector<Tensor> parts, std::vector<Tensor> lse) {
  const char* op = "merge_parts";
  STD_TORCH_CHECK(!parts.empty() && parts.size() <= kMostRuns && lse.size() == parts.size(), op, ": got ", parts.size(), " parts and ",
                  lse.size(), " lse; expected 1 to ", kMostRuns, " of each");
  const Tensor& like = parts[0];
  STD_TORCH_CHECK(like.dim() == 3 && like.size(2) % 8 == 0, op, ": a part has ", like.dim(),
                  " dimensions; expected f16 (tokens, heads, head_dim), head_dim a multiple of 8");
  MergePartsArgs args{};
  args.count = int(parts.size()), args.tokens = like.size(0), args.heads = int(like.size(1)), args.head_dim = int(like.size(2));
  for (size_t p = 0; p < parts.size(); p++) {
    require(op, "parts", parts[p], ScalarType::Half, like.numel());
    require(op, "lse", lse[p], ScalarType::Float, like.size(0) * like.size(1));
    args.part[p] = parts[p].const_data_ptr(), args.lse[p] = lse[p].const_data_ptr<float>();
  }
  const DeviceGuard guard(like.get_device_index());
  Tensor out = empty_on(like, {like.size(0), like.size(1), like.size(2)}, ScalarType::Half);
  args.out = out.mutable_data_ptr();
  require_ok(op, merge_parts_launch(args, stream_of(like)), like, out);
  return out;
}

// As `linear`, without reading the head back and waiting for it: `head` is what gpu_blob_head returned.
Tensor linear_of(const Tensor& head, const Tensor& x, const std::optional<Tensor>& bias, bool stream_k) {
  const char* op = "gpu_linear";
  require(op, "head", head, ScalarType::Byte, -1, false);
  const auto* p = static_cast<const uint8_t*>(head.const_data_ptr());
  int64_t blob;
  std::memcpy(&blob, p, 8);
  const auto& h = *reinterpret_cast<const GpuHeader*>(p + 8);
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == h.K, op, ": x has ", x.dim(), " dimensions; expected f32 (*, ", h.K, ")");
  require(op, "x", x, ScalarType::Float, -1);
  if (bias) require(op, "bias", *bias, ScalarType::Float, h.N);
  const DeviceGuard guard(x.get_device_index());
  const int64_t T = x.size(0);
  Tensor out = empty_on(x, {T, h.N}, ScalarType::Float);
  const std::vector<int64_t> size{linear_workspace(p + 8, T, stream_k)};
  Tensor workspace = torch::stable::new_zeros(x, size, ScalarType::Byte);
  require_ok(op,
             linear_launch(p + 8, reinterpret_cast<const uint8_t*>(blob), x.const_data_ptr<float>(), T,
                           bias ? bias->const_data_ptr<float>() : nullptr, static_cast<float*>(out.mutable_data_ptr()), bytes_of(workspace),
                           stream_of(x), stream_k),
             x, out);
  return out;
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CUDA, m) {
  m.impl("norm_rows", TORCH_BOX(&exl2nb::norm_rows_cuda));
  m.impl("gate_rows", TORCH_BOX(&exl2nb::gate_rows_cuda));
  m.impl("merge_parts", TORCH_BOX(&exl2nb::merge_parts_cuda));
  m.impl("gpu_linear", TORCH_BOX(&exl2nb::linear_of));
  m.impl("rotate_rows", TORCH_BOX(&exl2nb::rotate_rows_cuda));
}
