// The weight ops of the CPU library: pack, concat, unpack, reconstruct.
#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "../cpu/pack.h"
#include "check.h"

namespace exl2nb {
namespace {

// Huge pages where the system offers them on request: a decode step walks through all weights, and small pages cost it a tenth.
Tensor empty_blob(int64_t bytes) {
  const std::vector<int64_t> sizes{bytes};
  Tensor t = torch::stable::empty(sizes, ScalarType::Byte);
#if defined(__linux__)
  const auto begin = (reinterpret_cast<uintptr_t>(t.mutable_data_ptr()) + 4095) & ~uintptr_t(4095);
  const auto end = (reinterpret_cast<uintptr_t>(t.mutable_data_ptr()) + uintptr_t(bytes)) & ~uintptr_t(4095);
  if (bytes >= 4 << 20 && end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice only: failure is fine
#endif
  return t;
}
uint8_t* bytes_of(const Tensor& t) { return static_cast<uint8_t*>(t.mutable_data_ptr()); }

Exl2Source source(const char* op, const Tensor& q_weight, const Tensor& q_scale, const Tensor& q_scale_max, const Tensor& q_groups,
                  const Tensor& q_invperm, std::vector<BlobGroup>& groups) {
  check_tensor(op, "q_weight", q_weight, ScalarType::Int, {-1, -1});
  const int64_t N = q_weight.size(1), G = q_scale_max.numel();
  STD_TORCH_CHECK(N > 0 && N % 32 == 0, op, ": q_weight has ", N, " columns; expected a multiple of 32");
  check_tensor(op, "q_scale", q_scale, ScalarType::Int, {G, N / 8});
  check_tensor(op, "q_scale_max", q_scale_max, ScalarType::Half, {G});
  check_tensor(op, "q_groups", q_groups, ScalarType::Short, {2 * G});
  check_tensor(op, "q_invperm", q_invperm, ScalarType::Int, {-1});
  const Exl2Source s{static_cast<const uint32_t*>(q_weight.const_data_ptr()),
                     static_cast<const uint32_t*>(q_scale.const_data_ptr()),
                     static_cast<const uint16_t*>(q_scale_max.const_data_ptr()),
                     static_cast<const int16_t*>(q_groups.const_data_ptr()),
                     static_cast<const int32_t*>(q_invperm.const_data_ptr()),
                     q_weight.size(0),
                     N,
                     G,
                     q_invperm.numel()};
  const char* wrong = read_groups(s, groups);
  STD_TORCH_CHECK(!wrong, op, ": ", wrong ? wrong : "", " (q_weight ", shape_text(q_weight), ", ", G, " groups, K = ", q_invperm.numel(),
                  ")");
  return s;
}

Tensor pack_exl2_cpu(const Tensor& q_weight, const Tensor& q_scale, const Tensor& q_scale_max, const Tensor& q_groups,
                     const Tensor& q_invperm, double prescale, int64_t out_features) {
  std::vector<BlobGroup> groups;
  const Exl2Source s = source("pack_exl2", q_weight, q_scale, q_scale_max, q_groups, q_invperm, groups);
  STD_TORCH_CHECK(out_features > 0 && out_features <= s.N, "pack_exl2: out_features is ", out_features, "; expected 1 to ", s.N,
                  " (columns of q_weight)");
  Tensor blob = empty_blob(exl2_blob_bytes(s, groups, out_features));
  pack_exl2(s, groups, float(prescale / 256), out_features, bytes_of(blob));
  return blob;
}

Tensor reconstruct_cpu(const Tensor& q_weight, const Tensor& q_scale, const Tensor& q_scale_max, const Tensor& q_groups,
                       const Tensor& q_invperm) {
  std::vector<BlobGroup> groups;
  const Exl2Source s = source("reconstruct", q_weight, q_scale, q_scale_max, q_groups, q_invperm, groups);
  const std::vector<int64_t> sizes{s.K, s.N};
  Tensor out = torch::stable::empty(sizes, ScalarType::Half);
  reconstruct(s, groups, static_cast<uint16_t*>(out.mutable_data_ptr()));
  return out;
}

Tensor pack_gptq_cpu(const Tensor& qweight, const Tensor& scales, std::optional<Tensor> zeros, std::optional<Tensor> perm,
                     const Tensor& group_rows, int64_t bits, int64_t in_features) {
  const char* op = "pack_gptq";
  STD_TORCH_CHECK(bits == 2 || bits == 3 || bits == 4 || bits == 8, op, ": bits is ", bits, "; expected 2, 3, 4 or 8");
  STD_TORCH_CHECK(in_features > 0 && in_features < (1 << 24) && in_features * bits % 32 == 0, op, ": in_features is ", in_features,
                  "; expected a positive number whose codes fill whole words at ", bits, " bits");
  check_tensor(op, "qweight", qweight, ScalarType::Int, {in_features * bits / 32, -1});
  check_tensor(op, "group_rows", group_rows, ScalarType::Int, {-1});
  const int64_t N = qweight.size(1), G = group_rows.numel();
  STD_TORCH_CHECK(N > 0 && N < (1 << 30) && G > 0 && G <= in_features, op, ": qweight is ", shape_text(qweight), " with ", G,
                  " groups; expected at least one column, and 1 to ", in_features, " groups");
  const bool wide = scales.scalar_type() == ScalarType::Float;
  check_tensor(op, "scales", scales, wide ? ScalarType::Float : ScalarType::Half, {G, N});
  if (zeros) check_tensor(op, "zeros", *zeros, ScalarType::Short, {G, N});
  if (perm) check_tensor(op, "perm", *perm, ScalarType::Int, {-1});
  const GptqSource s{static_cast<const uint32_t*>(qweight.const_data_ptr()),
                     scales.const_data_ptr(),
                     zeros ? static_cast<const int16_t*>(zeros->const_data_ptr()) : nullptr,
                     perm ? static_cast<const int32_t*>(perm->const_data_ptr()) : nullptr,
                     static_cast<const int32_t*>(group_rows.const_data_ptr()),
                     qweight.size(0),
                     N,
                     G,
                     in_features,
                     perm ? perm->numel() : in_features,
                     int(bits),
                     wide};
  std::vector<BlobGroup> groups;
  const char* wrong = read_groups(s, groups);
  STD_TORCH_CHECK(!wrong, op, ": ", wrong ? wrong : "", " (qweight ", shape_text(qweight), ", ", G, " groups, K = ", in_features, ")");
  Tensor blob = empty_blob(gptq_blob_bytes(s, groups));
  pack_gptq(s, groups, bytes_of(blob));
  return blob;
}

Tensor pack_dense_cpu(const Tensor& weight) {
  const int kind = dense_kind(weight.scalar_type());
  STD_TORCH_CHECK(kind >= 0, "pack_dense: weight is ", dtype_name(weight.scalar_type()), "; expected float32, float16 or bfloat16");
  check_tensor("pack_dense", "weight", weight, weight.scalar_type(), {-1, -1});
  const int64_t N = weight.size(0), K = weight.size(1);
  STD_TORCH_CHECK(N > 0 && K > 0 && N < (1 << 30) && K < (1 << 30), "pack_dense: weight is ", shape_text(weight),
                  "; expected at least (1, 1)");
  Tensor blob = empty_blob(dense_blob_bytes(N, K, kind));
  pack_dense(weight.const_data_ptr(), N, K, kind, bytes_of(blob));
  return blob;
}

Tensor pack_concat_cpu(std::vector<Tensor> blobs) {
  STD_TORCH_CHECK(!blobs.empty(), "pack_concat: there are no blobs; expected at least 1");
  std::vector<const uint8_t*> sources;
  int64_t outputs = 0;
  for (const Tensor& b : blobs) {
    sources.push_back(check_weight("pack_concat", b, true));
    STD_TORCH_CHECK(header(sources.back()).K == header(sources[0]).K, "pack_concat: a blob has K = ", header(sources.back()).K,
                    "; expected K of the first, ", header(sources[0]).K);
    outputs += header(sources.back()).N;
  }
  STD_TORCH_CHECK(outputs < (int64_t(1) << 30), "pack_concat: ", outputs, " outputs; expected fewer than 2^30");
  Tensor out = empty_blob(concat_bytes(sources));
  pack_concat(sources, bytes_of(out));
  return out;
}

Tensor unpack_cpu(const Tensor& blob) {
  const uint8_t* p = check_weight("unpack", blob, true);
  const std::vector<int64_t> sizes{header(p).K, header(p).N};
  Tensor out = torch::stable::empty(sizes, ScalarType::Float);
  unpack(p, static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CPU, m) {
  m.impl("pack_exl2", TORCH_BOX(&exl2nb::pack_exl2_cpu));
  m.impl("pack_gptq", TORCH_BOX(&exl2nb::pack_gptq_cpu));
  m.impl("reconstruct", TORCH_BOX(&exl2nb::reconstruct_cpu));
  m.impl("pack_dense", TORCH_BOX(&exl2nb::pack_dense_cpu));
  m.impl("pack_concat", TORCH_BOX(&exl2nb::pack_concat_cpu));
  m.impl("unpack", TORCH_BOX(&exl2nb::unpack_cpu));
}
