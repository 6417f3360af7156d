// Stream-K GEMM with wgmma (Hopper): the kernel of stream_k_gemm.cuh; B operands come from shared memory, and a warpgroup decodes while
// another multiplies. Compiled for sm_90a alone.
#include "cuda/gemm/stream_k/stream_k_gemm.cuh"

namespace exl2nb {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// d += a x B; b: shared-memory descriptor of 16 rows.
__device__ __forceinline__ void wgmma(float (&d)[2][4], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p,0,0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},%12,p,1,1,1;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma(float (&d)[4][4], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p,0,0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},{%16,%17,%18,%19},%20,p,1,1,1;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma(float (&d)[8][4], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p,0,0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},{%32,%33,%"
      "34,%35},%36,p,1,1,1;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// wgmma: products of half a unit, four strips per warpgroup, with the activations in a ring slot.
template <int NB>
struct WgmmaProduct {
  uint32_t x;  // shared address of the ring and the stride between eight rows, as the descriptor wants them
  __device__ __forceinline__ explicit WgmmaProduct(const void* ring)
      : x((shared_address(ring) & 0x3ffff) >> 4 | static_cast<uint32_t>(128 * NB) >> 4 << 16) {}
  __device__ __forceinline__ void start(const uint32_t (&h)[8], int slot, int half, float (&y)[NB][4]) const {
    // 8 rows x 8 tokens are contiguous: 128 bytes to the next tokens, 128 * NB to the next rows. No swizzle.
    constexpr uint64_t kBetween = static_cast<uint64_t>(128) >> 4 << 32;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 2; k++) wgmma(y, h + 4 * k, kBetween | (x + slot * (stream_k_unit(NB) / 16) + (half * 2 + k) * (16 * NB)));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  template <int N>
  __device__ __forceinline__ void wait(float (&y)[NB][4]) const {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
    if (N) return;
#pragma unroll
    for (int i = 0; i < NB * 4; i++) asm volatile("" : "+f"(y[i / 4][i % 4])::"memory");
  }
};
#endif

template <int NB>
__global__ void __launch_bounds__(kStreamKThreads, 1) stream_k_wgmma(const __grid_constant__ StreamKArgs A) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t shared[];
  run_stream_k<NB, WgmmaProduct<NB>>(A, NoQuads{}, shared);
#endif
}
template <int NB>
__global__ void __launch_bounds__(kStreamKThreads, 1)
    stream_k_wgmma_lora(const __grid_constant__ StreamKArgs A, const __grid_constant__ StreamKLora L) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t shared[];
  run_stream_k<NB, WgmmaProduct<NB>>(A, LoraQuads{L}, shared);
#endif
}

}  // namespace exl2nb
