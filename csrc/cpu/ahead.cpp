#include "ahead.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <mutex>
#include <new>
#include <thread>

#include "parallel.h"
#include "together.h"

namespace exl2nb {
namespace {

constexpr int kSpins = 2000;  // pauses (about 50 us) before somebody who waits sleeps

// Waits until the value is no longer `old`.
void wait_for_change(std::atomic<int>& value, int old) {
  for (int spins = 0; value.load() == old && spins < kSpins; spins++) wait_a_little(0);
  while (value.load() == old) value.wait(old);
}
void change(std::atomic<int>& value, int to) {
  value.store(to);
  value.notify_all();
}

// Tokens that the step before has drawn. What could not be drawn ends its request when that step is read; until then any token will do.
void feed(AheadStep& s) {
  for (int64_t t = 0; s.feed && t < s.batch.T; t++)
    if (s.feed[t] >= 0) s.ids[t] = std::max(0, int32_t(s.previous[s.feed[t] * s.previous_width]));
}

void carry_out(AheadStep& s) {
  feed(s);
  Together together(s.program, s.batch, s.logits, {s.settings.data(), s.top, s.drawn}, s.lanes);
  s.together.store(&together);
  change(s.state, 1);
  together.run_on_all(1);  // lane 0 is for who waits
  s.together.store(nullptr);
  for (int spins = 0; s.inside.load() > 0; spins++) wait_a_little(spins);
}

// A step that found no memory has drawn nothing.
void forget(AheadStep& s) {
  const int64_t width = 4 + 2 * s.top, vocab = vocab_of(s.program);
  std::fill(s.drawn, s.drawn + s.batch.R * width, -1.0);
  std::fill(s.logits, s.logits + s.batch.R * vocab, NAN);
}

class Driver {
 public:
  void launch(std::shared_ptr<AheadStep> step) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      std::thread([this] { drive(); }).detach();
      started_ = true;
    }
    steps_.push_back(std::move(step));
    change(count_, count_.load() + 1);
  }

  std::shared_ptr<AheadStep> find(const double* drawn) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(steps_.begin(), steps_.end(), [&](const auto& step) { return step->drawn == drawn; });
    return found == steps_.end() ? nullptr : *found;
  }

 private:
  [[noreturn]] void drive() {
    for (int done = 0;; done++) {
      wait_for_change(count_, done);
      std::shared_ptr<AheadStep> step;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        step = steps_.front();
      }
      try {
        carry_out(*step);
      } catch (const std::bad_alloc&) {
        forget(*step);
      }
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        steps_.pop_front();
      }
      change(step->state, 2);
    }
  }

  std::mutex mutex_;
  std::deque<std::shared_ptr<AheadStep>> steps_;
  std::atomic<int> count_{0};  // steps so far
  bool started_ = false;
};

}  // namespace

void launch_ahead(std::shared_ptr<AheadStep> step) { of_process<Driver>().launch(std::move(step)); }

void join_ahead(const double* drawn) {
  const std::shared_ptr<AheadStep> step = of_process<Driver>().find(drawn);
  if (!step) return;
  wait_for_change(step->state, 0);
  const bool first = !step->joined.exchange(true);
  if (first) {
    step->inside.fetch_add(1);
    if (Together* together = step->together.load()) together->run(0);
    step->inside.fetch_sub(1);
  }
  wait_for_change(step->state, 1);
  if (first) step->alive.reset();  // here and not on the other thread: some memory is given back to Python, which may have to be waited for
}

}  // namespace exl2nb
