// Threads for the kernels, without a torch header. How many is torch's number (ops_cpu.cpp); who they are is in parallel.cpp.
#pragma once
#include <atomic>
#include <cstdint>

namespace exl2nb {

int64_t num_threads();
// While one lives, its thread works alone: for_each_task shares nothing. For work that was divided further out.
class Alone {
 public:
  Alone() : before_(now_) { now_ = true; }
  ~Alone() { now_ = before_; }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;
  static bool now() { return now_; }

 private:
  static inline thread_local bool now_ = false;
  bool before_;
};
// Threads that for_each_task would share work between.
inline int64_t threads_to_share() { return Alone::now() ? 1 : num_threads(); }
// Runs body on this thread, and on up to threads - 1 helpers that join while it runs; returns when all who joined have left it.
void run_on_threads(int64_t threads, void (*body)(void* context), void* context);

// For loops that wait for another thread: at first a pause, later the processor is left to others. spins: turns so far.
void wait_a_little(int spins);

constexpr int kMaxRanges = 64;

// Calls f(task) for every task in [0, count). Every thread has a range of its own, the same one each time (this thread the first), so that
// what it read in the last step is still in its cache; when it has run dry it takes from the others' ranges, so a slow core delays nobody.
template <class F>
void for_each_task(int64_t count, bool parallel, const F& f) {
  const int64_t most = parallel ? threads_to_share() : 1, threads = count < most ? count : most;
  if (threads <= 1) {
    for (int64_t i = 0; i < count; i++) f(i);
    return;
  }
  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  struct Context {
    const F* f;
    const void* caller;
    int ranges;
    std::atomic<int> helpers{0};
    Range range[kMaxRanges];
  } context;
  static thread_local char me;
  context.f = &f;
  context.caller = &me;
  context.ranges = int(threads < kMaxRanges ? threads : kMaxRanges);
  for (int r = 0; r < context.ranges; r++) {
    context.range[r].next.store(count * r / context.ranges, std::memory_order_relaxed);
    context.range[r].end = count * (r + 1) / context.ranges;
  }
  run_on_threads(
      threads,
      [](void* p) {
        auto& c = *static_cast<Context*>(p);
        const int home = &me == c.caller ? 0 : 1 + c.helpers.fetch_add(1, std::memory_order_relaxed);
        for (int r = 0; r < c.ranges; r++) {
          Range& range = c.range[(home + r) % c.ranges];
          for (int64_t i; (i = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) (*c.f)(i);
        }
      },
      &context);
}

}  // namespace exl2nb
