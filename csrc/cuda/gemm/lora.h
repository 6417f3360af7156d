// Low-rank adapters of a step's rows (format/lora.h): two launches behind a product, or one behind the embedding.
//
// Every row names its adapter in memory, and a table on the device says what the adapter changes in each op. So a captured step stays valid
// while adapters are loaded and unloaded and requests come and go.
#pragma once
#include <cstdint>

#include "cuda/gemm/fragment.cuh"
#include "cuda/runtime/mma.cuh"
#include "format/lora.h"

namespace exl2nb {

constexpr int kLoraThreads = 256, kLoraChunk = 256, kLoraRows = 64;  // of a CTA; inputs of a CTA; rows of a launch

// What the adapters change in one op, by row.
struct LoraRows {
  const LoraChange* changes;  // of adapter 0; those of the next one are `ops` further on, those of the op before one earlier
  int64_t ops;
  const int* adapters;  // by token, -1 for none; null: no adapters at all
  const int* rows;      // the token of each row; null: row r is token r
  int tokens;
#ifdef __CUDACC__
  // Of a row; null: nothing. Only what no kernel of the step writes is read, so it may come before griddepcontrol.wait.
  __device__ __forceinline__ const LoraChange* of(int row) const {
    const int token = rows ? min(max(__ldg(rows + row), 0), tokens - 1) : row;
    const int adapter = __ldg(adapters + token);
    return adapter < 0 ? nullptr : changes + adapter * ops;
  }
#endif
};

// y[row] += gain * (y + parts) + parts + bias, with a row's input x. Of the embedding x is none, and ids choose rows of the parts' a.
// next.x: y stays as it was, and act(gate) * up of [gate; up], or act(y) where not gated, goes there.
struct LoraArgs {
  LoraRows of;
  MatrixInput x;
  int K;
  const int* ids;
  float* sums;  // of x a: [row][chunk of K][width], kLoraRows rows
  int width;    // of the widest change
  float* y;
  int64_t stride;
  int N;
  MatrixInput next;
  int activation;
  bool gated;
};

inline int64_t lora_chunks(int64_t K) { return (K + kLoraChunk - 1) / kLoraChunk; }
const char* lora_launch(LoraArgs a, int rows, void* stream, bool pdl);

// 16 ranks of a part, or fewer, of one row of a step and one op; nothing: all zero.
struct alignas(16) LoraTile {
  const uint16_t* a;        // its first column
  const float* scale;       // of its first rank
  const uint16_t* b;        // its first rank, of column 0 of y
  uint16_t first, columns;  // of b, in eights
  uint8_t rank, width;      // ranks; columns of a, in sixteens
  uint8_t head, fresh;      // first tile of its part; no earlier row has the same adapter
};
// The tiles of all rows and ops, in front of stream-K GEMMs that add the adapters themselves (lora_tiles.cuh): one launch of a step.
struct LoraTilesArgs {
  LoraRows of;      // of op 0
  LoraTile* tiles;  // [op][kLoraRows][stride]
  int* counts;      // of the widest row of each op
  int stride;       // tiles of a row
  uint4* clear;     // becomes zero
  int clear_count;
};
const char* lora_tiles_launch(const LoraTilesArgs& a, void* stream);

#ifdef __CUDACC__
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
// c += A B. w: two neighbouring columns of A^T, in the rows of the four places of k that a lane has.
__device__ __forceinline__ void lora_mma(float (&c)[4], const uint32_t (&w)[4], uint32_t b0, uint32_t b1) {
  mma16816(c, __byte_perm(w[0], w[1], 0x5410), __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x5410),
           __byte_perm(w[2], w[3], 0x7632), b0, b1);
}
#endif

}  // namespace exl2nb
