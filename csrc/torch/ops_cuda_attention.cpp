// Attention and sampling of the CUDA library: checks, output tensors, the current stream, registration.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "cuda/attention/attention.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launches.h"
#include "cuda/sampling/sample.h"
#include "stream.h"
#include "text.h"

namespace exl2nb {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// shape: -1 matches any size. The address, for reading or writing.
void* data_of(const char* op, const char* name, const Tensor& t, ScalarType dtype, std::initializer_list<int64_t> shape) {
  bool fits = t.is_cuda() && t.is_contiguous() && t.scalar_type() == dtype && t.dim() == int64_t(shape.size());
  std::string wanted;
  int64_t i = 0;
  for (int64_t n : shape) {
    fits = fits && (n < 0 || t.size(i) == n);
    wanted += (i++ ? ", " : "") + (n < 0 ? std::string("*") : std::to_string(n));
  }
  STD_TORCH_CHECK(fits, op, ": ", name, " is ", text_of(t), t.is_cuda() ? "" : " not on the GPU",
                  t.is_contiguous() ? "" : " not contiguous", "; expected ", dtype_name(dtype), " (", wanted, "), contiguous, on the GPU");
  return const_cast<void*>(t.const_data_ptr());
}
template <class T>
T* data(const char* op, const char* name, const Tensor& t, ScalarType dtype, std::initializer_list<int64_t> shape) {
  return static_cast<T*>(data_of(op, name, t, dtype, shape));
}
template <class T>
T* data(const char* op, const char* name, const Optional& t, ScalarType dtype, std::initializer_list<int64_t> shape) {
  return t ? data<T>(op, name, *t, dtype, shape) : nullptr;
}

int format_of(const char* op, const Tensor& pool, int64_t heads, int64_t head_dim) {
  const ScalarType dtype = pool.scalar_type();
  const bool shaped = pool.is_cuda() && pool.is_contiguous() && pool.dim() >= 3 && pool.size(1) == heads;
  if (shaped && pool.dim() == 4 && pool.size(2) == 256 && pool.size(3) == head_dim) {
    if (dtype == ScalarType::Half) return kCacheF16;
    if (dtype == ScalarType::Float) return kCacheF32;
  }
  if (shaped && pool.dim() == 3) {
    const auto holds = [&](ScalarType wanted, CacheFormat kind) {
      return dtype == wanted && pool.size(2) == pool_row_bytes(kind, kPage, int(head_dim));
    };
    if (holds(ScalarType::Float8_e4m3fn, kCacheFp8)) return kCacheFp8;
    if (holds(ScalarType::Byte, kCacheQ8)) return kCacheQ8;
    if (holds(ScalarType::Byte, kCacheQ4)) return kCacheQ4;
  }
  STD_TORCH_CHECK(false, op, ": a pool is ", text_of(pool), "; expected f16 or f32 (pages, ", heads, ", 256, ", head_dim,
                  ") or coded rows (cache/FORMAT.md), contiguous, on the GPU");
}

CacheArgs pools(const char* op, const Tensor& k_pool, const Tensor& v_pool, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
  STD_TORCH_CHECK(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0, op, ": head_dim is ", head_dim,
                  "; expected a multiple of 8 up to 256");
  STD_TORCH_CHECK(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0, op, ": num_heads is ", num_heads,
                  "; expected a multiple of num_kv_heads, ", num_kv_heads);
  CacheArgs c{};
  c.k_format = format_of(op, k_pool, num_kv_heads, head_dim), c.v_format = format_of(op, v_pool, num_kv_heads, head_dim);
  c.k_pool = const_cast<void*>(k_pool.const_data_ptr()), c.v_pool = const_cast<void*>(v_pool.const_data_ptr());
  c.num_heads = int(num_heads), c.num_kv_heads = int(num_kv_heads), c.head_dim = int(head_dim);
  return c;
}

void batch(const char* op, CacheArgs& c, const Tensor& block_table, const Tensor& cu_seqlens, const Tensor& context_lens) {
  const int64_t B = context_lens.numel();
  c.context_lens = data<int>(op, "context_lens", context_lens, ScalarType::Int, {B});
  c.cu_seqlens = data<int>(op, "cu_seqlens", cu_seqlens, ScalarType::Int, {B + 1});
  c.block_table = data<int>(op, "block_table", block_table, ScalarType::Int, {B, -1});
  c.sequences = int(B), c.max_pages = int(block_table.size(1));
}

RopeArgs rope_args(const char* op, const CacheArgs& c, const Tensor& cos, const Tensor& sin, const Optional& positions, int64_t tokens,
                   const Optional& q_norm, const Optional& k_norm, double eps, bool layer_norm, bool interleaved, double clip) {
  RopeArgs r{};
  const int64_t half = cos.dim() == 2 ? cos.size(1) : -1;
  STD_TORCH_CHECK(half >= 0 && 2 * half <= c.head_dim, op, ": cos is ", text_of(cos), "; expected (max_pos, up to head_dim / 2)");
  r.cos = data<float>(op, "cos", cos, ScalarType::Float, {-1, half}),
  r.sin = data<float>(op, "sin", sin, ScalarType::Float, {cos.size(0), half});
  if (!half) r.cos = r.sin = nullptr;
  r.half = int(half), r.interleaved = interleaved, r.clip = float(clip), r.layer_norm = layer_norm, r.eps = float(eps);
  r.positions = data<int>(op, "positions", positions, ScalarType::Int, {tokens});
  const auto weight = [&](const char* name, const Optional& w, int64_t heads) -> const float* {
    if (!w) return nullptr;
    if (w->dim() == 2) {
      r.norm_per_head = true;
      return data<float>(op, name, *w, ScalarType::Float, {heads, c.head_dim});
    }
    if (w->numel() != c.head_dim) {
      r.norm_whole = true;
      return data<float>(op, name, *w, ScalarType::Float, {heads * c.head_dim});
    }
    return data<float>(op, name, *w, ScalarType::Float, {c.head_dim});
  };
  r.q_norm = weight("q_norm", q_norm, c.num_heads), r.k_norm = weight("k_norm", k_norm, c.num_kv_heads);
  return r;
}

Tensor workspace_for(const Tensor& like, const CacheArgs& c, int64_t tokens) {
  const int64_t rows = std::min(tokens, int64_t(8) * c.sequences);
  const std::vector<int64_t> shape{int64_t(attention_workspace_bytes(int(rows), c.num_heads, c.num_kv_heads, c.head_dim))};
  return torch::stable::new_zeros(like, shape, ScalarType::Byte);
}

Tensor paged_attention_cuda(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool, const Tensor& block_table,
                            const Tensor& cu_seqlens, const Tensor& context_lens, double scale, int64_t window, double softcap) {
  const char* op = "paged_attention";
  STD_TORCH_CHECK(q.dim() == 3 && k_pool.dim() >= 3, op, ": q is ", text_of(q), "; expected f32 (T, Hq, D)");
  AttentionArgs a{};
  a.cache = pools(op, k_pool, v_pool, q.size(1), k_pool.size(1), q.size(2));
  a.q = data<float>(op, "q", q, ScalarType::Float, {-1, -1, -1});
  batch(op, a.cache, block_table, cu_seqlens, context_lens);
  a.tokens = int(q.size(0)), a.scale = float(scale), a.window = int(window), a.softcap = float(softcap);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const std::vector<int64_t> shape{q.size(0), q.size(1) * q.size(2)};
  Tensor out = torch::stable::new_zeros(q, shape), workspace = workspace_for(q, a.cache, a.tokens);
  a.to.out = static_cast<float*>(out.mutable_data_ptr());
  a.workspace = workspace.mutable_data_ptr(), a.workspace_bytes = size_t(workspace.numel());
  LaunchList list(this_device(), false);
  plan_attention(list, a);
  const char* wrong = list.run(stream_of(q));
  STD_TORCH_CHECK(!wrong, op, " of q ", text_of(q), ", pools ", text_of(k_pool), " and ", text_of(v_pool), ": ", wrong);
  return out;
}

int64_t attention_workspace(const Tensor&, int64_t tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
  return int64_t(attention_workspace_bytes(int(tokens), int(num_heads), int(num_kv_heads), int(head_dim)));
}

std::tuple<Tensor, Tensor> attention_step_cuda(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Optional& positions,
                                               const Tensor& k_pool, const Tensor& v_pool, const Tensor& block_table,
                                               const Tensor& cu_seqlens, const Tensor& context_lens, const Tensor& workspace,
                                               const Optional& q_norm, const Optional& k_norm, std::vector<Tensor> inverse,
                                               int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, double eps, bool layer_norm,
                                               bool interleaved, double clip, double scale, int64_t window, double softcap, bool pdl,
                                               bool large_chunks) {
  const char* op = "attention_step";
  AttentionArgs a{};
  a.cache = pools(op, k_pool, v_pool, num_heads, num_kv_heads, head_dim);
  a.qkv = data<float>(op, "qkv", qkv, ScalarType::Float, {-1, (num_heads + 2 * num_kv_heads) * head_dim});
  const int64_t T = qkv.size(0), K = num_heads * head_dim, stride = (K + 31) / 32 * 32;
  batch(op, a.cache, block_table, cu_seqlens, context_lens);
  a.rope = rope_args(op, a.cache, cos, sin, positions, T, q_norm, k_norm, eps, layer_norm, interleaved, clip);
  a.tokens = int(T), a.scale = float(scale), a.window = int(window), a.softcap = float(softcap);
  a.workspace = data<void>(op, "workspace", workspace, ScalarType::Byte, {-1}), a.workspace_bytes = size_t(workspace.numel());
  STD_TORCH_CHECK(inverse.size() <= size_t(AttentionOut::kMaxPerms), op, ": ", inverse.size(), " permutations; expected at most ",
                  AttentionOut::kMaxPerms);
  const torch::stable::accelerator::DeviceGuard guard(qkv.get_device_index());
  const int64_t copies = int64_t(inverse.size());
  const std::vector<int64_t> shape{T, K}, x_shape{copies, T, stride};
  Tensor out = torch::stable::new_empty(qkv, shape, ScalarType::Float), x = torch::stable::new_empty(qkv, x_shape, ScalarType::Half);
  a.to.out = static_cast<float*>(out.mutable_data_ptr());
  a.to.x = static_cast<half*>(x.mutable_data_ptr()), a.to.stride = int(stride), a.to.perm_stride = int(T * stride),
  a.to.num_perms = int(copies);
  for (int64_t i = 0; i < copies; i++) a.to.inverse[i] = data<int>(op, "inverse", inverse[i], ScalarType::Int, {K});
  a.large_chunks = large_chunks;
  LaunchList list(this_device(), pdl);
  plan_attention(list, a);
  const char* wrong = list.run(stream_of(qkv));
  STD_TORCH_CHECK(!wrong, op, " of qkv ", text_of(qkv), ", pools ", text_of(k_pool), " and ", text_of(v_pool), ": ", wrong);
  return {out, x};
}

std::tuple<Tensor, Tensor, Tensor> rope_append_cuda(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                                                    const Tensor& slots, const Tensor& k_pool, const Tensor& v_pool, const Optional& q_norm,
                                                    const Optional& k_norm, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                                    double eps, bool layer_norm, bool interleaved, double clip) {
  const char* op = "rope_append";
  RopeAppendArgs a{};
  a.cache = pools(op, k_pool, v_pool, num_heads, num_kv_heads, head_dim);
  a.qkv = data<float>(op, "qkv", qkv, ScalarType::Float, {-1, (num_heads + 2 * num_kv_heads) * head_dim});
  const int64_t T = qkv.size(0);
  a.rope = rope_args(op, a.cache, cos, sin, positions, T, q_norm, k_norm, eps, layer_norm, interleaved, clip);
  a.slots = data<int>(op, "slots", slots, ScalarType::Int, {T}), a.tokens = int(T);
  const torch::stable::accelerator::DeviceGuard guard(qkv.get_device_index());
  const std::vector<int64_t> q_shape{T, num_heads, head_dim}, shape{T, num_kv_heads, head_dim};
  Tensor q = torch::stable::new_empty(qkv, q_shape, ScalarType::Half);
  Tensor k = torch::stable::new_empty(qkv, shape, ScalarType::Half), v = torch::stable::new_empty(qkv, shape, ScalarType::Half);
  a.q_f16 = q.mutable_data_ptr(), a.k_f16 = k.mutable_data_ptr(), a.v_f16 = v.mutable_data_ptr();
  LaunchList list(this_device(), false);
  plan_rope_append(list, a);
  const char* wrong = list.run(stream_of(qkv));
  STD_TORCH_CHECK(!wrong, op, " of qkv ", text_of(qkv), ", pools ", text_of(k_pool), " and ", text_of(v_pool), ": ", wrong);
  return {q, k, v};
}

std::tuple<Tensor, Tensor> gather_cache_cuda(const Tensor& k_pool, const Tensor& v_pool, const Tensor& pages, int64_t length,
                                             int64_t head_dim) {
  const char* op = "gather_cache";
  STD_TORCH_CHECK(k_pool.dim() >= 3, op, ": k_pool is ", text_of(k_pool), "; expected 3 or 4 dimensions");
  const int64_t heads = k_pool.size(1);
  const CacheArgs c = pools(op, k_pool, v_pool, heads, heads, head_dim);
  const int* list = data<int>(op, "pages", pages, ScalarType::Int, {-1});
  STD_TORCH_CHECK(length >= 0 && length <= pages.numel() * 256, op, ": length is ", length, "; expected at most ", pages.numel() * 256);
  const torch::stable::accelerator::DeviceGuard guard(k_pool.get_device_index());
  const std::vector<int64_t> shape{length, heads, head_dim};
  Tensor k = torch::stable::new_empty(k_pool, shape, ScalarType::Half), v = torch::stable::new_empty(k_pool, shape, ScalarType::Half);
  const char* wrong = gather_launch(c, list, int(length), k.mutable_data_ptr(), v.mutable_data_ptr(), stream_of(k_pool));
  STD_TORCH_CHECK(!wrong, op, " of ", length, " tokens from ", text_of(k_pool), " and ", text_of(v_pool), ": ", wrong);
  return {k, v};
}

std::tuple<Tensor, Tensor, Tensor> sample_rows_cuda(const Tensor& logits, const Tensor& params, const Optional& counts,
                                                    const Optional& step, const Optional& ids, const Optional& positions,
                                                    const Optional& context_lens, const Optional& slots, const Optional& block_table,
                                                    int64_t ring, bool pdl, const Optional& bias, const Optional& into) {
  const char* op = "sample_rows";
  SampleArgs a{};
  a.logits = data<float>(op, "logits", logits, ScalarType::Float, {-1, -1});
  const int64_t R = logits.size(0), V = logits.size(1);
  STD_TORCH_CHECK(V > 0 && V < (int64_t(1) << 24) && R < (1 << 16) && ring > 0, op, ": logits are ", text_of(logits), ", ring ", ring);
  a.row_stride = V, a.rows = int(R), a.vocab = int(V), a.ring = int(ring);
  a.params = data<SampleRow>(op, "params", params, ScalarType::Byte, {R, int64_t(sizeof(SampleRow))});
  a.counts = data<uint16_t>(op, "counts", counts, ScalarType::Short, {R, V});
  a.bias = data<float>(op, "bias", bias, ScalarType::Float, {R, V});
  a.step = data<int32_t>(op, "step", step, ScalarType::Int, {R});
  a.advance.ids = data<int32_t>(op, "ids", ids, ScalarType::Int, {R});
  a.advance.positions = data<int32_t>(op, "positions", positions, ScalarType::Int, {R});
  a.advance.context_lens = data<int32_t>(op, "context_lens", context_lens, ScalarType::Int, {R});
  a.advance.slots = data<int32_t>(op, "slots", slots, ScalarType::Int, {R});
  a.advance.block_table = data<int32_t>(op, "block_table", block_table, ScalarType::Int, {R, -1});
  a.advance.max_pages = block_table ? int(block_table->size(1)) : 0;
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  if (into) {
    const Tensor& t = *into;
    const bool fits = t.is_cpu() && t.is_contiguous() && t.scalar_type() == ScalarType::Int && t.dim() == 3 && t.size(0) == ring &&
                      t.size(1) == R && t.size(2) == 4;
    a.results = fits ? static_cast<SampleResult*>(pinned(const_cast<void*>(t.const_data_ptr()))) : nullptr;
    STD_TORCH_CHECK(a.results || (fits && !R), op, ": into is ", text_of(t), "; expected int32 (", ring, ", ", R,
                    ", 4), contiguous, pinned");
  }
  const std::vector<int64_t> shape{into ? 0 : ring, R, 4}, top_shape{R, 20};
  Tensor results = torch::stable::new_empty(logits, shape, ScalarType::Int);
  Tensor top_ids = torch::stable::new_empty(logits, top_shape, ScalarType::Int);
  Tensor top_logprobs = torch::stable::new_empty(logits, top_shape, ScalarType::Float);
  if (!into) a.results = static_cast<SampleResult*>(results.mutable_data_ptr());
  a.top_ids = static_cast<int32_t*>(top_ids.mutable_data_ptr()), a.top_logprobs = static_cast<float*>(top_logprobs.mutable_data_ptr());
  const char* wrong = sample_launch(a, stream_of(logits), pdl);
  STD_TORCH_CHECK(!wrong, op, " of ", text_of(logits), ": ", wrong);
  return {results, top_ids, top_logprobs};
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CUDA, m) {
  m.impl("paged_attention", TORCH_BOX(&exl2nb::paged_attention_cuda));
  m.impl("attention_workspace", TORCH_BOX(&exl2nb::attention_workspace));
  m.impl("attention_step", TORCH_BOX(&exl2nb::attention_step_cuda));
  m.impl("rope_append", TORCH_BOX(&exl2nb::rope_append_cuda));
  m.impl("gather_cache", TORCH_BOX(&exl2nb::gather_cache_cuda));
  m.impl("sample_rows", TORCH_BOX(&exl2nb::sample_rows_cuda));
}
