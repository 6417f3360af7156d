// The threads behind for_each_task: helpers that join a caller when they can and that nobody ever waits for in vain.
//
// A barrier (OpenMP's, for one) waits for every thread of the team even if there is nothing left to do; where the cores are shared with a
// browser and a kernel, one descheduled thread then stalls each of a step's sixty regions by a time slice. Here the caller opens tickets,
// works itself, closes the tickets when its own loop has run dry, and waits only for helpers that are inside the body. A helper that comes
// late finds no ticket.
#include "parallel.h"

#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace exl2nb {
namespace {

// Helpers stay awake this many pauses (about 50 us) between regions, so that a step wakes them once; then they sleep.
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
  // True where this caller got the helpers; one caller has them at a time, another works alone meanwhile.
  bool run(int64_t helpers, void (*body)(void*), void* context) {
    std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (!mine) return false;
    try {
      for (; started_ < helpers; started_++) std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {  // no more threads to be had: go on with those that are there
    }
    body_ = body;
    context_ = context;
    tickets_.store(int(helpers));
    epoch_.fetch_add(1);
    if (asleep_.load() > 0) epoch_.notify_all();
    const Closing closing{*this};
    body(context);
    return true;
  }

 private:
  struct Closing {  // also where body throws: helpers must be out of it before the caller's stack unwinds
    Pool& pool;
    ~Closing() {
      pool.tickets_.store(0);
      for (int spins = 0; pool.inside_.load() > 0; spins++) wait_a_little(spins);
    }
  };

  void help() {
    for (uint32_t seen = 0;;) {
      for (int spins = 0; epoch_.load() == seen && spins < kSpins; spins++) pause();
      if (epoch_.load() == seen) {
        asleep_.fetch_add(1);
        epoch_.wait(seen);
        asleep_.fetch_sub(1);
      }
      seen = epoch_.load();
      inside_.fetch_add(1);  // before asking for a ticket: the caller closes the tickets first and looks here afterwards
      int left = tickets_.load();
      while (left > 0 && !tickets_.compare_exchange_weak(left, left - 1)) {}
      if (left > 0) body_(context_);
      inside_.fetch_sub(1);
    }
  }

  std::mutex busy_;
  int64_t started_ = 0;
  void (*body_)(void*) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> tickets_{0};
  alignas(64) std::atomic<int> inside_{0};
  std::atomic<int> asleep_{0};
};

}  // namespace

void wait_a_little(int spins) { spins < kSpins ? pause() : std::this_thread::yield(); }

void run_on_threads(int64_t threads, void (*body)(void*), void* context) {
  if (threads < 2 || !of_process<Pool>().run(threads - 1, body, context)) body(context);
}

}  // namespace exl2nb
