// The compute ops of the CPU library: checks, output tensors, registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../cpu/async_step.h"
#include "../cpu/engine.h"
#include "../cpu/fused_step.h"
#include "../cpu/kernels.h"
#include "../cpu/parallel.h"
#include "../cpu/step.h"
#include "../format/gpu_layout.h"
#include "../format/gpu_workspace.h"
#include "../format/program.h"
#include "check.h"

namespace exl2nb {

int64_t num_threads() { return torch::stable::get_num_threads(); }

// In ops_cpu_draw.cpp.
int64_t drawable_columns(const char* op, std::optional<int64_t> columns, int64_t V);
Tensor draw_rows_cpu(const Tensor& logits, const Tensor& settings, const std::optional<Tensor>& bits, int64_t top,
                     std::optional<int64_t> columns);

namespace {

Tensor empty_f32(std::initializer_list<int64_t> shape) {
  const std::vector<int64_t> sizes(shape);
  return torch::stable::empty(sizes, ScalarType::Float);
}
float* out_f32(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

void check_text(const char* op, const std::string& wrong) { STD_TORCH_CHECK(wrong.empty(), op, ": ", wrong); }

Tensor embed_cpu(const Tensor& table, const Tensor& ids, double scale, const std::optional<Tensor>& position_table,
                 const std::optional<Tensor>& positions) {
  const int kind = dense_kind(table.scalar_type());
  STD_TORCH_CHECK(kind >= 0, "embed: table is ", dtype_name(table.scalar_type()), "; expected float32, float16 or bfloat16");
  check_tensor("embed", "table", table, table.scalar_type(), {-1, -1});
  const int32_t* p = data_i32("embed", "ids", ids, {-1});
  const int64_t T = ids.size(0), H = table.size(1);
  check_text("embed", check_range("a token id", p, T, table.size(0)));
  Places places;
  if (position_table) {
    places.kind = dense_kind(position_table->scalar_type());
    STD_TORCH_CHECK(places.kind >= 0 && positions, "embed: a table of positions needs a float dtype, and positions");
    check_tensor("embed", "position_table", *position_table, position_table->scalar_type(), {-1, H});
    places.table = position_table->const_data_ptr();
    places.positions = data_i32("embed", "positions", *positions, {T});
    check_text("embed", check_range("a position", places.positions, T, position_table->size(0)));
  }
  Tensor out = empty_f32({T, H});
  embed(table.const_data_ptr(), kind, int(H), p, int(T), float(scale), places, out_f32(out));
  return out;
}

Tensor linear_cpu(const Tensor& x, const Tensor& blob, const std::optional<Tensor>& bias) {
  const uint8_t* w = check_weight("linear", blob, true);
  const float* p = data_f32("linear", "x", x, {-1, header(w).K});
  const float* b = data_f32("linear", "bias", bias, {header(w).N});
  Tensor out = empty_f32({x.size(0), header(w).N});
  linear(p, int(x.size(0)), w, b, out_f32(out), false);
  return out;
}

Norm norm_of(const char* op, const std::optional<Tensor>& weight, double eps, const std::optional<Tensor>& bias, bool layer, int64_t H) {
  STD_TORCH_CHECK(weight || !bias, op, ": norm_bias without norm");
  return {data_f32(op, "norm", weight, {H}), float(eps), data_f32(op, "norm_bias", bias, {H}), layer};
}

void linear_residual_cpu(Tensor residual, const Tensor& x, const Tensor& blob, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& norm, double eps, double scale) {
  const char* op = "linear_residual";
  const uint8_t* w = check_weight(op, blob, true);
  const float* p = data_f32(op, "x", x, {-1, header(w).K});
  const float* b = data_f32(op, "bias", bias, {header(w).N});
  data_f32(op, "residual", residual, {x.size(0), header(w).N});
  const Norm n = norm_of(op, norm, eps, std::nullopt, false, header(w).N);
  linear_residual(p, int(x.size(0)), w, b, n, float(scale), out_f32(residual));
}

struct Pools {
  int64_t num_pages, num_kv_heads, page_size, head_dim;
  CacheFormat k_kind, v_kind;
};

// Kind of one pool; head_dim is needed for the coded ones only, whose rows say how many bits a code has.
CacheFormat pool_kind(const char* op, const char* name, const Tensor& pool, int64_t head_dim) {
  const ScalarType dtype = pool.scalar_type();
  if (dtype == ScalarType::Half) return kCacheF16;
  if (dtype == ScalarType::Float) return kCacheF32;
  STD_TORCH_CHECK(dtype == ScalarType::Byte || dtype == ScalarType::Float8_e4m3fn, op, ": ", name, " is ", dtype_name(dtype),
                  "; expected float16, float32, or codes (uint8 or float8_e4m3fn)");
  STD_TORCH_CHECK(head_dim > 0 && head_dim % 8 == 0 && head_dim <= kMaxHeadDim, op, ": head_dim is ", head_dim,
                  "; expected a multiple of 8 up to ", kMaxHeadDim);
  const int64_t row8 = pool_row_bytes(kCacheQ8, kPage, int(head_dim)), row4 = pool_row_bytes(kCacheQ4, kPage, int(head_dim));
  const bool fits = pool.dim() == 3 && (pool.size(2) == row8 || (pool.size(2) == row4 && dtype == ScalarType::Byte));
  STD_TORCH_CHECK(fits, op, ": ", name, " is ", dtype_name(dtype), " ", shape_text(pool), "; expected (pages, heads, ", row8,
                  dtype == ScalarType::Byte ? " or " + std::to_string(row4) : std::string(), ") for head_dim ", head_dim);
  return dtype != ScalarType::Byte ? kCacheFp8 : pool.size(2) == row8 ? kCacheQ8 : kCacheQ4;
}

// A pool like the first ones.
void check_pool(const char* op, const char* name, const Tensor& pool, const Pools& p, CacheFormat kind) {
  if (pool_is_coded(kind))
    check_tensor(op, name, pool, kind == kCacheFp8 ? ScalarType::Float8_e4m3fn : ScalarType::Byte,
                 {p.num_pages, p.num_kv_heads, pool_row_bytes(kind, p.page_size, int(p.head_dim))});
  else
    check_tensor(op, name, pool, kind == kCacheF16 ? ScalarType::Half : ScalarType::Float,
                 {p.num_pages, p.num_kv_heads, p.page_size, p.head_dim});
}

// num_kv_heads, head_dim: -1 where any will do; then coded pools are refused.
Pools check_pools(const char* op, const Tensor& k, const Tensor& v, int64_t num_kv_heads, int64_t head_dim) {
  Pools p{k.size(0), num_kv_heads, kPage, head_dim, pool_kind(op, "k_pool", k, head_dim), pool_kind(op, "v_pool", v, head_dim)};
  const Tensor* plain = !pool_is_coded(p.k_kind) ? &k : !pool_is_coded(p.v_kind) ? &v : nullptr;
  if (plain) {
    const CacheFormat kind = plain == &k ? p.k_kind : p.v_kind;
    check_tensor(op, plain == &k ? "k_pool" : "v_pool", *plain, kind == kCacheF16 ? ScalarType::Half : ScalarType::Float,
                 {p.num_pages, num_kv_heads, -1, head_dim});
    p.page_size = plain->size(2);
    p.head_dim = plain->size(3);
  }
  if (p.num_kv_heads < 0) p.num_kv_heads = k.size(1);
  const bool coded = pool_is_coded(p.k_kind) || pool_is_coded(p.v_kind);
  STD_TORCH_CHECK(p.page_size > 0 && p.page_size % 8 == 0 && (!coded || p.page_size == kPage), op, ": page size is ", p.page_size,
                  "; expected ", coded ? "256" : "a multiple of 8");
  STD_TORCH_CHECK(p.head_dim > 0 && p.head_dim % 8 == 0 && p.head_dim <= kMaxHeadDim, op, ": head_dim is ", p.head_dim,
                  "; expected a multiple of 8 up to ", kMaxHeadDim);
  check_pool(op, "k_pool", k, p, p.k_kind);
  check_pool(op, "v_pool", v, p, p.v_kind);
  return p;
}

const float* head_norm(const char* op, const char* name, const std::optional<Tensor>& t, int64_t heads, int64_t D, int64_t& stride,
                       bool& full) {
  full = t && t->dim() == 1 && heads > 1 && t->size(0) == heads * D;
  stride = full || (t && t->dim() == 2) ? D : 0;
  if (full) return data_f32(op, name, *t, {heads * D});
  return stride ? data_f32(op, name, *t, {heads, D}) : data_f32(op, name, t, {D});
}

Tensor norm_qkv_rope_cpu(const Tensor& x, const std::optional<Tensor>& norm, double eps, const Tensor& blob,
                         const std::optional<Tensor>& bias, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                         const Tensor& slots, Tensor k_pool, Tensor v_pool, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                         const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, const std::optional<Tensor>& norm_bias,
                         bool layer_norm, bool interleaved, double clip) {
  const char* op = "norm_qkv_rope";
  const uint8_t* w = check_weight(op, blob, true);
  const BlobHeader& h = header(w);
  STD_TORCH_CHECK(num_heads > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0, op, ": num_heads is ", num_heads,
                  "; expected a multiple of num_kv_heads = ", num_kv_heads);
  const float* px = data_f32(op, "x", x, {-1, h.K});
  const int64_t T = x.size(0);
  const Norm n = norm_of(op, norm, eps, norm_bias, layer_norm, h.K);
  STD_TORCH_CHECK(h.N == (num_heads + 2 * num_kv_heads) * head_dim, op, ": blob has ", h.N,
                  " outputs; expected (num_heads + 2 * num_kv_heads) * ", "head_dim = ", (num_heads + 2 * num_kv_heads) * head_dim);
  const float* pb = data_f32(op, "bias", bias, {h.N});
  const Pools pools = check_pools(op, k_pool, v_pool, num_kv_heads, head_dim);
  Rope rope{data_f32(op, "cos", cos, {-1, -1}), data_f32(op, "sin", sin, {cos.size(0), cos.size(1)}),
            data_i32(op, "positions", positions, {T}), data_i32(op, "slots", slots, {T}), float(clip)};
  STD_TORCH_CHECK(2 * cos.size(1) <= head_dim, op, ": cos has ", cos.size(1), " columns; expected rotary_dim / 2, at most ", head_dim / 2);
  check_text(op, check_range("a position", rope.positions, T, cos.size(0)));
  check_text(op, check_range("a slot", rope.slots, T, pools.num_pages * pools.page_size));
  Heads heads{int(num_heads),
              int(num_kv_heads),
              int(head_dim),
              int(cos.size(1)),
              pools.page_size,
              pools.k_kind,
              pools.v_kind,
              nullptr,
              nullptr,
              0,
              0,
              float(eps)};
  heads.q_norm = head_norm(op, "q_norm", q_norm, num_heads, head_dim, heads.q_norm_stride, heads.q_full);
  heads.k_norm = head_norm(op, "k_norm", k_norm, num_kv_heads, head_dim, heads.k_norm_stride, heads.k_full);
  heads.layer_norm = layer_norm;
  heads.interleaved = interleaved;
  Tensor q = empty_f32({T, num_heads, head_dim});
  norm_qkv_rope(px, int(T), n, w, pb, rope, heads, out_f32(q), k_pool.mutable_data_ptr(), v_pool.mutable_data_ptr());
  return q;
}

Tensor paged_attention_cpu(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool, const Tensor& block_table, const Tensor& cu_seqlens,
                           const Tensor& context_lens, double scale, int64_t window, double softcap) {
  const char* op = "paged_attention";
  const float* pq = data_f32(op, "q", q, {-1, -1, -1});
  const Pools pools = check_pools(op, k_pool, v_pool, -1, q.size(2));
  const int64_t T = q.size(0), Hq = q.size(1), B = context_lens.numel();
  STD_TORCH_CHECK(pools.num_kv_heads > 0 && Hq % pools.num_kv_heads == 0, op, ": q has ", Hq, " heads; expected a multiple of the pools' ",
                  pools.num_kv_heads);
  STD_TORCH_CHECK(window >= 0, op, ": window is ", window, "; expected 0 (none) or more");
  Attention a{k_pool.const_data_ptr(),
              v_pool.const_data_ptr(),
              data_i32(op, "block_table", block_table, {B, -1}),
              data_i32(op, "cu_seqlens", cu_seqlens, {B + 1}),
              data_i32(op, "context_lens", context_lens, {B}),
              B,
              block_table.size(1),
              pools.page_size,
              window,
              int(Hq),
              int(pools.num_kv_heads),
              int(pools.head_dim),
              float(scale),
              float(softcap),
              pools.k_kind,
              pools.v_kind};
  check_text(op, check_sequences(a.block_table, a.cu_seqlens, a.context_lens, B, a.max_pages, pools.page_size, pools.num_pages, T));
  Tensor out = empty_f32({T, Hq * pools.head_dim});
  paged_attention(pq, a, out_f32(out));
  return out;
}

Tensor norm_gate_up_cpu(const Tensor& x, const std::optional<Tensor>& norm, double eps, const Tensor& blob,
                        const std::optional<Tensor>& bias, int64_t activation, const std::optional<Tensor>& norm_bias, bool layer_norm,
                        bool gated) {
  const char* op = "norm_gate_up";
  const uint8_t* w = check_weight(op, blob, true);
  const BlobHeader& h = header(w);
  STD_TORCH_CHECK(h.N % 2 == 0 || !gated, op, ": blob has ", h.N, " outputs; expected an even number (gate and up)");
  STD_TORCH_CHECK(activation >= 0 && activation <= 2, op, ": activation is ", activation, "; expected 0 (silu), 1 (gelu) or 2 (gelu_tanh)");
  const float* px = data_f32(op, "x", x, {-1, h.K});
  const Norm n = norm_of(op, norm, eps, norm_bias, layer_norm, h.K);
  const float* pb = data_f32(op, "bias", bias, {h.N});
  Tensor out = empty_f32({x.size(0), h.N / (gated ? 2 : 1)});
  norm_gate_up(px, int(x.size(0)), n, w, pb, int(activation), gated, out_f32(out));
  return out;
}

Tensor norm_head_cpu(const Tensor& x, const std::optional<Tensor>& norm, double eps, const Tensor& blob, const std::optional<Tensor>& bias,
                     const std::optional<Tensor>& norm_bias, bool layer_norm) {
  const char* op = "norm_head";
  const uint8_t* w = check_weight(op, blob, true);
  const BlobHeader& h = header(w);
  const float* px = data_f32(op, "x", x, {-1, h.K});
  const Norm n = norm_of(op, norm, eps, norm_bias, layer_norm, h.K);
  const float* pb = data_f32(op, "bias", bias, {h.N});
  Tensor out = empty_f32({x.size(0), h.N});
  norm_linear(px, int(x.size(0)), n, w, pb, out_f32(out));
  return out;
}

Program program_of(const Tensor& words) { return {static_cast<const int64_t*>(words.const_data_ptr()), words.numel()}; }

// The head_dim of a program, which says how to read coded pools; 0: it has none.
int64_t head_dim_of(const Program& program) {
  int64_t head_dim = 0;
  for (const Op* op = program.wrong() ? nullptr : program.first(); op && !head_dim; op = program.next(op))
    if (const auto* qkv = as<QkvOp>(op)) head_dim = qkv->head_dim;
  return head_dim;
}

// What is the same for all steps of a batch's kind; k_pools and v_pools are of every layer.
StepBatch step_batch(const char* op, const Tensor& program, const Tensor& ids, const Tensor& positions, const Tensor& slots,
                     const Tensor& block_table, const Tensor& cu_seqlens, const Tensor& context_lens, const Tensor& logit_rows,
                     const std::vector<Tensor>& k_pools, const std::vector<Tensor>& v_pools, const std::optional<Tensor>& lora,
                     const std::optional<Tensor>& adapters) {
  check_tensor(op, "program", program, ScalarType::Long, {-1});
  STD_TORCH_CHECK(!k_pools.empty() && k_pools.size() == v_pools.size(), op, ": there are ", k_pools.size(), " K and ", v_pools.size(),
                  " V pools; expected one of each per layer");
  const int64_t T = ids.numel(), B = context_lens.numel();
  StepBatch b;
  b.ids = data_i32(op, "ids", ids, {T});
  b.positions = data_i32(op, "positions", positions, {T});
  b.slots = data_i32(op, "slots", slots, {T});
  b.block_table = data_i32(op, "block_table", block_table, {B, -1});
  b.cu_seqlens = data_i32(op, "cu_seqlens", cu_seqlens, {B + 1});
  b.context_lens = data_i32(op, "context_lens", context_lens, {B});
  b.logit_rows = data_i32(op, "logit_rows", logit_rows, {-1});
  b.T = T;
  b.R = logit_rows.numel();
  b.sequences = B;
  b.max_pages = block_table.size(1);
  const bool coded = k_pools[0].dim() == 3 || v_pools[0].dim() == 3;
  const Pools first = check_pools(op, k_pools[0], v_pools[0], -1, coded ? head_dim_of(program_of(program)) : -1);
  b.num_pages = first.num_pages;
  b.num_kv_heads = first.num_kv_heads;
  b.page_size = first.page_size;
  b.head_dim = first.head_dim;
  b.k_kind = first.k_kind;
  b.v_kind = first.v_kind;
  for (size_t i = 0; i < k_pools.size(); i++) {
    check_pool(op, "a K pool", k_pools[i], first, first.k_kind);
    check_pool(op, "a V pool", v_pools[i], first, first.v_kind);
    b.k_pools.push_back(k_pools[i].mutable_data_ptr());
    b.v_pools.push_back(v_pools[i].mutable_data_ptr());
  }
  STD_TORCH_CHECK(!lora == !adapters, op, ": lora and adapters are given together or not at all");
  if (lora) {
    check_tensor(op, "lora", *lora, ScalarType::Long, {-1});
    b.adapters = data_i32(op, "adapters", *adapters, {T});
    b.lora = LoraTable(static_cast<const int64_t*>(lora->const_data_ptr()));
    int64_t ops = 0;
    const Program at = program_of(program);
    if (!at.wrong()) at.each([&](const auto&) { ops++; });
    STD_TORCH_CHECK(b.lora.fits(lora->numel(), ops), op, ": lora is no table of adapters for this program");
  }
  return b;
}

Tensor decode_step_cpu(const Tensor& program, const Tensor& ids, const Tensor& positions, const Tensor& slots, const Tensor& block_table,
                       const Tensor& cu_seqlens, const Tensor& context_lens, const Tensor& logit_rows, std::vector<Tensor> k_pools,
                       std::vector<Tensor> v_pools, const std::optional<Tensor>& lora, const std::optional<Tensor>& adapters) {
  const StepBatch b = step_batch("decode_step", program, ids, positions, slots, block_table, cu_seqlens, context_lens, logit_rows, k_pools,
                                 v_pools, lora, adapters);
  const Program ops = program_of(program);
  check_text("decode_step", check_step(ops, b));
  Tensor out = empty_f32({output_rows(ops, b), output_width(ops)});
  run_step(ops, b, out_f32(out));
  return out;
}

std::tuple<Tensor, Tensor> step_draw_cpu(const Tensor& program, const Tensor& ids, const Tensor& positions, const Tensor& slots,
                                         const Tensor& block_table, const Tensor& cu_seqlens, const Tensor& context_lens,
                                         const Tensor& logit_rows, std::vector<Tensor> k_pools, std::vector<Tensor> v_pools,
                                         const Tensor& settings, int64_t top, const std::optional<Tensor>& lora,
                                         const std::optional<Tensor>& adapters, std::optional<int64_t> columns) {
  Tensor logits = decode_step_cpu(program, ids, positions, slots, block_table, cu_seqlens, context_lens, logit_rows, std::move(k_pools),
                                  std::move(v_pools), lora, adapters);
  Tensor drawn = draw_rows_cpu(logits, settings, std::nullopt, std::min(top, logits.size(1)), columns);
  return {drawn, logits};
}

// The arrays of a batch, copied one behind the other; the batch then points to the copies.
void copy_inputs(AsyncStep& s, const int32_t* feed) {
  StepBatch& b = s.batch;
  const std::pair<const int32_t**, int64_t> arrays[] = {{&b.ids, b.T},
                                                        {&b.positions, b.T},
                                                        {&b.slots, b.T},
                                                        {&b.block_table, b.sequences * b.max_pages},
                                                        {&b.cu_seqlens, b.sequences + 1},
                                                        {&b.context_lens, b.sequences},
                                                        {&b.logit_rows, b.R},
                                                        {&b.adapters, b.adapters ? b.T : 0},
                                                        {&feed, feed ? b.T : 0}};
  for (const auto& [from, count] : arrays) s.inputs.insert(s.inputs.end(), *from, *from + count);
  s.ids = s.inputs.data();
  const int32_t* at = s.inputs.data();
  for (const auto& [from, count] : arrays) {
    if (*from) *from = at;
    at += count;
  }
  s.feed = feed;
}

std::tuple<Tensor, Tensor> draw_ahead_cpu(const Tensor& program, const Tensor& ids, const Tensor& positions, const Tensor& slots,
                                          const Tensor& block_table, const Tensor& cu_seqlens, const Tensor& context_lens,
                                          const Tensor& logit_rows, std::vector<Tensor> k_pools, std::vector<Tensor> v_pools,
                                          const Tensor& settings, int64_t top, const std::optional<Tensor>& feed,
                                          const std::optional<Tensor>& previous, const std::optional<Tensor>& lora,
                                          const std::optional<Tensor>& adapters, std::optional<int64_t> columns) {
  const char* op = "draw_ahead";
  auto step = std::make_shared<AsyncStep>();
  step->batch =
      step_batch(op, program, ids, positions, slots, block_table, cu_seqlens, context_lens, logit_rows, k_pools, v_pools, lora, adapters);
  const StepBatch& b = step->batch;
  step->program = program_of(program);
  check_text(op, check_step(step->program, b));
  STD_TORCH_CHECK(step->program.head(), op, ": the program has no head; expected one that ends with norm_head");
  const int64_t vocab = output_width(step->program), known = step->program.embed().vocab;
  STD_TORCH_CHECK(b.T <= kMaxAsyncRows && b.R >= 1 && b.R <= kMaxAsyncRows, op, ": the step has ", b.T, " tokens and ", b.R,
                  " rows of logits; expected at least one and at most ", kMaxAsyncRows);
  STD_TORCH_CHECK(vocab <= known, op, ": the model draws from ", vocab, " ids; expected at most the ", known, " that it has embeddings of");
  STD_TORCH_CHECK(top >= 0 && top <= vocab, op, ": top is ", top, "; expected 0 to ", vocab, ", the columns of logits");
  const Op* unfused = unfused_op(step->program);
  STD_TORCH_CHECK(!unfused, op, ": the program has ", unfused ? op_name(unfused) : "", "; expected one without");
  check_tensor(op, "settings", settings, ScalarType::Double, {b.R, 5});
  const auto* wanted = static_cast<const draw::Settings*>(settings.const_data_ptr());
  step->settings.assign(wanted, wanted + b.R);
  for (const draw::Settings& s : step->settings) STD_TORCH_CHECK(draw::valid(s), op, ": settings are out of range");
  const int32_t* rows = feed ? data_i32(op, "feed", *feed, {b.T}) : nullptr;
  STD_TORCH_CHECK(!feed == !previous, op, ": feed and previous are given together or not at all");
  if (previous) {
    check_tensor(op, "previous", *previous, ScalarType::Double, {-1, -1});
    for (int64_t t = 0; t < b.T; t++)
      STD_TORCH_CHECK(rows[t] >= -1 && rows[t] < previous->size(0), op, ": feed is ", rows[t], "; expected -1 to ", previous->size(0) - 1);
    step->previous = static_cast<const double*>(previous->const_data_ptr());
    step->previous_width = previous->size(1);
  }
  copy_inputs(*step, rows);
  const std::vector<int64_t> sizes{b.R, 4 + 2 * top};
  Tensor drawn = torch::stable::empty(sizes, ScalarType::Double), logits = empty_f32({b.R, vocab});
  step->drawn = static_cast<double*>(drawn.mutable_data_ptr());
  step->logits = out_f32(logits);
  step->top = top, step->columns = drawable_columns(op, columns, vocab);
  step->threads = std::max<int64_t>(2, num_threads());  // whoever waits for it, and the thread that runs it
  std::vector<Tensor> alive{program, drawn, logits};
  if (previous) alive.push_back(*previous);
  if (lora) alive.push_back(*lora);
  alive.insert(alive.end(), k_pools.begin(), k_pools.end());
  alive.insert(alive.end(), v_pools.begin(), v_pools.end());
  step->keep_alive = std::make_shared<std::vector<Tensor>>(std::move(alive));
  launch_async_step(std::move(step));
  return {drawn, logits};
}

void join_ahead_cpu(Tensor drawn) { join_async_step(static_cast<const double*>(drawn.const_data_ptr())); }

int64_t read_memory_cpu(const Tensor& data) {
  check_tensor("read_memory", "data", data, ScalarType::Byte, {-1});
  const auto* p = static_cast<const uint8_t*>(data.const_data_ptr());
  const int64_t piece = 1 << 20, pieces = data.numel() / piece;
  std::atomic<int64_t> total{0};
  for_each_task(pieces, true, [&](int64_t i) { total += kernels().read(p + i * piece, piece); });
  return total;
}

int64_t isa_cpu(const Tensor&) { return int64_t(isa()); }

// Text as uint8.
Tensor program_schema_cpu(const Tensor&) {
  const std::string text = program_schema();
  const int64_t sizes[] = {int64_t(text.size())};
  Tensor out = torch::stable::empty(sizes, ScalarType::Byte);
  std::memcpy(out.mutable_data_ptr(), text.data(), text.size());
  return out;
}

// groups: int64 (G, 2), bits and rows, of each matrix.
int64_t packed_bytes_cpu(int64_t in_features, std::vector<std::string> formats, std::vector<int64_t> out_features,
                         std::vector<Tensor> groups) {
  const char* op = "packed_bytes";
  STD_TORCH_CHECK(formats.size() == groups.size() && out_features.size() == groups.size(), op, ": got ", formats.size(), " formats, ",
                  out_features.size(), " out_features and ", groups.size(), " groups; expected one of each per matrix");
  std::vector<MatrixShape> matrices;
  for (size_t i = 0; i < groups.size(); i++) {
    check_tensor(op, "groups", groups[i], ScalarType::Long, {-1, 2});
    const auto* rows = static_cast<const int64_t*>(groups[i].const_data_ptr());
    MatrixShape m{formats[i], int(out_features[i]), {}};
    for (int64_t g = 0; g < groups[i].size(0); g++) m.groups.push_back({int(rows[2 * g]), int(rows[2 * g + 1])});
    matrices.push_back(std::move(m));
  }
  return gpu_blob_bytes(int(in_features), matrices);
}

int64_t partial_sums_bytes_cpu(const Tensor&, int64_t tokens, int64_t sms, int64_t hidden_size, int64_t router_outputs) {
  return router_outputs ? router_bytes(int(tokens), int(hidden_size), int(router_outputs), 1, int(sms))
                        : stream_k_bytes(int(tokens), int(sms));
}

}  // namespace
}  // namespace exl2nb

STABLE_TORCH_LIBRARY_IMPL(exl2nb, CPU, m) {
  m.impl("embed", TORCH_BOX(&exl2nb::embed_cpu));
  m.impl("linear", TORCH_BOX(&exl2nb::linear_cpu));
  m.impl("linear_residual", TORCH_BOX(&exl2nb::linear_residual_cpu));
  m.impl("norm_qkv_rope", TORCH_BOX(&exl2nb::norm_qkv_rope_cpu));
  m.impl("paged_attention", TORCH_BOX(&exl2nb::paged_attention_cpu));
  m.impl("norm_gate_up", TORCH_BOX(&exl2nb::norm_gate_up_cpu));
  m.impl("norm_head", TORCH_BOX(&exl2nb::norm_head_cpu));
  m.impl("decode_step", TORCH_BOX(&exl2nb::decode_step_cpu));
  m.impl("step_draw", TORCH_BOX(&exl2nb::step_draw_cpu));
  m.impl("draw_ahead", TORCH_BOX(&exl2nb::draw_ahead_cpu));
  m.impl("join_ahead", TORCH_BOX(&exl2nb::join_ahead_cpu));
  m.impl("isa", TORCH_BOX(&exl2nb::isa_cpu));
  m.impl("program_schema", TORCH_BOX(&exl2nb::program_schema_cpu));
  m.impl("packed_bytes", TORCH_BOX(&exl2nb::packed_bytes_cpu));
  m.impl("partial_sums_bytes", TORCH_BOX(&exl2nb::partial_sums_bytes_cpu));
  m.impl("read_memory", TORCH_BOX(&exl2nb::read_memory_cpu));
}
