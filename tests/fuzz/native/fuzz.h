// What the targets share: bytes in, values out; tests of our own properties; one thread.
#pragma once
#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace exl2nb {
int64_t num_threads() { return 1; }
}  // namespace exl2nb

// Ends the run where a property does not hold.
#define HOLDS(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (0)

// n values of any bytes; a heap block of its own, so that ASan sees every access beyond it.
template <class T>
std::vector<T> values(FuzzedDataProvider& in, size_t n) {
  std::vector<T> made(n);
  if (n) in.ConsumeData(made.data(), n * sizeof(T));
  return made;
}

// A permutation of n numbers; one that is damaged now and then.
inline std::vector<int32_t> permutation(FuzzedDataProvider& in, size_t n) {
  std::vector<int32_t> made(n);
  for (size_t i = 0; i < n; i++) made[i] = int32_t(i);
  for (int swaps = in.ConsumeIntegralInRange(0, 8); swaps > 0 && n; swaps--)
    std::swap(made[in.ConsumeIntegralInRange<size_t>(0, n - 1)], made[in.ConsumeIntegralInRange<size_t>(0, n - 1)]);
  if (n && in.ConsumeIntegralInRange(0, 15) == 0) made[in.ConsumeIntegralInRange<size_t>(0, n - 1)] = in.ConsumeIntegral<int32_t>();
  return made;
}
