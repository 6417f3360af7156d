// A step of a few rows whose threads work on every matrix together, each on columns of its own, and meet between matrices only.
#pragma once
#include <cstdint>
#include <memory>

#include "draw.h"
#include "parallel.h"
#include "step.h"

namespace exl2nb {

constexpr int64_t kMostTogether = 64;  // tokens, and rows of logits

// Tokens to be drawn from the logits: a row of `settings` for each of theirs. out: rows of 4 + 2 * top numbers, or null for no draw.
struct Draws {
  const draw::Settings* settings = nullptr;
  int64_t top = 0;
  double* out = nullptr;
};

// The bits that one op after the other gives. No op may be a RoutedOp.
class Together {
 public:
  // Up to `lanes` threads may take part. The batch must outlive it.
  Together(const Program& program, const StepBatch& b, float* logits, const Draws& draws, int64_t lanes);
  ~Together();
  // Runs as one of the lanes [0, lanes), each of which is used once at most; when a call returns, the step is complete.
  void run(int64_t lane) noexcept;
  // Runs as lane `first` on this thread and as those behind it on helpers that join.
  void run_on_all(int64_t first) noexcept;

 private:
  struct Shared;
  class Lane;
  std::unique_ptr<Shared> shared_;
};

}  // namespace exl2nb
