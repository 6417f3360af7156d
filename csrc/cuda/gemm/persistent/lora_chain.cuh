// Adapters inside the persistent chain: y += (scale * (x a)) b without a launch of its own. A warp more in every CTA does it while the
// consumers multiply, so a GEMM waits only where it is shorter than the exchange. (18 or 19 warps: the registers are the same.)
//
// Shrink: task = 256 stored rows of x, 16 columns of a, one row of the step; each CTA has at most one or two, from the last CTA on, as the
// first own more strips. A lane takes 8 stored rows (one 16-byte load of x) and their 8 x 16 numbers of a, which it brings near before x
// exists.
// Exchange: sums[gemm][row][chunk][width] with Lamport flags, twice, as the chain's buffers; launches with adapters count themselves.
// Expand: every CTA's warp adds the chunks up, in order, and multiplies by the columns of b of its CTA: 4 lanes share 8 columns. The
// results are in shared memory before kFactorsReady; the epilogue adds them to its sums, ahead of the norm factor, as x is not scaled
// either.
// Bytes: a once per row of the step, b once; 4 * width per chunk, row and CTA from L2. Limits: LoraTable.fits_inside of ops/lora.py.
#pragma once
#include "cuda/gemm/lora.h"
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/runtime/lamport.cuh"

namespace exl2nb {

constexpr int kLoraChainGemms = 4, kLoraChainParts = 6, kLoraChainWidth = 256;  // of a chain; most of a change, in all parts
constexpr int kLoraChainRows = 4, kLoraChainHead = 64;                          // of a launch; floats in front of the sums

struct LoraChain {
  const LoraChange* changes[kLoraChainGemms];  // of adapter 0, as in LoraRows
  const int* features[kLoraChainGemms];        // of stored rows; null: the same
  int64_t ops;
  const int* adapters;  // by row, -1 for none
  float* sums;          // of both sets
  unsigned* launches;
  int width, chunks;     // strides of the sums: widest change, most chunks
  int set;               // floats of a set
  int parts, low, adds;  // offsets in shared memory
};
// Floats of a set.
inline int64_t lora_chain_set(int64_t chunks, int64_t width) { return kLoraChainGemms * kLoraChainRows * chunks * width; }
// Bytes of shared memory for the parts of so many rows, and places in them.
EXL2NB_BOTH constexpr int lora_counts_bytes(int rows) { return (kLoraChainGemms * rows * 4 + 15) / 16 * 16; }
EXL2NB_BOTH constexpr int lora_parts_bytes(int rows) {
  return lora_counts_bytes(rows) + kLoraChainGemms * rows * kLoraChainParts * static_cast<int>(sizeof(LoraPart));
}

#if __CUDA_ARCH__ >= 900
// The warp. Args: PersistentArgs.
template <class Args>
struct LoraWarp {
  const Args& C;
  const LoraChain& L;
  uint8_t* shared;
  int rows, block, lane;
  float* sums;  // of this launch
  // The task: row, chunk, first of its columns of all parts', negative for none; and this lane's rows of a there, 16 columns each.
  int m, chunk, column, at[8];
  const uint16_t* from;

  __device__ __forceinline__ LoraWarp(const Args& args, const LoraChain& lora, uint8_t* smem, int cta, int thread)
      : C(args), L(lora), shared(smem), rows(args.gemm[0].a.tokens), block(cta), lane(thread), sums(nullptr) {}

  __device__ __forceinline__ int& count(int q, int row) const { return reinterpret_cast<int*>(shared + L.parts)[q * rows + row]; }
  __device__ __forceinline__ LoraPart* parts(int q, int row) const {
    return reinterpret_cast<LoraPart*>(shared + L.parts + lora_counts_bytes(rows)) + (q * rows + row) * kLoraChainParts;
  }
  static __device__ __forceinline__ int padded(const LoraPart& p) { return static_cast<int>(p.rank + 15) & ~15; }
  __device__ __forceinline__ int chunks(int q) const { return (C.gemm[q].width + kLoraChunk - 1) / kLoraChunk; }
  __device__ __forceinline__ float* sums_of(int q, int row) const {
    return sums + static_cast<int64_t>((q * kLoraChainRows + row) * L.chunks) * L.width;
  }
  __device__ __forceinline__ int own_strips(const GemmArgs& A, int p) const {
    return A.part[p].per_cta + (first_strip(A, block, p) < A.part[p].rest ? 1 : 0);
  }
  __device__ __forceinline__ int first_task() const { return C.grid - 1 - block; }
  __device__ __forceinline__ int tasks(int q) const { return L.width / 16 * rows * chunks(q); }

  // Barriers: polling for the inputs may start; the consumers have read `adds`; what the epilogue needs is there.
  __device__ __forceinline__ void run(uint64_t* inputs, uint64_t* stored, uint64_t* ready) {
    begin();
    int set = 0;  // offset of this launch's buffer set
#pragma unroll 1
    for (int q = 0; q < C.count; q++) {
      if (q == 0)
        pdl_wait();
      else if (kWarpArrivals > 1 || lane == 0)
        barrier_wait(stored, (q - 1) & 1), barrier_wait(inputs, q & 1);
      __syncwarp();
      if (q == 0) {  // both are read by every CTA before any finishes the launch
        set = (ld_relaxed(C.counters + kLoraChainGemms) & 1) * C.set_bytes;
        sums = L.sums + (ld_relaxed(L.launches) & 1) * L.set;
      }
      shrink(q, C.gemm[q].a.x + (q ? set / 2 : 0), C.gemm[q].a.x_stride);
      expand(q);
      __syncwarp();
      warp_arrive(ready, lane);
      ahead(q);
    }
  }
  // Before griddepcontrol.wait: the parts of all rows and GEMMs, and what the first GEMM needs.
  __device__ __forceinline__ void begin() {
    for (int i = lane; i < C.count * rows; i += 32) {
      const int q = i / rows, row = i - q * rows, adapter = __ldg(L.adapters + row);
      int n = 0;
      if (adapter >= 0) {
        const auto* const change = reinterpret_cast<const long long*>(L.changes[q] + adapter * L.ops);
        const auto* const from = reinterpret_cast<const long long*>(__ldg(change));
        n = min(static_cast<int>(__ldg(change + 1)), kLoraChainParts);
        auto* const to = reinterpret_cast<long long*>(parts(q, row));
        constexpr int kWords = sizeof(LoraPart) / 8;
#pragma unroll 1
        for (int k = 0; k < n; k++)
#pragma unroll
          for (int word = 0; word < kWords; word++) to[k * kWords + word] = __ldg(from + k * kWords + word);
      }
      count(q, row) = n;
    }
    for (int q = 1; q < C.count; q++)
      if (const int at = first_task() % chunks(q) * kLoraChunk + 32 * lane; L.features[q] && lane < 8 && at < C.gemm[q].width)
        prefetch_line(L.features[q] + at);
    __syncwarp();
    fetch(0, first_task());
    touch(0);
  }
  // Behind GEMM q's part of it: the next one's. Once, the next launch's sums become zero.
  __device__ __forceinline__ void ahead(int q) {
    if (q + 1 < C.count) fetch(q + 1, first_task()), touch(q + 1);
    if (q) return;
    auto* const other = reinterpret_cast<uint4*>(sums == L.sums ? L.sums + L.set : L.sums);
    for (int i = block * 32 + lane; i < L.set / 4; i += C.grid * 32) other[i] = make_uint4(0, 0, 0, 0);
  }

  // Stored row of a lane's j-th number of x.
  __device__ __forceinline__ int stored_row(int j) const {
    return chunk * kLoraChunk + (lane >> 2) * 32 + 2 * (lane & 3) + (j & 1) + (j >> 1 & 1) * 8 + (j >> 2) * 16;
  }
  // Finds a task's rows of a and brings them near.
  __device__ __forceinline__ void fetch(int q, int task) {
    const int all = chunks(q), of_rows = task / all;
    chunk = task - of_rows * all, m = of_rows % rows, column = of_rows / rows * 16;
    from = nullptr;
    int width = 0;
    if (task < tasks(q))
#pragma unroll 1
      for (int i = 0, first = column; i < count(q, m); i++) {
        const LoraPart& part = parts(q, m)[i];
        if (first < padded(part)) {
          from = part.a + first, width = padded(part);
          break;
        }
        first -= padded(part);
      }
    if (!from) column = -1;
    if (!from || !has_rows(q)) return;
    const int* const features = L.features[q];
#pragma unroll
    for (int j = 0; j < 8; j++) at[j] = (features ? __ldg(features + stored_row(j)) : stored_row(j)) * width;
#pragma unroll
    for (int j = 0; j < 8; j++) prefetch_word(from + at[j]);
  }
  // Whether the matrix has this lane's rows of the task: its rows come in 32s.
  __device__ __forceinline__ bool has_rows(int q) const { return stored_row(0) < C.gemm[q].width; }
  // Brings the CTA's columns of b near, and the scales. Half a warp takes a strip.
  __device__ __forceinline__ void touch(int q) const {
    const GemmArgs& A = C.gemm[q].a;
#pragma unroll 1
    for (int row = 0; row < rows; row++)
#pragma unroll 1
      for (int i = 0; i < count(q, row); i++) {
        const LoraPart part = parts(q, row)[i];
        if (8 * lane < part.rank) prefetch_word(part.scale + 8 * lane);
#pragma unroll 1
        for (int p = 0; p < A.num_parts; p++) {
          const int strip0 = first_strip(A, block, p), own = own_strips(A, p);
#pragma unroll 1
          for (int s = lane >> 4; s < own; s += 2) {
            const int64_t at = A.part[p].first_column + (strip0 + s * A.grid) * 16 - part.first;
            if (at < 0 || at >= part.columns) continue;
#pragma unroll 1
            for (int r = lane & 15; r < part.rank; r += 16) prefetch_word(part.b + r * part.columns + at);
          }
        }
      }
  }

  // When the inputs of GEMM q are there, or about to be: this CTA's sums. x: row 0.
  __device__ __forceinline__ void shrink(int q, const half* x, int stride) {
#pragma unroll 1
    for (int task = first_task();;) {
      if (column >= 0) multiply(q, x + static_cast<size_t>(m) * stride);
      task += C.grid;
      if (task >= tasks(q)) return;
      fetch(q, task);
    }
  }
  __device__ __forceinline__ void multiply(int q, const half* x) const {
    float y[16] = {};
    const auto low = [](uint32_t w) { return __half2float(__ushort_as_half(static_cast<uint16_t>(w))); };
    const auto high = [](uint32_t w) { return __half2float(__ushort_as_half(static_cast<uint16_t>(w >> 16))); };
    if (has_rows(q)) {
      x += chunk * kLoraChunk + lane * 8;
      uint4 v = ld_relaxed(x);
      if (q && !is_written(v)) v = poll(x);
      const uint32_t xs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint4 a[8];
#pragma unroll
        for (int j = 0; j < 8; j++) a[j] = __ldg(reinterpret_cast<const uint4*>(from + at[j]) + h);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const float one = j & 1 ? high(xs[j / 2]) : low(xs[j / 2]);
          const uint32_t w[4] = {a[j].x, a[j].y, a[j].z, a[j].w};
#pragma unroll
          for (int n = 0; n < 4; n++) {
            y[8 * h + 2 * n] = fmaf(one, low(w[n]), y[8 * h + 2 * n]);
            y[8 * h + 2 * n + 1] = fmaf(one, high(w[n]), y[8 * h + 2 * n + 1]);
          }
        }
      }
    }
    __syncwarp();
    halve<8>(y, 16), halve<4>(y, 8);  // lane / 8 has columns 4 * (lane / 8) to + 3
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int d = 4; d; d >>= 1) y[n] += __shfl_xor_sync(~0u, y[n], d);
    float* const to = sums_of(q, m) + chunk * L.width + column + lane / 8 * 4;
    if (lane % 8 == 0) st_relaxed(to, float4{lamport_value(y[0]), y[1], y[2], y[3]});
  }
  // Two lanes that differ in bit `d` add up 2 * N numbers; the one with the bit keeps the second N.
  template <int N>
  __device__ __forceinline__ void halve(float* y, int d) const {
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float other = __shfl_xor_sync(~0u, lane & d ? y[n] : y[n + N], d);
      y[n] = (lane & d ? y[n + N] : y[n]) + other;
    }
  }

  // What the epilogue of GEMM q adds, into shared memory.
  __device__ __forceinline__ void expand(int q) const {
    const auto& P = C.gemm[q];
    float* const adds = reinterpret_cast<float*>(shared + L.adds);
    const int outputs = P.rounds * P.a.num_parts * P.strips * 16;
    for (int i = lane; i < outputs * rows; i += 32) adds[i] = 0.f;
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
      const int n = count(q, row);
      int tiles = 0;
#pragma unroll 1
      for (int i = 0; i < n; i++) tiles += padded(parts(q, row)[i]) / 16;
      if (tiles) gather(q, row, tiles);
      __syncwarp();
      if (tiles) spread(q, row, n, adds);
      __syncwarp();
    }
  }
  // The sums of a row over all chunks. A lane takes 4 columns of every 8th chunk, for 4 tiles of 16 columns at once.
  __device__ __forceinline__ void gather(int q, int row, int tiles) const {
    constexpr int kTiles = 4, kTogether = 2;
    const float* const from = sums_of(q, row) + 4 * (lane & 3);
    const int all = chunks(q);
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile += kTiles) {
      float4 sum[kTiles] = {};
#pragma unroll 1
      for (int base = 0; base < all; base += 8 * kTogether) {
        float4 v[kTiles][kTogether];
        const auto each = [&](auto f) {
#pragma unroll
          for (int k = 0; k < kTiles; k++)
#pragma unroll
            for (int j = 0; j < kTogether; j++)
              if (const int at = base + 8 * j + (lane >> 2); tile + k < tiles && at < all)
                f(v[k][j], sum[k], from + at * L.width + (tile + k) * 16);
        };
        each([](float4& some, float4&, const float* p) { some = ld_relaxed4(p); });
        each([](float4& some, float4& to, const float* p) {
          while (!is_written(some)) some = ld_relaxed4(p);
          to.x += some.x, to.y += some.y, to.z += some.z, to.w += some.w;
        });
      }
      __syncwarp();
#pragma unroll
      for (int k = 0; k < kTiles; k++) {
        if (tile + k >= tiles) break;
        float4& s = sum[k];
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
          s.x += __shfl_xor_sync(~0u, s.x, d), s.y += __shfl_xor_sync(~0u, s.y, d);
          s.z += __shfl_xor_sync(~0u, s.z, d), s.w += __shfl_xor_sync(~0u, s.w, d);
        }
        if (lane < 4) reinterpret_cast<float4*>(shared + L.low)[(tile + k) * 4 + lane] = s;
      }
    }
  }
  // Times b: lanes 4 o to 4 o + 3 have 8 columns, the o-th of the CTA's and every 8th after it, and 4 of 16 ranks each.
  __device__ __forceinline__ void spread(int q, int row, int n, float* adds) const {
    const auto& P = C.gemm[q];
    const GemmArgs& A = P.a;
    const float* const low = reinterpret_cast<const float*>(shared + L.low);
    int all = 0;
    for (int p = 0; p < A.num_parts; p++) all += 2 * own_strips(A, p);
#pragma unroll 1
    for (int base = 0; base < all; base += 8) {
      int o = base + (lane >> 2), p = 0;
      const bool live = o < all;
#pragma unroll 1
      for (; p + 1 < A.num_parts && o >= 2 * own_strips(A, p); p++) o -= 2 * own_strips(A, p);
      const int s = o >> 1, half_strip = 8 * (o & 1);
      const int y_column = A.part[p].first_column + (first_strip(A, block, p) + s * A.grid) * 16 + half_strip;
      float y[8] = {};
      int tile = 0;
#pragma unroll 1
      for (int i = 0; i < n; i++) {
        const LoraPart part = parts(q, row)[i];
        const int64_t at = y_column - part.first;
        const bool in = live && at >= 0 && at < part.columns;
        if (__any_sync(~0u, in)) {
#pragma unroll 1
          for (int r0 = 4 * (lane & 3); r0 - 4 * (lane & 3) < part.rank; r0 += 16) {
            uint4 b[4];
            float scaled[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
              const bool ok = in && r0 + j < part.rank;
              b[j] = ok ? __ldg(reinterpret_cast<const uint4*>(part.b + (r0 + j) * part.columns + at)) : make_uint4(0, 0, 0, 0);
              scaled[j] = ok ? low[tile * 16 + r0 + j] * __ldg(part.scale + r0 + j) : 0.f;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
              const uint32_t w[4] = {b[j].x, b[j].y, b[j].z, b[j].w};
#pragma unroll
              for (int k = 0; k < 4; k++) {
                y[2 * k] = fmaf(scaled[j], __half2float(__ushort_as_half(static_cast<uint16_t>(w[k]))), y[2 * k]);
                y[2 * k + 1] = fmaf(scaled[j], __half2float(__ushort_as_half(static_cast<uint16_t>(w[k] >> 16))), y[2 * k + 1]);
              }
            }
          }
        }
        tile += padded(part) / 16;
      }
      halve<4>(y, 2), halve<2>(y, 1);
      const int round = s / P.strips, place = ((round * A.num_parts + p) * P.strips + s - round * P.strips) * 16 + half_strip +
                                              4 * (lane >> 1 & 1) + 2 * (lane & 1);
      if (live) adds[place * rows + row] = y[0], adds[(place + 1) * rows + row] = y[1];
    }
  }
};

// What a kernel is made with: adapters, or none, which is no code at all. Adds: what the epilogue adds, [output of the CTA][row].
// kArrivals: at kFactorsReady.
struct WithLora {
  struct Adds {
    const float* at;
    __device__ __forceinline__ float to(float v, int place) const { return v + at[place]; }
  };
  static constexpr int kArrivals = 1 + kWarpArrivals;
  const LoraChain& L;
  __device__ __forceinline__ Adds adds(const uint8_t* shared, int first) const {
    return {reinterpret_cast<const float*>(shared + L.adds) + first};
  }
  template <class Args>
  __device__ __forceinline__ void run(const Args& C, uint8_t* shared, uint64_t* inputs, uint64_t* stored, uint64_t* ready, int block,
                                      int lane) const {
    LoraWarp<Args>(C, L, shared, block, lane).run(inputs, stored, ready);
  }
  __device__ __forceinline__ void count() const { asm volatile("red.relaxed.gpu.global.add.u32 [%0],1;" ::"l"(L.launches) : "memory"); }
};
struct NoLora {
  struct Adds {
    __device__ __forceinline__ float to(float v, int) const { return v; }
  };
  static constexpr int kArrivals = 1;
  __device__ __forceinline__ Adds adds(const uint8_t*, int) const { return {}; }
  template <class Args>
  __device__ __forceinline__ void run(const Args&, uint8_t*, uint64_t*, uint64_t*, uint64_t*, int, int) const {}
  __device__ __forceinline__ void count() const {}
};
#endif

}  // namespace exl2nb
