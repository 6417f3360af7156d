// How a decode batch is cut into work items: (sequence, KV head, block of query rows, chunk of keys).
#pragma once
#include <cstddef>

#include "cuda/attention/rope.cuh"

namespace exl2nb {

constexpr int kTile = 16, kChunkStep = 8 * kTile;  // keys of an MMA tile; a chunk is a multiple of kChunkStep keys
constexpr int kMaxNew = 8;                         // new tokens of a sequence
constexpr int kGenericWarps = 4;                   // of a CTA of generic.cu
constexpr int kWholeNormThreads = 256;             // of a CTA of norm_whole_rows
constexpr float kLowest = -1e30f;                  // maximum of an empty set

// Warps of a CTA; CTAs per SM; the largest CTA (AttentionArgs may make one CTA of all warps of an SM).
constexpr int warps_of(int D) { return D > 128 ? 4 : 8; }
constexpr int ctas_per_sm(int D, int NT) { return NT > 1 && D > 64 ? 1 : 2; }
constexpr int max_warps(int D, int NT) { return warps_of(D) * ctas_per_sm(D, NT); }

// 4-bit K and V in groups of 32: integer scores.
constexpr bool is_q4(int k_format, int v_format, int D) { return k_format == kCacheQ4 && v_format == kCacheQ4 && pool_group(D) == 32; }
// Query rows of an item.
constexpr int rows_of(int NT) { return NT ? 8 * NT : 4; }

// Chunks of a sequence, at most: one wave on an H200 at batch 1 (2 CTAs on each of 132 SMs). A second, partial wave costs more than it
// saves.
__host__ __device__ constexpr int max_splits(int num_kv_heads) {
  return num_kv_heads * 64 <= 264 ? 64 : num_kv_heads * 6 >= 264 ? 6 : 264 / num_kv_heads;
}

struct Chunks {
  int start, size, count;  // first key, keys per chunk, chunks
};
// Smallest chunk, in steps of kChunkStep keys: 256 or 512 keys. From 16 KV heads on the heads alone are enough items, and merging costs
// more than it brings: 512 keys instead of 256 make a step of Llama-2-7B's shape 5 % faster on an H200 at contexts of 128 to 384
// (2026-11-22).
__host__ __device__ constexpr int min_chunk_steps(int key_bytes, int most) { return key_bytes > 256 && most > 16 ? 2 : 4; }

// Chunks of one sequence, from its lengths and the model alone. Chunk sizes stay the same over wide ranges of context lengths, so a row's
// bits do not depend on how many newer tokens the step has: a chunk that a row does not see adds nothing. More than kMaxNew queries are
// items enough: one chunk. most: max_splits. wanted: 0, or a number of chunks of equal size; then the bits depend on `wanted`, too.
__host__ __device__ inline Chunks chunks_of(int context, int queries, int window, int most, int key_bytes, int wanted) {
  const int oldest = window > 0 ? context - queries - window + 1 : 0, start = oldest > 0 ? oldest / kChunkStep * kChunkStep : 0;
  const int units = (context - start + kChunkStep - 1) / kChunkStep;
  if (queries > kMaxNew) return {start, units * kChunkStep, 1};
  int per = min_chunk_steps(key_bytes, most);
  if (wanted > 0) {  // sizes rounded up to 32 keys
    const int tiles = (context - start + 2 * kTile - 1) / (2 * kTile), fewest = (units + per - 1) / per,
              count = wanted < fewest ? wanted : fewest;
    const int each = (tiles + count - 1) / count;
    if (count <= most) return {start, each * 2 * kTile, (tiles + each - 1) / each};
  }
  while (per * most < units) per = per % 3 == 0 ? per / 3 * 4 : per / 2 * 3;  // 2 3 4 6 8 12 ...
  return {start, per * kChunkStep, units <= per ? 1 : (units + per - 1) / per};
}

struct DecodeParams {
  AttentionArgs a;
  float* part;      // partial O: (rows, Hq, max_splits, D), rows >= min(tokens, 8 * sequences)
  float2* part_ml;  // partial (maximum, sum): (rows, Hq, max_splits)
  unsigned* count;  // CTAs that have finished: (rows * blocks_per_token * Hkv); 0 between launches
  int blocks_per_token, q_per_kv, wanted;
  unsigned q_per_kv_inverse;  // ceil(2^32 / q_per_kv): exact quotients of numbers below 2^32 / q_per_kv
  int key_bytes;              // of a key and its value
  int warp_bytes;             // shared memory of a warp: its tiles, then its results
  int max_splits;             // most chunks of a sequence
  int tiles_at;               // shared memory: offset of the first warp's tiles
  // RUNS: with at most result_rows query rows (0: never) a CTA may process several chunks in sequence. The warps' results then have their
  // own shared memory, results_at + warp * result_bytes, so that the next chunk's tiles arrive meanwhile.
  int result_rows, result_bytes, results_at;
};

// Sizes and shared memory of a decode kernel. KF, VF: CacheFormat of K and V. NT: query rows of an item are 8 NT, or 4 for NT 0.
template <int KF, int VF, int D, int NT>
struct DecodeShape {
  static constexpr bool kQ4 = is_q4(KF, VF, D);
  static constexpr int kMaxWarps = max_warps(D, NT), kSlots = (D + 31) / 32, kRows = rows_of(NT), kN = NT ? NT : 1, kColumns = NT ? 2 : 1,
                       kGroups = D / pool_group(D);
  static constexpr int kQStride = kSlots * 32 + 8;  // halves; lanes of a quarter warp read 16 bytes each
  static constexpr int kOStride = D + 4;            // floats; no bank conflict between lanes that store together
  static constexpr bool kCoded = pool_is_coded(KF) || pool_is_coded(VF);
  static constexpr int kSubs = pool_bits(KF) + pool_bits(VF) <= 8 ? 2 : 1, kStep = kSubs * kTile;  // keys of a tile
  using KeyTile = Tile<KF, D, true, kStep>;
  using ValueTile = Tile<VF, D, false, kStep>;
  static constexpr int kStageBytes = kQ4 ? kStep * (D + 4 * kGroups) : KeyTile::kBytes + ValueTile::kBytes,
                       kResultBytes = kRows * kOStride * 4;
  static constexpr int kStages = kStageBytes > 6 << 10 ? 1 : 2;  // ring slots of a warp

  struct Shared {                          // behind it: the warps' tiles, later in the same place the warps' results
    alignas(16) half q[kRows * kQStride];  // in the order of KeyFragment::place
    alignas(16) uint8_t k[kMaxNew * KeyTile::kRow], v[kMaxNew * ValueTile::kRow];  // this step's rows in the cache's format
    alignas(16) uint8_t k_scale[kMaxNew * kGroups * 2], v_scale[kMaxNew * kGroups * 2];
    float max[kMaxWarps][kRows], sum[kMaxWarps][kRows];
    int token[kRows], head[kRows];
    float unit[kRows];  // of integer queries
    alignas(16) int4 constants[3];
    bool last;
    int last_chunk, runs, several;            // RUNS: the CTA's last chunk; CTAs that share these rows; whether this CTA has several chunks
    alignas(16) float scratch[kMaxWarps][D];  // this and the next member: only in stage 2
    float new_rows[kCoded ? 2 * kMaxNew : 1][D];  // new keys, then new values, before they are quantised
  };
  static constexpr int kSharedBytes = (sizeof(Shared) + 127) / 128 * 128;
};

#ifdef __CUDACC__
struct Item {
  int b, first_token, queries, context, kv_head, block, chunk;
  Chunks chunks;
  int run, runs;  // chunks of this CTA, from `chunk` on; CTAs that share the item's rows
  bool final;     // the CTA's last item
  __device__ __forceinline__ int part_token() const { return first_token < kMaxNew * b ? first_token : kMaxNew * b; }
};

// Broadcast of lane 0: tells the compiler that the number is warp-uniform, so it takes a uniform register and no divergence.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(kAll, x, 0); }

// Item number `index`; false past the last one. All lanes of a warp take part, each with one of 32 sequences. STEP: keys of a warp's tile.
// Runs need a chunk to be a multiple of the keys that the CTA's warps process per step, so that a warp's tiles keep their distance across
// chunks.
template <int ROWS, int STEP, bool RUNS>
__device__ __forceinline__ bool find_item(const DecodeParams& p, int index, Item& item) {
  const CacheArgs& c = p.a.cache;
  const int lane = threadIdx.x % 32, q_per_kv = p.q_per_kv;
  const bool several = c.sequences > 1;
  for (int base = 0; base < c.sequences; base += 32) {
    const int b = several ? base + lane : 0;
    int first = 0, queries = 0, context = 0, items = 0, blocks = 0, each = 1, runs = 0;
    Chunks chunks{0, kChunkStep, 0};
    if (b < c.sequences) {
      first = c.cu_seqlens[b], queries = c.cu_seqlens[b + 1] - first, context = c.context_lens[b];
      if (context > 0 && queries > 0) {
        chunks = chunks_of(context, queries, p.a.window, p.max_splits, p.key_bytes, p.wanted);
        blocks = (queries * q_per_kv + ROWS - 1) / ROWS;
        runs = chunks.count, items = runs * c.num_kv_heads * blocks;
      }
    }
    int end = 0, total = 0;
    const auto prefix_sum = [&] {
      end = several ? warp_prefix_sum(items) : items;
      total = __shfl_sync(kAll, end, 31);
    };
    prefix_sum();
    const int ctas = static_cast<int>(gridDim.x);
    if (RUNS && p.result_rows && total > ctas) {  // at most 32 sequences: attention.cu
      const bool may =
          chunks.count > 1 && chunks.size % (static_cast<int>(blockDim.x) / 32 * STEP) == 0 && queries * q_per_kv <= p.result_rows;
      const auto cut = [&](int length) {
        each = may ? min(length, chunks.count) : 1, runs = (chunks.count + each - 1) / each, items = runs * c.num_kv_heads * blocks;
        prefix_sum();
      };
      // Chunks per run: as many as a CTA would process one by one, or up to a third more if each CTA then has one run.
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

#endif  // __CUDACC__

}  // namespace exl2nb
