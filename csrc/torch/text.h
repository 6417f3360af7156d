// Tensors as words, for the messages of every op.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <string>

namespace exl2nb {

inline const char* dtype_name(torch::headeronly::ScalarType t) {
  using torch::headeronly::ScalarType;
  switch (t) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    default:
      return "another dtype";
  }
}

inline std::string shape_text(const torch::stable::Tensor& t) {
  std::string s = "(";
  for (int64_t i = 0; i < t.dim(); i++) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + ")";
}

// "float32 (3, 128)"
inline std::string text_of(const torch::stable::Tensor& t) { return std::string(dtype_name(t.scalar_type())) + " " + shape_text(t); }

}  // namespace exl2nb
