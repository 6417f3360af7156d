#include "step.h"

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include <algorithm>
#include <cstring>
#include <string>

#include "engine.h"
#include "fused_step.h"
#include "moe.h"
#include "parallel.h"

namespace exl2nb {
namespace {

constexpr int64_t kMinFusedRows = 2;  // rows
// One row: threads from which on waking them for every product costs more than the barriers of a fused step, and multiply-adds of such a
// step.
constexpr int64_t kManyThreads = 8, kManyThreadsWork = 12'000'000;
constexpr int64_t kMinFusedWork = 1'000'000;  // multiply-adds of a step that pay for waking a thread
constexpr int64_t kUsualCache = int64_t(16) << 20, kMaxCache = int64_t(64) << 20;

std::string number(int64_t n) { return std::to_string(n); }

// K and N of a matrix, or a message. The blob itself was checked when its op was added.
std::string check_matrix(const uint8_t* blob, int64_t K, int64_t N) {
  if (!blob) return "a weight is missing";
  const BlobHeader& h = header(blob);
  if (h.magic != kBlobMagic || h.version != kBlobVersion) return "a weight is no blob";
  if (h.K != K || (N && h.N != N))
    return "a weight is (" + number(h.K) + ", " + number(h.N) + "); expected (" + number(K) + ", " + number(N) + ")";
  return "";
}

// Checks op by op. width: of what attention (0) and the MLP (1) have left for a ResidualOp, 0 for nothing.
class Checker {
 public:
  Checker(const StepBatch& b, int64_t H) : b_(b), H_(H) {}

  std::string operator()(const EmbedOp& op) {
    if (op.width != H_) return "the table's width is not the hidden size";
    if (op.position_table) {
      const std::string wrong = check_range("a position", b_.positions, b_.T, op.max_positions);
      if (!wrong.empty()) return wrong;
    }
    return check_range("a token id", b_.ids, b_.T, op.vocab);
  }
  std::string operator()(const QkvOp& op) {
    if (op.num_heads <= 0 || op.num_kv_heads <= 0 || op.num_heads % op.num_kv_heads || op.num_heads >= int64_t(1) << 30)
      return "num_heads is no multiple of num_kv_heads";
    if (op.num_kv_heads != b_.num_kv_heads || op.head_dim != b_.head_dim)
      return "the pools hold " + number(b_.num_kv_heads) + " heads of " + number(b_.head_dim) + "; expected " + number(op.num_kv_heads) +
             " of " + number(op.head_dim);
    if (op.layer < 0 || op.layer >= layers()) return no_pool(op.layer);
    if (op.rope_half < 0 || op.rope_half > op.head_dim / 2) return "rotary_dim is larger than head_dim";
    const std::string wrong = check_matrix(op.blob, H_, (op.num_heads + 2 * op.num_kv_heads) * op.head_dim);
    if (!wrong.empty()) return wrong;
    q_width_ = op.num_heads * op.head_dim;
    return check_range("a position", b_.positions, b_.T, op.max_positions);
  }
  std::string operator()(const AttentionOp& op) {
    if (!q_width_) return "attention without q";
    if (op.layer < 0 || op.layer >= layers()) return no_pool(op.layer);
    width_[0] = q_width_, q_width_ = 0;
    return "";
  }
  std::string operator()(const ResidualOp& op) {
    if (op.side < 0 || op.side > 1 || width_[op.side] <= 0) return "nothing to add to the residual";
    return check_matrix(op.blob, width_[op.side], H_);
  }
  std::string operator()(const GateUpOp& op) {
    const std::string wrong = check_matrix(op.blob, H_, 0);
    if (!wrong.empty()) return wrong;
    if (op.activation < 0 || op.activation > 2) return "unknown activation";
    if (op.side < 0 || op.side > 1) return "unknown buffer";
    width_[op.side] = header(op.blob).N / (op.gated ? 2 : 1);
    return "";
  }
  std::string operator()(const RoutedOp& op) {  // each expert was checked when the op was added: 100 headers a layer would cost too much
    if (!op.table || op.experts < 1 || op.top_k < 1 || op.top_k > op.experts)
      return "top_k is " + number(op.top_k) + "; expected 1 to " + number(op.experts) + " experts";
    if (op.activation < 0 || op.activation > 2) return "unknown activation";
    return check_matrix(op.blob, H_, op.experts);
  }
  std::string operator()(const HeadOp& op) { return check_matrix(op.blob, H_, 0); }
  std::string operator()(const ResidualOutOp&) { return ""; }

 private:
  int64_t layers() const { return int64_t(b_.k_pools.size()); }
  std::string no_pool(int64_t layer) const { return "there are " + number(layers()) + " pools; the program wants layer " + number(layer); }

  const StepBatch& b_;
  const int64_t H_;
  int64_t width_[2] = {0, 0}, q_width_ = 0;
};

}  // namespace

std::string check_range(const char* what, const int32_t* values, int64_t n, int64_t limit) {
  for (int64_t i = 0; i < n; i++)
    if (values[i] < 0 || values[i] >= limit)
      return std::string(what) + " is " + number(values[i]) + "; expected 0 to " + number(limit > 0 ? limit - 1 : -1);
  return "";
}

std::string check_sequences(const int32_t* block_table, const int32_t* cu_seqlens, const int32_t* context_lens, int64_t sequences,
                            int64_t max_pages, int64_t page_size, int64_t num_pages, int64_t T) {
  if (cu_seqlens[0] != 0 || cu_seqlens[sequences] != T) return "cu_seqlens must start at 0 and end at " + number(T) + " (the queries)";
  for (int64_t s = 0; s < sequences; s++) {
    const int64_t n = int64_t(cu_seqlens[s + 1]) - cu_seqlens[s], context = context_lens[s], pages = (context + page_size - 1) / page_size;
    if (n < 0) return "cu_seqlens must not fall";
    if (context < n || context < 0)
      return "context_lens is " + number(context) + " for a sequence with " + number(n) + " queries; expected at least that";
    if (pages > max_pages)
      return "context_lens is " + number(context) + "; expected at most " + number(max_pages * page_size) + " (the pages of block_table)";
    const std::string wrong = check_range("a page of block_table", block_table + s * max_pages, pages, num_pages);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string check_step(const Program& program, const StepBatch& batch) {
  if (const char* wrong = program.wrong()) return wrong;
  Checker check(batch, program.hidden());
  std::string wrong;
  for (const Op* op = program.first(); op && wrong.empty(); op = program.next(op)) wrong = visit(op, check);
  if (wrong.empty()) wrong = check_range("a slot", batch.slots, batch.T, batch.num_pages * batch.page_size);
  if (wrong.empty()) wrong = check_range("a row of logit_rows", batch.logit_rows, batch.R, batch.T);
  if (wrong.empty())
    wrong = check_sequences(batch.block_table, batch.cu_seqlens, batch.context_lens, batch.sequences, batch.max_pages, batch.page_size,
                            batch.num_pages, batch.T);
  for (int64_t t = 0; batch.lora && wrong.empty() && t < batch.T; t++)
    if (batch.adapters[t] < -1 || batch.adapters[t] >= batch.lora.header().adapters)
      wrong = "an adapter is " + number(batch.adapters[t]) + "; expected -1 to " + number(batch.lora.header().adapters - 1);
  return wrong;
}

Heads heads_of(const QkvOp& op, const StepBatch& b) {
  Heads heads{int(op.num_heads), int(op.num_kv_heads), int(op.head_dim), int(op.rope_half), b.page_size, b.k_kind, b.v_kind, op.q_norm,
              op.k_norm,         op.q_norm_stride,     op.k_norm_stride, float(op.eps)};
  heads.layer_norm = op.layer_norm;
  heads.interleaved = op.interleaved;
  heads.q_full = op.q_norm_whole;
  heads.k_full = op.k_norm_whole;
  return heads;
}

Rope rope_of(const QkvOp& op, const StepBatch& b) { return {op.cos, op.sin, b.positions, b.slots, float(op.clip)}; }

Attention attention_of(const AttentionOp& op, const StepBatch& b, int num_heads) {
  const size_t layer = size_t(op.layer);
  return {b.k_pools[layer], b.v_pools[layer],  b.block_table, b.cu_seqlens, b.context_lens,      b.sequences,
          b.max_pages,      b.page_size,       op.window,     num_heads,    int(b.num_kv_heads), int(b.head_dim),
          float(op.scale),  float(op.softcap), b.k_kind,      b.v_kind};
}

void run_embed(const EmbedOp& op, const StepBatch& b, int H, float* x) {
  embed(op.table, int(op.dtype), H, b.ids, int(b.T), float(op.scale), {op.position_table, int(op.position_dtype), b.positions}, x);
  for (int64_t t = 0; b.lora && t < b.T; t++) {
    const LoraChange* change = b.lora.change(b.adapters[t], 0);
    for (int64_t i = 0; change && i < change->num_parts; i++) {
      const LoraPart& part = change->parts[i];
      Buffer<float> h(part.rank);
      kernels().to_float(part.a + b.ids[t] * part.width(), kDenseF16, int(part.rank), h);
      for (int64_t r = 0; r < part.rank; r++) h[r] *= part.scale[r];
      kernels().lora_up(h, 0, 1, part.b, part.columns, int(part.rank), int(part.columns), x + t * H + part.first, 0);
    }
  }
}

namespace {

// Runs every op for all rows of the batch.
class StepRunner {
 public:
  StepRunner(const Program& program, const StepBatch& b, float* out)
      : program_(program),
        b_(b),
        out_(out),
        H_(program.hidden()),
        widths_(widths(program)),
        x_(b.T * H_),
        q_(b.T * widths_.widest),
        act_(b.T * widths_.widest),
        side_(b.T * widths_.side),
        changes_(b) {}

  void run() {
    for (const Op* op = program_.first(); op; op = program_.next(op), index_++) {
      next_ = nullptr;  // the next matrix, to be prefetched
      for (const Op* o = program_.next(op); o && !next_; o = program_.next(o)) next_ = matrix_of(o);
      visit(op, *this);
    }
  }

  void operator()(const EmbedOp& op) { run_embed(op, b_, int(H_), x_); }
  void operator()(const QkvOp& op) {
    const size_t layer = size_t(op.layer);
    num_heads_ = int(op.num_heads);
    norm_qkv_rope(x_, int(b_.T), norm_of(op), op.blob, op.bias, rope_of(op, b_), heads_of(op, b_), q_, b_.k_pools[layer], b_.v_pools[layer],
                  next_, changes_.of(index_));
  }
  void operator()(const AttentionOp& op) { paged_attention(q_, attention_of(op, b_, num_heads_), act_); }
  void operator()(const ResidualOp& op) {
    linear_residual(op.side ? side_ : act_, int(b_.T), op.blob, op.bias, {op.norm, float(op.eps)}, float(op.scale), x_, next_,
                    changes_.of(index_));
  }
  void operator()(const GateUpOp& op) {
    norm_gate_up(x_, int(b_.T), norm_of(op), op.blob, op.bias, int(op.activation), op.gated != 0, op.side ? side_ : act_, next_,
                 changes_.of(index_));
  }
  void operator()(const RoutedOp& op) {
    Buffer<int32_t> chosen(b_.T * op.top_k);
    const Experts experts{op.blob,
                          op.table,
                          int(op.experts),
                          int(op.top_k),
                          float(op.renormalize),
                          int(op.activation),
                          op.shared_up,
                          op.shared_down,
                          op.shared_gate,
                          {op.post_norm, float(op.post_eps)},
                          float(op.scale)};
    routed_mlp(x_, int(b_.T), norm_of(op), experts, chosen);
  }
  void operator()(const HeadOp& op) {
    Buffer<float> rows(b_.R * H_);
    for (int64_t r = 0; r < b_.R; r++) std::memcpy(rows + r * H_, x_ + b_.logit_rows[r] * H_, size_t(H_) * sizeof(float));
    norm_linear(rows, int(b_.R), norm_of(op), op.blob, op.bias, out_, nullptr, changes_.of(index_, true));
  }
  void operator()(const ResidualOutOp&) { std::memcpy(out_, x_, size_t(b_.T * H_) * sizeof(float)); }

 private:
  struct Widths {
    int64_t widest = 1, side = 0;
  };
  static Widths widths(const Program& program) {
    Widths found;
    for (const Op* op = program.first(); op; op = program.next(op)) {
      if (const auto* qkv = as<QkvOp>(op)) found.widest = std::max(found.widest, qkv->num_heads * qkv->head_dim);
      if (const auto* gate_up = as<GateUpOp>(op)) {
        const int64_t width = header(gate_up->blob).N / (gate_up->gated ? 2 : 1);
        found.widest = std::max(found.widest, width);
        if (gate_up->side) found.side = std::max(found.side, width);
      }
    }
    return found;
  }

  const Program& program_;
  const StepBatch& b_;
  float* out_;
  const int64_t H_;
  const Widths widths_;
  Buffer<float> x_, q_, act_, side_;
  StepChanges changes_;
  const uint8_t* next_ = nullptr;
  int num_heads_ = 0;
  int64_t index_ = 0;  // of the op
};

// Bytes of all matrices, and multiply-adds of one row.
struct Weights {
  int64_t bytes = 0, work = 0;
};
Weights weights_of(const Program& program) {
  Weights sum;
  for (const Op* op = program.first(); op; op = program.next(op)) {
    const uint8_t* blob = matrix_of(op);
    if (!blob) continue;
    const BlobHeader& h = header(blob);
    sum.bytes += h.bytes;
    sum.work += int64_t(h.K) * h.N;
  }
  return sum;
}

// Bytes that the last level of cache holds; a virtual machine may be told of more than it has.
int64_t cache_bytes() {
  static const int64_t bytes = [] {
    int64_t found = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
    found = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return found > 0 ? std::min(found, kMaxCache) : kUsualCache;
  }();
  return bytes;
}

// Whether to run as a fused step: its barriers need no wake-up, and where the cache holds all weights, each core finds its own columns
// there. One row of a large model runs so where there are many threads.
bool suits_fused_step(const Program& program, const StepBatch& b) {
  if (available_threads() < (b.T < kMinFusedRows ? kManyThreads : 2) || b.T > kMaxFusedRows || b.R > kMaxFusedRows) return false;
  if (unfused_op(program)) return false;
  const Weights weights = weights_of(program);
  if (b.T < kMinFusedRows) return b.T == 1 && weights.work >= kManyThreadsWork;
  return weights.bytes <= cache_bytes() && weights.work * b.T >= kMinFusedWork;
}

}  // namespace

void run_step(const Program& program, const StepBatch& b, float* out) {
  if (!suits_fused_step(program, b)) return StepRunner(program, b, out).run();
  FusedStep step(program, b, out, {}, available_threads());
  step.run_on_all(0);
}

}  // namespace exl2nb
