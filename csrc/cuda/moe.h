// The sparse MLP of a decode step, without the host knowing what was chosen. Behind the router's product there are two launches. Of all
// (token, expert) pairs the first products: every CTA makes the token's normed row while the router works, and ranks its logits itself, so
// that nothing has to be handed on. Then all second ones: a CTA owns columns of the residual and goes through the token's experts in the
// order of their numbers, so it adds to the residual and leads on to the next matrix as the product of a plain layer does (gemv.cuh). It
// finds out what was chosen, and fetches its first weights, beside the first products.
//
// An expert that every token visits stands as one more pair, behind the chosen ones. A pair is one row, so nothing about a token depends on
// the tokens beside it. A table per kind of matrix, on the device, says where each expert's matrix lies; its kernels pick by number.
#pragma once
#include <cstdint>

#include "gemv.h"

namespace exl2nb {

struct ExpertMatrix {
  GemvPart part[2];
  const uint8_t* image;
  const int* inverse[2];
  int num_parts, strips, items, units, num_perms, inputs;
};
// Followed by its matrices; what stands here is for the host: the largest values over all of them.
struct ExpertTable {
  int32_t count, num_perms, stride, image, outputs, reserved[11];
  const ExpertMatrix* matrices() const { return reinterpret_cast<const ExpertMatrix*>(this + 1); }
};
static_assert(sizeof(ExpertTable) == 64 && sizeof(ExpertMatrix) == 144, "table layout");

// Bytes that a ROUTED op (csrc/cpu/step.h) needs for `tokens` tokens; its room begins with the router's logits (tokens, outputs) f32.
// The word `table` is the address of four int64: the table of first matrices on the host and on the device, then that of second ones.
size_t routed_bytes(const int64_t* words, int64_t router_outputs, int tokens);
// The second products as one matrix of a token, for which the caller says where its results go.
GemvArgs routed_down(const int64_t* words);
// What follows the router's product `router`, whose output was the beginning of the op's room and which was `late` (gemv.cuh). from: the
// rows that the router read; down: see routed_down.
const char* routed_launch(const int64_t* words, const RowSource& from, const GemvArgs& router, const GemvArgs& down, int capacity,
                          cudaStream_t stream, bool pdl);

}  // namespace exl2nb
