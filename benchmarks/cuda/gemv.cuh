// y = W x for up to 8 tokens with EXL2 weights of any width mix, on Hopper's tensor cores: the candidate for the CUDA engine's decode path.
//
// A CTA owns whole strips of 16 columns (strip = blockIdx.x + i * gridDim.x), its warps split the rows by bytes; nobody shares a column
// with another CTA, so there are no atomics and the result does not depend on timing. A warp streams its items (a few units and their scale
// codes, about 2 KB) through its own ring in shared memory with bulk copies; the ring is filled before the kernel waits for its predecessor
// (programmatic dependent launch). Activations arrive permuted, in fp16, in the order of the B fragments: their producer writes them so.
// The offset of the codes (fields.cuh) times the sum of the activations is computed once per (unit, token) and starts the accumulators.
// Bytes: the strips once, 2 * K * M of activations per CTA from L2.
#pragma once
#include "fields.cuh"
namespace g {
#ifndef NW
#define NW 16
#endif
#ifndef MINB
#define MINB CTAS
#endif
#ifndef NUNROLL
#define NUNROLL 2
#endif
#ifndef SLOT
#define SLOT 2560
#endif
constexpr int WARPS = NW, KUNROLL = NUNROLL;
struct Item {
  uint32_t w_off;
  uint16_t u0;
  uint8_t bits, nu, one, pad;
  uint16_t bytes;
  uint32_t pad2;
};  // 16 bytes
struct Mat {
  const uint8_t* w;
  const half* gmax;
  const uint16_t* perm;
  const Item* items;
  const uint16_t* warp_item;
  int K, N, units, strips, strip_bytes, num_items;
};
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint4 ldg_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ half2 scale2(uint32_t c, half m) {
  uint32_t v = lop_and_or(c | (c << 12), 0x000f000fu, 0x64006400u);
  half2 s = __hadd2(*reinterpret_cast<half2*>(&v), __float2half2_rn(-1023.f));
  return __hmul2(__hmul2(s, s), __half2half2(m));
}
__device__ __forceinline__ void bar_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(b), "r"(n)); }
__device__ __forceinline__ void bar_expect(uint32_t b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk(uint32_t dst, const void* src, uint32_t bytes, uint32_t b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(dst), "l"(src), "r"(bytes),
               "r"(b)
               : "memory");
}
__device__ __forceinline__ void bar_wait(uint32_t b, uint32_t parity) {
  asm volatile("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(b), "r"(parity)
               : "memory");
}
template <int B>
__device__ __forceinline__ void load_unit(const uint8_t* p, int lane, uint32_t* w) {
  if constexpr (B >= 4) {
    uint4 v = *reinterpret_cast<const uint4*>(p + lane * 16);
    w[0] = v.x;
    w[1] = v.y;
    w[2] = v.z;
    w[3] = v.w;
  }
  if constexpr (B == 8) {
    uint4 v = *reinterpret_cast<const uint4*>(p + 512 + lane * 16);
    w[4] = v.x;
    w[5] = v.y;
    w[6] = v.z;
    w[7] = v.w;
  }
  if constexpr (B == 6) {
    uint2 v = *reinterpret_cast<const uint2*>(p + 512 + lane * 8);
    w[4] = v.x;
    w[5] = v.y;
  }
  if constexpr (B == 5) w[4] = *reinterpret_cast<const uint32_t*>(p + 512 + lane * 4);
  if constexpr (B == 2 || B == 3) {
    uint2 v = *reinterpret_cast<const uint2*>(p + lane * 8);
    w[0] = v.x;
    w[1] = v.y;
  }
  if constexpr (B == 3) w[2] = *reinterpret_cast<const uint32_t*>(p + 256 + lane * 4);
}
// y of row g for tokens 2t, 2t+1, then of row g+8. xp: this lane's activations, cz: start values -sum(offset * x) {row g: 2t, 2t+1; row
// g+8: 2t, 2t+1}
template <int B, int M, bool ONE>
__device__ __forceinline__ void compute(const uint8_t* st, int nu, const half2* gm, const uint4* xp, int xstep, const float4* cz, int lane,
                                        float (&y)[4]) {
  const uint8_t* scp = st + nu * (128 * B) + (lane >> 2) * (ONE ? 1 : 2);
  constexpr int P = (M + 1) / 2;
#pragma unroll KUNROLL
  for (int i = 0; i < nu; i++) {
    uint32_t w[B], h[16];
    load_unit<B>(st + i * (128 * B), lane, w);
    const uint4 xa = xp[0], xb = xp[M == 8 ? 32 : xstep];
    xp += M == 8 ? 64 : 2 * xstep;
    const float4 c0 = cz[i * 2 * P];
    const half2 g2 = gm[i];
    dq<B>(w, h);
    float acc[4] = {c0.x, c0.y, c0.z, c0.w};
    mma(acc, h, xa.x, xa.y);
    mma(acc, h + 4, xa.z, xa.w);
    if (!ONE) {
      const uint32_t c = *reinterpret_cast<const uint16_t*>(scp + i * 16);
      const float2 f = __half22float2(scale2(c & 0xff, __low2half(g2)));
      y[0] = fmaf(acc[0], f.x, y[0]);
      if (M > 1) y[1] = fmaf(acc[1], f.x, y[1]);
      y[2] = fmaf(acc[2], f.y, y[2]);
      if (M > 1) y[3] = fmaf(acc[3], f.y, y[3]);
      const float4 c1 = cz[i * 2 * P + P];
      acc[0] = c1.x;
      acc[1] = c1.y;
      acc[2] = c1.z;
      acc[3] = c1.w;
      mma(acc, h + 8, xb.x, xb.y);
      mma(acc, h + 12, xb.z, xb.w);
      const float2 f1 = __half22float2(scale2(c >> 8, __high2half(g2)));
      y[0] = fmaf(acc[0], f1.x, y[0]);
      if (M > 1) y[1] = fmaf(acc[1], f1.x, y[1]);
      y[2] = fmaf(acc[2], f1.y, y[2]);
      if (M > 1) y[3] = fmaf(acc[3], f1.y, y[3]);
    } else {
      const uint32_t c = scp[i * 8];
      mma(acc, h + 8, xb.x, xb.y);
      mma(acc, h + 12, xb.z, xb.w);
      const float2 f = __half22float2(scale2(c, __low2half(g2)));
      y[0] = fmaf(acc[0], f.x, y[0]);
      if (M > 1) y[1] = fmaf(acc[1], f.x, y[1]);
      y[2] = fmaf(acc[2], f.y, y[2]);
      if (M > 1) y[3] = fmaf(acc[3], f.y, y[3]);
    }
  }
}
__host__ __device__ constexpr int units_per_item(int b) { return b == 2 ? 8 : b == 3 ? 6 : b == 4 ? 4 : b == 5 ? 3 : b == 6 ? 3 : 2; }
struct Offsets {
  float v[9][16];
};
__constant__ Offsets OFF;  // OFF.v[b][i] = 2^(10-pos) + 2^(b-1)
template <int M, int W>
__global__ void __launch_bounds__(W * 32, MINB) gemv(Mat A, const uint4* __restrict__ x, float* __restrict__ out, int flush, int stages) {
  extern __shared__ __align__(128) uint8_t sm[];
  constexpr int T = W * 32, P = (M + 1) / 2;
  uint8_t* ring = sm;
  uint4* xs = reinterpret_cast<uint4*>(ring + (size_t)stages * W * SLOT);  // units * 8 * M, then 1 zero vector
  float4* cz = reinterpret_cast<float4*>(xs + A.units * 8 * M + 1);        // units * 2 * P
  half2* gm = reinterpret_cast<half2*>(cz + A.units * 2 * P);              // units
  Item* items = reinterpret_cast<Item*>((reinterpret_cast<uintptr_t>(gm + A.units) + 15) & ~(uintptr_t)15);
  uint64_t* bars = reinterpret_cast<uint64_t*>(items + A.num_items);  // W * stages + 1
  float* part = reinterpret_cast<float*>(bars + W * stages + 1);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t bars_s = (uint32_t)__cvta_generic_to_shared(bars), ring_s = (uint32_t)__cvta_generic_to_shared(ring);
  if (threadIdx.x == 0) {
    for (int i = 0; i <= W * stages; i++) bar_init(bars_s + i * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;fence.proxy.async.shared::cta;" ::: "memory");
    xs[A.units * 8 * M] = make_uint4(0, 0, 0, 0);
  }
  for (int i = threadIdx.x; i < A.num_items; i += T) reinterpret_cast<uint4*>(items)[i] = reinterpret_cast<const uint4*>(A.items)[i];
  for (int i = threadIdx.x; i < A.units; i += T) gm[i] = reinterpret_cast<const half2*>(A.gmax)[i];
  const int i0 = A.warp_item[warp], ni = A.warp_item[warp + 1] - i0;
  const int my_strips = (A.strips - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x, total = my_strips * ni;
  __syncthreads();
  const uint32_t my_bar = bars_s + warp * stages * 8, my_ring = ring_s + warp * stages * SLOT;
  int f_i = 0, f_n = 0, f_slot = 0;
  const uint8_t* f_p = A.w + (size_t)blockIdx.x * A.strip_bytes;
  const size_t hop = (size_t)gridDim.x * A.strip_bytes;
  auto fetch = [&]() {  // by one lane
    if (f_n < total) {
      const Item it = items[i0 + f_i];
      bar_expect(my_bar + f_slot * 8, it.bytes);
      bulk(my_ring + f_slot * SLOT, f_p + it.w_off, it.bytes, my_bar + f_slot * 8);
      if (++f_i == ni) {
        f_i = 0;
        f_p += hop;
      }
      if (++f_slot == stages) f_slot = 0;
      f_n++;
    }
  };
  if (lane == 0)
    for (int i = 0; i < stages; i++) fetch();
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) {
    bar_expect(bars_s + W * stages * 8, A.units * 128 * M);
    bulk((uint32_t)__cvta_generic_to_shared(xs), x, A.units * 128 * M, bars_s + W * stages * 8);
  }
  bar_wait(bars_s + W * stages * 8, 0);
  for (int e = threadIdx.x; e < A.num_items * 8 * M; e += T) {  // zero points: one thread per (unit, token)
    const int item = e / (8 * M), r = e - item * 8 * M, i = r / M, m = r - i * M;
    const Item it = items[item];
    if (i < it.nu) {
      const int u = it.u0 + i;
      float lo[2] = {0, 0}, hi[2] = {0, 0};
      const float* off = OFF.v[it.bits];
#pragma unroll
      for (int s2 = 0; s2 < 2; s2++)
#pragma unroll
        for (int t = 0; t < 4; t++) {
          const uint4 v = xs[((u * 2 + s2) * M + m) * 4 + t];
          const uint32_t q[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int c = 0; c < 4; c++) {
            const float2 f = __half22float2(*reinterpret_cast<const half2*>(&q[c]));
            const int fi = 8 * s2 + 4 * (c >> 1) + 2 * (c & 1);
            lo[s2] -= off[fi] * (f.x + f.y);
            hi[s2] -= off[fi + 1] * (f.x + f.y);
          }
        }
      if (it.one) {
        lo[0] += lo[1];
        hi[0] += hi[1];
      }
      float* d = reinterpret_cast<float*>(cz + (u * 2) * P + m / 2) + (m & 1);
      d[0] = lo[0];
      d[2] = hi[0];
      d[4 * P] = lo[1];
      d[4 * P + 2] = hi[1];
    }
  }
  __syncthreads();
  const int gr = lane >> 2, t = lane & 3, tt = t < P ? t : P - 1;
  const bool live = gr < M;
  const uint4* xbase = live ? xs + gr * 4 + t : xs + A.units * 8 * M;
  const int xstep = live ? 4 * M : 0;
  float y[4] = {0, 0, 0, 0};
  int slot = 0;
  uint32_t phase = 0;
  for (int s = 0; s < my_strips; s++) {
    for (int ii = 0; ii < ni; ii++) {
      const Item it = items[i0 + ii];
      bar_wait(my_bar + slot * 8, phase);
      const uint8_t* st = ring + (size_t)(warp * stages + slot) * SLOT;
      const uint4* xp = xbase + it.u0 * 2 * xstep;
      const float4* czp = cz + it.u0 * 2 * P + tt;
      const half2* gp = gm + it.u0;
      if (it.one) switch (it.bits) {
          case 4:
            compute<4, M, true>(st, it.nu, gp, xp, xstep, czp, lane, y);
            break;
          case 3:
            compute<3, M, true>(st, it.nu, gp, xp, xstep, czp, lane, y);
            break;
          case 5:
            compute<5, M, true>(st, it.nu, gp, xp, xstep, czp, lane, y);
            break;
          case 2:
            compute<2, M, true>(st, it.nu, gp, xp, xstep, czp, lane, y);
            break;
          case 6:
            compute<6, M, true>(st, it.nu, gp, xp, xstep, czp, lane, y);
            break;
          default:
            compute<8, M, true>(st, it.nu, gp, xp, xstep, czp, lane, y);
            break;
        }
      else
        switch (it.bits) {
          case 4:
            compute<4, M, false>(st, it.nu, gp, xp, xstep, czp, lane, y);
            break;
          case 3:
            compute<3, M, false>(st, it.nu, gp, xp, xstep, czp, lane, y);
            break;
          case 5:
            compute<5, M, false>(st, it.nu, gp, xp, xstep, czp, lane, y);
            break;
          case 2:
            compute<2, M, false>(st, it.nu, gp, xp, xstep, czp, lane, y);
            break;
          case 6:
            compute<6, M, false>(st, it.nu, gp, xp, xstep, czp, lane, y);
            break;
          default:
            compute<8, M, false>(st, it.nu, gp, xp, xstep, czp, lane, y);
            break;
        }
      __syncwarp();
      if (lane == 0) fetch();
      if (++slot == stages) {
        slot = 0;
        phase ^= 1;
      }
    }
    float* p = part + ((s % flush) * W + warp) * 16 * M;
    if (2 * t < M) {
      p[gr * M + 2 * t] = y[0];
      p[(gr + 8) * M + 2 * t] = y[2];
    }
    if (2 * t + 1 < M) {
      p[gr * M + 2 * t + 1] = y[1];
      p[(gr + 8) * M + 2 * t + 1] = y[3];
    }
    y[0] = y[1] = y[2] = y[3] = 0.f;
    if ((s + 1) % flush == 0 || s + 1 == my_strips) {
      __syncthreads();
      const int first = s / flush * flush, cnt = s + 1 - first;
      for (int e = threadIdx.x; e < cnt * 16 * M; e += T) {
        int q = e / (16 * M), r = e - q * 16 * M;
        float v = 0.f;
#pragma unroll
        for (int w = 0; w < W; w++) v += part[(q * W + w) * 16 * M + r];
        int col = (blockIdx.x + (first + q) * gridDim.x) * 16 + r / M, m = r % M;
        if (col < A.N) out[(size_t)m * A.N + col] = v;
      }
      __syncthreads();
    }
  }
}
}  // namespace g
