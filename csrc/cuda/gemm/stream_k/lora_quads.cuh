// Adapters inside a stream-K GEMM: y += (scale * (x a)) b without a launch of its own.
//
// Shrink: before a consumer warp multiplies anything. Task = 8 rows of the step, 32 inputs, 8 columns of a: lanes 4 t to 4 t + 3 have row
// t, 8 inputs each. a comes to registers before x exists; the GEMM before has brought it to the L2 cache. sums[row][width] are LoraSums,
// two sets by turns; a launch clears the other one.
// Expand: a warp that finishes a strip and 8 rows adds the sums, once they are complete, times its 16 columns of b, ahead of the norm
// factor. b is in the L2 cache and what describes it in the L1 cache by then.
// Bytes: a and b once per row, rows with the same adapter from L2. Limits: LoraTable.fits_inside of ops/lora.py, all CTAs resident at once.
#pragma once
#include "cuda/gemm/lora.h"
#include "cuda/runtime/lamport.cuh"
#include "cuda/runtime/pdl.cuh"

namespace exl2nb {

constexpr int kLoraTask = 32;  // inputs

struct StreamKLora {
  LoraRows of, next;   // next: of the next matrix, whose a is fetched; changes null: none
  const int* inverse;  // of the input (MatrixInput)
  int K, next_K, width;
  unsigned long long *sums, *other;  // of this launch; of the next one
};
// Numbers of a set; most inputs.
inline int64_t lora_stream_k_set(int64_t width) { return kLoraRows * width; }
constexpr int64_t kLoraStreamKMost = int64_t(kLoraMostAdded) * kLoraTask;

#ifdef __CUDACC__
// What a kernel is made with: adapters, or none, which is no code.
struct NoQuads {
  static constexpr bool kAny = false;
};
struct LoraQuads {
  static constexpr bool kAny = true;
  const StreamKLora& L;

  static __device__ __forceinline__ int padded(const LoraPart& p) { return static_cast<int>(p.rank + 15) & ~15; }
  // This CTA's share of a row's matrices b, or a (K: its rows), into the L2 cache, by one warp, unless an earlier row brings the same.
  static __device__ __forceinline__ void prefetch(const LoraRows& of, int row, int K, int lane) {
#if __CUDA_ARCH__ >= 900
    const LoraChange* const change = of.of(row);
    bool known = !change;
    for (int other = lane; other < row; other += 32) known |= of.of(other) == change;
    if (__any_sync(~0u, known) || lane >= change->num_parts) return;
    const LoraPart& part = change->parts[lane];
    const unsigned all = (K ? K * padded(part) : static_cast<int>(part.rank * part.columns)) / 8, each = (all + gridDim.x - 1) / gridDim.x,
                   from = blockIdx.x * each;  // in 16 bytes
    if (from < all)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(reinterpret_cast<const uint4*>(K ? part.a : part.b) + from),
                   "r"(min(each, all - from) * 16)
                   : "memory");
#endif
  }
  // What the tokens' adapters have here, near for the epilogue; returns the widest change.
  __device__ __forceinline__ int touch(int tokens, int lane) const {
    int width = 0;
#pragma unroll 1
    for (int row = lane; row < tokens; row += 32)
      if (const LoraChange* const change = L.of.of(row)) {
        width = max(width, static_cast<int>(__ldg(reinterpret_cast<const long long*>(&change->width))));
#pragma unroll 1
        for (int i = 0; i < change->num_parts; i++) prefetch_word(change->parts[i].scale), prefetch_word(&change->parts[i].columns);
      }
#if __CUDA_ARCH__ >= 800
    width = __reduce_max_sync(~0u, width);
#endif
    return width;
  }

  // What is added, in the order of a Quad (stream_k_gemm.cuh), to 16 columns of y from `column` on and 8 rows from `first` on. Called by
  // whole warps. Lane 4 t + 2 h + b takes row t, columns 8 h to 8 h + 7 and every other rank from b on.
  __device__ __forceinline__ float4 of(int first, int tokens, int64_t column, int lane) const {
    const int row = first + (lane >> 2), odd = lane & 1;
    const LoraChange* const change = row < tokens ? L.of.of(row) : nullptr;
    const unsigned long long* sums = L.sums + static_cast<int64_t>(row) * L.width;
    const unsigned tasks = (L.K + kLoraTask - 1) / kLoraTask;
    float y[8] = {};
#pragma unroll 1
    for (int i = 0; change && i < change->num_parts; i++) {
      const LoraPart part = change->parts[i];
      const int64_t at = column + 8 * (lane >> 1 & 1) - part.first;
      if (at >= 0 && at < part.columns) {
        constexpr int kTogether = 4;  // loads in flight
#pragma unroll 1
        for (int r0 = odd; r0 < part.rank; r0 += 2 * kTogether) {
          uint4 b[kTogether];
          unsigned long long s[kTogether];
          float scale[kTogether];
#pragma unroll
          for (int j = 0; j < kTogether; j++) {
            const int r = min(r0 + 2 * j, static_cast<int>(part.rank) - 1);
            s[j] = ld_relaxed(sums + r);
            b[j] = __ldg(reinterpret_cast<const uint4*>(part.b + r * part.columns + at));
            scale[j] = r0 + 2 * j < part.rank ? __ldg(part.scale + r) : 0.f;
          }
#pragma unroll
          for (int j = 0; j < kTogether; j++) {
            while (!LoraSum::has(s[j], tasks)) s[j] = ld_relaxed(sums + min(r0 + 2 * j, static_cast<int>(part.rank) - 1));
            lora_multiply(LoraSum::of(s[j]) * scale[j], b[j], y);
          }
        }
      }
      sums += padded(part);
    }
    __syncwarp();
    lora_halve<4>(y, lane, 1);  // lane 4 t + q then has columns 4 q to 4 q + 3
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int from = 4 * (2 * (lane & 3) + (k & 1)) + (lane >> 4) + 2 * (k >> 1);
#pragma unroll
      for (int n = 0; n < 4; n++)
        if (const float some = __shfl_sync(~0u, y[n], from); n == (lane >> 2 & 3)) v[k] = some;
    }
    return {v[0], v[1], v[2], v[3]};
  }
};

// The shrink of a consumer warp. Args: StreamKArgs; group: rows of a group of the input.
template <class Args>
struct LoraShrink {
  const Args& A;
  const StreamKLora& L;
  int group, lane, chunks, task;
  uint4 a[8];
  int place[8], token, column;  // column: negative for none

  __device__ __forceinline__ LoraShrink(const Args& args, const LoraQuads& quads, int rows, int thread)
      : A(args), L(quads.L), group(rows), lane(thread), chunks((L.K + kLoraTask - 1) / kLoraTask) {}

  // This warp's tasks. ready: what comes before their inputs are read, griddepcontrol.wait among it. Once in the code, as code that runs
  // once stalls on instruction fetch.
  template <class Ready>
  __device__ __forceinline__ void run(int warp, int warps, Ready&& ready) {
    const int tasks = LoraQuads{L}.touch(A.tokens, lane) / 8 * ((A.tokens + 7) / 8) * chunks;
    task = static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x);
    bool waited = false;
#pragma unroll 1
    do {
      column = -1;
      if (task < tasks) load();
      if (!waited) {
#pragma unroll 1
        for (int i = warp; i < 2 * A.tokens; i += warps)
          if (!(i & 1) || L.next.changes) LoraQuads::prefetch(i & 1 ? L.next : L.of, i / 2, i & 1 ? L.next_K : 0, lane);
        __syncwarp();
        ready();
        waited = true;
      }
      if (task < tasks) multiply();
      task += static_cast<int>(gridDim.x) * warps;
    } while (task < tasks);
    auto* const to = reinterpret_cast<uint4*>(L.other);  // the next launch's sums become zero
    for (int i = (static_cast<int>(blockIdx.x) * warps + warp) * 32 + lane; i < kLoraRows * L.width / 2;
         i += static_cast<int>(gridDim.x) * warps * 32)
      to[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void load() {
    const int blocks = (A.tokens + 7) / 8, of_rows = task / chunks;
    const int wanted = of_rows / blocks * 8, k = (task - of_rows * chunks) * kLoraTask + 8 * (lane & 3);
    token = of_rows % blocks * 8 + (lane >> 2);
    const LoraChange* const change = token < A.tokens ? L.of.of(token) : nullptr;
    const uint16_t* from = nullptr;
    int stride = 0;
#pragma unroll 1
    for (int i = 0, left = wanted; change && i < change->num_parts; i++) {
      const LoraPart& part = change->parts[i];
      stride = LoraQuads::padded(part);
      if (left < stride) {
        from = part.a + left, column = wanted;
        break;
      }
      left -= stride;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const bool has = from && k + j < L.K;
      a[j] = has ? __ldg(reinterpret_cast<const uint4*>(from + static_cast<int64_t>(k + j) * stride)) : uint4{0, 0, 0, 0};
      place[j] = has ? row_place(group, L.inverse ? __ldg(L.inverse + k + j) : k + j) : 0;
    }
    token = min(token, A.tokens - 1);
  }
  __device__ __forceinline__ void multiply() const {
    const half* const x = A.x + token_place(group, A.x_stride, token);
    float y[8] = {};
    uint16_t v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = __ldcg(reinterpret_cast<const uint16_t*>(x) + place[j]);
#pragma unroll
    for (int j = 0; j < 8; j++) lora_multiply(__half2float(__ushort_as_half(v[j])), a[j], y);
    __syncwarp();
    lora_halve<4>(y, lane, 2), lora_halve<2>(y, lane, 1);
    if (column >= 0) {
      auto* const to = L.sums + static_cast<int64_t>(token) * L.width + column + 4 * (lane >> 1 & 1) + 2 * (lane & 1);
      LoraSum::add(to, y[0]), LoraSum::add(to + 1, y[1]);
    }
  }
};
#endif

}  // namespace exl2nb
