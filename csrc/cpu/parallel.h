// Threads for the kernels, without a torch header. Their number is torch's (ops_cpu.cpp); the pool is in parallel.cpp.
#pragma once
#if !defined(_WIN32) && !defined(__wasm__)
#include <pthread.h>
#endif

#include <atomic>
#include <cstdint>

namespace exl2nb {

int64_t num_threads();
// While one exists, for_each_task of its thread runs on that thread alone. For work that is already divided at an outer level.
class SerialScope {
 public:
  SerialScope() : before_(now_) { now_ = true; }
  ~SerialScope() { now_ = before_; }
  SerialScope(const SerialScope&) = delete;
  SerialScope& operator=(const SerialScope&) = delete;
  static bool now() { return now_; }

 private:
  static inline thread_local bool now_ = false;
  bool before_;
};
// Threads that for_each_task may use.
inline int64_t available_threads() { return SerialScope::now() ? 1 : num_threads(); }
// Runs body on this thread, as number 0, and on up to threads - 1 pool threads that join meanwhile, each of which has the same number each
// time; returns when all of them have left it.
void run_on_threads(int64_t threads, void (*body)(void* context, int64_t thread), void* context);

// One iteration of a spin loop: a pause instruction at first, later a yield. spins: iterations so far.
void spin_wait(int spins);

constexpr int kMaxRanges = 64;

// Calls f(task) for every task in [0, count). Every thread has a range of its own, the same one each time (this thread the first), so that
// what it read in the last step is still in its cache; when that is done it takes tasks of other ranges, so a slow core delays no one.
template <class F>
void for_each_task(int64_t count, bool parallel, const F& f) {
  const int64_t most = parallel ? available_threads() : 1, threads = count < most ? count : most;
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
    int ranges;
    Range range[kMaxRanges];
  } context;
  context.f = &f;
  context.ranges = int(threads < kMaxRanges ? threads : kMaxRanges);
  for (int r = 0; r < context.ranges; r++) {
    context.range[r].next.store(count * r / context.ranges, std::memory_order_relaxed);
    context.range[r].end = count * (r + 1) / context.ranges;
  }
  run_on_threads(
      threads,
      [](void* p, int64_t thread) {
        auto& c = *static_cast<Context*>(p);
        for (int r = 0; r < c.ranges; r++) {
          Range& range = c.range[(thread + r) % c.ranges];
          for (int64_t i; (i = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) (*c.f)(i);
        }
      },
      &context);
}

// A thread team: its threads run the same list of phases and divide the tasks of each phase. A phase ends with a barrier on counters of
// completed tasks, two cache lines and no wake-up.
//
// Thread r owns the tasks [count * r / size, count * (r + 1) / size) of every phase and then takes tasks that other threads have not begun.
// No phase waits for a thread that runs no task: one that comes late, or never, finds its tasks done by others and skips the phases that
// are over. All threads must call `each` with the same counts in the same order.
class Team {
 public:
  explicit Team(int64_t size) : size_(size < kMaxRanges ? size : kMaxRanges) {}
  int64_t size() const { return size_; }

  // One thread of the team.
  class Member {
   public:
    Member(Team& team, int64_t index) : index(index), size(team.size_), team_(team) {}
    const int64_t index, size;

    // Calls f(task) for tasks of [0, count); returns when all of them are done. f must not throw. While it waits it calls idle, which does
    // a piece of other work, or returns false. A thread without a task of its own leaves the others time to begin theirs, for which they
    // may have prefetched.
    template <class F, class Idle>
    void each(int64_t count, const F& f, const Idle& idle) {
      phase_++, total_ += count;
      const bool none = count * index / size == count * (index + 1) / size;
      for (int looks = 0; none && looks < kPatience && !over(); looks++)
        if (!idle()) spin_wait(0);
      for (int64_t r = 0; r < size && !over(); r++) {
        const int64_t of = (index + r) % size, begin = count * of / size, end = count * (of + 1) / size, before = own_done_;
        for (int64_t i; (i = claim(of, begin, end)) < end; own_done_++) f(i);
        if (own_done_ != before) team_.progress_[index].done.store(own_done_, std::memory_order_release);
      }
      for (int spins = 0; !over();)
        if (!idle()) spin_wait(spins++);
    }

    // Whether all phases so far are over, and the next ones with `more` tasks in all: then nothing need be prepared for them.
    bool over(int64_t more = 0) const {
      int64_t done = 0;
      for (int64_t r = 0; r < size; r++) done += team_.progress_[r].done.load(std::memory_order_acquire);
      return done >= total_ + more;
    }

   private:
    static constexpr int kPatience = 8;  // looks at the others, some 4 us
    // The next task of a thread's range, or its end: claims count up from the phase's number in the upper half of a word.
    int64_t claim(int64_t of, int64_t begin, int64_t end) {
      std::atomic<uint64_t>& word = team_.progress_[of].claimed;
      uint64_t seen = word.load(std::memory_order_relaxed);
      for (;;) {
        const uint64_t phase = seen >> 32, first = phase == phase_ ? seen & 0xffffffff : uint64_t(begin);
        if (phase > phase_ || first >= uint64_t(end)) return end;
        if (word.compare_exchange_weak(seen, phase_ << 32 | (first + 1), std::memory_order_relaxed)) return int64_t(first);
      }
    }
    Team& team_;
    uint64_t phase_ = 0;
    int64_t total_ = 0, own_done_ = 0;
  };

 private:
  struct alignas(64) Progress {
    std::atomic<uint64_t> claimed{0};          // by any thread
    alignas(64) std::atomic<int64_t> done{0};  // tasks done by this thread, in all phases
  };
  int64_t size_;
  Progress progress_[kMaxRanges];
};

// The process-wide T, made on first use. Never destroyed: its threads may be asleep in it when the process ends. A forked child has none of
// these threads, so it starts with a new T.
template <class T>
T& process_singleton() {
  static std::atomic<T*> one{nullptr};
#if !defined(_WIN32) && !defined(__wasm__)
  static const int forked = pthread_atfork(nullptr, nullptr, [] { one.store(new T); });
  (void)forked;
#endif
  T* found = one.load();
  if (!found) {
    auto* made = new T;
    if (one.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *found;
}

}  // namespace exl2nb
