// The routed MLP: a router picks experts for every row, only their weights are read. Raw pointers, no torch, no checks.
#pragma once
#include "engine.h"

namespace exl2nb {

struct Experts {
  const uint8_t* router;  // blob (H, count)
  const int64_t* table;   // (count, 2): addresses of each expert's blobs [gate; up] (H, 2 I) and down (I, H)
  int count, top_k;
  float renormalize;  // the chosen weights are divided by their norm of this order; 0: they stay
  int activation;
  const uint8_t *shared_up, *shared_down, *shared_gate;  // an expert that every row visits, times a sigmoid (H, 1); or null
  Norm post;                                             // of the sum; null weight: none
  float scale;
};

// x (T, H) += scale * post(sum over the chosen experts of weight * down(act(gate) * up) + shared), all of norm(x).
// chosen (T, top_k): the experts, by falling weight; of equal ones the first.
// A row's experts are added in the order of their numbers, so its result does not depend on the rows beside it.
void routed_mlp(float* x, int T, Norm norm, const Experts& experts, int32_t* chosen);

}  // namespace exl2nb
