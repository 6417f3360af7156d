#include "cuda/runtime/step.h"

#include <algorithm>

#include "cuda/gemm/persistent/persistent_gemm.h"
#include "cuda/gemm/skinny/skinny_gemm.h"
#include "cuda/gemm/stream_k/stream_k_gemm.h"
#include "cuda/moe/moe.h"
#include "cuda/runtime/elementwise.h"
#include "cuda/runtime/step_attention.h"
#include "cuda/runtime/step_plan.h"
#include "format/program.h"

namespace exl2nb {
namespace {

// One walk over a program.
class Walker {
 public:
  Walker(const int64_t* code, int64_t words, const GpuStep& step, uint8_t* workspace, const Layout& layout, cudaStream_t stream, bool pdl)
      : end_(code + words), H_(static_cast<int>(code[4])), s_(step), base_(workspace), at_(layout), stream_(stream), pdl_(pdl) {
    many_ = all_many(code + kHeaderWords);
  }

  // at: where it stopped when something went wrong.
  const char* run(const int64_t* w, const int64_t*& at) {
    for (; w < end_; w += kWords[w[0]]) {
      at = w;
      look_ahead(w + kWords[w[0]]);
      const char* wrong = nullptr;
      switch (w[0]) {
        case kOpEmbed:
          wrong = embed(w);
          break;
        case kOpQkv:
          wrong = qkv(w);
          break;
        case kOpAttention:
          wrong = attention(w);
          break;
        case kOpResidual:
          if (!chain(w, wrong)) wrong = add(w);
          break;
        case kOpGateUp:
          wrong = gate_up(w);
          break;
        case kOpRouted:
          wrong = routed(w);
          break;
        default:
          wrong = head(w);
      }
      if (wrong) return wrong;
    }
    return nullptr;
  }

 private:
  enum Ready { kNothing, kNormed, kUnscaled, kRouted };  // what lies in the buffer of normed inputs; kRouted: the router is through, too

  float* residual() const { return reinterpret_cast<float*>(base_ + at_.residual[side_]); }
  float* other_residual() { return reinterpret_cast<float*>(base_ + at_.residual[side_ ^= 1]); }
  float* sum() const { return reinterpret_cast<float*>(base_ + at_.sum); }
  // What comes behind a product of many tokens: the op at w.
  void look_ahead(const int64_t* w) {
    ahead_ = {};
    if (!many_) return;
    for (; w < end_ && w[0] == kOpAttention; w += kWords[w[0]]) ahead_.keys = attention_keys(s_, w);
    if (w >= end_) return;
    const Weight weight(w[w[0] == kOpResidual ? 1 : 3]);
    const GpuHeader& h = weight.header();
    ahead_.image = weight.blob + h.image, ahead_.bytes = (image_bytes(h.num_items, h.num_units, h.num_parts) + 15) / 16 * 16;
  }
  // The input of the matrix, at a place, for so many tokens.
  MatrixInput input(const Weight& w, size_t at, int tokens) const {
    MatrixInput in;
    set_input(in, w.head, w.blob, reinterpret_cast<half*>(base_ + at), stream_k_rows(s_.capacity));
    in.group = group(tokens);
    return in;
  }
  MatrixInput input(const Weight& w, size_t at) const { return input(w, at, s_.tokens); }
  // How products of so many tokens want their inputs (fragment.cuh): those of stream_k_gemm.h in groups. A step has all its products there,
  // or none.
  int group(int tokens) const { return many_ && tokens >= s_.many && tokens > kSkinnyTokens ? stream_k_group(tokens) : 0; }
  bool many(const GemmArgs& a) const { return group(a.tokens) != 0 && !a.rows; }
  bool all_many(const int64_t* w) const {
    if (!s_.many || s_.tokens < s_.many) return false;
    for (; w < end_; w += kWords[w[0]]) {
      if (w[0] == kOpRouted) return false;
      if (w[0] == kOpEmbed || w[0] == kOpAttention) continue;
      GemmArgs a{};
      const Weight weight(w[w[0] == kOpResidual ? 1 : 3]);
      set_weights(a, weight.head, weight.blob);
      a.tokens = s_.tokens;
      if (!stream_k_takes(a)) return false;
    }
    return true;
  }
  static NormArgs norm(int64_t weight, int64_t eps, int64_t bias, bool layer, int width) {
    return {weight == 0 ? kNoNorm : layer ? kLayerNorm : kRmsNorm, width, real(eps), address<float>(weight), address<float>(bias)};
  }
  // The norm in front of a QKV, GATE_UP, ROUTED or HEAD op.
  NormArgs norm_of(const int64_t* w) const {
    const int bias = w[0] == kOpQkv ? 17 : w[0] == kOpGateUp ? 6 : w[0] == kOpRouted ? 9 : 5;
    return norm(w[1], w[2], w[bias], w[bias + 1] & 1, H_);
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
  // A kernel that makes rows, all or the wanted ones, and adds what is to be added to all of them.
  const char* make_rows(const NormArgs& n, const MatrixInput& to, bool wanted = false) {
    RowSource from = rows(n);
    if (from.y) from.to = other_residual();
    added_ = {};
    return rows_launch({from, wanted ? s_.logit_rows : nullptr, s_.tokens, to}, wanted ? s_.logit_count : s_.tokens, stream_, pdl_);
  }
  // What the op at w makes of its normed input.
  static Epilogue epilogue_of(const int64_t* w) { return w[0] == kOpGateUp ? kActivation : kStore; }
  // The op's product without what it writes.
  GemmArgs product(const int64_t* w) const {
    const Weight weight(w[3]);
    GemmArgs a = matrix(weight, input(weight, at_.normed));
    a.gated = w[0] == kOpGateUp && w[8] != 0;
    if (w[0] == kOpGateUp) a.next = input(Weight(reader(w, end_, w[9])[1]), at_.act[w[9]]);
    if (w[0] == kOpHead) a.tokens = s_.logit_count;
    return a;
  }
  bool makes(const int64_t* w) const { return skinny_fuses_norm(product(w), epilogue_of(w), H_); }
  // The product of a QKV, GATE_UP, ROUTED or HEAD op with its normed input, which the kernel before has left, or a kernel makes now, or the
  // product itself.
  const char* normed_product(const int64_t* w, GemmArgs& a) {
    const NormArgs n = norm_of(w);
    const bool head = w[0] == kOpHead;
    const MatrixInput in = input(Weight(w[3]), at_.normed, head ? s_.logit_count : s_.tokens);
    a = product(w);
    if (ready_ == kUnscaled) {
      a.squares = reinterpret_cast<const float*>(base_ + at_.squares);
      a.squares_count = squares_, a.inverse_width = 1.f / static_cast<float>(H_), a.eps = n.eps;
    } else if (ready_ == kNothing && makes(w)) {
      a.from = rows(n);
      std::copy(std::begin(in.inverse), std::end(in.inverse), a.inverse);
      if (added_.y && !head) a.from.to = other_residual();
      added_ = {};
    } else if (ready_ == kNothing || head) {
      if (const char* wrong = make_rows(n, in, head)) return wrong;
      return nullptr;
    }
    if (head) a.rows = s_.logit_rows, a.last_row = s_.tokens - 1;
    return nullptr;
  }

  const char* embed(const int64_t* w) {
    EmbedArgs a{};
    a.ids = s_.ids, a.positions = s_.positions, a.table = address<void>(w[1]), a.dtype = static_cast<int>(w[2]);
    a.vocab = static_cast<int>(w[3]), a.width = H_, a.scale = real(w[5]), a.position_table = address<void>(w[6]);
    a.position_dtype = static_cast<int>(w[7]), a.max_positions = static_cast<int>(w[8]), a.x = residual();
    const int64_t* next = w + kWords[kOpEmbed];
    if (next < end_ && next[0] == kOpQkv) {
      a.next = input(Weight(next[3]), at_.normed), a.norm = norm_of(next);
      ready_ = kNormed;
    }
    return embed_launch(a, s_.tokens, stream_, pdl_);
  }

  // A product that only writes its sums.
  const char* store(const GemmArgs& a) {
    return many(a) ? stream_k_launch(a, group(a.tokens), ahead_, base_ + at_.many, stream_, pdl_) : skinny_launch(a, kStore, stream_, pdl_);
  }

  const char* qkv(const int64_t* w) {
    GemmArgs a;
    if (const char* wrong = normed_product(w, a)) return wrong;
    a.out = reinterpret_cast<float*>(base_ + at_.qkv), a.out_stride = Weight(w[3]).header().N, a.bias = address<float>(w[4]);
    last_qkv_ = w, early_ = nullptr;
    ready_ = kNothing;
    // In front of chains a chain of its own, which is quicker and whose sums attention can look for.
    const int64_t *const then = w + kWords[w[0]], *const o = then < end_ ? then + kWords[then[0]] : end_;
    const Weight weight(w[3]);
    PersistentOp alone{a, weight.head, weight.blob, kStore};
    if (many(a) || o >= end_ || !chains(o) || !persistent_tokens(&alone, 1)) return store(a);
    announce(alone, then, w);
    return persistent_launch(&alone, 1, base_ + at_.chain, at_.persistent_bytes, stream_, pdl_);
  }

  const char* attention(const int64_t* w) {
    if (static_cast<size_t>(w[4]) >= static_cast<size_t>(s_.layers)) return "its layer has no pools";
    AttentionArgs a = attention_of(w, last_qkv_);
    a.early = early_ != nullptr;
    if (early_) a.qkv = early_;
    return attention_decode_launch(a, stream_, pdl_);
  }
  // The attention at w with the QKV op q.
  AttentionArgs attention_of(const int64_t* w, const int64_t* q) const {
    AttentionArgs a = attention_args(s_, w, q, input(Weight(reader(w, end_, 0)[1]), at_.act[0]));
    a.qkv = reinterpret_cast<float*>(base_ + at_.qkv);
    a.workspace = base_ + at_.attention, a.workspace_bytes = at_.attention_bytes;
    return a;
  }
  // Whether the attention at w, with the QKV op q, can look for what a chain before it writes, and a chain of one launch follows, which
  // puts zeros there again.
  bool looks(const int64_t* w, const int64_t* q) {
    if (w >= end_ || w[0] != kOpAttention || w[4] < 0 || w[4] >= s_.layers) return false;
    const int64_t* o = w + kWords[w[0]];
    if (o >= end_ || o != reader(w, end_, 0) || s_.tokens > kPersistentTokens) return false;
    return chains(o) >= s_.tokens && attention_looks(attention_of(w, q));
  }
  // Lets what is the last of a chain, the QKV op q, announce its sums, if the attention at w can look for them.
  void announce(PersistentOp& last, const int64_t* w, const int64_t* q) {
    if (!looks(w, q)) return;
    early_ = reinterpret_cast<float*>(base_ + at_.early[early_turn_ ^= 1]);
    last.a.out = early_, last.lamport = true;
  }
  // Tokens of a launch of the chain that begins with attention's output at w; 0: none does.
  int chains(const int64_t* w) {
    if (w[0] != kOpResidual || s_.tokens > kSkinnyTokens || !s_.many) return 0;
    PersistentOp link[4] = {};
    const int64_t* op[4];
    const Ready ready = ready_;
    const int squares = squares_, count = links(w, link, op);
    ready_ = ready, squares_ = squares;
    return count ? persistent_tokens(link, count) : 0;
  }

  const char* add(const int64_t* w) {
    const Weight weight(w[1]);
    GemmArgs a = matrix(weight, input(weight, at_.act[w[6]]));
    a.bias = address<float>(w[2]);
    ready_ = kNothing;
    const bool leads = !w[3] && many(a) && many_lead_on(a, w, w + kWords[kOpResidual]);
    if (leads) return stream_k_launch(a, group(a.tokens), ahead_, base_ + at_.many, stream_, pdl_);
    if (w[3] || many(a)) {  // a norm of what is added; or the next rows' kernel adds it
      a.out = sum(), a.out_stride = H_;
      if (const char* wrong = store(a)) return wrong;
      return add_sum(w + kWords[kOpResidual], w[3], w[4], w[5]);
    }
    a.residual = residual(), a.residual_stride = H_, a.scale = real(w[5]);
    if (!tap(a, w + kWords[kOpResidual])) lead_on(a, w + kWords[kOpResidual]);
    return skinny_launch(a, kResidual, stream_, pdl_);
  }

  // What follows a product in a chain.
  void scaled(GemmArgs& a, const int64_t* next) const {
    a.inverse_width = 1.f / static_cast<float>(H_), a.eps = norm_of(next).eps, a.bias = address<float>(next[4]);
  }
  // The chain that begins with attention's output at w, if the ops are such: its links, the ops behind which they stand. Returns their
  // number.
  int links(const int64_t* w, PersistentOp (&link)[4], const int64_t* (&op)[4]) {
    const auto next = [&](const int64_t* v) { return v < end_ ? v + kWords[v[0]] : end_; };
    const auto rms = [&](const int64_t* v) { return norm_of(v).kind == kRmsNorm && !norm_of(v).bias; };
    op[0] = w;
    for (int i = 1; i < 4; i++) op[i] = next(op[i - 1]);
    const int64_t *const up = op[1], *const down = op[2], *const then = op[3];
    if (w[3] || w[6] != 0 || then >= end_ || up[0] != kOpGateUp || down[0] != kOpResidual) return 0;
    if (down[3] || down[6] != up[9] || !rms(up) || (then[0] == kOpQkv && !rms(then))) return 0;
    const auto adds = [&](const int64_t* v, const int64_t* to) {  // v's product, which leads on to the op at `to`
      const Weight m(v[1]);
      GemmArgs a = matrix(m, input(m, at_.act[v[6]]));
      a.bias = address<float>(v[2]), a.residual = residual(), a.residual_stride = H_, a.scale = real(v[5]);
      ready_ = kNothing;
      lead_on(a, to);
      return a;
    };
    const Weight O(w[1]), U(up[3]), D(down[1]), Q(then[3]);
    link[0] = {adds(w, up), O.head, O.blob, kResidual, beside(last_qkv_)};
    link[1] = {product(up), U.head, U.blob, kActivation};
    link[2] = {adds(down, then), D.head, D.blob, kResidual};
    scaled(link[1].a, up), link[1].a.activation = static_cast<int>(up[5]);
    if (then[0] != kOpQkv) {
      squares_ = persistent_ctas(link, 3);
      return 3;
    }
    link[3] = {product(then), Q.head, Q.blob, kStore};
    scaled(link[3].a, then), link[3].a.out = reinterpret_cast<float*>(base_ + at_.qkv), link[3].a.out_stride = Q.header().N;
    return 4;
  }
  // The products from attention's output at w to the next QKV in one launch (persistent_gemm.h), where they can be: w is then the last of
  // them. One to eight tokens, always or never; and not where nine or more must give the same bits as they.
  bool chain(const int64_t*& w, const char*& wrong) {
    if (!chains(w)) return false;
    PersistentOp link[4] = {};
    const int64_t* op[4];
    const int count = links(w, link, op);
    if (early_) link[0].clear = early_, link[0].clear_count = s_.tokens * Weight(last_qkv_[3]).header().N / 4;
    early_ = nullptr;
    if (count == 4) last_qkv_ = op[3], announce(link[3], op[3] + kWords[op[3][0]], op[3]);
    wrong = persistent_launch(link, count, base_ + at_.chain, at_.persistent_bytes, stream_, pdl_);
    chained_ = true;
    w = op[count - 1];
    if (count == 4) ready_ = kNothing;
    return true;
  }

  // Lets a product that adds to the residual also be the router of the op at `next`, if it can.
  bool tap(GemmArgs& a, const int64_t* next) {
    if (next >= end_ || next[0] != kOpRouted) return false;
    const Weight router(next[3]);
    if (!router_tap(next, router.head, router.blob, reinterpret_cast<float*>(base_ + at_.routed), a.router)) return false;
    a.next_norm = norm_of(next).weight, a.next_squares = reinterpret_cast<float*>(base_ + at_.squares);
    ready_ = kRouted;
    return true;
  }
  // Where a product that adds to the residual can also write the input of the op at `next`: its norm's weights and squares.
  void lead_on(GemmArgs& a, const int64_t* next) {
    if (next >= end_ || next[0] == kOpAttention || next[0] == kOpResidual) return;
    const NormArgs n = norm_of(next);
    if (n.kind != kRmsNorm || n.bias) return;
    a.next = input(Weight(next[3]), at_.normed), a.next_norm = n.weight;
    a.next_squares = reinterpret_cast<float*>(base_ + at_.squares);
    squares_ = skinny_grid(a, kResidual);
    ready_ = kUnscaled;
  }
  // The same for a product of many tokens, which otherwise only stores. w: its op. The head may be asked for fewer rows.
  bool many_lead_on(GemmArgs& a, const int64_t* w, const int64_t* next) {
    const bool reads = next < end_ && (next[0] == kOpQkv || next[0] == kOpGateUp || (next[0] == kOpHead && !s_.logit_rows));
    if (!reads) return false;
    const NormArgs n = norm_of(next);
    a.residual = residual(), a.residual_stride = H_, a.scale = real(w[5]);
    if (n.kind != kRmsNorm || n.bias || !stream_k_fuses_residual(a)) return false;
    a.next = input(Weight(next[3]), at_.normed), a.next_norm = n.weight;
    a.next_squares = reinterpret_cast<float*>(base_ + at_.squares);
    squares_ = stream_k_squares(H_), ready_ = kUnscaled;
    return true;
  }
  // residual += scale * norm(sum): the op at `next` does it where it can.
  const char* add_sum(const int64_t* next, int64_t weight, int64_t eps, int64_t scale) {
    added_ = {nullptr, sum(), nullptr, address<float>(weight), real(eps), real(scale), {}};
    ready_ = kNothing;
    const bool reads = next < end_ && (next[0] == kOpQkv || next[0] == kOpGateUp || next[0] == kOpHead);
    if (reads && (makes(next) || next[0] == kOpHead)) return nullptr;
    if (!reads && !(next < end_ && next[0] == kOpRouted)) return make_rows({}, {});
    ready_ = kNormed;
    return make_rows(norm_of(next), input(Weight(next[3]), at_.normed));
  }

  const char* gate_up(const int64_t* w) {
    GemmArgs a;
    if (const char* wrong = normed_product(w, a)) return wrong;
    ready_ = kNothing;
    a.bias = address<float>(w[4]), a.activation = static_cast<int>(w[5]);
    if (many(a) && stream_k_fuses_gate(a)) return stream_k_launch(a, group(a.tokens), ahead_, base_ + at_.many, stream_, pdl_);
    return many(a) ? wide_gate_up(a, Weight(w[3]).header().N) : skinny_launch(a, kActivation, stream_, pdl_);
  }
  // Both halves to memory, then the gate; so many tokens at a time as a launch takes.
  const char* wide_gate_up(const GemmArgs& all, int N) {
    for (int first = 0; first < all.tokens; first += kStreamKTokens) {
      GemmArgs a = all;
      a.tokens = std::min(kStreamKTokens, all.tokens - first), a.x += static_cast<size_t>(first) * a.x_stride;
      if (a.squares) a.squares += static_cast<size_t>(first) * a.squares_count;
      a.next.x += static_cast<size_t>(first) * a.next.stride;
      a.out = reinterpret_cast<float*>(base_ + at_.wide), a.out_stride = N;
      if (const char* wrong = stream_k_launch(a, group(all.tokens), ahead_, base_ + at_.many, stream_, pdl_)) return wrong;
      const GatesArgs gates{a.out, a.out_stride, a.part[0].outputs, a.gated, a.activation, a.next};
      if (const char* wrong = gates_launch(gates, a.tokens, stream_, pdl_)) return wrong;
    }
    return nullptr;
  }

  const char* routed(const int64_t* w) {
    const GpuHeader& router = Weight(w[3]).header();
    const bool tapped = ready_ == kRouted;
    uint8_t* const room = base_ + at_.routed;
    const int64_t* next = w + kWords[kOpRouted];
    if (!tapped) {
      GemmArgs a;
      if (const char* wrong = normed_product(w, a)) return wrong;
      a.out = reinterpret_cast<float*>(room), a.out_stride = router_stride(router);
      a.late = true;  // so that the experts' kernels may read the residual, and the second one the choice, while this one works
      if (const char* wrong = skinny_launch(a, kStore, stream_, pdl_)) return wrong;
    }
    ready_ = kNothing;
    const RowSource from = rows(norm_of(w));
    GemmArgs d = routed_down(w);
    if (w[14]) {
      d.epilogue = kStore, d.out = sum(), d.out_stride = H_;
    } else {
      d.epilogue = kResidual, d.residual = residual(), d.residual_stride = H_, d.scale = real(w[16]);
      lead_on(d, next);
    }
    if (const char* wrong = routed_launch(w, router, tapped, from, room, d, s_.tokens, s_.capacity, stream_, pdl_)) return wrong;
    return w[14] ? add_sum(next, w[14], w[15], w[16]) : nullptr;
  }

  const char* head(const int64_t* w) {
    if (s_.logit_count == 0) return nullptr;
    GemmArgs a;
    if (const char* wrong = normed_product(w, a)) return wrong;
    a.bias = address<float>(w[4]);
    a.out = s_.logits, a.out_stride = Weight(w[3]).header().N;
    const Weight weight(w[3]);
    const PersistentOp alone{a, weight.head, weight.blob, kStore};
    if (chained_ && a.squares && persistent_tokens(&alone, 1))
      return persistent_launch(&alone, 1, base_ + at_.chain, at_.persistent_bytes, stream_, pdl_);
    return store(a);
  }

  const int64_t* end_;
  int H_;
  const GpuStep& s_;
  uint8_t* base_;
  const Layout& at_;
  cudaStream_t stream_;
  bool pdl_;
  Ready ready_ = kNothing;
  RowSource added_{};  // y and what belongs to it: not yet added to the residual
  int squares_ = 0, side_ = 0;
  bool many_ = false, chained_ = false;
  float* early_ = nullptr;  // what the last QKV wrote, where it announces itself
  int early_turn_ = 0;
  StreamKNext ahead_{};
  const int64_t* last_qkv_ = nullptr;
};

}  // namespace

std::string step_workspace(const int64_t* code, int64_t words, int capacity, size_t& bytes, int64_t& vocab) {
  Layout layout{};
  const std::string wrong = plan(code, words, capacity, layout, vocab);
  bytes = layout.bytes;
  return wrong;
}

std::string step_launch(const int64_t* code, int64_t words, const GpuStep& step, void* workspace, size_t bytes, void* stream, bool pdl) {
  Layout layout{};
  int64_t vocab = 0;
  std::string wrong =
      step.tokens > step.capacity ? "more tokens than the workspace was made for" : plan(code, words, step.capacity, layout, vocab);
  if (!wrong.empty()) return wrong;
  if (layout.bytes > bytes)
    return "the workspace has " + std::to_string(bytes) + " bytes; expected at least " + std::to_string(layout.bytes) + " for " +
           std::to_string(step.capacity) + " tokens";
  Walker walker(code, words, step, static_cast<uint8_t*>(workspace), layout, static_cast<cudaStream_t>(stream), pdl);
  const int64_t* at = nullptr;
  const char* failed = walker.run(code + kHeaderWords, at);
  if (!failed) return "";
  for (const size_t at : layout.early)
    cudaMemsetAsync(static_cast<uint8_t*>(workspace) + at, 0, layout.early_bytes, static_cast<cudaStream_t>(stream));
  int number = 0;
  for (const int64_t* w = code + kHeaderWords; w < at; w += kWords[w[0]]) number++;
  return std::string(kOpNames[at[0]]) + ", op " + std::to_string(number) + " of the program: " + failed;
}

}  // namespace exl2nb
