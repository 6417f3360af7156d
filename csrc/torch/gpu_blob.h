// What the ops on the GPU share: checks of tensors, new blobs, copies of their heads.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

#include "cuda/runtime/launch.h"
#include "format/gpu_layout.h"
#include "stream.h"
#include "text.h"

namespace exl2nb {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

inline void require(const char* op, const char* name, const Tensor& t, ScalarType dtype, int64_t elements, bool on_gpu = true) {
  const bool fits = t.is_cuda() == on_gpu && t.is_contiguous() && t.scalar_type() == dtype && (elements < 0 || t.numel() == elements);
  STD_TORCH_CHECK(fits, op, ": ", name, " has ", t.numel(), " elements; expected ",
                  elements < 0 ? std::string("any number") : std::to_string(elements), " of the dtype the op reads, contiguous, on the ",
                  on_gpu ? "GPU" : "CPU");
}
// given: what the kernel reads and writes, for the message.
template <class... Tensors>
void require_ok(const char* op, const char* wrong, const Tensors&... given) {
  if (!wrong) return;
  std::string words;
  ((words += (words.empty() ? " of " : ", ") + text_of(given)), ...);
  STD_TORCH_CHECK(false, op, words, ": ", wrong);
}
inline uint8_t* bytes_of(const Tensor& t) { return static_cast<uint8_t*>(t.mutable_data_ptr()); }
inline Tensor empty_on(const Tensor& like, std::vector<int64_t> shape, ScalarType dtype) {
  return torch::stable::new_empty(like, shape, dtype);
}

// A host copy of a blob's header and parts; `all`: of everything before the strips.
inline std::vector<uint8_t> head_of(const char* op, const Tensor& blob, bool all) {
  require(op, "blob", blob, ScalarType::Byte, -1);
  void* stream = stream_of(blob);
  std::vector<uint8_t> head(sizeof(GpuHeader) + kMaxParts * sizeof(GpuPart));
  STD_TORCH_CHECK(blob.numel() >= int64_t(head.size()), op, ": blob has ", blob.numel(), " bytes; expected what pack_* returned");
  require_ok(op, copy_out(head.data(), blob.const_data_ptr(), int64_t(head.size()), stream), blob);
  const auto& h = *reinterpret_cast<const GpuHeader*>(head.data());
  STD_TORCH_CHECK(
      h.magic == kGpuMagic && h.version == kGpuVersion && h.bytes == blob.numel() && h.num_parts >= 1 && h.num_parts <= kMaxParts, op,
      ": blob has no valid header; expected what pack_exl2, pack_dense or pack_concat returned for tensors on the GPU");
  if (!all) return head;
  const int64_t meta = reinterpret_cast<const GpuPart*>(head.data() + sizeof(GpuHeader))->data;
  STD_TORCH_CHECK(meta > 0 && meta <= blob.numel(), op, ": blob is damaged");
  head.resize(size_t(meta));
  require_ok(op, copy_out(head.data(), blob.const_data_ptr(), meta, stream), blob);
  return head;
}

inline Tensor new_blob(const char* op, const Tensor& like, int64_t K, const std::vector<PartLayout>& parts, BlobLayout& plan) {
  const std::string wrong = layout_blob(int(K), parts, plan);
  STD_TORCH_CHECK(wrong.empty(), op, ": ", wrong);
  Tensor blob = empty_on(like, {plan.header.bytes}, ScalarType::Byte);
  require_ok(op, copy_in(bytes_of(blob), plan.meta.data(), int64_t(plan.meta.size()), stream_of(blob)), blob);
  return blob;
}

// Where the packing kernels write part 0 of a new blob. item_of_unit: on the device; null for dense weights.
inline PackTarget pack_target(const Tensor& blob, const BlobLayout& plan, const int* item_of_unit) {
  const GpuPart& part = plan.parts[0];
  return {reinterpret_cast<const Item*>(bytes_of(blob) + plan.header.image),
          item_of_unit,
          part.num_units,
          part.strips,
          bytes_of(blob) + part.data,
          part.strip_bytes};
}

template <class T>
std::vector<T> host_copy(const char* op, const Tensor& t) {
  std::vector<T> v(size_t(t.numel()));
  require_ok(op, copy_out(v.data(), t.const_data_ptr(), int64_t(v.size() * sizeof(T)), stream_of(t)), t);
  return v;
}

}  // namespace exl2nb
