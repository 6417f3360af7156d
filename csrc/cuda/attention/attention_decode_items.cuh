// How a batch is cut into work items of the decode kernel: (sequence, KV head, block of query rows, chunk of keys).
#pragma once
#include "cuda/attention/attention_rows.cuh"

namespace exl2nb {

constexpr int kWarps = 4;  // of the kernels without haste
constexpr int kTile = 16, kUnit = 8 * kTile, kMaxNew = 8;

// Warps of a CTA of the decode kernel, and CTAs that a multiprocessor shall hold; `most` warps may be one CTA.
constexpr int warps_of(int D) { return D > 128 ? 4 : 8; }
constexpr int ctas_per_sm(int D, int NT) { return NT > 1 && D > 64 ? 1 : 2; }
constexpr int most_warps(int D, int NT) { return warps_of(D) * ctas_per_sm(D, NT); }

// Where keys and values have 4 bits, in groups of 32, they are worked on as whole numbers: attention_decode_packed.cuh.
constexpr bool is_packed(int k_format, int v_format, int D) { return k_format == kCacheQ4 && v_format == kCacheQ4 && scale_group(D) == 32; }
// Query rows of an item. NT is 0 for four of them.
constexpr int rows_of(int NT) { return NT ? 8 * NT : 4; }

// Chunks of a sequence at most: they fill an H200 once at batch 1 (2 CTAs of 132 SMs; a second, partial wave costs more than it brings).
__host__ __device__ constexpr int max_splits(int num_kv_heads) {
  return num_kv_heads * 64 <= 264 ? 64 : num_kv_heads * 6 >= 264 ? 6 : 264 / num_kv_heads;
}

struct Chunks {
  int start, size, count;  // first key, keys per chunk
};
// Units of a chunk, at least. Many heads are items enough: with 16 and more KV heads chunks of 512 keys instead of 256 make a whole step of
// Llama-2-7B's shape 5 % quicker on an H200 at contexts of 128 to 384 (2026-11-22), since no chunks are joined.
__host__ __device__ constexpr int least_units(int key_bytes, int most) { return key_bytes > 256 && most > 16 ? 2 : 4; }

// Depends on the sequence and the model alone. Sizes are multiples of 128 keys that stay the same over wide ranges of context lengths, so a
// row's bits do not depend on how many newer tokens the step has: a chunk of which it sees nothing adds nothing. Long runs of queries fill
// the device by themselves.
// most: max_splits. wanted: 0, or how many chunks are enough, of equal sizes; then the bits depend on what asks for that, too.
__host__ __device__ inline Chunks chunks_of(int context, int queries, int window, int most, int key_bytes, int wanted) {
  const int oldest = window > 0 ? context - queries - window + 1 : 0, start = oldest > 0 ? oldest / kUnit * kUnit : 0;
  const int units = (context - start + kUnit - 1) / kUnit;
  if (queries > kMaxNew) return {start, units * kUnit, 1};
  int per = least_units(key_bytes, most);
  if (wanted > 0) {  // of equal sizes, to 32 keys
    const int tiles = (context - start + 2 * kTile - 1) / (2 * kTile), fewest = (units + per - 1) / per,
              count = wanted < fewest ? wanted : fewest;
    const int each = (tiles + count - 1) / count;
    if (count <= most) return {start, each * 2 * kTile, (tiles + each - 1) / each};
  }
  while (per * most < units) per = per % 3 == 0 ? per / 3 * 4 : per / 2 * 3;  // 2 3 4 6 8 12 ...
  return {start, per * kUnit, units <= per ? 1 : (units + per - 1) / per};
}

struct DecodeParams {
  AttentionArgs a;
  float* part;      // (rows, Hq, max_splits, D) of at least min(tokens, 8 * sequences) rows
  float2* part_ml;  // (rows, Hq, max_splits): maximum, sum
  unsigned* count;  // (rows * blocks per token * Hkv)
  int blocks_per_token, q_per_kv, wanted;
  unsigned q_per_kv_inverse;  // ceil(2^32 / q_per_kv): exact quotients of numbers below 2^32 / q_per_kv
  int key_bytes;              // of a key and its value
  int warp_bytes;             // of shared memory: a warp's tiles, then its results
  int most;                   // max_splits
  int tiles_at;               // in shared memory: the first warp's
  // A CTA has several chunks of a row one after the other where there are more chunks than CTAs, and if rows are no more than this: its
  // warps' results then have a place of their own, so that the next chunk's tiles are on their way meanwhile. 0: no room for it.
  int result_rows, result_bytes, results_at;  // bytes: of a warp's
};

struct Item {
  int b, first_token, queries, context, kv_head, block, chunk;
  Chunks chunks;
  int run, runs;  // chunks of this CTA, from `chunk` on; how many CTAs have chunks of these rows
  bool final;     // the CTA's last one
  __device__ __forceinline__ int part_token() const { return first_token < kMaxNew * b ? first_token : kMaxNew * b; }
};

// The same number in every lane, known to be so: then it takes neither registers nor divergence.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(kAll, x, 0); }

// Item number `index`, or false past the last one. All lanes of a warp take part. STEP: keys that a warp takes at a time; a warp's tiles of
// several chunks are a line of equal steps where all of its CTA's steps are a divisor of a chunk. RUNS: whether there may be several.
template <int ROWS, int STEP, bool RUNS>
__device__ __forceinline__ bool find_item(const DecodeParams& p, int index, Item& item) {
  const CacheArgs& c = p.a.cache;
  const int lane = threadIdx.x % 32, q_per_kv = p.q_per_kv;
  const bool several = c.sequences > 1;
  for (int base = 0; base < c.sequences; base += 32) {
    const int b = several ? base + lane : 0;
    int first = 0, queries = 0, context = 0, items = 0, blocks = 0, each = 1, runs = 0;
    Chunks chunks{0, kUnit, 0};
    if (b < c.sequences) {
      first = c.cu_seqlens[b], queries = c.cu_seqlens[b + 1] - first, context = c.context_lens[b];
      if (context > 0 && queries > 0) {
        chunks = chunks_of(context, queries, p.a.window, p.most, p.key_bytes, p.wanted);
        blocks = (queries * q_per_kv + ROWS - 1) / ROWS;
        runs = chunks.count, items = runs * c.num_kv_heads * blocks;
      }
    }
    int end = 0, total = 0;
    const auto line_up = [&] {
      end = items;
      if (several)
        for (int i = 1; i < 32; i *= 2) {
          const int other = __shfl_up_sync(kAll, end, i);
          if (lane >= i) end += other;
        }
      total = __shfl_sync(kAll, end, 31);
    };
    line_up();
    const int ctas = static_cast<int>(gridDim.x);
    if (RUNS && p.result_rows && total > ctas) {  // then there are no more than 32 sequences
      const bool may =
          chunks.count > 1 && chunks.size % (static_cast<int>(blockDim.x) / 32 * STEP) == 0 && queries * q_per_kv <= p.result_rows;
      const auto cut = [&](int length) {
        each = may ? min(length, chunks.count) : 1, runs = (chunks.count + each - 1) / each, items = runs * c.num_kv_heads * blocks;
        line_up();
      };
      // As long as a CTA's chunks in turns would be, or a third longer, if then every CTA has one run.
      int length = (total + ctas - 1) / ctas;
      for (const int most = length + length / 3; length <= most && total > ctas; length++) cut(length);
      if (total > ctas) cut(1);
    }
    if (index < total) {
      item.final = base + 32 >= c.sequences && index + static_cast<int>(gridDim.x) >= total;
      const int at = several ? __ffs(__ballot_sync(kAll, index < end)) - 1 : 0;
      const int inside = index - __shfl_sync(kAll, end - items, at);
      item.b = base + at;
      item.first_token = __shfl_sync(kAll, first, at);
      item.queries = __shfl_sync(kAll, queries, at);
      item.context = __shfl_sync(kAll, context, at);
      item.chunks = {__shfl_sync(kAll, chunks.start, at), __shfl_sync(kAll, chunks.size, at), __shfl_sync(kAll, chunks.count, at)};
      const int num_blocks = __shfl_sync(kAll, blocks, at);
      item.runs = RUNS ? __shfl_sync(kAll, runs, at) : item.chunks.count, item.run = RUNS ? __shfl_sync(kAll, each, at) : 1;
      const int outer = item.runs == 1 ? inside : inside / item.runs;  // divisions are slow
      item.chunk = (inside - outer * item.runs) * item.run;
      if (RUNS) item.run = min(item.run, item.chunks.count - item.chunk);
      item.kv_head = num_blocks == 1 ? outer : outer / num_blocks;
      item.block = outer - item.kv_head * num_blocks;
      return true;
    }
    index -= total;
  }
  return false;
}

}  // namespace exl2nb
