// Adapters inside the persistent chain: y += (scale * (x a)) b without a launch of its own. A warp more in every CTA does it while the
// consumers multiply. (18 or 19 warps: the registers are the same.)
//
// x a, where x is what the GEMM before has made: every CTA multiplies the columns that it owns, which the epilogue leaves in shared memory,
// as soon as they are stored. In the first GEMM, whose x another kernel has made: task = 128 stored rows, 16 columns of a, one row of the
// step; each CTA has few, from the last CTA on, as the first own more strips.
// Exchange: sums[gemm][row][width] as whole numbers of 64 bits that count what was added (LoraSum). Three sets: launches of several GEMMs
// take the first two by turns and clear the others; a launch of one GEMM takes the third. Expand: every CTA's warp multiplies the sums by
// the columns of b of its CTA: 4 lanes share 8 columns. The results are in shared memory before kFactorsReady; the epilogue adds them to
// its sums, ahead of the norm factor, as x is not scaled either. What a GEMM needs of a and b comes to shared memory during the one before,
// as far as there is room beside the ring, else to L2. Bytes: a and b once per row of the step; 8 * width per row and CTA from L2. Limits:
// LoraTable.fits_inside of ops/lora.py.
#pragma once
#include "cuda/gemm/lora.h"
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/runtime/lamport.cuh"

namespace exl2nb {

constexpr int kLoraChainGemms = 4, kLoraChainParts = 6, kLoraChainWidth = 256;  // of a chain; most of a change, in all parts
constexpr int kLoraChainRows = 4, kLoraChainHead = 64;                          // of a launch; floats in front of the sums
constexpr int kLoraChainSets = 3;
constexpr int kLoraChainTask = 128, kLoraChainCache = 24 * 1024;  // stored rows; most bytes of a and b in shared memory

struct LoraChain {
  const LoraChange* changes[kLoraChainGemms];  // of adapter 0, as in LoraRows
  const int* features;                         // of stored rows of the first GEMM; null: the same
  int64_t ops;
  const int* adapters;  // by row, -1 for none
  unsigned long long* sums;
  unsigned* launches;
  int width, set;                            // stride of the sums: widest change; numbers of a set
  int parts, low, adds, cache, cache_bytes;  // offsets in shared memory
};
// Numbers of a set.
inline int64_t lora_chain_set(int64_t width) { return kLoraChainGemms * kLoraChainRows * width; }
// Bytes of shared memory for the parts of so many rows, and places in them.
EXL2NB_BOTH constexpr int lora_counts_bytes(int rows) { return (kLoraChainGemms * rows * 4 + 15) / 16 * 16; }
EXL2NB_BOTH constexpr int lora_parts_bytes(int rows) {
  return lora_counts_bytes(rows) + kLoraChainGemms * rows * kLoraChainParts * static_cast<int>(sizeof(LoraPart));
}

#if __CUDA_ARCH__ >= 900
// A sum of x a: a whole number of 64 bits, whose lowest ones count what was added. So one atomic addition is data, sum
// and flag, and the order of additions does not change a bit. At most 2047 additions, each clamped to 32768.
struct LoraSum {
  static constexpr int kCount = 11;
  static constexpr float kOne = 1 << 26, kMost = 1 << 15;  // of one addition: the sum of all stays in 53 bits
  static __device__ __forceinline__ void add(unsigned long long* to, float v) {
    const auto whole = static_cast<unsigned long long>(__float2ll_rn(fminf(fmaxf(v, -kMost), kMost) * kOne));
    asm volatile("red.relaxed.gpu.global.add.u64 [%0],%1;" ::"l"(to), "l"((whole << kCount) + 1) : "memory");
  }
  // Whether so many have been added.
  static __device__ __forceinline__ bool has(unsigned long long v, unsigned count) { return (v & ((1 << kCount) - 1)) == count; }
  static __device__ __forceinline__ float of(unsigned long long v) {
    return __ll2float_rn(static_cast<long long>(v) >> kCount) * (1.f / kOne);
  }
};
// y[n] += v * a[n], of 8 halves.
__device__ __forceinline__ void lora_multiply(float v, const uint4& a, float* y) {
  const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
  for (int n = 0; n < 4; n++) {
    y[2 * n] = fmaf(v, __half2float(__ushort_as_half(static_cast<uint16_t>(w[n]))), y[2 * n]);
    y[2 * n + 1] = fmaf(v, __half2float(__ushort_as_half(static_cast<uint16_t>(w[n] >> 16))), y[2 * n + 1]);
  }
}
// Two lanes that differ in bit `d` add up 2 * N numbers; the one with the bit keeps the second N.
template <int N>
__device__ __forceinline__ void lora_halve(float* y, int lane, int d) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float other = __shfl_xor_sync(~0u, lane & d ? y[n] : y[n + N], d);
    y[n] = (lane & d ? y[n + N] : y[n]) + other;
  }
}
// The warp. Args: PersistentArgs.
template <class Args>
struct LoraWarp {
  const Args& C;
  const LoraChain& L;
  uint8_t* shared;
  int rows, block, lane;
  unsigned long long* sums;  // of this launch
  int b_at;                  // place of b in the cache, behind a
  // The task: row, chunk, first of its columns of all parts', negative for none; and this lane's rows of a there, 8 columns each.
  int m, chunk, column, at[8];
  const uint16_t* from;  // null: in the cache

  __device__ __forceinline__ LoraWarp(const Args& args, const LoraChain& lora, uint8_t* smem, int cta, int thread)
      : C(args), L(lora), shared(smem), rows(args.gemm[0].a.tokens), block(cta), lane(thread), sums(nullptr), b_at(0) {}

  __device__ __forceinline__ int& count(int q, int row) const { return reinterpret_cast<int*>(shared + L.parts)[q * rows + row]; }
  __device__ __forceinline__ LoraPart* parts(int q, int row) const {
    return reinterpret_cast<LoraPart*>(shared + L.parts + lora_counts_bytes(rows)) + (q * rows + row) * kLoraChainParts;
  }
  __device__ __forceinline__ float* low() const { return reinterpret_cast<float*>(shared + L.low); }  // then the rows' scales
  __device__ __forceinline__ float* scales(int row) const { return low() + (1 + row) * L.width; }
  __device__ __forceinline__ float* adds() const { return reinterpret_cast<float*>(shared + L.adds); }
  static __device__ __forceinline__ int padded(const LoraPart& p) { return static_cast<int>(p.rank + 15) & ~15; }
  __device__ __forceinline__ int chunks() const { return (C.gemm[0].width + kLoraChainTask - 1) / kLoraChainTask; }
  __device__ __forceinline__ unsigned long long* sums_of(int q, int row) const { return sums + (q * kLoraChainRows + row) * L.width; }
  __device__ __forceinline__ int own_strips(const GemmArgs& A, int p) const {
    return A.part[p].per_cta + (first_strip(A, block, p) < A.part[p].rest ? 1 : 0);
  }
  // Place of a strip's first column among the CTA's outputs of GEMM q.
  __device__ __forceinline__ int place(int q, int p, int strip) const {
    const auto& P = C.gemm[q];
    const int round = P.rounds > 1 ? strip / P.strips : 0;
    return ((round * P.a.num_parts + p) * P.strips + strip - round * P.strips) * 16;
  }
  // Where so many bytes are in the cache, or null; on to the next ones.
  __device__ __forceinline__ uint8_t* cached(int& used, int bytes) const {
    if (used + bytes > L.cache_bytes) return nullptr;
    used += bytes;
    return shared + L.cache + used - bytes;
  }

  // Barriers: polling for the inputs may start; the consumers have read `adds` and left what they stored there; what the epilogue needs is
  // there.
  __device__ __forceinline__ void run(uint64_t* inputs, uint64_t* stored, uint64_t* ready) {
    begin();
#pragma unroll 1
    for (int q = 0; q < C.count; q++) {
      if (q == 0) {
        pdl_wait();
        // Read by every CTA before any finishes the launch.
        sums = L.sums + (C.count == 1 ? 2 : ld_relaxed(L.launches) & 1) * L.set;
        async_wait<1>();
        __syncwarp();
        shrink();
      } else {
        if (kWarpArrivals > 1 || lane == 0) barrier_wait(stored, (q - 1) & 1);
        async_wait<1>();
        __syncwarp();
        contribute(q);
        if (kWarpArrivals > 1 || lane == 0) barrier_wait(inputs, q & 1);
        __syncwarp();
      }
      expand(q);
      __syncwarp();
      warp_arrive(ready, lane);
      if (q + 1 < C.count) bring(q + 1);
      if (q == 0 && C.count > 1) clear();
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
    __syncwarp();
    bring(0);
  }
  // The other sets become zero.
  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (int set = 0; set < kLoraChainSets; set++) {
      auto* const other = reinterpret_cast<uint4*>(L.sums + set * L.set);
      if (L.sums + set * L.set != sums)
        for (int i = block * 32 + lane; i < L.set / 2; i += C.grid * 32) other[i] = make_uint4(0, 0, 0, 0);
    }
  }

  // What GEMM q needs of a, then of b, as asynchronous copies; and the scales.
  __device__ __forceinline__ void bring(int q) {
    int used = 0;
    if (q == 0)
      fetch(C.grid - 1 - block, used);
    else
      each_a(q, used, [&](const LoraPart& part, int, int, const uint16_t* a, uint8_t* to) {
        const GemmArgs& A = C.gemm[q - 1].a;
        const int strip0 = first_strip(A, block, 0), own = own_strips(A, 0), pieces = 2 * padded(part);  // of a strip
#pragma unroll 1
        for (int s = 0; s < own; s++)
#pragma unroll 1
          for (int i = lane; i < pieces; i += 32)
            if (const int at = (strip0 + s * A.grid) * pieces + i; at < C.gemm[q].width * pieces / 16)
              take16(to ? to + (s * pieces + i) * 16 : nullptr, a + at * 8);
      });
    async_commit();
    b_at = used;
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
      each_b(
          q, row, used,
          [&](const LoraPart& part, int64_t at, int, uint8_t* to) {
#pragma unroll 1
            for (int r = lane & 3; at >= 0 && r < part.rank; r += 4) take16(to ? to + r * 16 : nullptr, part.b + r * part.columns + at);
          },
          [](bool, int) {});
      float* to = scales(row);
#pragma unroll 1
      for (int i = 0; i < count(q, row); i++) {
        const LoraPart& part = parts(q, row)[i];
        for (int r = lane; r < padded(part); r += 32) to[r] = r < part.rank ? __ldg(part.scale + r) : 0.f;
        to += padded(part);
      }
    }
    async_commit();
  }
  static __device__ __forceinline__ void take16(uint8_t* to, const uint16_t* from) {
    if (to)
      copy16<true>(to, from);
    else
      prefetch_line(from);
  }
  // f(part, row, first tile, a, where its rows of this CTA are or nowhere): of all rows of the step.
  template <class F>
  __device__ __forceinline__ void each_a(int q, int& used, F&& f) const {
    const int own = own_strips(C.gemm[q - 1].a, 0);
#pragma unroll 1
    for (int row = 0; row < rows; row++)
#pragma unroll 1
      for (int i = 0, tile = 0; own && i < count(q, row); i++) {
        const LoraPart& part = parts(q, row)[i];
        f(part, row, tile, part.a, cached(used, own * 32 * padded(part)));
        tile += padded(part) / 16;
      }
  }
  // of_part(part, first of 8 columns in it or negative, first tile, where their b is or nowhere) by lanes 4 o to 4 o + 3 for the o-th eight
  // columns of the CTA and every 8th after it; done(whether there are such columns, their place among the outputs).
  template <class Part, class Done>
  __device__ __forceinline__ void each_b(int q, int row, int& used, Part&& of_part, Done&& done) const {
    const GemmArgs& A = C.gemm[q].a;
    const int n = count(q, row);
    int all = 0;
    for (int p = 0; p < A.num_parts; p++) all += 2 * own_strips(A, p);
#pragma unroll 1
    for (int base = 0; n && base < all; base += 8) {
      int o = base + (lane >> 2), p = 0;
      const bool live = o < all;
#pragma unroll 1
      for (; p + 1 < A.num_parts && o >= 2 * own_strips(A, p); p++) o -= 2 * own_strips(A, p);
      const int s = o >> 1, half_strip = 8 * (o & 1);
      const int y_column = A.part[p].first_column + (first_strip(A, block, p) + s * A.grid) * 16 + half_strip;
#pragma unroll 1
      for (int i = 0, tile = 0; i < n; i++) {
        const LoraPart& part = parts(q, row)[i];
        const int64_t at = y_column - part.first;
        const bool in = live && at >= 0 && at < part.columns;
        if (const unsigned mask = __ballot_sync(~0u, in)) {
          uint8_t* const here = cached(used, __popc(mask) * 4 * padded(part));
          of_part(part, in ? at : -1, tile, here ? here + __popc(mask & ((1u << (lane & ~3)) - 1)) * 4 * padded(part) : nullptr);
        }
        tile += padded(part) / 16;
      }
      done(live, place(q, p, s) + half_strip);
    }
  }

  // Stored row of a lane's j-th number of x. Two lanes share them.
  __device__ __forceinline__ int stored_row(int j) const {
    return chunk * kLoraChainTask + (lane >> 3) * 32 + 2 * (lane >> 1 & 3) + (j & 1) + (j >> 1 & 1) * 8 + (j >> 2) * 16;
  }
  // Finds a task's rows of a and brings them to the cache, where that has room.
  __device__ __forceinline__ void fetch(int task, int& used) {
    const int of_rows = task / chunks();
    chunk = task - of_rows * chunks(), m = of_rows % rows, column = of_rows / rows * 16;
    from = nullptr;
    int width = 0;
#pragma unroll 1
    for (int i = 0, first = column; column < L.width && i < count(0, m); i++) {
      const LoraPart& part = parts(0, m)[i];
      if (first < padded(part)) {
        from = part.a + first, width = padded(part);
        break;
      }
      first -= padded(part);
    }
    if (!from) column = -1;
    if (!from) return;
    uint8_t* const to = cached(used, kLoraChainTask * 32);
    if (has_rows())
#pragma unroll
      for (int j = 0; j < 8; j++) {
        at[j] = (L.features ? __ldg(L.features + stored_row(j)) : stored_row(j)) * width + 8 * (lane & 1);
        take16(to ? to + (j * 32 + lane) * 16 : nullptr, from + at[j]);
      }
    if (to) from = nullptr;
  }
  // Whether the matrix has this lane's rows of the task: its rows come in 32s.
  __device__ __forceinline__ bool has_rows() const { return stored_row(0) < C.gemm[0].width; }

  // x a of the first GEMM: this CTA's tasks.
  __device__ __forceinline__ void shrink() {
#pragma unroll 1
    for (int task = C.grid - 1 - block;;) {
      if (column >= 0) multiply(C.gemm[0].a.x + static_cast<size_t>(m) * C.gemm[0].a.x_stride);
      task += C.grid;
      if (task >= L.width / 16 * rows * chunks()) return;
      int used = L.cache_bytes;
      fetch(task, used);
    }
  }
  __device__ __forceinline__ void multiply(const half* x) const {
    float y[8] = {};
    if (has_rows()) {
      const uint4 v = ld_relaxed(x + chunk * kLoraChainTask + (lane >> 1) * 8);
      const uint32_t xs[4] = {v.x, v.y, v.z, v.w};
      const auto* const here = reinterpret_cast<const uint4*>(shared + L.cache) + lane;
      uint4 a[8];
#pragma unroll
      for (int j = 0; j < 8; j++) a[j] = from ? __ldg(reinterpret_cast<const uint4*>(from + at[j])) : here[j * 32];
#pragma unroll
      for (int j = 0; j < 8; j++) lora_multiply(j & 1 ? high(xs[j / 2]) : first(xs[j / 2]), a[j], y);
    }
    put(y, sums_of(0, m) + column);
  }
  // Adds what the lanes have of 16 columns: every other lane the first eight, the others the second.
  __device__ __forceinline__ void put(float (&y)[8], unsigned long long* to) const {
    __syncwarp();
    lora_halve<4>(y, lane, 16), lora_halve<2>(y, lane, 8), lora_halve<1>(y, lane, 4);
    y[0] += __shfl_xor_sync(~0u, y[0], 2);
    if (!(lane & 2)) LoraSum::add(to + 8 * (lane & 1) + (lane >> 4) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1), y[0]);
  }
  static __device__ __forceinline__ float first(uint32_t w) { return __half2float(__ushort_as_half(static_cast<uint16_t>(w))); }
  static __device__ __forceinline__ float high(uint32_t w) { return __half2float(__ushort_as_half(static_cast<uint16_t>(w >> 16))); }

  // This CTA's share of x a of GEMM q, of what its epilogue of the GEMM before has left in `adds`. A lane takes a row of every strip and
  // 8 columns.
  __device__ __forceinline__ void contribute(int q) const {
    const GemmArgs& A = C.gemm[q - 1].a;
    const int strip0 = first_strip(A, block, 0), own = own_strips(A, 0);
    int used = 0;
    each_a(q, used, [&](const LoraPart& part, int row, int tile, const uint16_t* a, const uint8_t* here) {
      const int width = padded(part);
#pragma unroll 1
      for (int begin = 0; begin < width; begin += 16, tile++) {
        float y[8] = {};
#pragma unroll 2
        for (int s = 0; s < own; s++) {
          const int k = (strip0 + s * A.grid) * 16 + (lane >> 1), at = begin + 8 * (lane & 1);
          if (k >= A.part[0].outputs) continue;
          const uint16_t* const p =
              here ? reinterpret_cast<const uint16_t*>(here) + (s * 16 + (lane >> 1)) * width + at : a + k * width + at;
          lora_multiply(adds()[(place(q - 1, 0, s) + (lane >> 1)) * rows + row], *reinterpret_cast<const uint4*>(p), y);
        }
        put(y, sums_of(q, row) + tile * 16);
      }
    });
    __syncwarp();
  }

  // What the epilogue of GEMM q adds, into shared memory.
  __device__ __forceinline__ void expand(int q) const {
    const auto& P = C.gemm[q];
    int used = b_at;
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
      int width = 0;
#pragma unroll 1
      for (int i = 0; i < count(q, row); i++) width += padded(parts(q, row)[i]);
      if (!width)
        for (int i = lane; i < P.rounds * P.a.num_parts * P.strips * 16; i += 32) adds()[i * rows + row] = 0.f;
      gather(q, row, width);
      if (row == 0) async_wait<0>();
      __syncwarp();
      float y[8] = {};
      each_b(
          q, row, used, [&](const LoraPart& part, int64_t at, int tile, const uint8_t* here) { multiply_b(part, at, tile, here, y); },
          [&](bool live, int to) {
            lora_halve<4>(y, lane, 2), lora_halve<2>(y, lane, 1);
            to += 4 * (lane >> 1 & 1) + 2 * (lane & 1);
            if (live) adds()[to * rows + row] = y[0], adds()[(to + 1) * rows + row] = y[1];
#pragma unroll
            for (float& v : y) v = 0.f;
          });
      __syncwarp();
    }
  }
  // The sums of a row, scaled.
  __device__ __forceinline__ void gather(int q, int row, int width) const {
    const unsigned all = q ? min(C.grid, C.gemm[q - 1].a.part[0].strips) : chunks();  // CTAs or tasks that add
    const unsigned long long* const from = sums_of(q, row);
#pragma unroll 1
    for (int c = lane; c < width; c += 64) {
      unsigned long long v[2];
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (c + 32 * j < width) v[j] = ld_relaxed(from + c + 32 * j);
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (const int at = c + 32 * j; at < width) {
          while (!LoraSum::has(v[j], all)) v[j] = ld_relaxed(from + at);
          low()[at] = LoraSum::of(v[j]) * scales(row)[at];
        }
    }
  }
  // y += low b, of 8 columns; this lane: every 4th rank.
  __device__ __forceinline__ void multiply_b(const LoraPart& part, int64_t at, int tile, const uint8_t* here, float (&y)[8]) const {
    const auto* const b = reinterpret_cast<const uint16_t*>(here ? reinterpret_cast<const void*>(here) : part.b + at);
    const int64_t stride = here ? 8 : part.columns;
#pragma unroll 1
    for (int r0 = lane & 3; at >= 0 && r0 < part.rank; r0 += 16)
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (const int r = r0 + 4 * j; r < part.rank)
          lora_multiply(low()[tile * 16 + r], *reinterpret_cast<const uint4*>(b + r * stride), y);
    __syncwarp();
  }
};

// What a kernel is made with: adapters, or none, which is no code at all. Adds: what the epilogue adds, [output of the CTA][row]; what it
// stores takes its place. kArrivals: at kFactorsReady.
struct WithLora {
  struct Adds {
    float* at;
    __device__ __forceinline__ float to(float v, int place) const { return v + at[place]; }
    __device__ __forceinline__ void keep(half stored, int place) const { at[place] = __half2float(stored); }
  };
  static constexpr int kArrivals = 1 + kWarpArrivals;
  const LoraChain& L;
  __device__ __forceinline__ Adds adds(uint8_t* shared, int first) const { return {reinterpret_cast<float*>(shared + L.adds) + first}; }
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
    __device__ __forceinline__ void keep(half, int) const {}
  };
  static constexpr int kArrivals = 1;
  __device__ __forceinline__ Adds adds(uint8_t*, int) const { return {}; }
  template <class Args>
  __device__ __forceinline__ void run(const Args&, uint8_t*, uint64_t*, uint64_t*, uint64_t*, int, int) const {}
  __device__ __forceinline__ void count() const {}
};
#endif

}  // namespace exl2nb
