// What a process has one of, threads included.
#pragma once
#if !defined(_WIN32)
#include <pthread.h>
#endif

#include <atomic>

namespace exl2nb {

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
