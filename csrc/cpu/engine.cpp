#include "engine.h"

#include <algorithm>
#include <vector>

#include "dispatch.h"
#include "parallel.h"

namespace exl2nb {
namespace {

// Below this many multiply-adds a second thread costs more than it saves (about 2 us).
constexpr int64_t kParallelWork = 60'000;
// And below this many numbers to be normed, rounded or passed through an activation.
constexpr int64_t kParallelNumbers = 4'000;

// The rows in one stored order: parts with the same permutation share them.
struct Ordered {
  int64_t perm;  // offset in the blob
  Buffer<int16_t> codes;
  Buffer<float> scale;
  Buffer<int32_t> sum;
};

class Activations {
 public:
  Activations(const float* x, int M, const uint8_t* blob) {
    const int K = header(blob).K;
    for (int i = 0; i < header(blob).num_parts; i++) {
      const BlobPart& part = parts(blob)[i];
      const int stored = stored_rows(blob, part);
      const int64_t ldq = stored + kQuantPad, units = stored / kUnit;
      Rows rows{x, nullptr, nullptr, nullptr, K, ldq, M, stored};
      if (quantised(part)) {
        auto found = std::find_if(ordered_.begin(), ordered_.end(), [&](const Ordered& o) { return o.perm == part.perm; });
        if (found == ordered_.end()) {
          ordered_.push_back({part.perm, Buffer<int16_t>(M * ldq), Buffer<float>(M * units), Buffer<int32_t>(M * units)});
          found = ordered_.end() - 1;
          const Ordered& o = *found;
          const auto* perm = part.perm ? reinterpret_cast<const int32_t*>(blob + part.perm) : nullptr;
          for_each_task(M, int64_t(M) * K > kParallelNumbers, [&](int64_t m) {
            const float* row = x + m * K;
            std::vector<float> longer;
            if (stored != K) {  // padding rows read the zero behind the row
              longer.assign(row, row + K);
              longer.push_back(0.0f);
              row = longer.data();
            }
            kernels().quantize(row, perm, stored, o.codes + m * ldq, o.scale + m * units, o.sum + m * units);
          });
        }
        rows.codes = found->codes;
        rows.scale = found->scale;
        rows.sum = found->sum;
      }
      rows_.push_back(rows);
    }
  }
  const Rows& of(int part) const { return rows_[part]; }

 private:
  std::vector<Ordered> ordered_;
  std::vector<Rows> rows_;
};

Rows slice(Rows r, int begin, int end) {
  const int64_t units = r.K / kUnit;
  r.x += begin * r.ldx;
  if (r.codes) {
    r.codes += begin * r.ldq;
    r.scale += begin * units;
    r.sum += begin * units;
  }
  r.M = end - begin;
  return r;
}

struct Task {
  int part, tile, end, row;
};

// Tasks of at most `wide` tiles and kRowBlock rows; a row block visits all tiles before the next one starts, so its activations stay in
// cache.
std::vector<Task> split(const uint8_t* blob, int M) {
  const BlobHeader& h = header(blob);
  const int64_t threads = num_threads();
  int64_t tiles = 0;
  for (int i = 0; i < h.num_parts; i++) tiles += parts(blob)[i].tiles;
  const int64_t blocks = (M + kRowBlock - 1) / kRowBlock;
  const int wide = int(std::clamp<int64_t>(tiles * blocks / (threads * 4), 1, kTileBlock));
  std::vector<Task> tasks;
  tasks.reserve(size_t((tiles / wide + h.num_parts) * blocks));
  for (int row = 0; row < M; row += kRowBlock)
    for (int i = 0; i < h.num_parts; i++)
      for (int t = 0; t < parts(blob)[i].tiles; t += wide) tasks.push_back({i, t, std::min(t + wide, parts(blob)[i].tiles), row});
  return tasks;
}

}  // namespace

void linear(const float* x, int M, const uint8_t* blob, const float* bias, float* out, bool add) {
  if (M == 0) return;
  const BlobHeader& h = header(blob);
  const Activations activations(x, M, blob);
  const std::vector<Task> tasks = split(blob, M);
  for_each_task(int64_t(tasks.size()), int64_t(M) * h.K * h.N > kParallelWork, [&](int64_t i) {
    const Task& t = tasks[size_t(i)];
    const Rows rows = slice(activations.of(t.part), t.row, std::min(t.row + kRowBlock, M));
    kernels().gemm(blob, parts(blob)[t.part], rows, t.tile, t.end, {out + int64_t(t.row) * h.N, h.N, bias, add});
  });
}

void linear_each(const Product* products, int count) {
  struct Piece {
    int product;
    Task task;
  };
  std::vector<Activations> activations;
  activations.reserve(size_t(count));
  std::vector<Piece> pieces;
  int64_t work = 0;
  for (int p = 0; p < count; p++) {
    const Product& product = products[p];
    activations.emplace_back(product.x, product.M, product.blob);
    for (const Task& task : split(product.blob, product.M)) pieces.push_back({p, task});
    work += int64_t(product.M) * header(product.blob).K * header(product.blob).N;
  }
  for_each_task(int64_t(pieces.size()), work > kParallelWork, [&](int64_t i) {
    const Product& p = products[pieces[size_t(i)].product];
    const Task& t = pieces[size_t(i)].task;
    const int N = header(p.blob).N;
    const Rows rows = slice(activations[size_t(pieces[size_t(i)].product)].of(t.part), t.row, std::min(t.row + kRowBlock, p.M));
    kernels().gemm(p.blob, parts(p.blob)[t.part], rows, t.tile, t.end, {p.out + int64_t(t.row) * N, N, nullptr, false});
  });
}

void normalize(const float* x, int M, int H, Norm norm, float* y) {
  for_each_task(M, int64_t(M) * H > kParallelNumbers, [&](int64_t m) {
    if (norm.layer)
      kernels().layer_norm(x + m * H, norm.weight, norm.bias, norm.eps, H, y + m * H);
    else
      kernels().rms_norm(x + m * H, norm.weight, norm.eps, H, y + m * H);
  });
}

void linear_residual(const float* x, int M, const uint8_t* blob, const float* bias, Norm norm, float scale, float* residual) {
  if (!norm.weight && scale == 1.0f) return linear(x, M, blob, bias, residual, true);
  const int N = header(blob).N;
  Buffer<float> out(int64_t(M) * N);
  linear(x, M, blob, bias, out, false);
  if (norm.weight) normalize(out, M, N, norm, out);
  for (int64_t i = 0; i < int64_t(M) * N; i++) residual[i] += scale * out[i];
}

void norm_linear(const float* x, int M, Norm norm, const uint8_t* blob, const float* bias, float* out) {
  if (!norm.weight) return linear(x, M, blob, bias, out, false);
  const int H = header(blob).K;
  Buffer<float> normed(int64_t(M) * H);
  normalize(x, M, H, norm, normed);
  linear(normed, M, blob, bias, out, false);
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

void norm_gate_up(const float* x, int M, Norm norm, const uint8_t* blob, const float* bias, int activation, bool gated, float* out) {
  const int64_t N = header(blob).N;
  Buffer<float> both(M * N);
  norm_linear(x, M, norm, blob, bias, both);
  activate_pairs(both, M, gated ? N / 2 : N, activation, gated, out);
}

void norm_qkv_rope(const float* x, int T, Norm norm, const uint8_t* blob, const float* bias, const Rope& rope, const Heads& heads, float* q,
                   void* k_pool, void* v_pool) {
  const int64_t N = header(blob).N, width = int64_t(heads.num_heads) * heads.head_dim;
  Buffer<float> qkv(T * N);
  norm_linear(x, T, norm, blob, bias, qkv);
  if (rope.clip > 0)
    for (int64_t i = 0; i < T * N; i++) qkv[i] = std::clamp(qkv[i], -rope.clip, rope.clip);
  for_each_task(T, T * N > kParallelNumbers, [&](int64_t t) {
    const int64_t at = int64_t(rope.positions[t]) * heads.half;
    kernels().rope_store(qkv + t * N, heads, rope.cos + at, rope.sin + at, rope.slots[t], q + t * width, k_pool, v_pool);
  });
}

void paged_attention(const float* q, const Attention& a, float* out) {
  const int per_kv = a.num_heads / a.num_kv_heads;
  const int block = std::max(1, 64 / per_kv);  // 64 rows share each load of a key
  struct Piece {
    int64_t sequence;
    int first, count;
  };
  std::vector<Piece> pieces;
  int64_t work = 0;
  for (int64_t b = 0; b < a.sequences; b++) {
    const int n = a.cu_seqlens[b + 1] - a.cu_seqlens[b];
    for (int i = 0; i < n; i += block) pieces.push_back({b, i, std::min(block, n - i)});
    work += int64_t(n) * a.context_lens[b] * a.num_heads * a.head_dim * 2;
  }
  const int64_t width = int64_t(a.num_heads) * a.head_dim;
  const int64_t tasks = int64_t(pieces.size()) * a.num_kv_heads;
  for_each_task(tasks, work > kParallelWork, [&](int64_t i) {
    const Piece& p = pieces[size_t((tasks - 1 - i) / a.num_kv_heads)];  // the last queries see most keys: they go first
    const int64_t row = a.cu_seqlens[p.sequence] + p.first, context = a.context_lens[p.sequence];
    const int64_t queries = a.cu_seqlens[p.sequence + 1] - a.cu_seqlens[p.sequence];
    Buffer<float> scratch(attention_scratch(int64_t(p.count) * per_kv, a.page_size, a.head_dim));
    AttentionTask t;
    t.q = q + row * width;
    t.out = out + row * width;
    t.k_pool = a.k_pool;
    t.v_pool = a.v_pool;
    t.pages = a.block_table + p.sequence * a.max_pages;
    t.position = context - queries + p.first;
    t.window = a.window;
    t.page_size = a.page_size;
    t.context = context;
    t.count = p.count;
    t.num_heads = a.num_heads;
    t.num_kv_heads = a.num_kv_heads;
    t.kv_head = int((tasks - 1 - i) % a.num_kv_heads);
    t.head_dim = a.head_dim;
    t.scale = a.scale;
    t.softcap = a.softcap;
    t.k_kind = a.k_kind;
    t.v_kind = a.v_kind;
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
