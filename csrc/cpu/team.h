// Threads that go through the same list of phases, each phase a number of tasks that they share. Meeting at the end of a phase costs two
// cache lines, not a wake-up: who waits looks at how many tasks the others have done.
//
// Lane r owns the tasks [count * r / lanes, count * (r + 1) / lanes) of every phase and, when it is done with them, takes what others have
// not begun. Nobody waits for a lane that holds no task: one that comes late, or whose thread never came, finds its tasks done by others
// and runs after them through phases that are over. All lanes must call `each` with the same counts in the same order.
#pragma once
#include <atomic>
#include <cstdint>

#include "parallel.h"

namespace exl2nb {

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

}  // namespace exl2nb
