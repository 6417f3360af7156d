// Sparse MLP of a decode step in two launches, without the host knowing the routing. The GEMM in front multiplies its outputs with the
// router on the way (router.cuh); where it cannot, the router is a GEMM of its own. expert_up computes norm and routing in every CTA;
// expert_down adds all experts of a token to the residual and writes the next input, as skinny_gemm.cuh does.
//
// A shared expert is one more pair after the chosen ones. A (token, expert) pair is one row, so a token's bits do not depend on other
// tokens. A device table per kind of matrix holds each expert's addresses.
#pragma once
#include <cstdint>

#include "cuda/gemm/skinny/skinny_gemm.cuh"

namespace exl2nb {

struct RoutedOp;  // format/program.h

struct ExpertMatrix {
  GemmPart part[2];
  const uint8_t* image;
  const int* inverse[2];
  int num_parts, strips, items, units, num_perms, inputs;
};
// Followed by its matrices. The fields are for the host: maxima over all matrices.
struct ExpertTable {
  int32_t count, num_perms, stride, image, outputs;
  int32_t item, alike;  // bytes of the largest item; matrices (from the first on) with the same items
  int32_t reserved[9];
  const ExpertMatrix* matrices() const { return reinterpret_cast<const ExpertMatrix*>(this + 1); }
};
static_assert(sizeof(ExpertTable) == 64 && sizeof(ExpertMatrix) == 144, "table layout");

// Workspace bytes; the router's partial sums come first. `RoutedOp::table` points to four int64: the addresses of the first matrices' table
// on host and device, then of the second ones'.
size_t routed_bytes(const Device&, const RoutedOp& op, const GpuHeader& router, int tokens);
// Fuses the op's router into the residual GEMM in front; false: not possible.
bool router_tap(const RoutedOp& op, const uint8_t* head, const uint8_t* blob, float* out, RouterTap& tap);
// Floats per token in the workspace of a router that is a separate GEMM.
int64_t router_stride(const GpuHeader& router);
// The second matrices as one GEMM per token; the caller sets the epilogue.
GemmArgs routed_down(const RoutedOp& op);
// Both kernels. tapped: the router was fused into the GEMM in front; otherwise it was its own GEMM with `late` (skinny_gemm.cuh).
// from: the rows that the router read; down: from routed_down.
void plan_routed(LaunchList&, const RoutedOp& op, const GpuHeader& router, bool tapped, const RowSource& from, uint8_t* workspace,
                 const GemmArgs& down, int tokens, int capacity);

}  // namespace exl2nb
