// Persistent chain of GEMMs for 1 to 4 rows: attention output -> O (+ residual) -> gate/up -> down (+ residual) -> next QKV in one launch,
// or one GEMM that stores its sums (lm_head, first QKV). Weights stream through one shared-memory ring that does not stop between GEMMs.
//
// CTA (one per SM, 18 warps): 16 consumer warps in two warp sets (int8 MMA, int8_mma.cuh), 1 weight producer, 1 warp that polls for the
// inputs of the next GEMM. Every CTA owns whole strips of 16 columns and keeps the residual of its columns in registers.
// Pass: at most 16 consecutive items of a strip, one per consumer warp, in two ring stages, one per warp set. A warp loads its item
// descriptor and activations once, then runs through that item of all its strips (a work item), then goes on to the next pass. With one
// row and strips of 16 small items, a warp takes two items at once and the warp sets alternate strips (AlternatingStrips): an item's
// overhead is then paid per four units. Not with adapters, whose kernel would outgrow the instruction cache.
// Between GEMMs: consumers store fp16 results that double as Lamport flags (+0 = not written), one thread increments the GEMM's counter,
// the poll warp of every CTA waits for `min_arrivals`, then consumers poll the data itself. Nothing orders data and counter; the counter
// only delays polling, because failed polls compete with weight loads for L2. Results are written in the next matrix's stored row order;
// every CTA quantises them for itself.
// Bytes: every strip once; 2 * K per row and CTA from L2. Limits: sm_90, all CTAs resident at once, persistent_tokens().
#pragma once
#include <type_traits>

#include "cuda/gemm/persistent/int8_mma.cuh"
#include "cuda/gemm/persistent/lora_chain.cuh"
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/runtime/lamport.cuh"
#include "cuda/runtime/peers.cuh"

namespace exl2nb {

constexpr int kPersistentTokens = 4;  // most rows per launch
static_assert(kPersistentTokens <= kLoraChainRows, "room for the sums of adapters");

struct PersistentOp {
  GemmArgs a;  // as for plan_skinny; x, next and squares between ops are set by the chain. next_squares of the last: [row][persistent_ctas]
  const uint8_t *head, *blob;
  Epilogue epilogue;
  int attention_sms = 0;  // first op: SMs to leave free for the attention kernel that starts early
  // First op: buffer of Lamport flags that attention has read, 16 bytes x clear_count, zeroed again by this launch. Last op (kStore): its
  // sums carry Lamport flags (lamport.cuh). Only where one launch takes all rows.
  void* clear = nullptr;
  int clear_count = 0;
  bool lamport = false;
  Peers peers{};                    // third op: its sums are exchanged with the other ranks before they are added
  const LoraChain* lora = nullptr;  // first op: adapters of the rows; offsets are set by plan_persistent
  int fewest_bits = 2;              // first op: of all chains of a step with adapters, so that they share a kernel
};
// Most rows per launch, of those that leave room for a ring of kRowsStages; 0: these GEMMs cannot be chained. Three or four of a layer, or
// one that stores its sums.
int persistent_tokens(const Device&, const PersistentOp* ops, int count);
// CTAs of a launch: one per SM, or fewer so that attention runs beside them (`attention_sms`), if no CTA gets much more work.
int persistent_ctas(const Device&, const PersistentOp* ops, int count);
// Workspace for chains that follow one another, with rows of `width` and `inner` numbers: zeroed before the first launch, then theirs
// alone.
size_t persistent_bytes(const Device&, int width, int inner);
// Any number of rows, in launches of persistent_tokens.
void plan_persistent(LaunchList&, const PersistentOp* ops, int count, uint8_t* workspace, size_t bytes);

constexpr int kMaxGemms = kLoraChainGemms, kWarpsPerSet = 8, kConsumerWarps = 2 * kWarpsPerSet, kConsumerThreads = kConsumerWarps * 32,
              kPersistentThreads = kConsumerThreads + 64;
constexpr int kMaxStages = 12, kRowsStages = 4;  // at most; at least, with several rows
constexpr int kMaxWorkItems = 16;                // most passes of a strip, over all parts
constexpr int kMaxOwnedStrips = 4;               // most strips of a residual GEMM per CTA
enum PersistentBarrier { kImagesFull = 2 * kMaxStages, kInputsReady, kFactorsReady, kStored, kNumBarriers };

struct PersistentGemm {
  GemmArgs a;
  int width, blocks;   // features; blocks of 64 stored rows
  int strips, rounds;  // strips of a part per round (their partial sums fit); rounds
  int outputs;         // outputs of a row per round
  int min_arrivals;    // polling for the outputs starts after so many CTAs have stored theirs
  int work_items;      // per warp: passes of a strip, over all parts
  struct {
    int count, items;  // passes of a strip; items of a pass
    bool pairs;        // one row, no adapters: warp sets alternate strips, a warp takes two items of two units (GpuPart::pairs)
  } passes[kMaxParts];
};

// An output column of this CTA, prepared before its sums exist.
struct PersistentOutput {
  static constexpr uint16_t kNone = 0xffff;
  void* to;                // row 0 of the output or of the next input (first buffer set); null: none
  float* residual;         // row 0 of the residual; null: none
  uint16_t sums, sums_up;  // offsets into the partial sums; kNone: column does not exist
  float bias, norm;
  float other;  // gate: bias of up; residual: scale
};
// Epilogue parameters of a GEMM, copied to shared memory: reading kernel parameters at that point would stall on the constant cache.
struct PersistentEpilogue {
  unsigned* counter;
  float* squares;  // row 0; null: none
  int outputs;
  uint16_t activation;
  bool residual, store, gated, lamport;
};
// Head of the shared memory; partial sums follow at kPartialsOffset.
struct PersistentState {
  uint64_t bars[kNumBarriers];
  float factors[kPersistentTokens];
  int set;
  unsigned exchange;  // the number of the third GEMM's
  PersistentEpilogue now[kMaxGemms];
  PersistentOutput owned[2][kMaxOwnedStrips * 16];  // of both residual GEMMs
  int lora_adds, lora_outputs;                      // offsets in shared memory (WithLora::Adds), where there are adapters
};
constexpr int kPartialsOffset = (sizeof(PersistentState) + 127) / 128 * 128;

struct PersistentSmem {     // offsets in shared memory
  int stages, stage_bytes;  // ring stages; bytes of one
  int image[kMaxGemms], ring, work_items, blocks, outputs, xs, bytes;
};

struct PersistentArgs {
  PersistentGemm gemm[kMaxGemms];
  int count, grid;
  int ahead, heavy_ctas, extra;  // stages in flight; the first `heavy_ctas` CTAs own more strips and get `extra` stages on top
  unsigned* counters;            // [kMaxGemms] arrivals per GEMM over all launches, the last entry per launch; then the launch count
  uint8_t* set;                  // buffers between GEMMs; the next launch's set follows
  int set_bytes;
  uint4* clear;  // as in PersistentOp
  int clear_count;
  bool lamport;
  PersistentSmem smem;
  Peers peers;
  int first_row;  // of this launch among the rows that are exchanged
};

// Work item of a warp: one item of a pass, for all strips of a part. All work items of a GEMM are prepared before its inputs arrive.
struct WorkItem {
  uint32_t kind, rest;  // second and fourth word of the item (ItemDesc)
  int offset;           // of the item in its ring stage
  int steps;            // index of the first scale unit
  int strips;           // 0: none; negative: this warp has no item and only releases stages
  int sums;             // offset of the partial sums (a multiple of 16) | flags
  static constexpr int kAccumulates = 1, kPairs = 2,
                       kEmptyStage = 4;  // add to earlier passes; paired items; an empty stage follows
};

#if __CUDA_ARCH__ >= 900
// GEMM q's image in shared memory.
__device__ __forceinline__ BlobImage image_of(const PersistentArgs& C, const uint8_t* shared, int q) {
  return BlobImage(shared + C.smem.image[q], C.gemm[q].a.items, C.gemm[q].a.units);
}

// Strips of part p that this CTA computes in `round`; strip0: its first strip.
__device__ __forceinline__ int strips_in_round(const PersistentGemm& P, int p, int strip0, int round) {
  return min(P.a.part[p].per_cta + (strip0 < P.a.part[p].rest ? 1 : 0) - round * P.strips, P.strips);
}

// Strips of a part where the warp sets alternate (pairs). Stages come in twos, so a warp set may have one empty stage at the end. Odd parts
// start with the second warp set.
struct AlternatingStrips {
  int first, own, empty;  // first strip of the warp set, number of strips, empty stages
  __device__ __forceinline__ AlternatingStrips(int count, int part, int warp_set)
      : first(warp_set ^ (part & 1)), own((count - first + 1) / 2), empty((count + 1) / 2 - own) {}
};

struct Pass {
  int first, last;  // items
  __device__ __forceinline__ Pass(const PersistentGemm& P, const BlobImage& image, int p, int pass) {
    first = image.ends[p * kEnds] + pass * P.passes[p].items;
    last = min(first + P.passes[p].items, static_cast<int>(image.ends[p * kEnds + kWarps]));
  }
};

// Barriers.
__device__ __forceinline__ void consumer_sync() { asm volatile("bar.sync 1,%0;" ::"n"(kConsumerThreads) : "memory"); }
__device__ __forceinline__ void grid_arrive(unsigned* c) { asm volatile("red.relaxed.gpu.global.add.u32 [%0],1;" ::"l"(c) : "memory"); }

// Producer and poll warp.
__device__ __forceinline__ void produce_weights(const PersistentArgs& C, uint8_t* shared, uint64_t* full, uint64_t* empty, int block) {
  const uint64_t policy = evict_first_policy();
  const int ahead = C.ahead + (block < C.heavy_ctas ? C.extra : 0);
  int stage = 0, old = 0, issued = 0;
  uint32_t phase = 1, old_phase = 0;
  const auto fetch = [&](const uint8_t* from, uint32_t bytes) {
    barrier_wait(empty + stage, phase);
    if (issued >= ahead) {  // limit stages in flight
      barrier_wait(full + old, old_phase);
      if (++old == C.smem.stages) old = 0, old_phase ^= 1;
    }
    issued++;
    barrier_expect(full + stage, bytes);
    if (bytes) bulk_copy(shared + C.smem.ring + stage * C.smem.stage_bytes, from, bytes, full + stage, policy);
    if (++stage == C.smem.stages) stage = 0, phase ^= 1;
  };
#pragma unroll 1
  for (int q = 0; q < C.count; q++) {
    const PersistentGemm& P = C.gemm[q];
    const GemmArgs& A = P.a;
    const BlobImage image = image_of(C, shared, q);
#pragma unroll 1
    for (int round = 0; round < P.rounds; round++)
#pragma unroll 1
      for (int p = 0; p < A.num_parts; p++) {
        const int strip0 = first_strip(A, block, p), count = strips_in_round(P, p, strip0, round);
        const int64_t hop = A.grid * A.part[p].strip_bytes;
        const uint8_t* const begin = A.part[p].data + strip0 * A.part[p].strip_bytes + round * P.strips * hop;
#pragma unroll 1
        for (int pass = 0; pass < P.passes[p].count; pass++) {
          const Pass range(P, image, p, pass);
          const bool pairs = P.passes[p].pairs;
          const uint8_t* from[2];  // per warp set
          uint32_t bytes[2];
          int first[2];
#pragma unroll
          for (int warp_set = 0; warp_set < 2; warp_set++) {
            const int n = range.first + (pairs ? 0 : warp_set * kWarpsPerSet);
            const Item& end = image.items[min(n + (pairs ? kConsumerWarps : kWarpsPerSet), range.last) - 1];
            const uint32_t offset = n < range.last ? image.items[n].offset : 0;
            first[warp_set] = pairs ? AlternatingStrips(count, p, warp_set).first : 0;
            from[warp_set] = begin + offset + first[warp_set] * hop, bytes[warp_set] = n < range.last ? end.offset + end.bytes - offset : 0;
          }
#pragma unroll 1
          for (int s = 0; s < count; s += 1 + pairs)
#pragma unroll
            for (int warp_set = 0; warp_set < 2; warp_set++) {
              fetch(from[warp_set], s + first[warp_set] < count ? bytes[warp_set] : 0);
              from[warp_set] += pairs ? 2 * hop : hop;
            }
        }
      }
  }
}

// Poll warp. Per GEMM: waits until polling is worthwhile (kInputsReady), then computes the norm factors from the partial squares of all
// CTAs (kFactorsReady).
__device__ __forceinline__ void poll_inputs(const PersistentArgs& C, uint8_t* shared, uint64_t* bars, int block, int lane) {
  PersistentState& state = *reinterpret_cast<PersistentState*>(shared);
  unsigned before = 0;  // counter base of this launch
  int set = 0;          // offset of this launch's buffer set
#pragma unroll 1
  for (int q = 0; q < C.count; q++) {
    const GemmArgs& A = C.gemm[q].a;
    if (q == 0) {
      pdl_wait();
    } else if (lane == 0) {
      barrier_wait(bars + kStored, (q - 1) & 1);
      while (static_cast<int>(ld_relaxed(C.counters + q - 1) - before - C.gemm[q - 1].min_arrivals) < 0) {
      }  // the rest is polled in the data
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(bars + kInputsReady);
    // A launch of one GEMM leaves counters and buffer sets alone: no CTA waits for another there, so the first CTA could count the launch
    // before the last has read the count.
    if (q == 0 && C.count > 1) {
      if (lane == 0) before = ld_relaxed(C.counters + kMaxGemms - 1);  // no CTA can finish the launch before this CTA's first arrival
      set = (ld_relaxed(C.counters + kMaxGemms) & 1) * C.set_bytes;
      uint4* const other = reinterpret_cast<uint4*>(C.set + C.set_bytes - set);  // the next launch's set, unused now
      for (int i = block * 32 + lane; i < C.set_bytes / 16; i += C.grid * 32) other[i] = make_uint4(0, 0, 0, 0);
    }
    if (q == 0 && C.clear)
      for (int i = block * 32 + lane; i < C.clear_count; i += C.grid * 32) C.clear[i] = make_uint4(0, 0, 0, 0);
    if (q == 0 && lane == 0) state.set = set;
#pragma unroll 1
    for (int m = 0; m < A.tokens; m++) {
      float sum = 0.f;
      if (A.squares && q == 0) {  // written by another kernel
        const float* const squares = A.squares + static_cast<size_t>(row_of(A, m)) * A.squares_count;
        for (int i = lane; i < A.squares_count; i += 32) sum += __ldcg(squares + i);
      } else if (A.squares) {
        constexpr int kSide = 5;  // loads in flight
        const float* const squares =
            reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(A.squares) + set) + static_cast<size_t>(m) * A.squares_count;
        float some[kSide] = {};
#pragma unroll
        for (int k = 0; k < kSide; k++)
          if (const int i = lane + 32 * k; i < A.squares_count) some[k] = ld_relaxed(squares + i);
#pragma unroll
        for (int k = 0; k < kSide; k++) {
          if (const int i = lane + 32 * k; i < A.squares_count && !is_written(some[k])) some[k] = poll(squares + i);
          sum += some[k];
        }
        for (int i = lane + 32 * kSide; i < A.squares_count; i += 32) sum += poll(squares + i);
      }
      sum = warp_sum(sum);
      if (lane == 0) state.factors[m] = A.squares ? rsqrtf(sum * A.inverse_width + A.eps) : 1.f;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(bars + kFactorsReady);
  }
}

// Consumers: state, epilogues.
struct ConsumerWarp {
  uint8_t* shared;
  uint64_t* bars;
  int block, warp, lane, stage, set;  // set: offset of this launch's buffer set
  uint32_t phase;
  float residual[kMaxOwnedStrips / 2];  // warp m holds row m

  __device__ __forceinline__ void wait() const { barrier_wait(bars + stage, phase); }
  __device__ __forceinline__ void release(int stages) {
    __syncwarp();
    warp_arrive(bars + kMaxStages + stage, lane);
    if ((stage += 2) >= stages) stage -= stages, phase ^= 1;  // the number of stages is even
  }
};

// Rows of the launch; known at compile time for one or two.
template <int CHUNKS>
__device__ __forceinline__ int tokens_of(const PersistentGemm& P) {
  return CHUNKS == 4 ? 1 : CHUNKS == 2 ? 2 : P.a.tokens;
}

// Adds the partial sums of the 16 consumer warps in a fixed order. M: rows.
__device__ __forceinline__ float sum_partials(const float* p, int M) {
  float v[4];
#pragma unroll
  for (int k = 0; k < 4; k++) v[k] = (p[4 * k * M * 16] + p[(4 * k + 1) * M * 16]) + (p[(4 * k + 2) * M * 16] + p[(4 * k + 3) * M * 16]);
  return (v[0] + v[1]) + (v[2] + v[3]);
}

__device__ __forceinline__ PersistentState& state(const ConsumerWarp& w) { return *reinterpret_cast<PersistentState*>(w.shared); }
__device__ __forceinline__ float* partials(const ConsumerWarp& w) { return reinterpret_cast<float*>(w.shared + kPartialsOffset); }
__device__ __forceinline__ PersistentOutput* outputs_of(const PersistentArgs& C, const ConsumerWarp& w) {
  return reinterpret_cast<PersistentOutput*>(w.shared + C.smem.outputs);
}

__device__ __forceinline__ half* place_of(const MatrixInput& to, int copy, int column) {
  return to.x + static_cast<size_t>(copy) * to.perm_stride + fragment_place(to.inverse[copy] ? __ldg(to.inverse[copy] + column) : column);
}

__device__ __forceinline__ int owned_column(const PersistentGemm& P, const ConsumerWarp& w, int r) {
  return (first_strip(P.a, w.block, 0) + (r >> 4) * P.a.grid) * 16 + (r & 15);
}

// Once per launch: epilogue parameters and the output columns of both residual GEMMs.
template <bool RANKS>
__device__ __forceinline__ void prepare_epilogue(const PersistentArgs& C, const ConsumerWarp& w) {
  if (RANKS && threadIdx.x == kConsumerThreads - 1) state(w).exchange = exchange_number(C.peers);
  if (const int q = threadIdx.x - kConsumerThreads / 2; q >= 0 && q < C.count) {
    const PersistentGemm& P = C.gemm[q];
    const GemmArgs& A = P.a;
    state(w).now[q] = {C.counters + q,
                       A.epilogue == kResidual && A.next_norm ? A.next_squares + w.block : nullptr,
                       P.outputs,
                       static_cast<uint16_t>(A.activation),
                       A.epilogue == kResidual,
                       A.epilogue == kStore,
                       A.gated,
                       C.lamport};
  }
  const int q = threadIdx.x / (kMaxOwnedStrips * 16) * 2, r = threadIdx.x % (kMaxOwnedStrips * 16);
  if (q >= C.count || q > 2 || C.gemm[0].a.epilogue != kResidual) return;
  const PersistentGemm& P = C.gemm[q];
  const GemmArgs& A = P.a;
  const int column = owned_column(P, w, r);
  PersistentOutput o{};
  o.sums = PersistentOutput::kNone;
  if (column < A.part[0].outputs) {
    o.sums = (r >> 4) * kConsumerWarps * 16 * A.tokens + (r & 15), o.other = A.scale;
    if (A.bias) o.bias = __ldg(A.bias + column);
    if (q) o.residual = A.residual + column;
    if (A.next_norm) o.norm = __ldg(A.next_norm + column), o.to = place_of(A.next, 0, column);
  }
  state(w).owned[q / 2][r] = o;
}

// Called by all consumer warps after their stores: releases the factors to the poll warp; thread 0 increments the GEMM's counter.
__device__ __forceinline__ void arrive_stored(const PersistentEpilogue& now, const ConsumerWarp& w) {
  __syncwarp();
  if (threadIdx.x == 0) grid_arrive(now.counter);
  warp_arrive(w.bars + kStored, w.lane);
}

// Epilogue kResidual: warp m owns row m. The next GEMM's input is stored first.
template <int CHUNKS, bool RANKS, class Adds>
__device__ __forceinline__ void add_residual(const PersistentArgs& C, const PersistentGemm& P, int q, const PersistentEpilogue& now,
                                             const Adds& adds, ConsumerWarp& w) {
  const int M = tokens_of<CHUNKS>(P), m = M == 1 ? 0 : w.warp;
  const bool last = q + 1 == C.count;
  if (w.warp >= M) {
    if (!last) arrive_stored(now, w);
    return;
  }
  const PersistentOutput* const owned = state(w).owned[q / 2] + w.lane;
  float squares = 0.f;
  const auto product = [&](const PersistentOutput& o, int k) {
    return adds.to(sum_partials(partials(w) + o.sums + m * 16, M), (w.lane + 32 * k) * M + m) * state(w).factors[m] + o.bias;
  };
  // All of the CTA's columns are on their way to the other ranks before it waits for theirs.
  const bool shared = RANKS && q == 2;
  const auto place = [&](int k) {
    return static_cast<int64_t>(C.first_row + m) * P.a.residual_stride + owned_column(P, w, w.lane + 32 * k);
  };
  if (shared)
#pragma unroll 1
    for (int k = 0; k < kMaxOwnedStrips / 2; k++)
      if (const PersistentOutput o = owned[32 * k]; o.sums != PersistentOutput::kNone)
        send(C.peers, state(w).exchange, place(k), product(o, k));
#pragma unroll
  for (int k = 0; k < kMaxOwnedStrips / 2; k++) {
    const PersistentOutput o = owned[32 * k];
    if (!__any_sync(0xffffffffu, o.sums != PersistentOutput::kNone)) break;
    if (o.sums == PersistentOutput::kNone) continue;
    float y = product(o, k);
    if (shared) y = take_sum(C.peers, state(w).exchange, place(k), y);
    const float v = w.residual[k] + o.other * y;
    w.residual[k] = v;
    squares = fmaf(v, v, squares);
    if (o.to) {
      half* to = reinterpret_cast<half*>(static_cast<uint8_t*>(o.to) + (last ? 0 : w.set));
      if (M > 1) to += static_cast<size_t>(m) * P.a.next.stride;
      const half next = saturated(v * o.norm);
      st_relaxed(to, lamport_value(next));
      adds.keep(next, w.lane + 32 * k, m, M);
    }
  }
  if (!last) arrive_stored(now, w);
  if (now.squares) {
    squares = warp_sum(squares);
    if (w.lane == 0) st_relaxed(now.squares + (last ? 0 : w.set / 4) + (M == 1 ? 0 : m * P.a.grid), lamport_value(squares));
  }
#pragma unroll
  for (int k = 0; k < kMaxOwnedStrips / 2; k++)
    if (float* const to = owned[32 * k].residual) to[M == 1 ? 0 : static_cast<size_t>(m) * P.a.residual_stride] = w.residual[k];
  // The input of another kernel may have several permuted copies.
  if (last && now.squares)
#pragma unroll 1
    for (int copy = 1; copy < P.a.next.num_perms; copy++)
      for (int k = 0; k < kMaxOwnedStrips / 2; k++)
        if (const PersistentOutput& o = owned[32 * k]; o.sums != PersistentOutput::kNone)
          place_of(P.a.next, copy, owned_column(P, w, w.lane + 32 * k))[static_cast<size_t>(m) * P.a.next.stride] =
              saturated(w.residual[k] * o.norm);
}

// Output columns of kStore and kActivation: [part][column]; with a gate only the first part's. `first`: the first thread that takes part.
__device__ __forceinline__ void make_outputs(const PersistentArgs& C, const PersistentGemm& P, int round, int first,
                                             const ConsumerWarp& w) {
  const GemmArgs& A = P.a;
  const int n = P.strips * 16, e = (threadIdx.x + kConsumerThreads - first) % kConsumerThreads;
  if (e >= P.outputs) return;
  int r = e, part = 0;
#pragma unroll 1
  while (r >= n) r -= n, part++;
  const int strip0 = first_strip(A, w.block, part), column = (strip0 + (round * P.strips + (r >> 4)) * A.grid) * 16 + (r & 15),
            out = A.part[part].first_column + column;
  PersistentOutput o{};
  o.sums = PersistentOutput::kNone;
  if ((r >> 4) < strips_in_round(P, part, strip0, round) && column < A.part[part].outputs) {
    o.sums = (part * P.strips + (r >> 4)) * kConsumerWarps * 16 * A.tokens + (r & 15);
    o.sums_up = o.sums + P.strips * kConsumerWarps * 16 * A.tokens;
    if (A.bias) o.bias = __ldg(A.bias + out);
    if (A.bias && A.gated) o.other = __ldg(A.bias + A.part[0].outputs + column);
    if (A.epilogue == kStore)
      o.to = A.out + out;
    else
      o.to = place_of(A.next, 0, column);
  }
  outputs_of(C, w)[e] = o;
}

template <int CHUNKS, class Adds>
__device__ __forceinline__ void write_outputs(const PersistentArgs& C, const PersistentGemm& P, const PersistentEpilogue& now,
                                              const Adds& adds, const ConsumerWarp& w) {
  const int M = tokens_of<CHUNKS>(P);
  if (static_cast<int>(threadIdx.x) >= now.outputs) return;
  const PersistentOutput o = outputs_of(C, w)[threadIdx.x];
  if (o.sums == PersistentOutput::kNone) return;
#pragma unroll 1
  for (int m = 0; m < M; m++) {
    const float factor = state(w).factors[m];
    float v = adds.to(sum_partials(partials(w) + o.sums + m * 16, M), threadIdx.x * M + m) * factor + o.bias;
    if (now.store) {
      float* const to = static_cast<float*>(o.to) + (m ? m * P.a.out_stride : 0);
      if (now.lamport)
        st_relaxed(to, lamport_value(v));
      else
        *to = v;
    } else {
      v = activation(v, now.activation);
      if (now.gated)
        v *= adds.to(sum_partials(partials(w) + o.sums_up + m * 16, M), (threadIdx.x + now.outputs) * M + m) * factor + o.other;
      const half next = saturated(v);
      st_relaxed(reinterpret_cast<half*>(static_cast<uint8_t*>(o.to) + w.set) + (m ? static_cast<size_t>(m) * P.a.next.stride : 0),
                 lamport_value(next));
      adds.keep(next, threadIdx.x, m, M);
    }
  }
}

__device__ __forceinline__ void load_residual(const PersistentArgs& C, ConsumerWarp& w) {
  const GemmArgs& A = C.gemm[0].a;
  const int strip0 = first_strip(A, w.block, 0), strips = strips_in_round(C.gemm[0], 0, strip0, 0);
#pragma unroll
  for (int k = 0; k < kMaxOwnedStrips / 2; k++) {
    const int r = w.lane + 32 * k, column = (strip0 + (r >> 4) * A.grid) * 16 + (r & 15);
    w.residual[k] = w.warp < A.tokens && r < strips * 16 && column < A.part[0].outputs
                        ? __ldcg(A.residual + static_cast<size_t>(w.warp) * A.residual_stride + column)
                        : 0.f;
  }
}

// Address and shape of a GEMM's inputs, read from the parameters before the inputs exist. GEMM 0 reads another kernel's output.
struct PersistentInput {
  const half* x;  // row 0
  int stride, width, blocks;
  __device__ __forceinline__ PersistentInput(const PersistentGemm& P, int q, const ConsumerWarp& w)
      : x(P.a.x + (q ? w.set / 2 : 0)), stride(P.a.x_stride), width(P.width), blocks(P.blocks) {
    asm volatile("" : "+l"(x), "+r"(stride), "+r"(width), "+r"(blocks));  // load parameters now, not when the inputs arrive
  }
};

// Quantises the inputs to int16. LANES lanes share a block of 64 rows and load SIDE blocks at once. Missing values are polled one block
// after the other.
template <int CHUNKS, int LANES, int SIDE>
__device__ __forceinline__ void quantize_rows(const PersistentArgs& C, const PersistentInput& in, int q, const ConsumerWarp& w) {
  constexpr int kBlocks = 32 / LANES, kPlaces = 8 / LANES;  // blocks per warp and pass; 16-byte loads per lane and block
  Int8Block* const blocks = reinterpret_cast<Int8Block*>(w.shared + C.smem.blocks);
  uint8_t* const xs = w.shared + C.smem.xs;
  const int t = w.lane % LANES, tokens = tokens_of<CHUNKS>(C.gemm[q]);
#pragma unroll 1
  for (int m = 0; m < tokens; m++) {
    const half* const x = in.x + (q == 0 && C.gemm[0].a.rows ? row_of(C.gemm[0].a, m) : m) * in.stride + t * 8;
#pragma unroll 1
    for (int first = w.warp * kBlocks; first < in.blocks; first += SIDE * kConsumerWarps * kBlocks) {
      uint4 v[SIDE][kPlaces];
      const auto row = [&](int side, int k) { return (first + side * kConsumerWarps * kBlocks + w.lane / LANES) * 64 + k * LANES * 8; };
#pragma unroll
      for (int side = 0; side < SIDE; side++)
#pragma unroll
        for (int k = 0; k < kPlaces; k++) {
          v[side][k] = make_uint4(0, 0, 0, 0);  // rows past K are zero
          if (row(side, k) + t * 8 < in.width) v[side][k] = ld_relaxed(x + row(side, k));
        }
#pragma unroll 1
      for (int side = 0; side < SIDE && row(side, 0) - w.lane / LANES * 64 < in.width; side++) {
        uint4 own[kPlaces];
#pragma unroll
        for (int k = 0; k < kPlaces; k++) {
          own[k] = SIDE > 1 && side ? v[SIDE - 1][k] : v[0][k];
          // One block after the other: failed polls compete with other loads for L2.
          if (q && row(side, k) + t * 8 < in.width && !is_written(own[k])) own[k] = poll(x + row(side, k));
        }
        const int at = row(side, 0) / 64, to = m * in.blocks + at;
        quantize_block<LANES>(own, xs + to * 128, blocks + to, t, at < in.blocks);
      }
    }
  }
}
template <int CHUNKS>
__device__ __forceinline__ void quantize_inputs(const PersistentArgs& C, const PersistentInput& in, int q, const ConsumerWarp& w) {
  if (in.blocks <= kConsumerWarps * 4)
    quantize_rows<CHUNKS, 8, 1>(C, in, q, w);
  else
    quantize_rows<CHUNKS, 4, 2>(C, in, q, w);
}

__device__ __forceinline__ WorkItem make_work_item(const PersistentArgs& C, int q, int round, int warp, int number, const ConsumerWarp& w) {
  const PersistentGemm& P = C.gemm[q];
  const BlobImage image = image_of(C, w.shared, q);
  int p = 0, pass = number;
#pragma unroll 1
  while (pass >= P.passes[p].count) pass -= P.passes[p++].count;
  const int count = max(strips_in_round(P, p, first_strip(P.a, w.block, p), round), 0);
  const Pass range(P, image, p, pass);
  if (P.passes[p].pairs) {
    const int warp_set = warp / kWarpsPerSet, n = range.first + warp % kWarpsPerSet * 2;
    const AlternatingStrips turns(count, p, warp_set);
    const ItemDesc it(image.items[n]);
    const int sums = ((p * P.strips + turns.first) * kConsumerWarps + warp % kWarpsPerSet * 2) * 16;
    return {it.words.y, it.words.w, static_cast<int>(it.words.x),
            it.unit0(), turns.own,  sums | WorkItem::kPairs | (turns.empty ? WorkItem::kEmptyStage : 0)};
  }
  const int n = range.first + warp;
  const bool mine = n < range.last;
  const ItemDesc it(image.items[mine ? n : range.first]);
  const int begin = image.items[mine ? range.first + warp / kWarpsPerSet * kWarpsPerSet : range.first].offset;
  const int sums = (p * P.strips * kConsumerWarps + warp) * 16 * P.a.tokens;
  return {it.words.y,
          it.words.w,
          static_cast<int>(it.words.x) - begin,
          it.unit0(),
          mine ? count : -count,
          sums | (pass > 0 ? WorkItem::kAccumulates : 0)};
}

// work_items_of: [work item][warp] in shared memory. `first`: the first thread that prepares them.
__device__ __forceinline__ WorkItem* work_items_of(const PersistentArgs& C, const ConsumerWarp& w) {
  return reinterpret_cast<WorkItem*>(w.shared + C.smem.work_items);
}

__device__ __forceinline__ void make_work_items(const PersistentArgs& C, int q, int round, int first, const ConsumerWarp& w) {
  const int i = static_cast<int>(threadIdx.x) - first;
  if (i >= 0 && i < C.gemm[q].work_items * kConsumerWarps)
    work_items_of(C, w)[i] = make_work_item(C, q, round, i % kConsumerWarps, i / kConsumerWarps, w);
}

template <int CHUNKS, WeightKind WEIGHTS, bool PAIRS>
__device__ __forceinline__ void run_work_item(const PersistentArgs& C, const PersistentGemm& P, const WorkItem& work, const half2* steps,
                                              const Int8Input<CHUNKS>& in, ConsumerWarp& w) {
  const bool add = work.sums & WorkItem::kAccumulates;
  const int lane = w.lane, step = kConsumerWarps * 16 * tokens_of<CHUNKS>(P), count = abs(work.strips);
  const uint8_t* const ring = w.shared + C.smem.ring;
  float* to = partials(w) + (work.sums & ~15);
  if (work.strips < 0) {
#pragma unroll 1
    for (int s = 0; s < count; s++, to += step) {
      Int8Sums<CHUNKS> y;
      w.wait();
      w.release(C.smem.stages);
      y.put(to, in, lane, add);
    }
    return;
  }
  const ItemDesc desc{work.kind, work.rest};
  dispatch_item<CHUNKS, WEIGHTS, PAIRS>(desc, work.sums & WorkItem::kPairs, [&](auto* kind) {
    using Kind = std::remove_pointer_t<decltype(kind)>;
    const Kind item(desc, steps + work.steps, in);
    const auto here = [&] { return ring + w.stage * C.smem.stage_bytes + work.offset; };
    if constexpr (Kind::kAhead) {
      typename Kind::Words words;
      w.wait();
      item.load(here(), lane, words);
#pragma unroll 1
      for (int left = count;; to += Kind::kPairs ? 2 * step : step) {
        int c[Kind::kSums][4];
        Int8Sums<CHUNKS> y;
        item.products(words, c);
        const uint32_t code = words.code;
        if constexpr (Kind::kRounds > 1) item.multiply(here(), lane, y, 1);
        w.release(C.smem.stages);
        const bool more = --left;
        if (more) {
          w.wait();
          item.load(here(), lane, words);
        }
        item.finish(code, c, y);
        y.template put<Kind::kPairs>(to, in, lane, add);
        if (!more) break;
      }
    } else {
#pragma unroll 1
      for (int s = 0; s < count; s++, to += step) {
        Int8Sums<CHUNKS> y;
        w.wait();
        item.multiply(here(), lane, y);
        w.release(C.smem.stages);
        y.put(to, in, lane, add);
      }
    }
  });
}

// GEMM q and its epilogue.
template <int CHUNKS, WeightKind WEIGHTS, bool RANKS, class Lora>
__device__ __forceinline__ void run_gemm(const PersistentArgs& C, int q, const Int8Input<CHUNKS>& in, const Lora& lora, ConsumerWarp& w) {
  const PersistentGemm& P = C.gemm[q];
  const half2* const steps = image_of(C, w.shared, q).steps;
  const int work_items = P.work_items;
#pragma unroll 1
  for (int round = 0;;) {
#pragma unroll 1
    for (int i = 0; i < work_items; i++) {
      WorkItem now = work_items_of(C, w)[i * kConsumerWarps + w.warp];
      now.kind = __shfl_sync(0xffffffffu, now.kind, 0), now.rest = __shfl_sync(0xffffffffu, now.rest, 0);  // warp-uniform for the compiler
      if (now.strips) run_work_item<CHUNKS, WEIGHTS, Lora::kPairs>(C, P, now, steps, in, w);
      if (CHUNKS == 4 && Lora::kPairs && now.sums & WorkItem::kEmptyStage) w.wait(), w.release(C.smem.stages);
    }
    barrier_wait(w.bars + kFactorsReady, q & 1);
    if (q == 0) w.set = state(w).set;
    const PersistentEpilogue now = state(w).now[q];
    const int first = round ? round * P.strips * 16 * tokens_of<CHUNKS>(P) : 0;
    const auto adds = lora.adds(w.shared, state(w), round ? first * P.a.num_parts : 0, first);
    consumer_sync();
    round++;
    if (now.residual) {  // one round only
      add_residual<CHUNKS, RANKS>(C, P, q, now, adds, w);
    } else {
      write_outputs<CHUNKS>(C, P, now, adds, w);
      if (round == P.rounds && q + 1 < C.count) arrive_stored(now, w);
    }
    if (round == P.rounds) return;
    make_work_items(C, q, round, 0, w);
    make_outputs(C, P, round, 0, w);
    consumer_sync();  // partial sums may be overwritten
  }
}

// RANKS: the sums of the third GEMM are exchanged with other ranks. Kernels of their own, as these registers are missing elsewhere.
template <int CHUNKS, WeightKind WEIGHTS, bool RANKS, class Lora>
__device__ __forceinline__ void run_chain(const PersistentArgs& C, const Lora& lora) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  unsigned here = shared_address(dynamic);
  asm volatile("" : "+r"(here));  // keep the address in one register
  uint8_t* const shared = static_cast<uint8_t*>(__cvta_shared_to_generic(here));
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x >> 5), 0), block = blockIdx.x;
  uint64_t* const bars = reinterpret_cast<PersistentState*>(shared)->bars;
  pdl_launch_dependents();
  if (threadIdx.x < kNumBarriers) {
    const int i = threadIdx.x;
    barrier_init(bars + i, Lora::kArrivals > 1 && i == kFactorsReady ? Lora::kArrivals
                           : i == kStored                            ? kConsumerWarps * kWarpArrivals
                           : i >= kMaxStages && i < 2 * kMaxStages   ? kWarpsPerSet * kWarpArrivals
                                                                     : 1);
    barrier_fence();
  }
  __syncthreads();
  if (warp == kConsumerWarps) {
    if (lane == 0) {
      uint32_t bytes = 0;
      for (int q = 0; q < C.count; q++) bytes += padded_image(C.gemm[q].a);
      barrier_expect(bars + kImagesFull, bytes);
      for (int q = 0; q < C.count; q++)
        bulk_copy(shared + C.smem.image[q], C.gemm[q].a.image, padded_image(C.gemm[q].a), bars + kImagesFull);
      barrier_wait(bars + kImagesFull, 0);
      produce_weights(C, shared, bars, bars + kMaxStages, block);
    }
    return;
  }
  if (warp > kConsumerWarps) {
    if (Lora::kArrivals == 1 || warp == kConsumerWarps + 1)
      poll_inputs(C, shared, bars, block, lane);
    else
      lora.run(C, *reinterpret_cast<PersistentState*>(shared), warp - kConsumerWarps - 2, bars + kInputsReady, bars + kStored,
               bars + kFactorsReady, block, lane);
    return;
  }
  ConsumerWarp w{shared, bars, block, warp, lane, warp / kWarpsPerSet, 0, 0, {}};
  prepare_epilogue<RANKS>(C, w);
  barrier_wait(bars + kImagesFull, 0);
#pragma unroll 1
  for (int q = 0; q < C.count; q++) {
    const PersistentGemm& P = C.gemm[q];
    // Prepared by warps that mostly have nothing to store for the previous GEMM.
    static_assert(kMaxWorkItems * kConsumerWarps <= kConsumerThreads / 2, "a thread a work");
    make_work_items(C, q, 0, kConsumerThreads / 2, w);
    if (P.a.epilogue != kResidual) make_outputs(C, P, 0, kConsumerThreads / 4, w);
    const PersistentInput x(P, q, w);
    const Int8Input<CHUNKS> in(shared + C.smem.xs, reinterpret_cast<const Int8Block*>(shared + C.smem.blocks), P.blocks, P.a.tokens, lane);
    barrier_wait(bars + kInputsReady, q & 1);
    if (q == 0 && P.a.epilogue == kResidual) load_residual(C, w);
    quantize_inputs<CHUNKS>(C, x, q, w);
    consumer_sync();
    run_gemm<CHUNKS, WEIGHTS, RANKS>(C, q, in, lora, w);
  }
  if (C.count == 1) return;
  // Counters of GEMMs that this launch does not have, and the number of launches. No CTA of this launch reads them any more.
  if (threadIdx.x >= C.count - 1 && threadIdx.x < kMaxGemms) grid_arrive(C.counters + threadIdx.x);
  if (block == 0 && threadIdx.x == kMaxGemms) grid_arrive(C.counters + kMaxGemms);
  if (block == 0 && threadIdx.x == kMaxGemms + 1) lora.count();
}
#endif

#ifdef __CUDACC__
template <int CHUNKS, WeightKind WEIGHTS, bool RANKS>
__global__ void __launch_bounds__(kPersistentThreads, 1) persistent_gemm(const __grid_constant__ PersistentArgs C) {
#if __CUDA_ARCH__ >= 900
  run_chain<CHUNKS, WEIGHTS, RANKS>(C, NoLora{});
#endif
}
template <int CHUNKS, WeightKind WEIGHTS>
__global__ void __launch_bounds__(kPersistentThreads + kLoraChainWarps * 32, 1)
    persistent_lora(const __grid_constant__ PersistentArgs C, const __grid_constant__ LoraChain L) {
#if __CUDA_ARCH__ >= 900
  run_chain<CHUNKS, WEIGHTS, false>(C, WithLora{L});
#endif
}

#endif  // __CUDACC__

}  // namespace exl2nb
