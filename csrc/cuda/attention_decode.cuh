// Attention of a few queries per sequence over a paged cache, split over the keys (flash-decoding, Dao et al. 2023), in one kernel.
//
// A work item is (sequence, KV head, block of 8 * NT query rows, chunk of keys); a query row is (token, head of the KV head's group). A CTA
// of 4 warps takes items in turns. It prepares the item's query rows (norm, rotation, fp16) in shared memory, and the new keys and values
// that fall into its chunk, which it also writes to the cache. Then every warp walks tiles of 16 keys: S' = K Q' and O' += V' P' on tensor
// cores (m16n8k16), with the keys, then the dims, as rows, so that 8 queries fill the columns. K and V go from memory straight to fragment
// registers (cache_format.cuh); the loads of the next tiles are in flight while one is computed. Old keys are fetched before the kernel
// waits for its predecessor. The warps' results are joined in warp order, the chunks' by the CTA that arrives last, in chunk order: no
// float atomics, and chunk boundaries depend on the sequence's own context length only, so a result's bits depend on nothing else.
// Bytes: K and V of the context once per block of query rows, partial results 4 * (D + 2) per (row, chunk).
// Limits: D a multiple of 16, at most 256; at most 8 new tokens per sequence (any number when q comes ready).
#pragma once
#include "attention_rows.cuh"
#include "fragment.cuh"

namespace exl2nb {

constexpr int kWarps = 4, kTile = 16, kUnit = kWarps * kTile, kMaxNew = 8;
constexpr float kShift = 8.f;      // probabilities are held times 2^8, so that small ones keep their bits in fp16
constexpr float kLowest = -1e30f;  // a maximum over nothing
constexpr float kLog2e = 1.4426950408889634f;

// Chunks of a sequence at most: they fill an H200 once at batch 1 (3 CTAs of 132 SMs, 4 with 4-bit keys: a second, partial wave costs more
// than it brings; 8K context, 8 KV heads: 17.6 us with 32 chunks, 23.5 with 22).
__host__ __device__ constexpr int most_splits(int items, int num_kv_heads) {
  return num_kv_heads * 64 <= items ? 64 : num_kv_heads * 6 >= items ? 6 : items / num_kv_heads;
}
__host__ __device__ constexpr int max_splits(int num_kv_heads) { return most_splits(512, num_kv_heads); }  // with any storage

struct Chunks {
  int start, size, count;  // first key, keys per chunk
};
// Depends on the sequence and the model alone. Sizes are multiples of 64 keys that stay the same over wide ranges of context lengths; from
// 1024 keys on at least 128, because in large batches the work around a chunk counts. Long runs of queries fill the device by themselves.
__host__ __device__ inline Chunks chunks_of(int context, int queries, int window, int num_kv_heads, bool q4) {
  const int oldest = window > 0 ? context - queries - window + 1 : 0, start = oldest > 0 ? oldest / kUnit * kUnit : 0;
  const int units = (context - start + kUnit - 1) / kUnit, most = most_splits(q4 ? 512 : 384, num_kv_heads);
  if (queries > kMaxNew) return {start, units * kUnit, 1};
  int per = units < 16 ? 1 : 2;
  while (per * most < units) per = per == 1 ? 2 : per % 3 == 0 ? per / 3 * 4 : per / 2 * 3;  // 1 2 3 4 6 8 12 ...
  return {start, per * kUnit, (units + per - 1) / per};
}

struct DecodeParams {
  AttentionArgs a;
  float* part;      // (rows, Hq, max_splits, D) of at least min(tokens, 8 * sequences) rows
  float2* part_ml;  // (rows, Hq, max_splits): maximum, sum
  unsigned* count;  // (rows * blocks per token * Hkv)
  int blocks_per_token, q_per_kv;
  unsigned q_per_kv_inverse;  // ceil(2^32 / q_per_kv): exact quotients of numbers below 2^32 / q_per_kv
};

struct Item {
  int b, first_token, queries, context, kv_head, block, chunk;
  Chunks chunks;
  __device__ __forceinline__ int part_token() const { return first_token < kMaxNew * b ? first_token : kMaxNew * b; }
};

// Item number `index`, or false past the last one. All lanes of a warp take part.
template <int NT>
__device__ __forceinline__ bool find_item(const DecodeParams& p, int index, Item& item) {
  const CacheArgs& c = p.a.cache;
  const int lane = threadIdx.x % 32, q_per_kv = p.q_per_kv;
  for (int base = 0; base < c.sequences; base += 32) {
    const int b = base + lane;
    int first = 0, queries = 0, context = 0, items = 0, blocks = 0;
    Chunks chunks{0, kUnit, 0};
    if (b < c.sequences) {
      first = c.cu_seqlens[b], queries = c.cu_seqlens[b + 1] - first, context = c.context_lens[b];
      if (context > 0 && queries > 0) {
        chunks = chunks_of(context, queries, p.a.window, c.num_kv_heads, c.k_format == kCacheQ4);
        blocks = (queries * q_per_kv + 8 * NT - 1) / (8 * NT);
        items = chunks.count * c.num_kv_heads * blocks;
      }
    }
    int end = items;
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_up_sync(kAll, end, i);
      if (lane >= i) end += other;
    }
    const int total = __shfl_sync(kAll, end, 31);
    if (index < total) {
      const int at = __ffs(__ballot_sync(kAll, index < end)) - 1;
      const int inside = index - __shfl_sync(kAll, end - items, at);
      item.b = base + at;
      item.first_token = __shfl_sync(kAll, first, at);
      item.queries = __shfl_sync(kAll, queries, at);
      item.context = __shfl_sync(kAll, context, at);
      item.chunks = {__shfl_sync(kAll, chunks.start, at), __shfl_sync(kAll, chunks.size, at), __shfl_sync(kAll, chunks.count, at)};
      const int num_blocks = __shfl_sync(kAll, blocks, at);
      item.chunk = inside % item.chunks.count;
      item.block = inside / item.chunks.count % num_blocks;
      item.kv_head = inside / item.chunks.count / num_blocks;
      return true;
    }
    index -= total;
  }
  return false;
}

__device__ __forceinline__ void mma16816(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a2), "r"(a3), "r"(b1));
#endif
}
// An 8 x 8 matrix of halves across the warp, two neighbours of row lane / 4 in each lane, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t v) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(d) : "r"(v));
  return d;
}
__device__ __forceinline__ float exp2_fast(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(v));
  return r;
}
__device__ __forceinline__ float tanh_exact(float v) { return 1.f - 2.f / (__expf(2.f * v) + 1.f); }

template <int KF, int VF, int D, int NT>
struct Decode {
  static constexpr int kSlots = (D + 31) / 32, kRows = 8 * NT, kTiles = bits_of(KF) * D <= 256 ? 2 : 1;
  static constexpr int kQStride = kSlots * 32 + 32;  // halves; lanes of a quarter warp read 16 bytes each from different banks
  static constexpr int kGroups = D / scale_group(D), kThreads = kWarps * 32, kPerThread = (kRows * D + kThreads - 1) / kThreads;
  using KeyShare = Share<KF, D, 4>;
  using ValueShare = Share<VF, D, 8>;
  using Key = KeyFragment<KF, D>;
  using Value = ValueFragment<VF, D>;

  struct Inputs {
    alignas(16) half q[kRows * kQStride];                                                    // in the order of KeyFragment::place
    alignas(16) uint8_t k[kMaxNew * D * bits_of(KF) / 8], v[kMaxNew * D * bits_of(VF) / 8];  // this step's rows as the cache holds them
    alignas(16) uint8_t k_scale[kMaxNew * kGroups * 2], v_scale[kMaxNew * kGroups * 2];
    float scratch[kWarps][D];
    float fresh[2 * kMaxNew][D];  // new keys, then new values, before they are stored
  };
  struct Shared {
    union {
      Inputs in;
      float o[kWarps][8][D];
    };
    float joined[kRows][D];
    float max[kWarps][kRows], sum[kWarps][kRows], inverse_sum[kRows];
    int token[kRows], head[kRows];
    bool last;
  };

  const DecodeParams& p;
  Shared& sh;
  Item it;
  int lane, warp, g, t, q_per_kv, rows, first_row, chunk_start, chunk_end, first_new, old_end;
  int page_base, page_of_lane;  // 32 entries of the block table, one per lane
  int first_page, last_page;    // of the first and the last new token
  int position[NT][2];          // of this lane's queries
  uint32_t q[NT][(D + 31) / 32 * 2][2];
  KeyShare k[kTiles][2];
  ValueShare v[kTiles][4];
  float o[NT][D / 16][4], row_max[NT][2], row_sum[NT][2];

  __device__ __forceinline__ Decode(const DecodeParams& params, Shared& shared) : p(params), sh(shared) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    q_per_kv = p.q_per_kv;
  }

  // --- where things are ---
  __device__ __forceinline__ int token_of(int row) const {  // row / q_per_kv, without a division
    return q_per_kv == 1 ? row : static_cast<int>(__umulhi(static_cast<unsigned>(row), p.q_per_kv_inverse));
  }
  __device__ __forceinline__ int table(int page) const {
    return page < p.a.cache.max_pages ? p.a.cache.block_table[static_cast<int64_t>(it.b) * p.a.cache.max_pages + page] : 0;
  }
  __device__ __forceinline__ void fetch_pages(int token) {
    page_base = token / kPage;
    page_of_lane = (page_base + lane) * kPage < chunk_end ? table(page_base + lane) : 0;
  }
  __device__ __forceinline__ int64_t page_at(int token) const {
    return static_cast<int64_t>(__shfl_sync(kAll, page_of_lane, token / kPage - page_base)) * p.a.cache.num_kv_heads + it.kv_head;
  }
  __device__ __forceinline__ int tile_token(int step, int u) const { return chunk_start + (step * kTiles + u) * kUnit + warp * kTile; }

  // Old tokens of a tile; where it has newer ones too, the last old token stands in for them: finite numbers under a probability of 0,
  // until take_new puts in what is new.
  __device__ __forceinline__ void load_keys(int step) {
    constexpr int head_bytes = page_bytes(KF, D), row_bytes = D * bits_of(KF) / 8;
    const int first = tile_token(step, 0), last = tile_token(step, kTiles - 1);
    if (first < chunk_end && last / kPage - page_base > 31) fetch_pages(first);
#pragma unroll
    for (int u = 0; u < kTiles; u++) {
      const int token = tile_token(step, u);
      if (token >= old_end) {
        k[u][0].clear(), k[u][1].clear();
        continue;
      }
      const uint8_t* page = static_cast<const uint8_t*>(p.a.cache.k_pool) + page_at(token) * head_bytes;
      const bool whole = token + kTile <= first_new;
      const uint8_t* row = page + (token % kPage + g) * row_bytes;
      const uint8_t* scales = page + kPage * row_bytes + (token % kPage + g) * (2 * kGroups);
      if (whole) {
#pragma unroll
        for (int i = 0; i < 2; i++) k[u][i].template load<true>(row + 8 * i * row_bytes, scales + 8 * i * 2 * kGroups, t);
      } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int back = max(token + g + 8 * i - (first_new - 1), 0) - 8 * i;
          k[u][i].template load<true>(row - back * row_bytes, scales - back * 2 * kGroups, t);
        }
      }
    }
  }
  __device__ __forceinline__ void load_values(int step) {
    constexpr int head_bytes = page_bytes(VF, D), row_bytes = D * bits_of(VF) / 8;
#pragma unroll
    for (int u = 0; u < kTiles; u++) {
      const int token = tile_token(step, u);
      if (token >= old_end) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[u][i].clear();
        continue;
      }
      const uint8_t* page = static_cast<const uint8_t*>(p.a.cache.v_pool) + page_at(token) * head_bytes;
      const bool whole = token + kTile <= first_new;
      const uint8_t* row = page + (token % kPage + 2 * t) * row_bytes;
      const uint8_t* scales = page + kPage * row_bytes + (token % kPage + 2 * t) * (2 * kGroups);
      if (whole) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int on = i % 2 + i / 2 * 8;
          v[u][i].template load<true>(row + on * row_bytes, scales + on * 2 * kGroups, g);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int on = i % 2 + i / 2 * 8, back = max(token + 2 * t + on - (first_new - 1), 0) - on;
          v[u][i].template load<true>(row - back * row_bytes, scales - back * 2 * kGroups, g);
        }
      }
    }
  }
  template <int F, int LANES>
  __device__ __forceinline__ void take_new(Share<F, D, LANES>& share, const uint8_t* codes, const uint8_t* scales, int token,
                                           int part) const {
    constexpr int row_bytes = Lanes<F, D, LANES>::kRowBytes;
    const int i = token - first_new;
    if (i >= 0 && token < it.context) share.template load<false>(codes + i * row_bytes, scales + i * kGroups * 2, part);
  }

  // --- before the keys ---
  __device__ __forceinline__ bool begin(int index) {
    if (!find_item<NT>(p, index, it)) return false;
    rows = min(it.queries * q_per_kv - it.block * kRows, kRows);
    first_row = it.block * kRows;
    chunk_start = it.chunks.start + it.chunk * it.chunks.size;
    const int oldest_query = it.context - it.queries, newest = oldest_query + token_of(first_row + rows - 1);  // no row sees further
    chunk_end = min(chunk_start + it.chunks.size, newest + 1);
    first_new = p.a.q ? it.context : oldest_query;
    old_end = min(first_new, chunk_end);
    fetch_pages(chunk_start);
    if (!p.a.q) first_page = table(oldest_query / kPage), last_page = table((it.context - 1) / kPage);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) position[n][j] = oldest_query + token_of(first_row + n * 8 + 2 * t + j);
    if (threadIdx.x < kRows) {
      const int r = first_row + threadIdx.x, i = token_of(r);
      sh.token[threadIdx.x] = it.first_token + i, sh.head[threadIdx.x] = it.kv_head * q_per_kv + r - i * q_per_kv;
    }
    return true;
  }
  // The item's rows, warp by warp: queries, new keys, new values.
  __device__ __forceinline__ void make_rows(bool wait) {
    const AttentionArgs& a = p.a;
    const int D3 = (a.cache.num_heads + 2 * a.cache.num_kv_heads) * D, chunk_last = chunk_start + it.chunks.size;
    const int new_from = max(first_new, chunk_start), fresh = max(min(it.context, chunk_last) - new_from, 0);
    const float factor = a.softcap > 0.f ? a.scale : a.scale * kLog2e;
    for (int i = rows * kQStride / 2 + threadIdx.x; i < kRows * kQStride / 2; i += kThreads) reinterpret_cast<uint32_t*>(sh.in.q)[i] = 0;
#pragma unroll 1
    for (int r = warp; r < rows + 2 * fresh; r += kWarps) {
      const bool is_query = r < rows, is_key = !is_query && r < rows + fresh;
      const int i = is_query ? token_of(first_row + r) : r - rows - (is_key ? 0 : fresh) + new_from - first_new;
      const int head = is_query ? it.kv_head * q_per_kv + first_row + r - i * q_per_kv : it.kv_head, token = it.first_token + i;
      Turn<kSlots> turn;
      if (!a.q) turn.load(a.rope, a.rope.positions ? a.rope.positions[token] : it.context - it.queries + i);
      if (wait) wait_for_predecessor();
      wait = false;
      Row<kSlots> row;
      const int place_in_row = is_query ? head : a.cache.num_heads + (is_key ? 0 : a.cache.num_kv_heads) + head;
      row.load(a.q ? a.q + (static_cast<int64_t>(token) * a.cache.num_heads + head) * D
                   : a.qkv + static_cast<int64_t>(token) * D3 + place_in_row * D,
               D);
      if (is_query || is_key) {
        if (!a.q) prepare(row, a.rope, is_query ? a.rope.q_norm : a.rope.k_norm, head, turn, sh.in.scratch[warp], D);
      } else if (!a.rope.norm_whole) {
        row.clip(a.rope.clip);
      }
      if (is_query) {
#pragma unroll
        for (int s = 0; s < kSlots; s++) {
          float x = row.x[s] * factor;
          if constexpr (is_rotated(KF)) x = hadamard<scale_group(D)>(x);
          if (lane + 32 * s < D) sh.in.q[r * kQStride + Key::place(lane + 32 * s)] = saturated(x);
        }
      } else {
        row.store(sh.in.fresh[is_key ? i : kMaxNew + i], D);
      }
    }
    if (wait) wait_for_predecessor();
    __syncthreads();
    if (!fresh) return;
    // 32 dims of a new key and of its value at a time: as the cache holds them into shared memory and, once, into the cache.
#pragma unroll 1
    for (int j = warp; j < fresh * kSlots; j += kWarps) {
      const int i = j / kSlots + new_from - first_new, d = j % kSlots * 32 + lane;
      const Numbers<2> x = {d < D ? sh.in.fresh[i][d] : 0.f, d < D ? sh.in.fresh[kMaxNew + i][d] : 0.f};
      Coded made[2];
      if constexpr (KF == VF) {
        encode<KF, scale_group(D), 2>(x, made);
      } else {
        made[0] = encode<KF, scale_group(D)>(x[0]), made[1] = encode<VF, scale_group(D)>(x[1]);
      }
      if (d >= D) continue;
      keep<KF>(made[0], i, d, a.cache.k_pool, sh.in.k, sh.in.k_scale);
      keep<VF>(made[1], i, d, a.cache.v_pool, sh.in.v, sh.in.v_scale);
    }
    __syncthreads();
  }
  template <int F>
  __device__ __forceinline__ void keep(const Coded& made, int i, int d, void* pool, uint8_t* codes, uint8_t* scales) const {
    constexpr int row_bytes = D * bits_of(F) / 8, head_bytes = page_bytes(F, D), G = scale_group(D);
    put<F, G>(made, d, codes + i * row_bytes, scales + i * kGroups * 2);
    if (it.block) return;
    const int at = it.context - it.queries + i;
    const int64_t number =
        static_cast<int64_t>(at / kPage == (it.context - 1) / kPage ? last_page : first_page) * p.a.cache.num_kv_heads + it.kv_head;
    uint8_t* const page = static_cast<uint8_t*>(pool) + number * head_bytes;
    put<F, G>(made, d, page + at % kPage * row_bytes, page + kPage * row_bytes + at % kPage * kGroups * 2);
  }
  __device__ __forceinline__ void fetch_queries() {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int pair = 0; pair < (D + 31) / 32; pair++) {
        const uint4 x = *reinterpret_cast<const uint4*>(sh.in.q + (n * 8 + g) * kQStride + pair * 32 + t * 8);
        q[n][2 * pair][0] = x.x, q[n][2 * pair][1] = x.y, q[n][2 * pair + 1][0] = x.z, q[n][2 * pair + 1][1] = x.w;
      }
  }

  // --- the keys ---
  __device__ __forceinline__ void walk(bool wait) {
    load_keys(0);
    load_values(0);
    make_rows(wait);
    fetch_queries();
    clear();
#pragma unroll 1
    for (int step = 0; tile_token(step, 0) < chunk_end; step++) {
      float s[kTiles][NT][4];
      const bool more = tile_token(step + 1, 0) < chunk_end;
      scores(step, s);
      if (more) load_keys(step + 1);
      softmax(s);
      values(step, s);
      if (more) load_values(step + 1);
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      row_max[n][0] = row_max[n][1] = kLowest, row_sum[n][0] = row_sum[n][1] = 0.f;
#pragma unroll
      for (int i = 0; i < D / 16; i++) o[n][i][0] = o[n][i][1] = o[n][i][2] = o[n][i][3] = 0.f;
    }
  }
  __device__ __forceinline__ void scores(int step, float (&s)[kTiles][NT][4]) {
#pragma unroll
    for (int u = 0; u < kTiles; u++) {
      const int token = tile_token(step, u);
      if (token >= chunk_end) {
#pragma unroll
        for (int n = 0; n < NT; n++) s[u][n][0] = s[u][n][1] = s[u][n][2] = s[u][n][3] = -INFINITY;
        continue;
      }
      if (token + kTile > first_new) {
        take_new(k[u][0], sh.in.k, sh.in.k_scale, token + g, t);
        take_new(k[u][1], sh.in.k, sh.in.k_scale, token + g + 8, t);
      }
      float odd[NT][4];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[u][n][i] = odd[n][i] = 0.f;
      static_for<D / 16>([&](auto kk) {
        constexpr int K = decltype(kk)::value;
        uint32_t a0, a1, a2, a3;
        Key::template get<K>(k[u][0], a0, a2);
        Key::template get<K>(k[u][1], a1, a3);
#pragma unroll
        for (int n = 0; n < NT; n++) mma16816(K % 2 ? odd[n] : s[u][n], a0, a1, a2, a3, q[n][K][0], q[n][K][1]);
      });
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[u][n][i] += odd[n][i];
      shape(token, s[u]);
    }
  }
  // Soft cap and mask.
  __device__ __forceinline__ void shape(int token, float (&s)[NT][4]) {
    if (p.a.softcap > 0.f) {
      const float inverse = 1.f / p.a.softcap, cap = p.a.softcap * kLog2e;
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = cap * tanh_exact(s[n][i] * inverse);
    }
    const int oldest = it.context - it.queries + token_of(first_row), newest = it.context - it.queries + token_of(first_row + rows - 1);
    if (token + kTile - 1 <= oldest && (p.a.window <= 0 || newest - token < p.a.window)) return;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int distance = position[n][i % 2] - (token + g + i / 2 * 8);
        if (distance < 0 || (p.a.window > 0 && distance >= p.a.window)) s[n][i] = -INFINITY;
      }
  }
  // Scores to probabilities times 2^8 under the running maximum.
  __device__ __forceinline__ void softmax(float (&s)[kTiles][NT][4]) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float high[2] = {row_max[n][0], row_max[n][1]};
#pragma unroll
      for (int u = 0; u < kTiles; u++)
#pragma unroll
        for (int i = 0; i < 4; i++) high[i % 2] = fmaxf(high[i % 2], s[u][n][i]);
#pragma unroll
      for (int i = 4; i < 32; i *= 2)
#pragma unroll
        for (int j = 0; j < 2; j++) high[j] = fmaxf(high[j], __shfl_xor_sync(kAll, high[j], i));
      if (__any_sync(kAll, high[0] > row_max[n][0] || high[1] > row_max[n][1])) {
        const float f[2] = {exp2_fast(row_max[n][0] - high[0]), exp2_fast(row_max[n][1] - high[1])};
#pragma unroll
        for (int j = 0; j < 2; j++) row_max[n][j] = high[j], row_sum[n][j] *= f[j];
#pragma unroll
        for (int i = 0; i < D / 16; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) o[n][i][j] *= f[j % 2];
      }
#pragma unroll
      for (int u = 0; u < kTiles; u++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          s[u][n][i] = exp2_fast(s[u][n][i] - (high[i % 2] - kShift));
          row_sum[n][i % 2] += s[u][n][i];
        }
    }
  }
  __device__ __forceinline__ void values(int step, const float (&s)[kTiles][NT][4]) {
#pragma unroll
    for (int u = 0; u < kTiles; u++) {
      const int token = tile_token(step, u);
      if (token >= chunk_end) break;
      if (token + kTile > first_new) {
#pragma unroll
        for (int i = 0; i < 4; i++) take_new(v[u][i], sh.in.v, sh.in.v_scale, token + 2 * t + i % 2 + i / 2 * 8, g);
      }
      uint32_t probs[NT][2];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) probs[n][i] = transposed(bits_of_half2(__floats2half2_rn(s[u][n][2 * i], s[u][n][2 * i + 1])));
      static_for<D / 16>([&](auto tile) {
        constexpr int I = decltype(tile)::value;
        uint32_t a0, a1, a2, a3;
        Value::template get<I>(v[u][0], v[u][1], a0, a1);
        Value::template get<I>(v[u][2], v[u][3], a2, a3);
#pragma unroll
        for (int n = 0; n < NT; n++) mma16816(o[n][I], a0, a1, a2, a3, probs[n][0], probs[n][1]);
      });
    }
  }

  // --- after the keys ---
  __device__ __forceinline__ int64_t part_row(int r) const {
    const int row = it.part_token() + sh.token[r] - it.first_token;
    return (static_cast<int64_t>(row) * p.a.cache.num_heads + sh.head[r]) * max_splits(p.a.cache.num_kv_heads);
  }
  // The warps' results to sh.joined and sh.row_sum where there is one chunk, else to the workspace.
  __device__ __forceinline__ void join_warps() {
    const bool single = it.chunks.count == 1;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float sum = row_sum[n][j];
#pragma unroll
        for (int i = 4; i < 32; i *= 2) sum += __shfl_xor_sync(kAll, sum, i);
        if (g == 0) sh.max[warp][n * 8 + 2 * t + j] = row_max[n][j], sh.sum[warp][n * 8 + 2 * t + j] = sum;
      }
#pragma unroll
    for (int n = 0; n < NT; n++) {
      if (n * 8 >= rows) break;
      __syncthreads();  // maxima are there; nobody reads the inputs or the former rows any more
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int r = 2 * t + j;
        if (n * 8 + r >= rows) continue;
        const float f = exp2_fast(row_max[n][j] - highest(n * 8 + r));
        static_for<D / 16>([&](auto tile) {
          constexpr int I = decltype(tile)::value, first = Value::fixed_dim(I), dims = Value::lane_dims(I);
          *reinterpret_cast<float2*>(&sh.o[warp][r][first + g * dims]) = make_float2(o[n][I][j] * f, o[n][I][2 + j] * f);
        });
      }
      __syncthreads();
      const int vectors = min(rows - n * 8, 8) * (D / 4);
      for (int i = threadIdx.x; i < vectors; i += kThreads) {
        const int r = i / (D / 4), d = i % (D / 4) * 4;
        float4 x = *reinterpret_cast<const float4*>(&sh.o[0][r][d]);
#pragma unroll
        for (int w = 1; w < kWarps; w++) {
          const float4 y = *reinterpret_cast<const float4*>(&sh.o[w][r][d]);
          x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
        }
        const int64_t at = single ? 0 : part_row(n * 8 + r) + it.chunk;
        *reinterpret_cast<float4*>(single ? &sh.joined[n * 8 + r][d] : p.part + at * D + d) = x;
        if (d == 0) {
          const float high = highest(n * 8 + r);
          float sum = 0;
#pragma unroll
          for (int w = 0; w < kWarps; w++) sum = fmaf(sh.sum[w][n * 8 + r], exp2_fast(sh.max[w][n * 8 + r] - high), sum);
          if (single) sh.inverse_sum[n * 8 + r] = __fdividef(1.f, sum);
          if (!single) p.part_ml[at] = make_float2(high, sum);
        }
      }
    }
  }
  __device__ __forceinline__ float highest(int r) const {
    float high = sh.max[0][r];
#pragma unroll
    for (int w = 1; w < kWarps; w++) high = fmaxf(high, sh.max[w][r]);
    return high;
  }
  // Counts up, or back to 0 past `last`; what the CTA wrote before its barrier goes before, what it reads after its next barrier comes
  // after.
  static __device__ __forceinline__ unsigned arrive(unsigned* counter, unsigned last) {
    unsigned old;
#if __CUDA_ARCH__ >= 700
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0,[%1],%2;" : "=r"(old) : "l"(counter), "r"(last) : "memory");
#endif
    return old;
  }
  // Whether this CTA is the last of the item's chunks; all of them are in memory then.
  __device__ __forceinline__ bool comes_last() const {
    __syncthreads();
    if (threadIdx.x == 0) {
      const int64_t at = (static_cast<int64_t>(it.part_token()) * p.blocks_per_token + it.block) * p.a.cache.num_kv_heads + it.kv_head;
      __threadfence();                                                                          // what the barrier has gathered goes before
      sh.last = atomicInc(p.count + at, it.chunks.count - 1) == unsigned(it.chunks.count - 1);  // back to 0 with the last one
      __threadfence();
    }
    __syncthreads();
    return sh.last;
  }
  __device__ __forceinline__ void join_row(int r, int n) {
    constexpr int kVectors = (D + 127) / 128, kAhead = 16 / kVectors;  // loads in flight
    const int64_t at = part_row(r);
    const float4* from = reinterpret_cast<const float4*>(p.part + at * D) + lane;
    float4 x[kAhead][kVectors], acc[kVectors];
    const auto fetch = [&](int first) {
#pragma unroll
      for (int s = 0; s < kAhead; s++)
#pragma unroll
        for (int j = 0; j < kVectors; j++) {
          x[s][j] = make_float4(0, 0, 0, 0);
          if (first + s < n && lane + 32 * j < D / 4) x[s][j] = __ldcg(from + (first + s) * (D / 4) + 32 * j);
        }
    };
    fetch(0);
    const float2 none = make_float2(kLowest, 0.f);
    const float2 a = lane < n ? __ldcg(p.part_ml + at + lane) : none, b = lane + 32 < n ? __ldcg(p.part_ml + at + lane + 32) : none;
    float high = fmaxf(a.x, b.x);
#pragma unroll
    for (int i = 16; i; i /= 2) high = fmaxf(high, __shfl_xor_sync(kAll, high, i));
    const float fa = exp2_fast(a.x - high), fb = exp2_fast(b.x - high), sum = warp_sum(a.y * fa + b.y * fb);
#pragma unroll
    for (int j = 0; j < kVectors; j++) acc[j] = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = 0; first < n; first += kAhead) {
#pragma unroll
      for (int s = 0; s < kAhead; s++) {
        const float f = __shfl_sync(kAll, first < 32 ? fa : fb, (first + s) % 32);  // 0 past the last chunk
#pragma unroll
        for (int j = 0; j < kVectors; j++) {
          acc[j].x = fmaf(f, x[s][j].x, acc[j].x), acc[j].y = fmaf(f, x[s][j].y, acc[j].y);
          acc[j].z = fmaf(f, x[s][j].z, acc[j].z), acc[j].w = fmaf(f, x[s][j].w, acc[j].w);
        }
      }
      if (first + kAhead < n) fetch(first + kAhead);
    }
    if (lane == 0) sh.inverse_sum[r] = __fdividef(1.f, sum);
#pragma unroll
    for (int j = 0; j < kVectors; j++)
      if (lane + 32 * j < D / 4) reinterpret_cast<float4*>(sh.joined[r])[lane + 32 * j] = acc[j];
  }
  // The CTA that comes last joins the chunks; then the result goes where it is read.
  __device__ __forceinline__ void finish() {
    if (it.chunks.count > 1 && !comes_last()) return;
    const AttentionOut& to = p.a.to;
    const int numbers = rows * D;
    int stored[kPerThread];  // of the first copy, fetched early
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      const int at = threadIdx.x + i * kThreads;
      if (at < numbers) stored[i] = sh.head[at / D] * D + at % D;
      if (at < numbers && to.num_perms && to.inverse[0]) stored[i] = to.inverse[0][stored[i]];
    }
    if (it.chunks.count > 1)
      for (int r = warp; r < rows; r += kWarps) join_row(r, it.chunks.count);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      const int at = threadIdx.x + i * kThreads, r = at / D, d = at % D;
      if (i * kThreads >= numbers) break;
      const bool inside = at < numbers;
      float x = inside ? sh.joined[r][d] * sh.inverse_sum[r] : 0.f;
      if constexpr (is_rotated(VF)) x = hadamard<scale_group(D)>(x);
      if (!inside) continue;
      const int64_t token = sh.token[r];
      if (to.num_perms) static_cast<half*>(to.x)[token * to.x_stride + fragment_place(stored[i])] = saturated(x);
      if (to.num_perms > 1 || to.out) others(token, sh.head[r] * D + d, x);
    }
  }
  __device__ __forceinline__ void others(int64_t token, int feature, float x) const {  // further copies
    const AttentionOut& to = p.a.to;
    if (to.out) to.out[token * p.a.cache.num_heads * D + feature] = x;
    for (int copy = 1; copy < to.num_perms; copy++) {
      const int stored = to.inverse[copy] ? to.inverse[copy][feature] : feature;
      static_cast<half*>(to.x)[static_cast<int64_t>(copy) * to.x_perm_stride + token * to.x_stride + fragment_place(stored)] = saturated(x);
    }
  }
};

template <int KF, int D, int NT>
__host__ __device__ constexpr int ctas_per_sm() {
  return D > 128 || NT > 1 ? 2 : KF == kCacheQ4 || D < 96 ? 4 : 3;
}

template <int KF, int VF, int D, int NT>
__global__ void __launch_bounds__(kWarps * 32, (ctas_per_sm<KF, D, NT>())) attention_decode(const __grid_constant__ DecodeParams params) {
  using Kernel = Decode<KF, VF, D, NT>;
  __shared__ typename Kernel::Shared shared;
  Kernel kernel(params, shared);
  let_successor_start();
  bool wait = true;
  if (params.a.q) {  // then this step's keys are the predecessor's too
    wait_for_predecessor();
    wait = false;
  }
  for (int index = blockIdx.x; kernel.begin(index); index += gridDim.x) {
    kernel.walk(wait);
    wait = false;
    kernel.join_warps();
    kernel.finish();
    __syncthreads();
  }
  if (wait && blockIdx.x == 0) wait_for_predecessor();  // this kernel must not end before its predecessor
}

using DecodeKernel = void (*)(DecodeParams);
// The kernel of a pair of formats for head dims 64, 80, 96, 128, 256; null for others.
template <int KF, int VF>
DecodeKernel decode_kernel(int D, bool wide) {
  switch (D) {
    case 64:
      return wide ? attention_decode<KF, VF, 64, 2> : attention_decode<KF, VF, 64, 1>;
    case 80:
      return attention_decode<KF, VF, 80, 1>;
    case 96:
      return attention_decode<KF, VF, 96, 1>;
    case 128:
      return wide ? attention_decode<KF, VF, 128, 2> : attention_decode<KF, VF, 128, 1>;
    case 256:
      return attention_decode<KF, VF, 256, 1>;
    default:
      return nullptr;
  }
}
constexpr bool has_wide(int D) { return D == 64 || D == 128; }

}  // namespace exl2nb
