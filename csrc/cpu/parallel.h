// Threads for the kernels, without a torch header. How many is torch's number (ops_cpu.cpp); who they are is in parallel.cpp.
#pragma once
#if !defined(_WIN32)
#include <pthread.h>
#endif

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

// Threads that go through the same list of phases, each phase a number of tasks that they share. Meeting at the end of a phase costs two
// cache lines, not a wake-up: who waits looks at how many tasks the others have done.
//
// Lane r owns the tasks [count * r / lanes, count * (r + 1) / lanes) of every phase and, when it is done with them, takes what others have
// not begun. Nobody waits for a lane that holds no task: one that comes late, or whose thread never came, finds its tasks done by others
// and runs after them through phases that are over. All lanes must call `each` with the same counts in the same order.
class Team {
 public:
  explicit Team(int64_t lanes) : lanes_(lanes < kMaxRanges ? lanes : kMaxRanges) {}
  int64_t lanes() const { return lanes_; }

  // One thread's view of it.
  class Member {
   public:
    Member(Team& team, int64_t lane) : lane(lane), lanes(team.lanes_), team_(team) {}
    const int64_t lane, lanes;

    // Calls f(task) for tasks of [0, count); returns when all of them are done, by whomever. f must not throw.
    template <class F>
    void each(int64_t count, const F& f) {
      phase_++, total_ += count;
      for (int64_t r = 0; r < lanes && !over(); r++) {
        const int64_t of = (lane + r) % lanes, begin = count * of / lanes, end = count * (of + 1) / lanes, before = mine_;
        for (int64_t i; (i = claim(of, begin, end)) < end; mine_++) f(i);
        if (mine_ != before) team_.lane_[lane].done.store(mine_, std::memory_order_release);
      }
      for (int spins = 0; !over(); spins++) wait_a_little(spins);
    }

    // Whether all phases so far are over, and the next ones with `more` tasks together: nothing need be prepared for them then.
    bool over(int64_t more = 0) const {
      int64_t done = 0;
      for (int64_t r = 0; r < lanes; r++) done += team_.lane_[r].done.load(std::memory_order_acquire);
      return done >= total_ + more;
    }

   private:
    // A task of a lane's range, or its end: claims count up from the phase's number in the upper half of a word.
    int64_t claim(int64_t of, int64_t begin, int64_t end) {
      std::atomic<uint64_t>& word = team_.lane_[of].claimed;
      uint64_t seen = word.load(std::memory_order_relaxed);
      for (;;) {
        const uint64_t phase = seen >> 32, first = phase == phase_ ? seen & 0xffffffff : uint64_t(begin);
        if (phase > phase_ || first >= uint64_t(end)) return end;
        if (word.compare_exchange_weak(seen, phase_ << 32 | (first + 1), std::memory_order_relaxed)) return int64_t(first);
      }
    }
    Team& team_;
    uint64_t phase_ = 0;
    int64_t total_ = 0, mine_ = 0;
  };

 private:
  struct alignas(64) Lane {
    std::atomic<uint64_t> claimed{0};          // by anybody
    alignas(64) std::atomic<int64_t> done{0};  // by this lane's thread, in all phases
  };
  int64_t lanes_;
  Lane lane_[kMaxRanges];
};

// The process's T, made when it is first asked for. Never destroyed: its threads may be asleep in it when the process ends. A forked child
// has none of these threads, so it starts with another T.
template <class T>
T& of_process() {
  static std::atomic<T*> one{nullptr};
#if !defined(_WIN32)
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
