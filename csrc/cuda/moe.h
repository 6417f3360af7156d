// The sparse MLP of a decode step, without the host knowing what was chosen: the router's logits -> for every token its experts, their
// inputs and weights; one launch for all first products of all (token, expert) pairs, one for all second ones, and one that adds them up.
//
// An expert that every token visits stands as one more pair, behind the chosen ones. A pair is one row, so nothing about a token depends on
// the tokens beside it. A table per kind of matrix, on the device, says where each expert's matrix lies; its kernels pick by number.
#pragma once
#include <cstdint>

#include "elementwise.h"
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
static_assert(sizeof(ExpertTable) == 64, "table layout");

// Bytes that a ROUTED op (csrc/cpu/step.h) needs for `tokens` tokens; its room begins with the router's logits (tokens, outputs) f32.
// The word `table` is the address of four int64: the table of first matrices on the host and on the device, then that of second ones.
size_t routed_bytes(const int64_t* words, int64_t router_outputs, int tokens, int hidden);
// What follows the router's product `router`, whose output was the beginning of `room`. x += the result; `next`: input of the matrix
// behind.
const char* routed_launch(const int64_t* words, const GemvArgs& router, uint8_t* room, int capacity, float* x, int hidden,
                          const NormArgs& next_norm, const MatrixInput& next, cudaStream_t stream, bool pdl);

}  // namespace exl2nb
