// Adapters inside a stream-K GEMM of up to 16 rows, without a launch of their own: y += (scale * (x a)) b, by tensor cores.
//
// a: a consumer warp takes a row of the step, the first of several with one adapter. Its blocks of 16 ranks are strips of fp16 weights for
// the producers and the activation ring, in front of the matrix's own: every CTA multiplies some steps of 16 stored rows and adds its sums
// to whole numbers that count the additions (LoraSum), in two sets: launches take them by turns and clear the other one.
// b: m = columns, n = 8 rows of the step. Row r multiplies its own b by the sums of r and zeros for the others, so all share accumulators.
// When the producers have issued everything, they round the sums to fp16 and begin with the strips of the CTA's slice of its last tile; the
// consumers help as soon as they have stored their partial sums. The results are in a stage that is free, and the epilogue adds them to the
// tile's sums. Tiles of a CTA alone do without the stage. Bytes: a and b once per adapter. What a CTA adds to a sum is at most 32768
// (LoraSum): beyond that, and for NaN, the sum is wrong, as in chains.
// Trap: what runs once stalls on instruction fetch, and spilled registers cost more than that: few instructions, everything the epilogue
// needs in shared memory.
#pragma once
#include "cuda/gemm/lora.h"
#include "cuda/gemm/persistent/lora_chain.cuh"
#include "cuda/runtime/lamport.cuh"
#include "cuda/runtime/mma.cuh"
#include "cuda/runtime/pdl.cuh"

namespace exl2nb {

constexpr int kLoraBlocks = 16, kLoraStripRows = 16;  // most blocks of a row; rows of the step
// What the epilogue needs of a row's block, in shared memory: [row][kLoraBlocks].
struct LoraStrip {
  const uint16_t* b;  // of its first strip
  uint16_t first, strips;
  unsigned additions;  // to its sums
#ifdef __CUDACC__
  __device__ __forceinline__ bool has(int strip) const { return strip >= first && strip < first + strips; }
  __device__ __forceinline__ const uint16_t* b_of(int strip) const { return b + (strip - first) * 256; }
#endif
};
constexpr int kLoraStripTable = kLoraStripRows * kLoraBlocks * static_cast<int>(sizeof(LoraStrip));
constexpr int kLoraStripBytes = kLoraStripTable + 32;  // and two barriers and two numbers

#if __CUDA_ARCH__ >= 900
// Eight bytes of the table, from a field on.
__device__ __forceinline__ unsigned long long load_word(const void* p) { return __ldg(static_cast<const unsigned long long*>(p)); }

struct LoraStrips {
  static constexpr bool kAny = true, kInside = true;
  static constexpr int kSteps = 4, kStep = 512;  // steps of a stage; bytes of a step of 16 rows
  const StreamKLora& L;
  uint8_t* shared;
  __device__ __forceinline__ LoraStrip* strips() const { return reinterpret_cast<LoraStrip*>(shared); }
  // Arrive when the sums are rounded; when what is added to this CTA's last tile is in a stage. And how many of its items are taken; the
  // blocks of the widest row: everything that the epilogue needs is here, as registers are few.
  __device__ __forceinline__ uint64_t* rounded_all() const { return reinterpret_cast<uint64_t*>(shared + kLoraStripTable); }
  __device__ __forceinline__ uint64_t* ready() const { return rounded_all() + 1; }
  __device__ __forceinline__ int* taken() const { return reinterpret_cast<int*>(rounded_all() + 2); }
  __device__ __forceinline__ int kept_most() const { return *reinterpret_cast<volatile int*>(taken() + 1); }
  // Lane r holds row r's: its blocks, their number, the rows with the same adapter.
  const LoraBlock* blocks;
  int count;
  unsigned alike;
  int most, from, to;           // blocks of the widest row; this CTA's steps, counted over all blocks
  int first_block, first_step;  // of `from`

  int adapter;     // lane r: of row r
  uint64_t a;      // lane r: of row r's first_block, in a change's first ones
  float scale[2];  // of ranks lane / 4 and lane / 4 + 8 of first_block, of a consumer warp's row

  // The first load, in front of the image's.
  __device__ __forceinline__ LoraStrips(const StreamKLora& lora, int tokens, uint8_t* memory) : L(lora), shared(memory), adapter(-1) {
    const int lane = threadIdx.x & 31;
    if (lane < tokens) asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(adapter) : "l"(L.of.adapters + lane));
    if (threadIdx.x == 0) {
      barrier_init(rounded_all(), 4 * kWarpArrivals), barrier_init(ready(), (16 + 4) * kWarpArrivals), barrier_fence();
      *taken() = 0;
    }
  }
  // The others. Called by all warps.
  __device__ __forceinline__ void begin() {
    const LoraChange* const change = L.of.changes + adapter * L.of.ops;
    blocks = nullptr, count = 0, a = 0;
    if (adapter >= 0) {
      count = static_cast<int>(load_word(&change->width)) / 16;
      blocks = reinterpret_cast<const LoraBlock*>(load_word(&change->blocks));
    }
    alike = __match_any_sync(~0u, adapter);
    most = static_cast<int>(__reduce_max_sync(~0u, static_cast<unsigned>(count)));
    const unsigned all = static_cast<unsigned>(most * L.steps);
    from = static_cast<int>(all * blockIdx.x / gridDim.x), to = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
    first_block = static_cast<int>(static_cast<unsigned>(from) / static_cast<unsigned>(L.steps)), first_step = from - first_block * L.steps;
    if (first_block < min(count, static_cast<int>(kFirstA))) a = load_word(&change->first_a[first_block]);
  }
  // Additions to the sums of a block: CTAs that have steps of it.
  __device__ __forceinline__ unsigned additions(int block) const {
    const unsigned all = static_cast<unsigned>(most * L.steps), first = static_cast<unsigned>(block * L.steps), end = first + L.steps;
    const unsigned ctas = (end * gridDim.x - 1) / all - ((first + 1) * gridDim.x - 1) / all + 1;
    return min(ctas, static_cast<unsigned>(L.steps));
  }
  // Rows whose strips of a block are loaded, one for each adapter. Called by whole warps.
  __device__ __forceinline__ unsigned loaded(int block) const {
    return __ballot_sync(~0u, block < count && (alike & ((1u << (threadIdx.x & 31)) - 1)) == 0);
  }
  // Calls f(block, first step, steps, whether they are the CTA's last of the block) for each stage.
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    int block = first_block, step = first_step;
#pragma unroll 1
    for (int left = to - from; left > 0;) {
      const int n = min(min(kSteps, left), L.steps - step);
      left -= n;
      f(block, step, n, left == 0 || step + n == L.steps);
      step += n;
      if (step == L.steps) step = 0, block++;
    }
  }

  // Of weight producer `producer` of `producers`: its rows' strips.
  __device__ __forceinline__ void fetch_a(int block, int step, int n, uint8_t* stage, uint64_t* bar, int producer, int producers) const {
    const int row = static_cast<int>(threadIdx.x & 31) * producers + producer;
    const unsigned rows = loaded(block);
    const auto* const own = reinterpret_cast<const LoraBlock*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(blocks), row & 15));
    uint64_t from = __shfl_sync(~0u, a, row & 15);
    if (row >= kLoraStripRows || !(rows >> row & 1)) return;
    if (block != first_block || block >= kFirstA) from = load_word(&own[block].a);
    bulk_copy(stage + row * kMaxItemBytes, reinterpret_cast<const uint8_t*>(from) + step * kStep, n * kStep, bar, evict_first_policy());
  }
  // Of the activation producer: the rows of x, and the bytes of the whole stage.
  __device__ __forceinline__ void fetch_x(const half* x, int block, int step, int n, uint8_t* slot, uint64_t* bar) const {
    const unsigned rows = loaded(block);
    if (threadIdx.x & 31) return;
    barrier_expect(bar, (__popc(rows) + 1) * n * kStep);
    bulk_copy(slot, reinterpret_cast<const uint8_t*>(x) + step * kStep, n * kStep, bar);
  }
  // Of a producer warp, behind griddepcontrol.wait: the other set becomes zero.
  __device__ __forceinline__ void clear() const {
    auto* const to = reinterpret_cast<uint4*>(L.clear);
#pragma unroll 1
    for (int i = static_cast<int>(blockIdx.x * 32 + (threadIdx.x & 31)); i < kLoraStripRows * L.width / 2;
         i += static_cast<int>(gridDim.x * 32))
      to[i] = uint4{0, 0, 0, 0};
  }

  // Of consumer warp `row`, before griddepcontrol.wait: what its products of x a and the epilogue need of the row.
  __device__ __forceinline__ void keep(int row) {
    const int lane = threadIdx.x & 31;
    blocks = reinterpret_cast<const LoraBlock*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(blocks), row));
    count = __shfl_sync(~0u, count, row), alike = __shfl_sync(~0u, alike, row);
    if (lane < kLoraBlocks) {
      LoraStrip kept{nullptr, 0, 0, 0};
      if (lane < count) {
        const unsigned long long b = load_word(&blocks[lane].b), range = load_word(&blocks[lane].first_strip);
        kept = {reinterpret_cast<const uint16_t*>(b), static_cast<uint16_t>(range), static_cast<uint16_t>(range >> 16), additions(lane)};
      }
      strips()[row * kLoraBlocks + lane] = kept;
    }
    if (row == 0 && lane == 0) taken()[1] = most;
    if (alike & ((1u << row) - 1)) count = 0;  // another warp multiplies
    load_scale(first_block);
  }
  // Of consumer warp `row`: its products of x a. x: shared address for ldmatrix, as in MmaProduct.
  template <int NB, class Smem, class Cursor>
  __device__ __forceinline__ void multiply_a(const Smem& s, uint32_t x, int stage_bytes, Cursor& at, int row) {
    const int lane = threadIdx.x & 31;
    float y[2][4] = {};
    each([&](int block, int step, int n, bool last) {
      barrier_wait(s.full + at.stage, at.phase);
      if (block < count) {
        const uint8_t* a = s.weights + at.stage * stage_bytes + row * kMaxItemBytes + lane * 16;
        uint32_t b_at = x + at.slot * (kSteps * kStep);
#pragma unroll 1
        for (int i = 0; i < n; i++, a += kStep, b_at += kStep) {
          uint32_t w[4], b[4];
          load_bytes<16>(a, w);
          load_matrices<true>(b, b_at);
          mma16816(y[0], w[0], w[1], w[2], w[3], b[0], b[1]);
          mma16816(y[1], w[0], w[1], w[2], w[3], b[2], b[3]);
        }
      }
      __syncwarp();
      warp_arrive(s.empty + at.stage, lane);
      at.next(1);
      if (last && block < count) {
        add(block, y);
        load_scale(block + 1);
#pragma unroll
        for (int i = 0; i < 8; i++) y[i >> 2][i & 3] = 0.f;
      }
    });
  }

  // b, by the four producer warps, in a stage that nothing else uses any more. It has the sums in fp16, [row][kLoraBlocks][16], their
  // scales, and what is added to the epilogue's items.
  static constexpr int kPairs = kLoraStripRows * kLoraBlocks;
  static __device__ __forceinline__ float* scales(uint8_t* stage) { return reinterpret_cast<float*>(stage + kPairs * 32); }
  static __device__ __forceinline__ float4* item(uint8_t* stage, int i) {
    return reinterpret_cast<float4*>(stage + kPairs * 36 + i * 512) + (threadIdx.x & 31);
  }
  __device__ __forceinline__ void round_sums(uint8_t* stage, int producer, int producers) const {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int i = producer; i < 2 * most; i += producers) {
      const int row = (i & 1) * 8 + (lane >> 2), block = i >> 1, pair = row * kLoraBlocks + block;
      uint32_t x[2];
      const float scale = rounded(row, block, strips()[pair].strips != 0, x);
      auto* const to = reinterpret_cast<uint32_t*>(stage + pair * 32) + (lane & 3);
      to[0] = x[0], to[4] = x[1];
      if ((lane & 3) == 0) scales(stage)[pair] = scale;
    }
  }
  // The next item for this warp.
  __device__ __forceinline__ int take() const {
    int i = 0;
    if ((threadIdx.x & 31) == 0) i = atomicAdd(taken(), 1);
    return __shfl_sync(~0u, i, 0);
  }
  // What is added, in the order of a Quad (stream_k_gemm.cuh), to a strip of 16 columns, counted over all parts, and 8 rows from `first`
  // on. Called by whole warps. stage: has the rounded sums; null: this warp rounds them.
  template <bool STAGED>
  __device__ __forceinline__ float4 multiply_b(int first, int strip, uint8_t* stage) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float y[4] = {};
#pragma unroll 1
    for (int k = 0, end = kept_most(); k < end; k++) {
      const int pair = (first + g) * kLoraBlocks + k;
      const LoraStrip own = strips()[pair];
      const bool any = own.has(strip);
      const unsigned votes = __ballot_sync(~0u, any);
      if (!votes) continue;
      auto at = reinterpret_cast<uint64_t>(own.b_of(strip));
      const uint64_t some = __shfl_sync(~0u, at, __ffs(votes) - 1);
      if (!any) at = some;  // times zeros
      const auto b_of_row = [&](int r) { return __ldg(reinterpret_cast<const uint4*>(__shfl_sync(~0u, at, 4 * r)) + lane); };
      uint32_t x[2];
      float scale[2], z[4] = {};
      if constexpr (STAGED) {
        uint4 b[8];
#pragma unroll
        for (int r = 0; r < 8; r++) b[r] = b_of_row(r);
        const auto* const from = reinterpret_cast<const uint32_t*>(stage + pair * 32) + t;
        x[0] = any ? from[0] : 0u, x[1] = any ? from[4] : 0u;
#pragma unroll
        for (int n = 0; n < 2; n++) scale[n] = scales(stage)[(first + 2 * t + n) * kLoraBlocks + k];
#pragma unroll
        for (int r = 0; r < 8; r++) mma16816(z, b[r].x, b[r].y, b[r].z, b[r].w, g == r ? x[0] : 0u, g == r ? x[1] : 0u);
      } else {  // few registers
        const float own_scale = rounded(first + g, k, any, x);
#pragma unroll
        for (int n = 0; n < 2; n++) scale[n] = __shfl_sync(~0u, own_scale, 8 * t + 4 * n);
#pragma unroll 1
        for (int r = 0; r < 8; r++) {
          const uint4 b = b_of_row(r);
          mma16816(z, b.x, b.y, b.z, b.w, g == r ? x[0] : 0u, g == r ? x[1] : 0u);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; n++) y[n] = fmaf(z[n], scale[n], y[n]), y[n + 2] = fmaf(z[n + 2], scale[n], y[n + 2]);
    }
    return {y[0], y[1], y[2], y[3]};
  }

 private:
  // The sums of a row's block in fp16, for lane 4 g + t ranks 2t, 2t + 1, 2t + 8 and 2t + 9, and their scale, a power of two: x is not
  // scaled, and halves end at 65504. any: there are such; else zeros.
  __device__ __forceinline__ float rounded(int row, int block, bool any, uint32_t (&x)[2]) const {
    const unsigned additions = strips()[row * kLoraBlocks + block].additions;
    const unsigned long long* const from = L.sums + row * L.width + block * 16 + 2 * (threadIdx.x & 3);
    unsigned long long sum[4];
    do load_sums(from, sum), load_sums(from + 8, sum + 2);
    while (any && !have(sum, additions));
    __syncwarp();
    float v[4], largest = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = any ? LoraSum::of(sum[i]) : 0.f, largest = fmaxf(largest, fabsf(v[i]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const uint32_t exponent = __float_as_uint(largest) & 0x7f800000;
    const float inverse = __uint_as_float(0x7f000000 - exponent);
    const half2 low = __floats2half2_rn(v[0] * inverse, v[1] * inverse), high = __floats2half2_rn(v[2] * inverse, v[3] * inverse);
    x[0] = reinterpret_cast<const uint32_t&>(low), x[1] = reinterpret_cast<const uint32_t&>(high);
    return __uint_as_float(exponent);
  }
  static __device__ __forceinline__ void load_sums(const unsigned long long* from, unsigned long long* to) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1},[%2];" : "=l"(to[0]), "=l"(to[1]) : "l"(from) : "memory");
  }
  static __device__ __forceinline__ bool have(const unsigned long long (&v)[4], unsigned count) {
    const auto differ = [&](int i) { return static_cast<unsigned>(v[i]) ^ count; };
    return ((differ(0) | differ(1) | differ(2) | differ(3)) & ((1 << LoraSum::kCount) - 1)) == 0;
  }
  // Of a consumer warp's row, ahead of time.
  __device__ __forceinline__ void load_scale(int block) {
    scale[0] = scale[1] = 0.f;
    if (block >= count) return;
    const int g = (threadIdx.x & 31) >> 2, ranks = static_cast<int>(load_word(&blocks[block].first_strip) >> 32);
    const auto* const from = reinterpret_cast<const float*>(load_word(&blocks[block].scale)) + g;
#pragma unroll
    for (int n = 0; n < 2; n++)
      if (g + 8 * n < ranks) asm volatile("ld.global.nc.f32 %0,[%1];" : "=f"(scale[n]) : "l"(from + 8 * n));
  }
  // Adds the scaled sums of the rows alike: lane 4 g + t has ranks g and g + 8 of rows 2 t, 2 t + 1 and 8 more.
  __device__ __forceinline__ void add(int block, const float (&y)[2][4]) const {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll 1
    for (unsigned rows = alike; rows; rows &= rows - 1) {
      const int row = __ffs(rows) - 1;
      const float v[2] = {row & 8 ? (row & 1 ? y[1][1] : y[1][0]) : (row & 1 ? y[0][1] : y[0][0]),
                          row & 8 ? (row & 1 ? y[1][3] : y[1][2]) : (row & 1 ? y[0][3] : y[0][2])};
      if (t != (row & 7) >> 1) continue;
      unsigned long long* const to = L.sums + row * L.width + block * 16 + g;
      LoraSum::add(to, v[0] * scale[0]), LoraSum::add(to + 8, v[1] * scale[1]);
    }
  }
};
#endif

}  // namespace exl2nb
