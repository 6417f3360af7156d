// Stream-K GEMM (Osama et al., 2023) for 2 to 64 rows: every weight is decoded once for all rows.
//
// Tile: 16 strips (256 columns) x all K, one strip per consumer warp. The units of all tiles form a line; every CTA gets a contiguous share
// of equal cost (split_units in stream_k_gemm.cpp). CTAs that share a tile exchange partial sums through global memory with Lamport flags;
// each CTA whose share ends in the tile adds up a slice of it in CTA order: no atomics, deterministic.
// CTA: 16 consumer warps (mma.sync or wgmma, fp16 weights scaled and rounded as in unpacking, f32 accumulators), 3 producer warps for
// weights, 1 for activations. Bytes: the strips once; 2 * K per row, tile and CTA from L2. Limits: sm_90 and later, all CTAs resident at
// once, stream_k_takes().
//
// Trap: the compiler must see that loop bounds are warp-uniform. One thread's branch with arithmetic, or a per-lane loop before them, and
// it inserts R2UR before every MMA (4 to 20 % slower).
#pragma once
#include "cuda/blob/dequant.cuh"
#include "cuda/gemm/norm.cuh"
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/gemm/stream_k/lora_quads.cuh"
#include "cuda/gemm/stream_k/lora_strips.cuh"
#include "cuda/runtime/lamport.cuh"
#include "cuda/runtime/mma.cuh"
#include "cuda/runtime/pdl.cuh"
#include "format/gpu_blob.h"
#include "format/gpu_workspace.h"

namespace exl2nb {

// Rows to allocate for the inputs.
inline int stream_k_rows(int tokens) {
  return tokens == 1 ? 1 : (tokens + stream_k_group(tokens) - 1) / stream_k_group(tokens) * stream_k_group(tokens);
}
// Whether plan_stream_k supports the GEMM on this GPU.
bool stream_k_takes(const Device&, const GemmArgs& a);
// Partial sums of squares per row that a residual GEMM with `width` outputs leaves.
inline int stream_k_squares(int width) { return (width + 255) / 256 * 16; }
// Whether it can add to the residual.
inline bool stream_k_fuses_residual(const GemmArgs& a) { return a.num_parts == 1; }
// Whether gate and up run in one launch that writes the next input (no out, no residual).
bool stream_k_fuses_gate(const GemmArgs& a);
// Keys and values to prefetch into L2 for the attention that follows: the first `rows` tokens of each sequence, contiguous in a page of a
// head. rows 0: none.
struct StreamKKeys {
  const uint8_t *k_pool, *v_pool;
  const int *block_table, *context_lens;
  int sequences, max_pages, heads, rows;
  int k_page, v_page, k_row, v_row;  // bytes of a page of a head, of a token of it
};
// What to prefetch into L2 during the GEMM: the next GEMM's image, attention's keys.
struct StreamKNext {
  const uint8_t* image;
  int bytes;
  StreamKKeys keys;
};
// Workspace bytes for up to so many rows: zeroed once; one for all GEMMs of a stream.
size_t stream_k_workspace(const Device&, int tokens);
// out = x W + bias; without out: residual += that, as in GemmArgs. x is in groups of `group`. CTAs wait for one another: launches in
// different streams of a device must not overlap. lora: adapters of the rows, of which there are then at most kStreamKTokens.
void plan_stream_k(LaunchList&, const GemmArgs& a, int group, const StreamKNext& next, void* workspace, const StreamKLora* lora = nullptr);

constexpr int kStreamKWarps = kStreamKStrips;
constexpr int kStreamKConsumerThreads = kStreamKWarps * 32, kStreamKThreads = kStreamKConsumerThreads + 128,
              kStreamKColumns = kStreamKStrips * kStripColumns;
constexpr int kStreamKWeights = kStreamKStrips * kMaxItemBytes;  // bytes of a stage
constexpr int kStreamKProducers = 4;                             // producer warps
constexpr int kStreamKWeightProducers = kStreamKProducers - 1;   // of these, for weights
constexpr int kStreamKBarriers = 8;                              // at least the number of stages + 1
constexpr int kStreamKMmaTokens = 16;                            // rows up to which mma.sync beats wgmma
constexpr int kStreamKMaxSharers = 40;                           // about the most CTAs that share a tile
constexpr int kStreamKMaxCtas = 192;                             // CTAs
EXL2NB_BOTH constexpr int stream_k_stages(int NB) { return NB == 2 ? 4 : 3; }
EXL2NB_BOTH constexpr int stream_k_unit(int NB) { return kUnitRows * NB * 8 * 2; }  // bytes of a unit's activations, 8 * NB rows
EXL2NB_BOTH constexpr int stream_k_ring(int NB) { return NB == 8 ? 12 : 24; }       // units in the activation ring
static_assert(kItemUnits < 16 && kItemUnits <= stream_k_ring(8), "the ring holds an item");
EXL2NB_BOTH constexpr int stream_k_sums(int NB) { return kStreamKColumns * NB * 8; }  // floats of a tile

constexpr int kTileSharersBytes = 48;  // sizeof(TileSharers)

struct StreamKPart {
  const uint8_t* data;
  int strips, first_column, outputs, perm, tiles, units;
  int64_t strip_bytes;
};
struct StreamKArgs {
  StreamKPart part[kMaxParts];
  const uint8_t* image;
  int num_parts, items, units, tiles, tokens;  // tiles of the whole GEMM
  float density;                               // CTAs per unit of the line, about
  int begin[kStreamKMaxCtas + 1];              // CTA i has units begin[i] to begin[i + 1] - 1 of the line
  float* partial;                              // [CTA][began in its share][part]: partial sums
  const half* x;                               // groups of 8 * NB rows (fragment.cuh)
  int x_stride, x_perm_stride;
  const float* bias;
  float* out;  // [row][column]; null: residual or paired
  int64_t out_stride;
  // As in GemmArgs: norm factors of the rows; residual, next input and its partial squares per 16 columns.
  const float* squares;
  int squares_count;
  float inverse_width, eps;
  float* residual;
  int residual_stride;
  float scale;
  MatrixInput next;
  const float* next_norm;
  float* next_squares;
  // Gate and up in one tile: act(part 0) * part 1 goes to the next input.
  bool paired;
  int activation;
  const uint8_t* next_image;  // the next GEMM's image to prefetch, null: none
  int next_image_bytes;
  StreamKKeys keys;  // keys and values to prefetch for attention
};
EXL2NB_BOTH inline int stream_k_image(const StreamKArgs& a) { return (image_bytes(a.items, a.units, a.num_parts) + 15) / 16 * 16; }
// Bytes of weight stages and activation ring.
EXL2NB_BOTH constexpr int stream_k_pool(int NB) { return stream_k_stages(NB) * kStreamKWeights + stream_k_ring(NB) * stream_k_unit(NB); }
// Offset of the image: behind barriers, TileSharers and factors.
EXL2NB_BOTH constexpr int stream_k_image_at(int NB) {
  return stream_k_pool(NB) + 2 * kStreamKBarriers * 8 + kTileSharersBytes + kStreamKTokens * 4;
}
EXL2NB_BOTH inline int stream_k_shared(const StreamKArgs& a, int NB) { return stream_k_image_at(NB) + stream_k_image(a); }

#if __CUDA_ARCH__ >= 900
// Images, which every CTA reads first, are evict-last in L2; weights are evict-first.
__device__ __forceinline__ uint4 load_kept(const void* from) {
  uint64_t policy;
  uint4 v;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));
  asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0,%1,%2,%3},[%4],%5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "l"(policy));
  return v;
}
__device__ __forceinline__ void prefetch(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(from), "r"(bytes) : "memory");
}
// Barrier of the consumer warps.
__device__ __forceinline__ void consumer_barrier() { asm volatile("bar.sync 1,%0;" ::"n"(kStreamKConsumerThreads) : "memory"); }
// The activation producer waits until the consumers have issued their loads of the squares.
__device__ __forceinline__ void squares_requested() { asm volatile("bar.arrive 2,%0;" ::"n"(kStreamKConsumerThreads + 32) : "memory"); }
__device__ __forceinline__ void wait_for_squares() { asm volatile("bar.sync 2,%0;" ::"n"(kStreamKConsumerThreads + 32) : "memory"); }
__device__ __forceinline__ float4 load_four(const float* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}

// setmaxnreg: 96 registers per thread on average; producers release, consumers acquire. sm_90a only.
__device__ __forceinline__ void release_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
#endif
}
__device__ __forceinline__ void acquire_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
#endif
}

// Work split: which tile and items a CTA has. divide_small: n / d for 0 <= n < 2^20, 0 < d, in few instructions (code that runs once).
__device__ __forceinline__ int divide_small(int n, int d) {
  return __float2int_rz(__fdividef(static_cast<float>(n) + 0.5f, static_cast<float>(d)));
}
__device__ __forceinline__ int cta_of_unit(const StreamKArgs& A, int unit) {
  int cta = __float2int_rz(static_cast<float>(unit) * A.density);  // first guess
  while (A.begin[cta] > unit) cta--;
  while (A.begin[cta + 1] <= unit) cta++;
  return cta;
}

// The tile of a part (of both parts where paired) that contains unit `at` of the line.
struct StreamKTile {
  int part, first_strip, live, begin, units;  // begin: in the line
  __device__ __forceinline__ StreamKTile(const StreamKArgs& A, int at) {
    part = 0, begin = 0, units = A.part[0].units + (A.paired ? A.part[1].units : 0);
    while (!A.paired && part + 1 < A.num_parts && at - begin >= A.part[part].tiles * units)
      begin += A.part[part].tiles * units, units = A.part[++part].units;
    const int tile = divide_small(at - begin, units);
    begin += tile * units, first_strip = tile * kStreamKStrips, live = min(kStreamKStrips, A.part[part].strips - first_strip);
  }
  __device__ __forceinline__ int end() const { return begin + units; }
  // Range of part p's units in the line; p = 0, or 1 where paired.
  __device__ __forceinline__ int part_begin(const StreamKArgs& A, int p) const { return begin + (p ? A.part[0].units : 0); }
  __device__ __forceinline__ int part_end(const StreamKArgs& A, int p) const { return A.paired && !p ? begin + A.part[0].units : end(); }
};
// Calls f(tile, from, to) for every tile of this CTA's share; it has units [from, to) of it.
template <class F>
__device__ __forceinline__ void each_tile(const StreamKArgs& A, F f) {
  const int end = A.begin[blockIdx.x + 1];
#pragma unroll 1
  for (int at = A.begin[blockIdx.x]; at < end;) {
    const StreamKTile tile(A, at);
    const int stop = min(end, tile.end());
    f(tile, at, stop);
    at = stop;
  }
}

// Iterator over the items of units [from, to) of one part of a tile.
struct StreamKItems {
  int item, from, to;  // units from .. to - 1, as unit0 counts
  // Called by whole warps.
  __device__ __forceinline__ StreamKItems(const StreamKArgs& A, const Item* items, const uint16_t* ends, const StreamKTile& tile, int p,
                                          int begin, int stop) {
    const uint16_t* const own = ends + (tile.part + p) * kEnds;
    const int end = own[kWarps];
    item = own[0];
    const int first = items[item].unit0 - tile.part_begin(A, p);
    from = first + max(begin, tile.part_begin(A, p)), to = first + min(stop, tile.part_end(A, p));
    int before = -1;  // items that begin at or before `from`, minus one
    for (int i = item + (threadIdx.x & 31); __any_sync(~0u, i < end); i += 32)
      before += __popc(__ballot_sync(~0u, i < end && items[i].unit0 <= from));
    item += before;
  }
  __device__ __forceinline__ bool more() const { return from < to; }
  // The next item; its units [begin, end) belong to this share.
  __device__ __forceinline__ Item take(const Item* items, int& begin, int& end) {
    const Item it = items[item++];
    begin = from - it.unit0, end = min(static_cast<int>(it.units), to - it.unit0);
    from = it.unit0 + end;
    return it;
  }
};

// Producer warps: items into weight stages, activations into a ring of units. Issuing a copy per lane takes a warp about 70 cycles, so
// three warps share the weights; the fourth loads only activations, as soon as the previous kernel has ended. StreamKCursor: position in
// stages and activation ring; producers and consumers each keep one.
template <int NB>
struct StreamKCursor {
  int stage = 0, slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int units) {
    slot += units;
    if (slot >= stream_k_ring(NB)) slot -= stream_k_ring(NB);
    if (++stage == stream_k_stages(NB)) stage = 0, phase ^= 1;
  }
};

// Items whose weights are loaded before griddepcontrol.wait; more would delay the first activations.
constexpr int kStreamKPrefetch = 2;

// Prefetches attention's first keys and values into L2: each lane a sixteenth of a head's keys or values.
__device__ __forceinline__ void prefetch_keys(const StreamKKeys& k, int lane) {
#pragma unroll 1
  for (int item = blockIdx.x; item < k.sequences * k.heads; item += gridDim.x) {
    const int sequence = item / k.heads, head = item % k.heads, rows = min(k.rows, __ldg(k.context_lens + sequence) - 1);
    if (rows <= 0) continue;
    const int64_t page = static_cast<int64_t>(__ldg(k.block_table + static_cast<int64_t>(sequence) * k.max_pages)) * k.heads + head;
    const uint8_t* const from = lane < 16 ? k.k_pool + page * k.k_page : k.v_pool + page * k.v_page;
    const int all = rows * (lane < 16 ? k.k_row : k.v_row) & ~15, each = (all / 16 + 15) & ~15, at = (lane & 15) * each;
    if (at < all) prefetch(from + at, min(each, all - at));
  }
}

template <class Lora>
__device__ __forceinline__ int extra_items(const Lora& lora) {
  if constexpr (Lora::kInside) return min(2, (lora.to - lora.from + 3) / 4);
  return 0;
}
// Producer 0 loads activations, 1 to 3 load strips of every item.
template <int NB, class Lora>
struct StreamKProducer {
  const StreamKArgs& A;
  const Lora& lora;
  const Item* items;
  const uint16_t* ends;
  uint8_t *weights, *tokens;
  uint64_t *full, *empty;
  int producer, lane;  // producer: index of the producer warp

  // Calls f(part, tile, item, begin, end, position) for every item of every tile. from_here: where the items of adapters end.
  template <class F>
  __device__ __forceinline__ void each(const StreamKCursor<NB>& from_here, F f) const {
    StreamKCursor<NB> at;
    if constexpr (Lora::kInside) at = from_here;
    each_tile(A, [&](const StreamKTile& tile, int from, int to) {
#pragma unroll 1
      for (int p = 0; p <= (A.paired ? 1 : 0); p++) {
        StreamKItems share(A, items, ends, tile, p, from, to);
#pragma unroll 1
        while (share.more()) {
          int begin, end;
          const Item it = share.take(items, begin, end);
          f(A.part[tile.part + p], tile, it, begin, end, at);
          at.next(end - begin);
        }
      }
    });
  }
  __device__ __forceinline__ void fetch_weights(const StreamKPart& p, const StreamKTile& tile, const Item& it, int begin, int end,
                                                const StreamKCursor<NB>& at) const {
    const bool complete = end - begin == it.units;
    const int unit = 128 * it.bits, rest = it.bytes - it.units * unit, strip = lane * kStreamKWeightProducers + producer - 1;
    if (strip >= tile.live) return;
    uint64_t* const bar = full + at.stage;
    const uint8_t* const from = p.data + (tile.first_strip + strip) * p.strip_bytes + it.offset;
    uint8_t* const to = weights + at.stage * kStreamKWeights + strip * kMaxItemBytes;
    bulk_copy(to + begin * unit, from + begin * unit, complete ? it.bytes : (end - begin) * unit, bar, evict_first_policy());
    if (!complete && rest) bulk_copy(to + it.units * unit, from + it.units * unit, rest, bar, evict_first_policy());
  }
  // Activations of an item; also expects all bytes of its stage.
  __device__ __forceinline__ void fetch_tokens(const StreamKPart& p, const StreamKTile& tile, const Item& it, int begin, int end,
                                               const StreamKCursor<NB>& at) const {
    if (lane) return;
    const int unit = 128 * it.bits, all = (end - begin) * stream_k_unit(NB);
    const auto* const x = reinterpret_cast<const uint8_t*>(A.x + static_cast<size_t>(p.perm) * A.x_perm_stride);
    const uint8_t* const from = x + static_cast<size_t>(it.block) * (32 * 2 * NB * 8) + begin * stream_k_unit(NB);
    uint64_t* const bar = full + at.stage;
    barrier_expect(bar, tile.live * (it.bytes - (it.units - (end - begin)) * unit) + all);
    const int first = min(all, (stream_k_ring(NB) - at.slot) * stream_k_unit(NB));
    bulk_copy(tokens + at.slot * stream_k_unit(NB), from, first, bar);
    if (first < all) bulk_copy(tokens, from + first, all - first, bar);
  }

  // With adapters: waits behind the last item until a stage is free, and returns its number.
  __device__ __forceinline__ int run() const {
    const int ahead = producer ? kStreamKPrefetch + extra_items(lora) : 0;  // items before griddepcontrol.wait
    int count = 0, live = 0, used = 0;                                      // items issued; items and units in flight
    uint32_t sizes = 0;                                                     // units of the items in flight, four bits each
    StreamKCursor<NB> back;
    const auto wait = [&] {
      pdl_wait();
      if (NB > 2 && A.squares && producer == 0) wait_for_squares();
      if (A.next_image && producer == 1 && lane == 0) prefetch(A.next_image, A.next_image_bytes);
      if constexpr (Lora::kInside)
        if (producer == 2) lora.clear();
    };
    StreamKCursor<NB> begun;
    if constexpr (Lora::kInside)
      lora.each([&](int block, int step, int n, bool) {
        if (count++ == ahead) wait();
        if (live == stream_k_stages(NB)) barrier_wait(empty + back.stage, back.phase), back.next(0), live--, used--;
        sizes = sizes << 4 | 1, used++, live++;
        uint64_t* const bar = full + begun.stage;
        if (producer)
          lora.fetch_a(block, step, n, weights + begun.stage * kStreamKWeights, bar, producer - 1, kStreamKWeightProducers);
        else
          lora.fetch_x(A.x, block, step, n, tokens + begun.slot * stream_k_unit(NB), bar);
        begun.next(1);
      });
    each(begun, [&](const StreamKPart& p, const StreamKTile& tile, const Item& it, int begin, int end, const StreamKCursor<NB>& at) {
      const int units = end - begin;
      if (count++ == ahead) wait();
      while (live == stream_k_stages(NB) || used + units > stream_k_ring(NB)) {
        barrier_wait(empty + back.stage, back.phase);
        used -= sizes >> (4 * (live - 1)) & 15, live--;
        back.next(0);
      }
      sizes = sizes << 4 | units, used += units, live++;
      if (producer)
        fetch_weights(p, tile, it, begin, end, at);
      else
        fetch_tokens(p, tile, it, begin, end, at);
    });
    if (count <= ahead) wait();
    if (producer == kStreamKWeightProducers && A.keys.rows) prefetch_keys(A.keys, lane);
    if constexpr (Lora::kInside) {
      if (live == stream_k_stages(NB)) barrier_wait(empty + back.stage, back.phase);
      return (back.stage + live) % stream_k_stages(NB);
    }
    return 0;
  }
};

// Epilogue. RowFactors: norm factors, up to four rows per warp. With many rows the squares are loaded before the first activations, behind
// which they would arrive late; their addresses are computed before griddepcontrol.wait.
template <int NB>
struct RowFactors {
  static constexpr int kEach = NB * 8 / kStreamKWarps;
  const StreamKArgs& A;
  const float* from[kEach];
  __device__ __forceinline__ RowFactors(const StreamKArgs& args, int warp, int lane) : A(args) {
#pragma unroll
    for (int k = 0; k < kEach; k++) {
      from[k] = A.squares + min(warp + k * kStreamKWarps, A.tokens - 1) * A.squares_count + lane * 4;
      asm volatile("" : "+l"(from[k]));
    }
  }
  __device__ __forceinline__ void load(float* factors, int warp, int lane) const {
    float sum[kEach] = {};
    if (A.squares)
#pragma unroll 1
      for (int base = 0; base < A.squares_count; base += 256) {
        const bool one = base + lane * 4 < A.squares_count, two = base + lane * 4 + 128 < A.squares_count;
        float4 v[kEach][2];
#pragma unroll
        for (int k = 0; k < kEach; k++)
          v[k][0] = one ? load_four(from[k] + base) : float4{0.f, 0.f, 0.f, 0.f},
          v[k][1] = two ? load_four(from[k] + base + 128) : float4{0.f, 0.f, 0.f, 0.f};
        if (NB > 2 && base + 256 >= A.squares_count) squares_requested();
#pragma unroll
        for (int k = 0; k < kEach; k++)
          sum[k] += ((v[k][0].x + v[k][0].y) + (v[k][0].z + v[k][0].w)) + ((v[k][1].x + v[k][1].y) + (v[k][1].z + v[k][1].w));
      }
#pragma unroll
    for (int k = 0; k < kEach; k++) {
      const float factor = A.squares ? rsqrtf(warp_sum(sum[k]) * A.inverse_width + A.eps) : 1.f;
      if (lane == 0) factors[warp + k * kStreamKWarps] = factor;
    }
  }
};
// Sums that a warp keeps itself, in the used-up stages of its strip.
struct KeptSums {
  uint8_t* slot;  // of the first stage
  __device__ __forceinline__ float4* place(int k, int lane) const {
    constexpr int kEach = kMaxItemBytes / 512;
    return reinterpret_cast<float4*>(slot + k / kEach * kStreamKWeights + k % kEach * 512) + lane;
  }
  __device__ __forceinline__ void put(int k, int lane, const float (&y)[4]) const {
    asm volatile("st.shared.v4.f32 [%0],{%1,%2,%3,%4};" ::"r"(shared_address(place(k, lane))), "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3])
                 : "memory");
  }
};

// Partial sums in global memory are zero before and after use (Lamport flags): the first of four floats stored together is +0 while
// unwritten, -0 for zero. The reader resets them.
__device__ __forceinline__ float not_zero(float v) {  // in C++ the compiler serialises the wgmmas
  float w;
  asm volatile("{\n.reg .pred p;\nsetp.eq.f32 p,%1,0f00000000;\nselp.f32 %0,0f80000000,%1,p;\n}" : "=f"(w) : "f"(v));
  return w;
}
// Stores the sums of all rows, four floats per lane: [strip][8 rows][lane]. Every `writers`-th group of 8 rows from `rank` on stays in
// shared memory instead; writers 0: none.
template <int NB>
__device__ __forceinline__ void store_partials(float* sums, int tokens, int warp, int lane, const float (&y)[NB][4], const KeptSums& kept,
                                               int writers, int rank) {
  int next = writers ? rank : NB, k = 0;
#pragma unroll
  for (int n = 0; n < NB; n++)
    if (n * 8 < tokens) {
      if (NB == 8 && n == next)
        kept.put(k++, lane, y[n]), next += writers;
      else
        st_relaxed(sums + ((warp * NB + n) * 32 + lane) * 4, float4{not_zero(y[n][0]), y[n][1], y[n][2], y[n][3]});
    }
}
// A lane's part of a strip and 8 rows: v[k] is column lane / 4 + 8 * (k / 2), row 2 * (lane % 4) + k % 2. The epilogue runs once and stalls
// on instruction fetch, so it loops over strips instead of unrolling.
struct Quad {
  float v[4];
  __device__ __forceinline__ void add(float4 part) { v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w; }
};
// Per-column constants of a lane: stored row in the first copy of the next input, norm weight.
struct QuadColumns {
  int rows[2];
  float norm[2];
  __device__ __forceinline__ void load(const StreamKArgs& A, int column) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int c = min(column + i * 8, A.part[0].outputs - 1);
      rows[i] = A.next.inverse[0] ? __ldg(A.next.inverse[0] + c) : c;
      norm[i] = A.next_norm ? __ldg(A.next_norm + c) : 1.f;
    }
  }
};
// Stores two rows of the lane's columns into the next input.
__device__ __forceinline__ void put_quad(const StreamKArgs& A, int token, int column, const Quad& q, const QuadColumns& to) {
  const MatrixInput& in = A.next;
  half* const x = in.x + token_place(in.group, in.stride, token);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int c = column + i * 8;
    if (c >= A.part[0].outputs) continue;
    const half2 v = __halves2half2(saturated(q.v[i * 2]), saturated(q.v[i * 2 + 1]));
    *reinterpret_cast<half2*>(x + row_place(in.group, to.rows[i])) = v;
#pragma unroll 1
    for (int p = 1; p < in.num_perms; p++)
      *reinterpret_cast<half2*>(x + static_cast<size_t>(p) * in.perm_stride +
                                row_place(in.group, in.inverse[p] ? __ldg(in.inverse[p] + c) : c)) = v;
  }
}
__device__ __forceinline__ void old_residual(const StreamKArgs& A, int token, int column, Quad& old) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int t = token + (k & 1), c = column + (k >> 1) * 8;
    old.v[k] = t < A.tokens && c < A.part[0].outputs ? __ldcg(A.residual + static_cast<size_t>(t) * A.residual_stride + c) : 0.f;
  }
}
// Adds the sums to the residual and stores the next input.
__device__ __forceinline__ void add_quad(const StreamKArgs& A, int token, int column, const float* factors, Quad& q, const Quad& old,
                                         const QuadColumns& to, float (&squares)[2]) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int t = token + (k & 1), c = column + (k >> 1) * 8;
    float v = 0.f;
    if (c < A.part[0].outputs) {
      v = old.v[k] + A.scale * fmaf(q.v[k], factors[t], A.bias ? __ldg(A.bias + c) : 0.f);
      if (t < A.tokens) A.residual[static_cast<size_t>(t) * A.residual_stride + c] = v;
      q.v[k] = v * to.norm[k >> 1];
    }
    squares[k & 1] = fmaf(v, v, squares[k & 1]);
  }
  put_quad(A, token, column, q, to);
}
// Sums of squares of a strip.
__device__ __forceinline__ void put_squares(const StreamKArgs& A, int token, int strip, float (&squares)[2], int lane) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) squares[k] += __shfl_xor_sync(~0u, squares[k], d);
    if (lane < 4 && token + k < A.tokens) A.next_squares[static_cast<size_t>(token + k) * A.tiles * kStreamKStrips + strip] = squares[k];
  }
}

__device__ __forceinline__ void store_one(const StreamKArgs& A, int part, const float* factors, int token, int column, float v) {
  const StreamKPart& P = A.part[part];
  const int at = P.first_column + column;
  if (token < A.tokens && column < P.outputs) A.out[token * A.out_stride + at] = v * factors[token] + (A.bias ? __ldg(A.bias + at) : 0.f);
}
// A tile of one CTA: registers to output.
template <int NB>
__device__ __forceinline__ void store_tile(const StreamKArgs& A, const StreamKTile& tile, const float* factors, int warp, int lane,
                                           const float (&y)[NB][4]) {
#pragma unroll
  for (int n = 0; n < NB; n++)
#pragma unroll
    for (int k = 0; k < 4; k++)
      store_one(A, tile.part, factors, n * 8 + 2 * (lane & 3) + (k & 1),
                (tile.first_strip + warp) * kStripColumns + (lane >> 2) + (k >> 1) * 8, y[n][k]);
}

// The CTAs that share a tile, and this CTA's slice of the epilogue.
struct alignas(16) TileSharers {
  int part, first_strip;  // the tile
  int first, count0;      // first CTA; number of CTAs with sums of part 0
  int from1, count1;      // the same for part 1, only where paired
  int writers, rank;      // slices and this CTA's slice; writers 0: none
  int own;                // the part whose sums this CTA computes last
  __device__ __forceinline__ TileSharers(const StreamKArgs& A, const StreamKTile& tile) {
    part = tile.part, first_strip = tile.first_strip;
    first = from1 = cta_of_unit(A, tile.begin), count0 = cta_of_unit(A, tile.end() - 1) - first + 1, count1 = 0;
    writers = count0 - (A.begin[first + count0] > tile.end()), rank = static_cast<int>(blockIdx.x) - first;
    if (rank >= writers || count0 == 1) writers = 0;
    own = 0;
    if (A.paired) {
      const int middle = tile.part_end(A, 0), last = first + count0;
      count0 = cta_of_unit(A, middle - 1) - first + 1, from1 = cta_of_unit(A, middle), count1 = last - from1;
      own = A.begin[blockIdx.x + 1] > middle;
    }
  }
};

static_assert(sizeof(TileSharers) == kTileSharersBytes, "shared memory layout");

// What adapters add to this CTA's slice of its last tile (StreamKEpilogue::write), by all warps, as soon as they have nothing else to do:
// an item is a strip and 8 rows of a part. room: the stage behind the last one used, with the rounded sums.
template <class Lora>
__device__ __forceinline__ void multiply_items(const StreamKArgs& A, const Lora& lora, const TileSharers& own, uint8_t* room) {
  const int all = (A.tokens + 7) / 8 * kStreamKStrips;
  barrier_wait(lora.rounded_all(), 0);
#pragma unroll 1
  for (;;) {
    const int item = lora.take(), i = (A.paired ? item >> 1 : item) * own.writers + own.rank, p = A.paired ? item & 1 : 0;
    if (i >= all) break;
    *lora.item(room, item) = lora.template multiply_b<true>(i / kStreamKStrips * 8,
                                                            lora.L.first_strip[own.part + p] + own.first_strip + i % kStreamKStrips, room);
  }
  __syncwarp();
  warp_arrive(lora.ready(), threadIdx.x & 31);
}

// Epilogue of all consumer warps. CTAs whose share ends in a tile write a slice of it each as the partial sums arrive, so a CTA waits for
// one tile only, at its end. TileSharers of that tile is computed at the start by a producer warp: code at the end stalls on instruction
// fetch.
template <int NB, class Lora>
struct StreamKEpilogue {
  const StreamKArgs& A;
  const Lora& lora;
  const float* factors;
  const TileSharers* last;  // this CTA's last tile
  uint64_t* ready;          // arrives when factors and last are ready
  KeptSums kept;
  int warp, lane;

  // Partial sums of a CTA; began: for the tile that begins in its share.
  __device__ __forceinline__ float* place(int cta, bool began, int p) const {
    return A.partial + static_cast<size_t>((cta * 2 + began) * (A.paired ? 2 : 1) + p) * stream_k_sums(NB);
  }
  __device__ __forceinline__ bool direct(bool exclusive) const { return !Lora::kAny && exclusive && A.out && !A.paired; }

  // Stores this CTA's sums of part p of a tile; `to`: end of its units in the line.
  __device__ __forceinline__ void store_sums(const StreamKTile& tile, int p, int to, bool exclusive, const float (&y)[NB][4]) const {
    if (direct(exclusive)) {
      barrier_wait(ready, 0);
      store_tile<NB>(A, tile, factors, warp, lane, y);
    } else {
      int writers = 0, rank = 0;
      if (NB == 8 && !exclusive && to == A.begin[blockIdx.x + 1]) {
        barrier_wait(ready, 0);
        if (p == last->own) writers = last->writers, rank = last->rank;
      }
      store_partials<NB>(place(blockIdx.x, tile.begin >= A.begin[blockIdx.x], p), A.tokens, warp, lane, y, kept, writers, rank);
    }
  }
  // Finishes a tile of this CTA alone that needs an epilogue from memory.
  __device__ __forceinline__ void finish_tile(const StreamKTile& tile, bool exclusive) const {
    if (!exclusive || direct(exclusive)) return;
    TileSharers own(A, tile);
    own.writers = 1, own.own = -1;
    write<true>(own);
    consumer_barrier();  // before the sums are overwritten
  }
  // Writes this CTA's slice of its last tile.
  __device__ __forceinline__ void finish_last([[maybe_unused]] uint8_t* room) const {
    barrier_wait(ready, 0);
    if constexpr (Lora::kInside) {
      if (last->writers == 0) return;
      multiply_items(A, lora, *last, room);
      write<false>(*last, room);
    } else {
      const TileSharers s = *last;
      if (s.writers) write<false>(s);
    }
  }

 private:
  // A slice: one strip and 8 rows per warp and pass. With 64 rows a warp takes its own strip and reads its own sums from shared memory;
  // with fewer, strips are dealt to all warps.
  template <bool ALONE>
  __device__ __forceinline__ void write(const TileSharers& s, [[maybe_unused]] uint8_t* room = nullptr) const {
    const int all = (A.tokens + 7) / 8 * kStreamKStrips;
    const int from = NB == 8 ? s.rank * kStreamKStrips + warp : warp * s.writers + s.rank, step = kStreamKWarps * s.writers;
    barrier_wait(ready, 0);
    int k = 0;
#pragma unroll 1
    for (int i = from; i < all; i += step, k++) {
      const int strip = i % kStreamKStrips, n = i / kStreamKStrips, token = n * 8 + 2 * (lane & 3);
      const int column = (s.first_strip + strip) * kStripColumns + (lane >> 2);
      float4 inside[2] = {};  // of adapters, first: it takes many registers
      if constexpr (Lora::kInside && ALONE)
#pragma unroll 1
        for (int p = 0; p <= (A.paired ? 1 : 0); p++) {
          inside[0] = inside[1];
          inside[1] = lora.template multiply_b<false>(n * 8, lora.L.first_strip[s.part + p] + s.first_strip + strip, nullptr);
        }
      Quad q = {}, first = {}, old = {};
      QuadColumns to;
      if (!A.out) {
        to.load(A, column);
        if (!A.paired) old_residual(A, token, column, old);
      }
      float4 more[2] = {};  // of adapters; while the sums are on their way
      if constexpr (Lora::kAny && !Lora::kInside)
#pragma unroll 1
        for (int p = 0; p <= (A.paired ? 1 : 0); p++) {
          more[0] = more[1];
          more[1] = lora.of(n * 8, A.tokens, A.part[s.part + p].first_column + column - (lane >> 2), lane);
        }
      sum(s, ((strip * NB + n) * 32 + lane) * 4, k, q, first);
      if constexpr (Lora::kInside && !ALONE) {
        barrier_wait(lora.ready(), 0);
        const int parts = A.paired ? 2 : 1, item = (k * kStreamKWarps + warp) * parts;
        if (A.paired) first.add(*lora.item(room, item));
        q.add(*lora.item(room, item + parts - 1));
      }
      if constexpr (Lora::kInside && ALONE) first.add(inside[0]), q.add(inside[1]);
      if constexpr (Lora::kAny && !Lora::kInside) first.add(more[0]), q.add(more[1]);
      if (A.paired) {
        gates(token, column, q, first);
        put_quad(A, token, column, q, to);
      } else if (A.out) {
#pragma unroll
        for (int k = 0; k < 4; k++) store_one(A, s.part, factors, token + (k & 1), column + (k >> 1) * 8, q.v[k]);
      } else {
        float squares[2] = {0.f, 0.f};
        add_quad(A, token, column, factors, q, old, to, squares);
        put_squares(A, token, s.first_strip + strip, squares, lane);
      }
    }
  }
  // Adds the partial sums in CTA order; where paired, q of part 1 and `first` of part 0.
  __device__ __forceinline__ void sum(const TileSharers& s, int at, int k, Quad& q, Quad& first) const {
    constexpr int kTogether = 5;
    const int parts = A.paired ? 2 : 1;
    const size_t stride = static_cast<size_t>(stream_k_sums(NB)) * 2 * parts;
#pragma unroll 1
    for (int p = 0; p < parts; p++) {
      const int from = p ? s.from1 : s.first, count = p ? s.count1 : s.count0;
      float* next = place(from, false, p) + at;
      const size_t ahead = from == s.first ? stream_k_sums(NB) * parts : 0;  // the tile begins in the first CTA's share
      first = q, q = {};
      const int own = NB == 8 && p == s.own ? static_cast<int>(blockIdx.x) - from : -1;  // kept in shared memory
#pragma unroll 1
      for (int base = 0; base < count; base += kTogether) {
        float4 part[kTogether];
#pragma unroll
        for (int r = 0; r < kTogether; r++)
          if (base + r < count) part[r] = base + r == own ? *kept.place(k, lane) : ld_relaxed4(next + r * stride + (base + r ? 0 : ahead));
#pragma unroll
        for (int r = 0; r < kTogether; r++)
          if (base + r < count) {
            float* const from = next + r * stride + (base + r ? 0 : ahead);
            if (base + r != own) {
              while (!is_written(part[r])) part[r] = ld_relaxed4(from);
              st_relaxed(from, float4{0.f, 0.f, 0.f, 0.f});  // a whole sector is faster than one float
            }
            q.add(part[r]);
          }
        next += kTogether * stride;
      }
    }
  }
  // q: sums of up, then the gated product; g: sums of gate.
  __device__ __forceinline__ void gates(int token, int column, Quad& q, const Quad& g) const {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int t = token + (k & 1), c = column + (k >> 1) * 8;
      if (c >= A.part[0].outputs) continue;
      const float bias = A.bias ? __ldg(A.bias + c) : 0.f, bias_up = A.bias ? __ldg(A.bias + A.part[1].first_column + c) : 0.f;
      q.v[k] = activation(fmaf(g.v[k], factors[t], bias), A.activation) * fmaf(q.v[k], factors[t], bias_up);
    }
  }
};

// mma.sync: products of half a unit (32 rows) of a strip with the activations in a ring slot. start() issues, wait<N>() returns when at
// most N are unfinished.
template <int NB>
struct MmaProduct {
  uint32_t x;  // shared address for ldmatrix: this lane's 8 halves of the first 16 rows
  __device__ __forceinline__ explicit MmaProduct(const void* ring, int lane = threadIdx.x & 31)
      : x(shared_address(ring) + ((lane >> 3 & 1) * NB * 8 + (lane >> 4) * 8 + (lane & 7)) * 16) {}
  __device__ __forceinline__ void start(const uint32_t (&h)[8], int slot, int half, float (&y)[NB][4]) const {
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int n = 0; n < NB; n += 2) {
        uint32_t b[4];
        load_matrices<true>(b, x + ((slot * 4 + half * 2 + k) * 2 * NB * 8 + n * 8) * 16);
        mma<kBulk, false>(y[n], h + 4 * k, b[0], b[1]);
        mma<kBulk, false>(y[n + 1], h + 4 * k, b[2], b[3]);
      }
  }
  template <int N>
  __device__ __forceinline__ void wait(float (&)[NB][4]) const {}
};

// Shared memory of a CTA: weight stages, activation ring, barriers, epilogue data, factors, image.
template <int NB>
struct StreamKSmem : BlobImage {
  uint8_t *weights, *tokens;
  uint64_t *full, *empty;
  TileSharers* last;
  float* factors;
  uint64_t* ready;  // factors and last are ready

  // Called by all threads: initialises the barriers and loads the image.
  __device__ __forceinline__ StreamKSmem(const StreamKArgs& A, uint8_t* shared)
      : BlobImage(shared + stream_k_image_at(NB), A.items, A.units) {
    weights = shared, tokens = shared + stream_k_stages(NB) * kStreamKWeights;
    full = reinterpret_cast<uint64_t*>(shared + stream_k_pool(NB)), empty = full + kStreamKBarriers;
    ready = full + kStreamKBarriers - 1, last = reinterpret_cast<TileSharers*>(empty + kStreamKBarriers);
    factors = reinterpret_cast<float*>(last + 1);
    if (threadIdx.x < stream_k_stages(NB)) {
      barrier_init(full + threadIdx.x, 1), barrier_init(empty + threadIdx.x, kStreamKWarps * kWarpArrivals);
      barrier_fence();
    }
    if (threadIdx.x == stream_k_stages(NB)) barrier_init(ready, (kStreamKWarps + 1) * kWarpArrivals), barrier_fence();
    for (int i = threadIdx.x; i < stream_k_image(A) / 16; i += kStreamKThreads)
      reinterpret_cast<uint4*>(shared + stream_k_image_at(NB))[i] = load_kept(A.image + i * 16);
    __syncthreads();
  }
};

// Consumer: a warp's items of its strip of a tile.
template <int NB, class Product>
struct StreamKConsumer {
  const StreamKSmem<NB>& s;
  const Product& product;
  StreamKItems share;
  StreamKCursor<NB>& at;
  const uint8_t* own;  // this warp's strip in stage 0
  int lane;
  Item it;
  int begin, end;
  bool live;

  __device__ __forceinline__ bool next() {
    live = share.more();
    if (live) it = share.take(s.items, begin, end);
    return live;
  }
  // Consecutive items of one kind: the next unit is loaded while the current one is multiplied.
  template <int B, bool GPTQ, Halves HALVES>
  __device__ __forceinline__ void multiply(float (&y)[NB][4]) {
    EncodedUnit<B, GPTQ> coded;
#pragma unroll 1
    do {
      const uint8_t *words = own + at.stage * kStreamKWeights, *const behind = words + it.units * (128 * B);
      words += begin * (128 * B);
      const half2* steps = s.steps + it.unit0 + begin;
      int slot = at.slot;
      half2 unit = *steps;
      barrier_wait(s.full + at.stage, at.phase);
      coded.template load<HALVES>(words, behind, it, begin, lane);
#pragma unroll 1
      for (int i = begin; i < end;) {
        uint32_t first[8], second[8];  // decode one half while the MMAs of the other run
        coded.template decode_half<HALVES, 0>(unit, first);
        product.start(first, slot, 0, y);
        coded.template decode_half<HALVES, 1>(unit, second);
        product.start(second, slot, 1, y);
        if (++i < end) {
          unit = *++steps, words += 128 * B;
          coded.template load<HALVES>(words, behind, it, i, lane);
        }
        if (++slot == stream_k_ring(NB)) slot = 0;
        product.template wait<0>(y);
      }
      __syncwarp();
      warp_arrive(s.empty + at.stage, lane);
      at.next(end - begin);
    } while (next() && it.bits == B && (it.scales != 0) == GPTQ && (HALVES == kAnyHalves || it.one == (HALVES == kOneGroup)));
  }
  template <Halves HALVES>
  __device__ __forceinline__ void multiply_exl2(float (&y)[NB][4]) {
    dispatch_bits<2, 3, 4, 5, 6, 8>(it.bits, [&](auto b) { multiply<decltype(b)::value, false, HALVES>(y); });
  }
  __device__ __forceinline__ void run(float (&y)[NB][4]) {
    next();
    while (live) {
      if (it.scales)
        dispatch_bits<2, 3, 4, 8>(it.bits, [&](auto b) { multiply<decltype(b)::value, true, kAnyHalves>(y); });
      else if (it.bits == 16)
        multiply<16, false, kAnyHalves>(y);
      else if (it.one)
        multiply_exl2<kOneGroup>(y);
      else
        multiply_exl2<kTwoGroups>(y);
    }
  }
};

// The kernel. Product: MmaProduct (per warp) or WgmmaProduct (per warpgroup).
template <int NB, class Product, class Lora>
__device__ __forceinline__ void run_stream_k(const StreamKArgs& A, Lora lora, uint8_t* shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  pdl_launch_dependents();
  const StreamKSmem<NB> s(A, shared);
  if constexpr (Lora::kInside) lora.begin();
  if (warp >= kStreamKWarps) {
    release_registers();
    if (warp == kStreamKWarps + kStreamKWeightProducers) {
      const TileSharers last(A, StreamKTile(A, A.begin[blockIdx.x + 1] - 1));
      if (lane == 0) *s.last = last;
      warp_arrive(s.ready, lane);
    }
    const int producer = warp - kStreamKWarps;
    const StreamKProducer<NB, Lora> run{A, lora, s.items, s.ends, s.weights, s.tokens, s.full, s.empty, producer, lane};
    if constexpr (!Lora::kInside) {
      run.run();
    } else {
      const TileSharers& own = *s.last;
      const int stage = run.run();
      barrier_wait(s.ready, 0);
      if (own.writers == 0) return;
      uint8_t* const room = s.weights + stage * kStreamKWeights;
      lora.round_sums(room, producer, kStreamKProducers);
      __syncwarp();
      warp_arrive(lora.rounded_all(), lane);
      multiply_items(A, lora, own, room);
    }
    return;
  }
  acquire_registers();
  const RowFactors<NB> factors(A, warp, lane);
  if constexpr (Lora::kInside) lora.keep(warp);
  pdl_wait();
  factors.load(s.factors, warp, lane);
  __syncwarp();
  warp_arrive(s.ready, lane);
  const Product product(s.tokens);
  const StreamKEpilogue<NB, Lora> epilogue{A, lora, s.factors, s.last, s.ready, {s.weights + warp * kMaxItemBytes}, warp, lane};
  StreamKCursor<NB> at;
  if constexpr (Lora::kInside) lora.template multiply_a<NB>(s, product.x, kStreamKWeights, at, warp);
  each_tile(A, [&](const StreamKTile& tile, int from, int to) {
    const bool exclusive = to - from == tile.units;
#pragma unroll 1
    for (int p = 0; p <= (A.paired ? 1 : 0); p++) {
      float y[NB][4] = {};
      StreamKConsumer<NB, Product> run{
          s, product, StreamKItems(A, s.items, s.ends, tile, p, from, to), at, s.weights + warp * kMaxItemBytes, lane, {}, 0, 0, false};
      if (run.share.more()) {
        run.run(y);
        epilogue.store_sums(tile, p, to, exclusive, y);
      }
    }
    epilogue.finish_tile(tile, exclusive);
  });
  epilogue.finish_last(s.weights + at.stage * kStreamKWeights);
}

#endif  // __CUDA_ARCH__ >= 900

#ifdef __CUDACC__
template <int NB>
__global__ void __launch_bounds__(kStreamKThreads, 1) stream_k_gemm(const __grid_constant__ StreamKArgs A) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  run_stream_k<NB, MmaProduct<NB>>(A, NoQuads{}, shared);
#endif
}
template <int NB>
__global__ void __launch_bounds__(kStreamKThreads, 1)
    stream_k_lora(const __grid_constant__ StreamKArgs A, const __grid_constant__ StreamKLora L) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  if constexpr (NB == 2)
    run_stream_k<NB, MmaProduct<NB>>(A, LoraStrips(L, A.tokens, shared + stream_k_shared(A, NB)), shared);
  else
    run_stream_k<NB, MmaProduct<NB>>(A, LoraQuads{L}, shared);
#endif
}

#endif  // __CUDACC__

}  // namespace exl2nb
