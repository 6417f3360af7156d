// Checks gemv.cuh against a double-precision sum for every width, then times it in a graph over matrices that do not fit in L2.
// nvcc -O3 -std=c++20 -arch=sm_90 -DNW=16 -DCTAS=1 -DMINB=2 -DNSTAGE=2 gemv_study.cu -o gemv_study && ./gemv_study
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>
#ifndef CTAS
#define CTAS 1
#endif
#include "gemv.cuh"
using namespace g;
#ifndef NSTAGE
#define NSTAGE 4
#endif
#define CK(x)                                                           \
  do {                                                                  \
    cudaError_t e_ = (x);                                               \
    if (e_ != cudaSuccess) {                                            \
      printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); \
      exit(1);                                                          \
    }                                                                   \
  } while (0)
// where bit t of field i (0..15) lives: word, bit in the low half-word's frame
struct Bit {
  int word, bit;
};
static Bit where(int b, int i, int t) {
  auto at = [](int word, int S, int pos) { return Bit{word, ((pos + S) % 32 + 32) % 32}; };
  switch (b) {
    case 4: {
      int w = i / 4, j = i % 4;
      return at(w, j < 2 ? 0 : 8, (j & 1 ? 6 : 2) + t);
    }
    case 2: {
      int w = i / 8, j = i % 8;
      return at(w, j < 4 ? 0 : 8, 2 + 2 * (j & 3) + t);
    }
    case 8: {
      return at(i / 2, i & 1 ? 8 : 0, 2 + t);
    }
    case 3: {
      int w = i / 5, j = i % 5;
      int S[3] = {9, 8, 7};
      if (i == 15) return at(t, S[t], 7 + t);
      if (j < 3) return at(w, 0, 1 + 3 * j + t);
      return at(w, S[w], 1 + w + 3 * (j - 3) + t);
    }
    case 5: {
      int S[5] = {10, 9, 8, 7, 6};
      if (i == 15) return at(t, S[t], 5 + t);
      int w = i / 3, j = i % 3;
      if (j < 2) return at(w, 0, 5 * j + t);
      return at(w, S[w], w + t);
    }
    default: {
      int v = i / 8, j = i % 8;
      if (j < 6) return at(3 * v + j / 2, j & 1 ? 6 : 0, 4 + t);
      if (j == 6) return t < 4 ? at(3 * v, -4, 4 + t) : at(3 * v + 1, -8, 8 + t - 4);
      return t < 4 ? at(3 * v + 2, -4, 4 + t) : at(3 * v + 1, -6, 8 + t - 4);
    }
  }
}
static int plane(int b, int w, int lane) {
  int full = b / 4 * 4;
  if (w < full) return (w / 4) * 512 + lane * 16 + (w % 4) * 4;
  int base = full / 4 * 512, rest = b - full;
  w -= full;
  if (rest >= 2 && w < 2) return base + lane * 8 + w * 4;
  if (rest == 3) return base + 256 + lane * 4;
  return base + lane * 4;
}
struct Host {
  Mat m;
  std::vector<uint8_t> codes;
  std::vector<int> ubits;
  std::vector<uint8_t> sidx;
  std::vector<half> gmax;
  std::vector<uint16_t> perm;
  size_t bytes;
};
__global__ void fill(uint32_t* p, size_t n, uint32_t seed) {
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  for (; i < n; i += (size_t)gridDim.x * blockDim.x) {
    uint32_t v = (uint32_t)i * 2654435761u + seed;
    v ^= v >> 16;
    v *= 0x85ebca6b;
    v ^= v >> 13;
    v *= 0xc2b2ae35;
    v ^= v >> 16;
    p[i] = v;
  }
}
static Host make(int K, int N, std::vector<std::pair<int, int>> mix /*bits, units*/, std::mt19937& rng, bool exact, bool one = true) {
  Host h;
  Mat& A = h.m;
  A.K = K;
  A.N = N;
  A.units = 0;
  std::vector<Item> items;
  std::vector<bool> ones;
  uint32_t off = 0;
  for (auto [b, n] : mix)
    for (int u = 0; u < n;) {
      int nu = std::min(units_per_item(b), n - u);
      u += nu;
      bool o = one && (!exact || (A.units & 8));
      int by = nu * b * 128 + (nu * (o ? 8 : 16) + 15) / 16 * 16;
      items.push_back({off, (uint16_t)A.units, (uint8_t)b, (uint8_t)nu, (uint8_t)o, 0, (uint16_t)by, 0});
      off += by;
      for (int q = 0; q < nu; q++) ones.push_back(o);
      A.units += nu;
      for (int i = 0; i < nu; i++) h.ubits.push_back(b);
    }
  A.strips = (N + 15) / 16;
  A.strip_bytes = off;
  A.num_items = items.size();
  std::vector<uint16_t> wi(WARPS + 1, 0);
  {
    size_t done = 0;
    int w = 1;
    for (int i = 0; i < (int)items.size(); i++) {
      done += items[i].bytes;
      while (w < WARPS && done >= (size_t)off * w / WARPS) wi[w++] = i + 1;
    }
    for (; w <= WARPS; w++) wi[w] = items.size();
  }
  int Kp = A.units * 64;
  h.perm.resize(Kp);
  for (int i = 0; i < Kp; i++) h.perm[i] = i < K ? i : 0xffff;
  std::shuffle(h.perm.begin(), h.perm.begin() + K, rng);
  h.gmax.resize(A.units * 2);
  for (auto& g : h.gmax) g = __float2half((0.5f + (rng() % 1000) / 1000.f) * 1e-4f);
  for (int u = 0; u < A.units; u++)
    if (ones[u]) h.gmax[2 * u + 1] = h.gmax[2 * u];
  size_t wb = (size_t)A.strips * off;
  h.bytes = wb;
  uint8_t* dw;
  CK(cudaMalloc(&dw, wb));
  if (exact) {
    h.codes.resize((size_t)Kp * A.strips * 16);
    h.sidx.resize((size_t)A.units * 2 * A.strips * 16);
    std::vector<uint8_t> hw(wb, 0);
    for (int k = 0; k < Kp; k++)
      for (int n = 0; n < A.strips * 16; n++) h.codes[(size_t)k * A.strips * 16 + n] = rng() & ((1 << h.ubits[k / 64]) - 1);
    for (auto& s : h.sidx) s = rng() & 15;
    for (int u = 0; u < A.units; u++)
      if (ones[u])
        for (int n = 0; n < A.strips * 16; n++) h.sidx[((size_t)u * 2 + 1) * A.strips * 16 + n] = h.sidx[(size_t)u * 2 * A.strips * 16 + n];
    for (int s = 0; s < A.strips; s++) {
      for (auto& it : items)
        for (int i = 0; i < it.nu; i++)
          for (int hf = 0; hf < 2; hf++)
            for (int g = 0; g < 8; g++) {
              auto S = [&](int c) { return h.sidx[((size_t)(it.u0 + i) * 2 + hf) * A.strips * 16 + s * 16 + c]; };
              if (!it.one)
                hw[(size_t)s * off + it.w_off + it.nu * it.bits * 128 + i * 16 + g * 2 + hf] = S(g) | S(g + 8) << 4;
              else if (!hf)
                hw[(size_t)s * off + it.w_off + it.nu * it.bits * 128 + i * 8 + g] = S(g) | S(g + 8) << 4;
            }
      for (auto& it : items)
        for (int i = 0; i < it.nu; i++)
          for (int lane = 0; lane < 32; lane++) {
            int b = it.bits, g = lane / 4, t = lane % 4;
            uint32_t words[8] = {};
            for (int f = 0; f < 16; f++) {
              int ks = f / 4, r = f % 4;
              int k = (it.u0 + i) * 64 + ks * 16 + 2 * t + (r >> 1) * 8, n = s * 16 + g + (r & 1) * 8;
              for (int hf = 0; hf < 2; hf++) {
                uint32_t c = h.codes[(size_t)(k + hf) * A.strips * 16 + n];
                for (int q = 0; q < b; q++) {
                  Bit B = where(b, f, q);
                  words[B.word] |= ((c >> q) & 1u) << ((B.bit + 16 * hf) % 32);
                }
              }
            }
            for (int w = 0; w < b; w++) {
              size_t o = (size_t)s * off + it.w_off + i * b * 128 + plane(b, w, lane);
              *(uint32_t*)&hw[o] = words[w];
            }
          }
    }
    CK(cudaMemcpy(dw, hw.data(), wb, cudaMemcpyHostToDevice));
  } else {
    fill<<<1024, 256>>>((uint32_t*)dw, wb / 4, rng());
  }
  Item* di;
  uint16_t *dp, *dwi;
  half* dg;
  CK(cudaMalloc(&di, items.size() * sizeof(Item)));
  CK(cudaMalloc(&dp, Kp * 2));
  CK(cudaMalloc(&dwi, (WARPS + 1) * 2));
  CK(cudaMalloc(&dg, A.units * 4));
  CK(cudaMemcpy(di, items.data(), items.size() * sizeof(Item), cudaMemcpyHostToDevice));
  CK(cudaMemcpy(dp, h.perm.data(), Kp * 2, cudaMemcpyHostToDevice));
  CK(cudaMemcpy(dwi, wi.data(), (WARPS + 1) * 2, cudaMemcpyHostToDevice));
  CK(cudaMemcpy(dg, h.gmax.data(), A.units * 4, cudaMemcpyHostToDevice));
  A.w = dw;
  A.gmax = dg;
  A.perm = dp;
  A.items = di;
  A.warp_item = dwi;
  return h;
}
static int sms;
template <int M>
static void launch(const Mat& A, const uint4* x, float* y, cudaStream_t st, bool pdl) {
  int grid = std::min(sms * CTAS, A.strips), per = (A.strips + grid - 1) / grid, flush = std::max(1, std::min(per, 32 / M)),
      stages = NSTAGE;
  size_t sm;
  for (;; stages--) {
    sm = (size_t)stages * WARPS * SLOT + (size_t)A.units * 8 * M * 16 + 16 + A.units * 2 * ((M + 1) / 2) * 16 + A.units * 4 + 16 +
         A.num_items * sizeof(Item) + (WARPS * stages + 1) * 8 + (size_t)flush * WARPS * 16 * M * 4;
    if (sm <= 227 * 1024 / CTAS || stages == 2) break;
  }
  static bool set = false;
  if (!set) {
    CK(cudaFuncSetAttribute(gemv<M, WARPS>, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024));
    Offsets o;
    for (int b = 2; b <= 8; b++)
      if (b != 7)
        for (int i = 0; i < 16; i++) o.v[b][i] = (float)(1 << (10 - pos(b, i))) + (float)(1 << (b - 1));
    CK(cudaMemcpyToSymbol(OFF, &o, sizeof(o)));
    set = true;
  }
  cudaLaunchConfig_t c = {};
  c.gridDim = grid;
  c.blockDim = WARPS * 32;
  c.dynamicSmemBytes = sm;
  c.stream = st;
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  at[0].val.programmaticStreamSerializationAllowed = 1;
  c.attrs = at;
  c.numAttrs = pdl ? 1 : 0;
  CK(cudaLaunchKernelEx(&c, gemv<M, WARPS>, A, x, y, flush, stages));
}
template <int M>
static double check(int K, int N, std::vector<std::pair<int, int>> mix) {
  std::mt19937 rng(K + N + M);
  Host h = make(K, N, mix, rng, true);
  std::vector<float> x(M * K);
  std::normal_distribution<float> nd;
  for (auto& v : x) v = nd(rng);
  float *dx, *dy;
  CK(cudaMalloc(&dy, M * N * 4));
  CK(cudaMemset(dy, 0xff, M * N * 4));
  std::vector<half> fx((size_t)h.m.units * 64 * M);
  for (int k = 0; k < h.m.units * 64; k++)
    for (int m = 0; m < M; m++) {
      int u = k >> 6, s2 = (k >> 5) & 1, c = ((k >> 4) & 1) * 2 + ((k >> 3) & 1), t = (k & 7) >> 1;
      fx[(((((u * 2 + s2) * M + m) * 4 + t) << 2) + c) * 2 + (k & 1)] = __float2half(h.perm[k] < K ? x[m * K + h.perm[k]] : 0.f);
    }
  CK(cudaMalloc(&dx, fx.size() * 2));
  CK(cudaMemcpy(dx, fx.data(), fx.size() * 2, cudaMemcpyHostToDevice));
  launch<M>(h.m, (uint4*)dx, dy, 0, false);
  CK(cudaDeviceSynchronize());
  std::vector<float> y(M * N);
  CK(cudaMemcpy(y.data(), dy, M * N * 4, cudaMemcpyDeviceToHost));
  double e = 0, r = 0;
  int W = h.m.strips * 16;
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      double s = 0;
      for (int k = 0; k < h.m.units * 64; k++)
        if (h.perm[k] < K) {
          int b = h.ubits[k / 64];
          int idx = h.sidx[(size_t)(k / 32) * W + n];
          float sc = __half2float(__float2half((float)((idx + 1) * (idx + 1)) * __half2float(h.gmax[k / 32])));
          s += (double)((int)h.codes[(size_t)k * W + n] - (1 << (b - 1))) * sc * (double)__half2float(__float2half(x[m * K + h.perm[k]]));
        }
      double d = s - y[m * N + n];
      if (!(d == d)) d = 1e9;
      e += d * d;
      r += s * s;
    }
  return std::sqrt(e / r);
}
template <int M>
static void bench(const char* name, int K, int N, std::vector<std::pair<int, int>> mix, bool pdl) {
  std::mt19937 rng(1);
  std::vector<Host> hs;
  size_t tot = 0;
  while (tot < (size_t)600 << 20 || hs.size() < 8) {
    hs.push_back(make(K, N, mix, rng, false));
    tot += hs.back().bytes;
    if (hs.size() >= 400) break;
  }
  float *dx, *dy;
  CK(cudaMalloc(&dx, M * K * 4));
  CK(cudaMalloc(&dy, (size_t)M * N * 4));
  fill<<<64, 256>>>((uint32_t*)dx, 0, 1);
  CK(cudaMemset(dx, 0x3c, M * K * 4));
  launch<M>(hs[0].m, (uint4*)dx, dy, 0, false);
  CK(cudaDeviceSynchronize());
  cudaStream_t st;
  CK(cudaStreamCreate(&st));
  cudaGraph_t gr;
  cudaGraphExec_t ex;
  CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeGlobal));
  for (auto& h : hs) launch<M>(h.m, (uint4*)dx, dy, st, pdl);
  CK(cudaStreamEndCapture(st, &gr));
  CK(cudaGraphInstantiate(&ex, gr, 0));
  cudaEvent_t a, b;
  cudaEventCreate(&a);
  cudaEventCreate(&b);
  for (int i = 0; i < 3; i++) CK(cudaGraphLaunch(ex, st));
  CK(cudaStreamSynchronize(st));
  std::vector<float> ts;
  for (int i = 0; i < 15; i++) {
    cudaEventRecord(a, st);
    cudaGraphLaunch(ex, st);
    cudaEventRecord(b, st);
    CK(cudaStreamSynchronize(st));
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    ts.push_back(ms);
  }
  std::sort(ts.begin(), ts.end());
  double us = ts[7] * 1e3 / hs.size();
  printf("%-22s M=%d pdl=%d %8.2f us  %7.1f GB/s  (%zu mats, %.1f MB each)\n", name, M, pdl, us, hs[0].bytes / us * 1e-3, hs.size(),
         hs[0].bytes / 1e6);
  for (auto& h : hs) {
    cudaFree((void*)h.m.w);
  }
}
__global__ void readbw(const uint4* p, size_t n, uint32_t* o) {
  uint4 a = make_uint4(0, 0, 0, 0);
  size_t st = (size_t)gridDim.x * blockDim.x;
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  for (; i + 3 * st < n; i += 4 * st) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = ldg_stream(p + i + j * st);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      a.x ^= v[j].x;
      a.y ^= v[j].y;
      a.z ^= v[j].z;
      a.w ^= v[j].w;
    }
  }
  if ((a.x ^ a.y ^ a.z ^ a.w) == 12345) o[0] = 1;
}
__global__ void nop() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
int main() {
  cudaDeviceProp p;
  CK(cudaGetDeviceProperties(&p, 0));
  sms = p.multiProcessorCount;
  printf("%s %d SMs\n", p.name, sms);
  {
    uint4* d;
    size_t n = (size_t)4 << 30;
    CK(cudaMalloc(&d, n));
    fill<<<4096, 256>>>((uint32_t*)d, n / 4, 7);
    uint32_t* o;
    cudaMalloc(&o, 4);
    cudaEvent_t a, b;
    cudaEventCreate(&a);
    cudaEventCreate(&b);
    float best = 1e9;
    for (int i = 0; i < 8; i++) {
      cudaEventRecord(a);
      readbw<<<sms * 8, 512>>>(d, n / 16, o);
      cudaEventRecord(b);
      CK(cudaDeviceSynchronize());
      float ms;
      cudaEventElapsedTime(&ms, a, b);
      best = std::min(best, ms);
    }
    printf("read bandwidth %.1f GB/s\n", n / best * 1e-6);
    cudaFree(d);
  }
  for (int pdl = 0; pdl < 2; pdl++) {
    cudaStream_t st;
    cudaStreamCreate(&st);
    cudaGraph_t gr;
    cudaGraphExec_t ex;
    CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < 500; i++) {
      cudaLaunchConfig_t c = {};
      c.gridDim = sms;
      c.blockDim = 512;
      c.stream = st;
      cudaLaunchAttribute at[1];
      at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      at[0].val.programmaticStreamSerializationAllowed = 1;
      c.attrs = at;
      c.numAttrs = pdl;
      CK(cudaLaunchKernelEx(&c, nop));
    }
    CK(cudaStreamEndCapture(st, &gr));
    CK(cudaGraphInstantiate(&ex, gr, 0));
    cudaEvent_t a, b;
    cudaEventCreate(&a);
    cudaEventCreate(&b);
    float best = 1e9;
    for (int i = 0; i < 6; i++) {
      cudaEventRecord(a, st);
      cudaGraphLaunch(ex, st);
      cudaEventRecord(b, st);
      CK(cudaStreamSynchronize(st));
      float ms;
      cudaEventElapsedTime(&ms, a, b);
      best = std::min(best, ms);
    }
    printf("empty kernel in graph, pdl=%d: %.2f us\n", pdl, best * 2);
  }
  for (int b : {2, 3, 4, 5, 6, 8})
    printf("check b=%d M=1 %.2e  M=3 %.2e  M=8 %.2e\n", b, check<1>(512, 96, {{b, 8}}), check<3>(480, 80, {{b, 8}}),
           check<8>(512, 72, {{b, 8}}));
  printf("check mix %.2e %.2e\n", check<1>(1000 / 32 * 32, 200, {{8, 1}, {6, 2}, {5, 3}, {4, 5}, {3, 4}, {2, 1}}),
         check<8>(4096, 160, {{8, 4}, {4, 60}}));
  for (int pdl = 0; pdl < 2; pdl++) {
    bench<1>("4096x4096 4b", 4096, 4096, {{4, 64}}, pdl);
    bench<1>("4096x12288 5/4b", 4096, 12288, {{5, 6}, {4, 58}}, pdl);
    bench<1>("4096x22016 4b", 4096, 22016, {{4, 64}}, pdl);
    bench<1>("11008x4096 8/4b", 11008, 4096, {{8, 9}, {4, 163}}, pdl);
    bench<1>("4096x22016 3/2b", 4096, 22016, {{3, 7}, {2, 57}}, pdl);
    bench<1>("4096x32000 8/6b", 4096, 32000, {{8, 10}, {6, 54}}, pdl);
    bench<1>("2048x2048 4b", 2048, 2048, {{4, 32}}, pdl);
    bench<1>("2048x11264 4b", 2048, 11264, {{4, 32}}, pdl);
    bench<1>("5632x2048 4b", 5632, 2048, {{4, 88}}, pdl);
    bench<4>("4096x22016 4b", 4096, 22016, {{4, 64}}, pdl);
    bench<8>("4096x22016 4b", 4096, 22016, {{4, 64}}, pdl);
    bench<8>("4096x4096 4b", 4096, 4096, {{4, 64}}, pdl);
  }
}
