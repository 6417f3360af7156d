// Products of 33 to 64 tokens on Hopper: many.cuh's kernel with the tensor cores' instruction of a warp group, which reads the tokens from
// shared memory by itself and works while the other warp group decodes. It exists for sm_90a alone, for which CMake compiles this file.
#include "device.cuh"
#include "many.cuh"

namespace exl2nb {
namespace {

constexpr int kWideTokens = kManyTokens, kWideBlocks = kWideTokens / 8;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// d += a times the 16 rows and 64 tokens that the descriptor names.
__device__ __forceinline__ void wgmma(float (&d)[kWideBlocks][4], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p,0,0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
      "{%32,%33,%34,%35},%36,p,1,1,0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Products of a unit of two strips with the tokens of a stage.
struct WarpGroup {
  uint32_t x;  // shared address of the item's first row
  __device__ __forceinline__ void operator()(const uint32_t (&h)[2][16], int unit, float (&y)[2][kWideBlocks][4]) const {
    // Eight rows of eight tokens lie together: 128 bytes to the next tokens, 16 * 64 to the next rows.
    constexpr uint64_t kStrides = (static_cast<uint64_t>(16 * kWideTokens) >> 4 << 16) | (static_cast<uint64_t>(128) >> 4 << 32);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint32_t at = x + unit * (kUnitRows * kWideTokens * 2) + s * (16 * kWideTokens * 2);
        wgmma(y[j], h[j] + s * 4, kStrides | (at & 0x3ffff) >> 4);
      }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int i = 0; i < kWideBlocks * 4; i++) asm volatile("" : "+f"(y[j][i / 4][i % 4])::"memory");
  }
};
#endif

template <bool PAIRED>
__global__ void __launch_bounds__(kManyThreads, 1) many_wide_kernel(const __grid_constant__ ManyArgs A) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x & 31;
  run_many<kWideBlocks, PAIRED>(
      A, shared, [&](const uint8_t* st, const Item& it, const half2* steps, const uint8_t* tokens, float (&y)[2][kWideBlocks][4]) {
        multiply_item(st, it, steps, WarpGroup{shared_address(tokens)}, lane, y);
      });
#endif
}

}  // namespace

bool many_wide_ready() {
#ifdef EXL2NB_SM90A
  static const bool ready = [] {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return major == 9 && minor == 0;
  }();
  return ready;
#else
  return false;
#endif
}

namespace {
template <bool PAIRED>
const char* launch(const ManyArgs& a, int tiles, int most_shared, void* stream, bool pdl) {
  static const cudaError_t ready = cudaFuncSetAttribute(many_wide_kernel<PAIRED>, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared);
  if (ready != cudaSuccess) return cudaGetErrorString(ready);
  return launch_kernel(many_wide_kernel<PAIRED>, dim3(static_cast<unsigned>(a.splits), static_cast<unsigned>(tiles)), kManyThreads,
                       static_cast<size_t>(many_shared(a, kWideBlocks)), stream, pdl, static_cast<unsigned>(a.splits), a);
}
}  // namespace

const char* many_wide_launch(const ManyArgs& a, int tiles, int most_shared, void* stream, bool pdl) {
  return a.paired ? launch<true>(a, tiles, most_shared, stream, pdl) : launch<false>(a, tiles, most_shared, stream, pdl);
}

}  // namespace exl2nb
