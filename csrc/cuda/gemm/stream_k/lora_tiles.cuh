// Adapters inside a stream-K GEMM: y += (x a scale) b, by tensor cores. A tile is 16 ranks of one row of the step (lora.h).
//
// x a: before they multiply, the consumer warps of every CTA take a few stored rows of one tile; a warp takes a row of the step. Rows of a
// are loaded before griddepcontrol.wait. m = ranks, n = 8 rows of the step, of which one counts. The sums of all CTAs are whole numbers
// that count the additions (LoraSum), in two sets: launches take them by turns, and clear the other one. b: in the epilogue a warp has 16
// columns and 8 rows of the step. m = columns, n = rows; row r multiplies its own b by the sums of r and zeros for the other rows, so all
// eight share the accumulators. The sums are there long before: nothing waits. While the weights stream, a producer warp brings b, and a of
// the next product, to the L2 cache, a piece per item. Bytes: a and b once per row of the step. Trap: what runs once stalls on instruction
// fetch, so this is short rather than general.
#pragma once
#include "cuda/gemm/lora.h"
#include "cuda/runtime/lamport.cuh"
#include "cuda/runtime/mma.cuh"
#include "cuda/runtime/pdl.cuh"

namespace exl2nb {

struct StreamKLora {
  const LoraTile* tiles;             // of this product: [row][stride]
  const int* count;                  // tiles of the widest row
  unsigned long long *sums, *clear;  // [row][stride][16]; the other set
  const int* features;               // of stored rows; null: the same
  int stride, inputs, steps;         // features; 16 stored rows each
  const LoraTile* next;              // of the next product, null for none
  const int* next_count;
  int flags;
  int64_t next_inputs;
};

#ifdef __CUDACC__
// What a kernel is made with: adapters, or none, which is no code.
struct NoLoraTiles {
  static constexpr bool kAny = false;
  struct Ahead {
    __device__ __forceinline__ void begin(const NoLoraTiles&, int, int, int) {}
    __device__ __forceinline__ void go_on(int) {}
  };
};

#if __CUDA_ARCH__ >= 900
// Two halves, or zeros. They stay ahead of griddepcontrol.wait.
__device__ __forceinline__ uint32_t load_static(const uint16_t* p, bool any) {
  uint32_t v;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p,%2,0;\nmov.u32 %0,0;\n@p ld.global.nc.u32 %0,[%1];\n}"
               : "=r"(v)
               : "l"(p), "r"(static_cast<uint32_t>(any)));
  return v;
}
__device__ __forceinline__ uint32_t load_input(const half* p, bool any) {
  uint32_t v;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p,%2,0;\nmov.u32 %0,0;\n@p ld.global.cg.u32 %0,[%1];\n}"
               : "=r"(v)
               : "l"(p), "r"(static_cast<uint32_t>(any))
               : "memory");
  return v;
}
// CTAs that share a tile, at least one, and steps of each.
struct LoraTeams {
  int count, each;
  __device__ __forceinline__ LoraTeams(int tiles, int steps)
      : count(max(1, static_cast<int>(gridDim.x) / tiles)), each((steps + count - 1) / count) {}
  __device__ __forceinline__ unsigned additions(int steps) const { return (steps + each - 1) / each; }
};

// A warp's part of x a. Stages of one pass: load_a, griddepcontrol.wait, load_x, finish, which also does further passes.
template <int NB>
struct LoraShrink {
  static constexpr int kSteps = 8, kGroup = 8 * NB, kWarps = 16;  // steps of a pass; rows of the step in an input's block
  const StreamKLora& L;
  const half* x;
  int tokens, warp, lane, tiles, teams, each;
  int at, row, step, end;  // share of this CTA: tile + tiles * team; row of the step; steps to come
  const LoraTile* of;      // null: nothing is left
  uint32_t a[kSteps][4], b[kSteps][2];
  float scale[2], sum[4];

  __device__ __forceinline__ LoraShrink(const StreamKLora& lora, const half* input, int rows, int own_warp, int own_lane)
      : L(lora), x(input), tokens(rows), warp(own_warp), lane(own_lane), tiles(lora.flags & 8 ? 0 : __ldg(lora.count)) {
    const LoraTeams all(max(tiles, 1), L.steps);
    teams = all.count, each = all.each;
    at = static_cast<int>(blockIdx.x), row = warp;
    seek();
  }
  // The next row with a tile, from `row` on.
  __device__ __forceinline__ void seek() {
    of = nullptr;
#pragma unroll 1
    for (; at < tiles * teams; at += static_cast<int>(gridDim.x), row = warp) {
      const int team = at / tiles, tile = at - team * tiles;
      step = team * each, end = min(step + each, L.steps);
#pragma unroll 1
      for (; step < end && row < tokens; row += kWarps) {
        of = L.tiles + row * L.stride + tile;
        if (__ldg(reinterpret_cast<const unsigned long long*>(of))) {
#pragma unroll
          for (float& v : sum) v = 0.f;
          return;
        }
      }
      of = nullptr;
    }
  }
  __device__ __forceinline__ void load_a() {
    if (!of) return;
    const uint4 head = __ldg(reinterpret_cast<const uint4*>(of)), more = __ldg(reinterpret_cast<const uint4*>(of) + 1);
    const uint16_t* const from = reinterpret_cast<const uint16_t*>(head.x | static_cast<uint64_t>(head.y) << 32) + 2 * (lane >> 2);
    const float* const scales = reinterpret_cast<const float*>(head.z | static_cast<uint64_t>(head.w) << 32) + 2 * (lane >> 2);
    const int width = (more.w >> 8 & 255) * 16, rank = more.w & 255, first = step * 16 + 2 * (lane & 3);
    int2 rows[kSteps][2];
#pragma unroll
    for (int j = 0; j < kSteps; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int stored = first + 16 * j + 8 * h;
        rows[j][h] = int2{L.inputs, L.inputs};
        if (step + j < end) rows[j][h] = L.features ? __ldg(reinterpret_cast<const int2*>(L.features + stored)) : int2{stored, stored + 1};
      }
#pragma unroll
    for (int j = 0; j < kSteps; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        a[j][2 * h] = load_static(from + static_cast<int64_t>(rows[j][h].x) * width, rows[j][h].x < L.inputs);
        a[j][2 * h + 1] = load_static(from + static_cast<int64_t>(rows[j][h].y) * width, rows[j][h].y < L.inputs);
      }
#pragma unroll
    for (int n = 0; n < 2; n++) scale[n] = 2 * (lane >> 2) + n < rank ? __ldg(scales + n) : 0.f;
  }
  __device__ __forceinline__ void load_x() {
    if (!of) return;
    const half* const from = x + step * (16 * kGroup) + (row >> 3) * 64 + (lane >> 2) * 8 + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < kSteps; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) b[j][h] = load_input(from + (2 * j + h) * (8 * kGroup), step + j < end);
  }
  __device__ __forceinline__ void finish() {
#pragma unroll 1
    while (of) {
      float odd[4] = {};
#pragma unroll
      for (int j = 0; j < kSteps; j++)
        if (step + j < end) lora_mma(j % 2 ? odd : sum, a[j], transposed(b[j][0]), transposed(b[j][1]));
#pragma unroll
      for (int n = 0; n < 4; n++) sum[n] += odd[n];
      step += kSteps;
      if (step >= end) {
        if ((lane & 3) == (row & 7) >> 1) {
          unsigned long long* const to = L.sums + (row * L.stride + at % tiles) * 16 + 2 * (lane >> 2);
          LoraSum::add(to, (row & 1 ? sum[1] : sum[0]) * scale[0]);
          LoraSum::add(to + 1, (row & 1 ? sum[3] : sum[2]) * scale[1]);
        }
        __syncwarp();
        row += kWarps;
        seek();
      }
      load_a();
      load_x();
    }
  }
};

// Brings this CTA's part of the matrices that are needed later to the L2 cache, a piece at a time, so that weights are not held up.
struct LoraAhead {
  const uint8_t* from[2];  // of b; of a of the next product
  int pieces[2];           // of 16 bytes
  int done, all;           // units of this CTA's share

  __device__ __forceinline__ LoraAhead() : from{}, pieces{}, done(0), all(1) {}
  template <class Lora>
  __device__ __forceinline__ void begin(const Lora& lora, int tokens, int units, int lane) {
    const StreamKLora& L = lora.L;
    all = max(units, 1);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      if (n && !L.next) return;
      if (L.flags & 1 << n) continue;
      const int grid = static_cast<int>(gridDim.x), tiles = __ldg(n ? L.next_count : L.count), entries = tokens * tiles;
      if (!entries) continue;
      // Several CTAs for an entry, or several entries for a CTA.
      int entry = static_cast<int>(blockIdx.x) + lane * grid, share = 0, shares = 1;
      if (entries < grid) {
        entry = lane ? entries : static_cast<int>(blockIdx.x) % entries;
        share = static_cast<int>(blockIdx.x) / entries, shares = (grid - entry + entries - 1) / entries;
      }
      if (entry >= entries) continue;
      const LoraTile* const of = (n ? L.next : L.tiles) + entry / tiles * L.stride + entry % tiles;
      const LoraTile tile = *of;
      if (!tile.a || !tile.fresh || (n && !tile.head)) continue;
      const auto* const data = reinterpret_cast<const uint8_t*>(n ? tile.a : tile.b + tile.first * 8);
      const int64_t count = n ? L.next_inputs * tile.width * 2 : static_cast<int64_t>(tile.rank) * tile.columns;
      const int64_t begin = count * share / shares;
      from[n] = data + begin * 16, pieces[n] = static_cast<int>(count * (share + 1) / shares - begin);
    }
  }
  __device__ __forceinline__ void go_on(int units) {
    const int now = min(done + units, all);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int64_t begin = static_cast<int64_t>(pieces[n]) * done / all, end = static_cast<int64_t>(pieces[n]) * now / all;
      if (begin < end)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(from[n] + begin * 16), "r"(static_cast<uint32_t>(end - begin) * 16)
                     : "memory");
    }
    done = now;
  }
};

struct LoraTiles {
  static constexpr bool kAny = true;
  template <int NB>
  using Shrink = LoraShrink<NB>;
  using Ahead = LoraAhead;
  static constexpr int kTogether = 4;  // rows whose b is on its way at once
  const StreamKLora& L;

  // The other set becomes zero. Behind griddepcontrol.wait.
  __device__ __forceinline__ void clear(int tokens, int lane) const {
    auto* const to = reinterpret_cast<uint4*>(L.clear);
#pragma unroll 1
    for (int i = static_cast<int>(blockIdx.x) * 32 + lane; i < tokens * L.stride * 8; i += static_cast<int>(gridDim.x) * 32)
      to[i] = uint4{0, 0, 0, 0};
  }

  // What is added, in the order of a Quad (stream_k_gemm.cuh), to 16 columns of y from `column` on and 8 rows from `first` on. Called by
  // whole warps.
  __device__ __forceinline__ float4 of(int first, int tokens, int column, int lane) const {
    const int g = lane >> 2, t = lane & 3, row = first + g, tiles = L.flags & 12 ? 0 : __ldg(L.count);
    float y[4] = {};
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
      const LoraTile* const here = L.tiles + first * L.stride + tile;
      const unsigned long long* const sums = L.sums + (row * L.stride + tile) * 16 + 4 * t;
      const bool has = row < tokens && __ldg(reinterpret_cast<const unsigned long long*>(here + g * L.stride));
      unsigned long long low[4];
#pragma unroll
      for (int i = 0; i < 4; i++) low[i] = ld_relaxed(sums + i);
      uint32_t w[kTogether][4];
      const auto load = [&](int r0) {
#pragma unroll
        for (int r = 0; r < kTogether; r++) {
          const uint4 part = __ldg(reinterpret_cast<const uint4*>(here + (r0 + r) * L.stride) + 1);
          const int columns = static_cast<int>(part.z >> 16) * 8, at = column + 2 * g - static_cast<int>(part.z & 0xffff) * 8;
          const int ranks = at >= 0 && at < columns ? static_cast<int>(part.w & 255) - 4 * t : 0;
          const uint16_t* const b = reinterpret_cast<const uint16_t*>(part.x | static_cast<uint64_t>(part.y) << 32) + column + 2 * g +
                                    static_cast<int64_t>(4 * t * columns);
#pragma unroll
          for (int i = 0; i < 4; i++) w[r][i] = load_static(b + i * columns, i < ranks);
        }
      };
      load(0);
      const unsigned additions = LoraTeams(tiles, L.steps).additions(L.steps);
      float v[4], most = 0.f;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        while (has && !LoraSum::has(low[i], additions)) low[i] = ld_relaxed(sums + i);
        v[i] = has ? LoraSum::of(low[i]) : 0.f;
        most = fmaxf(most, fabsf(v[i]));
      }
      __syncwarp();
      // The largest of a row becomes 1, as x is not scaled and halves end at 65504.
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float inverse = most > 1e-30f ? __frcp_rn(most) : 0.f;
      const half2 b0 = __floats2half2_rn(v[0] * inverse, v[1] * inverse), b1 = __floats2half2_rn(v[2] * inverse, v[3] * inverse);
      float z[4] = {};
#pragma unroll 1
      for (int r0 = 0;;) {
#pragma unroll
        for (int r = 0; r < kTogether; r++)
          lora_mma(z, w[r], g == r0 + r ? reinterpret_cast<const uint32_t&>(b0) : 0u,
                   g == r0 + r ? reinterpret_cast<const uint32_t&>(b1) : 0u);
        r0 += kTogether;
        if (r0 == 8) break;
        load(r0);
      }
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const float own = __shfl_sync(~0u, most, 8 * t + 4 * n);
        y[n] = fmaf(z[n], own, y[n]), y[n + 2] = fmaf(z[n + 2], own, y[n + 2]);
      }
    }
    float v[4];  // y: columns 2 g and 2 g + 1; wanted: g and g + 8
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int from = (g + 8 * (k >> 1)) / 2 * 4 + t;
      const float even = __shfl_sync(~0u, y[k & 1], from), odd = __shfl_sync(~0u, y[2 + (k & 1)], from);
      v[k] = g & 1 ? odd : even;
    }
    return {v[0], v[1], v[2], v[3]};
  }
};
#endif  // __CUDA_ARCH__ >= 900
#endif  // __CUDACC__

}  // namespace exl2nb
