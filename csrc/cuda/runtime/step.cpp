#include "cuda/runtime/step.h"

#include <algorithm>

#include "cuda/attention/cache_format.cuh"
#include "cuda/gemm/elementwise.h"
#include "cuda/gemm/persistent/persistent_gemm.cuh"
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/gemm/stream_k/stream_k_gemm.cuh"
#include "cuda/moe/moe.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/exchange.h"
#include "cuda/runtime/launches.h"
#include "cuda/runtime/step_workspace.h"
#include "format/program.h"

namespace exl2nb {
namespace {

// The first keys and values of the attention at w, as many as find room in the L2 cache beside the weights that pass through.
StreamKKeys attention_keys(const GpuStep& s, const AttentionOp& op) {
  constexpr int64_t kPrefetchBytes = 24 << 20;
  const CacheArgs& c = s.cache;
  const int64_t layer = op.layer, heads = c.num_kv_heads, dim = c.head_dim;
  if (op.window || layer < 0 || layer >= s.layers) return {};  // a window may have left them behind
  const int64_t k_row = dim * pool_bits(c.k_format) / 8, v_row = dim * pool_bits(c.v_format) / 8;
  const int64_t rows = std::min<int64_t>(kPage, kPrefetchBytes / std::max<int64_t>(1, c.sequences * heads * (k_row + v_row)));
  StreamKKeys keys{};
  keys.k_pool = static_cast<const uint8_t*>(s.k_pools[layer]), keys.v_pool = static_cast<const uint8_t*>(s.v_pools[layer]);
  keys.block_table = c.block_table, keys.context_lens = c.context_lens, keys.max_pages = c.max_pages;
  keys.sequences = c.sequences, keys.heads = c.num_kv_heads, keys.rows = static_cast<int>(rows);
  keys.k_page = page_bytes(c.k_format, c.head_dim), keys.v_page = page_bytes(c.v_format, c.head_dim);
  keys.k_row = static_cast<int>(k_row), keys.v_row = static_cast<int>(v_row);
  return keys;
}
// Multiprocessors for the attention behind the QKV op q, if there is one.
int sms_of_attention(const QkvOp* q) {
  return q ? attention_sms(static_cast<int>(q->num_heads), static_cast<int>(q->num_kv_heads), static_cast<int>(q->head_dim)) : 0;
}
// The attention at w with the QKV op q, whose output is `in`. Without qkv and workspace.
AttentionArgs attention_args(const GpuStep& s, const AttentionOp& op, const QkvOp& q, const MatrixInput& in) {
  const auto layer = static_cast<size_t>(op.layer);
  AttentionArgs a{};
  a.cache = s.cache, a.cache.k_pool = s.k_pools[layer], a.cache.v_pool = s.v_pools[layer];
  a.cache.num_heads = static_cast<int>(q.num_heads), a.cache.num_kv_heads = static_cast<int>(q.num_kv_heads);
  a.cache.head_dim = static_cast<int>(q.head_dim);
  a.rope.cos = q.cos, a.rope.sin = q.sin, a.rope.half = static_cast<int>(q.rope_half);
  if (a.rope.half == 0) a.rope.cos = a.rope.sin = nullptr;
  a.rope.interleaved = q.interleaved, a.rope.positions = s.positions, a.rope.clip = static_cast<float>(q.clip);
  a.rope.q_norm = q.q_norm, a.rope.k_norm = q.k_norm;
  a.rope.norm_per_head = q.q_norm_stride || q.k_norm_stride, a.rope.norm_whole = q.q_norm_whole || q.k_norm_whole;
  a.rope.layer_norm = q.layer_norm, a.rope.eps = static_cast<float>(q.eps);
  static_cast<MatrixInput&>(a.to) = in;
  a.tokens = s.tokens;
  a.scale = static_cast<float>(op.scale), a.window = static_cast<int>(op.window), a.softcap = static_cast<float>(op.softcap);
  a.large_chunks = s.stream_k_from && s.tokens >= s.stream_k_from;
  return a;
}

// In front of the sums of persistent chains: number of launches; low and arrived (LoraArgs).
int64_t lora_head_floats(int64_t width) { return kLoraChainHead + kLoraRows * (width + width / 16); }
// Behind the sums of persistent chains: two sets of stream-K GEMMs of up to 16 rows.
int64_t lora_set_floats(int64_t width) { return 2 * 2 * kLoraStripRows * width; }
int64_t lora_most_chunks(const Program& program) {
  int64_t K = 0;
  for (const Op* op = program.first(); op; op = program.next(op))
    if (const uint8_t* blob = matrix_of(op)) K = std::max<int64_t>(K, Weight(blob).header().K);
  return lora_chunks(K);
}

int fewest_bits_of(const Program& program) {
  int fewest = 16;
  for (const Op* op = program.first(); op; op = program.next(op))
    if (const uint8_t* blob = matrix_of(op)) fewest = std::min(fewest, fewest_bits(Weight(blob).head));
  return fewest;
}

// One walk over a program.
class Walker {
 public:
  Walker(const Program& program, const GpuStep& step, uint8_t* workspace, const Layout& layout, void* stream, bool pdl)
      : program_(program), H_(static_cast<int>(program.hidden())), s_(step), base_(workspace), at_(layout), stream_(stream), pdl_(pdl) {
    const bool inside = s_.lora.adapters && s_.lora_inside && !ranks() && s_.lora_width <= kLoraChainWidth;
    if (inside) {
      const int64_t chunks = lora_most_chunks(program_), apart = kLoraRows * chunks * s_.lora_width;
      lora_head_ = s_.lora_sums + apart;
      lora_sets_ =
          reinterpret_cast<unsigned long long*>(s_.lora_sums + lora_sums(program_, s_.lora_width) - lora_set_floats(s_.lora_width));
      lora_chain_ = chains_lora(), lora_bits_ = fewest_bits_of(program_);
    }
    stream_k_ = all_stream_k();  // asks how many rows a chain takes, with adapters where it has them
    lora_chain_ = lora_chain_ && !stream_k_, lora_stream_k_ = inside && stream_k_ && s_.tokens <= kLoraRows && even_products();
  }

  // at: the op that failed. A persistent chain takes several ops, so a visit may move it on.
  const char* run(const Op*& at) {
    for (at = program_.first(); at; at = next(at), number_++) {
      prefetch_behind(next(at));
      op_ = at;
      if (LaunchList* const list = Recording::current()) list->op = number_;
      const char* wrong = visit(at, *this);
      if (wrong) return wrong;
      at = op_;
    }
    return ranks() ? exchanges_done(s_.peers, exchanges_, stream_, pdl_) : nullptr;
  }

  enum Ready { kNothing, kNormed, kUnscaled, kRouted };  // contents of the buffer of normed inputs; kRouted: and the router has run

  const Op* next(const Op* op) const { return program_.next(op); }
  float* residual() const { return reinterpret_cast<float*>(base_ + at_.residual[side_]); }
  float* other_residual() { return reinterpret_cast<float*>(base_ + at_.residual[side_ ^= 1]); }
  float* sum() const { return reinterpret_cast<float*>(base_ + at_.sum); }
  // What a stream-K GEMM prefetches for the ops from `op` on: the next matrix's image, and the keys of an attention before it.
  void prefetch_behind(const Op* op) {
    ahead_ = {};
    if (!stream_k_) return;
    for (; as<AttentionOp>(op); op = next(op)) ahead_.keys = attention_keys(s_, *as<AttentionOp>(op));
    if (!op || !matrix_of(op)) return;
    const Weight weight(matrix_of(op));
    const GpuHeader& h = weight.header();
    ahead_.image = weight.blob + h.image, ahead_.bytes = (image_bytes(h.num_items, h.num_units, h.num_parts) + 15) / 16 * 16;
  }
  // The input of the matrix, at a place, for so many tokens.
  MatrixInput input(const Weight& w, size_t at, int tokens) const {
    MatrixInput in{};
    set_input(in, w.head, w.blob, reinterpret_cast<half*>(base_ + at), stream_k_rows(s_.capacity));
    in.group = group(tokens);
    return in;
  }
  MatrixInput input(const Weight& w, size_t at) const { return input(w, at, s_.tokens); }
  // How products of so many tokens want their inputs (fragment.cuh): those of stream_k_gemm.cuh in groups. A step has all its products
  // there, or none; only a head of fewer rows may be skinny.
  int group(int tokens) const { return stream_k_ && (tokens > kSkinnyTokens || tokens == s_.tokens) ? stream_k_group(tokens) : 0; }
  bool stream_k(const GemmArgs& a) const { return group(a.tokens) != 0 && !a.rows; }
  // Fewer tokens than stream_k_from: only where that is faster than persistent chains.
  bool all_stream_k() {
    if (!s_.stream_k_from || (s_.tokens < s_.stream_k_from && !exceeds_chain())) return false;
    for (const Op* op = program_.first(); op; op = next(op)) {
      if (as<RoutedOp>(op)) return false;
      const uint8_t* blob = matrix_of(op);
      if (!blob) continue;
      GemmArgs a{};
      const Weight weight(blob);
      set_weights(a, weight.head, weight.blob);
      a.tokens = s_.tokens;
      if (!stream_k_takes(a)) return false;
    }
    return true;
  }
  // Whether stream-K GEMMs take these few rows, in layers so large that reading them once is worth four launches: where persistent chains
  // would take several launches, from four rows on, and from three where rows are short (H100, 2026-11-26, chain over stream-K: TinyLlama's
  // three rows 1.06, four 1.27; Llama-2-7B's three 0.97).
  bool exceeds_chain() {
    constexpr int64_t kLargeLayer = 16 << 20;  // bytes
    const int chain_rows = H_ > 2048 ? 3 : 2;
    int64_t bytes = 0;
    int most = 0;
    for (const Op* op = program_.first(); op; op = next(op)) {
      if (const auto* qkv = as<QkvOp>(op)) {
        if (most) break;
        last_qkv_ = qkv;
      }
      if (const uint8_t* blob = matrix_of(op)) bytes += Weight(blob).header().bytes;
      if (const auto* o = as<ResidualOp>(op); o && last_qkv_ && !most) most = chain_tokens(*o);
    }
    return most && s_.tokens > std::min(most, chain_rows) && bytes >= kLargeLayer;
  }
  NormArgs norm_of(const NormedOp& op) const {
    auto n = zeroed<NormArgs>();
    n.kind = !op.norm ? kNoNorm : op.layer_norm ? kLayerNorm : kRmsNorm, n.width = H_, n.eps = static_cast<float>(op.eps);
    n.weight = op.norm, n.bias = op.norm_bias;
    return n;
  }
  GemmArgs matrix(const Weight& w, const MatrixInput& in) const {
    GemmArgs a{};
    set_weights(a, w.head, w.blob);
    a.tokens = s_.tokens, a.x = in.x, a.x_stride = in.stride, a.x_perm_stride = in.perm_stride, a.scale = 1.f;
    return a;
  }
  // The residual's rows on their way into a matrix, what is still to be added to them included.
  RowSource rows(const NormArgs& n) const {
    RowSource r = added_;
    r.x = residual(), r.norm = n, r.norm.width = H_;
    return r;
  }
  // A kernel that makes rows, all or the wanted ones, and adds what is to be added to all of them. ahead: for the op so many ops further
  // on.
  const char* make_rows(const NormArgs& n, const MatrixInput& to, int ahead, bool wanted = false) {
    RowSource from = rows(n);
    if (from.y) from.to = other_residual();
    added_ = zeroed<RowSource>();
    const int count = wanted ? s_.logit_count : s_.tokens;
    auto a = zeroed<RowsArgs>();
    a.from = from, a.rows = wanted ? s_.logit_rows : nullptr, a.tokens = s_.tokens, a.next = to, a.lora = lora_of(number_ + ahead);
    return rows_launch(a, count, stream_, pdl_);
  }

  // ---- ranks
  bool ranks() const { return s_.peers.size > 0; }
  // The next exchange of this step.
  Peers next_exchange() {
    Peers p = s_.peers;
    p.exchange = exchanges_++;
    return p;
  }
  // What every rank's product adds to the residual, in sum(), becomes the sum over all ranks.
  const char* add_ranks() {
    ExchangeArgs a{next_exchange(), sum(), H_, H_, s_.tokens, {0, H_}, true, sum(), {}};
    return exchange_launch(a, stream_, pdl_);
  }
  // The heads of all ranks, side by side as input of the matrix behind attention.
  const char* gather_heads(const MatrixInput& to) {
    const int width = static_cast<int>(last_qkv_->num_heads * last_qkv_->head_dim);
    ExchangeArgs a{next_exchange(), sum(), width, 0, s_.tokens, {}, false, nullptr, to};
    for (int r = 0; r <= s_.peers.size; r++) a.first[r] = r * width;
    return exchange_launch(a, stream_, pdl_);
  }

  // ---- adapters
  // In launches of their own.
  bool lora() const { return s_.lora.adapters && !lora_chain_ && !lora_stream_k_; }
  LoraRows lora_of(int number) const {
    LoraRows of = s_.lora;
    of.changes += number, of.tokens = s_.tokens;
    return of;
  }
  // What the adapters change in the sums y of the current op's product of x.
  LoraArgs lora_args(const Weight& w, const MatrixInput& x, float* y) const {
    const int N = w.header().N;
    return {lora_of(number_), x, w.header().K, nullptr, s_.lora_sums, s_.lora_width, y, N, N, {}, 0, false, nullptr, nullptr};
  }
  const char* adapt(const Weight& w, const MatrixInput& x, float* y) {
    return lora() || lora_chain_ ? lora_launch(lora_args(w, x, y), s_.tokens, stream_, pdl_) : nullptr;
  }

  // Whether they run in persistent chains: embed, QKV, then attention and chain by turns.
  bool chains_lora() {
    lora_args_.ops = s_.lora.ops, lora_args_.adapters = s_.lora.adapters, lora_args_.width = s_.lora_width;
    lora_args_.launches = reinterpret_cast<unsigned*>(lora_head_), lora_args_.set = static_cast<int>(lora_chain_set(s_.lora_width));
    lora_args_.sums = reinterpret_cast<unsigned long long*>(lora_head_ + lora_head_floats(s_.lora_width));
    lora_chain_ = true;
    const Op* op = next(program_.first());
    while (const auto* qkv = as<QkvOp>(op)) {
      const auto* const attention = as<AttentionOp>(next(op));
      const auto* const o = attention ? as<ResidualOp>(next(attention)) : nullptr;
      last_qkv_ = qkv;
      if (!o || !chain_tokens(*o)) return false;
      op = next(next(next(o)));
    }
    return as<HeadOp>(op) || as<ResidualOutOp>(op);
  }
  // Whether the layers have an even number of matrices: GEMMs of up to 16 rows take two sets of sums by turns, from the first one on in
  // every step.
  bool even_products() const {
    int products = 0;
    for (const Op* op = program_.first(); op; op = next(op)) products += matrix_of(op) && !as<HeadOp>(op);
    return products % 2 == 0;
  }
  // What a stream-K GEMM needs to add the adapters; for more than 16 rows also x a, which is a launch.
  const char* lora_of_stream_k(const GemmArgs& a, int tokens, StreamKLora& lora) {
    const GpuHeader& h = header_of(a.head);
    if (group(tokens) <= kLoraStripRows) {
      const int64_t set = kLoraStripRows * s_.lora_width;
      const int turn = lora_products_++ & 1;
      lora = {lora_of(number_), nullptr, s_.lora_width, lora_sets_ + turn * set, lora_sets_ + (1 - turn) * set, (h.stored + 15) / 16, {}};
      return nullptr;
    }
    MatrixInput x{};
    set_input(x, a.head, a.image - h.image, const_cast<half*>(a.x), stream_k_rows(s_.capacity));
    x.group = group(tokens);
    float* const low = lora_head_ + kLoraChainHead;
    auto* const arrived = reinterpret_cast<unsigned*>(low + kLoraRows * s_.lora_width);
    lora = {lora_of(number_), low, s_.lora_width, nullptr, nullptr, 0, {}};
    const LoraArgs args{lora.of, x, h.K, nullptr, s_.lora_sums, s_.lora_width, nullptr, 0, 0, {}, 0, false, low, arrived};
    return lora_shrink_launch(args, a.tokens, stream_, pdl_);
  }

  static Epilogue epilogue_of(const Op& op) { return as<GateUpOp>(&op) ? kActivation : kStore; }
  // The op's product without what it writes.
  GemmArgs product(const NormedOp& op) const {
    const Weight weight(op.blob);
    GemmArgs a = matrix(weight, input(weight, at_.normed));
    if (const auto* gate_up = as<GateUpOp>(&op)) {
      a.gated = gate_up->gated != 0;
      a.next = input(Weight(reader(program_, gate_up, gate_up->side)->blob), at_.act[gate_up->side]);
    }
    if (as<HeadOp>(&op)) a.tokens = s_.logit_count;
    return a;
  }
  bool fuses_norm(const NormedOp& op) const {
    const GemmArgs a = product(op);
    return !lora() && !stream_k(a) && skinny_fuses_norm(a, epilogue_of(op), H_);
  }
  // The op's product with its normed input, which the kernel before has left, or a kernel makes now, or the
  // product itself.
  const char* normed_product(const NormedOp& op, GemmArgs& a) {
    const NormArgs n = norm_of(op);
    const bool head = as<HeadOp>(&op);
    const MatrixInput in = input(Weight(op.blob), at_.normed, head ? s_.logit_count : s_.tokens);
    a = product(op);
    if (ready_ == kUnscaled) {
      a.squares = reinterpret_cast<const float*>(base_ + at_.squares);
      a.squares_count = squares_, a.inverse_width = 1.f / static_cast<float>(H_), a.eps = n.eps;
    } else if (ready_ == kNothing && fuses_norm(op)) {
      a.from = rows(n);
      std::copy(std::begin(in.inverse), std::end(in.inverse), a.inverse);
      if (added_.y && !head) a.from.to = other_residual();
      added_ = zeroed<RowSource>();
    } else if (ready_ == kNothing || head) {
      if (const char* wrong = make_rows(n, in, 0, head)) return wrong;
      return nullptr;
    }
    if (head) a.rows = s_.logit_rows, a.last_row = s_.tokens - 1;
    return nullptr;
  }

  const char* operator()(const EmbedOp& op) {
    EmbedArgs a{};
    a.ids = s_.ids, a.positions = s_.positions, a.table = op.table, a.dtype = static_cast<int>(op.dtype);
    a.vocab = static_cast<int>(op.vocab), a.width = H_, a.scale = static_cast<float>(op.scale), a.position_table = op.position_table;
    a.position_dtype = static_cast<int>(op.position_dtype), a.max_positions = static_cast<int>(op.max_positions), a.x = residual();
    const auto* const qkv = as<QkvOp>(next(&op));
    if (qkv && !lora()) {
      a.next = input(Weight(qkv->blob), at_.normed), a.norm = norm_of(*qkv);
      ready_ = kNormed;
    }
    const char* const wrong = embed_launch(a, s_.tokens, stream_, pdl_);
    if (wrong || !lora()) return wrong;
    return lora_launch({lora_of(number_), {}, a.vocab, s_.ids, nullptr, s_.lora_width, a.x, H_, H_, {}, 0, false, nullptr, nullptr},
                       s_.tokens, stream_, pdl_);
  }

  // A product that only writes its sums.
  const char* store(const GemmArgs& a) { return stream_k(a) ? run_stream_k(a, a.tokens) : skinny_launch(a, kStore, stream_, pdl_); }
  // tokens: of the whole product, on which the order of its input depends.
  const char* run_stream_k(const GemmArgs& a, int tokens) {
    StreamKLora lora{};
    const bool adapted = lora_stream_k_ && !as<HeadOp>(op_);
    if (const char* wrong = adapted ? lora_of_stream_k(a, tokens, lora) : nullptr) return wrong;
    return stream_k_launch(a, group(tokens), ahead_, base_ + at_.stream_k, stream_, pdl_, adapted ? &lora : nullptr);
  }

  const char* operator()(const QkvOp& op) {
    GemmArgs a;
    if (const char* wrong = normed_product(op, a)) return wrong;
    const Weight weight(op.blob);
    a.out = reinterpret_cast<float*>(base_ + at_.qkv), a.out_stride = weight.header().N, a.bias = op.bias;
    last_qkv_ = &op, lamport_qkv_ = nullptr;
    ready_ = kNothing;
    // In front of persistent chains a chain of its own, which is faster and whose sums attention can poll.
    const Op* const then = next(&op);
    const auto* o = then ? as<ResidualOp>(next(then)) : nullptr;
    PersistentOp alone{a, weight.head, weight.blob, kStore};
    if (lora_chain_) alone.lora = &lora_args_, alone.fewest_bits = lora_bits_, lora_args_.changes[0] = s_.lora.changes + number_;
    if (stream_k(a) || !o || !chain_tokens(*o) || persistent_tokens(&alone, 1) < (lora_chain_ ? s_.tokens : 1)) {
      if (const char* wrong = store(a)) return wrong;
      return adapt(weight, input(weight, at_.normed), a.out);
    }
    flag_outputs(alone, then, op);
    return persistent_launch(&alone, 1, base_ + at_.chain, at_.persistent_bytes, stream_, pdl_);
  }

  const char* operator()(const AttentionOp& op) {
    if (static_cast<size_t>(op.layer) >= static_cast<size_t>(s_.layers)) return "its layer has no pools";
    AttentionArgs a = attention_of(op, *last_qkv_);
    a.lamport_qkv = lamport_qkv_ != nullptr;
    if (lamport_qkv_) a.qkv = lamport_qkv_;
    o_ = reader(program_, &op, 0);
    if (s_.prompts) return prompt_attention(a);
    const char* const wrong = attention_decode_launch(a, stream_, pdl_);
    return wrong || !ranks() ? wrong : gather_heads(input(Weight(o_->blob), at_.act[0]));
  }
  // Keys and values are stored first, for all queries to see. Then without PDL: attention reads keys before it waits for its predecessor.
  const char* prompt_attention(AttentionArgs a) {
    if (ranks()) return "a rank's sequences have at most 8 tokens";
    const RopeAppendArgs append{a.cache, a.rope, a.qkv, nullptr, a.tokens, sum(), nullptr, nullptr, nullptr};
    if (const char* wrong = rope_append_launch(append, stream_, pdl_)) return wrong;
    a.q = sum(), a.qkv = nullptr, a.lamport_qkv = false;
    return attention_decode_launch(a, stream_, false);
  }
  AttentionArgs attention_of(const AttentionOp& op, const QkvOp& q) const {
    AttentionArgs a = attention_args(s_, op, q, input(Weight(reader(program_, &op, 0)->blob), at_.act[0]));
    a.qkv = reinterpret_cast<float*>(base_ + at_.qkv);
    a.workspace = base_ + at_.attention, a.workspace_bytes = at_.attention_bytes;
    if (ranks()) static_cast<MatrixInput&>(a.to) = {}, a.to.out = sum();
    return a;
  }
  // Whether the attention at `op`, with the QKV op q, can poll what a persistent chain before it writes, and a chain of one launch follows,
  // which clears it again.
  bool polls(const Op* op, const QkvOp& q) {
    const auto* attention = as<AttentionOp>(op);
    if (!attention || attention->layer < 0 || attention->layer >= s_.layers) return false;
    const auto* o = as<ResidualOp>(next(op));
    if (!o || o != reader(program_, op, 0) || s_.tokens > kPersistentTokens) return false;
    return chain_tokens(*o) >= s_.tokens && attention_polls(attention_of(*attention, q));
  }
  // Lets the last product of a chain, the QKV op q, raise Lamport flags, if the attention at `op` can poll them.
  void flag_outputs(PersistentOp& last, const Op* op, const QkvOp& q) {
    if (!polls(op, q)) return;
    lamport_qkv_ = reinterpret_cast<float*>(base_ + at_.lamport_qkv[lamport_set_ ^= 1]);
    last.a.out = lamport_qkv_, last.lamport = true;
  }
  // Tokens of a launch of the persistent chain that begins with attention's output at o; 0: there is none.
  int chain_tokens(const ResidualOp& o) {
    if (s_.tokens > kSkinnyTokens || !s_.stream_k_from || stream_k_ || lora()) return 0;
    PersistentOp link[4] = {};
    const Op* op[4];
    const Ready ready = ready_;
    const int squares = squares_, count = links(o, link, op);
    ready_ = ready, squares_ = squares;
    return count ? persistent_tokens(link, count) : 0;
  }

  const char* operator()(const ResidualOp& op) {
    const char* wrong = nullptr;
    if (chain(op, wrong)) return wrong;
    const Weight weight(op.blob);
    GemmArgs a = matrix(weight, input(weight, at_.act[op.side]));
    a.bias = op.bias;
    ready_ = kNothing;
    const bool shared = ranks() && &op != o_;  // attention's output matrix is whole on every rank
    if (!op.norm && !lora() && !shared && stream_k(a) && stream_k_lead_on(a, op)) return run_stream_k(a, a.tokens);
    if (op.norm || lora() || shared || stream_k(a)) {  // a norm of what is added; or the next rows' kernel adds it
      a.out = sum(), a.out_stride = H_;
      if (const char* wrong = store(a)) return wrong;
      if (const char* wrong = shared ? add_ranks() : nullptr) return wrong;
      if (const char* wrong = adapt(weight, input(weight, at_.act[op.side]), sum())) return wrong;
      return add_sum(next(&op), op.norm, op.eps, op.scale);
    }
    add_to_residual(a, op.scale);
    if (!tap(a, next(&op))) lead_on(a, next(&op));
    return skinny_launch(a, kResidual, stream_, pdl_);
  }

  // What follows a product in a chain.
  void scaled(GemmArgs& a, const NormedOp& op, const float* bias) const {
    a.inverse_width = 1.f / static_cast<float>(H_), a.eps = norm_of(op).eps, a.bias = bias;
  }
  // The persistent chain that begins with attention's output at o, if the ops are such: its products, and the op of each. Returns their
  // number: 4 up to the next QKV, 3 without it, or 0.
  int links(const ResidualOp& o, PersistentOp (&link)[4], const Op* (&op)[4]) {
    const auto rms = [&](const NormedOp& v) { return norm_of(v).kind == kRmsNorm && !norm_of(v).bias; };
    op[0] = &o;
    for (int i = 1; i < 4; i++) op[i] = op[i - 1] ? next(op[i - 1]) : nullptr;
    const auto* const up = as<GateUpOp>(op[1]);
    const auto* const down = as<ResidualOp>(op[2]);
    const Op* const then = op[3];
    if (o.norm || o.side != 0 || !then || !up || !down) return 0;
    const auto* const qkv = as<QkvOp>(then);
    if (down->norm || down->side != up->side || !rms(*up) || (qkv && !rms(*qkv))) return 0;
    const auto adds = [&](const ResidualOp& v, const Op* to) {  // v's product, which leads on to the op at `to`
      const Weight m(v.blob);
      GemmArgs a = matrix(m, input(m, at_.act[v.side]));
      a.bias = v.bias;
      add_to_residual(a, v.scale);
      ready_ = kNothing;
      lead_on(a, to);
      return a;
    };
    const Weight O(o.blob), U(up->blob), D(down->blob);
    link[0] = {adds(o, up), O.head, O.blob, kResidual, sms_of_attention(last_qkv_)};
    if (lora_chain_) link[0].lora = &lora_args_, link[0].fewest_bits = lora_bits_;
    link[1] = {product(*up), U.head, U.blob, kActivation};
    link[2] = {adds(*down, then), D.head, D.blob, kResidual};
    scaled(link[1].a, *up, up->bias), link[1].a.activation = static_cast<int>(up->activation);
    if (!qkv) {
      squares_ = persistent_ctas(link, 3);
      return 3;
    }
    const Weight Q(qkv->blob);
    link[3] = {product(*qkv), Q.head, Q.blob, kStore};
    scaled(link[3].a, *qkv, qkv->bias), link[3].a.out = reinterpret_cast<float*>(base_ + at_.qkv), link[3].a.out_stride = Q.header().N;
    return 4;
  }
  // The products from attention's output at o to the next QKV in one launch (persistent_gemm.cuh), where possible: the walk then goes on
  // behind the last of them. Used for 1 to 8 tokens, unless deterministic.
  bool chain(const ResidualOp& o, const char*& wrong) {
    if (!chain_tokens(o)) return false;
    PersistentOp link[4] = {};
    const Op* op[4];
    const int count = links(o, link, op);
    if (lamport_qkv_) link[0].clear = lamport_qkv_, link[0].clear_count = s_.tokens * Weight(last_qkv_->blob).header().N / 4;
    lamport_qkv_ = nullptr;
    if (ranks()) link[2].peers = next_exchange();
    if (count == 4) last_qkv_ = as<QkvOp>(op[3]), flag_outputs(link[3], next(op[3]), *last_qkv_);
    for (int i = 0; i < count; i++) lora_args_.changes[i] = s_.lora.changes + number_ + i;
    wrong = persistent_launch(link, count, base_ + at_.chain, at_.persistent_bytes, stream_, pdl_);
    chained_ = true, number_ += count - 1;
    op_ = op[count - 1];
    if (count == 4) ready_ = kNothing;
    return true;
  }

  // Lets a product that adds to the residual also be the router of the op at `next`, if it can.
  bool tap(GemmArgs& a, const Op* next) {
    const auto* routed = as<RoutedOp>(next);
    if (!routed || lora()) return false;
    const Weight router(routed->blob);
    if (!router_tap(*routed, router.head, router.blob, reinterpret_cast<float*>(base_ + at_.routed), a.router)) return false;
    a.next_norm = norm_of(*routed).weight, a.next_squares = reinterpret_cast<float*>(base_ + at_.squares);
    ready_ = kRouted;
    return true;
  }
  void add_to_residual(GemmArgs& a, double scale) const {
    a.residual = residual(), a.residual_stride = H_, a.scale = static_cast<float>(scale);
  }
  // Where a product that adds to the residual can also write the input of the op at `next`: its norm's weights and squares. count: partial
  // squares of a row.
  bool lead_on(GemmArgs& a, const Op* next, int count) {
    const NormedOp* normed = as_normed(next);
    if (!normed || lora()) return false;
    const NormArgs n = norm_of(*normed);
    if (n.kind != kRmsNorm || n.bias) return false;
    a.next = input(Weight(normed->blob), at_.normed), a.next_norm = n.weight;
    a.next_squares = reinterpret_cast<float*>(base_ + at_.squares);
    squares_ = count, ready_ = kUnscaled;
    return true;
  }
  void lead_on(GemmArgs& a, const Op* next) { lead_on(a, next, skinny_grid(a, kResidual)); }
  // The same for a stream-K GEMM, which otherwise only stores. The head may be asked for fewer rows.
  bool stream_k_lead_on(GemmArgs& a, const ResidualOp& op) {
    const Op* const then = next(&op);
    if (!then || as<RoutedOp>(then) || (as<HeadOp>(then) && s_.logit_rows) || !stream_k_fuses_residual(a)) return false;
    if (!lead_on(a, then, stream_k_squares(H_))) return false;
    add_to_residual(a, op.scale);
    return true;
  }
  // residual += scale * norm(sum): the op at `next` does it where it can.
  const char* add_sum(const Op* next, const float* weight, double eps, double scale) {
    added_ = zeroed<RowSource>();
    added_.y = sum(), added_.post_norm = weight, added_.post_eps = static_cast<float>(eps), added_.scale = static_cast<float>(scale);
    ready_ = kNothing;
    const NormedOp* normed = as_normed(next);
    if (!normed) return make_rows(zeroed<NormArgs>(), zeroed<MatrixInput>(), 1);
    if (!as<RoutedOp>(next) && (as<HeadOp>(next) || fuses_norm(*normed))) return nullptr;
    ready_ = kNormed;
    return make_rows(norm_of(*normed), input(Weight(normed->blob), at_.normed), 1);
  }

  const char* operator()(const GateUpOp& op) {
    GemmArgs a;
    if (const char* wrong = normed_product(op, a)) return wrong;
    ready_ = kNothing;
    a.bias = op.bias, a.activation = static_cast<int>(op.activation);
    if (!lora() && stream_k(a) && stream_k_fuses_gate(a)) return run_stream_k(a, a.tokens);
    return stream_k(a) || lora() ? wide_gate_up(a, Weight(op.blob)) : skinny_launch(a, kActivation, stream_, pdl_);
  }
  // Both halves to memory, then the gate; so many tokens at a time as a launch takes.
  const char* wide_gate_up(const GemmArgs& all, const Weight& weight) {
    const int N = weight.header().N;
    MatrixInput x = input(weight, at_.normed);
    for (int first = 0; first < all.tokens; first += kStreamKTokens, x.x += static_cast<size_t>(kStreamKTokens) * x.stride) {
      GemmArgs a = all;
      a.tokens = std::min(kStreamKTokens, all.tokens - first), a.x += static_cast<size_t>(first) * a.x_stride;
      if (a.squares) a.squares += static_cast<size_t>(first) * a.squares_count;
      a.next.x += static_cast<size_t>(first) * a.next.stride;
      a.out = reinterpret_cast<float*>(base_ + at_.wide), a.out_stride = N;
      if (const char* wrong = stream_k(all) ? run_stream_k(a, all.tokens) : skinny_launch(a, kStore, stream_, pdl_)) return wrong;
      if (lora()) {
        LoraArgs change = lora_args(weight, x, a.out);
        change.of.adapters += first, change.next = a.next, change.activation = a.activation, change.gated = a.gated;
        if (const char* wrong = lora_launch(change, a.tokens, stream_, pdl_)) return wrong;
        continue;
      }
      const GatesArgs gates{a.out, a.out_stride, a.part[0].outputs, a.gated, a.activation, a.next};
      if (const char* wrong = gates_launch(gates, a.tokens, stream_, pdl_)) return wrong;
    }
    return nullptr;
  }

  const char* operator()(const RoutedOp& op) {
    const GpuHeader& router = Weight(op.blob).header();
    const bool tapped = ready_ == kRouted;
    uint8_t* const routed = base_ + at_.routed;
    if (!tapped) {
      GemmArgs a;
      if (const char* wrong = normed_product(op, a)) return wrong;
      a.out = reinterpret_cast<float*>(routed), a.out_stride = router_stride(router);
      a.late = true;  // so that the experts' kernels may read the residual, and the second one the choice, while this one works
      if (const char* wrong = skinny_launch(a, kStore, stream_, pdl_)) return wrong;
    }
    ready_ = kNothing;
    const RowSource from = rows(norm_of(op));
    GemmArgs d = routed_down(op);
    if (op.post_norm || ranks()) {
      d.epilogue = kStore, d.out = sum(), d.out_stride = H_;
    } else {
      d.epilogue = kResidual;
      add_to_residual(d, op.scale);
      lead_on(d, next(&op));
    }
    if (const char* wrong = routed_launch(op, router, tapped, from, routed, d, s_.tokens, s_.capacity, stream_, pdl_)) return wrong;
    if (const char* wrong = ranks() ? add_ranks() : nullptr) return wrong;
    return op.post_norm || ranks() ? add_sum(next(&op), op.post_norm, op.post_eps, op.scale) : nullptr;
  }

  // The stream leaves the workspace; whatever was to be added to it has been (add_sum).
  const char* operator()(const ResidualOutOp&) {
    const size_t bytes = static_cast<size_t>(s_.tokens) * H_ * 4;
    if (LaunchList* const list = Recording::current()) {
      list->add(nullptr, Launch{}, s_.logits, residual(), bytes);
      return nullptr;
    }
    return error_text(driver()->copy(reinterpret_cast<uintptr_t>(s_.logits), reinterpret_cast<uintptr_t>(residual()), bytes,
                                     static_cast<CudaStream>(stream_)));
  }
  const char* operator()(const HeadOp& op) {
    if (s_.logit_count == 0) return nullptr;
    GemmArgs a;
    if (const char* wrong = normed_product(op, a)) return wrong;
    const Weight weight(op.blob);
    a.bias = op.bias, a.out = s_.logits, a.out_stride = weight.header().N;
    if (ranks()) a.out += s_.vocab[s_.peers.rank], a.out_stride = s_.vocab[s_.peers.size];
    const PersistentOp alone{a, weight.head, weight.blob, kStore};
    const bool chain = chained_ && a.squares && persistent_tokens(&alone, 1);
    const char* const wrong = chain ? persistent_launch(&alone, 1, base_ + at_.chain, at_.persistent_bytes, stream_, pdl_) : store(a);
    if (!wrong && ranks()) {
      ExchangeArgs all{next_exchange(), a.out, a.out_stride, a.out_stride, s_.logit_count, {}, false, s_.logits, {}};
      std::copy(s_.vocab, s_.vocab + kMaxRanks + 1, all.first);
      return exchange_launch(all, stream_, pdl_);
    }
    if (wrong || chain || !lora()) return wrong;
    LoraArgs change = lora_args(weight, input(weight, at_.normed, s_.logit_count), a.out);
    change.of.rows = s_.logit_rows;
    return lora_launch(change, s_.logit_count, stream_, pdl_);
  }

 private:
  const Program& program_;
  int H_;
  const GpuStep& s_;
  uint8_t* base_;
  const Layout& at_;
  void* stream_;
  bool pdl_;
  Ready ready_ = kNothing;
  RowSource added_{};  // y and what belongs to it: not yet added to the residual
  int squares_ = 0, side_ = 0;
  bool stream_k_ = false, chained_ = false;
  float* lamport_qkv_ = nullptr;  // what the last QKV wrote, where it has Lamport flags
  int lamport_set_ = 0;
  StreamKNext ahead_{};
  const QkvOp* last_qkv_ = nullptr;
  const ResidualOp* o_ = nullptr;  // behind the last attention
  int exchanges_ = 0;
  const Op* op_ = nullptr;  // the last op that is done
  int number_ = 0;          // of the current op
  // Adapters inside the products: of persistent chains; of stream-K GEMMs. lora_head_: memory of both (step.h).
  bool lora_chain_ = false, lora_stream_k_ = false;
  int lora_bits_ = 0;  // fewest of a matrix, where chains take adapters
  float* lora_head_ = nullptr;
  unsigned long long* lora_sets_ = nullptr;
  LoraChain lora_args_{};
  int lora_products_ = 0;  // stream-K GEMMs with adapters so far
};

}  // namespace

int64_t lora_sums(const Program& program, int64_t width) {
  const int64_t chunks = lora_most_chunks(program);
  return kLoraRows * chunks * width + lora_head_floats(width) + kLoraChainSets * 2 * lora_chain_set(width) + lora_set_floats(width);
}

std::string step_workspace(const Program& program, int capacity, size_t& bytes, int64_t& width) {
  Layout layout{};
  const std::string wrong = lay_out(program, capacity, layout);
  if (!wrong.empty()) return wrong;
  bytes = layout.bytes, width = program.head() ? Weight(program.head()->blob).header().N : program.hidden();
  return "";
}

std::string step_launch(const Program& program, const GpuStep& step, void* workspace, size_t bytes, void* stream, bool pdl) {
  Layout layout{};
  const std::string wrong =
      step.tokens > step.capacity ? "more tokens than the workspace was made for" : lay_out(program, step.capacity, layout);
  if (!wrong.empty()) return wrong;
  if (layout.bytes > bytes)
    return "the workspace has " + std::to_string(bytes) + " bytes; expected at least " + std::to_string(layout.bytes) + " for " +
           std::to_string(step.capacity) + " tokens";
  Walker walker(program, step, static_cast<uint8_t*>(workspace), layout, static_cast<void*>(stream), pdl);
  const Op* at = nullptr;
  const char* failed = walker.run(at);
  if (!failed) return "";
  for (const size_t offset : layout.lamport_qkv)
    if (!Recording::current())
      driver()->fill(reinterpret_cast<uintptr_t>(workspace) + offset, 0, layout.lamport_bytes, static_cast<CudaStream>(stream));
  if (step.lora.adapters && !Recording::current()) {
    const int64_t floats = lora_set_floats(step.lora_width);
    float* const sets = step.lora_sums + lora_sums(program, step.lora_width) - floats;
    driver()->fill(reinterpret_cast<uintptr_t>(sets), 0, static_cast<size_t>(floats) * 4, static_cast<CudaStream>(stream));
  }
  int number = 0;
  for (const Op* op = program.first(); op != at; op = program.next(op)) number++;
  return std::string(op_name(at)) + ", op " + std::to_string(number) + " of the program: " + failed;
}

}  // namespace exl2nb
