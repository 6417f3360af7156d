// Split-KV attention of a few queries per sequence over a paged cache, in one kernel (flash-decoding: Dao et al., 2023).
//
// Work item (split_kv.cuh): sequence, KV head, block of query rows, chunk of keys. A query row is (token, one of the q_per_kv heads that
// share the KV head). A CTA takes items blockIdx.x, blockIdx.x + gridDim.x, ...; with RUNS an item has several neighbouring chunks, whose
// query rows are prepared once. Stages of an item:
//   1. Prefetch: every warp starts cp.async copies of its first cached K and V tiles, before it waits for the preceding kernel (PDL).
//   2. Rows: the CTA's warps prepare the queries (norm, RoPE, fp16) in shared memory, and this step's keys and values that fall into the
//      chunk; these are also written to the cache.
//   3. Chunk: warp w walks tiles w, w + warps, ... of 16 keys (32 where K and V have 4 bits): S^T = K Q^T, softmax under a running maximum,
//      O^T += V^T P^T, on tensor cores (m16n8k16). Keys, then dims, are the m dimension, so 8 query rows fill the n dimension. Tiles travel
//      through a ring in shared memory that belongs to the warp: no barrier between warps.
//   4. Merge: the warps' (max, sum, O) are merged in warp order. With one chunk the result is written; else partial results go to the
//      workspace, and the CTA that increments the item's counter last merges all chunks in chunk order.
// No float atomics, and chunk boundaries depend on the sequence's own context length (and on the batch only where AttentionArgs asks for
// it), so a result's bits depend on nothing else. K and V both of 4 bits have their own stages 2 and 3.
//
// With AttentionArgs::lamport_qkv the qkv rows carry Lamport flags (lamport.cuh): the kernel polls them and does not wait for the preceding
// kernel. Warp: its tiles and its share of O (registers). Lane 4 g + t: rows g, g + 8 and columns 2t, 2t + 1 of the MMA fragments. Bytes: K
// and V of the context once per block of query rows; partial results 4 * (D + 2) per (row, chunk), written and read once. Limits: D a
// multiple of 16, at most 256; at most 8 new tokens per sequence (any number if q is given ready).
#pragma once
#include <cmath>

#include "cuda/attention/split_kv.cuh"
#include "cuda/runtime/mma.cuh"

namespace exl2nb {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kShift = 8.f;             // probabilities are held times 2^8, so that small ones keep their bits in fp16
constexpr float kSlack = 6.f;             // the running maximum may lag: probabilities may reach 2^14
constexpr uint32_t kSeven = 0x80078007u;  // -7 * 2^-24, twice
constexpr float kQueryMax = 8159.f;       // 127 * 64 + 31: largest integer query
constexpr int kMagicBits =
    0x4b400000;                       // bits of the float 1.5 * 2^23: adding an integer below 2^22 to the bits or to the float is the same
constexpr float kMagic = 12582912.f;  // that float

// N consecutive fp16 scales as floats.
template <int N>
__device__ __forceinline__ void load_scales(const uint8_t* from, float unit, float (&to)[N]) {
  if constexpr (N % 2 == 0) {
    uint32_t w[N / 2];
    load_bytes<2 * N>(from, w);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = __half22float2(as_half2(w[i / 2]));
      to[i] = pair.x * unit, to[i + 1] = pair.y * unit;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = __half2float(reinterpret_cast<const half*>(from)[i]) * unit;
  }
}

// Rows from..to into a tile, in the largest vectors that fit.
template <int BYTES, int STRIDE>
__device__ __forceinline__ void put_rows(uint8_t* at, const uint8_t* rows, int from, int to, int lane) {
  using Unit = std::conditional_t<BYTES % 16 == 0, uint4, std::conditional_t<BYTES % 8 == 0, uint2, uint16_t>>;
  constexpr int kUnits = BYTES / sizeof(Unit);
#pragma unroll 1
  for (int i = from * kUnits + lane; i < to * kUnits; i += 32)
    reinterpret_cast<Unit*>(at + i / kUnits * STRIDE)[i % kUnits] = reinterpret_cast<const Unit*>(rows)[i];
}

// Probabilities of a tile as B fragments of fp16.
template <int NT>
__device__ __forceinline__ void to_fragments(const float (&s)[NT][4], uint32_t (&probs)[NT][2]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) probs[n][i] = transposed(bits_of_half2(__floats2half2_rn(s[n][2 * i], s[n][2 * i + 1])));
}

// KF, VF: CacheFormat of K and V. NT: query rows of an item are 8 NT, or 4 for NT 0. RUNS: an item may have several chunks.
template <int KF, int VF, int D, int NT, bool RUNS>
struct Decode : DecodeShape<KF, VF, D, NT> {
  using Shape = DecodeShape<KF, VF, D, NT>;
  using Shape::kQ4, Shape::kMaxWarps, Shape::kSlots, Shape::kRows, Shape::kN, Shape::kColumns, Shape::kGroups, Shape::kQStride,
      Shape::kOStride, Shape::kCoded, Shape::kStep, Shape::kStageBytes, Shape::kResultBytes, Shape::kStages, Shape::kSharedBytes,
      Shape::kSubs;
  using typename Shape::KeyTile, typename Shape::ValueTile, typename Shape::Shared;
  using Key = KeyFragment<KF, D>;
  using Value = ValueFragment<VF, D>;

  const DecodeParams& p;
  Shared& sh;
  Item it;
  int thread, lane, warp, warps, g, t;  // lane = 4 g + t
  int q_per_kv, rows, first_row, chunk_start, chunk_end, first_new;
  int run_end;        // end of the CTA's last chunk
  int plain_end;      // tiles that end before it need no mask, no softcap and no new rows
  int stride, ahead;  // keys from a tile of the warp to its next; to the one that replaces it in the ring
  int page_row;       // page * Hkv + head of the K tile fetched last
  static_assert(kPage == 256, "shifts");
  int page_base, page_of_lane;  // 32 entries of the block table, one per lane, from page_base on
  int first_page, last_page;    // pages of the first and of the last new token
  int new_from, num_new;        // the item's new tokens: first key, count
  CosSin<kSlots> cos_sin;       // of new token cos_sin_of
  int cos_sin_of;
  int position[kN][2];  // of this lane's queries
  uint8_t* tiles;       // the warp's ring
  uint32_t q[kN][kQ4 ? kColumns * kGroups : kSlots * 2][2];
  float unit[kN][2];
  int begin_of_sums[4];
  uint32_t sevens[2][4];                                                          // -7 in the rows of an even, of an odd group
  int read_at, write_at;                                                          // of the lane's 16 bytes in a tile
  float zero[kN][pool_is_coded(KF) ? kQ4 ? kColumns * kGroups : kGroups : 1][2];  // initial value of a group's sum: -zero point * sum(q)
  float level[kN][(kGroups + 1) / 2][4];                                          // sum of the values' zero points, two groups each
  float o[kN][D / 16][4], row_max[kN][2], row_sum[kN][2];

  __device__ __forceinline__ Decode(const DecodeParams& params, uint8_t* shared) : p(params), sh(*reinterpret_cast<Shared*>(shared)) {
    unsigned here;
    asm volatile("mov.u32 %0,%%tid.x;" : "=r"(here));  // once: the compiler would read it again and again
    thread = static_cast<int>(here & 1023);
    lane = thread % 32;
    if constexpr (kQ4) lane = __shfl_sync(kAll, lane, lane);  // opaque to the compiler, which would recompute it
    warp = uniform(thread / 32), warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    q_per_kv = p.q_per_kv, tiles = shared + tiles_at() + warp * p.warp_bytes;
    if constexpr (kQ4) read_at = swizzled<D>(lane % 16 * (D / 2) + (kGroups % 2 ? 0 : lane / 16 * 16)), write_at = swizzled<D>(lane * 16);
  }

  // ---------------------------------------------------------------- indices and addresses
  __device__ __forceinline__ int row_of(int n, int j) const { return kQ4 ? n * 8 + t + 4 * j : n * 8 + 2 * t + j; }  // of column 2t + j
  __device__ __forceinline__ int token_of(int row) const {  // row / q_per_kv without a division
    return q_per_kv == 1 ? row : static_cast<int>(__umulhi(static_cast<unsigned>(row), p.q_per_kv_inverse));
  }
  __device__ __forceinline__ int tiles_at() const { return RUNS ? p.tiles_at : kSharedBytes; }
  __device__ __forceinline__ int last_end() const { return RUNS ? run_end : chunk_end; }  // keys from here on are not fetched
  __device__ __forceinline__ int table(int page) const {
    return page < p.a.cache.max_pages ? p.a.cache.block_table[static_cast<int64_t>(it.b) * p.a.cache.max_pages + page] : 0;
  }
  __device__ __forceinline__ void fetch_pages(int token) {
    page_base = token / kPage;
    page_of_lane = (page_base + lane) * kPage < last_end() ? table(page_base + lane) : 0;
  }
  __device__ __forceinline__ int page_at(int token) const {
    return __shfl_sync(kAll, page_of_lane, (token >> 8) - page_base) * p.a.cache.num_kv_heads + it.kv_head;
  }
  __device__ __forceinline__ float* results(int w) const {
    uint8_t* const from = reinterpret_cast<uint8_t*>(&sh);
    if (RUNS && sh.several) return reinterpret_cast<float*>(from + p.results_at + w * p.result_bytes);
    return reinterpret_cast<float*>(from + tiles_at() + w * p.warp_bytes);
  }
  __device__ __forceinline__ int64_t part_row(int r) const {  // of a query row's partial results in the workspace
    const int row = it.part_token() + sh.token[r] - it.first_token;
    return (static_cast<int64_t>(row) * p.a.cache.num_heads + sh.head[r]) * p.max_splits;
  }

  // ---------------------------------------------------------------- items
  // Sets up work item `index`; false past the last one.
  __device__ __forceinline__ bool begin_item(int index) {
    if (!find_item<kRows, kStep, RUNS>(p, index, it)) return false;
    const int oldest_query = uniform(it.context - it.queries);
    first_row = uniform(it.block * kRows);
    rows = uniform(min(it.queries * q_per_kv - first_row, kRows));
    chunk_start = uniform(it.chunks.start + it.chunk * it.chunks.size);
    const int newest = oldest_query + token_of(first_row + rows - 1);  // no row sees further
    const int stop = chunk_start + (RUNS ? it.run : 1) * it.chunks.size;
    run_end = uniform(min(stop, newest + 1));
    chunk_end = RUNS ? uniform(min(chunk_start + it.chunks.size, run_end)) : run_end;
    first_new = p.a.q ? uniform(it.context) : oldest_query;
    plain_end = p.a.softcap > 0.f || p.a.window > 0 ? 0 : min(first_new, oldest_query + token_of(first_row) + 1);
    stride = uniform(warps * kStep), ahead = kStages * stride;
    fetch_pages(chunk_start);
    new_from = max(first_new, chunk_start), num_new = max(min(it.context, stop) - new_from, 0), cos_sin_of = -1;
    if (!p.a.q) first_page = table(oldest_query / kPage), last_page = table((it.context - 1) / kPage);
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) position[n][j] = oldest_query + token_of(first_row + row_of(n, j));
    if (RUNS && thread == 0) sh.last_chunk = it.chunk + it.run - 1, sh.runs = it.runs, sh.several = it.run > 1;
    if (thread < kRows) {
      const int r = first_row + thread, i = token_of(r);
      sh.token[thread] = it.first_token + i, sh.head[thread] = it.kv_head * q_per_kv + r - i * q_per_kv;
    }
    return true;
  }
  // RUNS: the next chunk of the same rows, if there is one. Its first tiles have been requested.
  __device__ __forceinline__ bool next_chunk() {
    if (!RUNS || it.chunk == sh.last_chunk) return false;
    it.chunk++, chunk_start += it.chunks.size, chunk_end = min(chunk_start + it.chunks.size, run_end);
    return true;
  }

  // ---------------------------------------------------------------- 1. prefetch
  // Into L2: lengths, block table and position that the first item is likely to need. One latency instead of two.
  __device__ __forceinline__ void prefetch_batch() const {
    const CacheArgs& c = p.a.cache;
    const float share = __fdividef(static_cast<float>(blockIdx.x), static_cast<float>(gridDim.x));
    const int b = min(static_cast<int>(share * static_cast<float>(c.sequences)), c.sequences - 1);
    const int *const table = c.block_table + static_cast<int64_t>(b) * c.max_pages, *const position = p.a.rope.positions && b < p.a.tokens
                                                                                                          ? p.a.rope.positions + b
                                                                                                          : nullptr;
    [[maybe_unused]] int none;
    if (lane < c.max_pages) asm volatile("ld.global.u32 %0,[%1];" : "=r"(none) : "l"(table + lane));
    if (position) asm volatile("ld.global.u32 %0,[%1];" : "=r"(none) : "l"(position));
    if (thread < 4) {
      const int* const line = thread == 0 ? c.cu_seqlens + b : thread == 1 ? c.context_lens + b : thread == 2 ? table : position;
      if (line) keep_line(line);
    }
  }
  // Into L2: cosines and sines of up to four of the item's tokens.
  __device__ __forceinline__ void prefetch_cos_sin() const {
    const RopeArgs& rope = p.a.rope;
    const int i = lane / 8, at = lane % 4 * 32;
    if (warp != warps - 1 || !rope.cos || i >= it.queries || at >= rope.half) return;
    const int64_t row = rope.positions ? rope.positions[it.first_token + i] : it.context - it.queries + i;
    keep_line((lane & 4 ? rope.sin : rope.cos) + row * rope.half + at);
  }
  // Requests the warp's first tiles: half of them before the rows of stage 2, the others behind these rows, which would else queue behind
  // all requests.
  __device__ __forceinline__ void prefetch_tiles(bool others) {
    const int first = chunk_start + warp * kStep;
    static_assert(kStages <= 2, "halves");
    const int stage = others && kStages == 2;
    if constexpr (kQ4) {
      fetch_q4(tiles + stage * kStageBytes, first + stage * stride);
    } else {
      if (kStages == 2 || !others) fetch<KF, true>(tiles + stage * kStageBytes, first + stage * stride);
      if (kStages == 2 || others) fetch<VF, false>(tiles + stage * kStageBytes + KeyTile::kBytes, first + stage * stride);
    }
  }
  __device__ __forceinline__ void prefetch() {
    prefetch_cos_sin();
    prefetch_tiles(false);
    load_cos_sin(warp);
    const int* const inverse = p.a.to.num_perms ? p.a.to.inverse[0] : nullptr;
    if (inverse && thread < rows * D / 32) {  // into the cache
      const int* const line = inverse + it.kv_head * q_per_kv * D + thread % (q_per_kv * D / 32) * 32;
      prefetch_word(line);
      keep_line(line);
    }
  }

  // ---------------------------------------------------------------- 2. queries and this step's keys and values
  struct NewRow {
    bool is_query, is_key;  // else a value
    int i, head;            // new token, head
  };
  // Row r of the item: its queries, then the item's new keys, then its new values.
  __device__ __forceinline__ NewRow new_row(int r) const {
    NewRow x;
    x.is_query = r < rows, x.is_key = !x.is_query && r < rows + num_new;
    x.i = x.is_query ? token_of(first_row + r) : r - rows - (x.is_key ? 0 : num_new) + new_from - first_new;
    x.head = x.is_query ? it.kv_head * q_per_kv + first_row + r - x.i * q_per_kv : it.kv_head;
    return x;
  }
  __device__ __forceinline__ const float* row_at(int r) const {
    const AttentionArgs& a = p.a;
    const NewRow x = new_row(r);
    const int of_token = a.cache.num_heads + 2 * a.cache.num_kv_heads;
    const int number = x.is_query ? x.head : a.cache.num_heads + (x.is_key ? 0 : a.cache.num_kv_heads) + x.head;
    const int64_t token = it.first_token + x.i;
    return a.q ? a.q + (token * a.cache.num_heads + x.head) * D : a.qkv + (token * of_token + number) * D;
  }
  __device__ __forceinline__ void load_cos_sin(int r) {
    const AttentionArgs& a = p.a;
    if (a.q || r >= rows + 2 * num_new) return;
    const int i = new_row(r).i;
    if (i == cos_sin_of) return;
    cos_sin_of = i;
    cos_sin.load(a.rope, a.rope.positions ? a.rope.positions[it.first_token + i] : it.context - it.queries + i);
  }
  // Prepares the rows, warp by warp. A warp has two rows in flight and requests a third while it works on the first.
  __device__ __forceinline__ void prepare_rows(bool wait) {
    const AttentionArgs& a = p.a;
    const int all = rows + 2 * num_new;
    const float factor = a.softcap > 0.f ? a.scale : a.scale * kLog2e;
    for (int i = rows * kQStride / 2 + thread; i < kRows * kQStride / 2; i += blockDim.x) reinterpret_cast<uint32_t*>(sh.q)[i] = 0;
    if (kQ4 && thread >= rows && thread < kRows) sh.unit[thread] = 0.f;
    if (kQ4 && thread < 12) {
      const bool there = thread < 8 ? thread % 2 == thread / 4 : thread % 2;
      reinterpret_cast<uint32_t*>(sh.constants)[thread] = there ? thread < 8 ? kSeven : kMagicBits : 0u;
    }
    Row<kSlots> next, second;
    const float *const first = row_at(min(warp, all - 1)), *const then = warp + warps < all ? row_at(warp + warps) : nullptr;
    if (wait && !a.lamport_qkv) pdl_wait();
    if (warp < all || a.lamport_qkv) next.load(first, D);
    if (then) second.load(then, D);
    if (a.lamport_qkv) next.poll_rest(first, D, &second, then);  // a warp without a row, too: nothing else is asked for meanwhile
    prefetch_tiles(true);
#pragma unroll 1
    for (int r = warp; r < all; r += warps) {
      const NewRow x = new_row(r);
      Row<kSlots> row = next;
      next = second;
      if (a.lamport_qkv && r >= warp + 2 * warps) row.poll_rest(row_at(r), D);
      if (r + 2 * warps < all) second.load(row_at(r + 2 * warps), D);
      if (r > warp) load_cos_sin(r);
      if (x.is_query || x.is_key) {
        if (!a.q) prepare(row, a.rope, x.is_query ? a.rope.q_norm : a.rope.k_norm, x.head, cos_sin, sh.scratch[warp], D);
      } else if (!a.rope.norm_whole) {
        row.clip(a.rope.clip);
      }
      if (x.is_query) {
#pragma unroll
        for (int s = 0; s < kSlots; s++) {
          row.x[s] *= factor;
          if constexpr (pool_is_rotated(KF)) row.x[s] = hadamard<pool_group(D)>(row.x[s]);
          if constexpr (!kQ4)
            if (lane + 32 * s < D) sh.q[r * kQStride + Key::place(lane + 32 * s)] = saturated(row.x[s]);
        }
        if constexpr (kQ4) quantise_query(r, row.x);
      } else if constexpr (kCoded) {
        row.store(sh.new_rows[x.is_key ? x.i : kMaxNew + x.i], D);
      } else {
#pragma unroll
        for (int s = 0; s < kSlots; s++)
          if (lane + 32 * s < D) put_new<kCacheF16>({half(), __half_as_ushort(__float2half_rn(row.x[s]))}, x.i, lane + 32 * s, x.is_key);
      }
    }
    __syncthreads();
    if constexpr (kCoded) {
      if (!num_new) return;
      // 32 dims of a new key or value at a time: as the cache holds them into shared memory and, once, into the cache.
#pragma unroll 1
      for (int j = warp; j < 2 * num_new * kSlots; j += warps) {
        const bool key = j < num_new * kSlots;
        const int i = (key ? j : j - num_new * kSlots) / kSlots + new_from - first_new, slot = j % kSlots;
        if (KF == VF || key)
          encode_row<KF>(i, slot, key);
        else
          encode_row<VF>(i, slot, key);
      }
      __syncthreads();
    }
  }
  template <int F>
  __device__ __forceinline__ void encode_row(int i, int slot, bool key) {
    const int d = slot * 32 + lane;
    const Coded made = encode<F, pool_group(D)>(d < D ? sh.new_rows[key ? i : kMaxNew + i][d] : 0.f);
    if (d < D) put_new<F>(made, i, d, key);
  }
  // Dim d of new token i into shared memory and, by one block of query rows, into the cache.
  template <int F>
  __device__ __forceinline__ void put_new(const Coded& made, int i, int d, bool key) {
    constexpr int row_bytes = D * pool_bits(F) / 8, head_bytes = page_bytes(F, D), G = pool_group(D);
    put<F, G>(made, d, (key ? sh.k : sh.v) + i * row_bytes, (key ? sh.k_scale : sh.v_scale) + i * kGroups * 2);
    if (it.block) return;
    const int at = it.context - it.queries + i;
    const int64_t number =
        static_cast<int64_t>(at / kPage == (it.context - 1) / kPage ? last_page : first_page) * p.a.cache.num_kv_heads + it.kv_head;
    uint8_t* const page = static_cast<uint8_t*>(key ? p.a.cache.k_pool : p.a.cache.v_pool) + number * head_bytes;
    put<F, G>(made, d, page + at % kPage * row_bytes, page + kPage * row_bytes + at % kPage * kGroups * 2);
  }
  // Queries as B fragments; and the initial values of the groups' sums, -zero point * sum(q), by the same MMAs.
  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int pair = 0; pair < kSlots; pair++) {
        const uint4 x = *reinterpret_cast<const uint4*>(sh.q + (n * 8 + g) * kQStride + pair * 32 + t * 8);
        q[n][2 * pair][0] = x.x, q[n][2 * pair][1] = x.y, q[n][2 * pair + 1][0] = x.z, q[n][2 * pair + 1][1] = x.w;
      }
    if constexpr (pool_is_coded(KF)) {
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int group = 0; group < kGroups; group++) {
          float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
          for (int k = group * Key::kSteps; KF != kCacheFp8 && k < (group + 1) * Key::kSteps; k++) {
            mma16816(sum, Key::kZeroLow, Key::kZeroLow, Key::kZeroHigh, Key::kZeroHigh, q[n][k][0], q[n][k][1]);
            if (KF == kCacheQ8) mma16816(sum, 0x38003800u, 0x38003800u, 0x38003800u, 0x38003800u, q[n][k][0], q[n][k][1]);
          }
          zero[n][group][0] = sum[0], zero[n][group][1] = sum[1];
        }
    }
  }

  // ---------------------------------------------------------------- cached tiles: global to shared memory
  // Starts to copy the cached keys or values of the tile at `token`. Each call is one cp.async group, even if it copies nothing.
  template <int F, bool KEYS>
  __device__ __forceinline__ void fetch(uint8_t* to, int token) {
    using T = Tile<F, D, KEYS, kStep>;
    if (token < last_end()) {
      if constexpr (KEYS) {  // the values come next, of the same page
        if ((token >> 8) - page_base > 31) fetch_pages(token);
        page_row = page_at(token);
      }
      const int inside = token & (kPage - 1), old = first_new - token;
      const uint8_t* const page =
          static_cast<const uint8_t*>(KEYS ? p.a.cache.k_pool : p.a.cache.v_pool) + static_cast<int64_t>(page_row) * page_bytes(F, D);
      const uint8_t *const from = page + (inside * T::kRow + lane * 16), *const scales =
                                                                             page + (kPage * T::kRow + inside * T::kScaleRow + lane * 16);
      constexpr bool kEven = kStep * T::kRow % 512 == 0 && (512 % T::kRow == 0 || !T::kPad);  // a step of 512 bytes is whole rows
      if (kEven && old >= kStep) {
        uint8_t* const rows_to = to + (lane * 16 + lane * 16 / T::kRow * T::kPad);
#pragma unroll
        for (int first = 0; first < kStep * T::kRow; first += 512) copy16<true>(rows_to + first + first / T::kRow * T::kPad, from + first);
        if (kStep * T::kScaleRow > 0 && lane * 16 < kStep * T::kScaleRow) copy16<true>(to + T::kScalesAt + lane * 16, scales);
        if constexpr (kStep * T::kScaleRow > 512)
          if (lane * 16 + 512 < kStep * T::kScaleRow) copy16<true>(to + T::kScalesAt + lane * 16 + 512, scales + 512);
      } else {
        const int fill = min(max(old, 0), kStep);  // zeros behind them: finite numbers under a probability of 0
#pragma unroll 1
        for (int b = lane * 16; b < kStep * T::kRow; b += 512)
          copy16_part(to + b + b / T::kRow * T::kPad, from + (b - lane * 16), min(max(fill * T::kRow - b, 0), 16));
#pragma unroll 1
        for (int b = lane * 16; b < kStep * T::kScaleRow; b += 512)
          copy16_part(to + T::kScalesAt + b, scales + (b - lane * 16), min(max(fill * T::kScaleRow - b, 0), 16));
      }
    }
    async_commit();
  }
  // Adds this step's rows to a tile that has arrived.
  template <int F, bool KEYS>
  __device__ __forceinline__ void complete(uint8_t* at, int token) const {
    using T = Tile<F, D, KEYS, kStep>;
    const int from = max(first_new - token, 0), to = min(it.context - token, kStep), skip = token - first_new;
    if (from >= to) return;
    put_rows<T::kRow, T::kStride>(at, (KEYS ? sh.k : sh.v) + skip * T::kRow, from, to, lane);
    if constexpr (pool_is_coded(F))
      put_rows<T::kScaleRow, T::kScaleRow>(at + T::kScalesAt, (KEYS ? sh.k_scale : sh.v_scale) + skip * T::kScaleRow, from, to, lane);
    __syncwarp();
  }
  // Until the oldest of the 2 * kStages groups in flight is complete.
  __device__ __forceinline__ void wait_oldest() const {
    async_wait<2 * kStages - 1>();
    __syncwarp();
  }

  // ---------------------------------------------------------------- 3. one chunk
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kN; n++) {
      row_max[n][0] = row_max[n][1] = kLowest, row_sum[n][0] = row_sum[n][1] = 0.f;
#pragma unroll
      for (int i = 0; i < (kGroups + 1) / 2; i++) level[n][i][0] = level[n][i][1] = level[n][i][2] = level[n][i][3] = 0.f;
#pragma unroll
      for (int i = 0; i < D / 16; i++) o[n][i][0] = o[n][i][1] = o[n][i][2] = o[n][i][3] = 0.f;
    }
  }
  __device__ __forceinline__ void scores(const uint8_t* at, float (&s)[kSubs][kN][4]) {
    if constexpr (pool_is_coded(KF)) {
      constexpr bool kPairs = Key::kGroupBytes == 16 && kGroups % 2 == 0;  // of groups
      float scale[kSubs][2][kGroups];
      [[maybe_unused]] uint32_t both[kSubs][4];
      const uint8_t* const scales = at + KeyTile::kScalesAt + g * KeyTile::kScaleRow;
      const uint32_t row = shared_address(at) + lane % 16 * KeyTile::kStride + (kPairs ? lane / 16 * 16 : 0);
#pragma unroll
      for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
        for (int i = 0; i < 2; i++) load_scales(scales + (sub * kTile + i * 8) * KeyTile::kScaleRow, Key::kUnit, scale[sub][i]);
      static_for<kGroups>([&](auto group) {
        constexpr int G = decltype(group)::value;
        uint32_t w[kSubs][Key::kWords][2];  // of rows g and g + 8
        float sum[kSubs][kN][4];
#pragma unroll
        for (int sub = 0; sub < kSubs; sub++) {
          if constexpr (kPairs) {
            if constexpr (G % 2 == 0) load_matrices<false>(both[sub], row + sub * kTile * KeyTile::kStride + G * 16);
            w[sub][0][0] = both[sub][G % 2 * 2], w[sub][0][1] = both[sub][G % 2 * 2 + 1];
          } else if constexpr (Key::kMatrices) {
#pragma unroll
            for (int i = 0; i < Key::kWords; i++)
              load_matrices<false>(w[sub][i], row + sub * kTile * KeyTile::kStride + G * Key::kGroupBytes + i * 16);
          } else {
#pragma unroll
            for (int i = 0; i < 2; i++)
              load_bytes<2>(at + (sub * kTile + g + 8 * i) * KeyTile::kStride + G * Key::kGroupBytes + t * 2, &w[sub][0][i]);
          }
#pragma unroll
          for (int n = 0; n < kN; n++) sum[sub][n][0] = sum[sub][n][2] = zero[n][G][0], sum[sub][n][1] = sum[sub][n][3] = zero[n][G][1];
        }
        static_for<Key::kSteps>([&](auto step) {
          constexpr int S = decltype(step)::value, kStepOfAll = G * Key::kSteps + S, W = S % Key::kWords;
#pragma unroll
          for (int sub = 0; sub < kSubs; sub++) {
            uint32_t a0, a1, a2, a3;
            Key::template get<S>(w[sub][W][0], a0, a2), Key::template get<S>(w[sub][W][1], a1, a3);
#pragma unroll
            for (int n = 0; n < kN; n++) mma16816(sum[sub][n], a0, a1, a2, a3, q[n][kStepOfAll][0], q[n][kStepOfAll][1]);
          }
        });
#pragma unroll
        for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
          for (int n = 0; n < kN; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
              s[sub][n][i] = G ? fmaf(scale[sub][i / 2][G], sum[sub][n][i], s[sub][n][i]) : scale[sub][i / 2][G] * sum[sub][n][i];
      });
    } else {
      static_assert(kSubs == 1, "tiles of 16 keys");
      const uint32_t row = shared_address(at) + (lane % 16) * KeyTile::kStride + lane / 16 * 16;
      float odd[kN][4];
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[0][n][i] = odd[n][i] = 0.f;
      static_for<D / 16>([&](auto step) {
        constexpr int K = decltype(step)::value;
        uint32_t a[4];
        load_matrices<false>(a, row + K * 32);
#pragma unroll
        for (int n = 0; n < kN; n++) mma16816(K % 2 ? odd[n] : s[0][n], a[0], a[1], a[2], a[3], q[n][K][0], q[n][K][1]);
      });
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[0][n][i] += odd[n][i];
    }
  }
  // Softcap and mask.
  __device__ __forceinline__ void cap_and_mask(int token, float (&s)[kN][4]) {
    if (p.a.softcap > 0.f) {
      const float inverse = 1.f / p.a.softcap, cap = p.a.softcap * kLog2e;
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = cap * tanh_exact(s[n][i] * inverse);
    }
    const int oldest = it.context - it.queries + token_of(first_row), newest = it.context - it.queries + token_of(first_row + rows - 1);
    if (token + kTile - 1 <= oldest && (p.a.window <= 0 || newest - token < p.a.window)) return;
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int distance = position[n][i % 2] - (token + g + i / 2 * 8);
        if (distance < 0 || (p.a.window > 0 && distance >= p.a.window)) s[n][i] = -INFINITY;
      }
  }
  // Multiplies everything that row row_of(n, j) holds by f.
  __device__ __forceinline__ void scale_row(int n, int j, float f) {
    row_sum[n][j] *= f;
#pragma unroll
    for (int i = 0; i < D / 16; i++) o[n][i][j] *= f, o[n][i][2 + j] *= f;
    if constexpr (scales_in_probs(VF, D)) {
#pragma unroll
      for (int i = 0; i < (kGroups + 1) / 2; i++) level[n][i][j] *= f, level[n][i][2 + j] *= f;
    }
  }
  // Scores to probabilities times 2^kShift. A row's maximum is raised, and its sums are rescaled, only where a score exceeds it by more
  // than kSlack.
  __device__ __forceinline__ void softmax(float (&s)[kSubs][kN][4]) {
#pragma unroll
    for (int n = 0; n < kN; n++) {
      float high[kColumns];
      bool more = false;
#pragma unroll
      for (int j = 0; j < kColumns; j++) {
        high[j] = fmaxf(s[0][n][j], s[0][n][2 + j]);
#pragma unroll
        for (int sub = 1; sub < kSubs; sub++) high[j] = fmaxf(high[j], fmaxf(s[sub][n][j], s[sub][n][2 + j]));
        more |= high[j] > row_max[n][j] + kSlack;
      }
      if (const bool raise = __any_sync(kAll, more); kQ4 ? __builtin_expect(raise, 0) : raise) {
#pragma unroll
        for (int j = 0; j < kColumns; j++) {
#pragma unroll
          for (int i = 4; i < 32; i *= 2) high[j] = fmaxf(high[j], __shfl_xor_sync(kAll, high[j], i));
          high[j] = high[j] > row_max[n][j] + kSlack ? high[j] : row_max[n][j];
          scale_row(n, j, exp2_fast(row_max[n][j] - high[j]));
          row_max[n][j] = high[j];
        }
      }
#pragma unroll
      for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (i % 2 < kColumns) {
            s[sub][n][i] = exp2_fast(s[sub][n][i] - (row_max[n][i % 2] - kShift));
            row_sum[n][i % 2] += s[sub][n][i];
          }
    }
  }
  // Where a probability times a value's scale would overflow fp16, everything the row holds is divided by 2^14. Rare.
  __device__ __forceinline__ void avoid_overflow(const uint8_t* scales, float (&s)[kSubs][kN][4]) {
    constexpr int kWords = kStep * ValueTile::kScaleRow / 4;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < (kWords + 31) / 32; i++)
      if (kWords % 32 == 0 || lane + 32 * i < kWords) bits |= reinterpret_cast<const uint32_t*>(scales)[lane + 32 * i];
    if (!__any_sync(kAll, bits & 0x40004000u)) return;  // all of them below 2
#pragma unroll
    for (int n = 0; n < kN; n++) {
      float most = 0.f;  // of row g
#pragma unroll
      for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float2 p = __half22float2(as_half2(transposed(bits_of_half2(__floats2half2_rn(s[sub][n][2 * i], s[sub][n][2 * i + 1])))));
          const half* const of = reinterpret_cast<const half*>(scales + (sub * kTile + 2 * t + 8 * i) * ValueTile::kScaleRow);
#pragma unroll 1
          for (int group = 0; group < kGroups; group++)
            most = fmaxf(most, fmaxf(p.x * fabsf(__half2float(of[group])), p.y * fabsf(__half2float(of[kGroups + group]))));
        }
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 1)), most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
      const bool full[2] = {__shfl_sync(kAll, most, 8 * t) > 65000.f, __shfl_sync(kAll, most, 8 * t + 4) > 65000.f};
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float f = full[j] ? 1.f / (1 << int(kShift + kSlack)) : 1.f;
        row_max[n][j] += full[j] ? kShift + kSlack : 0.f;
        scale_row(n, j, f);
#pragma unroll
        for (int sub = 0; sub < kSubs; sub++) s[sub][n][j] *= f, s[sub][n][2 + j] *= f;
      }
    }
  }
  __device__ __forceinline__ void values(const uint8_t* at, [[maybe_unused]] const uint8_t* scales, const float (&s)[kN][4]) {
    uint32_t probs[kN][2];
    to_fragments(s, probs);
    if constexpr (VF == kCacheF16) {
      const uint32_t row = shared_address(at) + (lane % 8 + lane / 16 * 8) * ValueTile::kStride + lane / 8 % 2 * 16;
      static_for<D / 16>([&](auto tile) {
        constexpr int I = decltype(tile)::value;
        uint32_t a[4];
        load_matrices<true>(a, row + I * 32);
#pragma unroll
        for (int n = 0; n < kN; n++) mma16816(o[n][I], a[0], a[1], a[2], a[3], probs[n][0], probs[n][1]);
      });
    } else if constexpr (scales_in_probs(VF, D)) {
      uint32_t scale[4][(kGroups + 1) / 2];  // of tokens 2t, 2t + 1, 2t + 8, 2t + 9: pairs of groups
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint8_t* const from = scales + (2 * t + i % 2 + i / 2 * 8) * ValueTile::kScaleRow;
        if constexpr (kGroups % 2 == 0) {
          load_bytes<2 * kGroups>(from, scale[i]);
        } else {
#pragma unroll
          for (int group = 0; group < kGroups; group++) {
            const uint32_t one = reinterpret_cast<const uint16_t*>(from)[group];
            scale[i][group / 2] = group % 2 ? scale[i][group / 2] | one << 16 : one;
          }
        }
      }
      const uint32_t row = shared_address(at) + lane % 16 * ValueTile::kStride;
      [[maybe_unused]] uint32_t both[4];
      static_for<kGroups>([&](auto group) {
        constexpr int G = decltype(group)::value;
        uint32_t w[2], scaled[kN][2];
        if constexpr (kGroups % 2 == 0) {
          if constexpr (G % 2 == 0) load_matrices<true>(both, row + lane / 16 * 16 + G * 16);
          w[0] = both[G % 2 * 2], w[1] = both[G % 2 * 2 + 1];
        } else {
          load_matrices<true>(w, row + G * 16);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const half2 pair = as_half2(permute(scale[2 * i][G / 2], scale[2 * i + 1][G / 2], G % 2 ? 0x7632 : 0x5410));
#pragma unroll
          for (int n = 0; n < kN; n++) scaled[n][i] = bits_of_half2(__hmul2(as_half2(probs[n][i]), pair));
        }
        static_for<2>([&](auto half_of) {
          constexpr int H = decltype(half_of)::value;
          const uint32_t v0 = H ? w[0] >> 8 : w[0], v1 = H ? w[1] >> 8 : w[1];
          const uint32_t a0 = v0 & 0x000f000fu, a1 = v0 & 0x00f000f0u, a2 = v1 & 0x000f000fu, a3 = v1 & 0x00f000f0u;
#pragma unroll
          for (int n = 0; n < kN; n++) mma16816(o[n][2 * G + H], a0, a1, a2, a3, scaled[n][0], scaled[n][1]);
        });
#pragma unroll
        for (int n = 0; n < kN; n++)  // in rows g and g + 8: groups G and G + 1, or G - 1 and G
          mma16816(level[n][G / 2], G % 2 ? 0u : kSeven, G % 2 ? kSeven : 0u, G % 2 ? 0u : kSeven, G % 2 ? kSeven : 0u, scaled[n][0],
                   scaled[n][1]);
      });
    } else {
      Share<VF, D, 8> v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = 2 * t + i % 2 + i / 2 * 8;
        v[i].load(at + token * ValueTile::kStride, scales + token * ValueTile::kScaleRow, g);
      }
      static_for<D / 16>([&](auto tile) {
        constexpr int I = decltype(tile)::value;
        uint32_t a0, a1, a2, a3;
        Value::template get<I>(v[0], v[1], a0, a1);
        Value::template get<I>(v[2], v[3], a2, a3);
#pragma unroll
        for (int n = 0; n < kN; n++) mma16816(o[n][I], a0, a1, a2, a3, probs[n][0], probs[n][1]);
      });
    }
  }
  // stage: ring slot of the next tile.
  __device__ __forceinline__ void process_chunk(int& stage) {
    const int first = chunk_start + warp * kStep;
#pragma unroll 1
    for (int token = first; token < chunk_end; token += stride) {
      uint8_t *const keys = tiles + stage * kStageBytes, *const from = keys + KeyTile::kBytes;
      float s[kSubs][NT][4];
      const bool plain = token + kStep <= plain_end;
      wait_oldest();
      if (!plain) complete<KF, true>(keys, token);
      scores(keys, s);
      __syncwarp();
      fetch<KF, true>(keys, token + ahead);
      if (!plain) {
#pragma unroll
        for (int i = 0; i < kSubs; i++) cap_and_mask(token + i * kTile, s[i]);
      }
      softmax(s);
      wait_oldest();
      if (!plain) complete<VF, false>(from, token);
      if constexpr (scales_in_probs(VF, D)) avoid_overflow(from + ValueTile::kScalesAt, s);
#pragma unroll
      for (int i = 0; i < kSubs; i++)
        values(from + i * kTile * ValueTile::kStride, from + ValueTile::kScalesAt + i * kTile * ValueTile::kScaleRow, s[i]);
      __syncwarp();
      fetch<VF, false>(from, token + ahead);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
  }

  // ---------------------------------------------------------------- 2. and 3. for 4-bit K and V in groups of 32
  // Integer scores, and four query rows at the cost of four.
  // Scores: a query row is quantised to integers of 14 bits with one unit, q = 64 h + l, h and l of 8 bits. h and l are columns 2t and 2t +
  // 1 of an int8 MMA (m16n8k32), for row t or t + 4. The key's codes are the other operand, unchanged, so a group of 32 dims is one MMA
  // with an exact sum. The sum starts at a number that makes it the bits of a float; from this float the zero point is subtracted, and the
  // group's scale multiplies the difference. A lane then holds row t for keys g and g + 8, and row t + 4 if there are more than four rows:
  // columns 2t and 2t + 1 of the second product. A row's arithmetic does not depend on the other rows. Values: the scale multiplies the
  // probability. A byte with two codes enters as fp16 subnormals: the whole byte in one row of the result, its upper code in another; the
  // lower code's share is their difference. Tile: keys, values, scales of the keys, scales of the values; rows without padding. 16-byte
  // vectors are XOR-swizzled against bank conflicts of ldmatrix. Copies both tiles at `token` as one cp.async group.
  __device__ __forceinline__ void fetch_q4(uint8_t* to, int token) {
    constexpr int kRow = D / 2, kCodes = kStep * kRow, kScaleRow = 2 * kGroups, kScales = kStep * kScaleRow;
    if (token < last_end()) {
      if ((token >> 8) - page_base > 31) fetch_pages(token);
      const int inside = token & (kPage - 1), old = first_new - token;
      const int64_t page = static_cast<int64_t>(page_at(token)) * page_bytes(KF, D);
      const uint8_t *const k = static_cast<const uint8_t*>(p.a.cache.k_pool) + page, *const v =
                                                                                         static_cast<const uint8_t*>(p.a.cache.v_pool) +
                                                                                         page;
      const int codes = inside * kRow, at = kPage * kRow + inside * kScaleRow;
      if (old >= kStep) {
        const unsigned here = lane * 16;
        uint8_t *const there = to + write_at, *const of_scales = to + 2 * kCodes + here;
#pragma unroll
        for (int i = 0; i < kCodes; i += 512) {
          if (kCodes % 512 && i + lane * 16 >= kCodes) break;
          copy16<true>(there + (swizzled<D>(i) ^ i ? (write_at ^ swizzled<D>(i)) - write_at : i), k + codes + i + here);
          copy16<true>(there + kCodes + (swizzled<D>(i) ^ i ? (write_at ^ swizzled<D>(i)) - write_at : i), v + codes + i + here);
        }
        if constexpr (kScales == 256) {
          copy16<true>(of_scales, (lane < 16 ? k : v - 256) + at + here);
        } else {
#pragma unroll
          for (int i = 0; i < kScales; i += 512)
            if (i + lane * 16 < kScales)
              copy16<true>(of_scales + i, k + at + i + here), copy16<true>(of_scales + kScales + i, v + at + i + here);
        }
      } else {
        const int fill = min(max(old, 0), kStep);  // zeros behind them: finite numbers under a probability of 0
#pragma unroll 1
        for (int i = lane * 16; i < kCodes; i += 512) {
          const int bytes = min(max(fill * kRow - i, 0), 16);
          copy16_part(to + swizzled<D>(i), k + codes + i, bytes);
          copy16_part(to + kCodes + swizzled<D>(i), v + codes + i, bytes);
        }
#pragma unroll 1
        for (int i = lane * 16; i < kScales; i += 512) {
          const int bytes = min(max(fill * kScaleRow - i, 0), 16);
          copy16_part(to + 2 * kCodes + i, k + at + i, bytes);
          copy16_part(to + 2 * kCodes + kScales + i, v + at + i, bytes);
        }
      }
    }
    async_commit();
  }
  // Adds this step's rows to tiles that have arrived.
  __device__ __forceinline__ void complete_q4(uint8_t* at, int token) const {
    constexpr int kRow = D / 2, kCodes = kStep * kRow, kScaleRow = 2 * kGroups, kScales = kStep * kScaleRow;
    const int from = max(first_new - token, 0), to = min(it.context - token, kStep), skip = token - first_new;
    if (from >= to) return;
#pragma unroll 1
    for (int i = from * kRow + lane * 16; i < to * kRow; i += 512) {
      *reinterpret_cast<uint4*>(at + swizzled<D>(i)) = *reinterpret_cast<const uint4*>(sh.k + skip * kRow + i);
      *reinterpret_cast<uint4*>(at + kCodes + swizzled<D>(i)) = *reinterpret_cast<const uint4*>(sh.v + skip * kRow + i);
    }
#pragma unroll 1
    for (int i = from * kScaleRow + lane * 2; i < to * kScaleRow; i += 64) {
      *reinterpret_cast<uint16_t*>(at + 2 * kCodes + i) = *reinterpret_cast<const uint16_t*>(sh.k_scale + skip * kScaleRow + i);
      *reinterpret_cast<uint16_t*>(at + 2 * kCodes + kScales + i) = *reinterpret_cast<const uint16_t*>(sh.v_scale + skip * kScaleRow + i);
    }
    __syncwarp();
  }
  // Quantises query row r, one dim per lane and slot, into shared memory in the order of the MMAs.
  __device__ __forceinline__ void quantise_query(int r, const float (&x)[kSlots]) {
    float most = 0.f;
#pragma unroll
    for (int s = 0; s < kSlots; s++) most = fmaxf(most, fabsf(x[s]));
#pragma unroll
    for (int i = 16; i; i /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, i));
    most = fminf(most, 1e38f);
    const float to = most > 1e-30f ? __fdividef(kQueryMax, most) : 0.f;
    int8_t* const at = reinterpret_cast<int8_t*>(sh.q) + 2 * r * (D + 8) + lane / 8 * 8 + lane % 2 * 4 + lane % 8 / 2;
#pragma unroll
    for (int s = 0; s < kSlots; s++) {
      const int whole = __float2int_rn(fminf(fmaxf(x[s] * to, -kQueryMax), kQueryMax)), high = (whole + 32) >> 6;
      at[s * 32] = static_cast<int8_t>(high), at[s * 32 + D + 8] = static_cast<int8_t>(whole - high * 64);
    }
    if (lane == 0) sh.unit[r] = most * (1.f / kQueryMax);
  }
  __device__ __forceinline__ void load_integer_queries() {
    const uint8_t* const from = reinterpret_cast<const uint8_t*>(sh.q) + g * (D + 8) + t * 8;
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int i = 0; i < kColumns * kGroups; i++) {
        const int r = n * 8 + i / kGroups * 4;
        const uint2 w = *reinterpret_cast<const uint2*>(from + 2 * r * (D + 8) + i % kGroups * 32);
        q[n][i][0] = w.x, q[n][i][1] = w.y, unit[n][i / kGroups] = sh.unit[r + t];
        constexpr int kNothing[4] = {0, 0, 0, 0};
        int sum[4];
        mma16832(sum, 0x07070707u, 0x07070707u, 0x07070707u, 0x07070707u, w.x, w.y, kNothing);
        zero[n][i][0] = kMagic + static_cast<float>(sum[0] * 64 + sum[1]);
      }
    // Four registers in a row, from memory: the compiler would make constants anew for every product.
    const auto load = [](auto& to, const int4& four) { to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w; };
    load(sevens[0], sh.constants[0]), load(sevens[1], sh.constants[1]), load(begin_of_sums, sh.constants[2]);
  }
  // Codes of group G: of rows g and g + 8 of a tile of 16, or (TRANS) of token pairs 2t and 2t + 8. row: shared address of the tile.
  template <int G, bool TRANS>
  __device__ __forceinline__ void load_codes(uint32_t (&both)[4], uint32_t (&w)[2], uint32_t row, int sub) const {
    constexpr int kRow = D / 2;
    if constexpr (kGroups % 2 == 0) {
      if constexpr (G % 2 == 0) load_matrices<TRANS>(both, row + (read_at ^ G * 16) + sub * kTile * kRow);
      w[0] = both[G % 2 * 2], w[1] = both[G % 2 * 2 + 1];
    } else {
      load_matrices<TRANS>(w, row + read_at + (G * 16 + sub * kTile * kRow));
    }
  }
  __device__ __forceinline__ void scores_q4(const uint8_t* at, float (&s)[kSubs][kN][4]) {
    constexpr int kRow = D / 2, kScaleRow = 2 * kGroups;
    const uint8_t* const scales = at + 2 * kStep * kRow + g * kScaleRow;
    const uint32_t row = shared_address(at);
    float scale[kSubs][2][kGroups];
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
      for (int i = 0; i < 2; i++) load_scales(scales + (sub * kTile + i * 8) * kScaleRow, 1.f, scale[sub][i]);
    [[maybe_unused]] uint32_t both[kSubs][4];
    static_for<kGroups>([&](auto group) {
      constexpr int G = decltype(group)::value;
#pragma unroll
      for (int sub = 0; sub < kSubs; sub++) {
        uint32_t w[2];
        load_codes<G, false>(both[sub], w, row, sub);
#pragma unroll
        for (int n = 0; n < kN; n++)
#pragma unroll
          for (int j = 0; j < kColumns; j++) {
            const int i = j * kGroups + G;
            int sum[4];
            mma16832(sum, w[0] & 0x0f0f0f0fu, w[1] & 0x0f0f0f0fu, w[0] >> 4 & 0x0f0f0f0fu, w[1] >> 4 & 0x0f0f0f0fu, q[n][i][0], q[n][i][1],
                     begin_of_sums);
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const float whole = __int_as_float(sum[2 * half] * 64 + sum[2 * half + 1]) - zero[n][i][0];
              float& x = s[sub][n][2 * half + j];
              x = G ? fmaf(scale[sub][half][G], whole, x) : scale[sub][half][G] * whole;
            }
          }
      }
    });
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[sub][n][i] = i % 2 < kColumns ? s[sub][n][i] * unit[n][i % 2] : 0.f;
  }
  // As avoid_overflow. scales: of the values.
  __device__ __forceinline__ void avoid_overflow_q4(const uint8_t* scales, float (&s)[kSubs][kN][4]) {
#pragma unroll 1
    for (int column = 0; column < kN * kColumns; column++) {
      float most = 0.f, f = 1.f;
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int j = 0; j < kColumns; j++)
          if (n * kColumns + j == column) {
#pragma unroll
            for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
              for (int half_of = 0; half_of < 2; half_of++) {
                const half* const of = reinterpret_cast<const half*>(scales) + (sub * kTile + g + 8 * half_of) * kGroups;
                for (int group = 0; group < kGroups; group++)
                  most = fmaxf(most, s[sub][n][2 * half_of + j] * fabsf(__half2float(of[group])));
              }
#pragma unroll
            for (int i = 4; i < 32; i *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, i));
            if (most > 65000.f) f = 1.f / (1 << int(kShift + kSlack)), row_max[n][j] += kShift + kSlack;
            scale_row(n, j, f);
#pragma unroll
            for (int sub = 0; sub < kSubs; sub++) s[sub][n][j] *= f, s[sub][n][2 + j] *= f;
          }
    }
  }
  // at: the tile of values; scales: its scales.
  __device__ __forceinline__ void values_q4(const uint8_t* at, const uint8_t* scales, float (&s)[kSubs][kN][4]) {
    uint32_t scale[kSubs][2][kGroups];  // halves: of tokens 2t and 2t + 1; 2t + 8 and 2t + 9
    uint32_t any = 0;
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint8_t* const from = scales + (sub * kTile + i * 8 + 2 * t) * 2 * kGroups;
        constexpr int kVector = kGroups % 4 == 0 ? 4 : 1;
#pragma unroll
        for (int k = 0; k < kGroups; k += kVector) load_bytes<4 * kVector>(from + 4 * k, scale[sub][i] + k);
#pragma unroll
        for (int k = 0; k < kGroups; k++) any |= scale[sub][i][k];
      }
    if (__builtin_expect(__any_sync(kAll, any & 0x40004000u), 0)) avoid_overflow_q4(scales, s);  // else all of them are below 2
    const uint32_t row = shared_address(at);
    [[maybe_unused]] uint32_t both[kSubs][4];
    uint32_t probs[kSubs][kN][2];
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++) to_fragments(s[sub], probs[sub]);
    static_for<kGroups>([&](auto group) {
      constexpr int G = decltype(group)::value, kOther = kGroups + G;
#pragma unroll
      for (int sub = 0; sub < kSubs; sub++) {
        uint32_t w[2], scaled[kN][2];
        load_codes<G, true>(both[sub], w, row, sub);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const half2 pair =
              as_half2(permute(scale[sub][i][G / 2], scale[sub][i][kOther / 2], (G % 2 ? 0x32 : 0x10) | (kOther % 2 ? 0x7600 : 0x5400)));
#pragma unroll
          for (int n = 0; n < kN; n++) scaled[n][i] = bits_of_half2(__hmul2(as_half2(probs[sub][n][i]), pair));
        }
        static_for<2>([&](auto half_of) {
          constexpr int H = decltype(half_of)::value;
          const uint32_t v0 = permute(w[0], 0, H ? 0x4341 : 0x4240), v1 = permute(w[1], 0, H ? 0x4341 : 0x4240);
#pragma unroll
          for (int n = 0; n < kN; n++) mma16816(o[n][2 * G + H], v0, v0 & 0x00f000f0u, v1, v1 & 0x00f000f0u, scaled[n][0], scaled[n][1]);
        });
#pragma unroll
        for (int n = 0; n < kN; n++)  // in rows g and g + 8: groups G and G + 1, or G - 1 and G
          mma16816(level[n][G / 2], sevens[G % 2][0], sevens[G % 2][1], sevens[G % 2][2], sevens[G % 2][3], scaled[n][0], scaled[n][1]);
      }
    });
  }
  // One tile. PLAIN: no mask, no softcap, no new rows.
  template <bool PLAIN>
  __device__ __forceinline__ void process_tile_q4(uint8_t* at, int token) {
    constexpr int kCodes = kStep * D / 2, kScales = kStep * 2 * kGroups;
    float s[kSubs][kN][4];  // of columns 2t and 2t + 1 of keys g, then of g + 8
    async_wait<kStages - 1>();
    __syncwarp();
    if constexpr (!PLAIN) complete_q4(at, token);
    scores_q4(at, s);
    if constexpr (!PLAIN) {
#pragma unroll
      for (int i = 0; i < kSubs; i++) cap_and_mask(token + i * kTile, s[i]);
    }
    softmax(s);
    values_q4(at + kCodes, at + 2 * kCodes + kScales, s);
    __syncwarp();
    fetch_q4(at, token + ahead);
  }
  __device__ __forceinline__ void process_chunk_q4(int& stage) {
    const int plain_last = min(plain_end, chunk_end) - kStep;
    int token = chunk_start + warp * kStep;
    const auto next = [&] { token += stride, stage = stage + 1 == kStages ? 0 : stage + 1; };
#pragma unroll 1
    for (; token <= plain_last; next()) process_tile_q4<true>(tiles + stage * kStageBytes, token);
#pragma unroll 1
    for (; token < chunk_end; next()) process_tile_q4<false>(tiles + stage * kStageBytes, token);
  }

  // ---------------------------------------------------------------- 4. merge
  // Merges the warps' results: to the output if there is one chunk, else to the workspace. A thread owns four dims of a row.
  __device__ __forceinline__ void merge_warps() {
    const int vectors = rows * (D / 4);
    const bool single = it.chunks.count == 1;
    if (RUNS && sh.several) __syncthreads();  // the chunk before has been joined
    int4 place = make_int4(0, 0, 0, 0);
    const int mine = thread < vectors ? thread : 0;
    if (single) place = stored_rows(mine / (D / 4), mine % (D / 4) * 4);
    float* const to = results(warp);
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int j = 0; j < kColumns; j++) {
        float sum = row_sum[n][j];
#pragma unroll
        for (int i = 4; i < 32; i *= 2) sum += __shfl_xor_sync(kAll, sum, i);
        const int r = row_of(n, j);
        if (g == 0) sh.max[warp][r] = row_max[n][j], sh.sum[warp][r] = sum;
        if (r >= rows) continue;
        static_for<D / 16>([&](auto tile) {
          constexpr int i = decltype(tile)::value;
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float x = o[n][i][2 * half + j];
            if constexpr (kQ4) {  // whole bytes, and their upper codes, in units of 2^-24
              x = half ? o[n][i][2 + j] * 0.0625f : o[n][i][j] - o[n][i][2 + j];
              x = (x + level[n][i / 4][i / 2 % 2 * 2 + j]) * 0x1p24f;
            } else if constexpr (scales_in_probs(VF, D)) {  // codes have units of 2^-24 or 2^-20
              x = fmaf(x, half ? 0x1p20f : 0x1p24f, level[n][i / 4][i / 2 % 2 * 2 + j] * 0x1p24f);
            }
            to[r * kOStride + Value::template dim<i>(g, half)] = x;
          }
        });
      }
    __syncthreads();
    const int used = min(warps, (chunk_end - chunk_start + kStep - 1) / kStep);
#pragma unroll 1
    for (int i = thread; i - lane < vectors; i += blockDim.x) {
      const bool inside = i < vectors;
      const int r = inside ? i / (D / 4) : 0, d = inside ? i % (D / 4) * 4 : 0;
      float high = kLowest, sum = 0.f;
      float4 x = make_float4(0, 0, 0, 0);
#pragma unroll 1
      for (int first = 0; first < used; first += 8) {
        float m[8];
#pragma unroll
        for (int w = 0; w < 8; w++) m[w] = first + w < used ? sh.max[first + w][r] : kLowest;
        const float before = high;
#pragma unroll
        for (int w = 0; w < 8; w++) high = fmaxf(high, m[w]);
        const float f = exp2_fast(before - high);  // of what comes from the warps before these, if any
        sum *= f, x.x *= f, x.y *= f, x.z *= f, x.w *= f;
#pragma unroll
        for (int w = 0; w < 8; w++) {
          const int from = min(first + w, used - 1);
          const float4 y = *reinterpret_cast<const float4*>(results(from) + r * kOStride + d);
          m[w] = first + w < used ? exp2_fast(m[w] - high) : 0.f;
          sum = fmaf(sh.sum[from][r], m[w], sum);
          x.x = fmaf(m[w], y.x, x.x), x.y = fmaf(m[w], y.y, x.y), x.z = fmaf(m[w], y.z, x.z), x.w = fmaf(m[w], y.w, x.w);
        }
      }
      if (single) {
        const float f = __fdividef(1.f, sum);
        if (i >= static_cast<int>(blockDim.x) && inside) place = stored_rows(r, d);
        write(r, d, make_float4(x.x * f, x.y * f, x.z * f, x.w * f), place, inside);
      } else if (inside) {
        const int64_t at = part_row(r) + it.chunk;
        *reinterpret_cast<float4*>(p.part + at * D + d) = x;
        if (d == 0) p.part_ml[at] = make_float2(high, sum);
      }
    }
  }
  // Whether this CTA is the last one of those that share the item's rows. Then all partial results are visible.
  __device__ __forceinline__ bool is_last() const {
    __syncthreads();
    if (thread == 0) {
      const int64_t at = (static_cast<int64_t>(it.part_token()) * p.blocks_per_token + it.block) * p.a.cache.num_kv_heads + it.kv_head;
      const int ctas = RUNS ? sh.runs : it.chunks.count;
      sh.last = increment(p.count + at, ctas - 1) == unsigned(ctas - 1);  // back to 0 with the last one
    }
    __syncthreads();
    return sh.last;
  }
  // A warp merges the chunks of a row. Many chunks are added up in two halves, by two warps if there are enough: the same sums.
  __device__ __forceinline__ void merge_chunks() {
    constexpr int kVectors = (D + 127) / 128, kAhead = 16 / kVectors;  // loads in flight
    const int n = it.chunks.count, middle = n > kAhead ? kAhead * ((n + 2 * kAhead - 1) / (2 * kAhead)) : n;
    const bool shared = n > middle && 2 * rows <= warps;
#pragma unroll 1
    for (int unit = warp; unit < (shared ? warps : rows); unit += warps) {
      const bool second = unit >= rows, idle = second && unit >= 2 * rows;
      const int r = idle ? 0 : second ? unit - rows : unit;
      const int64_t at = part_row(r);
      const float4* from = reinterpret_cast<const float4*>(p.part + at * D) + lane;
      float4 x[kAhead][kVectors], acc[kVectors], total[kVectors];
      int4 place[kVectors];
      const auto fetch = [&](int first) {
#pragma unroll
        for (int s = 0; s < kAhead; s++)
#pragma unroll
          for (int j = 0; j < kVectors; j++) {
            x[s][j] = make_float4(0, 0, 0, 0);
            if (first + s < n && lane + 32 * j < D / 4) x[s][j] = __ldcg(from + (first + s) * (D / 4) + 32 * j);
          }
      };
      const int begin = second ? middle : 0, end = idle ? begin : shared && !second ? middle : n;
      fetch(begin);
      const float2 none = make_float2(kLowest, 0.f);
      const float2 a = lane < n ? __ldcg(p.part_ml + at + lane) : none, b = lane + 32 < n ? __ldcg(p.part_ml + at + lane + 32) : none;
#pragma unroll
      for (int j = 0; j < kVectors; j++) place[j] = stored_rows(r, lane + 32 * j < D / 4 ? (lane + 32 * j) * 4 : 0);
      float high = fmaxf(a.x, b.x);
#pragma unroll
      for (int i = 16; i; i /= 2) high = fmaxf(high, __shfl_xor_sync(kAll, high, i));
      const float fa = exp2_fast(a.x - high), fb = exp2_fast(b.x - high), sum = warp_sum(a.y * fa + b.y * fb);
#pragma unroll
      for (int j = 0; j < kVectors; j++) acc[j] = total[j] = make_float4(0, 0, 0, 0);
#pragma unroll 1
      for (int first = begin; first < end; first += kAhead) {
        if (first == middle) {
#pragma unroll
          for (int j = 0; j < kVectors; j++) total[j] = acc[j], acc[j] = make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int s = 0; s < kAhead; s++) {
          const float f = __shfl_sync(kAll, first < 32 ? fa : fb, (first + s) % 32);  // 0 past the last chunk
#pragma unroll
          for (int j = 0; j < kVectors; j++) {
            acc[j].x = fmaf(f, x[s][j].x, acc[j].x), acc[j].y = fmaf(f, x[s][j].y, acc[j].y);
            acc[j].z = fmaf(f, x[s][j].z, acc[j].z), acc[j].w = fmaf(f, x[s][j].w, acc[j].w);
          }
        }
        if (first + kAhead < end) fetch(first + kAhead);
      }
      if (shared) {
        float4* const other = reinterpret_cast<float4*>(results(0) + r * kOStride) + lane;
#pragma unroll
        for (int j = 0; j < kVectors; j++)
          if (second && !idle && lane + 32 * j < D / 4) other[32 * j] = acc[j];
        __syncthreads();
        if (second) return;
#pragma unroll
        for (int j = 0; j < kVectors; j++) {
          total[j] = acc[j];
          if (lane + 32 * j < D / 4) acc[j] = other[32 * j];
        }
      }
      const float f = __fdividef(1.f, sum);
#pragma unroll
      for (int j = 0; j < kVectors; j++) {
        const bool inside = lane + 32 * j < D / 4;
        const float4 v =
            make_float4((total[j].x + acc[j].x) * f, (total[j].y + acc[j].y) * f, (total[j].z + acc[j].z) * f, (total[j].w + acc[j].w) * f);
        write(r, inside ? (lane + 32 * j) * 4 : 0, v, place[j], inside);
      }
    }
  }
  // Stored rows of dims d to d + 3 of row r in the first copy of the next matrix's input.
  __device__ __forceinline__ int4 stored_rows(int r, int d) const {
    const int feature = sh.head[r] * D + d;
    const int* const inverse = p.a.to.num_perms ? p.a.to.inverse[0] : nullptr;
    if (!inverse) return make_int4(feature, feature + 1, feature + 2, feature + 3);
    return make_int4(__ldg(inverse + feature), __ldg(inverse + feature + 1), __ldg(inverse + feature + 2), __ldg(inverse + feature + 3));
  }
  // Writes four dims of a row. All lanes of a warp take part, because a Hadamard group spans neighbouring lanes.
  __device__ __forceinline__ void write(int r, int d, float4 v, int4 place, bool inside) const {
    const AttentionOut& to = p.a.to;
    float x[4] = {v.x, v.y, v.z, v.w};
    if constexpr (pool_is_rotated(VF)) {
      constexpr int G = pool_group(D);
      const float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], e = x[2] - x[3];
      x[0] = a + c, x[1] = b + e, x[2] = a - c, x[3] = b - e;
#pragma unroll
      for (int i = 1; i < G / 4; i *= 2)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const float other = __shfl_xor_sync(kAll, x[k], i);
          x[k] = lane & i ? other - x[k] : x[k] + other;
        }
#pragma unroll
      for (int k = 0; k < 4; k++) x[k] *= G == 32 ? 0.17677669529663687f : 0.25f;
    }
    if (!inside) return;
    const int64_t token = sh.token[r];
    const int stored[4] = {place.x, place.y, place.z, place.w}, feature = sh.head[r] * D + d;
    half* const row = to.x + token_place(to.group, to.stride, static_cast<int>(token));
    if (to.num_perms) {
#pragma unroll
      for (int k = 0; k < 4; k++) row[row_place(to.group, stored[k])] = saturated(x[k]);
    }
    if (to.out) *reinterpret_cast<float4*>(to.out + token * p.a.cache.num_heads * D + feature) = make_float4(x[0], x[1], x[2], x[3]);
#pragma unroll 1
    for (int copy = 1; copy < to.num_perms; copy++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int at = to.inverse[copy] ? to.inverse[copy][feature + k] : feature + k;
        row[static_cast<int64_t>(copy) * to.perm_stride + row_place(to.group, at)] = saturated(x[k]);
      }
  }
};

template <int KF, int VF, int D, int NT, bool RUNS>
__global__ void __launch_bounds__(max_warps(D, NT) * 32, 1) attention_decode(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  unsigned at = shared_address(dynamic);
  asm volatile("" : "+r"(at));  // one register instead of the same computation at every use
  Decode<KF, VF, D, NT, RUNS> kernel(params, static_cast<uint8_t*>(__cvta_shared_to_generic(at)));
  pdl_launch_dependents();
  kernel.prefetch_batch();
  bool wait = true;
  if (params.a.q) {  // then the preceding kernel has also written this step's keys and values
    pdl_wait();
    wait = false;
  }
  for (int index = blockIdx.x; kernel.begin_item(index); index += gridDim.x) {
    kernel.prefetch();
    kernel.clear();
    kernel.prepare_rows(wait);
    wait = false;
    if constexpr (Decode<KF, VF, D, NT, RUNS>::kQ4)
      kernel.load_integer_queries();
    else
      kernel.load_queries();
    for (int stage = 0;;) {
      if constexpr (Decode<KF, VF, D, NT, RUNS>::kQ4)
        kernel.process_chunk_q4(stage);
      else
        kernel.process_chunk(stage);
      kernel.merge_warps();
      if (!kernel.next_chunk()) break;
      kernel.clear();
    }
    if (kernel.it.chunks.count > 1 && kernel.is_last()) {
      kernel.merge_chunks();
    }
    if (kernel.it.final) break;
    __syncthreads();
  }
  if ((wait || params.a.lamport_qkv) && blockIdx.x == 0) pdl_wait();  // this kernel must not end before its predecessor
}

}  // namespace exl2nb
