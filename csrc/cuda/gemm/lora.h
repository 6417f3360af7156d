// Low-rank adapters of a step's rows (format/lora.h): two launches behind a product, or one behind the embedding.
//
// Every row names its adapter in memory, and a table on the device says what the adapter changes in each op. So a captured step stays valid
// while adapters are loaded and unloaded and requests come and go.
#pragma once
#include <cstdint>

#include "cuda/gemm/fragment.cuh"
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
  // Of plan_lora_shrink, instead of y: scaled sums over the chunks, [row][width], and a zero for each 16 of them, which stays one.
  float* low;
  unsigned* arrived;
};

class LaunchList;  // runtime/launches.h
inline int64_t lora_chunks(int64_t K) { return (K + kLoraChunk - 1) / kLoraChunk; }
void plan_lora(LaunchList&, LoraArgs a, int rows);
// In front of a product that adds the rest itself (lora_quads.cuh): low, for at most kLoraRows rows; b is on its way to the L2 cache.
void plan_lora_shrink(LaunchList&, const LoraArgs& a, int rows);

}  // namespace exl2nb
