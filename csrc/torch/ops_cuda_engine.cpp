// The engine's ops on the GPU: packing, products and whole steps. Only checks, allocation and registration.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "cuda/runtime/device.h"
#include "cuda/runtime/exchange.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/launches.h"
#include "cuda/runtime/step.h"
#include "format/gpu_layout.h"
#include "gpu_blob.h"
#include "stream.h"

namespace exl2nb {
namespace {

Tensor pack_exl2_cuda(const Tensor& q_weight, const Tensor& q_scale, const Tensor& q_scale_max, const Tensor& q_groups,
                      const Tensor& q_invperm, double prescale, int64_t out_features) {
  const char* op = "pack_exl2";
  require(op, "q_weight", q_weight, ScalarType::Int, -1);
  STD_TORCH_CHECK(q_weight.dim() == 2, op, ": q_weight has ", q_weight.dim(), " dimensions; expected 2");
  const int64_t R = q_weight.size(0), N = q_weight.size(1), G = q_scale_max.numel(), K = q_invperm.numel();
  STD_TORCH_CHECK(N > 0 && N % 32 == 0 && K > 0 && K % 32 == 0 && K <= 65536, op, ": got ", K, " rows and ", N,
                  " columns; expected multiples of 32, at most 65536 rows");
  STD_TORCH_CHECK(out_features > 0 && out_features <= N, op, ": out_features is ", out_features, "; expected 1 to ", N);
  require(op, "q_scale", q_scale, ScalarType::Int, G * (N / 8));
  require(op, "q_scale_max", q_scale_max, ScalarType::Half, G);
  require(op, "q_groups", q_groups, ScalarType::Short, 2 * G);
  require(op, "q_invperm", q_invperm, ScalarType::Int, K);
  const DeviceGuard guard(q_weight.get_device_index());
  std::vector<Group> groups;
  const std::string wrong = read_groups(host_copy<uint16_t>(op, q_groups), R, K, groups);
  STD_TORCH_CHECK(wrong.empty(), op, ": ", wrong);
  std::vector<int> row_word, row_group;  // of every 32 rows
  for (size_t g = 0, word = 0; g < groups.size(); g++)
    for (int row = 0; row < groups[g].rows; row += 32, word += size_t(groups[g].bits))
      row_word.push_back(int(word)), row_group.push_back(int(g));
  const auto inverse = host_copy<int32_t>(op, q_invperm);
  std::vector<int> perm(size_t(K), -1);
  bool identity = true;
  for (int64_t i = 0; i < K; i++) {
    const int at = inverse[size_t(i)];
    STD_TORCH_CHECK(at >= 0 && at < K && perm[size_t(at)] < 0, op, ": q_invperm is no permutation of 0 to ", K - 1);
    perm[size_t(at)] = int(i), identity = identity && at == i;
  }
  if (identity) perm.clear();
  BlobLayout plan;
  const std::vector<PartLayout> parts{layout_exl2(groups, host_copy<uint16_t>(op, q_scale_max), prescale, int(out_features), perm)};
  Tensor blob = new_blob(op, q_weight, K, parts, plan);
  std::vector<int> lists = row_word;  // words, groups, item of each unit
  lists.insert(lists.end(), row_group.begin(), row_group.end());
  for (size_t i = 0; i < parts[0].items.size(); i++) lists.insert(lists.end(), parts[0].items[i].units, int(i));
  const Tensor scratch = empty_on(q_weight, {int64_t(lists.size())}, ScalarType::Int);
  void* stream = stream_of(q_weight);
  require_ok(op, copy_in(scratch.mutable_data_ptr(), lists.data(), int64_t(lists.size() * 4), stream), q_weight);
  const int* device_lists = scratch.const_data_ptr<int32_t>();
  const PackSource source{static_cast<const uint32_t*>(q_weight.const_data_ptr()),
                          static_cast<const uint32_t*>(q_scale.const_data_ptr()),
                          device_lists,
                          device_lists + K / 32,
                          int(K),
                          int(N)};
  require_ok(op, pack_exl2_launch(source, pack_target(blob, plan, device_lists + K / 32 * 2), stream), q_weight, q_scale);
  return blob;
}

Tensor pack_dense_cuda(const Tensor& weight) {
  const char* op = "pack_dense";
  const ScalarType t = weight.scalar_type();
  const int dtype = t == ScalarType::Float ? 0 : t == ScalarType::Half ? 1 : t == ScalarType::BFloat16 ? 2 : -1;
  STD_TORCH_CHECK(dtype >= 0 && weight.dim() == 2 && weight.is_cuda() && weight.is_contiguous() && weight.numel() > 0, op, ": weight has ",
                  weight.dim(), " dimensions; expected contiguous f32, f16 or bf16 (N, K) on the GPU");
  const int64_t N = weight.size(0), K = weight.size(1);
  STD_TORCH_CHECK(K <= 1 << 21 && N < 1 << 30, op, ": weight is (", N, ", ", K, "); expected at most 2^21 inputs");
  const DeviceGuard guard(weight.get_device_index());
  BlobLayout plan;
  Tensor blob = new_blob(op, weight, K, {layout_dense(int(K), int(N))}, plan);
  require_ok(op, pack_dense_launch(weight.const_data_ptr(), dtype, int(N), int(K), pack_target(blob, plan, nullptr), stream_of(weight)),
             weight);
  return blob;
}

Tensor pack_concat_cuda(std::vector<Tensor> blobs) {
  const char* op = "pack_concat";
  STD_TORCH_CHECK(!blobs.empty(), op, ": there are no blobs; expected at least 1");
  const DeviceGuard guard(blobs[0].get_device_index());
  std::vector<PartLayout> plans;
  std::vector<const uint8_t*> sources;
  int64_t K = 0;
  for (const Tensor& b : blobs) {
    const auto meta = head_of(op, b, true);
    const auto& h = *reinterpret_cast<const GpuHeader*>(meta.data());
    STD_TORCH_CHECK(K == 0 || h.K == K, op, ": a blob has K = ", h.K, "; expected K of the first, ", K);
    K = h.K;
    const auto* parts = reinterpret_cast<const GpuPart*>(meta.data() + sizeof(GpuHeader));
    for (int p = 0; p < h.num_parts; p++) sources.push_back(bytes_of(b) + parts[p].data);
    for (auto& p : read_parts(meta)) plans.push_back(std::move(p));
  }
  BlobLayout plan;
  Tensor out = new_blob(op, blobs[0], K, plans, plan);
  for (size_t i = 0; i < plans.size(); i++)
    require_ok(
        op, copy_within(bytes_of(out) + plan.parts[i].data, sources[i], plan.parts[i].strips * plan.parts[i].strip_bytes, stream_of(out)),
        out);
  return out;
}

Tensor unpack_half(const Tensor& blob) {
  const DeviceGuard guard(blob.get_device_index());
  const auto head = head_of("unpack", blob, false);
  const auto& h = *reinterpret_cast<const GpuHeader*>(head.data());
  Tensor out = empty_on(blob, {h.K, h.N}, ScalarType::Half);
  require_ok("unpack", unpack_launch(head.data(), bytes_of(blob), out.mutable_data_ptr(), stream_of(blob)), blob, out);
  return out;
}

// The same without reading the head back: `head` is what gpu_blob_head returned.
void unpack_into(const Tensor& head, Tensor& out) {
  require("gpu_unpack_into", "head", head, ScalarType::Byte, -1, false);
  const auto* p = static_cast<const uint8_t*>(head.const_data_ptr());
  int64_t blob;
  std::memcpy(&blob, p, 8);
  const auto& h = *reinterpret_cast<const GpuHeader*>(p + 8);
  require("gpu_unpack_into", "out", out, ScalarType::Half, int64_t(h.K) * h.N);
  const DeviceGuard guard(out.get_device_index());
  require_ok("gpu_unpack_into", unpack_launch(p + 8, reinterpret_cast<const uint8_t*>(blob), out.mutable_data_ptr(), stream_of(out)), out);
}

Tensor blob_head(const Tensor& blob) {
  const DeviceGuard guard(blob.get_device_index());
  const auto head = head_of("gpu_blob_head", blob, false);
  const std::vector<int64_t> shape{int64_t(head.size()) + 8};
  Tensor out = torch::stable::empty(shape, ScalarType::Byte);
  const int64_t device = reinterpret_cast<int64_t>(blob.const_data_ptr());
  std::memcpy(out.mutable_data_ptr(), &device, 8);
  std::memcpy(bytes_of(out) + 8, head.data(), head.size());
  return out;
}

// What the kernels of a sparse MLP must know of its experts' matrices, on the host: `heads` are what gpu_blob_head returned.
Tensor expert_table(std::vector<Tensor> heads, int64_t parts) {
  std::vector<const uint8_t*> pointers;
  std::vector<std::vector<uint8_t>> images;
  for (const Tensor& head : heads) {
    require("gpu_expert_table", "a head", head, ScalarType::Byte, -1, false);
    pointers.push_back(static_cast<const uint8_t*>(head.const_data_ptr()));
    int64_t blob;
    std::memcpy(&blob, pointers.back(), 8);
    const auto& h = *reinterpret_cast<const GpuHeader*>(pointers.back() + 8);
    images.emplace_back(size_t(image_bytes(h.num_items, h.num_units, h.num_parts)));
    const auto* const device = reinterpret_cast<const uint8_t*>(blob) + h.image;
    require_ok("gpu_expert_table", copy_out(images.back().data(), device, int64_t(images.back().size()), nullptr));
  }
  std::vector<uint8_t> table;
  require_ok("gpu_expert_table", make_expert_table(pointers, images, int(parts), table));
  const std::vector<int64_t> shape{int64_t(table.size())};
  Tensor out = torch::stable::empty(shape, ScalarType::Byte);
  std::memcpy(out.mutable_data_ptr(), table.data(), table.size());
  return out;
}

Tensor linear_cuda(const Tensor& x, const Tensor& blob, const std::optional<Tensor>& bias) {
  const char* op = "linear";
  const DeviceGuard guard(blob.get_device_index());
  const auto head = head_of(op, blob, false);
  const auto& h = *reinterpret_cast<const GpuHeader*>(head.data());
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == h.K, op, ": x has ", x.dim(), " dimensions; expected f32 (*, ", h.K, ")");
  require(op, "x", x, ScalarType::Float, -1);
  if (bias) require(op, "bias", *bias, ScalarType::Float, h.N);
  const int64_t T = x.size(0);
  Tensor out = empty_on(x, {T, h.N}, ScalarType::Float);
  const std::vector<int64_t> size{linear_workspace(head.data(), T, false)};
  Tensor workspace = torch::stable::new_zeros(x, size, ScalarType::Byte);
  require_ok(op,
             linear_launch(head.data(), bytes_of(blob), x.const_data_ptr<float>(), T, bias ? bias->const_data_ptr<float>() : nullptr,
                           static_cast<float*>(out.mutable_data_ptr()), bytes_of(workspace), stream_of(x), false),
             x, out);
  return out;
}

Tensor step_bytes(const Tensor& program, int64_t capacity) {
  require("gpu_step_bytes", "program", program, ScalarType::Long, -1, false);
  size_t bytes = 0;
  int64_t width = 0;
  const std::string wrong =
      step_workspace(this_device(), {program.const_data_ptr<int64_t>(), program.numel()}, int(capacity), bytes, width);
  STD_TORCH_CHECK(wrong.empty(), "gpu_step_bytes: ", wrong);
  const std::vector<int64_t> two{2};
  Tensor out = torch::stable::empty(two, ScalarType::Long);
  static_cast<int64_t*>(out.mutable_data_ptr())[0] = int64_t(bytes);
  static_cast<int64_t*>(out.mutable_data_ptr())[1] = width;
  return out;
}

int64_t lora_sums_of(const Tensor& program, int64_t width) {
  require("gpu_lora_sums", "program", program, ScalarType::Long, -1, false);
  return lora_sums({program.const_data_ptr<int64_t>(), program.numel()}, width);
}

Peers peers_of(const char* op, const Tensor& words) {
  require(op, "peers", words, ScalarType::Long, kPeerWords, false);
  const Peers p = read_peers(words.const_data_ptr<int64_t>());
  STD_TORCH_CHECK(p.size > 0 && p.size <= kMaxRanks && p.rank >= 0 && p.rank < p.size && p.stop, op, ": peers is not what Peers wrote");
  return p;
}

// The parts of rows f32 that the ranks have, side by side, or their sums, in as many exchanges as the buffers of the ranks take.
void exchange_cuda(const Tensor& peers, const Tensor& x, std::vector<int64_t> widths, bool sum, Tensor& out) {
  const char* op = "gpu_exchange";
  const DeviceGuard guard(x.get_device_index());
  ExchangeArgs a{};
  a.peers = peers_of(op, peers), a.sum = sum;
  const int parts = sum ? 1 : a.peers.size, own = sum ? 0 : a.peers.rank;
  STD_TORCH_CHECK(int(widths.size()) == parts, op, ": there are ", widths.size(), " widths; expected ", parts);
  int64_t widest = 1;
  for (int r = 0; r < parts; r++) a.first[r + 1] = a.first[r] + int(widths[size_t(r)]), widest = std::max(widest, widths[size_t(r)]);
  const int64_t width = widths[size_t(own)], rows = out.numel() / std::max(1, a.first[parts]), most = a.peers.words / widest;
  require(op, "x", x, ScalarType::Float, rows * width);
  require(op, "out", out, ScalarType::Float, rows * a.first[parts]);
  STD_TORCH_CHECK(most > 0, op, ": the buffers of the ranks are smaller than a row of ", widest);
  a.x_stride = width, a.out_stride = a.first[parts];
  LaunchList list(this_device(), false);
  for (int64_t first = 0; first < rows; first += most, a.peers.exchange++) {
    a.rows = int(std::min(most, rows - first));
    a.x = x.const_data_ptr<float>() + first * width, a.out = static_cast<float*>(out.mutable_data_ptr()) + first * a.out_stride;
    plan_exchange(list, a);
  }
  plan_exchange_count(list, a.peers, a.peers.exchange);
  require_ok(op, list.run(stream_of(out)), x, out);
}

// The formats of the pools: 0 f16, 1 f32, 2 Q8, 3 Q4, 4 fp8 (csrc/format/pool.h). The caller has checked the numbers
// in the tensors.
void step_cuda(const Tensor& program, Tensor& workspace, int64_t capacity, const Tensor& ids, const Tensor& positions,
               const Tensor& block_table, const Tensor& cu_seqlens, const Tensor& context_lens, const std::optional<Tensor>& logit_rows,
               std::vector<Tensor> k_pools, std::vector<Tensor> v_pools, int64_t k_format, int64_t v_format, int64_t num_kv_heads,
               int64_t head_dim, Tensor& logits, bool pdl, int64_t stream_k_from, const std::optional<Tensor>& lora,
               const std::optional<Tensor>& adapters, const std::optional<Tensor>& lora_sums, int64_t lora_width, bool lora_inside,
               const std::optional<Tensor>& peers, bool prompts) {
  const char* op = "gpu_step";
  require(op, "program", program, ScalarType::Long, -1, false);
  require(op, "workspace", workspace, ScalarType::Byte, -1);
  STD_TORCH_CHECK(!k_pools.empty() && k_pools.size() == v_pools.size(), op, ": there are ", k_pools.size(), " K and ", v_pools.size(),
                  " V pools; expected one of each per layer");
  const int64_t T = ids.numel(), B = context_lens.numel(), rows = logit_rows ? logit_rows->numel() : T;
  require(op, "ids", ids, ScalarType::Int, -1);
  require(op, "positions", positions, ScalarType::Int, T);
  require(op, "block_table", block_table, ScalarType::Int, -1);
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.size(0) == B, op, ": block_table is no (", B, ", *)");
  require(op, "cu_seqlens", cu_seqlens, ScalarType::Int, B + 1);
  require(op, "context_lens", context_lens, ScalarType::Int, -1);
  if (logit_rows) require(op, "logit_rows", *logit_rows, ScalarType::Int, -1);
  require(op, "logits", logits, ScalarType::Float, -1);
  size_t bytes = 0;
  int64_t width = 0;
  const Program ops(program.const_data_ptr<int64_t>(), program.numel());
  std::string wrong = step_workspace(this_device(), ops, int(capacity), bytes, width);
  STD_TORCH_CHECK(wrong.empty(), op, ": ", wrong);
  GpuStep s{};
  if (peers) {
    s.peers = peers_of(op, *peers);
    const int64_t* const bounds = peers->const_data_ptr<int64_t>() + 4 + kMaxRanks;
    std::copy(bounds, bounds + kMaxRanks + 1, s.vocab);
    width = s.vocab[s.peers.size];
  }
  STD_TORCH_CHECK(logits.numel() == rows * width, op, ": logits has ", logits.numel(), " elements; expected ", rows, " x ", width);
  STD_TORCH_CHECK(ops.head() || !logit_rows, op, ": the program has no head; expected no logit_rows");
  std::vector<void*> k, v;
  for (size_t i = 0; i < k_pools.size(); i++) k.push_back(k_pools[i].mutable_data_ptr()), v.push_back(v_pools[i].mutable_data_ptr());
  const DeviceGuard guard(ids.get_device_index());
  s.ids = ids.const_data_ptr<int32_t>(), s.positions = positions.const_data_ptr<int32_t>();
  s.logit_rows = logit_rows ? logit_rows->const_data_ptr<int32_t>() : nullptr, s.logit_count = int(rows);
  s.tokens = int(T), s.capacity = int(capacity), s.stream_k_from = int(stream_k_from);
  s.k_pools = k.data(), s.v_pools = v.data(), s.layers = int(k.size());
  s.prompts = prompts;
  s.cache.k_format = int(k_format), s.cache.v_format = int(v_format);
  s.cache.block_table = block_table.const_data_ptr<int32_t>(), s.cache.max_pages = int(block_table.size(1));
  s.cache.cu_seqlens = cu_seqlens.const_data_ptr<int32_t>(), s.cache.context_lens = context_lens.const_data_ptr<int32_t>();
  s.cache.sequences = int(B), s.cache.num_kv_heads = int(num_kv_heads), s.cache.head_dim = int(head_dim);
  s.logits = static_cast<float*>(logits.mutable_data_ptr());
  if (adapters) {
    STD_TORCH_CHECK(!peers, op, ": a rank takes no adapters");
    STD_TORCH_CHECK(lora && lora_sums && lora_width > 0, op, ": lora, adapters, lora_sums and lora_width are given together or not at all");
    int64_t count = 0;
    for (const Op* one = ops.first(); one; one = ops.next(one)) count++;
    require(op, "lora", *lora, ScalarType::Long, -1);
    STD_TORCH_CHECK(lora->dim() == 3 && lora->size(1) == count && lora->size(2) * 8 == int64_t(sizeof(LoraChange)), op,
                    ": lora is no table of adapters for this program");
    require(op, "adapters", *adapters, ScalarType::Int, T);
    require(op, "lora_sums", *lora_sums, ScalarType::Float, exl2nb::lora_sums(ops, lora_width));
    s.lora.changes = reinterpret_cast<const LoraChange*>(lora->const_data_ptr()), s.lora.ops = count;
    s.lora.adapters = adapters->const_data_ptr<int32_t>();
    s.lora_sums = static_cast<float*>(const_cast<void*>(lora_sums->const_data_ptr())), s.lora_width = int(lora_width);
    s.lora_inside = lora_inside;
  }
  wrong = step_launch(ops, s, bytes_of(workspace), size_t(workspace.numel()), stream_of(ids), pdl);
  STD_TORCH_CHECK(wrong.empty(), op, " of ", T, " tokens in ", B, " sequences, K ", text_of(k_pools[0]), ", V ", text_of(v_pools[0]),
                  ", logits ", text_of(logits), ": ", wrong);
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CUDA, m) {
  m.impl("pack_exl2", TORCH_BOX(&exl2nb::pack_exl2_cuda));
  m.impl("pack_dense", TORCH_BOX(&exl2nb::pack_dense_cuda));
  m.impl("pack_concat", TORCH_BOX(&exl2nb::pack_concat_cuda));
  m.impl("linear", TORCH_BOX(&exl2nb::linear_cuda));
  m.impl("gpu_unpack", TORCH_BOX(&exl2nb::unpack_half));
  m.impl("gpu_unpack_into", TORCH_BOX(&exl2nb::unpack_into));
  m.impl("gpu_blob_head", TORCH_BOX(&exl2nb::blob_head));
  m.impl("gpu_step", TORCH_BOX(&exl2nb::step_cuda));
  m.impl("gpu_exchange", TORCH_BOX(&exl2nb::exchange_cuda));
}
STABLE_TORCH_LIBRARY_IMPL(exl2nb, CPU, m) {
  m.impl("gpu_step_bytes", TORCH_BOX(&exl2nb::step_bytes));
  m.impl("gpu_lora_sums", TORCH_BOX(&exl2nb::lora_sums_of));
  m.impl("gpu_expert_table", TORCH_BOX(&exl2nb::expert_table));
}
