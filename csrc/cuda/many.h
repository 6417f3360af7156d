// The matrix product of steps of many tokens. It only stores: what follows it is in kernels of its own.
#pragma once
#include "gemv.h"

namespace exl2nb {

constexpr int kFewTokens = kMaxTokens;  // as many go through the decode path's product
constexpr int kManyTokens = 64;             // of a launch

// Whether many_launch does the product of `a` on this GPU.
bool many_takes(const GemvArgs& a);
// out = x times the matrix, plus bias. A token's bits depend on the number of tokens of the launch.
const char* many_launch(const GemvArgs& a, cudaStream_t stream, bool pdl);

}  // namespace exl2nb
