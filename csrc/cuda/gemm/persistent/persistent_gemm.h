// Persistent chain of GEMMs (persistent_gemm.cuh): host interface.
#pragma once
#include "cuda/gemm/skinny/skinny_gemm.cuh"

namespace exl2nb {

constexpr int kPersistentTokens = 4;  // most rows per launch

struct PersistentOp {
  GemmArgs
      a;  // as for skinny_launch; x, next and squares between ops are set by the chain. next_squares of the last: [row][persistent_ctas]
  const uint8_t *head, *blob;
  Epilogue epilogue;
  int attention_sms = 0;  // first op: SMs to leave free for the attention kernel that starts early
  // First op: buffer of Lamport flags that attention has read, 16 bytes x clear_count, zeroed again by this launch. Last op (kStore): its
  // sums carry Lamport flags (lamport.cuh). Only where one launch takes all rows.
  void* clear = nullptr;
  int clear_count = 0;
  bool lamport = false;
};
// Most rows per launch; 0: these GEMMs cannot be chained. Three or four of a layer, or one that stores its sums.
int persistent_tokens(const PersistentOp* ops, int count);
// CTAs of a launch: one per SM, or fewer so that attention runs beside them (`attention_sms`), if no CTA gets much more work.
int persistent_ctas(const PersistentOp* ops, int count);
// Workspace for chains that follow one another, with rows of `width` and `inner` numbers: zeroed before the first launch, then theirs
// alone.
size_t persistent_bytes(int width, int inner);
// Any number of rows, in launches of persistent_tokens.
const char* persistent_launch(const PersistentOp* ops, int count, uint8_t* workspace, size_t bytes, void* stream, bool pdl);

}  // namespace exl2nb
