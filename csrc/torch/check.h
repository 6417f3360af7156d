// Argument checks shared by the op files: every message names op, what was got and what was expected.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "../format/blob.h"
#include "text.h"

namespace exl2nb {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#define EXL2NB_CHECK(op, condition, ...) STD_TORCH_CHECK(condition, op, ": ", __VA_ARGS__)

// shape: -1 matches any size.
inline void check_tensor(const char* op, const char* name, const Tensor& t, ScalarType dtype, std::initializer_list<int64_t> shape) {
  bool fits = t.scalar_type() == dtype && t.is_cpu() && t.is_contiguous() && t.dim() == int64_t(shape.size());
  std::string wanted;
  int64_t i = 0;
  for (int64_t n : shape) {
    fits = fits && (n < 0 || t.size(i) == n);
    i++;
  }
  if (fits) return;
  for (int64_t n : shape) wanted += (wanted.empty() ? "" : ", ") + (n < 0 ? std::string("*") : std::to_string(n));
  STD_TORCH_CHECK(false, op, ": ", name, " is ", dtype_name(t.scalar_type()), " ", shape_text(t),
                  t.is_contiguous() ? "" : " not contiguous", t.is_cpu() ? "" : " not on the CPU", "; expected contiguous ",
                  dtype_name(dtype), " (", wanted, ") on the CPU");
}

inline const uint8_t* check_weight(const char* op, const Tensor& blob, bool deep) {
  check_tensor(op, "blob", blob, ScalarType::Byte, {-1});
  const auto* p = static_cast<const uint8_t*>(blob.const_data_ptr());
  const char* wrong = nullptr;
  if (deep) {
    wrong = check_blob(p, blob.numel());
  } else if (blob.numel() < int64_t(sizeof(BlobHeader)) || header(p).magic != kBlobMagic || header(p).version != kBlobVersion ||
             header(p).bytes != blob.numel()) {
    wrong = "no valid header";
  }
  STD_TORCH_CHECK(!wrong, op, ": blob: ", wrong ? wrong : "", "; expected what a pack op returned");
  return p;
}

inline const float* data_f32(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  check_tensor(op, name, t, ScalarType::Float, shape);
  return static_cast<const float*>(t.const_data_ptr());
}
inline const float* data_f32(const char* op, const char* name, const std::optional<Tensor>& t, std::initializer_list<int64_t> shape) {
  return t ? data_f32(op, name, *t, shape) : nullptr;
}
inline const int32_t* data_i32(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  check_tensor(op, name, t, ScalarType::Int, shape);
  return static_cast<const int32_t*>(t.const_data_ptr());
}
inline int dense_kind(ScalarType t) {
  return t == ScalarType::Float ? kDenseF32 : t == ScalarType::Half ? kDenseF16 : t == ScalarType::BFloat16 ? kDenseBF16 : -1;
}

}  // namespace exl2nb
