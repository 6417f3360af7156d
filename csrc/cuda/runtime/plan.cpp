#include "cuda/runtime/plan.h"

#include <algorithm>
#include <utility>

#include "cuda/attention/cache_format.cuh"
#include "cuda/gemm/elementwise.h"
#include "cuda/gemm/persistent/persistent_gemm.cuh"
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/gemm/stream_k/stream_k_gemm.cuh"
#include "cuda/moe/moe.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/exchange.h"
#include "cuda/runtime/step_workspace.h"
#include "format/program.h"

namespace exl2nb {
namespace {

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
unsigned long long* lora_sets(const Program& program, const GpuStep& step) {
  return reinterpret_cast<unsigned long long*>(step.lora_sums + lora_sums(program, step.lora_width) - lora_set_floats(step.lora_width));
}
int fewest_bits_of(const Program& program) {
  int fewest = 16;
  for (const Op* op = program.first(); op; op = program.next(op))
    if (const uint8_t* blob = matrix_of(op)) fewest = std::min(fewest, fewest_bits(Weight(blob).head));
  return fewest;
}
// Whether the layers have an even number of matrices: GEMMs of up to 16 rows take two sets of sums by turns, from the first one on in
// every step.
bool even_products(const Program& program) {
  int products = 0;
  for (const Op* op = program.first(); op; op = program.next(op)) products += matrix_of(op) && !as<HeadOp>(op);
  return products % 2 == 0;
}
Epilogue epilogue_of(const Op& op) { return as<GateUpOp>(&op) ? kActivation : kStore; }

// What holds for every launch of a step.
struct Choice {
  bool stream_k = false;       // every product is a stream-K GEMM; only a head of fewer rows may be skinny
  bool lora_chain = false;     // persistent chains add the adapters
  bool lora_stream_k = false;  // stream-K GEMMs add them
  int fewest_bits = 2;         // lora_chain: of all matrices, so that all chains share a kernel
};

enum Ready { kNothing, kNormed, kUnscaled, kRouted };  // contents of the buffer of normed inputs; kRouted: and the router has run

// What the ops planned so far leave to those behind them.
struct State {
  int number = 0;          // of the current op
  const Op* op = nullptr;  // the last op that is planned: a persistent chain takes several
  Ready ready = kNothing;
  int squares = 0;                        // kUnscaled: partial squares of a row
  RowSource added = zeroed<RowSource>();  // y and what belongs to it: not yet added to the residual
  int side = 0;                           // of the buffers of the residual
  const QkvOp* qkv = nullptr;             // the last one
  const ResidualOp* o = nullptr;          // behind the last attention
  float* lamport_qkv = nullptr;           // what the last QKV wrote, where it has Lamport flags
  int lamport_set = 0;
  bool chained = false;   // a persistent chain has been planned
  int exchanges = 0;      // of the ranks
  int lora_products = 0;  // stream-K GEMMs with adapters
};

// A persistent chain: its products and their ops, 4 up to the next QKV, 3 without it; 0: there is none.
struct Chain {
  int count = 0;
  PersistentOp link[4] = {};
  const Op* op[4] = {};
  bool unscaled = false;  // of 3: the last one also writes the input of the op behind it
};

class Planner {
 public:
  Planner(LaunchList& list, const Program& program, const GpuStep& step, uint8_t* workspace, const Layout& layout)
      : list_(list),
        program_(program),
        H_(static_cast<int>(program.hidden())),
        s_(step),
        base_(workspace),
        at_(layout),
        at_op_(program.first()) {
    if (s_.lora.adapters) lora_head_ = s_.lora_sums + kLoraRows * lora_most_chunks(program_) * s_.lora_width;
    choice_ = choose();
  }

  // Adds the launches of the next op, or of several in one chain; whether there was one.
  bool next_op() {
    if (!at_op_ || list_.failed()) return false;
    state_.op = at_op_, list_.op = state_.number;
    visit(at_op_, *this);
    at_op_ = next(state_.op), state_.number++;
    if (!at_op_ && ranks()) plan_exchange_count(list_, s_.peers, state_.exchanges);
    return true;
  }

  // ---- The choice
  Choice choose() const {
    const bool inside = s_.lora.adapters && s_.lora_inside && !ranks() && s_.lora_width <= kLoraChainWidth;
    Choice c;
    c.lora_chain = inside && chains_all_layers({.lora_chain = true});
    c.stream_k = takes_stream_k(c);  // asks how many rows a chain takes, with adapters where it has them
    if (c.lora_chain) c.fewest_bits = fewest_bits_of(program_);
    if (c.stream_k) c.lora_chain = false, c.lora_stream_k = inside && s_.tokens <= kLoraRows && even_products(program_);
    return c;
  }
  // Whether the ops are embed, QKV, then attention and chain by turns.
  bool chains_all_layers(const Choice& c) const {
    const Op* op = next(program_.first());
    while (const auto* qkv = as<QkvOp>(op)) {
      const auto* const attention = as<AttentionOp>(next(op));
      const auto* const o = attention ? as<ResidualOp>(next(attention)) : nullptr;
      if (!o || !chain_tokens(*qkv, *o, c)) return false;
      op = next(next(next(o)));
    }
    return as<HeadOp>(op) || as<ResidualOutOp>(op);
  }
  // Fewer tokens than stream_k_from: only where that is faster than persistent chains.
  bool takes_stream_k(const Choice& c) const {
    if (!s_.stream_k_from || (s_.tokens < s_.stream_k_from && !exceeds_chain(c))) return false;
    for (const Op* op = program_.first(); op; op = next(op)) {
      if (as<RoutedOp>(op)) return false;
      const uint8_t* blob = matrix_of(op);
      if (!blob) continue;
      GemmArgs a{};
      const Weight weight(blob);
      set_weights(a, weight.head, weight.blob);
      a.tokens = s_.tokens;
      if (!stream_k_takes(device(), a)) return false;
    }
    return true;
  }
  // Whether stream-K GEMMs take these few rows, in layers so large that reading them once is worth four launches: where persistent chains
  // would take several launches, from four rows on, and from three where rows are short (H100, 2026-11-26, chain over stream-K: TinyLlama's
  // three rows 1.06, four 1.27; Llama-2-7B's three 0.97).
  bool exceeds_chain(const Choice& c) const {
    constexpr int64_t kLargeLayer = 16 << 20;  // bytes
    const int chain_rows = H_ > 2048 ? 3 : 2;
    const QkvOp* qkv = nullptr;
    int64_t bytes = 0;
    int most = 0;
    for (const Op* op = program_.first(); op; op = next(op)) {
      if (as<QkvOp>(op) && most) break;
      if (as<QkvOp>(op)) qkv = as<QkvOp>(op);
      if (const uint8_t* blob = matrix_of(op)) bytes += Weight(blob).header().bytes;
      if (const auto* o = as<ResidualOp>(op); o && qkv && !most) most = chain_tokens(*qkv, *o, c);
    }
    return most && s_.tokens > std::min(most, chain_rows) && bytes >= kLargeLayer;
  }

  // ---- Queries
  const Device& device() const { return list_.device; }
  const Op* next(const Op* op) const { return program_.next(op); }
  template <class T>
  T* buffer(size_t at) const {
    return reinterpret_cast<T*>(base_ + at);
  }
  float* residual() const { return buffer<float>(at_.residual[state_.side]); }
  float* sum() const { return buffer<float>(at_.sum); }
  bool ranks() const { return s_.peers.size > 0; }
  // Adapters in launches of their own.
  bool lora_apart(const Choice& c) const { return s_.lora.adapters && !c.lora_chain && !c.lora_stream_k; }
  bool lora_apart() const { return lora_apart(choice_); }

  // The input of the matrix, at a place, for so many tokens.
  MatrixInput input(const Weight& w, size_t at, int tokens) const {
    auto in = zeroed<MatrixInput>();
    set_input(in, w.head, w.blob, buffer<half>(at), stream_k_rows(s_.capacity));
    in.group = group(tokens);
    return in;
  }
  MatrixInput input(const Weight& w, size_t at) const { return input(w, at, s_.tokens); }
  // How products of so many tokens want their inputs (fragment.cuh): those of stream_k_gemm.cuh in groups. Of a head of fewer rows, too,
  // unless it is skinny.
  int group(int tokens) const { return choice_.stream_k && (tokens > kSkinnyTokens || tokens == s_.tokens) ? stream_k_group(tokens) : 0; }
  bool stream_k(const GemmArgs& a) const { return group(a.tokens) != 0 && !a.rows; }
  NormArgs norm_of(const NormedOp& op) const {
    auto n = zeroed<NormArgs>();
    n.kind = !op.norm ? kNoNorm : op.layer_norm ? kLayerNorm : kRmsNorm, n.width = H_, n.eps = static_cast<float>(op.eps);
    n.weight = op.norm, n.bias = op.norm_bias;
    return n;
  }
  bool plain_rms(const NormedOp& op) const { return op.norm && !op.layer_norm && !op.norm_bias; }
  GemmArgs matrix(const Weight& w, const MatrixInput& in) const {
    GemmArgs a{};
    set_weights(a, w.head, w.blob);
    a.tokens = s_.tokens, a.x = in.x, a.x_stride = in.stride, a.x_perm_stride = in.perm_stride, a.scale = 1.f;
    return a;
  }
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
    return !lora_apart() && !stream_k(a) && skinny_fuses_norm(device(), a, epilogue_of(op), H_);
  }
  // The residual's rows on their way into a matrix, what is still to be added to them included.
  RowSource rows(const NormArgs& n) const {
    RowSource r = state_.added;
    r.x = residual(), r.norm = n, r.norm.width = H_;
    return r;
  }
  void add_to_residual(GemmArgs& a, double scale) const {
    a.residual = residual(), a.residual_stride = H_, a.scale = static_cast<float>(scale);
  }
  // Where a product that adds to the residual can also write the input of the op at `next`: its norm's weights and squares.
  bool leads_on(GemmArgs& a, const Op* next, bool apart) const {
    const NormedOp* normed = as_normed(next);
    if (!normed || apart || !plain_rms(*normed)) return false;
    a.next = input(Weight(normed->blob), at_.normed), a.next_norm = normed->norm;
    a.next_squares = buffer<float>(at_.squares);
    return true;
  }
  // The persistent chain that begins with attention's output at o, if the ops are such. qkv: in front of that attention.
  Chain chain_at(const QkvOp& qkv, const ResidualOp& o) const {
    const auto* const up = as<GateUpOp>(next(&o));
    const auto* const down = up ? as<ResidualOp>(next(up)) : nullptr;
    const Op* const then = down ? next(down) : nullptr;
    const auto* const after = as<QkvOp>(then);
    if (!then || o.norm || o.side != 0 || down->norm || down->side != up->side || !plain_rms(*up) || (after && !plain_rms(*after)))
      return {};
    Chain c;
    const auto adds = [&](int i, const ResidualOp& v, const Op* to) {  // v's product, which leads on to the op at `to`
      const Weight m(v.blob);
      c.link[i] = {matrix(m, input(m, at_.act[v.side])), m.head, m.blob, kResidual};
      c.link[i].a.bias = v.bias;
      add_to_residual(c.link[i].a, v.scale);
      return leads_on(c.link[i].a, to, false);
    };
    const auto scales = [&](int i, const NormedOp& v, const float* bias, Epilogue e) {
      const Weight m(v.blob);
      c.link[i] = {product(v), m.head, m.blob, e};
      c.link[i].a.inverse_width = 1.f / static_cast<float>(H_), c.link[i].a.eps = static_cast<float>(v.eps), c.link[i].a.bias = bias;
    };
    adds(0, o, up);
    c.link[0].attention_sms =
        attention_sms(static_cast<int>(qkv.num_heads), static_cast<int>(qkv.num_kv_heads), static_cast<int>(qkv.head_dim));
    scales(1, *up, up->bias, kActivation), c.link[1].a.activation = static_cast<int>(up->activation);
    c.unscaled = adds(2, *down, then);
    c.op[0] = &o, c.op[1] = up, c.op[2] = down, c.op[3] = then;
    c.count = after ? 4 : 3;
    if (!after) return c;
    scales(3, *after, after->bias, kStore);
    c.link[3].a.out = buffer<float>(at_.qkv), c.link[3].a.out_stride = Weight(after->blob).header().N;
    return c;
  }
  // Tokens of a launch of that chain; 0: there is none.
  int chain_tokens(const QkvOp& qkv, const ResidualOp& o, const Choice& c) const {
    if (s_.tokens > kSkinnyTokens || !s_.stream_k_from || c.stream_k || lora_apart(c)) return 0;
    Chain chain = chain_at(qkv, o);
    const LoraChain lora = lora_of_chain(0, 0);
    if (c.lora_chain) chain.link[0].lora = &lora;
    return chain.count ? persistent_tokens(device(), chain.link, chain.count) : 0;
  }
  // Whether the attention at `op`, with the QKV op q, can poll what a persistent chain before it writes, and a chain of one launch follows,
  // which clears it again.
  bool polls(const Op* op, const QkvOp& q) const {
    const auto* attention = as<AttentionOp>(op);
    if (!attention || attention->layer < 0 || attention->layer >= s_.layers) return false;
    const auto* o = as<ResidualOp>(next(op));
    if (!o || o != reader(program_, op, 0) || s_.tokens > kPersistentTokens) return false;
    return chain_tokens(q, *o, choice_) >= s_.tokens && attention_polls(device(), attention_of(*attention, q));
  }
  // The attention at `op` with the QKV op q.
  AttentionArgs attention_of(const AttentionOp& op, const QkvOp& q) const {
    const auto layer = static_cast<size_t>(op.layer);
    AttentionArgs a{};
    a.cache = s_.cache, a.cache.k_pool = s_.k_pools[layer], a.cache.v_pool = s_.v_pools[layer];
    a.cache.num_heads = static_cast<int>(q.num_heads), a.cache.num_kv_heads = static_cast<int>(q.num_kv_heads);
    a.cache.head_dim = static_cast<int>(q.head_dim);
    a.rope.cos = q.cos, a.rope.sin = q.sin, a.rope.half = static_cast<int>(q.rope_half);
    if (a.rope.half == 0) a.rope.cos = a.rope.sin = nullptr;
    a.rope.interleaved = q.interleaved, a.rope.positions = s_.positions, a.rope.clip = static_cast<float>(q.clip);
    a.rope.q_norm = q.q_norm, a.rope.k_norm = q.k_norm;
    a.rope.norm_per_head = q.q_norm_stride || q.k_norm_stride, a.rope.norm_whole = q.q_norm_whole || q.k_norm_whole;
    a.rope.layer_norm = q.layer_norm, a.rope.eps = static_cast<float>(q.eps);
    if (ranks())
      a.to.out = sum();
    else
      static_cast<MatrixInput&>(a.to) = input(Weight(reader(program_, &op, 0)->blob), at_.act[0]);
    a.tokens = s_.tokens;
    a.scale = static_cast<float>(op.scale), a.window = static_cast<int>(op.window), a.softcap = static_cast<float>(op.softcap);
    a.large_chunks = s_.stream_k_from && s_.tokens >= s_.stream_k_from;
    a.qkv = buffer<float>(at_.qkv);
    a.workspace = base_ + at_.attention, a.workspace_bytes = at_.attention_bytes;
    return a;
  }
  // The first keys and values of the attention at `op`, as many as find room in the L2 cache beside the weights that pass through.
  StreamKKeys keys_of(const AttentionOp& op) const {
    constexpr int64_t kPrefetchBytes = 24 << 20;
    const CacheArgs& c = s_.cache;
    const int64_t layer = op.layer, heads = c.num_kv_heads, dim = c.head_dim;
    StreamKKeys keys{};
    if (op.window || layer < 0 || layer >= s_.layers) return keys;  // a window may have left them behind
    const int64_t k_row = dim * pool_bits(c.k_format) / 8, v_row = dim * pool_bits(c.v_format) / 8;
    const int64_t rows = std::min<int64_t>(kPage, kPrefetchBytes / std::max<int64_t>(1, c.sequences * heads * (k_row + v_row)));
    keys.k_pool = static_cast<const uint8_t*>(s_.k_pools[layer]), keys.v_pool = static_cast<const uint8_t*>(s_.v_pools[layer]);
    keys.block_table = c.block_table, keys.context_lens = c.context_lens, keys.max_pages = c.max_pages;
    keys.sequences = c.sequences, keys.heads = c.num_kv_heads, keys.rows = static_cast<int>(rows);
    keys.k_page = page_bytes(c.k_format, c.head_dim), keys.v_page = page_bytes(c.v_format, c.head_dim);
    keys.k_row = static_cast<int>(k_row), keys.v_row = static_cast<int>(v_row);
    return keys;
  }
  // What a stream-K GEMM prefetches for the ops from `op` on: the next matrix's image, and the keys of an attention before it.
  StreamKNext prefetched(const Op* op) const {
    StreamKNext ahead{};
    for (; as<AttentionOp>(op); op = next(op)) ahead.keys = keys_of(*as<AttentionOp>(op));
    if (!op || !matrix_of(op)) return ahead;
    const Weight weight(matrix_of(op));
    const GpuHeader& h = weight.header();
    ahead.image = weight.blob + h.image, ahead.bytes = (image_bytes(h.num_items, h.num_units, h.num_parts) + 15) / 16 * 16;
    return ahead;
  }

  // ---- Adapters
  LoraRows lora_of(int number) const {
    LoraRows of = s_.lora;
    of.changes += number, of.tokens = s_.tokens;
    return of;
  }
  // What the adapters change in the sums y of the current op's product of x.
  LoraArgs lora_args(int K, const MatrixInput& x, float* y, int N) const {
    auto a = zeroed<LoraArgs>();
    a.of = lora_of(state_.number), a.x = x, a.K = K, a.sums = s_.lora_sums, a.width = s_.lora_width;
    a.y = y, a.stride = N, a.N = N;
    return a;
  }
  LoraArgs lora_args(const Weight& w, const MatrixInput& x, float* y) const { return lora_args(w.header().K, x, y, w.header().N); }
  // Of a persistent chain of `count` products from op `number` on.
  LoraChain lora_of_chain(int number, int count) const {
    LoraChain c{};
    if (!s_.lora.adapters) return c;
    c.ops = s_.lora.ops, c.adapters = s_.lora.adapters, c.width = s_.lora_width, c.set = static_cast<int>(lora_chain_set(s_.lora_width));
    c.launches = reinterpret_cast<unsigned*>(lora_head_);
    c.sums = reinterpret_cast<unsigned long long*>(lora_head_ + lora_head_floats(s_.lora_width));
    for (int i = 0; i < count; i++) c.changes[i] = s_.lora.changes + number + i;
    return c;
  }

  // ---- Launches
  // Switches to the other buffer of the residual.
  float* other_residual() {
    state_.side ^= 1;
    return residual();
  }
  Peers next_exchange() {
    Peers p = s_.peers;
    p.exchange = state_.exchanges++;
    return p;
  }
  // A kernel that makes rows, all or the wanted ones, and adds what is to be added to all of them. ahead: for the op so many ops further
  // on.
  void make_rows(const NormArgs& n, const MatrixInput& to, int ahead, bool wanted = false) {
    auto a = zeroed<RowsArgs>();
    a.from = rows(n), a.rows = wanted ? s_.logit_rows : nullptr, a.tokens = s_.tokens, a.next = to;
    a.lora = lora_of(state_.number + ahead);
    if (a.from.y) a.from.to = other_residual();
    state_.added = zeroed<RowSource>();
    plan_rows(list_, a, wanted ? s_.logit_count : s_.tokens);
  }
  // The op's product with its normed input, which the kernel before has left, or a kernel makes now, or the product itself.
  GemmArgs normed_product(const NormedOp& op) {
    const NormArgs n = norm_of(op);
    const bool head = as<HeadOp>(&op);
    const MatrixInput in = input(Weight(op.blob), at_.normed, head ? s_.logit_count : s_.tokens);
    GemmArgs a = product(op);
    if (state_.ready == kUnscaled) {
      a.squares = buffer<const float>(at_.squares);
      a.squares_count = state_.squares, a.inverse_width = 1.f / static_cast<float>(H_), a.eps = n.eps;
    } else if (state_.ready == kNothing && fuses_norm(op)) {
      a.from = rows(n);
      std::copy(std::begin(in.inverse), std::end(in.inverse), a.inverse);
      if (state_.added.y && !head) a.from.to = other_residual();
      state_.added = zeroed<RowSource>();
    } else if (state_.ready == kNothing || head) {
      make_rows(n, in, 0, head);
      return a;
    }
    if (head) a.rows = s_.logit_rows, a.last_row = s_.tokens - 1;
    return a;
  }
  // A product that only writes its sums.
  void store(const GemmArgs& a) {
    if (stream_k(a))
      add_stream_k(a, a.tokens);
    else
      plan_skinny(list_, a, kStore);
  }
  // tokens: of the whole product, on which the order of its input depends.
  void add_stream_k(const GemmArgs& a, int tokens) {
    const bool adapted = choice_.lora_stream_k && !as<HeadOp>(state_.op);
    const StreamKLora lora = adapted ? lora_of_stream_k(a, tokens) : zeroed<StreamKLora>();
    plan_stream_k(list_, a, group(tokens), prefetched(next(state_.op)), base_ + at_.stream_k, adapted ? &lora : nullptr);
  }
  // What a stream-K GEMM needs to add the adapters; for more than 16 rows also x a, which is a launch.
  StreamKLora lora_of_stream_k(const GemmArgs& a, int tokens) {
    const GpuHeader& h = header_of(a.head);
    auto lora = zeroed<StreamKLora>();
    lora.of = lora_of(state_.number), lora.width = s_.lora_width;
    if (group(tokens) <= kLoraStripRows) {
      const int64_t set = kLoraStripRows * s_.lora_width;
      const int turn = state_.lora_products++ & 1;
      auto* const sets = lora_sets(program_, s_);
      lora.sums = sets + turn * set, lora.clear = sets + (1 - turn) * set, lora.steps = (h.stored + 15) / 16;
      return lora;
    }
    auto x = zeroed<MatrixInput>();
    set_input(x, a.head, a.image - h.image, const_cast<half*>(a.x), stream_k_rows(s_.capacity));
    x.group = group(tokens);
    float* const low = lora_head_ + kLoraChainHead;
    LoraArgs args = lora_args(h.K, x, nullptr, 0);
    args.low = low, args.arrived = reinterpret_cast<unsigned*>(low + kLoraRows * s_.lora_width);
    plan_lora_shrink(list_, args, a.tokens);
    lora.low = low;
    return lora;
  }
  void adapt(const Weight& w, const MatrixInput& x, float* y) {
    if (lora_apart() || choice_.lora_chain) plan_lora(list_, lora_args(w, x, y), s_.tokens);
  }
  // Lets the last product of a chain, the QKV op q, raise Lamport flags, if the attention at `op` can poll them.
  void flag_outputs(PersistentOp& last, const Op* op, const QkvOp& q) {
    if (!polls(op, q)) return;
    state_.lamport_qkv = buffer<float>(at_.lamport_qkv[state_.lamport_set ^= 1]);
    last.a.out = state_.lamport_qkv, last.lamport = true;
  }
  // Products [links, links + count) as a persistent chain.
  void add_chain(PersistentOp* links, int count) {
    const LoraChain lora = lora_of_chain(state_.number, count);
    if (choice_.lora_chain) links->lora = &lora, links->fewest_bits = choice_.fewest_bits;
    plan_persistent(list_, links, count, base_ + at_.chain, at_.persistent_bytes);
  }
  // The products from attention's output at o to the next QKV in one launch (persistent_gemm.cuh), where possible: the plan then goes on
  // behind the last of them. Used for 1 to 8 tokens, unless deterministic.
  bool chain(const ResidualOp& o) {
    if (!state_.qkv || !chain_tokens(*state_.qkv, o, choice_)) return false;
    Chain c = chain_at(*state_.qkv, o);
    if (state_.lamport_qkv)
      c.link[0].clear = state_.lamport_qkv, c.link[0].clear_count = s_.tokens * Weight(state_.qkv->blob).header().N / 4;
    state_.lamport_qkv = nullptr;
    if (ranks()) c.link[2].peers = next_exchange();
    if (const auto* const qkv = as<QkvOp>(c.op[3])) state_.qkv = qkv, flag_outputs(c.link[3], next(qkv), *qkv);
    add_chain(c.link, c.count);
    state_.chained = true, state_.number += c.count - 1, state_.op = c.op[c.count - 1];
    state_.ready = c.count == 3 && c.unscaled ? kUnscaled : kNothing;
    if (c.count == 3) state_.squares = persistent_ctas(device(), c.link, 3);
    return true;
  }
  // What every rank's product adds to the residual, in sum(), becomes the sum over all ranks.
  void add_ranks() {
    auto a = zeroed<ExchangeArgs>();
    a.peers = next_exchange(), a.x = sum(), a.x_stride = H_, a.out_stride = H_, a.rows = s_.tokens, a.first[1] = H_;
    a.sum = true, a.out = sum();
    plan_exchange(list_, a);
  }
  // The heads of all ranks, side by side as input of the matrix behind attention.
  void gather_heads(const MatrixInput& to) {
    const int width = static_cast<int>(state_.qkv->num_heads * state_.qkv->head_dim);
    auto a = zeroed<ExchangeArgs>();
    a.peers = next_exchange(), a.x = sum(), a.x_stride = width, a.rows = s_.tokens, a.next = to;
    for (int r = 0; r <= s_.peers.size; r++) a.first[r] = r * width;
    plan_exchange(list_, a);
  }
  // residual += scale * norm(sum): the op at `next` does it where it can.
  void add_sum(const Op* next, const float* weight, double eps, double scale) {
    RowSource& added = state_.added = zeroed<RowSource>();
    added.y = sum(), added.post_norm = weight, added.post_eps = static_cast<float>(eps), added.scale = static_cast<float>(scale);
    state_.ready = kNothing;
    const NormedOp* normed = as_normed(next);
    if (!normed) return make_rows(zeroed<NormArgs>(), zeroed<MatrixInput>(), 1);
    if (!as<RoutedOp>(next) && (as<HeadOp>(next) || fuses_norm(*normed))) return;
    state_.ready = kNormed;
    make_rows(norm_of(*normed), input(Weight(normed->blob), at_.normed), 1);
  }
  // Lets a product that adds to the residual write the input of the op at `next`, if it can. count: partial squares of a row.
  bool lead_on(GemmArgs& a, const Op* next, int count) {
    if (!leads_on(a, next, lora_apart())) return false;
    state_.squares = count, state_.ready = kUnscaled;
    return true;
  }
  // Lets it also be the router of the op at `next`, if it can.
  bool tap(GemmArgs& a, const Op* next) {
    const auto* routed = as<RoutedOp>(next);
    if (!routed || lora_apart()) return false;
    const Weight router(routed->blob);
    if (!router_tap(*routed, router.head, router.blob, buffer<float>(at_.routed), a.router)) return false;
    a.next_norm = routed->norm, a.next_squares = buffer<float>(at_.squares);
    state_.ready = kRouted;
    return true;
  }
  // lead_on for a stream-K GEMM, which otherwise only stores. The head may be asked for fewer rows.
  bool stream_k_leads_on(GemmArgs& a, const ResidualOp& op) {
    const Op* const then = next(&op);
    if (!then || as<RoutedOp>(then) || (as<HeadOp>(then) && s_.logit_rows) || !stream_k_fuses_residual(a)) return false;
    if (!lead_on(a, then, stream_k_squares(H_))) return false;
    add_to_residual(a, op.scale);
    return true;
  }
  // Both halves to memory, then the gate; so many tokens at a time as a launch takes.
  void wide_gate_up(const GemmArgs& all, const Weight& weight) {
    const int N = weight.header().N;
    MatrixInput x = input(weight, at_.normed);
    for (int first = 0; first < all.tokens; first += kStreamKTokens, x.x += static_cast<size_t>(kStreamKTokens) * x.stride) {
      GemmArgs a = all;
      a.tokens = std::min(kStreamKTokens, all.tokens - first), a.x += static_cast<size_t>(first) * a.x_stride;
      if (a.squares) a.squares += static_cast<size_t>(first) * a.squares_count;
      a.next.x += static_cast<size_t>(first) * a.next.stride;
      a.out = buffer<float>(at_.wide), a.out_stride = N;
      if (stream_k(all))
        add_stream_k(a, all.tokens);
      else
        plan_skinny(list_, a, kStore);
      if (lora_apart()) {
        LoraArgs change = lora_args(weight, x, a.out);
        change.of.adapters += first, change.next = a.next, change.activation = a.activation, change.gated = a.gated;
        plan_lora(list_, change, a.tokens);
        continue;
      }
      auto gates = zeroed<GatesArgs>();
      gates.y = a.out, gates.stride = a.out_stride, gates.width = a.part[0].outputs, gates.gated = a.gated;
      gates.activation = a.activation, gates.next = a.next;
      plan_gates(list_, gates, a.tokens);
    }
  }

  // ---- Ops
  void operator()(const Op&) {}  // LayoutSizes has refused it
  void operator()(const EmbedOp& op) {
    EmbedArgs a{};
    a.ids = s_.ids, a.positions = s_.positions, a.table = op.table, a.dtype = static_cast<int>(op.dtype);
    a.vocab = static_cast<int>(op.vocab), a.width = H_, a.scale = static_cast<float>(op.scale), a.position_table = op.position_table;
    a.position_dtype = static_cast<int>(op.position_dtype), a.max_positions = static_cast<int>(op.max_positions), a.x = residual();
    const auto* const qkv = as<QkvOp>(next(&op));
    if (qkv && !lora_apart()) {
      a.next = input(Weight(qkv->blob), at_.normed), a.norm = norm_of(*qkv);
      state_.ready = kNormed;
    }
    plan_embed(list_, a, s_.tokens);
    if (!lora_apart()) return;
    LoraArgs change = lora_args(a.vocab, zeroed<MatrixInput>(), a.x, H_);
    change.ids = s_.ids, change.sums = nullptr;
    plan_lora(list_, change, s_.tokens);
  }

  void operator()(const QkvOp& op) {
    GemmArgs a = normed_product(op);
    const Weight weight(op.blob);
    a.out = buffer<float>(at_.qkv), a.out_stride = weight.header().N, a.bias = op.bias;
    state_.qkv = &op, state_.lamport_qkv = nullptr, state_.ready = kNothing;
    // In front of persistent chains a chain of its own, which is faster and whose sums attention can poll.
    const Op* const then = next(&op);
    const auto* o = then ? as<ResidualOp>(next(then)) : nullptr;
    PersistentOp alone{a, weight.head, weight.blob, kStore};
    const LoraChain lora = lora_of_chain(state_.number, 1);
    if (choice_.lora_chain) alone.lora = &lora;
    if (stream_k(a) || !o || !chain_tokens(op, *o, choice_) ||
        persistent_tokens(device(), &alone, 1) < (choice_.lora_chain ? s_.tokens : 1)) {
      store(a);
      return adapt(weight, input(weight, at_.normed), a.out);
    }
    flag_outputs(alone, then, op);
    add_chain(&alone, 1);
  }

  void operator()(const AttentionOp& op) {
    if (static_cast<size_t>(op.layer) >= static_cast<size_t>(s_.layers)) return list_.fail("its layer has no pools");
    AttentionArgs a = attention_of(op, *state_.qkv);
    a.lamport_qkv = state_.lamport_qkv != nullptr;
    if (state_.lamport_qkv) a.qkv = state_.lamport_qkv;
    state_.o = reader(program_, &op, 0);
    if (s_.prompts) return prompt_attention(a);
    plan_attention(list_, a);
    if (ranks()) gather_heads(input(Weight(state_.o->blob), at_.act[0]));
  }
  // Keys and values are stored first, for all queries to see. Then without PDL: attention reads keys before it waits for its predecessor.
  void prompt_attention(AttentionArgs a) {
    if (ranks()) return list_.fail("a rank's sequences have at most 8 tokens");
    auto append = zeroed<RopeAppendArgs>();
    append.cache = a.cache, append.rope = a.rope, append.qkv = a.qkv, append.tokens = a.tokens, append.q_f32 = sum();
    plan_rope_append(list_, append);
    a.q = sum(), a.qkv = nullptr, a.lamport_qkv = false;
    const bool pdl = std::exchange(list_.pdl, false);
    plan_attention(list_, a);
    list_.pdl = pdl;
  }

  void operator()(const ResidualOp& op) {
    if (chain(op)) return;
    const Weight weight(op.blob);
    GemmArgs a = matrix(weight, input(weight, at_.act[op.side]));
    a.bias = op.bias;
    state_.ready = kNothing;
    const bool shared = ranks() && &op != state_.o;  // attention's output matrix is whole on every rank
    const bool stores = op.norm || lora_apart() || shared;
    if (!stores && stream_k(a) && stream_k_leads_on(a, op)) return add_stream_k(a, a.tokens);
    if (stores || stream_k(a)) {  // a norm of what is added; or the next rows' kernel adds it
      a.out = sum(), a.out_stride = H_;
      store(a);
      if (shared) add_ranks();
      adapt(weight, input(weight, at_.act[op.side]), sum());
      return add_sum(next(&op), op.norm, op.eps, op.scale);
    }
    add_to_residual(a, op.scale);
    if (!tap(a, next(&op))) lead_on(a, next(&op), skinny_grid(device(), a, kResidual));
    plan_skinny(list_, a, kResidual);
  }

  void operator()(const GateUpOp& op) {
    GemmArgs a = normed_product(op);
    state_.ready = kNothing;
    a.bias = op.bias, a.activation = static_cast<int>(op.activation);
    if (!lora_apart() && stream_k(a) && stream_k_fuses_gate(a)) return add_stream_k(a, a.tokens);
    if (stream_k(a) || lora_apart()) return wide_gate_up(a, Weight(op.blob));
    plan_skinny(list_, a, kActivation);
  }

  void operator()(const RoutedOp& op) {
    const GpuHeader& router = Weight(op.blob).header();
    const bool tapped = state_.ready == kRouted;
    uint8_t* const routed = base_ + at_.routed;
    if (!tapped) {
      GemmArgs a = normed_product(op);
      a.out = reinterpret_cast<float*>(routed), a.out_stride = router_stride(router);
      a.late = true;  // so that the experts' kernels may read the residual, and the second one the choice, while this one works
      plan_skinny(list_, a, kStore);
    }
    state_.ready = kNothing;
    const RowSource from = rows(norm_of(op));
    GemmArgs d = routed_down(op);
    const bool stores = op.post_norm || ranks();
    if (stores) {
      d.epilogue = kStore, d.out = sum(), d.out_stride = H_;
    } else {
      d.epilogue = kResidual;
      add_to_residual(d, op.scale);
      lead_on(d, next(&op), skinny_grid(device(), d, kResidual));
    }
    plan_routed(list_, op, router, tapped, from, routed, d, s_.tokens, s_.capacity);
    if (ranks()) add_ranks();
    if (stores) add_sum(next(&op), op.post_norm, op.post_eps, op.scale);
  }

  // The stream leaves the workspace; whatever was to be added to it has been (add_sum).
  void operator()(const ResidualOutOp&) { list_.add_copy(s_.logits, residual(), static_cast<size_t>(s_.tokens) * H_ * 4); }

  void operator()(const HeadOp& op) {
    if (s_.logit_count == 0) return;
    GemmArgs a = normed_product(op);
    const Weight weight(op.blob);
    a.bias = op.bias, a.out = s_.logits, a.out_stride = weight.header().N;
    if (ranks()) a.out += s_.vocab[s_.peers.rank], a.out_stride = s_.vocab[s_.peers.size];
    const PersistentOp alone{a, weight.head, weight.blob, kStore};
    const bool chain = state_.chained && a.squares && persistent_tokens(device(), &alone, 1);
    if (chain)
      plan_persistent(list_, &alone, 1, base_ + at_.chain, at_.persistent_bytes);
    else
      store(a);
    if (ranks()) {
      auto all = zeroed<ExchangeArgs>();
      all.peers = next_exchange(), all.x = a.out, all.x_stride = all.out_stride = a.out_stride, all.rows = s_.logit_count;
      all.out = s_.logits;
      std::copy(s_.vocab, s_.vocab + kMaxRanks + 1, all.first);
      return plan_exchange(list_, all);
    }
    if (chain || !lora_apart()) return;
    LoraArgs change = lora_args(weight, input(weight, at_.normed, s_.logit_count), a.out);
    change.of.rows = s_.logit_rows;
    plan_lora(list_, change, s_.logit_count);
  }

 private:
  LaunchList& list_;
  const Program& program_;
  const int H_;
  const GpuStep& s_;
  uint8_t* const base_;
  const Layout& at_;
  float* lora_head_ = nullptr;  // what adapters inside chains and stream-K GEMMs share (step.h)
  Choice choice_;               // set once
  const Op* at_op_;             // the next one
  State state_;
};

}  // namespace

int64_t lora_sums(const Program& program, int64_t width) {
  const int64_t chunks = lora_most_chunks(program);
  return kLoraRows * chunks * width + lora_head_floats(width) + kLoraChainSets * 2 * lora_chain_set(width) + lora_set_floats(width);
}

std::string step_workspace(const Device& device, const Program& program, int capacity, size_t& bytes, int64_t& width) {
  Layout layout{};
  const std::string wrong = lay_out(device, program, capacity, layout);
  if (!wrong.empty()) return wrong;
  bytes = layout.bytes, width = program.head() ? Weight(program.head()->blob).header().N : program.hidden();
  return "";
}

std::string plan_step(LaunchList& list, const Program& program, const GpuStep& step, uint8_t* workspace, size_t bytes,
                      const std::function<void()>& after_op) {
  if (step.tokens > step.capacity)
    return "the step has " + std::to_string(step.tokens) + " tokens; expected at most " + std::to_string(step.capacity) +
           ", which the workspace was made for";
  Layout layout{};
  const std::string wrong = lay_out(list.device, program, step.capacity, layout);
  if (!wrong.empty()) return wrong;
  if (layout.bytes > bytes)
    return "the workspace has " + std::to_string(bytes) + " bytes; expected at least " + std::to_string(layout.bytes) + " for " +
           std::to_string(step.capacity) + " tokens";
  Planner planner(list, program, step, workspace, layout);
  while (planner.next_op())
    if (after_op && !list.failed()) after_op();
  if (!list.failed()) return "";
  const Op* op = program.first();
  for (int i = 0; i < list.op; i++) op = program.next(op);
  return std::string(op_name(op)) + ", op " + std::to_string(list.op) + " of the program: " + list.failed();
}

std::vector<Zeros> step_zeros(const Device& device, const Program& program, const GpuStep& step, uint8_t* workspace) {
  Layout layout{};
  if (!lay_out(device, program, step.capacity, layout).empty()) return {};
  std::vector<Zeros> zeros;
  for (const size_t at : layout.lamport_qkv) zeros.push_back({workspace + at, layout.lamport_bytes});
  if (step.lora.adapters) zeros.push_back({lora_sets(program, step), static_cast<size_t>(lora_set_floats(step.lora_width)) * 4});
  return zeros;
}

}  // namespace exl2nb
