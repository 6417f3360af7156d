// Several products in one launch (persistent_gemm.cuh).
#pragma once
#include <cuda_runtime.h>

#include "cuda/gemm/skinny/skinny_gemm.h"

namespace exl2nb {

constexpr int kPersistentTokens = 4;  // of a launch, at most

struct PersistentOp {
  GemmArgs
      a;  // as for skinny_launch; between links x, next and squares are the chain's own. next_squares of the last: [token][persistent_ctas]
  const uint8_t *head, *blob;
  Epilogue epilogue;
  int beside = 0;  // of the first: multiprocessors for attention that shall start while the chain before it still works
  // Of the first: what attention has read of the chain before, 16 bytes `clear_count` times, which this launch makes zeros again; of the
  // last, which stores its sums: they announce themselves (announced.cuh). For as many tokens as one launch takes.
  void* clear = nullptr;
  int clear_count = 0;
  bool lamport = false;
};
// Tokens that a launch takes, at most; 0: these products cannot be chained. Three or four of a layer, or one that stores its sums.
int persistent_tokens(const PersistentOp* links, int count);
// CTAs of a launch: one a multiprocessor, or fewer where attention finds room beside them (`beside`) and none gets much more to do for it.
int persistent_ctas(const PersistentOp* links, int count);
// Bytes of the room of chains that follow one another, whose products read `width` numbers or `inner` in the middle: zero before the first,
// then theirs alone.
size_t persistent_bytes(int width, int inner);
// Any number of tokens, so many a launch.
const char* persistent_launch(const PersistentOp* links, int count, uint8_t* room, size_t bytes, cudaStream_t stream, bool pdl);

}  // namespace exl2nb
