// Every thread is a member of a Team (parallel.h) and runs through the whole step. The columns of a matrix are divided among the threads,
// so a step reads each weight once and a core reads the same weights in every step; RoPE and attention are divided by sequences or heads.
// Cheap work whose whole result every thread needs, such as a norm, is repeated on each thread. A Llama layer is five phases: qkv,
// attention, output, gate and up with the activation of their columns, down; the inputs of a product are quantised in a phase before it,
// those of a single short row by each thread for itself.
#include "fused_step.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "parallel.h"

namespace exl2nb {
namespace {

constexpr int kDenseTiles = 6;  // of one call: four times three registers of AVX2
// Prefetched by a thread while it waits: bytes at most, and lines between two looks at the barrier. 2 to 4 % of the step of half of
// Llama-3-8B in a loop on 16 threads of an Emerald Rapids Xeon, nothing beside a GPU (benchmarks/log/2026-11-27.md).
constexpr int64_t kAheadBytes = int64_t(512) << 10;
constexpr int kAheadLines = 4;
// Inputs of one row that each thread quantises for itself, up to so many: 2 us for 4096, a barrier and fetching others' codes take longer.
constexpr int64_t kOwnInputs = 8192;
constexpr int64_t kHeadBytes = int64_t(128) << 10;  // keys of a head, and as many values, prefetched before attention

// Sizes of the shared and the per-thread buffers, for one row.
struct Sizes {
  int64_t q = 1, act = 1, side = 0, columns = 1, codes = 0, own_codes = 0, widest = 1;
  int per_kv = 1;
};

// The codes of a product's rows in the stored order of one of its parts.
struct Codes {
  int64_t ldq, k_blocks;
  uint8_t* at;
  int64_t side(int64_t rows) const { return align64(rows * k_blocks * 4); }
  int64_t bytes(int64_t rows) const { return 2 * side(rows) + align64(rows * ldq * 2); }
  float* scale() const { return reinterpret_cast<float*>(at); }
  int32_t* sum(int64_t rows) const { return reinterpret_cast<int32_t*>(at + side(rows)); }
  int16_t* codes(int64_t rows) const { return reinterpret_cast<int16_t*>(at + 2 * side(rows)); }
};

// Calls f(part, codes) once per stored order among the quantised parts of a blob; their codes are stored one after another in `memory`,
// or nowhere where that is null: for their sizes alone.
template <class F>
void each_order(const uint8_t* blob, int64_t rows, uint8_t* memory, const F& f) {
  for (int i = 0; i < header(blob).num_parts; i++) {
    const BlobPart& part = parts(blob)[i];
    bool known = !quantised(part);
    for (int j = 0; j < i && !known; j++) known = quantised(parts(blob)[j]) && parts(blob)[j].perm == part.perm;
    if (known) continue;
    const int64_t stored = stored_rows(blob, part);
    const Codes codes{stored + kQuantPad, stored / kKBlockRows, memory};
    if (memory) memory += codes.bytes(rows);
    f(part, codes);
  }
}

int64_t align_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

bool has_dense_part(const uint8_t* blob) {
  return std::any_of(parts(blob), parts(blob) + header(blob).num_parts, [](const BlobPart& p) { return !quantised(p); });
}

// Whether gate and up are parts of the same shape, so that the same columns of both can be computed by the same thread.
bool paired(const Op* op) {
  const auto* gate_up = as<GateUpOp>(op);
  if (!gate_up || !gate_up->gated) return false;
  const BlobPart* p = parts(gate_up->blob);
  return header(gate_up->blob).num_parts == 2 && p[0].outputs == p[1].outputs && p[0].first_output == 0;
}

// First weights of a share of an op's matrix.
const uint8_t* share_start(const Op* op, int64_t share, int64_t shares) {
  const uint8_t* blob = matrix_of(op);
  return tile_weights(blob, (paired(op) ? parts(blob)[0].tiles : tiles_of(blob)) * share / shares);
}

Sizes sizes_of(const Program& program, int64_t rows) {
  Sizes s;
  for (const Op* op = program.first(); op; op = program.next(op)) {
    if (const auto* qkv = as<QkvOp>(op)) {
      const int64_t width = qkv->num_heads * qkv->head_dim;
      s.q = std::max(s.q, width), s.act = std::max(s.act, width);
      s.per_kv = std::max(s.per_kv, int(qkv->num_heads / qkv->num_kv_heads));
    }
    const uint8_t* blob = matrix_of(op);
    if (!blob) continue;
    const BlobHeader& h = header(blob);
    if (const auto* gate_up = as<GateUpOp>(op)) {
      int64_t& width = gate_up->side ? s.side : s.act;
      width = std::max<int64_t>(width, h.N / (gate_up->gated ? 2 : 1));
    }
    if (!as<HeadOp>(op)) s.columns = std::max<int64_t>(s.columns, h.N);
    s.widest = std::max<int64_t>(s.widest, h.K);
    int64_t codes = 0;
    each_order(blob, rows, nullptr, [&](const BlobPart&, const Codes& c) { codes += c.bytes(rows); });
    s.codes = std::max(s.codes, codes);
    if (rows == 1 && h.K <= kOwnInputs) s.own_codes = std::max(s.own_codes, codes);
  }
  return s;
}

// Whether no sequence has more than one token.
bool one_token_each(const StepBatch& b) {
  bool one = true;
  for (int64_t s = 0; s < b.sequences; s++) one &= b.cu_seqlens[s + 1] - b.cu_seqlens[s] <= 1;
  return one;
}

}  // namespace

// Shared by the threads of a step.
struct FusedStep::Shared {
  const Program program;
  const StepBatch& b;
  float* out;
  const Draws draws;
  const Sizes sizes;
  const int64_t rows, per_thread;  // rows: of the largest product; per_thread: floats of what each thread has for itself
  const bool single;               // no sequence has more than one token
  const int64_t width;             // floats between two rows of `low`: the largest width of an adapter's change
  Team team;
  Buffer<float> x, q, act, side, columns, thread_buffers, low;  // low: what adapters make of a product's inputs
  Buffer<uint8_t> codes;
  Shared(const Program& program, const StepBatch& b, float* out, const Draws& draws, int64_t threads)
      : program(program),
        b(b),
        out(out),
        draws(draws),
        sizes(sizes_of(program, std::max(b.T, b.R))),
        rows(std::max(b.T, b.R)),
        per_thread(align64(rows * sizes.widest + sizes.widest + 1) +
                   align64(attention_scratch(std::max(64, sizes.per_kv), b.page_size, b.head_dim)) + align64(sizes.own_codes / 4)),
        single(one_token_each(b)),
        width(b.lora ? b.lora.header().max_width : 0),
        team(threads),
        x(b.T * program.hidden()),
        q(b.T * sizes.q),
        act(b.T * sizes.act),
        side(b.T * sizes.side),
        columns(b.T * sizes.columns),
        thread_buffers(team.size() * per_thread),
        low(rows * width),
        codes(sizes.codes) {}
};

// One thread of a step. Unless a comment says otherwise, every thread does the same work.
class FusedStep::Worker {
 public:
  Worker(Shared& s, int64_t index)
      : s_(s),
        b_(s.b),
        member_(s.team, index),
        normed_(s.thread_buffers + index * s.per_thread),
        padded_(normed_ + s.rows * s.sizes.widest),
        scratch_(normed_ + align64(s.rows * s.sizes.widest + s.sizes.widest + 1)),
        own_codes_(reinterpret_cast<uint8_t*>(normed_ + s.per_thread - align64(s.sizes.own_codes / 4))),
        step_changes_(s.b) {}

  void run() {
    const Program& program = s_.program;
    for (const Op* op = program.first(); op; op = program.next(op), index_++) {
      next_op_ = nullptr;
      for (const Op* o = program.next(op); o && !next_op_; o = program.next(o))
        if (matrix_of(o)) next_op_ = o;
      if (matrix_of(op)) expect_next();
      changes_ = step_changes_.of(index_, op->code == HeadOp::kCode);
      visit(op, *this);
    }
    if (s_.draws.out) draw();
  }

  void operator()(const EmbedOp&) {}  // done before
  void operator()(const QkvOp& op) {
    qkv_ = &op;
    OwnRows rows{s_.x, norm_of(op)};
    prepare(op.blob, rows, int(b_.T));
    prefetch_head();
    columns(op.blob, rows, int(b_.T), op.bias, s_.columns, false);
  }
  // Divided by sequences; with fewer sequences than threads, by their heads. A head is rotated by the task that attends with it where each
  // sequence has one token; elsewhere its keys are first stored, in a phase of their own.
  void operator()(const AttentionOp& op) {
    const Attention a = attention_of(op, b_, int(qkv_->num_heads));
    const bool whole = b_.sequences >= member_.size;
    const bool cut_first = qkv_->clip > 0 && (qkv_->q_norm_whole || qkv_->k_norm_whole);  // all heads, before the norm of one
    const bool together = whole || (s_.single && !cut_first);
    const auto attend = [&](int64_t sequence, int kv_head) {
      const int block = attention_block(a), n = a.cu_seqlens[sequence + 1] - a.cu_seqlens[sequence];
      for (int first = 0; first < n; first += block) {
        AttentionTask t = attention_task(s_.q, a, s_.act, {sequence, first, std::min(block, n - first)}, kv_head);
        const int64_t next = sequence * a.num_kv_heads + kv_head + 1, all = b_.sequences * a.num_kv_heads;
        if (next < (whole ? all : all * (member_.index + 1) / member_.size)) {
          t.next_pages = a.block_table + next / a.num_kv_heads * a.max_pages;
          t.next_context = a.context_lens[next / a.num_kv_heads];
          t.next_kv_head = next % a.num_kv_heads;
        }
        t.scratch = scratch_;
        kernels().attention(t);
      }
    };
    const int per_task = whole ? a.num_kv_heads : 1;
    if (!together) each(b_.sequences, [&](int64_t sequence) { rotate(sequence, 0, a.num_kv_heads); });
    each(b_.sequences * a.num_kv_heads / per_task, [&](int64_t i) {
      const int64_t sequence = i * per_task / a.num_kv_heads;
      const int first = int(i * per_task % a.num_kv_heads);
      if (together) rotate(sequence, first, first + per_task);
      for (int head = first; head < first + per_task; head++) attend(sequence, head);
    });
  }
  void operator()(const ResidualOp& op) {
    const float* in = op.side ? s_.side : s_.act;
    const Norm norm{op.norm, float(op.eps)};
    const float scale = float(op.scale);
    const bool direct = !norm.weight && scale == 1.0f && !changes_;
    product(op.blob, in, int(b_.T), {nullptr, 0.0f}, op.bias, direct ? s_.x : s_.columns, direct, direct || norm.weight ? nullptr : &scale);
    if (!norm.weight) return;
    const int H = int(s_.program.hidden());
    each(b_.T, [&](int64_t t) {
      float *x = s_.x + t * H, *out = s_.columns + t * H;
      normalize(out, 1, H, norm, out, change(t));
      for (int i = 0; i < H; i++) x[i] += scale * out[i];
    });
  }
  void operator()(const GateUpOp& op) {
    const uint8_t* blob = op.blob;
    const int M = int(b_.T), N = header(blob).N;
    float* to = op.side ? s_.side : s_.act;
    if (!paired(&op)) {
      product(blob, s_.x, M, norm_of(op), op.bias, s_.columns, false);
      const int64_t I = op.gated ? N / 2 : N;
      return each(M, [&](int64_t m) { activate_pairs(s_.columns + m * N, 1, I, int(op.activation), op.gated != 0, to + m * I); });
    }
    const BlobPart &gate = parts(blob)[0], &up = parts(blob)[1];
    const int I = N / 2;
    const int64_t count = shares(gate.tiles);
    OwnRows rows{s_.x, norm_of(op)};
    prepare(blob, rows, M);
    const Output out{s_.columns, N, op.bias, false};
    each(count, [&](int64_t i) {
      const float* x = own_rows(blob, rows, M);
      const int first = int(share_of(gate.tiles, i, count)), end = int(share_of(gate.tiles, i + 1, count));
      if (first == end) return;
      const uint8_t* next = after(i, count);
      const int column = first * kTile, columns = std::min(end * kTile, I) - column;
      if (changes_) expect_up(changes_, M, column, columns), expect_up(changes_, M, I + column, columns);
      tiles(blob, gate, x, rows.codes, M, first, end, blob + up.data + first * up.tile_bytes, out);
      tiles(blob, up, x, rows.codes, M, first, end, next ? next : blob + gate.data + end * gate.tile_bytes, out);
      change_columns(M, column, columns, out), change_columns(M, I + column, columns, out);
      for (int64_t m = 0; m < M; m++) {
        const float* row = s_.columns + m * N + column;
        if (columns > 0) kernels().activate(row, row + I, columns, int(op.activation), to + m * I + column);
      }
    });
  }
  void operator()(const Op&) {}  // an `unfused_op`, never in such a program
  // Each thread normalises the rows that need logits for itself, whatever the format of the matrix.
  void operator()(const HeadOp& op) {
    const int H = int(s_.program.hidden()), R = int(b_.R);
    const uint8_t* blob = op.blob;
    const int64_t tasks = prepared(blob, R) + shares(tiles_of(blob));
    for (int r = 0; r < R && !member_.over(tasks); r++)
      normalize_or_copy(s_.x + int64_t(b_.logit_rows[r]) * H, H, norm_of(op), normed_ + int64_t(r) * H, change(r));
    if (R) product(blob, normed_, R, {nullptr, 0.0f}, op.bias, s_.out, false);
    vocab_ = header(blob).N;
  }
  void operator()(const ResidualOutOp&) {
    const int64_t H = s_.program.hidden();
    each(b_.T, [&](int64_t t) { std::memcpy(s_.out + t * H, s_.x + t * H, size_t(H) * sizeof(float)); });
  }

 private:
  // A range of weights to be prefetched.
  struct Ahead {
    const uint8_t *at = nullptr, *end = nullptr;
  };
  // Runs the tasks of a phase. A thread that has to wait for the others prefetches what it will read first of the next matrix, so that
  // memory is busy between products, too.
  template <class F>
  void each(int64_t count, const F& f) {
    member_.each(count, f, [this] {
      for (Ahead& a : ahead_) {
        if (a.at >= a.end) continue;
        for (int line = 0; line < kAheadLines; line++, a.at += 64) __builtin_prefetch(a.at, 0, 2);
        return true;
      }
      return false;
    });
  }
  // Sets what is prefetched while this thread waits, for one row: with more, the weights are in the cache.
  void expect_next() {
    ahead_[0] = ahead_[1] = {};
    if (!next_op_ || b_.T > 1) return;
    const uint8_t* blob = matrix_of(next_op_);
    const auto set = [&](Ahead& a, int64_t tiles, int64_t before, int64_t bytes) {
      const int64_t first = share_of(tiles, member_.index, member_.size);
      if (first >= tiles) return;
      const uint8_t* at = tile_weights(blob, before + first);
      a = {at, at + bytes};
    };
    if (!paired(next_op_)) return set(ahead_[0], tiles_of(blob), 0, kAheadBytes);
    const int64_t tiles = parts(blob)[0].tiles;
    set(ahead_[0], tiles, 0, kAheadBytes / 2), set(ahead_[1], tiles, tiles, kAheadBytes / 2);
  }
  struct OwnRows {  // of a product, and their codes; ready: this thread has done its own part
    const float* x;
    Norm norm;
    uint8_t* codes = nullptr;
    bool ready = false;
  };
  // Tasks that quantise a row: one, or, where there is no other row, one for each thread, which normalises all of it for itself.
  int64_t pieces(int M) const { return M > 1 || changes_ ? 1 : member_.size; }
  bool quantises_alone(const uint8_t* blob) const { return s_.rows == 1 && !changes_ && header(blob).K <= kOwnInputs; }
  // Tasks of the phase that prepares the inputs of a product.
  int64_t prepared(const uint8_t* blob, int M) const { return prepares_rows(blob) && !quantises_alone(blob) ? M * pieces(M) : 0; }
  // Inputs of a product of M rows: as codes divided among the threads, as are the first halves of the adapters' products.
  void prepare(const uint8_t* blob, OwnRows& rows, int M) {
    rows.codes = quantises_alone(blob) ? own_codes_ : s_.codes;
    if (const int64_t tasks = prepared(blob, M))
      each(tasks, [&](int64_t i) { prepare_row(blob, rows, M, i / pieces(M), i % pieces(M), pieces(M)); });
  }
  // One of `count` pieces of row m.
  void prepare_row(const uint8_t* blob, const OwnRows& rows, int M, int64_t m, int64_t piece, int64_t count) {
    const int K = header(blob).K;
    const float* x = rows.x + m * K;
    if (rows.norm.weight || has_padding(blob)) {
      normalize_or_copy(x, K, rows.norm, padded_, change(m));
      padded_[K] = 0;  // what padding rows read
      x = padded_;
    }
    if (changes_ && changes_[m]) lora_down(*changes_[m], x, K, s_.low + m * s_.width);
    each_order(blob, M, rows.codes, [&](const BlobPart& part, const Codes& c) {
      const auto* perm = part.perm ? reinterpret_cast<const int32_t*>(blob + part.perm) : nullptr;
      const int64_t first = c.k_blocks * piece / count, row = first * kKBlockRows, end = c.k_blocks * (piece + 1) / count * kKBlockRows;
      kernels().quantize(perm ? x : x + row, perm ? perm + row : nullptr, int(end - row), c.codes(M) + m * c.ldq + row,
                         c.scale() + m * c.k_blocks + first, c.sum(M) + m * c.k_blocks + first);
    });
  }
  // Inputs that each thread prepares for itself: codes of a single row, and what dense parts read, which is returned. In its first task,
  // as a task that is not done keeps later ops from writing to x.
  const float* own_rows(const uint8_t* blob, OwnRows& rows, int M) {
    const bool dense = rows.norm.weight && has_dense_part(blob);
    const int K = header(blob).K;
    if (!rows.ready && has_codes(blob) && quantises_alone(blob)) prepare_row(blob, rows, M, 0, 0, 1);
    for (int64_t m = 0; m < M && dense && !rows.ready; m++) normalize(rows.x + m * K, 1, K, rows.norm, normed_ + m * K, change(m));
    rows.ready = true;
    return dense ? normed_ : rows.x;
  }
  static bool has_padding(const uint8_t* blob) {
    return std::any_of(parts(blob), parts(blob) + header(blob).num_parts,
                       [&](const BlobPart& p) { return quantised(p) && stored_rows(blob, p) != header(blob).K; });
  }
  bool prepares_rows(const uint8_t* blob) const { return has_codes(blob) || changes_; }
  static bool has_codes(const uint8_t* blob) {
    return std::any_of(parts(blob), parts(blob) + header(blob).num_parts, [](const BlobPart& p) { return quantised(p); });
  }
  static void normalize_or_copy(const float* x, int K, Norm norm, float* y, Changes change) {
    norm.weight ? normalize(x, 1, K, norm, y, change) : void(std::memcpy(y, x, sizeof(float) * size_t(K)));
  }
  // Of one row of the current op.
  Changes change(int64_t row) const { return changes_ ? changes_ + row : nullptr; }
  // The second halves of the adapters' products: some columns of all rows.
  void change_columns(int M, int64_t first, int64_t columns, const Output& out) const {
    if (changes_) lora_up(changes_, M, s_.low, s_.width, first, columns, out.out + first, out.ld);
  }

  // The tiles [first, end) of a part; next: what is read after them, or null for the following bytes.
  void tiles(const uint8_t* blob, const BlobPart& part, const float* x, uint8_t* codes, int M, int first, int end, const uint8_t* next,
             const Output& out) {
    Rows rows{x, nullptr, nullptr, nullptr, header(blob).K, 0, M, stored_rows(blob, part)};
    each_order(blob, M, codes, [&](const BlobPart& of, const Codes& c) {
      if (quantised(part) && of.perm == part.perm) rows.codes = c.codes(M), rows.scale = c.scale(), rows.sum = c.sum(M), rows.ldq = c.ldq;
    });
    const int most = quantised(part) ? kTileBlock : kDenseTiles;
    for (; first < end; first += most) {
      rows.next = first + most < end ? nullptr : next;
      kernels().gemm(blob, part, rows, first, std::min(first + most, end), out);
    }
  }
  int64_t shares(int64_t tiles) const {
    const int64_t whole = member_.size * (b_.T == 1 ? kTileBlock : kDenseTiles);
    return member_.size * (std::max<int64_t>(1, (tiles + whole - 1) / whole) + (b_.T == 1));
  }
  // The first tile of share i of `count`. Of one row a share is a block of tiles, which are computed together; the last block of each
  // thread is two shares, so that the threads end together.
  int64_t share_of(int64_t tiles, int64_t i, int64_t count) const {
    if (b_.T > 1) return tiles * i / count;
    const int64_t each = count / member_.size, thread = i / each, share = i % each;
    const auto first_of = [&](int64_t t) { return std::min(tiles, align_up(tiles * t / member_.size, kTileBlock)); };
    const int64_t first = first_of(thread), end = first_of(thread + 1), blocks = (end - first + kTileBlock - 1) / kTileBlock;
    if (share < blocks) return first + share * kTileBlock;
    return share == blocks && blocks > 0 ? std::min(end, first + blocks * kTileBlock - kTileBlock / 2) : end;
  }
  // What is read after share i of `count` of the current matrix; null: the following bytes.
  const uint8_t* after(int64_t i, int64_t count) const {
    const int64_t each = count / member_.size;
    return (i + 1) % each == 0 && next_op_ ? share_start(next_op_, i / each, member_.size) : nullptr;
  }

  // out (M, N) = or += norm(x) @ matrix + bias. scale: not null: out times that is added to the residual.
  void product(const uint8_t* blob, const float* x, int M, Norm norm, const float* bias, float* out, bool add,
               const float* scale = nullptr) {
    OwnRows rows{x, norm};
    prepare(blob, rows, M);
    columns(blob, rows, M, bias, out, add, scale);
  }
  // The same with prepared inputs: columns divided among the threads.
  void columns(const uint8_t* blob, OwnRows& rows, int M, const float* bias, float* out, bool add, const float* scale = nullptr) {
    const int64_t all = tiles_of(blob), count = shares(all);
    each(count, [&](int64_t i) {
      const float* in = own_rows(blob, rows, M);
      int64_t first = share_of(all, i, count), end = share_of(all, i + 1, count);
      for (int p = 0; p < header(blob).num_parts; p++) {
        const BlobPart& part = parts(blob)[p];
        if (first < part.tiles && first < end) {
          const Output to{out, header(blob).N, bias, add};
          const int last = int(std::min<int64_t>(end, part.tiles));
          const int64_t column = part.first_output + first * kTile, own = std::min<int64_t>(last * kTile, part.outputs) - first * kTile;
          if (changes_) expect_up(changes_, M, column, own);
          tiles(blob, part, in, rows.codes, M, int(first), last, end <= part.tiles ? after(i, count) : nullptr, to);
          change_columns(M, column, own, to);
          for (int64_t m = 0; scale && m < M; m++) {
            float *residual = s_.x + m * to.ld + column, *y = out + m * to.ld + column;
            for (int64_t c = 0; c < own; c++) residual[c] += *scale * y[c];
          }
        }
        first = std::max<int64_t>(0, first - part.tiles), end -= part.tiles;
      }
    });
  }

  // Prefetches keys and values of the head with which this thread will attend, beside the product that all threads compute.
  void prefetch_head() const {
    const int64_t heads = qkv_->num_kv_heads, count = b_.sequences * heads, task = count * member_.index / member_.size;
    if (count > member_.size || task == count * (member_.index + 1) / member_.size) return;
    const int64_t sequence = task / heads, P = b_.page_size, most = kHeadBytes / pool_token_bytes(b_.k_kind, int(b_.head_dim));
    const auto* attention = as<AttentionOp>(s_.program.next(qkv_));
    const int64_t context = b_.context_lens[sequence], window = attention ? attention->window : 0;
    const int64_t first = window ? std::max<int64_t>(0, context - window) : 0, end = std::min(context, first + most);
    for (int64_t page = first / P * P; page < end; page += P) {
      const int64_t row = b_.block_table[sequence * b_.max_pages + page / P] * heads + task % heads, tokens = std::min(P, end - page);
      for (const bool values : {false, true}) {
        const CacheFormat kind = values ? b_.v_kind : b_.k_kind;
        const auto* pool = static_cast<const uint8_t*>((values ? b_.v_pools : b_.k_pools)[size_t(qkv_->layer)]);
        const uint8_t* at = pool + row * pool_row_bytes(kind, P, int(b_.head_dim));
        for (int64_t i = 0; i < tokens * pool_token_bytes(kind, int(b_.head_dim)); i += 64) __builtin_prefetch(at + i, 0, 2);
      }
    }
  }
  // RoPE of q and k of a sequence, KV heads [first, end) and their q heads; k and v go to their slots.
  void rotate(int64_t sequence, int first, int end) {
    const Heads heads = heads_of(*qkv_, b_);
    const Rope rope = rope_of(*qkv_, b_);
    const int64_t N = header(qkv_->blob).N, width = int64_t(heads.num_heads) * heads.head_dim;
    const int64_t per_kv = heads.num_heads / heads.num_kv_heads, k = heads.num_heads, v = k + heads.num_kv_heads;
    const size_t layer = size_t(qkv_->layer);
    for (int64_t t = b_.cu_seqlens[sequence]; t < b_.cu_seqlens[sequence + 1]; t++) {
      float* row = s_.columns + t * N;
      const auto clip = [&](int64_t from, int64_t to) {
        for (int64_t i = from * heads.head_dim; i < to * heads.head_dim; i++) row[i] = std::clamp(row[i], -rope.clip, rope.clip);
      };
      if (rope.clip > 0) clip(first * per_kv, end * per_kv), clip(k + first, k + end), clip(v + first, v + end);
      const int64_t at = int64_t(rope.positions[t]) * heads.half;
      kernels().rope_store(row, heads, first, end, rope.cos + at, rope.sin + at, rope.slots[t], s_.q + t * width, b_.k_pools[layer],
                           b_.v_pools[layer]);
    }
  }

  void draw() {
    const Draws& d = s_.draws;
    const int64_t width = 4 + 2 * d.top;
    each(b_.R,
         [&](int64_t r) { draw::draw_into(s_.out + r * vocab_, nullptr, vocab_, d.columns, d.settings[r], d.top, d.out + r * width); });
  }

  Shared& s_;
  const StepBatch& b_;
  Team::Member member_;
  float *normed_, *padded_, *scratch_;  // this thread's, as are these
  uint8_t* own_codes_;
  StepChanges step_changes_;
  Changes changes_ = nullptr;    // of the current op
  int64_t index_ = 0;            // of the current op
  Ahead ahead_[2];               // gate and up are two ranges
  const QkvOp* qkv_ = nullptr;   // the last one
  const Op* next_op_ = nullptr;  // the next op that has a matrix
  int64_t vocab_ = 0;
};

const Op* unfused_op(const Program& program) {
  const Op* op = program.first();
  while (as<EmbedOp>(op) || as<QkvOp>(op) || as<AttentionOp>(op) || as<ResidualOp>(op) || as<GateUpOp>(op) || as<HeadOp>(op) ||
         as<ResidualOutOp>(op))
    op = program.next(op);
  return op;
}

FusedStep::FusedStep(const Program& program, const StepBatch& b, float* out, const Draws& draws, int64_t threads)
    : shared_(std::make_unique<Shared>(program, b, out, draws, threads)) {
  run_embed(program.embed(), b, int(program.hidden()), shared_->x);
}

FusedStep::~FusedStep() = default;

void FusedStep::run(int64_t index) noexcept {
  const SerialScope alone;
  Worker(*shared_, index).run();
}

void FusedStep::run_on_all(int64_t first) noexcept {
  struct Context {
    FusedStep& step;
    int64_t first;
  } context{*this, first};
  run_on_threads(
      shared_->team.size() - first,
      [](void* p, int64_t thread) {
        auto& c = *static_cast<Context*>(p);
        c.step.run(c.first + thread);
      },
      &context);
}

}  // namespace exl2nb
