// The thread pool behind for_each_task.
//
// A barrier (OpenMP's, for one) waits for every thread even if there is nothing left to do; where the cores are shared with a browser and a
// kernel, one descheduled thread then stalls each of a step's sixty regions by a time slice. Here the caller publishes permits, works
// itself, withdraws the permits when its own loop has no task left, and waits only for pool threads that are inside the body. A pool thread
// that wakes late finds no permit.
#include "parallel.h"

#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace exl2nb {
namespace {

// Workers stay awake this many pauses (about 50 us) between regions, so that a step wakes them once; then they sleep.
constexpr int kSpins = 2000;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` returns at once on most cores
#endif
}

class Pool {
 public:
  // False if another caller is using the pool: then this one must run alone.
  bool run(int64_t workers, void (*body)(void*), void* context) {
    std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (!mine) return false;
    try {
      for (; started_ < workers; started_++) std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {  // thread limit reached: go on with fewer
    }
    body_ = body;
    context_ = context;
    permits_.store(int(workers));
    epoch_.fetch_add(1);
    if (asleep_.load() > 0) epoch_.notify_all();
    const Withdrawal withdrawal{*this};
    body(context);
    return true;
  }

 private:
  struct Withdrawal {  // also where body throws: workers must be out of it before the caller's stack unwinds
    Pool& pool;
    ~Withdrawal() {
      pool.permits_.store(0);
      for (int spins = 0; pool.joining_.load() > 0; spins++) spin_wait(spins);
    }
  };

  void work() {
    for (uint32_t seen = 0;;) {
      for (int spins = 0; epoch_.load() == seen && spins < kSpins; spins++) pause();
      if (epoch_.load() == seen) {
        asleep_.fetch_add(1);
        epoch_.wait(seen);
        asleep_.fetch_sub(1);
      }
      seen = epoch_.load();
      joining_.fetch_add(1);  // before taking a permit: the caller withdraws permits first, then reads joining_
      int left = permits_.load();
      while (left > 0 && !permits_.compare_exchange_weak(left, left - 1)) {}
      if (left > 0) body_(context_);
      joining_.fetch_sub(1);
    }
  }

  std::mutex busy_;
  int64_t started_ = 0;
  void (*body_)(void*) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> permits_{0};
  alignas(64) std::atomic<int> joining_{0};
  std::atomic<int> asleep_{0};
};

}  // namespace

void spin_wait(int spins) { spins < kSpins ? pause() : std::this_thread::yield(); }

void run_on_threads(int64_t threads, void (*body)(void*), void* context) {
  if (threads < 2 || !process_singleton<Pool>().run(threads - 1, body, context)) body(context);
}

}  // namespace exl2nb
