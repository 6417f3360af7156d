// A whole step on the CPU: checks and runs a program of format/program.h. No torch here.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine.h"

namespace exl2nb {

struct StepBatch {
  const int32_t *ids, *positions, *slots, *block_table, *cu_seqlens, *context_lens, *logit_rows;
  int64_t T, R, sequences, max_pages;
  std::vector<void*> k_pools, v_pools;  // every layer (num_pages, Hkv, page_size, D), or (num_pages, Hkv, row) where they are coded
  int64_t num_pages, num_kv_heads, page_size, head_dim;
  PoolKind k_kind, v_kind;
};

// The head_dim that a program's first QKV wants, which says how to read coded pools; 0: the program is none.
int64_t step_head_dim(const int64_t* code, int64_t words);

// What is wrong with the program or the batch, or an empty string; sets the number of logits per row. Nothing has been written then.
std::string check_step(const int64_t* code, int64_t words, const StepBatch& batch, int64_t& vocab);
void run_step(const int64_t* code, int64_t words, const StepBatch& batch, float* logits);

// What the words of an op say. Its matrix: null where it has none.
const uint8_t* step_matrix(const int64_t* w);
Norm step_norm(const int64_t* w);  // of QKV, GATE_UP, ROUTED and HEAD
Heads step_heads(const int64_t* w, const StepBatch& batch);
Rope step_rope(const int64_t* w, const StepBatch& batch);
Attention step_attention(const int64_t* w, const StepBatch& batch, int num_heads);
void step_embed(const int64_t* w, const StepBatch& batch, int H, float* x);

// The index checks that single ops share: empty, or what is wrong.
std::string check_range(const char* what, const int32_t* values, int64_t n, int64_t limit);
std::string check_sequences(const int32_t* block_table, const int32_t* cu_seqlens, const int32_t* context_lens, int64_t sequences,
                            int64_t max_pages, int64_t page_size, int64_t num_pages, int64_t T);

}  // namespace exl2nb
