// Experts of a decode step: two kernels, expert_up (gate, up, activation) and expert_down (down, weighted sum, residual). Both multiply one
// token's row by several matrices.
//
// Segment: one matrix (or part) of which the CTA owns strips of 16 columns. The warps split the items of every segment and stream them
// strip by strip through shared-memory rings; stages have the size of the largest item, so small experts keep as many bytes in flight as
// large ones. SUMMED: results of the segments are added, times their weights, in segment order.
// Bytes: strips of the chosen matrices once per token; per CTA the token's row and the router's partial sums.
#pragma once
#include <cmath>

#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/moe/moe.h"

namespace exl2nb {

// Routing of a token, computed by a whole CTA from the router's partial sums: the top_k largest logits (ties: lower number), in order of
// their numbers; weights are a softmax over all experts, divided by the p-norm of the chosen ones, p = `renormalize`, if that is not 0.
// Every CTA gets the same answer: sums run in one order with explicit rounding.
struct RoutingArgs {
  const float* sums;  // (tokens, parts, size) as in router.cuh; a separate router GEMM: one part, its row is the logits
  int parts, stride, rows, experts, top_k, kind;  // kind: NormKind still to be applied to the sums
  bool gate;                                      // one more logit: the gate of the shared expert
  float eps, inverse_width, renormalize;

  EXL2NB_BOTH int size() const { return rows * stride + 4; }
  EXL2NB_BOTH int bytes() const { return parts * size() * 4; }  // per token
};

// Shared memory. ranked: by falling logit; numbers: rising, then the shared expert; places: their ranks.
struct Routing {
  float *sums, *logits, *weights;
  int *ranked, *numbers, *places;

  static EXL2NB_BOTH int bytes(const RoutingArgs& c) { return (c.size() + (c.experts + 3) / 4 * 4 + 4 * (c.top_k + 1) + 3) / 4 * 16; }
  __device__ __forceinline__ Routing(const RoutingArgs& c, uint8_t* at) {
    sums = reinterpret_cast<float*>(at);
    logits = sums + c.size();
    weights = logits + (c.experts + 3) / 4 * 4;
    numbers = reinterpret_cast<int*>(weights + c.top_k + 1);
    ranked = numbers + c.top_k + 1;
    places = ranked + c.top_k + 1;
  }
};

struct alignas(16) ExpertSegment {
  const uint8_t* data;  // the CTA's first strip
  const Item* items;
  const half2* steps;
  const half* x;
  int hop;  // bytes between strips of the CTA
  float weight;
};

// Ring of a CTA: `stages` stages of `stage_bytes` bytes per warp.
struct RingShape {
  int stage_bytes, stages;
  EXL2NB_BOTH int bytes() const { return kWarps * stages * stage_bytes; }
};

// expert_up: a CTA's strips of gate and up of one expert of a token, and the activation.
//
// Every CTA computes the routing itself. What does not depend on it is loaded meanwhile: the table of matrices and, if all experts share a
// layout (`alike`), the items. So there is one round trip to memory between routing and first product. The shared expert does not wait for
// the routing at all.
struct ExpertUpArgs {
  RoutingArgs choice;
  RowSource from;
  const ExpertMatrix *table, *next_table;
  ExpertMatrix representative[2];  // a routed expert and the shared one: what is equal for all experts is known without the table
  // CTAs per token: `share` for each of top_k pairs, then `shared_share` for the shared expert.
  int share, shared_share, pairs, activation, x_stride, num_perms;
  int image, strips, flush;  // bytes of the largest image; strips that a CTA has at most, and that are summed at once
  RingShape ring;
  int ring_bytes;                           // bytes of the ring, and of what is in its place before
  bool alike, table_in_smem, sums_in_smem;  // equal layouts; whether table and router sums fit in the ring's place
  half* next;                               // [pair][stride]
  int next_stride;

  // Bytes of the table in shared memory: first matrices, and the permutations of the second matrices' inputs.
  EXL2NB_BOTH int table_bytes() const { return choice.experts * static_cast<int>(sizeof(ExpertMatrix)) + (choice.experts + 1) / 2 * 16; }
};

// Dynamic shared memory.
struct ExpertUpSmem {
  uint8_t *ring, *image;
  uint64_t* bars;  // of the ring, then of what arrives before, then of the router's sums
  float* sums;
  uint8_t* choice;  // Chosen
  int* places;
  ExpertSegment* segments;
  ushort2* ranges;
  half* xs;

  static EXL2NB_BOTH int bytes(const ExpertUpArgs& E) {
    return E.ring_bytes + 8 * bars_of(E) + E.image + sums_bytes(E) + Routing::bytes(E.choice) + E.strips * 64 +
           2 * static_cast<int>(sizeof(ExpertSegment) + kWarps * sizeof(ushort2)) + E.num_perms * E.x_stride * 2;
  }
  static EXL2NB_BOTH int bars_of(const ExpertUpArgs& E) { return kWarps * E.ring.stages + 2; }
  static EXL2NB_BOTH int sums_bytes(const ExpertUpArgs& E) { return (E.strips > E.flush ? 2 : 1) * E.flush * 2 * kWarps * 16 * 4; }
  __device__ __forceinline__ ExpertUpSmem(const ExpertUpArgs& E, uint8_t* at) {
    ring = at;
    bars = reinterpret_cast<uint64_t*>(at + E.ring_bytes);
    image = reinterpret_cast<uint8_t*>(bars + bars_of(E));
    sums = reinterpret_cast<float*>(image + E.image);
    choice = image + E.image + sums_bytes(E);
    segments = reinterpret_cast<ExpertSegment*>(choice + Routing::bytes(E.choice));
    ranges = reinterpret_cast<ushort2*>(segments + 2);
    xs = reinterpret_cast<half*>(ranges + 2 * kWarps);
    places = reinterpret_cast<int*>(xs + E.num_perms * E.x_stride);
  }
};

// expert_down: one CTA's columns of the residual, one token, all its experts.
//
// As in skinny_gemm.cuh a CTA owns whole strips; its warps split the items of all chosen matrices, one expert after the other, in order of
// their numbers. The routing is known before expert_up starts, and both kernels fit on an SM together: the ring is filled while expert_up
// runs.
struct ExpertDownArgs {
  GemmArgs out;  // one token: strips and outputs (equal for all experts), x, epilogue
  RoutingArgs choice;
  const ExpertMatrix* table;
  int pairs, image;  // image: bytes of the largest
  RingShape ring;
  int ring_bytes;     // as in ExpertUpArgs
  bool sums_in_smem;  // as there
};

// Dynamic shared memory.
struct ExpertDownSmem {
  uint8_t *ring, *images;
  uint64_t* bars;  // of the ring, then of what arrives before and of the activations
  ExpertMatrix* matrices;
  ExpertSegment* segments;
  ushort2* ranges;
  uint8_t *own, *choice;  // SkinnySmem; Chosen
  half* xs;

  static EXL2NB_BOTH int bars_bytes(const ExpertDownArgs& D) { return (kWarps * D.ring.stages + 3) / 2 * 16; }
  static EXL2NB_BOTH int bytes(const ExpertDownArgs& D) {
    return D.ring_bytes + bars_bytes(D) +
           D.pairs * static_cast<int>(sizeof(ExpertMatrix) + D.image + sizeof(ExpertSegment) + kWarps * sizeof(ushort2)) +
           SkinnySmem::bytes(D.out) + Routing::bytes(D.choice);
  }
  __device__ __forceinline__ ExpertDownSmem(const ExpertDownArgs& D, uint8_t* at) {
    ring = at;
    bars = reinterpret_cast<uint64_t*>(at + D.ring_bytes);
    images = at + D.ring_bytes + bars_bytes(D);
    matrices = reinterpret_cast<ExpertMatrix*>(images + D.pairs * D.image);
    choice = reinterpret_cast<uint8_t*>(matrices + D.pairs);
    own = choice + Routing::bytes(D.choice);
    segments = reinterpret_cast<ExpertSegment*>(own + SkinnySmem::bytes(D.out));
    ranges = reinterpret_cast<ushort2*>(segments + D.pairs);
    xs = reinterpret_cast<half*>(ranges + D.pairs * kWarps);
  }
};

#ifdef __CUDACC__
// Sums the router's partial sums from index `first` on. near: the token's partial sums in shared memory, or null. A barrier must follow.
__device__ __forceinline__ void sum_router_partials(const RoutingArgs& c, const Routing& to, const float* near, int token, int first) {
  const int lane = threadIdx.x & 31, size = c.size();
  const float* const far = c.sums + static_cast<size_t>(token) * c.parts * size;
#pragma unroll 1
  for (int f = first + (threadIdx.x >> 5); f < size; f += kWarps) {
    float s = 0.f;
#pragma unroll 1
    for (int p = lane; p < c.parts; p += 32) s = __fadd_rn(s, near ? near[p * size + f] : __ldcg(far + p * size + f));
    s = warp_sum(s);
    if (lane == 0) to.sums[f] = s;
  }
}

// Mean and factor of the norm in front of the router; after sum_router_partials.
using Scale = Row::Scale;
__device__ __forceinline__ Scale norm_scale(const RoutingArgs& c, const Routing& to) {
  if (c.kind == kNoNorm) return {0.f, 1.f};
  const float* const stats = to.sums + c.rows * c.stride;
  const float mean = c.kind == kLayerNorm ? __fmul_rn(stats[0], c.inverse_width) : 0.f;
  const float var = __fmaf_rn(-mean, mean, __fmul_rn(stats[1], c.inverse_width));
  return {mean, rsqrtf(__fadd_rn(fmaxf(var, 0.f), c.eps))};
}

// Fills to.ranked; after sum_router_partials.
__device__ __forceinline__ void rank_experts(const RoutingArgs& c, const Routing& to, const Scale& norm) {
  const int padded = (c.experts + 3) / 4 * 4;
  for (int r = threadIdx.x; r < c.top_k; r += kThreads) to.ranked[r] = r;  // in case of NaN logits
#pragma unroll 1
  for (int e = threadIdx.x; e < c.stride; e += kThreads) {
    float v = to.sums[e];
    if (c.kind == kLayerNorm) v = __fmaf_rn(-norm.mean, to.sums[c.stride + e], v);
    v = __fmul_rn(v, norm.factor);
    if (c.kind == kLayerNorm && c.rows > 2) v = __fadd_rn(v, to.sums[2 * c.stride + e]);
    if (e < padded) to.logits[e] = e < c.experts ? v : -INFINITY;
    if (e == c.experts) to.sums[e] = v;  // gate
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < (c.experts + 7) / 8 * 32; i += kThreads) {  // four lanes per expert
    const int e = i >> 2, q = i & 3;
    const float mine = e < c.experts ? to.logits[e] : -INFINITY;
    int before = 0;
#pragma unroll 1
    for (int j = 4 * q; j < padded; j += 16) {
      const float4 l = *reinterpret_cast<const float4*>(to.logits + j);
      const auto ahead = [&](float other, int k) { return other > mine || (other == mine && k < e); };
      before += ahead(l.x, j) + ahead(l.y, j + 1) + ahead(l.z, j + 2) + ahead(l.w, j + 3);
    }
    before += __shfl_xor_sync(0xffffffffu, before, 1);
    before += __shfl_xor_sync(0xffffffffu, before, 2);
    if (q == 0 && e < c.experts && before < c.top_k) to.ranked[before] = e;
  }
  __syncthreads();
}

// After rank_experts; the rest of `to` is valid after the next barrier.
__device__ __forceinline__ void weigh_experts(const RoutingArgs& c, const Routing& to) {
  const int lane = threadIdx.x & 31;
  if (threadIdx.x >= 32) return;
  for (int r = lane; r < c.top_k; r += 32) {
    int before = 0;
    for (int q = 0; q < c.top_k; q++) before += to.ranked[q] < to.ranked[r] || (to.ranked[q] == to.ranked[r] && q < r);
    to.numbers[before] = to.ranked[r], to.places[before] = r;
  }
  __syncwarp();
  const float top = to.logits[to.ranked[0]];
  float sum = 0.f, norm = 0.f;
  for (int e = lane; e < c.experts; e += 32) sum += expf(to.logits[e] - top);
  sum = warp_sum(sum);
  for (int r = lane; r < c.top_k; r += 32) {
    const float p = expf(to.logits[to.numbers[r]] - top) / sum;
    to.weights[r] = p;
    if (c.renormalize > 0.f) norm += c.renormalize == 1.f ? p : powf(p, c.renormalize);
  }
  norm = warp_sum(norm);
  if (c.renormalize > 0.f && c.renormalize != 1.f) norm = powf(norm, 1.f / c.renormalize);
  __syncwarp();
  for (int r = lane; r < c.top_k && c.renormalize > 0.f; r += 32) to.weights[r] /= norm;
  if (lane == 0) {
    to.numbers[c.top_k] = c.experts, to.places[c.top_k] = c.top_k;
    to.weights[c.top_k] = c.gate ? 1.f / (1.f + expf(-to.sums[c.experts])) : 1.f;
  }
}

struct ExpertStream {
  const ExpertSegment* segments;
  const ushort2* ranges;  // [segment][warp]: items
  uint8_t* ring;
  uint64_t* bars;  // [warp][stage]
  RingShape shape;
  int count, strips;  // segments; strips of each
};

// Producer of a warp's ring: strip by strip, in each segment by segment.
template <int PATH>
struct ExpertProducer {
  const ExpertStream& s;
  const int warp, lane;
  int left, segment = -1, item = 0, end = 0, stage = 0, strip = 0;
  const uint8_t* data = nullptr;

  // known: segments are valid; otherwise call `next` when they are.
  __device__ __forceinline__ ExpertProducer(const ExpertStream& stream, int w, int l, bool known)
      : s(stream), warp(w), lane(l), left(stream.strips) {
    if (known) next();
  }
  // Moves to the next segment of which this warp has items.
  __device__ __forceinline__ void next() {
#pragma unroll 1
    for (int tries = 0; left > 0; tries++) {
      if (++segment == s.count) {
        segment = 0, strip++, left--;
        if (tries > s.count) left = 0;
        if (left == 0) return;
      }
      const ushort2 r = s.ranges[segment * kWarps + warp];
      if (r.x == r.y) continue;
      item = r.x, end = r.y;
      data = s.segments[segment].data + static_cast<size_t>(strip) * s.segments[segment].hop;
      return;
    }
  }
  __device__ __forceinline__ void operator()() {
    if (left > 0) {
      const Item it = s.segments[segment].items[item];
      const int at = warp * s.shape.stages + stage;
      fetch_item<PATH>(s.ring + at * s.shape.stage_bytes, data + it.offset, it.bytes, lane, s.bars + at);
      stage = stage + 1 == s.shape.stages ? 0 : stage + 1;
      if (++item == end) next();
    }
    if constexpr (PATH == kAsync) async_commit();
  }
  __device__ __forceinline__ void fill() {
    if (PATH == kBulk && lane != 0) return;
    for (int i = 0; i < s.shape.stages; i++) (*this)();
  }
};

// Consumer: all strips, `flush` at a time. sums: two buffers [flush][segment, or 1 if SUMMED][warp][16]. done(sums, first strip, strips) is
// called by all threads.
template <int PATH, bool STAGED, bool SUMMED, class Done>
__device__ __forceinline__ void run_experts(const ExpertStream& s, ExpertProducer<PATH>& fetch, float* sums, int flush, int warp, int lane,
                                            Done done) {
  const int g = lane >> 2, t = lane & 3, outs = SUMMED ? 1 : s.count, size = flush * outs * kWarps * 16;
  const bool live = g == 0;
  int stage = 0, first = 0, last = s.count;
  uint32_t phase = 0;
  if constexpr (SUMMED) {
    const auto none = [&](int i) { return s.ranges[i * kWarps + warp].x == s.ranges[i * kWarps + warp].y; };
    while (first < last && none(first)) first++;
    while (last > first && none(last - 1)) last--;
  }
  float* to = sums;
  int before = 0;
#pragma unroll 1
  for (int strip = 0; strip < s.strips; strip++) {
    float y[4] = {0, 0, 0, 0};
    float* const p = to + (strip - before) * outs * kWarps * 16 + warp * 16;
#pragma unroll 1
    for (int i = first; i < last; i++) {
      const ExpertSegment& m = s.segments[i];
      const int end = s.ranges[i * kWarps + warp].y;
      const half* const x = m.x + t * 8;
      float part[4] = {0, 0, 0, 0};
#pragma unroll 1
      for (int n = s.ranges[i * kWarps + warp].x; n < end; n++) {
        const ItemDesc it(m.items[n]);
        const int at = warp * s.shape.stages + stage;
        if constexpr (PATH == kBulk) barrier_wait(s.bars + at, phase);
        if constexpr (PATH == kAsync) async_wait<stages_of(PATH) - 1>();
        if constexpr (PATH != kBulk) __syncwarp();
        compute_item<PATH, STAGED>(it, s.ring + at * s.shape.stage_bytes, m.steps + it.unit0(), x + it.block() * 32, live, lane, part);
        __syncwarp();
        if (PATH != kBulk || lane == 0) fetch();
        if (++stage == s.shape.stages) stage = 0, phase ^= 1;
      }
      if constexpr (SUMMED) {
        const float weight = m.weight;
#pragma unroll
        for (int j = 0; j < 4; j++) y[j] = fmaf(weight, part[j], y[j]);
      } else if (t == 0) {
        p[i * kWarps * 16 + g] = part[0], p[i * kWarps * 16 + g + 8] = part[2];
      }
    }
    if constexpr (SUMMED)
      if (t == 0) p[g] = y[0], p[g + 8] = y[2];
    if (strip + 1 - before < flush && strip + 1 < s.strips) continue;
    __syncthreads();
    done(to, before, strip + 1 - before);
    before = strip + 1;
    to = to == sums ? sums + size : sums;
  }
}

// Sum of a column over the warps, in fixed order.
__device__ __forceinline__ float sum_warps(const float* sums) {
  float v = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) v += sums[w * 16];
  return v;
}

// Bulk copies into shared memory before the ring starts, one mbarrier with consecutive phases. All threads call begin (bytes), copy, wait.
template <int PATH>
struct BulkArrivals {
  uint64_t* bar;
  uint32_t phase = 0;

  __device__ __forceinline__ void begin(int bytes) {
    if (PATH == kBulk && threadIdx.x == 0) barrier_expect(bar, bytes);
  }
  // A multiple of 16 bytes.
  __device__ __forceinline__ void copy(void* to, const void* from, int bytes) {
    if constexpr (PATH == kBulk) {
      if (threadIdx.x == 0) bulk_copy(to, from, bytes, bar);
    } else {
      for (int i = threadIdx.x; i < bytes / 16; i += kThreads) static_cast<uint4*>(to)[i] = __ldcg(static_cast<const uint4*>(from) + i);
    }
  }
  __device__ __forceinline__ void wait() {
    if constexpr (PATH == kBulk) {
      barrier_wait(bar, phase);
      phase ^= 1;
    } else {
      __syncthreads();
    }
  }
};

// Initialises all mbarriers; __syncthreads must follow.
template <int PATH>
__device__ __forceinline__ void init_barriers(uint64_t* bars, int count) {
  if constexpr (PATH == kBulk) {
    if (const int i = threadIdx.x; i < count) {
      barrier_init(bars + i, 1);
      barrier_fence();
    }
  }
}

// Items of each warp, both parts.
__device__ __forceinline__ void split_items(const ExpertUpSmem& S, int items, int units) {
  if (const int i = threadIdx.x; i < 2 * kWarps) {
    const auto* const ends = reinterpret_cast<const uint16_t*>(S.image + image_ends(items, units)) + i / kWarps * kEnds;
    S.ranges[i] = ushort2{ends[i % kWarps], ends[i % kWarps + 1]};
  }
}

// Norm of a row for a router without partial sums. A barrier must follow.
__device__ __forceinline__ Scale norm_scale_of_row(const NormArgs& n, const float* x, float* shared) {
  float sum = 0.f, squares = 0.f;
#pragma unroll 1
  for (int i = threadIdx.x; i < n.width; i += kThreads) {
    const float v = __ldcg(x + i);
    sum += v, squares = fmaf(v, v, squares);
  }
  sum = warp_sum(sum), squares = warp_sum(squares);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = sum, shared[kWarps + (threadIdx.x >> 5)] = squares;
  __syncthreads();
  sum = squares = 0.f;
  for (int w = 0; w < kWarps; w++) sum += shared[w], squares += shared[kWarps + w];
  const float mean = n.kind == kLayerNorm ? sum / n.width : 0.f;
  return n.kind == kNoNorm ? Scale{0.f, 1.f} : Scale{mean, rsqrtf(fmaxf(squares / n.width - mean * mean, 0.f) + n.eps)};
}

// Code that runs once stalls on instruction fetch, about ten cycles per instruction: it is short and not unrolled.
template <int PATH>
__global__ void __launch_bounds__(kThreads, PATH == kBulk ? 2 : 1) expert_up(const __grid_constant__ ExpertUpArgs E) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ const int* inverses[3];  // inverse permutations of this matrix (2) and of the next one
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.y, top_k = E.choice.top_k;
  const int at = blockIdx.x, place = at < top_k * E.share ? at / E.share : top_k, block = at - place * E.share;
  const int grid = place < top_k ? E.share : E.shared_share;
  const bool chooses = place < top_k, known = E.alike || !chooses;
  const ExpertUpSmem S(E, shared);
  const Routing chosen(E.choice, S.choice);
  // In the ring's place before it is filled: the table and the router's partial sums.
  auto* const smem_table = reinterpret_cast<ExpertMatrix*>(shared);
  auto** const smem_inverses = reinterpret_cast<const int**>(smem_table + E.choice.experts);
  auto* const smem_sums = reinterpret_cast<float*>(shared + (E.table_in_smem ? E.table_bytes() : 0));
  BulkArrivals<PATH> arrivals{S.bars + kWarps * E.ring.stages}, sums_arrival{arrivals.bar + 1};

  init_barriers<PATH>(S.bars, ExpertUpSmem::bars_of(E));
  const ExpertMatrix& representative = E.representative[!chooses];
  const int near = chooses && E.table_in_smem ? E.choice.experts : 0;
  for (int i = threadIdx.x; i < near; i += kThreads) smem_inverses[i] = E.next_table[i].inverse[0];
#pragma unroll 1
  for (int v = threadIdx.x; v < E.num_perms * E.x_stride / 8; v += kThreads) reinterpret_cast<uint4*>(S.xs)[v] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  const int usual_image = known ? (image_bytes(representative.items, representative.units, 2) + 15) / 16 * 16 : 0;
  arrivals.begin(usual_image + near * static_cast<int>(sizeof(ExpertMatrix)));
  if (known) arrivals.copy(S.image, representative.image, usual_image);
  if (near) arrivals.copy(smem_table, E.table, near * static_cast<int>(sizeof(ExpertMatrix)));

  const auto take = [&](const ExpertMatrix& m, const int* const* next_inverse) {
    if (const int p = threadIdx.x; p < 2) {
      const GemmPart& part = m.part[p];
      S.segments[p] = {part.data + block * part.strip_bytes,
                       reinterpret_cast<const Item*>(S.image),
                       reinterpret_cast<const half2*>(S.image + image_steps(m.items)),
                       S.xs + part.perm * E.x_stride,
                       static_cast<int>(part.strip_bytes) * grid,
                       1.f};
      inverses[p] = m.inverse[p];
      if (p == 0) inverses[2] = *next_inverse;
    }
    return m.num_perms;
  };
  const int strips = (representative.part[0].strips - block + grid - 1) / grid;  // equal for all experts
  const ExpertStream stream{S.segments, S.ranges, S.ring, S.bars, E.ring, 2, strips};
  int perms = 0;
  if (!chooses) {
    arrivals.wait();
    split_items(S, representative.items, representative.units);
    perms = take(representative, &E.next_table[E.choice.experts].inverse[0]);
    __syncthreads();
  }
  ExpertProducer<PATH> fetch(stream, warp, lane, !chooses);
  if (!chooses) fetch.fill();
  pdl_wait();
  pdl_launch_dependents();  // here: everything complete for this kernel is then complete for the next one
  const bool sums_in_smem = chooses && E.sums_in_smem;
  if (sums_in_smem) {
    sums_arrival.begin(E.choice.bytes());
    sums_arrival.copy(smem_sums, reinterpret_cast<const uint8_t*>(E.choice.sums) + static_cast<size_t>(token) * E.choice.bytes(),
                      E.choice.bytes());
    sums_arrival.wait();
  }
  sum_router_partials(E.choice, chosen, sums_in_smem ? smem_sums : nullptr, token, chooses ? 0 : E.choice.rows * E.choice.stride);
  if (chooses) {
    arrivals.wait();
    if (known) split_items(S, representative.items, representative.units);
  }
  __syncthreads();
  const NormArgs& n = E.from.norm;
  const float* const x = E.from.x + static_cast<size_t>(token) * n.width;
  const Scale norm = E.choice.kind == n.kind ? norm_scale(E.choice, chosen) : norm_scale_of_row(n, x, S.sums);
  if (chooses) {
    rank_experts(E.choice, chosen, E.choice.kind == n.kind ? norm : Scale{0.f, 1.f});
    const int number = chosen.ranked[place];
    const ExpertMatrix& m = E.table_in_smem ? smem_table[number] : E.table[number];
    perms = take(m, E.table_in_smem ? smem_inverses + number : &E.next_table[number].inverse[0]);
    const int first = E.alike ? image_steps(m.items) : 0;  // the scales' steps, or all
    const int bytes = E.alike ? image_ends(m.items, m.units) - first : (image_bytes(m.items, m.units, 2) + 15) / 16 * 16;
    arrivals.begin(bytes);
    arrivals.copy(S.image + first, m.image + first, bytes);
    if (!E.alike) {
      arrivals.wait();
      split_items(S, m.items, m.units);
    }
    if constexpr (PATH == kBulk) barrier_fence();  // what was read and written here, before bulk copies go there
    __syncthreads();
    fetch.next();
    fetch.fill();
  }
  // Places of the outputs; the first one of a thread (usually the only one) is loaded while the row is scattered.
  const int outputs = representative.part[0].outputs;
  const int* const inverse = inverses[2];
  const auto column_of = [&](int i) { return (block + (i >> 4) * grid) * 16 + (i & 15); };
  const auto row_of_column = [&](int i) { return inverse && column_of(i) < outputs ? __ldg(inverse + column_of(i)) : column_of(i); };
  const int own = threadIdx.x < strips * 16 ? row_of_column(threadIdx.x) : 0;
#pragma unroll 1
  for (int i = Row::place(0); i < n.width; i += 4 * kThreads) {
    float4 v = written<false>(x, i, n.width);
    v.x = (v.x - norm.mean) * norm.factor, v.y = (v.y - norm.mean) * norm.factor;
    v.z = (v.z - norm.mean) * norm.factor, v.w = (v.w - norm.mean) * norm.factor;
    if (n.weight) {
      const float4 w = constant<false>(n.weight, i, n.width);
      v.x *= w.x, v.y *= w.y, v.z *= w.z, v.w *= w.w;
    }
    if (n.bias) {
      const float4 b = constant<false>(n.bias, i, n.width);
      v.x += b.x, v.y += b.y, v.z += b.z, v.w += b.w;
    }
    put_input<false>(S.xs, E.x_stride, perms, inverses, i, n.width, v);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < strips * 16; i += kThreads) S.places[i] = fragment_place(i < kThreads ? own : row_of_column(i));
  if (chooses && E.alike) arrivals.wait();
  __syncthreads();
  half* const next = E.next + static_cast<size_t>(token * E.pairs + place) * E.next_stride;
  run_experts<PATH, true, false>(stream, fetch, S.sums, E.flush, warp, lane, [&](const float* sums, int first, int count) {
#pragma unroll 1
    for (int s = warp; s < count; s += kWarps) {  // half a warp for the gate, half for what it lets pass
      float v = sum_warps(sums + (s * 2 + (lane >> 4)) * kWarps * 16 + (lane & 15));
      const float up = __shfl_down_sync(0xffffffffu, v, 16);
      const int i = (first + s) * 16 + lane;
      if (lane < 16 && column_of(i) < outputs) next[S.places[i]] = saturated(activation(v, E.activation) * up);
    }
  });
}

template <int PATH, bool STAGED>
__global__ void __launch_bounds__(kThreads, PATH == kBulk ? 2 : 1) expert_down(const __grid_constant__ ExpertDownArgs D) {
  extern __shared__ __align__(128) uint8_t shared[];
  const GemmArgs& A = D.out;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.y, block = blockIdx.x, pairs = D.pairs;
  const ExpertDownSmem L(D, shared);
  const SkinnySmem S(A, nullptr, L.own);
  const Routing chosen(D.choice, L.choice);
  const int ring_bars = kWarps * D.ring.stages, count = (A.strips - block + A.grid - 1) / A.grid;
  BulkArrivals<PATH> arrivals{L.bars + ring_bars};
  uint64_t* const x_bar = L.bars + ring_bars + 1;

  init_barriers<PATH>(L.bars, ring_bars + 2);
  load_owned(A, S, block);
  __syncthreads();
  const auto* const smem_sums = reinterpret_cast<const float*>(shared);  // where the ring will be
  if (D.sums_in_smem) {
    arrivals.begin(D.choice.bytes());
    arrivals.copy(shared, reinterpret_cast<const uint8_t*>(D.choice.sums) + static_cast<size_t>(token) * D.choice.bytes(),
                  D.choice.bytes());
    arrivals.wait();
  }
  sum_router_partials(D.choice, chosen, D.sums_in_smem ? smem_sums : nullptr, token, 0);  // complete before expert_up starts
  __syncthreads();
  rank_experts(D.choice, chosen, norm_scale(D.choice, chosen));
  weigh_experts(D.choice, chosen);
  if constexpr (PATH == kBulk) barrier_fence();
  __syncthreads();
  constexpr int kVectors = sizeof(ExpertMatrix) / 16;
  for (int i = threadIdx.x; i < pairs * kVectors; i += kThreads)
    reinterpret_cast<uint4*>(L.matrices)[i] = __ldg(reinterpret_cast<const uint4*>(D.table + chosen.numbers[i / kVectors]) + i % kVectors);
  __syncthreads();
  const auto image_size = [&](const ExpertMatrix& m) { return (image_bytes(m.items, m.units, 1) + 15) / 16 * 16; };
  int bytes = 0;
  for (int p = 0; p < pairs; p++) bytes += image_size(L.matrices[p]);
  arrivals.begin(bytes);
  for (int p = 0; p < pairs; p++) arrivals.copy(L.images + p * D.image, L.matrices[p].image, image_size(L.matrices[p]));
  if (const int p = threadIdx.x; p < pairs) {
    const ExpertMatrix& m = L.matrices[p];
    const GemmPart& part = m.part[0];
    const uint8_t* const image = L.images + p * D.image;
    const size_t x = static_cast<size_t>(chosen.places[p]) * A.x_stride;
    L.segments[p] = {part.data + block * part.strip_bytes,
                     reinterpret_cast<const Item*>(image),
                     reinterpret_cast<const half2*>(image + image_steps(m.items)),
                     STAGED ? L.xs + x : A.x + static_cast<size_t>(token) * pairs * A.x_stride + x,
                     static_cast<int>(part.strip_bytes) * A.grid,
                     chosen.weights[p]};
  }
  arrivals.wait();
  for (int i = threadIdx.x; i < pairs * kWarps; i += kThreads) {  // each warp's share of all experts' bytes, in their order
    int all = 0, before = 0;
    for (int p = 0; p < pairs; p++) {
      before += p < i / kWarps ? static_cast<int>(L.matrices[p].part[0].strip_bytes) : 0;
      all += static_cast<int>(L.matrices[p].part[0].strip_bytes);
    }
    const ExpertMatrix& m = L.matrices[i / kWarps];
    const auto* const items = reinterpret_cast<const Item*>(L.images + i / kWarps * D.image);
    const auto first = [&](int w) {  // first item of warp w: its middle is in the warp's share
      const int64_t bound = static_cast<int64_t>(all) * w / kWarps - before;
      int low = 0, high = m.items;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (static_cast<int64_t>(items[middle].offset) + items[middle].bytes / 2 < bound)
          low = middle + 1;
        else
          high = middle;
      }
      return static_cast<uint16_t>(low);
    };
    L.ranges[i] = ushort2{first(i % kWarps), first(i % kWarps + 1)};
  }
  __syncthreads();
  const ExpertStream stream{L.segments, L.ranges, L.ring, L.bars, D.ring, pairs, count};
  ExpertProducer<PATH> fetch(stream, warp, lane, true);
  fetch.fill();
  float* const residual = A.residual + static_cast<size_t>(token) * A.residual_stride;
  if (A.epilogue == kResidual && warp == 0) {  // also complete
    for (int i = lane; i < S.owned; i += 32) {
      const int column = (block + (i >> 4) * A.grid) * 16 + (i & 15);
      if (column < A.part[0].outputs) S.kept[i] = __ldcg(residual + column);
    }
  }
  pdl_launch_dependents();
  pdl_wait();
  if constexpr (STAGED) {
    const half* const x = A.x + static_cast<size_t>(token) * pairs * A.x_stride;
    if constexpr (PATH == kBulk) {
      if (threadIdx.x == 0) {
        barrier_expect(x_bar, pairs * A.x_stride * 2);
        bulk_copy(L.xs, x, pairs * A.x_stride * 2, x_bar);
      }
      barrier_wait(x_bar, 0);
    } else {
      for (int v = threadIdx.x; v < pairs * A.x_stride / 8; v += kThreads)
        reinterpret_cast<uint4*>(L.xs)[v] = __ldcg(reinterpret_cast<const uint4*>(x) + v);
      __syncthreads();
    }
  }
  float squares = 0.f;
  run_experts<PATH, STAGED, true>(stream, fetch, S.partial, A.flush, warp, lane, [&](const float* sums, int first, int strips) {
    if (warp != 0) return;
#pragma unroll 1
    for (int r = lane; r < strips * 16; r += 32) {
      const int i = first * 16 + r, column = (block + (first + (r >> 4)) * A.grid) * 16 + (r & 15);
      if (column >= A.part[0].outputs) continue;
      float v = sum_warps(sums + (r >> 4) * kWarps * 16 + (r & 15));
      if (A.epilogue == kStore) {
        A.out[static_cast<size_t>(token) * A.out_stride + column] = v;
        continue;
      }
      v = fmaf(A.scale, v, S.kept[i]);
      residual[column] = v;
      squares = fmaf(v, v, squares);
      if (!A.next_norm) continue;
      const half h = saturated(v * S.norms[i]);
#pragma unroll 1
      for (int q = 0; q < A.next.num_perms; q++)
        A.next.x[static_cast<size_t>(q) * A.next.perm_stride + static_cast<size_t>(token) * A.next.stride + S.places[q * S.owned + i]] = h;
    }
  });
  if (A.next_norm && warp == 0) {
    squares = warp_sum(squares);
    if (lane == 0) A.next_squares[static_cast<size_t>(token) * A.grid + block] = squares;
  }
}

#endif  // __CUDACC__

}  // namespace exl2nb
