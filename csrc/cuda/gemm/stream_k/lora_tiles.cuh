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
  int next_inputs;
};

#ifdef __CUDACC__
// What a kernel is made with: adapters, or none, which is no code.
struct NoLoraTiles {
  static constexpr bool kAny = false;
  __device__ __forceinline__ int flags() const { return 0; }
  struct Ahead {
    __device__ __forceinline__ void begin(const NoLoraTiles&, int, int, int) {}
    __device__ __forceinline__ void go_on(int, int) {}
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
__device__ __forceinline__ uint32_t load_input(const half* p) {
  uint32_t v;
  asm volatile("ld.global.cg.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// CTAs that share a tile, at least one, and steps of each.
struct LoraTeams {
  int count, each;
  __device__ __forceinline__ LoraTeams(int tiles, int steps)
      : count(max(1, static_cast<int>(gridDim.x) / tiles)), each((steps + count - 1) / count) {}
  __device__ __forceinline__ unsigned additions(int steps) const { return (steps + each - 1) / each; }
};

// A warp's part of x a, a pass at a time: load_a, griddepcontrol.wait, load_x, multiply, until nothing is left.
template <int NB>
struct LoraShrink {
  static constexpr int kSteps = 8, kGroup = 8 * NB, kWarps = 16;  // steps of a pass; rows of the step in an input's block
  const StreamKLora& L;
  const half* x;
  int tokens, warp, lane, tiles, teams, each;
  int at, tile, row, step, end;  // share of this CTA: tile + tiles * team; row of the step; steps to come
  const LoraTile* of;            // null: nothing is left
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
      const int team = at / tiles;
      tile = at - team * tiles, step = team * each, end = min(step + each, L.steps);
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
      if (step + j < end)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int stored = first + 16 * j + 8 * h;
          rows[j][h] = L.features ? __ldg(reinterpret_cast<const int2*>(L.features + stored)) : int2{stored, stored + 1};
        }
#pragma unroll
    for (int j = 0; j < kSteps; j++)
      if (step + j < end)
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
      if (step + j < end)
#pragma unroll
        for (int h = 0; h < 2; h++) b[j][h] = load_input(from + (2 * j + h) * (8 * kGroup));
  }
  __device__ __forceinline__ void multiply() {
    if (!of) return;
    float odd[4] = {};
#pragma unroll
    for (int j = 0; j < kSteps; j++)
      if (step + j < end) lora_mma(j % 2 ? odd : sum, a[j], transposed(b[j][0]), transposed(b[j][1]));
#pragma unroll
    for (int n = 0; n < 4; n++) sum[n] += odd[n];
    step += kSteps;
    if (step < end) return;
    if ((lane & 3) == (row & 7) >> 1) {
      unsigned long long* const to = L.sums + (row * L.stride + tile) * 16 + 2 * (lane >> 2);
      LoraSum::add(to, (row & 1 ? sum[1] : sum[0]) * scale[0]);
      LoraSum::add(to + 1, (row & 1 ? sum[3] : sum[2]) * scale[1]);
    }
    __syncwarp();
    row += kWarps;
    seek();
  }
};

// Brings this CTA's part of the matrices that are needed later to the L2 cache, some lines at a time, so that weights are not held up.
struct LoraAhead {
  const uint8_t* from[2];  // of b; of a of the next product
  int lines[2], each[2];   // pieces of 16 bytes; of them per unit of the CTA's share
  int done[2];

  __device__ __forceinline__ LoraAhead() : from{}, lines{}, each{}, done{} {}
  template <class Lora>
  __device__ __forceinline__ void begin(const Lora& lora, int tokens, int units, int lane) {
    const StreamKLora& L = lora.L;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      if ((n && !L.next) || L.flags & 1 << n) continue;
      // Several CTAs for an entry; where there are more entries than CTAs, the others stay where they are.
      const int grid = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x), tiles = __ldg(n ? L.next_count : L.count);
      const int entries = min(tokens * tiles, grid);
      if (!entries) continue;
      const int share = block / entries, entry = block - share * entries, shares = (grid - entry + entries - 1) / entries;
      const int row = entry / tiles;
      const LoraTile tile = (n ? L.next : L.tiles)[row * L.stride + entry - row * tiles];
      if (!tile.a || !tile.fresh || (n && !tile.head)) continue;
      const int all = n ? L.next_inputs * tile.width * 2 : tile.rank * tile.columns;
      lines[n] = (all + shares - 1) / shares, each[n] = (lines[n] + units - 1) / max(units, 1);
      from[n] = reinterpret_cast<const uint8_t*>(n ? tile.a : tile.b + tile.first * 8) + static_cast<int64_t>(share * lines[n]) * 16;
      lines[n] = min(lines[n], all - share * lines[n]);
    }
    static_cast<void>(lane);
  }
  __device__ __forceinline__ void go_on(int units, int lane) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int end = min(done[n] + units * each[n], lines[n]);
      if (lane == 0 && done[n] < end)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(from[n] + static_cast<int64_t>(done[n]) * 16),
                     "r"((end - done[n]) * 16)
                     : "memory");
      done[n] = end;
    }
  }
};

// Eight rows' products of a tile, b from global memory; a lane's b, at, columns and rank are those of row lane / 4. Not inlined: rare.
static __device__ __noinline__ float4 lora_rows(const uint16_t* b, int at, int columns, int rank, uint32_t x0, uint32_t x1) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float z[4] = {};
#pragma unroll 1
  for (int r = 0; r < 8; r++) {
        const uint64_t address = __shfl_sync(~0u, reinterpret_cast<uint64_t>(b), 4 * r);
        const int first = __shfl_sync(~0u, at, 4 * r), wide = __shfl_sync(~0u, columns, 4 * r), ranks = __shfl_sync(~0u, rank, 4 * r);
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int own = g + 8 * (i & 1), from = 2 * t + 8 * (i >> 1);
          const auto* const p = reinterpret_cast<const uint16_t*>(address) + static_cast<int64_t>(from) * wide + own;
          const bool in = first + own >= 0 && first + own < wide;
          w[i] = (in && from < ranks ? __ldg(p) : 0u) | (in && from + 1 < ranks ? static_cast<uint32_t>(__ldg(p + wide)) << 16 : 0u);
        }
        mma16816(z, w[0], w[1], w[2], w[3], g == r ? x0 : 0u, g == r ? x1 : 0u);
      }
  return {z[0], z[1], z[2], z[3]};
}
struct LoraTiles {
  static constexpr bool kAny = true;
  template <int NB>
  using Shrink = LoraShrink<NB>;
  using Ahead = LoraAhead;
  __device__ __forceinline__ int flags() const { return L.flags; }
  const StreamKLora& L;

  // The other set becomes zero. Behind griddepcontrol.wait.
  __device__ __forceinline__ void clear(int tokens, int lane) const {
    auto* const to = reinterpret_cast<uint4*>(L.clear);
#pragma unroll 1
    for (int i = static_cast<int>(blockIdx.x) * 32 + lane; i < tokens * L.stride * 8; i += static_cast<int>(gridDim.x) * 32)
      to[i] = uint4{0, 0, 0, 0};
  }

  // What is added, in the order of a Quad (stream_k_gemm.cuh), to 16 columns of y from `column` on and 8 rows from `first` on. Called by
  // whole warps. slot: shared memory for 4 rows' b of 16 ranks and 16 columns, and so much again `stride` bytes behind it; null: none.
  __device__ __forceinline__ float4 of(int first, int column, int lane, uint8_t* slot, int stride) const {
    const int g = lane >> 2, t = lane & 3, tiles = L.flags & 12 ? 0 : __ldg(L.count);
    const LoraTile* const here = L.tiles + (first + g) * L.stride;
    float y[4] = {};
#pragma unroll 1
    for (int base = 0; base < tiles; base += 4) {
      // Lane 4 g + t looks at tile t of row g.
      uint4 one = {0, 0, 0, 0};
      if (base + t < tiles) one = __ldg(reinterpret_cast<const uint4*>(here + base + t) + 1);
      const int before = column - static_cast<int>(one.z & 0xffff) * 8;
      unsigned votes = __ballot_sync(~0u, before > -16 && before < static_cast<int>(one.z >> 16) * 8);
      votes |= votes >> 16, votes |= votes >> 8, votes = (votes | votes >> 4) & 15;
#pragma unroll 1
      for (; votes; votes &= votes - 1) {
        const int k = __ffs(votes) - 1, from = (lane & ~3) | k;
        const uint4 part = {__shfl_sync(~0u, one.x, from), __shfl_sync(~0u, one.y, from), __shfl_sync(~0u, one.z, from),
                            __shfl_sync(~0u, one.w, from)};
        add(part, L.sums + ((first + g) * L.stride + base + k) * 16, column, lane, slot, stride, y);
      }
    }
    return {y[0], y[1], y[2], y[3]};
  }

 private:
  // A tile. part: the second half of row g's.
  __device__ __forceinline__ void add(const uint4& part, const unsigned long long* sums, int column, int lane, uint8_t* slot, int stride,
                                      float (&y)[4]) const {
    const int g = lane >> 2, t = lane & 3, columns = static_cast<int>(part.z >> 16) * 8, rank = static_cast<int>(part.w & 255);
    const int at = column - static_cast<int>(part.z & 0xffff) * 8;
    const uint16_t* const b = reinterpret_cast<const uint16_t*>(part.x | static_cast<uint64_t>(part.y) << 32) + column;
    const bool any = at > -16 && at < columns;
    if (slot) {  // a lane takes 8 columns of every other rank of its row
      const int half_row = 8 * (t & 1), bytes = at + half_row >= 0 && at + half_row < columns ? 16 : 0;
      const uint16_t* from = b + half_row + static_cast<int64_t>((t >> 1) * columns);
      uint8_t* const to = slot + (g >> 2) * stride + (g & 3) * 512 + t * 16;
#pragma unroll
      for (int i = 0; i < 8; i++, from += 2 * columns) {
        const int own = 2 * i + (t >> 1) < rank ? bytes : 0;
        copy16_part(to + 64 * i, own ? from : reinterpret_cast<const uint16_t*>(L.tiles), own);
      }
      async_commit();
    }
    unsigned long long low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) low[i] = ld_relaxed(sums + 2 * t + (i & 1) + 8 * (i >> 1));
    const unsigned additions = LoraTeams(__ldg(L.count), L.steps).additions(L.steps);
    float v[4], most = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      while (any && !LoraSum::has(low[i], additions)) low[i] = ld_relaxed(sums + 2 * t + (i & 1) + 8 * (i >> 1));
      v[i] = any ? LoraSum::of(low[i]) : 0.f;
      most = fmaxf(most, fabsf(v[i]));
    }
    __syncwarp();
    // The largest of a row becomes 1, as x is not scaled and halves end at 65504.
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float inverse = most > 1e-30f ? __fdividef(1.f, most) : 0.f;
    const half2 b0 = __floats2half2_rn(v[0] * inverse, v[1] * inverse), b1 = __floats2half2_rn(v[2] * inverse, v[3] * inverse);
    const uint32_t x0 = reinterpret_cast<const uint32_t&>(b0), x1 = reinterpret_cast<const uint32_t&>(b1);
    float z[4] = {};
    if (slot) {
      async_wait<0>();
      __syncwarp();
      const uint32_t row = shared_address(slot) + ((lane & 7) + (lane >> 4) * 8) * 32 + (lane >> 3 & 1) * 16;
#pragma unroll
      for (int r = 0; r < 8; r++) {
        uint32_t w[4];
        load_matrices<true>(w, row + (r >> 2) * stride + (r & 3) * 512);
        mma16816(z, w[0], w[1], w[2], w[3], g == r ? x0 : 0u, g == r ? x1 : 0u);
      }
      __syncwarp();
    } else {
      const float4 all = lora_rows(b, at, columns, rank, x0, x1);
      z[0] = all.x, z[1] = all.y, z[2] = all.z, z[3] = all.w;
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float own = __shfl_sync(~0u, most, 8 * t + 4 * n);
      y[n] = fmaf(z[n], own, y[n]), y[n + 2] = fmaf(z[n + 2], own, y[n + 2]);
    }
  }
};
#endif  // __CUDA_ARCH__ >= 900
#endif  // __CUDACC__

}  // namespace exl2nb
