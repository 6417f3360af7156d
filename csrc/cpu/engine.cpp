#include "engine.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "parallel.h"

namespace exl2nb {
namespace {

// Below this many multiply-adds a second thread costs more than it saves (about 2 us).
constexpr int64_t kParallelWork = 60'000;
// And below this many numbers to be normed, rounded or passed through an activation.
constexpr int64_t kParallelNumbers = 4'000;
// Bytes of a matrix prefetched during the one before it; the kernels prefetch further on by themselves.
constexpr int64_t kFetched = 4096;

// Rows permuted to a stored order and quantised; parts of a matrix with the same order share them.
struct QuantizedRows {
  const float* x;
  int64_t perm, ldq;  // perm: offset in the blob
  const uint8_t* blob;
  int M, K, stored, first;  // first: rows of the orders before
  int16_t* codes;
  float* scale;
  int32_t* sum;
  int64_t bytes() const { return align64(M * ldq * 2) + 2 * align64(int64_t(M) * (stored / kKBlockRows) * 4); }
};
struct Task {
  int product, part, tile, end, row;
};
// The tasks of a call, computed before the threads start. Kept from call to call: a sparse layer has a hundred small products.
struct Schedule {
  std::vector<QuantizedRows> orders;
  std::vector<Rows> rows;   // of every part of every product
  std::vector<int> order;   // of each of them, -1 for none
  std::vector<int> begins;  // each product's first in rows
  std::vector<Task> tasks;
};

// The parts of a product, as rows and orders.
void add_rows(Schedule& schedule, const Product& p) {
  const int K = header(p.blob).K, begin = int(schedule.orders.size());
  schedule.begins.push_back(int(schedule.rows.size()));
  for (int i = 0; i < header(p.blob).num_parts; i++) {
    const BlobPart& part = parts(p.blob)[i];
    const int stored = stored_rows(p.blob, part);
    const int64_t ldq = stored + kQuantPad;
    int found = -1;
    if (quantised(part)) {
      for (found = begin; found < int(schedule.orders.size()) && schedule.orders[size_t(found)].perm != part.perm;) found++;
      if (found == int(schedule.orders.size())) {
        const int first = found ? schedule.orders.back().first + schedule.orders.back().M : 0;
        schedule.orders.push_back({p.x, part.perm, ldq, p.blob, p.M, K, stored, first, nullptr, nullptr, nullptr});
      }
    }
    schedule.rows.push_back({p.x, nullptr, nullptr, nullptr, K, ldq, p.M, stored});
    schedule.order.push_back(found);
  }
}

// Tasks of at most `wide` tiles and kRowBlock rows; a row block visits all tiles before the next one starts, so its activations stay in
// cache.
void add_tasks(Schedule& schedule, const Product* products, int index) {
  const Product& p = products[index];
  const BlobHeader& h = header(p.blob);
  const int64_t tiles = tiles_of(p.blob), blocks = (p.M + kRowBlock - 1) / kRowBlock;
  const int wide = int(std::clamp<int64_t>(tiles * blocks / (available_threads() * 4), 1, kTileBlock));
  for (int row = 0; row < p.M; row += kRowBlock)
    for (int i = 0; i < h.num_parts; i++)
      for (int t = 0; t < parts(p.blob)[i].tiles; t += wide)
        schedule.tasks.push_back({index, i, t, std::min(t + wide, parts(p.blob)[i].tiles), row});
}

void quantize_row(const QuantizedRows& o, int64_t m) {
  const float* row = o.x + m * o.K;
  const int64_t k_blocks = o.stored / kKBlockRows;
  std::vector<float> longer;
  if (o.stored != o.K) {  // padding rows read the zero after the row
    longer.assign(row, row + o.K);
    longer.push_back(0.0f);
    row = longer.data();
  }
  const auto* perm = o.perm ? reinterpret_cast<const int32_t*>(o.blob + o.perm) : nullptr;
  kernels().quantize(row, perm, o.stored, o.codes + m * o.ldq, o.scale + m * k_blocks, o.sum + m * k_blocks);
}

// Codes, scales and sums of all orders, in one piece of memory.
Buffer<uint8_t> quantize_all(Schedule& schedule) {
  int64_t bytes = 0, numbers = 0;
  for (const QuantizedRows& o : schedule.orders) {
    bytes += o.bytes();
    numbers += int64_t(o.M) * o.stored;
  }
  Buffer<uint8_t> memory(bytes);
  uint8_t* at = memory;
  for (QuantizedRows& o : schedule.orders) {
    const int64_t side = align64(int64_t(o.M) * (o.stored / kKBlockRows) * 4);
    o.scale = reinterpret_cast<float*>(at);
    o.sum = reinterpret_cast<int32_t*>(at + side);
    o.codes = reinterpret_cast<int16_t*>(at + 2 * side);
    at += o.bytes();
  }
  for (size_t i = 0; i < schedule.rows.size(); i++) {
    if (schedule.order[i] < 0) continue;
    const QuantizedRows& o = schedule.orders[size_t(schedule.order[i])];
    schedule.rows[i].codes = o.codes;
    schedule.rows[i].scale = o.scale;
    schedule.rows[i].sum = o.sum;
  }
  const int64_t rows = schedule.orders.empty() ? 0 : schedule.orders.back().first + schedule.orders.back().M;
  for_each_task(rows, numbers > kParallelNumbers, [&](int64_t i) {
    const auto after =
        std::upper_bound(schedule.orders.begin(), schedule.orders.end(), i, [](int64_t n, const QuantizedRows& o) { return n < o.first; });
    quantize_row(after[-1], i - after[-1].first);
  });
  return memory;
}

Rows slice(Rows r, int begin, int end) {
  const int64_t k_blocks = r.K / kKBlockRows;
  r.x += begin * r.ldx;
  if (r.codes) {
    r.codes += begin * r.ldq;
    r.scale += begin * k_blocks;
    r.sum += begin * k_blocks;
  }
  r.M = end - begin;
  return r;
}

// The first halves of the products of adapters with the rows of a product: claimed block by block, row by row, by the threads that begin
// the product's tasks, so that one multiplies the matrix while the other does this.
class LowRows {
 public:
  explicit LowRows(const Product& p) : p_(p), blocks_(widest(p) / 16), low_(p.M * blocks_ * 16) {}
  const float* of(int64_t m) const { return low_ + m * width(); }
  int64_t width() const { return blocks_ * 16; }
  // Computes one that no thread has begun, if any; all of them, and waits for those of other threads.
  void begin() {
    if (begun_.load(std::memory_order_relaxed) < count()) compute();
  }
  void finish() {
    while (compute()) {}
    for (int spins = 0; done_.load(std::memory_order_acquire) < count(); spins++) spin_wait(spins);
  }

 private:
  static int64_t widest(const Product& p) {
    int64_t width = 0;
    for (int m = 0; p.changes && m < p.M; m++) width = std::max(width, p.changes[m] ? p.changes[m]->width : 0);
    return width;
  }
  int64_t count() const { return p_.M * blocks_; }
  bool compute() {
    const int64_t i = begun_.load(std::memory_order_relaxed) < count() ? begun_.fetch_add(1, std::memory_order_relaxed) : count();
    if (i >= count()) return false;
    const int64_t m = i / blocks_, K = header(p_.blob).K;
    if (p_.changes[m]) lora_down(*p_.changes[m], p_.x + m * K, int(K), low_ + m * blocks_ * 16, i % blocks_, blocks_);
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }
  const Product& p_;
  const int64_t blocks_;  // of the widest change
  Buffer<float> low_;
  std::atomic<int64_t> begun_{0}, done_{0};
};

// Prefetches the first weights of a product: no task before it has.
void fetch_start(const Product& p, const Task& t) {
  const BlobPart& part = parts(p.blob)[t.part];
  const uint8_t* data = p.blob + part.data + t.tile * part.tile_bytes;
  for (int64_t i = 0; i < std::min<int64_t>(kFetched, part.tile_bytes); i += 64) __builtin_prefetch(data + i);
}

// What the thread that does task i probably reads after it: the next task's tiles, or, where its share of the tasks ends, the tiles of its
// share of the next matrix. Null: unknown.
const uint8_t* next_weights(const Product* products, const Schedule& schedule, int64_t i, const uint8_t* next_blob) {
  const int64_t count = int64_t(schedule.tasks.size()), threads = std::min(count, available_threads());
  const int64_t share = ((i + 1) * threads - 1) / count;  // the last one that begins at or before i
  if (i + 1 < count * (share + 1) / threads) {
    const Task& t = schedule.tasks[size_t(i + 1)];
    const uint8_t* blob = products[t.product].blob;
    return blob + parts(blob)[t.part].data + t.tile * parts(blob)[t.part].tile_bytes;
  }
  return next_blob ? tile_weights(next_blob, tiles_of(next_blob) * share / threads) : nullptr;
}

}  // namespace

int64_t tiles_of(const uint8_t* blob) {
  int64_t tiles = 0;
  for (int i = 0; i < header(blob).num_parts; i++) tiles += parts(blob)[i].tiles;
  return tiles;
}

const uint8_t* tile_weights(const uint8_t* blob, int64_t tile) {
  for (int i = 0; i < header(blob).num_parts; tile -= parts(blob)[i].tiles, i++)
    if (tile < parts(blob)[i].tiles) return blob + parts(blob)[i].data + tile * parts(blob)[i].tile_bytes;
  return blob;
}

void linear_each(const Product* products, int count, const uint8_t* next_blob) {
  static thread_local Schedule kept;
  Schedule& schedule = kept;  // named outside the tasks: another thread has another one
  schedule.orders.clear(), schedule.rows.clear(), schedule.order.clear(), schedule.begins.clear(), schedule.tasks.clear();
  int64_t work = 0;
  for (int p = 0; p < count; p++) {
    add_rows(schedule, products[p]);
    add_tasks(schedule, products, p);
    work += int64_t(products[p].M) * header(products[p].blob).K * header(products[p].blob).N;
  }
  const Buffer<uint8_t> quantized = quantize_all(schedule);
  LowRows low(products[0]);
  for_each_task(int64_t(schedule.tasks.size()), work > kParallelWork, [&](int64_t i) {
    const Task& t = schedule.tasks[size_t(i)];
    if (size_t(i) + 1 < schedule.tasks.size() && schedule.tasks[size_t(i) + 1].product != t.product)
      fetch_start(products[schedule.tasks[size_t(i) + 1].product], schedule.tasks[size_t(i) + 1]);
    const Product& p = products[t.product];
    const int N = header(p.blob).N;
    Rows rows = slice(schedule.rows[size_t(schedule.begins[size_t(t.product)] + t.part)], t.row, std::min(t.row + kRowBlock, p.M));
    rows.next = next_weights(products, schedule, i, next_blob);
    const BlobPart& part = parts(p.blob)[t.part];
    const int64_t first = part.first_output + t.tile * kTile, columns = std::min<int64_t>(t.end * kTile, part.outputs) - t.tile * kTile;
    if (p.changes) low.begin();
    if (p.changes) expect_up(p.changes + t.row, rows.M, first, columns);
    kernels().gemm(p.blob, part, rows, t.tile, t.end, {p.out + int64_t(t.row) * N, N, p.bias, p.add});
    if (p.changes) low.finish();
    const int64_t at = int64_t(t.row) * N + first;
    if (p.changes) lora_up(p.changes + t.row, rows.M, low.of(t.row), low.width(), first, columns, p.out + at, N);
    for (int m = 0; p.residual && m < rows.M; m++)
      for (int64_t i = 0; i < columns; i++) p.residual[at + int64_t(m) * N + i] += p.scale * p.out[at + int64_t(m) * N + i];
  });
}

void linear(const float* x, int M, const uint8_t* blob, const float* bias, float* out, bool add, const uint8_t* next_blob) {
  const Product product{x, M, blob, out, bias, add};
  if (M > 0) linear_each(&product, 1, next_blob);
}

void normalize(const float* x, int M, int H, Norm norm, float* y, Changes changes) {
  for_each_task(M, int64_t(M) * H > kParallelNumbers, [&](int64_t m) {
    const Norm own = changes ? changed(norm, changes[m]) : norm;
    if (own.layer)
      kernels().layer_norm(x + m * H, own.weight, own.bias, own.eps, H, y + m * H);
    else
      kernels().rms_norm(x + m * H, own.weight, own.eps, H, y + m * H);
  });
}

void lora_down(const LoraChange& change, const float* x, int K, float* h, int64_t piece, int64_t pieces) {
  int64_t block = 0;
  for (const LoraPart* p = change.parts; p < change.parts + change.num_parts; h += p->width(), p++)
    for (int64_t r = 0; r < p->width(); r += 16, block++)
      if (block % pieces == piece)
        kernels().lora_down(x, p->a + r, p->width(), int(std::min<int64_t>(p->rank - r, 16)), K, p->scale + r, h + r);
}

void lora_up(Changes changes, int M, const float* h, int64_t ldh, int64_t first, int64_t columns, float* y, int64_t ldy) {
  for (int m = 0, rows; m < M && columns > 0; m += rows, h += rows * ldh, y += rows * ldy) {
    for (rows = 1; m + rows < M && changes[m + rows] == changes[m];) rows++;
    if (!changes[m]) continue;
    const LoraChange& change = *changes[m];
    const float* low = h;
    for (const LoraPart* p = change.parts; p < change.parts + change.num_parts; low += p->width(), p++) {
      const int64_t begin = std::max(first, p->first), end = std::min(first + columns, p->first + p->columns);
      if (begin < end)
        kernels().lora_up(low, ldh, rows, p->b + (begin - p->first), p->columns, int(p->rank), int(end - begin), y + (begin - first), ldy);
    }
    for (int r = 0; r < rows; r++) {
      float* const own = y + r * ldy;
      for (int64_t i = 0; change.gain && i < columns; i++) own[i] += change.gain[first + i] * own[i];
      for (int64_t i = 0; change.bias && i < columns; i++) own[i] += change.bias[first + i];
    }
  }
}

void linear_residual(const float* x, int M, const uint8_t* blob, const float* bias, Norm norm, float scale, float* residual,
                     const uint8_t* next_blob, Changes changes) {
  if (!norm.weight && scale == 1.0f && !changes) return linear(x, M, blob, bias, residual, true, next_blob);
  const int N = header(blob).N;
  Buffer<float> out(int64_t(M) * N);
  Product product{x, M, blob, out, bias, false, changes};
  if (!norm.weight) product.residual = residual, product.scale = scale;
  if (M > 0) linear_each(&product, 1, next_blob);
  if (!norm.weight) return;
  normalize(out, M, N, norm, out, changes);
  for (int64_t i = 0; i < int64_t(M) * N; i++) residual[i] += scale * out[i];
}

void norm_linear(const float* x, int M, Norm norm, const uint8_t* blob, const float* bias, float* out, const uint8_t* next_blob,
                 Changes changes) {
  const int H = header(blob).K;
  Buffer<float> normed(norm.weight ? int64_t(M) * H : 0);
  if (norm.weight) normalize(x, M, H, norm, normed, changes);
  if (norm.weight) x = normed;
  const Product product{x, M, blob, out, bias, false, changes};
  if (M > 0) linear_each(&product, 1, next_blob);
}

void activate_pairs(const float* both, int M, int64_t I, int activation, bool gated, float* out) {
  constexpr int64_t piece = 2048;
  static const std::vector<float> ones(piece, 1.0f);
  const int64_t N = gated ? 2 * I : I, pieces = (I + piece - 1) / piece;
  for_each_task(M * pieces, M * I > kParallelNumbers, [&](int64_t i) {
    const int64_t m = i / pieces, at = i % pieces * piece;
    const float* row = both + m * N;
    kernels().activate(row + at, gated ? row + I + at : ones.data(), int(std::min(piece, I - at)), activation, out + m * I + at);
  });
}

void norm_gate_up(const float* x, int M, Norm norm, const uint8_t* blob, const float* bias, int activation, bool gated, float* out,
                  const uint8_t* next_blob, Changes changes) {
  const int64_t N = header(blob).N;
  Buffer<float> both(M * N);
  norm_linear(x, M, norm, blob, bias, both, next_blob, changes);
  activate_pairs(both, M, gated ? N / 2 : N, activation, gated, out);
}

void norm_qkv_rope(const float* x, int T, Norm norm, const uint8_t* blob, const float* bias, const Rope& rope, const Heads& heads, float* q,
                   void* k_pool, void* v_pool, const uint8_t* next_blob, Changes changes) {
  const int64_t N = header(blob).N, width = int64_t(heads.num_heads) * heads.head_dim;
  Buffer<float> qkv(T * N);
  norm_linear(x, T, norm, blob, bias, qkv, next_blob, changes);
  if (rope.clip > 0)
    for (int64_t i = 0; i < T * N; i++) qkv[i] = std::clamp(qkv[i], -rope.clip, rope.clip);
  for_each_task(T, T * N > kParallelNumbers, [&](int64_t t) {
    const int64_t at = int64_t(rope.positions[t]) * heads.half;
    kernels().rope_store(qkv + t * N, heads, 0, heads.num_kv_heads, rope.cos + at, rope.sin + at, rope.slots[t], q + t * width, k_pool,
                         v_pool);
  });
}

int attention_block(const Attention& a) { return std::max(1, 64 * a.num_kv_heads / a.num_heads); }

AttentionTask attention_task(const float* q, const Attention& a, float* out, const Queries& p, int kv_head) {
  const int64_t width = int64_t(a.num_heads) * a.head_dim, row = a.cu_seqlens[p.sequence] + p.first, context = a.context_lens[p.sequence];
  AttentionTask t;
  t.q = q + row * width;
  t.out = out + row * width;
  t.k_pool = a.k_pool;
  t.v_pool = a.v_pool;
  t.pages = t.next_pages = a.block_table + p.sequence * a.max_pages;
  t.next_context = t.next_kv_head = 0;
  t.position = context - (a.cu_seqlens[p.sequence + 1] - a.cu_seqlens[p.sequence]) + p.first;
  t.window = a.window;
  t.page_size = a.page_size;
  t.context = context;
  t.count = p.count;
  t.num_heads = a.num_heads;
  t.num_kv_heads = a.num_kv_heads;
  t.kv_head = kv_head;
  t.head_dim = a.head_dim;
  t.scale = a.scale;
  t.softcap = a.softcap;
  t.k_kind = a.k_kind;
  t.v_kind = a.v_kind;
  t.scratch = nullptr;
  return t;
}

void paged_attention(const float* q, const Attention& a, float* out) {
  const int per_kv = a.num_heads / a.num_kv_heads, block = attention_block(a);
  std::vector<Queries> pieces;
  int64_t work = 0;
  for (int64_t b = 0; b < a.sequences; b++) {
    const int n = a.cu_seqlens[b + 1] - a.cu_seqlens[b];
    for (int i = 0; i < n; i += block) pieces.push_back({b, i, std::min(block, n - i)});
    work += int64_t(n) * a.context_lens[b] * a.num_heads * a.head_dim * 2;
  }
  const int64_t tasks = int64_t(pieces.size()) * a.num_kv_heads;
  for_each_task(tasks, work > kParallelWork, [&](int64_t i) {
    const Queries& p = pieces[size_t((tasks - 1 - i) / a.num_kv_heads)];  // the last queries see most keys: they go first
    Buffer<float> scratch(attention_scratch(int64_t(p.count) * per_kv, a.page_size, a.head_dim));
    AttentionTask t = attention_task(q, a, out, p, int((tasks - 1 - i) % a.num_kv_heads));
    if (i + 1 < tasks) {
      const int64_t next = tasks - 2 - i, sequence = pieces[size_t(next / a.num_kv_heads)].sequence;
      t.next_pages = a.block_table + sequence * a.max_pages;
      t.next_context = a.context_lens[sequence];
      t.next_kv_head = next % a.num_kv_heads;
    }
    t.scratch = scratch;
    kernels().attention(t);
  });
}

void embed(const void* table, int kind, int H, const int32_t* ids, int T, float scale, Places places, float* out) {
  const auto row = [&](const void* data, int of, int64_t i) {
    return static_cast<const uint8_t*>(data) + i * H * (of == kDenseF32 ? 4 : 2);
  };
  Buffer<float> place(places.table ? H : 1);
  for (int t = 0; t < T; t++, out += H) {
    kernels().to_float(row(table, kind, ids[t]), kind, H, out);
    if (scale != 1.0f)
      for (int i = 0; i < H; i++) out[i] *= scale;
    if (places.table) {
      kernels().to_float(row(places.table, places.kind, places.positions[t]), places.kind, H, place);
      for (int i = 0; i < H; i++) out[i] += place[i];
    }
  }
}

}  // namespace exl2nb
