// Ends a program of this folder with what went wrong, and where.
#pragma once
#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                              \
  do {                                                                           \
    const cudaError_t error_ = (call);                                           \
    if (error_ != cudaSuccess) {                                                 \
      std::printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
      std::exit(1);                                                              \
    }                                                                            \
  } while (0)
