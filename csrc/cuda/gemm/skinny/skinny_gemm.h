// The matrix product of the decode path, as the step calls it. Arguments are in skinny_gemm.cuh.
#pragma once
#include <cuda_runtime.h>

#include "cuda/blob/blob.h"
#include "cuda/gemm/skinny/skinny_gemm.cuh"

namespace exl2nb {

// Halves per token of a matrix's input: whole units, and 32 more, which the empty half of a last unit reads (they hold finite numbers and
// meet zero weights) and which put the tokens' copies in shared memory into different banks.
inline int input_stride(const GpuHeader& h) { return (h.stored + 63) / 64 * 64 + 32; }
void set_weights(GemmArgs& a, const uint8_t* head, const uint8_t* blob);
// The input buffer of a blob: x is half[num_perms][tokens][input_stride].
void set_input(MatrixInput& in, const uint8_t* head, const uint8_t* blob, half* x, int tokens);  // not grouped
int skinny_grid(const GemmArgs& a, Epilogue e);
// Sets what says how at most eight tokens are shared out among CTAs: epilogue, grid, flush. Returns the bytes of the staged activations.
int skinny_split(GemmArgs& a, Epilogue e);
// Whether the product may make its inputs from rows of `width` numbers (GemmArgs::from) itself.
bool skinny_fuses_norm(GemmArgs a, Epilogue e, int width);
int copy_path();
// Any number of tokens, eight per launch or so many as there is shared memory for.
const char* skinny_launch(GemmArgs a, Epilogue e, cudaStream_t stream, bool pdl);

}  // namespace exl2nb
