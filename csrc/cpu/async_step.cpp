#include "async_step.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <mutex>
#include <new>
#include <thread>

#include "fused_step.h"
#include "parallel.h"

namespace exl2nb {
namespace {

constexpr int kSpins = 2000;  // pauses (about 50 us) before a waiting thread sleeps

// Waits until the value is no longer `old`.
void wait_for_change(std::atomic<int>& value, int old) {
  for (int spins = 0; value.load() == old && spins < kSpins; spins++) spin_wait(0);
  while (value.load() == old) value.wait(old);
}
void set_and_notify(std::atomic<int>& value, int to) {
  value.store(to);
  value.notify_all();
}

// Ids drawn by the previous step. A failed draw (negative id) ends its request when that step is read; until then any valid id will do.
void feed_drawn_ids(AsyncStep& s) {
  for (int64_t t = 0; s.feed && t < s.batch.T; t++)
    if (s.feed[t] >= 0) s.ids[t] = std::max(0, int32_t(s.previous[s.feed[t] * s.previous_width]));
}

void execute(AsyncStep& s) {
  feed_drawn_ids(s);
  FusedStep fused(s.program, s.batch, s.logits, {s.settings.data(), s.top, s.columns, s.drawn}, s.threads);
  s.fused.store(&fused);
  set_and_notify(s.state, 1);
  fused.run_on_all(1);  // thread 0 of the team is the caller that joins
  s.fused.store(nullptr);
  for (int spins = 0; s.joining.load() > 0; spins++) spin_wait(spins);
}

// Results of a step that ran out of memory: nothing drawn.
void mark_failed(AsyncStep& s) {
  const int64_t width = 4 + 2 * s.top, vocab = output_width(s.program);
  std::fill(s.drawn, s.drawn + s.batch.R * width, -1.0);
  std::fill(s.logits, s.logits + s.batch.R * vocab, NAN);
}

class StepThread {
 public:
  void launch(std::shared_ptr<AsyncStep> step) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      std::thread([this] { run_steps(); }).detach();
      started_ = true;
    }
    steps_.push_back(std::move(step));
    set_and_notify(count_, count_.load() + 1);
  }

  std::shared_ptr<AsyncStep> find(const double* drawn) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(steps_.begin(), steps_.end(), [&](const auto& step) { return step->drawn == drawn; });
    return found == steps_.end() ? nullptr : *found;
  }

 private:
  [[noreturn]] void run_steps() {
    for (int done = 0;; done++) {
      wait_for_change(count_, done);
      std::shared_ptr<AsyncStep> step;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        step = steps_.front();
      }
      try {
        execute(*step);
      } catch (const std::bad_alloc&) {
        mark_failed(*step);
      }
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        steps_.pop_front();
      }
      set_and_notify(step->state, 2);
    }
  }

  std::mutex mutex_;
  std::deque<std::shared_ptr<AsyncStep>> steps_;
  std::atomic<int> count_{0};  // steps launched so far
  bool started_ = false;
};

}  // namespace

void launch_async_step(std::shared_ptr<AsyncStep> step) { process_singleton<StepThread>().launch(std::move(step)); }

void join_async_step(const double* drawn) {
  const std::shared_ptr<AsyncStep> step = process_singleton<StepThread>().find(drawn);
  if (!step) return;
  wait_for_change(step->state, 0);
  const bool first = !step->joined.exchange(true);
  if (first) {
    step->joining.fetch_add(1);
    if (FusedStep* fused = step->fused.load()) fused->run(0);
    step->joining.fetch_sub(1);
  }
  wait_for_change(step->state, 1);
  if (first) step->keep_alive.reset();  // on this thread: freeing tensors may need the GIL
}

}  // namespace exl2nb
