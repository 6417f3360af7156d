// The exchanges of ranks that are kernels of their own (peers.cuh).
#pragma once
#include "cuda/gemm/fragment.cuh"
#include "cuda/runtime/peers.cuh"

namespace exl2nb {

// Rows of numbers, of which each rank has the columns first[rank] to first[rank + 1] - 1 in x, go to all ranks; sum: every rank has numbers
// for all columns (first[0] to first[1] - 1), and their sums go to all. Into out, or next where next.x.
struct ExchangeArgs {
  Peers peers;
  const float* x;
  int64_t x_stride, out_stride;
  int rows;
  int first[kMaxRanks + 1];
  bool sum;
  float* out;
  MatrixInput next;
};
class LaunchList;  // launches.h
// At most peers.words numbers of a rank.
void plan_exchange(LaunchList&, const ExchangeArgs&);
// Counts the exchanges of a call, as its last kernel.
void plan_exchange_count(LaunchList&, const Peers&, int count);

}  // namespace exl2nb
