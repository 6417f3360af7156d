// A whole step on the CPU: checks and runs a program of format/program.h. No torch here.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../format/lora.h"
#include "../format/program.h"
#include "engine.h"

namespace exl2nb {

struct StepBatch {
  const int32_t *ids, *positions, *slots, *block_table, *cu_seqlens, *context_lens, *logit_rows;
  int64_t T, R, sequences, max_pages;
  std::vector<void*> k_pools, v_pools;  // every layer (num_pages, Hkv, page_size, D), or (num_pages, Hkv, row) where they are coded
  int64_t num_pages, num_kv_heads, page_size, head_dim;
  CacheFormat k_kind, v_kind;
  LoraTable lora;                     // or none
  const int32_t* adapters = nullptr;  // (T) of `lora`, -1 for none
};

// What is wrong with the program or the batch, or an empty string. Nothing has been written then.
std::string check_step(const Program& program, const StepBatch& batch);
// out: (output_rows, output_width).
void run_step(const Program& program, const StepBatch& batch, float* out);
// What a step returns: logits of the rows that want them; or, of a program without head, the residual stream of every token.
inline int64_t output_width(const Program& program) { return program.head() ? header(program.head()->blob).N : program.hidden(); }
inline int64_t output_rows(const Program& program, const StepBatch& batch) { return program.head() ? batch.R : batch.T; }

// An op's arguments for the kernels of engine.h.
inline Norm norm_of(const NormedOp& op) { return {op.norm, float(op.eps), op.norm_bias, op.layer_norm != 0}; }
Heads heads_of(const QkvOp& op, const StepBatch& batch);
Rope rope_of(const QkvOp& op, const StepBatch& batch);
Attention attention_of(const AttentionOp& op, const StepBatch& batch, int num_heads);
void run_embed(const EmbedOp& op, const StepBatch& batch, int H, float* x);

// What the adapters of a step's tokens change in one op after the other.
class StepChanges {
 public:
  explicit StepChanges(const StepBatch& batch) : b_(batch), of_(size_t(batch.lora ? std::max(batch.T, batch.R) : 0)) {}
  // Of op number `op`: a change per token, or per logit row. Null where there is no table.
  Changes of(int64_t op, bool logit_rows = false) {
    for (size_t i = 0; i < of_.size() && int64_t(i) < (logit_rows ? b_.R : b_.T); i++)
      of_[i] = b_.lora.change(b_.adapters[logit_rows ? b_.logit_rows[i] : int64_t(i)], op);
    return of_.empty() ? nullptr : of_.data();
  }

 private:
  const StepBatch& b_;
  std::vector<const LoraChange*> of_;
};

// The index checks that single ops share: empty, or what is wrong.
std::string check_range(const char* what, const int32_t* values, int64_t n, int64_t limit);
std::string check_sequences(const int32_t* block_table, const int32_t* cu_seqlens, const int32_t* context_lens, int64_t sequences,
                            int64_t max_pages, int64_t page_size, int64_t num_pages, int64_t T);

}  // namespace exl2nb
