// Tensor-core instructions, ldmatrix and fast functions.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
namespace exl2nb {

__device__ __forceinline__ void mma16816(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a2), "r"(a3), "r"(b1));
#endif
}
// sum = c + A B; A unsigned bytes, B signed bytes.
__device__ __forceinline__ void mma16832(int (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                                         const int (&c)[4]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(sum[0]), "=r"(sum[1]), "=r"(sum[2]), "=r"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
#else
  const uint32_t a[4] = {a0, a1, a2, a3};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sum[2 * i] = c[2 * i], sum[2 * i + 1] = c[2 * i + 1];
#pragma unroll
    for (int k = 0; k < 2; k++)
      asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1},{%2},{%3},{%0,%1};"
          : "+r"(sum[2 * i]), "+r"(sum[2 * i + 1])
          : "r"(a[i + 2 * k]), "r"(k ? b1 : b0));
  }
#endif
}
// Four 8 x 8 fp16 matrices from shared memory, one row of 16 bytes per lane; TRANS: transposed.
template <bool TRANS>
__device__ __forceinline__ void load_matrices(uint32_t (&a)[4], uint32_t row) {
  if constexpr (TRANS) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(row)
                 : "memory");
  }
}
// Two matrices; rows from lanes 0 to 15.
template <bool TRANS>
__device__ __forceinline__ void load_matrices(uint32_t (&a)[2], uint32_t row) {
  if constexpr (TRANS) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];" : "=r"(a[0]), "=r"(a[1]) : "r"(row) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];" : "=r"(a[0]), "=r"(a[1]) : "r"(row) : "memory");
  }
}
// XOR swizzle of an offset in a tile of 4-bit rows of D dims.
template <int D>
__host__ __device__ __forceinline__ constexpr int swizzled(int offset) {
  constexpr int kVectors = D / 32, kMask = kVectors & (kVectors - 1) ? 0 : (kVectors < 8 ? kVectors : 8) - 1;
  return offset ^ ((offset >> 7 & kMask) << 4);
}
// Transposes an 8 x 8 fp16 matrix held by the warp, two neighbours of row lane / 4 in each lane.
__device__ __forceinline__ uint32_t transposed(uint32_t v) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(d) : "r"(v));
  return d;
}
// Returns the counter and increments it; after `last` it wraps to 0. Release: the CTA's writes before its barrier; acquire: other CTAs'
// writes.
__device__ __forceinline__ unsigned increment(unsigned* counter, unsigned last) {
  unsigned was;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0,[%1],%2;" : "=r"(was) : "l"(counter), "r"(last) : "memory");
  return was;
}
__device__ __forceinline__ float exp2_fast(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(v));
  return r;
}
__device__ __forceinline__ float tanh_exact(float v) { return 1.f - __fdividef(2.f, __expf(2.f * v) + 1.f); }

}  // namespace exl2nb
#endif  // __CUDACC__
