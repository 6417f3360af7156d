// A step of a few rows on a thread team: every thread runs all ops, each on its own columns, with one barrier between dependent matrices.
#pragma once
#include <cstdint>
#include <memory>

#include "draw.h"
#include "parallel.h"
#include "step.h"

namespace exl2nb {

constexpr int64_t kMaxFusedRows = 64;  // tokens, and rows of logits

// Draws from the first `columns` logits of each row: one row of `settings` per row of logits. out: rows of 4 + 2 * top numbers, or null for
// no draw.
struct Draws {
  const draw::Settings* settings = nullptr;
  int64_t top = 0, columns = 0;
  double* out = nullptr;
};

// The first op of a program that the fused step does not compute, or null. Such programs run op by op.
const Op* unfused_op(const Program& program);

// Bit-identical to running the ops one by one. The program must have no `unfused_op`.
class FusedStep {
 public:
  // Team of up to `threads` threads. The batch must outlive it. out: as in `run_step`.
  FusedStep(const Program& program, const StepBatch& b, float* out, const Draws& draws, int64_t threads);
  ~FusedStep();
  // Runs as thread `index` of the team; each index at most once. When a call returns, the step is complete.
  void run(int64_t index) noexcept;
  // Runs as thread `first` of the team here, and as the following ones on pool threads that join.
  void run_on_all(int64_t first) noexcept;

 private:
  struct Shared;
  class Worker;
  std::unique_ptr<Shared> shared_;
};

}  // namespace exl2nb
