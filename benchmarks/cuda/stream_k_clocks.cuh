// Cycles per phase of the CTAs of a stream-K GEMM; compiled with EXL2NB_CLOCKS.
#pragma once
#ifdef EXL2NB_CLOCKS
#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "check.cuh"

namespace exl2nb {
extern long long* stream_k_clocks;
}

// Mean and largest cycles per phase, of the last of several launches.
inline void clocks(cudaStream_t s, const std::function<void()>& body) {
  const int n = 132;
  long long* d;
  CHECK(cudaMalloc(&d, n * 128));
  CHECK(cudaMemset(d, 0, n * 128));
  exl2nb::stream_k_clocks = d;
  body();
  CHECK(cudaStreamSynchronize(s));
  exl2nb::stream_k_clocks = nullptr;
  std::vector<long long> v(n * 16);
  CHECK(cudaMemcpy(v.data(), d, n * 128, cudaMemcpyDeviceToHost));
  const char* names[] = {"ready", "waited", "factors", "tile 1", "tiles", "met", "copies begin", "tokens asked"};
  const int from[] = {0, 1, 2, 3, 3, 5, 0, 2}, to[] = {1, 2, 3, 4, 5, 6, 7, 8};
  printf("   ");
  for (int k = 0; k < 8; k++) {
    double sum = 0, most = 0;
    int count = 0;
    for (int i = 0; i < n; i++)
      if (v[i * 16 + to[k]]) {
        const double x = double(v[i * 16 + to[k]] - v[i * 16 + from[k]]);
        sum += x, most = std::max(most, x), count++;
      }
    printf(" %s %.0f/%.0f", names[k], sum / std::max(1, count), most);
  }
  printf("\n");
  cudaFree(d);
}
#endif
