// Threads for the kernels, without a torch header. How many is torch's number (ops_cpu.cpp); who they are is in parallel.cpp.
#pragma once
#include <atomic>
#include <cstdint>

namespace exl2nb {

int64_t num_threads();
// Runs body on this thread, and on up to threads - 1 helpers that join while it runs; returns when all who joined have left it.
void run_on_threads(int64_t threads, void (*body)(void* context), void* context);

// Calls f(task) for every task in [0, count); threads take the next task when they are free, so a slow core delays nobody.
template <class F>
void for_each_task(int64_t count, bool parallel, const F& f) {
  const int64_t threads = parallel ? (count < num_threads() ? count : num_threads()) : 1;
  if (threads <= 1) {
    for (int64_t i = 0; i < count; i++) f(i);
    return;
  }
  struct Context {
    const F* f;
    std::atomic<int64_t> next;
    int64_t count;
  } context{&f, {0}, count};
  run_on_threads(
      threads,
      [](void* p) {
        auto& c = *static_cast<Context*>(p);
        for (int64_t i; (i = c.next.fetch_add(1, std::memory_order_relaxed)) < c.count;) (*c.f)(i);
      },
      &context);
}

}  // namespace exl2nb
