// draw_rows and mask_logits on the CPU: checks, output tensors, rows shared out to the threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "../cpu/draw.h"
#include "../cpu/parallel.h"
#include "check.h"

namespace exl2nb {

static constexpr int64_t kShared = 1 << 16;  // logits from which on waking another thread pays

// How many of V columns may be drawn; null: all.
int64_t drawable_columns(const char* op, std::optional<int64_t> columns, int64_t V) {
  EXL2NB_CHECK(op, !columns || *columns >= 1, "columns is ", *columns, "; expected at least 1");
  return std::min(columns.value_or(V), V);
}

Tensor draw_rows_cpu(const Tensor& logits, const Tensor& settings, const std::optional<Tensor>& bits, int64_t top,
                     std::optional<int64_t> columns) {
  const char* op = "draw_rows";
  check_tensor(op, "logits", logits, ScalarType::Float, {-1, -1});
  const int64_t R = logits.size(0), V = logits.size(1);
  check_tensor(op, "settings", settings, ScalarType::Double, {R, 5});
  EXL2NB_CHECK(op, V >= 1 && V <= int64_t(1) << 30, "logits has ", V, " columns; expected 1 to 2^30");
  const int64_t words = (V + 31) / 32;
  const uint32_t* mask = nullptr;
  if (bits) {
    check_tensor(op, "bits", *bits, ScalarType::Int, {R, words});
    mask = reinterpret_cast<const uint32_t*>(bits->const_data_ptr<int32_t>());
  }
  EXL2NB_CHECK(op, top >= 0 && top <= V, "top is ", top, "; expected 0 to ", V, ", the columns of logits");
  const int64_t drawable = drawable_columns(op, columns, V);
  const int64_t width = 4 + 2 * top;
  const std::vector<int64_t> sizes{R, width};
  Tensor out = torch::stable::empty(sizes, ScalarType::Double);
  const float* x = logits.const_data_ptr<float>();
  const auto* wanted = reinterpret_cast<const draw::Settings*>(settings.const_data_ptr<double>());
  auto* drawn = static_cast<double*>(out.mutable_data_ptr());
  static_assert(sizeof(draw::Settings) == 5 * sizeof(double) && sizeof(draw::Drawn) == 4 * sizeof(double), "rows of doubles");
  for (int64_t r = 0; r < R; r++) {
    EXL2NB_CHECK(op, draw::valid(wanted[r]), "settings of row ", r,
                 " are out of range; expected temperature, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1, ", "0 <= uniform < 1");
  }
  for_each_task(R, R > 1 && R * V >= kShared, [&](int64_t r) {
    draw::draw_into(x + r * V, mask ? mask + r * words : nullptr, V, drawable, wanted[r], top, drawn + r * width);
  });
  return out;
}

Tensor mask_logits_cpu(const Tensor& logits, const Tensor& bits) {
  const float* x = data_f32("mask_logits", "logits", logits, {-1});
  const int64_t V = logits.size(0);
  const int32_t* mask = data_i32("mask_logits", "bits", bits, {(V + 31) / 32});
  const std::vector<int64_t> sizes{V};
  Tensor out = torch::stable::empty(sizes, ScalarType::Float);
  draw::mask_row(x, reinterpret_cast<const uint32_t*>(mask), V, static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CPU, m) {
  m.impl("draw_rows", TORCH_BOX(&exl2nb::draw_rows_cpu));
  m.impl("mask_logits", TORCH_BOX(&exl2nb::mask_logits_cpu));
}
