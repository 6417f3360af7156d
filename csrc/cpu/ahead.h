// Steps that run while their caller does something else: a thread of their own carries them out in order, each as soon as the one before it
// is complete, and a caller who comes to wait for a step takes part in it. So where there are two processors, one computes while the other
// does what a step costs its host.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "draw.h"
#include "step.h"

namespace exl2nb {

class Together;

constexpr int64_t kMostAhead = 32;  // tokens of a step, and rows of logits

struct AheadStep {
  Program program{nullptr, 0};
  int64_t lanes;
  StepBatch batch;                // its arrays lie in `numbers`
  std::vector<int32_t> numbers;   // a copy of the caller's
  int32_t* ids;                   // in `numbers`
  const int32_t* feed = nullptr;  // for each token -1, or the row of `previous` whose id it is; null: all are known
  const double* previous = nullptr;
  int64_t previous_width = 0;
  std::vector<draw::Settings> settings;
  int64_t top;
  float* logits;
  double* drawn;                // also the step's name
  std::shared_ptr<void> alive;  // whatever the addresses above need

  // Kept by ahead.cpp: 0 waits, 1 runs, 2 is complete; who is inside `together` besides its thread.
  std::atomic<int> state{0}, inside{0};
  std::atomic<bool> joined{false};
  std::atomic<Together*> together{nullptr};
};

// Begins a step, behind those that were begun before it.
void launch_ahead(std::shared_ptr<AheadStep> step);
// Waits until the step that writes to `drawn` is complete; at once where there is none.
void join_ahead(const double* drawn);

}  // namespace exl2nb
