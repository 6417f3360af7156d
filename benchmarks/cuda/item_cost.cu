// Scheduler cycles per unit of weights (16 columns x 64 rows, 4 bits), for the skinny GEMM's inner loop and for it without one of its
// parts. Everything is in shared memory; nothing waits. "int8": weights and activations as bytes, exact in int32, activations in two
// columns.
//   nvcc -O3 -std=c++17 -arch=sm_90 --expt-relaxed-constexpr -I../../csrc item_cost.cu -o item_cost && ./item_cost
#include <cstdio>

#include "cuda/blob/item_mma.cuh"

using namespace exl2nb;

enum Parts { kX = 1, kWords = 2, kFields = 4, kOffsets = 8, kProducts = 16, kScale = 32, kAll = 63, kMaxGemms = 64, kBytes = 128 };
constexpr int kItemBytes = 2176, kUnits = 4, kItems = 200, kShared = 100 << 10, kXAt = 80 << 10, kStepsAt = 90 << 10;

struct Lane {
  const half* x;
  const half2* steps;
  const float* x_steps;
  const uint8_t* x_bytes;
  uint4 held;  // in place of what is not loaded
  float y[4];
};

template <int PARTS>
__device__ __forceinline__ void unit(Lane& lane, const uint8_t* words, const uint8_t* codes, int i) {
  uint4 xa = lane.held, xb = lane.held;
  if (PARTS & kX) {
    xa = *reinterpret_cast<const uint4*>(lane.x + i * 64);
    xb = *reinterpret_cast<const uint4*>(lane.x + i * 64 + 32);
  }
  uint32_t w[4] = {lane.held.x ^ i, lane.held.y ^ i, lane.held.z ^ i, lane.held.w ^ i}, h[16];
  if (PARTS & kWords) load_unit<4>(words + i * 512, threadIdx.x & 31, w);
  if (PARTS & kFields)
    dequantize<4>(w, h);
  else
    for (int k = 0; k < 16; k++) h[k] = w[k & 3];
  if (PARTS & kOffsets) subtract_offsets<4>(h);
  float a[4], b[4] = {0, 0, 0, 0};
  if (!(PARTS & kProducts)) {
    for (int k = 0; k < 4; k++) a[k] = __uint_as_float(h[k] ^ h[k + 4]), b[k] = __uint_as_float(h[k + 8] ^ h[k + 12]);
    a[0] += __uint_as_float(xa.x ^ xa.y ^ xa.z ^ xa.w ^ xb.x ^ xb.y ^ xb.z ^ xb.w);
  } else if (PARTS & kMaxGemms) {
    mma<kBulk, true>(a, h, xa.x, xa.y);
    mma<kBulk, false>(a, h + 4, xa.z, xa.w);
    mma<kBulk, false>(a, h + 8, xb.x, xb.y);
    mma<kBulk, false>(a, h + 12, xb.z, xb.w);
  } else {
    mma<kBulk, true>(a, h, xa.x, xa.y);
    mma<kBulk, true>(b, h + 8, xb.x, xb.y);
    mma<kBulk, false>(a, h + 4, xa.z, xa.w);
    mma<kBulk, false>(b, h + 12, xb.z, xb.w);
  }
  half2 step = lane.steps[0];
  if (PARTS & kScale) step = steps_of(codes[i * 8], __low2half(lane.steps[i]));
  for (int k = 0; k < 4; k++) a[k] += b[k];
  add_scaled(lane.y, a, step);
}

__device__ __forceinline__ void product_of_bytes(int (&c)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void unit_of_bytes(Lane& lane, const uint8_t* words, const uint8_t* codes, int i) {
  constexpr uint32_t kHigh = 0xf0f0f0f0u;
  const uint4 w = *reinterpret_cast<const uint4*>(words + i * 512 + (threadIdx.x & 31) * 16);
  const uint4 b = *reinterpret_cast<const uint4*>(lane.x_bytes + i * 512);
  const uint32_t h[8] = {w.x & kHigh, w.y & kHigh, (w.x << 4) & kHigh, (w.y << 4) & kHigh,
                         w.z & kHigh, w.w & kHigh, (w.z << 4) & kHigh, (w.w << 4) & kHigh};
  int c[4] = {0, 0, 0, 0};
  product_of_bytes(c, h, b.x, b.y);
  product_of_bytes(c, h + 4, b.z, b.w);
  const float2 f = __half22float2(steps_of(codes[i * 8], __low2half(lane.steps[i])));
  const float s = lane.x_steps[i];
  lane.y[0] = fmaf(__int2float_rn(c[0] * 128 + c[1]), f.x * s, lane.y[0]);
  lane.y[2] = fmaf(__int2float_rn(c[2] * 128 + c[3]), f.y * s, lane.y[2]);
}

template <int PARTS, int UNROLL>
__global__ void __launch_bounds__(512, 1) run(float* out, long long* cycles) {
  extern __shared__ __align__(128) uint8_t shared[];
  for (int i = threadIdx.x; i < (96 << 10) / 4; i += blockDim.x) reinterpret_cast<uint32_t*>(shared)[i] = i * 2654435761u & 0x3fff3fff;
  const int warp = threadIdx.x >> 5, at = threadIdx.x & 31;
  Lane lane{reinterpret_cast<const half*>(shared + kXAt) + (at & 3) * 8 + warp * 256,
            reinterpret_cast<const half2*>(shared + kStepsAt),
            reinterpret_cast<const float*>(shared + kStepsAt + 2048),
            shared + kXAt + at * 16,
            make_uint4(at * 77, at * 99, 5, 7),
            {0, 0, 0, 0}};
  for (int turn = 0; turn < 2; turn++) {  // the first fetches instructions
    __syncthreads();
    const long long start = clock64();
#pragma unroll 1
    for (int n = 0; n < kItems; n++) {
      const uint8_t *const words = shared + ((n * 16 + warp) & 31) * kItemBytes, *const codes = words + kUnits * 512 + (at >> 2);
#pragma unroll UNROLL
      for (int i = 0; i < kUnits; i++) {
        if constexpr (PARTS == kBytes)
          unit_of_bytes(lane, words, codes, i);
        else
          unit<PARTS>(lane, words, codes, i);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
  }
  if (lane.y[0] + lane.y[1] + lane.y[2] + lane.y[3] == 12345.f) out[threadIdx.x] = lane.y[0];
}

template <int PARTS, int UNROLL = 1>
void report(const char* name) {
  static float* out = nullptr;
  static long long* cycles = nullptr;
  if (!out) cudaMalloc(&out, 4096), cudaMalloc(&cycles, 8 * 1024);
  cudaFuncSetAttribute(run<PARTS, UNROLL>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  int multiprocessors = 0;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0);
  std::printf("%-24s", name);
  for (int warps : {4, 8, 16}) {
    run<PARTS, UNROLL><<<multiprocessors, warps * 32, kShared>>>(out, cycles);
    long long first = 0;
    if (cudaMemcpy(&first, cycles, 8, cudaMemcpyDeviceToHost) != cudaSuccess) {
      std::printf("  %s\n", cudaGetErrorString(cudaGetLastError()));
      return;
    }
    std::printf("  %2d warps %6.1f", warps, static_cast<double>(first) / (kItems * kUnits * warps / 4));
  }
  std::printf("  cycles of a scheduler for a unit\n");
}

int main() {
  report<kAll>("the product");
  report<kAll, 2>("two units unrolled");
  report<kAll, 4>("four units unrolled");
  report<kAll | kMaxGemms>("one chain of products");
  report<kAll & ~kProducts>("no products");
  report<kAll & ~kOffsets>("no offsets");
  report<kAll & ~kFields>("no fields");
  report<kAll & ~kX>("no activations");
  report<kAll & ~kWords>("no words");
  report<kAll & ~kScale>("no scale");
  report<kProducts, 4>("products alone");
  report<kX | kWords | kScale>("loads and scale alone");
  report<kBytes>("int8");
  report<kBytes, 2>("int8, two unrolled");
  report<kBytes, 4>("int8, four unrolled");
}
