// GPTQ weights on the GPU: checks, allocation and registration.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "gpu_blob.h"

namespace exl2nb {
namespace {

// What is wrong with rows and permutation of a GPTQ matrix.
std::string order_problem(const std::vector<int>& rows, const std::vector<int>& perm, int K, bool permuted) {
  int64_t total = 0;
  for (int n : rows) {
    if (n <= 0 || n % 32) return "rows of a group are no positive multiple of 32";
    total += n;
  }
  if (!permuted) return total == K ? "" : "the groups hold " + std::to_string(total) + " rows; expected " + std::to_string(K);
  if (total != static_cast<int64_t>(perm.size())) return "the groups hold other rows than are stored";
  std::vector<bool> seen(static_cast<size_t>(K), false);
  int found = 0;
  for (int k : perm) {
    if (k == K) continue;
    if (k < 0 || k > K || seen[static_cast<size_t>(k)]) return "perm does not name every row once";
    seen[static_cast<size_t>(k)] = true, found++;
  }
  return found == K ? "" : "perm does not name every row once";
}

Tensor pack_gptq_cuda(const Tensor& qweight, const Tensor& scales, std::optional<Tensor> zeros, std::optional<Tensor> perm,
                      const Tensor& group_rows, int64_t bits, int64_t in_features) {
  const char* op = "pack_gptq";
  STD_TORCH_CHECK(bits == 2 || bits == 3 || bits == 4 || bits == 8, op, ": bits is ", bits, "; expected 2, 3, 4 or 8");
  STD_TORCH_CHECK(in_features > 0 && in_features < (1 << 24) && in_features * bits % 32 == 0, op, ": in_features is ", in_features,
                  "; expected a positive number whose codes fill whole words at ", bits, " bits");
  require(op, "qweight", qweight, ScalarType::Int, -1);
  STD_TORCH_CHECK(qweight.dim() == 2 && qweight.size(0) == in_features * bits / 32, op, ": qweight has ", qweight.size(0),
                  " rows; expected ", in_features * bits / 32);
  const int64_t N = qweight.size(1), G = group_rows.numel();
  STD_TORCH_CHECK(N > 0 && N < (1 << 30) && G > 0 && G <= in_features, op, ": ", N, " columns in ", G,
                  " groups; expected at least one column, and 1 to ", in_features, " groups");
  require(op, "scales", scales, ScalarType::Half, G * N);
  if (zeros) require(op, "zeros", *zeros, ScalarType::Short, G * N);
  if (perm) require(op, "perm", *perm, ScalarType::Int, -1);
  require(op, "group_rows", group_rows, ScalarType::Int, G);
  const DeviceGuard guard(qweight.get_device_index());
  const auto rows = host_copy<int>(op, group_rows);
  std::vector<int> order;
  if (perm) order = host_copy<int>(op, *perm);
  const std::string wrong = order_problem(rows, order, int(in_features), perm.has_value());
  STD_TORCH_CHECK(wrong.empty(), op, ": ", wrong, " (", N, " columns, ", G, " groups, K = ", in_features, ")");
  std::vector<Group> groups;
  for (int n : rows) groups.push_back({int(bits), n});
  const std::vector<PartLayout> parts{layout_gptq(groups, int(N), order)};
  BlobLayout plan;
  Tensor blob = new_blob(op, qweight, in_features, parts, plan);
  std::vector<int> lists;  // group of every 32 rows, item of every unit
  for (size_t g = 0; g < rows.size(); g++) lists.insert(lists.end(), size_t(rows[g] / 32), int(g));
  const int64_t blocks = int64_t(lists.size());
  for (size_t i = 0; i < parts[0].items.size(); i++) lists.insert(lists.end(), parts[0].items[i].units, int(i));
  const Tensor scratch = empty_on(qweight, {int64_t(lists.size())}, ScalarType::Int);
  void* stream = stream_of(qweight);
  require_ok(op, copy_in(scratch.mutable_data_ptr(), lists.data(), int64_t(lists.size() * 4), stream), qweight);
  const int* device_lists = scratch.const_data_ptr<int32_t>();
  const GptqPacking source{static_cast<const uint32_t*>(qweight.const_data_ptr()),
                           scales.const_data_ptr(),
                           zeros ? static_cast<const int16_t*>(zeros->const_data_ptr()) : nullptr,
                           perm ? perm->const_data_ptr<int32_t>() : nullptr,
                           device_lists,
                           int(in_features),
                           int(N),
                           int(blocks * 32),
                           int(bits)};
  require_ok(op, pack_gptq_launch(source, pack_target(blob, plan, device_lists + blocks), stream), qweight, scales);
  return blob;
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CUDA, m) { m.impl("pack_gptq", TORCH_BOX(&exl2nb::pack_gptq_cuda)); }
