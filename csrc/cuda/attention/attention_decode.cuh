// Attention of a few queries per sequence over a paged cache, split over the keys (flash-decoding, Dao et al. 2023), in one kernel.
//
// A work item is (sequence, KV head, block of 8 * NT query rows or of 4, chunk of keys); a query row is (token, head of the KV head's
// group). Where there are more chunks than CTAs, RUNS: an item has several neighbouring chunks, and its rows are made once. A CTA of 8
// warps (4 for large heads; for many sequences what makes one turn of CTAs of all the items) takes items in turns. It prepares the item's
// query rows (norm, rotation, fp16) in shared memory, and the new keys and values that fall into its chunks, which it also writes to the
// cache. Then every warp walks tiles of 16 keys, of 4 bits two at a time: S' = K Q' and O' += V' P' on tensor cores (m16n8k16), with the
// keys, then the dims, as rows, so that 8 queries fill the columns. K and V go from memory to a ring of tiles in shared memory that belongs
// to the warp, so nobody waits for another; old keys are fetched before the kernel waits for its predecessor, half of what fits, since its
// queries come behind all that was asked for before them. Behind a chain it does not wait for the end, but looks until its rows are there
// (announced.cuh). The warps' results are joined in warp order, the chunks' by the CTA that arrives last, in chunk order: no float atomics,
// and chunk boundaries depend on the sequence's own context length only (but for many sequences), so a result's bits depend on nothing
// else.
// Bytes: K and V of the context once per block of query rows, partial results 4 * (D + 2) per (row, chunk).
// Limits: D a multiple of 16, at most 256; at most 8 new tokens per sequence (any number when q comes ready).
// Files: _items how work is cut, _state the class, _new the step's own rows, _tiles copies, _keys scores to values, _packed the same where
// both have 4 bits, _join results.
#pragma once
#include <algorithm>
#include <cstddef>

#include "cuda/attention/attention_decode_join.cuh"
#include "cuda/attention/attention_decode_keys.cuh"
#include "cuda/attention/attention_decode_new.cuh"
#include "cuda/attention/attention_decode_packed.cuh"
#include "cuda/attention/attention_decode_tiles.cuh"

namespace exl2nb {

// The warp's first tiles: half of them at once; the others behind the rows, which would else wait for all that was asked for before them.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::fetch_ahead(bool others) {
  const int first = chunk_start + warp * kStep;
  static_assert(kStages <= 2, "halves");
  const int stage = others && kStages == 2;
  if constexpr (kPacked) {
    fetch_both(tiles + stage * kStageBytes, first + stage * hop);
  } else {
    if (kStages == 2 || !others) fetch<KF, true>(tiles + stage * kStageBytes, first + stage * hop);
    if (kStages == 2 || others) fetch<VF, false>(tiles + stage * kStageBytes + KeyTile::kBytes, first + stage * hop);
  }
}

template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::start() {
  EXL2NB_MARK(p.a, 0);
  look_up_turns();
  fetch_ahead(false);
  load_turn(warp);
  EXL2NB_MARK(p.a, 1);
  const int* const inverse = p.a.to.num_perms ? p.a.to.inverse[0] : nullptr;
  if (inverse && thread < rows * D / 32) {  // into the cache
    [[maybe_unused]] int none;
    asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(none) : "l"(inverse + it.kv_head * q_per_kv * D + thread % (q_per_kv * D / 32) * 32));
    keep_line(inverse + it.kv_head * q_per_kv * D + thread % (q_per_kv * D / 32) * 32);
  }
}

template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::walk(int& stage) {  // stage: of the next tile
  const int first = chunk_start + warp * kStep;
#pragma unroll 1
  for (int token = first; token < chunk_end; token += hop) {
    uint8_t *const keys = tiles + stage * kStageBytes, *const from = keys + KeyTile::kBytes;
    float s[kSubs][NT][4];
    const bool plain = token + kStep <= plain_end;
    await();
    if (!plain) complete<KF, true>(keys, token);
    scores(keys, s);
    __syncwarp();
    fetch<KF, true>(keys, token + ahead);
    if (!plain) {
#pragma unroll
      for (int i = 0; i < kSubs; i++) shape(token + i * kTile, s[i]);
    }
    softmax(s);
    await();
    if (!plain) complete<VF, false>(from, token);
    if constexpr (scales_in_probs(VF, D)) make_room(from + ValueTile::kScalesAt, s);
#pragma unroll
    for (int i = 0; i < kSubs; i++)
      values(from + i * kTile * ValueTile::kStride, from + ValueTile::kScalesAt + i * kTile * ValueTile::kScaleRow, s[i]);
    __syncwarp();
    fetch<VF, false>(from, token + ahead);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

// What the first item is likely to need beside its lengths, into the cache: one wait, not two.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::look_ahead() const {
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
// Sines and cosines of up to four of the item's tokens.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::look_up_turns() const {
  const RopeArgs& rope = p.a.rope;
  const int i = lane / 8, at = lane % 4 * 32;
  if (warp != warps - 1 || !rope.cos || i >= it.queries || at >= rope.half) return;
  const int64_t row = rope.positions ? rope.positions[it.first_token + i] : it.context - it.queries + i;
  keep_line((lane & 4 ? rope.sin : rope.cos) + row * rope.half + at);
}

template <int KF, int VF, int D, int NT, bool RUNS>
__global__ void __launch_bounds__(most_warps(D, NT) * 32, 1) attention_decode(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  unsigned at = shared_address(dynamic);
  asm volatile("" : "+r"(at));  // one register instead of the same computation at every use
  Decode<KF, VF, D, NT, RUNS> kernel(params, static_cast<uint8_t*>(__cvta_shared_to_generic(at)));
  EXL2NB_MARK(params.a, 11);
  let_successor_start();
  kernel.look_ahead();
  bool wait = true;
  if (params.a.q) {  // then this step's keys are the predecessor's too
    wait_for_predecessor();
    wait = false;
  }
  for (int index = blockIdx.x; kernel.begin(index); index += gridDim.x) {
    kernel.start();
    kernel.clear();
    kernel.make_rows(wait);
    wait = false;
    if constexpr (Decode<KF, VF, D, NT, RUNS>::kPacked)
      kernel.fetch_whole_queries();
    else
      kernel.fetch_queries();
    EXL2NB_MARK(params.a, 5);
    for (int stage = 0;;) {
      if constexpr (Decode<KF, VF, D, NT, RUNS>::kPacked)
        kernel.walk_packed(stage);
      else
        kernel.walk(stage);
      EXL2NB_MARK(params.a, 6);
      kernel.join_warps();
      if (!kernel.next_chunk()) break;
      kernel.clear();
    }
    EXL2NB_MARK(params.a, 7);
    if (kernel.it.chunks.count > 1 && kernel.comes_last()) {
      EXL2NB_MARK(params.a, 8);
      kernel.join_chunks();
    }
    EXL2NB_MARK(params.a, 10);
    if (kernel.it.final) break;
    __syncthreads();
  }
  if ((wait || params.a.early) && blockIdx.x == 0) wait_for_predecessor();  // this kernel must not end before its predecessor
}

// Pairs of the modes that have a name; the others (k16v4, say) do without wide kernels, which take time to compile.
template <int KF, int VF>
constexpr bool kOften = KF == VF || (KF == kCacheQ8 && VF == kCacheQ4);

struct DecodeKernel {
  void (*kernel)(DecodeParams), (*of_runs)(DecodeParams);  // of_runs: takes several chunks one after the other; may be none
  int warps, ctas_per_sm, shared_bytes, warp_bytes, rows, row_bytes, results_at;  // row_bytes: of a warp's result
};
template <int KF, int VF, int D, int NT>
DecodeKernel describe() {
  using Kernel = Decode<KF, VF, D, NT, false>;
  void (*of_runs)(DecodeParams) = nullptr;  // which costs registers, so that one chunk takes longer
  if constexpr (kOften<KF, VF> && (D == 64 || D == 128) && NT <= 1) of_runs = attention_decode<KF, VF, D, NT, true>;
  return {attention_decode<KF, VF, D, NT, false>,
          of_runs,
          warps_of(D),
          ctas_per_sm(D, NT),
          Kernel::kSharedBytes,
          std::max(Kernel::kStages * Kernel::kStageBytes, Kernel::kResultBytes),
          Kernel::kRows,
          Kernel::kOStride * 4,
          static_cast<int>(offsetof(typename Kernel::Shared, scratch))};
}
// The kernel of a pair of formats for head dims 64, 80, 96, 128, 256; none for others. rows: that a sequence brings per KV head.
template <int KF, int VF, int D>
DecodeKernel decode_kernel_of(int rows) {
  constexpr int kWide = kOften<KF, VF> && (D == 64 || D == 128) ? 2 : 1;
  if constexpr (is_packed(KF, VF, D))
    if (rows <= rows_of(0)) return describe<KF, VF, D, 0>();
  return rows > rows_of(1) ? describe<KF, VF, D, kWide>() : describe<KF, VF, D, 1>();
}
template <int KF, int VF>
DecodeKernel decode_kernel(int D, int rows) {
  switch (D) {
    case 64:
      return decode_kernel_of<KF, VF, 64>(rows);
    case 80:
      return decode_kernel_of<KF, VF, 80>(rows);
    case 96:
      return decode_kernel_of<KF, VF, 96>(rows);
    case 128:
      return decode_kernel_of<KF, VF, 128>(rows);
    case 256:
      return decode_kernel_of<KF, VF, 256>(rows);
    default:
      return {};
  }
}

}  // namespace exl2nb
