// The thread pool behind for_each_task.
//
// A barrier (OpenMP's, for one) waits for every thread even if there is nothing left to do; where the cores are shared with a browser and a
// kernel, one descheduled thread then stalls each of a step's sixty regions by a time slice. Here the caller opens the region to pool
// threads, works itself, closes the region when its own loop has no task left, and waits only for pool threads that are inside the body. A
// pool thread that wakes late finds the region closed.
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
  bool run(int64_t workers, void (*body)(void*, int64_t), void* context) {
    std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (!mine) return false;
    try {
      for (; started_ < workers; started_++) std::thread([this, number = started_ + 1] { work(number); }).detach();
    } catch (const std::system_error&) {  // thread limit reached: go on with fewer
    }
    body_ = body;
    context_ = context;
    open_to_.store(workers);
    epoch_.fetch_add(1);
    if (asleep_.load() > 0) epoch_.notify_all();
    const Closing closing{*this};
    body(context, 0);
    return true;
  }

 private:
  struct Closing {  // also where body throws: workers must be out of it before the caller's stack unwinds
    Pool& pool;
    ~Closing() {
      pool.open_to_.store(0);
      for (int spins = 0; pool.joining_.load() > 0; spins++) spin_wait(spins);
    }
  };

  void work(int64_t number) {
    for (uint32_t seen = 0;;) {
      for (int spins = 0; epoch_.load() == seen && spins < kSpins; spins++) pause();
      if (epoch_.load() == seen) {
        asleep_.fetch_add(1);
        epoch_.wait(seen);
        asleep_.fetch_sub(1);
      }
      seen = epoch_.load();
      joining_.fetch_add(1);  // before it looks whether the region is open: the caller closes it first, then reads joining_
      if (number <= open_to_.load()) body_(context_, number);
      joining_.fetch_sub(1);
    }
  }

  std::mutex busy_;
  int64_t started_ = 0;
  void (*body_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int64_t> open_to_{0};  // workers up to this number may join
  alignas(64) std::atomic<int> joining_{0};
  std::atomic<int> asleep_{0};
};

}  // namespace

void spin_wait(int spins) { spins < kSpins ? pause() : std::this_thread::yield(); }

void run_on_threads(int64_t threads, void (*body)(void*, int64_t), void* context) {
  if (threads < 2 || !process_singleton<Pool>().run(threads - 1, body, context)) body(context, 0);
}

}  // namespace exl2nb
