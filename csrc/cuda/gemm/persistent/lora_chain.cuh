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
  int width, set;                                   // stride of the sums: widest change; numbers of a set
  int parts, gemms, low, adds, cache, cache_bytes;  // offsets in shared memory
  int most_strips;                                  // of a CTA and a GEMM
};
// Numbers of a set.
inline int64_t lora_chain_set(int64_t width) { return kLoraChainGemms * kLoraChainRows * width; }
// Bytes of shared memory for the parts of so many rows, and places in them.
EXL2NB_BOTH constexpr int lora_counts_bytes(int rows) { return (kLoraChainGemms * rows * 4 + 15) / 16 * 16; }
EXL2NB_BOTH constexpr int lora_parts_bytes(int rows) {
  return lora_counts_bytes(rows) + kLoraChainGemms * rows * kLoraChainParts * static_cast<int>(sizeof(LoraPart));
}

#if __CUDA_ARCH__ >= 900
// What the warp needs to know of a GEMM, in shared memory: kernel parameters would stall on the constant cache.
struct LoraChainGemm {
  int strips, own;     // of this CTA, in all parts; of its first part
  int outputs;         // of the first part
  unsigned additions;  // to each of its sums
};
struct LoraChainStrip {
  int column, place;  // of y; among the CTA's outputs
};
// Values of four places of k at a lane of an MMA.
__device__ __forceinline__ int lora_place(int lane, int i) { return 2 * (lane & 3) + (i & 1) + 8 * (i >> 1); }

// The warp. Args: PersistentArgs. Products are those of one row: its values stand in all eight columns of the MMA.
template <class Args>
struct LoraWarp {
  const Args& C;
  const LoraChain& L;
  uint8_t* shared;
  int rows, block, lane, width;
  unsigned long long* sums;  // of this launch
  int b_at;                  // place of b in the cache, behind a
  // The task: row, chunk, first of its columns of all parts', negative for none.
  int m, chunk, column, a_width;
  const uint16_t* from;  // its columns of a; null: in the cache

  __device__ __forceinline__ LoraWarp(const Args& args, const LoraChain& lora, uint8_t* smem, int cta, int thread)
      : C(args), L(lora), shared(smem), rows(args.gemm[0].a.tokens), block(cta), lane(thread), width(lora.width), sums(nullptr), b_at(0) {}

  __device__ __forceinline__ int& count(int q, int row) const { return reinterpret_cast<int*>(shared + L.parts)[q * rows + row]; }
  __device__ __forceinline__ LoraPart* parts(int q, int row) const {
    return reinterpret_cast<LoraPart*>(shared + L.parts + lora_counts_bytes(rows)) + (q * rows + row) * kLoraChainParts;
  }
  __device__ __forceinline__ LoraChainGemm& gemm(int q) const { return reinterpret_cast<LoraChainGemm*>(shared + L.gemms)[q]; }
  __device__ __forceinline__ LoraChainStrip* strips(int q) const {
    return reinterpret_cast<LoraChainStrip*>(shared + L.gemms + kLoraChainGemms * sizeof(LoraChainGemm)) + q * L.most_strips;
  }
  // Scaled sums over the largest of each 16 of them; those; the rows' scales.
  __device__ __forceinline__ half* low() const { return reinterpret_cast<half*>(shared + L.low); }
  __device__ __forceinline__ float* most() const { return reinterpret_cast<float*>(shared + L.low + 2 * width); }
  __device__ __forceinline__ float* scales(int row) const { return reinterpret_cast<float*>(shared + L.low) + (1 + row) * width; }
  __device__ __forceinline__ float* adds() const { return reinterpret_cast<float*>(shared + L.adds); }
  static __device__ __forceinline__ int padded(const LoraPart& p) { return static_cast<int>(p.rank + 15) & ~15; }
  __device__ __forceinline__ int chunks() const { return (C.gemm[0].width + kLoraChainTask - 1) / kLoraChainTask; }
  __device__ __forceinline__ unsigned long long* sums_of(int q, int row) const { return sums + (q * kLoraChainRows + row) * width; }
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
      if (q + 1 < C.count) plan(q + 1), bring(q + 1);
      if (q == 0 && C.count > 1) clear();
    }
  }
  // Before griddepcontrol.wait: the parts of all rows and GEMMs, the CTA's strips, and what the first GEMM needs.
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
    plan(0);
    bring(0);
  }
  // This CTA's strips of GEMM q.
  __device__ __forceinline__ void plan(int q) const {
    const GemmArgs& A = C.gemm[q].a;
    int all = 0;
#pragma unroll 1
    for (int p = 0; p < A.num_parts; p++) {
      const int own = own_strips(A, p);
      for (int s = lane; s < own; s += 32)
        strips(q)[all + s] = {A.part[p].first_column + (first_strip(A, block, p) + s * A.grid) * 16, place(q, p, s)};
      all += own;
    }
    // CTAs or tasks that add.
    const int adders = q ? min(C.grid, C.gemm[q - 1].a.part[0].strips) : chunks();
    if (lane == 0) gemm(q) = {all, own_strips(A, 0), A.part[0].outputs, static_cast<unsigned>(adders)};
    __syncwarp();
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
      each_a(q, used, [&](const LoraPart& part, int, int, uint8_t* to) {
        const int pieces = 2 * padded(part), own = gemm(q - 1).own, end = gemm(q - 1).outputs * pieces / 16;  // of a strip
#pragma unroll 1
        for (int s = 0; s < own; s++)
#pragma unroll 1
          for (int i = lane; i < pieces; i += 32)
            if (const int at = strips(q - 1)[s].column / 16 * pieces + i; at < end)
              take16(to ? to + (s * pieces + i) * 16 : nullptr, part.a + at * 8);
      });
    async_commit();
    b_at = used;
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
      each_b(
          q, row, used,
          [&](const LoraPart& part, int at, int, uint8_t* to) {
#pragma unroll 1
            for (int i = lane; i < 2 * part.rank; i += 32)
              if (const int here = at + 8 * (i & 1); here >= 0 && here < part.columns)
                take16(to ? to + i * 16 : nullptr, part.b + (i >> 1) * part.columns + here);
          },
          [](int) {});
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
  // f(part, row, first tile, where the CTA's rows of a are or null): of all rows of the step.
  template <class F>
  __device__ __forceinline__ void each_a(int q, int& used, F&& f) const {
    const int own = gemm(q - 1).own;
#pragma unroll 1
    for (int row = 0; row < rows; row++)
#pragma unroll 1
      for (int i = 0, tile = 0; own && i < count(q, row); i++) {
        const LoraPart& part = parts(q, row)[i];
        f(part, row, tile, cached(used, own * 32 * padded(part)));
        tile += padded(part) / 16;
      }
  }
  // of_part(part, the strip's first column in it, first tile, where its b is or null) for the parts of a strip, then done(its place).
  template <class Part, class Done>
  __device__ __forceinline__ void each_b(int q, int row, int& used, Part&& of_part, Done&& done) const {
    const int n = count(q, row), all = n ? gemm(q).strips : 0;
#pragma unroll 1
    for (int s = 0; s < all; s++) {
      const LoraChainStrip strip = strips(q)[s];
#pragma unroll 1
      for (int i = 0, tile = 0; i < n; i++) {
        const LoraPart& part = parts(q, row)[i];
        const int at = strip.column - static_cast<int>(part.first);
        if (at > -16 && at < part.columns) of_part(part, at, tile, cached(used, 32 * padded(part)));
        tile += padded(part) / 16;
      }
      done(strip.place);
    }
  }

  __device__ __forceinline__ int feature(int stored) const { return L.features ? __ldg(L.features + stored) : stored; }
  // Finds a task's rows of a and brings them to the cache, where that has room.
  __device__ __forceinline__ void fetch(int task, int& used) {
    const int of_rows = task / chunks();
    chunk = task - of_rows * chunks(), m = of_rows % rows, column = of_rows / rows * 16;
    from = nullptr;
#pragma unroll 1
    for (int i = 0, first = column; column < width && i < count(0, m); i++) {
      const LoraPart& part = parts(0, m)[i];
      if (first < padded(part)) {
        from = part.a + first, a_width = padded(part);
        break;
      }
      first -= padded(part);
    }
    if (!from) column = -1;
    if (!from) return;
    uint8_t* const to = cached(used, kLoraChainTask * 32);
    if (!to) return;
#pragma unroll
    for (int j = 0; j < kLoraChainTask / 16; j++) {
      const int stored = chunk * kLoraChainTask + 16 * j + (lane >> 1);
      if (stored < C.gemm[0].width) copy16<true>(to + (j * 32 + lane) * 16, from + feature(stored) * a_width + 8 * (lane & 1));
    }
    from = nullptr;
  }

  // x a of the first GEMM: this CTA's tasks.
  __device__ __forceinline__ void shrink() {
#pragma unroll 1
    for (int task = C.grid - 1 - block;;) {
      if (column >= 0) multiply(C.gemm[0].a.x + static_cast<size_t>(m) * C.gemm[0].a.x_stride);
      task += C.grid;
      if (task >= width / 16 * rows * chunks()) return;
      int used = L.cache_bytes;
      fetch(task, used);
    }
  }
  // Rows come in 32s.
  __device__ __forceinline__ void multiply(const half* x) const {
    constexpr int kBlocks = kLoraChainTask / 32;
    const int first = chunk * kLoraChainTask, left = C.gemm[0].width - first;
    x += first + 8 * (lane & 3);
    float y[4] = {};
    if (!from) {
      uint4 v[kBlocks];
#pragma unroll
      for (int j = 0; j < kBlocks; j++) v[j] = 32 * j < left ? ld_relaxed(x + 32 * j) : make_uint4(0, 0, 0, 0);
      const uint16_t* const a = reinterpret_cast<const uint16_t*>(shared + L.cache) + lora_place(lane, 0) * 16;
#pragma unroll
      for (int j = 0; j < kBlocks; j++)
        if (32 * j < left) multiply(y, v[j], [&](int h, int i) { return two(a + (32 * j + 16 * h + lora_place(0, i)) * 16, lane); });
    } else {
#pragma unroll 1
      for (int j = 0; j < min(left, kLoraChainTask); j += 32)
        multiply(y, ld_relaxed(x + j),
                 [&](int h, int i) { return two(from + feature(first + j + 16 * h + lora_place(lane, i)) * a_width, lane); });
    }
    put(y, sums_of(0, m) + column);
  }
  // 32 rows.
  template <class F>
  __device__ __forceinline__ void multiply(float (&y)[4], const uint4& x, F&& a) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t w[4] = {a(h, 0), a(h, 1), a(h, 2), a(h, 3)};
      lora_mma(y, w, h ? x.z : x.x, h ? x.w : x.y);
    }
  }
  // A lane's two of 16 columns.
  static __device__ __forceinline__ uint32_t two(const uint16_t* row, int lane) {
    return *reinterpret_cast<const uint32_t*>(row + 2 * (lane >> 2));
  }
  // Adds 16 columns.
  __device__ __forceinline__ void put(const float (&y)[4], unsigned long long* to) const {
    if ((lane & 3) < 2) LoraSum::add(to + 2 * (lane >> 2) + (lane & 1), lane & 1 ? y[2] : y[0]);
  }

  // This CTA's share of x a of GEMM q, of what its epilogue of the GEMM before has left in `adds`.
  __device__ __forceinline__ void contribute(int q) const {
    const int own = gemm(q - 1).own, outputs = gemm(q - 1).outputs;
    int used = 0;
    each_a(q, used, [&](const LoraPart& part, int row, int tile, const uint8_t* here) {
      const int a_columns = padded(part);
#pragma unroll 1
      for (int begin = 0; begin < a_columns; begin += 16, tile++) {
        float y[4] = {};
#pragma unroll 1
        for (int s = 0; s < own; s++) {
          const LoraChainStrip strip = strips(q - 1)[s];
          const uint16_t* const a =
              (here ? reinterpret_cast<const uint16_t*>(here) + s * 16 * a_columns : part.a + strip.column * a_columns) + begin;
          uint32_t w[4];
          float x[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int k = lora_place(lane, i);
            const bool has = strip.column + k < outputs;
            w[i] = has ? two(a + k * a_columns, lane) : 0u;
            x[i] = has ? adds()[(strip.place + k) * rows + row] : 0.f;
          }
          lora_mma(y, w, two_halves(x[0], x[1]), two_halves(x[2], x[3]));
        }
        put(y, sums_of(q, row) + tile * 16);
      }
    });
    __syncwarp();
  }
  static __device__ __forceinline__ uint32_t two_halves(float a, float b) {
    const half2 v = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(v);
  }

  // What the epilogue of GEMM q adds, into shared memory.
  __device__ __forceinline__ void expand(int q) const {
    int used = b_at;
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
      int all = 0;
#pragma unroll 1
      for (int i = 0; i < count(q, row); i++) all += padded(parts(q, row)[i]);
      if (!all) {
        const auto& P = C.gemm[q];
        for (int i = lane; i < P.rounds * P.a.num_parts * P.strips * 16; i += 32) adds()[i * rows + row] = 0.f;
        continue;
      }
      gather(q, row, all);
      async_wait<0>();
      __syncwarp();
      float y[4] = {};
      each_b(
          q, row, used,
          [&](const LoraPart& part, int at, int tile, const uint8_t* here) {
            const int own = at + 2 * (lane >> 2), ranks = own >= 0 && own < part.columns ? static_cast<int>(part.rank) : 0;
            const auto* const b = here ? reinterpret_cast<const uint16_t*>(here) : part.b + at;
            const int stride = here ? 16 : static_cast<int>(part.columns);
#pragma unroll 1
            for (int first = 0; first < part.rank; first += 16, tile++) {
              uint32_t w[4], x[2];
#pragma unroll
              for (int i = 0; i < 4; i++) {
                const int r = first + lora_place(lane, i);
                w[i] = r < ranks ? two(b + r * stride, lane) : 0u;
              }
#pragma unroll
              for (int h = 0; h < 2; h++) x[h] = *reinterpret_cast<const uint32_t*>(low() + tile * 16 + lora_place(lane, 2 * h));
              float z[4] = {};
              lora_mma(z, w, x[0], x[1]);
              y[0] = fmaf(z[0], most()[tile], y[0]), y[2] = fmaf(z[2], most()[tile], y[2]);
            }
          },
          [&](int to) {
            if ((lane & 3) < 2) adds()[(to + 2 * (lane >> 2) + (lane & 1)) * rows + row] = lane & 1 ? y[2] : y[0];
            y[0] = y[2] = 0.f;
          });
      __syncwarp();
    }
  }
  // The sums of a row, scaled: halves, as x is not scaled and halves end at 65504, over the largest of their tile.
  __device__ __forceinline__ void gather(int q, int row, int all) const {
    const unsigned additions = gemm(q).additions;
    const unsigned long long* const from = sums_of(q, row);
#pragma unroll 1
    for (int base = 0; base < all; base += 64) {
      unsigned long long v[2];
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (const int at = base + 32 * j + lane; at < all) v[j] = ld_relaxed(from + at);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int at = base + 32 * j + lane;
        float sum = 0.f;
        if (at < all) {
          while (!LoraSum::has(v[j], additions)) v[j] = ld_relaxed(from + at);
          sum = LoraSum::of(v[j]) * scales(row)[at];
        }
        __syncwarp();
        float largest = fabsf(sum);
#pragma unroll
        for (int d = 8; d; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
        if (at < all) low()[at] = __float2half_rn(largest > 1e-30f ? sum * __fdividef(1.f, largest) : 0.f);
        if (at < all && !(lane & 15)) most()[at / 16] = largest;
      }
    }
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
  __device__ __forceinline__ int adds_at() const { return L.adds; }
  __device__ __forceinline__ Adds adds(uint8_t* shared, int at, int first) const { return {reinterpret_cast<float*>(shared + at) + first}; }
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
  __device__ __forceinline__ int adds_at() const { return 0; }
  __device__ __forceinline__ Adds adds(uint8_t*, int, int) const { return {}; }
  template <class Args>
  __device__ __forceinline__ void run(const Args&, uint8_t*, uint64_t*, uint64_t*, uint64_t*, int, int) const {}
  __device__ __forceinline__ void count() const {}
};
#endif

}  // namespace exl2nb
