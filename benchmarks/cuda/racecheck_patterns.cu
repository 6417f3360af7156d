// What compute-sanitizer's racecheck says of handovers that are ordered by the memory model: it follows an mbarrier only from the very
// threads that arrive there, not from those that these have waited for before. `compute-sanitizer --tool racecheck racecheck_patterns 1`:
//   1  readers meet at a named barrier, one of them arrives at an mbarrier, another warp waits there and writes  reported
//   2  the same, every reader arrives                                                                             clean
//   3  the same, a lane of every warp arrives behind __syncwarp                                                   reported
//   4  five warps, of which four hand values on at a named barrier                                                clean
//   5  a ring that bulk copies fill, whose slots a lane of every warp releases behind __syncwarp                  reported
// (CUDA 13.0, H200.) Chains (persistent_gemm.cuh) and products of many tokens (stream_k_gemm.cuh) hand over as 3 and 5 do; in the
// build of `make sanitize` every lane arrives there.
// nvcc -arch=sm_90 -std=c++17 -O3 --expt-relaxed-constexpr -I../../csrc/cuda racecheck_patterns.cu
#include <cstdint>
#include <cstdlib>

#include "check.cuh"
#include "cuda/runtime/pdl.cuh"

using namespace exl2nb;

constexpr int kTurns = 16, kReaders = 128, kSlots = 2, kFloats = 64;

enum Arriving { kOneForAll = 1, kEvery, kLanes };

template <Arriving HOW>
__global__ void written_again(float* out) {
  __shared__ uint64_t read, written;
  __shared__ float value;
  if (threadIdx.x == 0) {
    barrier_init(&read, HOW == kOneForAll ? 1 : HOW == kEvery ? kReaders : kReaders / 32);
    barrier_init(&written, 1);
    barrier_fence();
  }
  __syncthreads();
  float sum = 0.f;
  for (int i = 0; i < kTurns; i++) {
    if (threadIdx.x == kReaders) {
      if (i) barrier_wait(&read, (i - 1) & 1);
      value = static_cast<float>(i);
      barrier_arrive(&written);
    } else if (threadIdx.x < kReaders) {
      barrier_wait(&written, i & 1);
      sum += value;
      if (HOW == kOneForAll) asm volatile("bar.sync 1,%0;" ::"n"(kReaders) : "memory");
      if (HOW == kLanes) __syncwarp();
      if (HOW == kEvery || threadIdx.x % (HOW == kLanes ? 32 : kReaders) == 0) barrier_arrive(&read);
    }
  }
  out[threadIdx.x] = sum;
}

__global__ void named(float* out) {
  __shared__ float value[kReaders];
  float sum = 0.f;
  for (int i = 0; i < kTurns && threadIdx.x < kReaders; i++) {
    value[threadIdx.x] = static_cast<float>(i);
    asm volatile("bar.sync 1,%0;" ::"n"(kReaders) : "memory");
    sum += value[kReaders - 1 - threadIdx.x];
    asm volatile("bar.sync 1,%0;" ::"n"(kReaders) : "memory");
  }
  out[threadIdx.x] = sum;
}

__global__ void ring(const float* in, float* out) {
  __shared__ alignas(128) float slots[kSlots][kFloats];
  __shared__ uint64_t full[kSlots], empty[kSlots];
  if (threadIdx.x < kSlots) {
    barrier_init(full + threadIdx.x, 1);
    barrier_init(empty + threadIdx.x, kFloats / 32);
    barrier_fence();
  }
  __syncthreads();
  float sum = 0.f;
  for (int i = 0; i < kTurns; i++) {
    const int slot = i % kSlots, turn = i / kSlots;
    if (threadIdx.x == kFloats) {
      barrier_wait(empty + slot, (turn & 1) ^ 1);
      barrier_expect(full + slot, sizeof(slots[0]));
      bulk_copy(slots[slot], in + i * kFloats, sizeof(slots[0]), full + slot);
    } else if (threadIdx.x < kFloats) {
      barrier_wait(full + slot, turn & 1);
      sum += slots[slot][threadIdx.x];
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(empty + slot);
    }
  }
  out[threadIdx.x] = sum;
}

int main(int count, char** words) {
  float *in, *out;
  CHECK(cudaMalloc(&in, kTurns * kFloats * sizeof(float)));
  CHECK(cudaMalloc(&out, 1024 * sizeof(float)));
  CHECK(cudaMemset(in, 0, kTurns * kFloats * sizeof(float)));
  switch (count > 1 ? std::atoi(words[1]) : 5) {
    case 1:
      written_again<kOneForAll><<<2, kReaders + 32>>>(out);
      break;
    case 2:
      written_again<kEvery><<<2, kReaders + 32>>>(out);
      break;
    case 3:
      written_again<kLanes><<<2, kReaders + 32>>>(out);
      break;
    case 4:
      named<<<2, kReaders + 32>>>(out);
      break;
    default:
      ring<<<2, kFloats + 32>>>(in, out);
  }
  CHECK(cudaDeviceSynchronize());
}
