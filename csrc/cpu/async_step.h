// Steps that run on a thread of their own while the caller does its host work. Steps start in launch order, each when the previous one is
// complete. A caller that joins a running step computes a share of it, so with two processors one computes while the other runs Python.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "draw.h"
#include "step.h"

namespace exl2nb {

class FusedStep;

constexpr int64_t kMaxAsyncRows = 32;  // tokens of a step, and rows of logits

struct AsyncStep {
  Program program{nullptr, 0};
  int64_t threads;
  StepBatch batch;                // its arrays are in `inputs`
  std::vector<int32_t> inputs;    // a copy of the caller's
  int32_t* ids;                   // in `inputs`
  const int32_t* feed = nullptr;  // per token: -1, or the row of `previous` that holds its id; null: all ids are in `ids`
  const double* previous = nullptr;
  int64_t previous_width = 0;
  std::vector<draw::Settings> settings;
  int64_t top, columns;
  float* logits;
  double* drawn;                     // also identifies the step
  std::shared_ptr<void> keep_alive;  // owns the memory that the addresses above point to

  // Set by async_step.cpp. state: 0 queued, 1 running, 2 complete; joining: callers inside `fused`.
  std::atomic<int> state{0}, joining{0};
  std::atomic<bool> joined{false};
  std::atomic<FusedStep*> fused{nullptr};
};

// Queues a step after those launched before it.
void launch_async_step(std::shared_ptr<AsyncStep> step);
// Waits until the step that writes to `drawn` is complete; returns at once if there is none.
void join_async_step(const double* drawn);

}  // namespace exl2nb
