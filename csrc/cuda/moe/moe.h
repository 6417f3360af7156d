// The sparse MLP of a decode step, without the host knowing what was chosen, in two launches. The product in front, whose outputs the
// router reads, multiplies them with it on the way (router.cuh); where it cannot, the router is a product of its own. Then come the first
// products of all (token, expert) pairs: every CTA makes the token's normed row and ranks the router's logits itself, so that nothing has
// to be handed on. Then all second ones: a CTA owns columns of the residual and goes through the token's experts in the order of their
// numbers, so it adds to the residual and leads on to the next matrix as the product of a plain layer does (skinny_gemm.cuh). It finds out
// what was chosen, and fetches its first weights, beside the first products.
//
// An expert that every token visits stands as one more pair, behind the chosen ones. A pair is one row, so nothing about a token depends on
// the tokens beside it. A table per kind of matrix, on the device, says where each expert's matrix lies; its kernels pick by number.
#pragma once
#include <cstdint>

#include "cuda/gemm/skinny/skinny_gemm.h"

namespace exl2nb {

struct ExpertMatrix {
  GemmPart part[2];
  const uint8_t* image;
  const int* inverse[2];
  int num_parts, strips, items, units, num_perms, inputs;
};
// Followed by its matrices; what stands here is for the host: the largest values over all of them.
struct ExpertTable {
  int32_t count, num_perms, stride, image, outputs;
  int32_t item, alike;  // bytes of an item; how many of the first matrices have the same items
  int32_t reserved[9];
  const ExpertMatrix* matrices() const { return reinterpret_cast<const ExpertMatrix*>(this + 1); }
};
static_assert(sizeof(ExpertTable) == 64 && sizeof(ExpertMatrix) == 144, "table layout");

// Bytes that a ROUTED op (csrc/cpu/step.h) needs for `tokens` tokens; its room begins with what the router leaves.
// The word `table` is the address of four int64: the table of first matrices on the host and on the device, then that of second ones.
size_t routed_bytes(const int64_t* words, const GpuHeader& router, int tokens);
// How a product that adds to the residual also multiplies with the router `head`, `blob` of the op; false: it cannot.
bool router_tap(const int64_t* words, const uint8_t* head, const uint8_t* blob, float* out, RouterTap& tap);
// From one token's logits to the next in the op's room, of a router that is a product of its own.
int64_t router_stride(const GpuHeader& router);
// The second products as one matrix of a token, for which the caller says where its results go.
GemmArgs routed_down(const int64_t* words);
// What follows the router. tapped: it was part of the product in front; otherwise its own, which was `late` (skinny_gemm.cuh). from: the
// rows that the router read; down: see routed_down.
const char* routed_launch(const int64_t* words, const GpuHeader& router, bool tapped, const RowSource& from, uint8_t* room,
                          const GemmArgs& down, int tokens, int capacity, cudaStream_t stream, bool pdl);

}  // namespace exl2nb
