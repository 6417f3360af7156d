// The matrix product of steps of many tokens.
#pragma once
#include "gemv.h"

namespace exl2nb {

constexpr int kFewTokens = kMaxTokens;  // as many go through the decode path's product
constexpr int kManyTokens = 64;             // of a launch

// Whether many_launch does the product of `a` on this GPU; and whether it wants a wide input (fragment.cuh).
bool many_takes(const GemvArgs& a);
bool many_wide(const GemvArgs& a);
// Tokens for which a step of `tokens` needs inputs.
inline int many_room(int tokens) { return tokens > kWideTokens / 2 ? (tokens + kWideTokens - 1) / kWideTokens * kWideTokens : tokens; }
// Partial squares of a token that a product leaves which adds to the residual; 0: it cannot do that.
int many_squares(const GemvArgs& a);
// out = x times the matrix, plus bias; or, without out, the residual += that, as GemvArgs says. A token's bits depend on the number of tokens of the launch. wide: how x lies.
const char* many_launch(const GemvArgs& a, bool wide, cudaStream_t stream, bool pdl);

}  // namespace exl2nb
