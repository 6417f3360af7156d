// The launches of a step as text, planned on the host for a GPU that need not be there. Only checks, made-up addresses and registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/launches.h"
#include "cuda/runtime/plan.h"
#include "format/gpu_layout.h"
#include "gpu_blob.h"

namespace exl2nb {
namespace {

// Made-up device addresses: region r begins here. Nothing but text is made of them. exl2nb/ops/step_plan.py makes those of a program's
// tensors.
constexpr int64_t kFirstRegion = 0x5e000000, kKeyPools = 0x100, kValuePools = 0x800, kPeerBuffers = 0xf00, kProgramTensors = 0x1000,
                  kEnd = 0x10000;
constexpr const char* kBuffers[] = {"",       "ids",  "positions", "logit_rows", "block_table", "cu_seqlens", "context_lens",
                                    "logits", "lora", "adapters",  "lora_sums",  "workspace"};
enum Buffer { kIds = 1, kPositions, kLogitRows, kBlockTable, kSeqlens, kContextLens, kLogits, kLora, kAdapters, kLoraSums, kWorkspace };
template <class T>
T* region(int64_t number) {
  return reinterpret_cast<T*>((kFirstRegion + number) << 32);
}
std::string region_name(int64_t number) {
  std::string name;
  for (const auto& [first, stem] : {std::pair{kProgramTensors, "t"}, {kPeerBuffers, "peer"}, {kValuePools, "v"}, {kKeyPools, "k"}})
    if (number >= first) return name.append(stem).append(std::to_string(number - first));
  return kBuffers[number];
}

Tensor text_tensor(const std::string& text) {
  const std::vector<int64_t> shape{int64_t(text.size())};
  Tensor out = torch::stable::empty(shape, ScalarType::Byte);
  std::memcpy(out.mutable_data_ptr(), text.data(), text.size());
  return out;
}

// The head of a blob on the GPU (gpu_blob_head), and everything else before its strips, laid out on the host. parts: of each part its kind
// (0 dense, 1 EXL2, 2 GPTQ), outputs, a number of its permutation (0: none), stored rows, the number of groups, and of each group its bits
// and rows.
Tensor planned_blob(const Tensor& words, int64_t K, int64_t address) {
  const char* op = "gpu_planned_blob";
  require(op, "parts", words, ScalarType::Long, -1, false);
  const std::vector<int64_t> parts(words.const_data_ptr<int64_t>(), words.const_data_ptr<int64_t>() + words.numel());
  std::vector<PartLayout> layouts;
  for (size_t at = 0; at < parts.size();) {
    STD_TORCH_CHECK(at + 5 <= parts.size() && at + 5 + 2 * size_t(parts[at + 4]) <= parts.size(), op, ": parts end within a part");
    const int64_t kind = parts[at], outputs = parts[at + 1], order = parts[at + 2], stored = parts[at + 3], count = parts[at + 4];
    std::vector<Group> groups;
    for (size_t i = at + 5; i < at + 5 + 2 * size_t(count); i += 2) groups.push_back({int(parts[i]), int(parts[i + 1])});
    at += 5 + 2 * size_t(count);
    std::vector<int> perm(order ? size_t(stored) : 0);
    for (size_t i = 0; i < perm.size(); i++) perm[i] = int(int64_t(i) < K ? (int64_t(i) + order) % K : K);
    layouts.push_back(kind == 1   ? layout_exl2(groups, std::vector<uint16_t>(groups.size()), 1., int(outputs), perm)
                      : kind == 2 ? layout_gptq(groups, int(outputs), perm)
                                  : layout_dense(int(K), int(outputs)));
  }
  BlobLayout made;
  const std::string wrong = layout_blob(int(K), layouts, made);
  STD_TORCH_CHECK(wrong.empty(), op, ": ", wrong);
  const std::vector<int64_t> shape{int64_t(made.meta.size()) + 8};
  Tensor out = torch::stable::empty(shape, ScalarType::Byte);
  std::memcpy(out.mutable_data_ptr(), &address, 8);
  std::memcpy(bytes_of(out) + 8, made.meta.data(), made.meta.size());
  return out;
}

// As gpu_expert_table, of what gpu_planned_blob returned.
Tensor planned_experts(std::vector<Tensor> blobs, int64_t parts) {
  std::vector<const uint8_t*> heads;
  std::vector<std::vector<uint8_t>> images;
  for (const Tensor& blob : blobs) {
    heads.push_back(static_cast<const uint8_t*>(blob.const_data_ptr()));
    const uint8_t* const image = heads.back() + 8 + header_of(heads.back() + 8).image;
    const GpuHeader& h = header_of(heads.back() + 8);
    images.emplace_back(image, image + image_bytes(h.num_items, h.num_units, h.num_parts));
  }
  std::vector<uint8_t> table;
  const char* const wrong = make_expert_table(heads, images, int(parts), table);
  STD_TORCH_CHECK(!wrong, "gpu_planned_experts: ", wrong);
  return text_tensor({table.begin(), table.end()});
}

Tensor step_plan(const Tensor& program, std::vector<int64_t> gpu, int64_t capacity, int64_t tokens, std::optional<int64_t> logit_rows,
                 int64_t sequences, int64_t max_pages, int64_t k_format, int64_t v_format, bool pdl, int64_t stream_k_from,
                 int64_t lora_width, bool lora_inside, const std::optional<Tensor>& peers, bool prompts) {
  const char* op = "gpu_step_plan";
  STD_TORCH_CHECK(gpu.size() == 5, op, ": gpu has ", gpu.size(), " numbers; expected 5");
  const Device device{int(gpu[0]), int(gpu[1]), int(gpu[0]), int(gpu[2]), int(gpu[3]), int(gpu[4])};
  const Program ops(program.const_data_ptr<int64_t>(), program.numel());
  if (const char* wrong = ops.wrong()) STD_TORCH_CHECK(false, op, ": ", wrong);
  GpuStep s{};
  s.ids = region<int32_t>(kIds), s.positions = region<int32_t>(kPositions);
  s.logit_rows = logit_rows ? region<int32_t>(kLogitRows) : nullptr, s.logit_count = int(logit_rows.value_or(tokens));
  s.tokens = int(tokens), s.capacity = int(capacity), s.prompts = prompts, s.stream_k_from = int(stream_k_from);
  s.cache.block_table = region<int32_t>(kBlockTable), s.cache.cu_seqlens = region<int32_t>(kSeqlens);
  s.cache.context_lens = region<int32_t>(kContextLens), s.logits = region<float>(kLogits);
  s.cache.k_format = int(k_format), s.cache.v_format = int(v_format), s.cache.max_pages = int(max_pages),
  s.cache.sequences = int(sequences);
  std::vector<void*> k, v;
  std::map<uint64_t, std::string> heads;  // by address
  int64_t count = 0;
  for (const Op* one = ops.first(); one; one = ops.next(one), count++) {
    if (const uint8_t* blob = matrix_of(one))
      heads[reinterpret_cast<uint64_t>(blob) + 8] = std::string("head").append(std::to_string(count));
    if (const auto* const qkv = as<QkvOp>(one)) {
      k.push_back(region<void>(kKeyPools + s.layers)), v.push_back(region<void>(kValuePools + s.layers++));
      s.cache.num_kv_heads = int(qkv->num_kv_heads), s.cache.head_dim = int(qkv->head_dim);
    }
  }
  s.k_pools = k.data(), s.v_pools = v.data();
  if (peers) {
    s.peers = read_peers(peers->const_data_ptr<int64_t>());
    const int64_t* const bounds = peers->const_data_ptr<int64_t>() + 4 + kMaxRanks;
    std::copy(bounds, bounds + kMaxRanks + 1, s.vocab);
    for (int r = 0; r < s.peers.size; r++) s.peers.buffer[r] = region<uint8_t>(kPeerBuffers + r);
    s.peers.stop = region<int>(kPeerBuffers + kMaxRanks);
  }
  if (lora_width) {
    s.lora.changes = region<LoraChange>(kLora), s.lora.ops = count, s.lora.adapters = region<int>(kAdapters);
    s.lora_sums = region<float>(kLoraSums), s.lora_width = int(lora_width), s.lora_inside = lora_inside;
  }
  size_t bytes = 0;
  int64_t width = 0;
  std::string wrong = step_workspace(device, ops, s.capacity, bytes, width);
  STD_TORCH_CHECK(wrong.empty(), op, ": ", wrong);
  LaunchList list(device, pdl);
  wrong = plan_step(list, ops, s, region<uint8_t>(kWorkspace), bytes);
  STD_TORCH_CHECK(wrong.empty(), op, ": ", wrong);
  return text_tensor(list.text([&](uint64_t word) {
    const int64_t number = int64_t(word >> 32) - kFirstRegion;
    if (number <= 0 || number >= kEnd) return heads.count(word) ? heads[word] : std::string();
    char offset[20] = "";
    if (uint32_t(word)) std::snprintf(offset, sizeof offset, "+%x", uint32_t(word));
    return region_name(number) + offset;
  }));
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CPU, m) {
  m.impl("gpu_planned_blob", TORCH_BOX(&exl2nb::planned_blob));
  m.impl("gpu_planned_experts", TORCH_BOX(&exl2nb::planned_experts));
  m.impl("gpu_step_plan", TORCH_BOX(&exl2nb::step_plan));
}
