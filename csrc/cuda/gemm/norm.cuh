// A row of the residual stream in the registers of a 512-thread CTA: pending addition, norm, and storing into a GEMM's input. Used by
// separate kernels and, for few rows, inside the GEMM, which saves a launch (every CTA recomputes the row). Sums run in one order, so both
// give the same bits.
#pragma once
#include "cuda/gemm/fragment.cuh"
#include "cuda/runtime/pdl.cuh"

namespace exl2nb {

enum NormKind { kNoNorm = 0, kRmsNorm = 1, kLayerNorm = 2 };
struct NormArgs {
  int kind, width;
  float eps;
  const float *weight, *bias;  // f32 (width,); bias may be null
};
// A row: x, or x + scale * rms_norm(y) * post_norm if y (post_norm null: without norm), which is also stored to `to`; then its norm.
struct RowSource {
  const float *x, *y;  // (tokens, width)
  float* to;           // (tokens, width), null: nowhere
  const float* post_norm;
  float post_eps, scale;
  NormArgs norm;
};

constexpr int kRowThreads = 512, kHeld = 4, kHeldWidth = 4 * kHeld * kRowThreads;

#ifdef __CUDACC__
// Elements i .. i + 3 of a row, 0 past its end. LDG: constants; otherwise data of an earlier kernel (L2). ANY: any width and alignment;
// otherwise width % 4 == 0 and 16-byte alignment.
template <bool ANY, bool LDG, class T, class T4>
__device__ __forceinline__ T4 four(const T* p, int i, int width) {
  if (!ANY || ((width | static_cast<int>(reinterpret_cast<uintptr_t>(p) >> 2)) & 3) == 0) {
    const auto* const at = reinterpret_cast<const T4*>(p + i);
    return LDG ? __ldg(at) : __ldcg(at);
  }
  const auto one = [&](int k) { return i + k < width ? (LDG ? __ldg(p + i + k) : __ldcg(p + i + k)) : T(0); };
  return T4{one(0), one(1), one(2), one(3)};
}
template <bool ANY>
__device__ __forceinline__ float4 written(const float* p, int i, int width) {
  return four<ANY, false, float, float4>(p, i, width);
}
template <bool ANY>
__device__ __forceinline__ float4 constant(const float* p, int i, int width) {
  return four<ANY, true, float, float4>(p, i, width);
}
template <bool ANY>
__device__ __forceinline__ int4 constant(const int* p, int i, int width) {
  return four<ANY, true, int, int4>(p, i, width);
}

__device__ __forceinline__ float square_sum(float4 v, float mean) {
  v.x -= mean, v.y -= mean, v.z -= mean, v.w -= mean;
  return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, __fmul_rn(v.x, v.x))));
}

// Shared memory of CTA sums, one barrier each.
struct RowSums {
  float4 partial[2][kRowThreads / 128];
};

// Thread t holds numbers 4 (t + 512 j) to + 3; of longer rows the rest stays in memory, where it is read where ANY.
struct Row {
  float4 v[kHeld];
  int turn = 0;

  static __device__ __forceinline__ int place(int j) { return 4 * (static_cast<int>(threadIdx.x) + j * kRowThreads); }

  // The same sum in every thread, in a fixed order.
  __device__ __forceinline__ float sum(float s, RowSums& shared) {
    s = warp_sum(s);
    float4* const partial = shared.partial[turn];
    turn ^= 1;  // double buffer
    if ((threadIdx.x & 31) == 0) reinterpret_cast<float*>(partial)[threadIdx.x >> 5] = s;
    __syncthreads();
    float all = 0.f;
#pragma unroll
    for (int i = 0; i < kRowThreads / 128; i++) {
      const float4 p = partial[i];
      all += p.x, all += p.y, all += p.z, all += p.w;
    }
    return all;
  }

  // Loads row `row` of s with its pending addition; write: this CTA stores the sum.
  template <bool ANY>
  __device__ __forceinline__ void load(const RowSource& s, size_t row, bool write, RowSums& shared) {
    const int width = s.norm.width;
    const float* const x = s.x + row * width;
#pragma unroll
    for (int j = 0; j < kHeld; j++) v[j] = place(j) < width ? written<ANY>(x, place(j), width) : float4{0, 0, 0, 0};
    if (!s.y) return;
    const float* const y = s.y + row * width;
    float4 add[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; j++) add[j] = place(j) < width ? written<ANY>(y, place(j), width) : float4{0, 0, 0, 0};
    float factor = 1.f;
    if (s.post_norm) {
      float squares = 0.f;
#pragma unroll
      for (int j = 0; j < kHeld; j++) squares += square_sum(add[j], 0.f);
      if constexpr (ANY)
        for (int i = place(kHeld); i < width; i += 4 * kRowThreads) squares += square_sum(written<ANY>(y, i, width), 0.f);
      factor = rsqrtf(sum(squares, shared) / width + s.post_eps);
    }
    const auto added = [&](float4 old, float4 a, int i) {
      const float4 w = s.post_norm ? constant<ANY>(s.post_norm, i, width) : float4{1, 1, 1, 1};
      const auto one = [&](float o, float y1, float w1) { return fmaf(s.scale, __fmul_rn(__fmul_rn(y1, factor), w1), o); };
      const float4 r{one(old.x, a.x, w.x), one(old.y, a.y, w.y), one(old.z, a.z, w.z), one(old.w, a.w, w.w)};
      if (write) put_four<ANY>(s.to + row * width, i, width, r);
      return r;
    };
#pragma unroll
    for (int j = 0; j < kHeld; j++)
      if (place(j) < width) v[j] = added(v[j], add[j], place(j));
    if constexpr (ANY)
      for (int i = place(kHeld); i < width; i += 4 * kRowThreads) added(written<ANY>(x, i, width), written<ANY>(y, i, width), i);
  }

  template <bool ANY>
  static __device__ __forceinline__ void put_four(float* p, int i, int width, float4 r) {
    if constexpr (!ANY) {
      *reinterpret_cast<float4*>(p + i) = r;
      return;
    }
    const float all[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (i + k < width) p[i + k] = all[k];
  }

  // Mean and factor of the norm. tail: the row in memory beyond the elements held in registers.
  struct Scale {
    float mean, factor;
  };
  template <bool ANY>
  __device__ __forceinline__ Scale scale(const NormArgs& n, const float* tail, RowSums& shared) {
    Scale to{0.f, 1.f};
    if (n.kind == kLayerNorm) {
      float s = 0.f;
#pragma unroll
      for (int j = 0; j < kHeld; j++) s += (v[j].x + v[j].y) + (v[j].z + v[j].w);
      if constexpr (ANY) {
        for (int i = place(kHeld); i < n.width; i += 4 * kRowThreads) {
          const float4 r = written<ANY>(tail, i, n.width);
          s += (r.x + r.y) + (r.z + r.w);
        }
      }
      to.mean = sum(s, shared) / n.width;
    }
    if (n.kind != kNoNorm) {
      const auto squares = [&](float4 r, int i) {
        const int left = n.width - i;
        if (ANY && left < 4) {  // ignore elements past the end
          r.w = to.mean;
          if (left < 3) r.z = to.mean;
          if (left < 2) r.y = to.mean;
        }
        return square_sum(r, to.mean);
      };
      float s = 0.f;
#pragma unroll
      for (int j = 0; j < kHeld; j++) s += place(j) < n.width ? squares(v[j], place(j)) : 0.f;
      if constexpr (ANY)
        for (int i = place(kHeld); i < n.width; i += 4 * kRowThreads) s += squares(written<ANY>(tail, i, n.width), i);
      to.factor = rsqrtf(sum(s, shared) / n.width + n.eps);
    }
    return to;
  }
  // Elements i .. i + 3 after the norm.
  template <bool ANY>
  static __device__ __forceinline__ float4 scaled(const Scale& s, const NormArgs& n, float4 r, int i) {
    if (n.kind == kNoNorm) return r;
    const float4 w = constant<ANY>(n.weight, i, n.width);
    const float4 b = n.bias ? constant<ANY>(n.bias, i, n.width) : float4{0, 0, 0, 0};
    const auto one = [&](float x, float w1, float b1) { return fmaf(__fmul_rn(__fadd_rn(x, -s.mean), s.factor), w1, b1); };
    return {one(r.x, w.x, b.x), one(r.y, w.y, b.y), one(r.z, w.z, b.z), one(r.w, w.w, b.w)};
  }
  // The norm; put(i, v): v is elements i .. i + 3.
  template <bool ANY, class Put>
  __device__ __forceinline__ void norm(const NormArgs& n, const float* tail, RowSums& shared, Put put) {
    const Scale s = scale<ANY>(n, tail, shared);
#pragma unroll
    for (int j = 0; j < kHeld; j++)
      if (place(j) < n.width) put(place(j), scaled<ANY>(s, n, v[j], place(j)));
    if constexpr (ANY)
      for (int i = place(kHeld); i < n.width; i += 4 * kRowThreads) put(i, scaled<ANY>(s, n, written<ANY>(tail, i, n.width), i));
  }
};

// Stores elements i .. i + 3 of a normed row into all copies of an input; x: first copy, perm_stride halves between copies; group:
// fragment.cuh.
template <bool ANY>
__device__ __forceinline__ void put_input(half* x, int perm_stride, int num_perms, const int* const* inverse, int i, int width, float4 r,
                                          int group = 0) {
  const half h[4] = {saturated(r.x), saturated(r.y), saturated(r.z), saturated(r.w)};
  for (int p = 0; p < num_perms; p++) {
    const int4 rows = inverse[p] ? constant<ANY>(inverse[p], i, width) : int4{i, i + 1, i + 2, i + 3};
    const int to[4] = {rows.x, rows.y, rows.z, rows.w};
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (!ANY || i + k < width) x[static_cast<size_t>(p) * perm_stride + row_place(group, to[k])] = h[k];
  }
}
template <bool ANY>
__device__ __forceinline__ void put_input(const MatrixInput& to, int token, int i, int width, float4 r) {
  put_input<ANY>(to.x + token_place(to.group, to.stride, token), to.perm_stride, to.num_perms, to.inverse, i, width, r, to.group);
}

#endif  // __CUDACC__

}  // namespace exl2nb
