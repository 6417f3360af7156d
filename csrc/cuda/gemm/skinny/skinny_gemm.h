// Skinny GEMM: host interface. Arguments are in skinny_gemm.cuh.
#pragma once
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "format/gpu_blob.h"

namespace exl2nb {

// Halves per row of a matrix's input: whole units plus 32, which the missing half of a last unit reads (finite numbers times zero weights)
// and which put rows into different shared-memory banks.
inline int input_stride(const GpuHeader& h) { return (h.stored + 63) / 64 * 64 + 32; }
void set_weights(GemmArgs& a, const uint8_t* head, const uint8_t* blob);
// Input buffer of a blob: x is half[num_perms][rows][input_stride], not grouped.
void set_input(MatrixInput& in, const uint8_t* head, const uint8_t* blob, half* x, int tokens);
int skinny_grid(const GemmArgs& a, Epilogue e);
// Sets epilogue, grid and flush for at most eight rows. Returns the bytes of staged activations.
int skinny_split(GemmArgs& a, Epilogue e);
// Whether the GEMM may compute its inputs from rows of `width` numbers itself (GemmArgs::from).
bool skinny_fuses_norm(GemmArgs a, Epilogue e, int width);
int copy_path();
// Moves all row pointers of `a` by `first` rows. grid: CTAs of the launch.
void skip_rows(GemmArgs& a, int first, int grid);
// Any number of rows, in launches of at most eight.
const char* skinny_launch(GemmArgs a, Epilogue e, void* stream, bool pdl);

}  // namespace exl2nb
