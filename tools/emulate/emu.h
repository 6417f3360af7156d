#pragma once
#include <ucontext.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <functional>
#include <map>
#include <vector>
#include <algorithm>
struct Dim { unsigned x = 1, y = 1, z = 1; };
extern "C" void __asan_poison_memory_region(void const volatile*, size_t);
extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t);
#ifndef __SANITIZE_ADDRESS__
#define __asan_poison_memory_region(a, b)
#define __asan_unpoison_memory_region(a, b)
#endif
namespace emu {
inline int N = 512, cur = 0;
struct Fiber { ucontext_t ctx; std::vector<char> stack; bool done; };
constexpr int kCtas = 8;
inline std::vector<Fiber> fibers(kCtas * 1024);
inline int first_block = 0, grid_x = 1;
inline ucontext_t mainctx;
inline size_t limit = sizeof(char) * 240 * 1024;
inline std::function<void()> body;
alignas(128) inline uint8_t shared_all[kCtas][240 * 1024];
inline int cta() { return cur / N; }
inline int thread() { return cur % N; }
inline uint8_t* shared_now() { return shared_all[cta()]; }
inline void yield() { swapcontext(&fibers[cur].ctx, &mainctx); }
inline int ncount[kCtas][8], ngen[kCtas][8];
inline void named_arrive(int b, int n) { if (++ncount[cta()][b] == n) { ncount[cta()][b] = 0; ngen[cta()][b]++; } }
inline void named(int b, int n) { int c = cta(), g = ngen[c][b]; if (++ncount[c][b] == n) { ncount[c][b] = 0; ngen[c][b]++; return; } while (ngen[c][b] == g) yield(); }
inline void syncthreads() { named(0, N); }
inline int wcount[kCtas * 32], wgen[kCtas * 32];
inline void syncwarp() { int w = cur / 32, g = wgen[w]; if (++wcount[w] == 32) { wcount[w] = 0; wgen[w]++; return; } while (wgen[w] == g) yield(); }
inline uint32_t wbuf[kCtas * 32][32][8];
inline uint32_t exchange(uint32_t v, int from) { int w = cur / 32; wbuf[w][cur % 32][0] = v; syncwarp(); uint32_t r = wbuf[w][from & 31][0]; syncwarp(); return r; }
inline float h2f(uint32_t bits, int hi);
struct Bar { int count = 1, arrivals = 0; int phase = 0; bool arrived = false; uint64_t expect = 0, got = 0; struct C { void* to; const void* from; uint32_t n; }; std::vector<C> copies; };
inline std::map<void*, Bar> bars;
inline void arrive(uint64_t* b) { auto& x = bars.at(b); if (++x.arrivals == x.count) x.arrivals = 0, x.phase++; }
inline void tramp() { body(); fibers[cur].done = true; swapcontext(&fibers[cur].ctx, &mainctx); }
inline void run_grid(int first, int ctas, std::function<void()> f) {
  first_block = first; body = f; bars.clear(); memset(wcount, 0, sizeof wcount); memset(ncount, 0, sizeof ncount);
  for (int c = 0; c < ctas; c++) {
    __asan_unpoison_memory_region(shared_all[c], sizeof shared_all[c]); memset(shared_all[c], 0xff, sizeof shared_all[c]);  // NaN
    __asan_poison_memory_region(shared_all[c] + limit, sizeof shared_all[c] - limit);
  }
  const int all = N * ctas;
  for (int i = 0; i < all; i++) { auto& F = fibers[i]; if (F.stack.empty()) F.stack.resize(96 * 1024); F.done = false; getcontext(&F.ctx); F.ctx.uc_stack.ss_sp = F.stack.data(); F.ctx.uc_stack.ss_size = F.stack.size(); F.ctx.uc_link = nullptr; makecontext(&F.ctx, tramp, 0); }
  long rounds = 0;
  for (int left = all; left;) { left = 0; for (int k = 0; k < all; k++) { int i = (rounds & 1) ? all - 1 - k : k; if (!fibers[i].done) { cur = i; swapcontext(&mainctx, &fibers[i].ctx); left += !fibers[i].done; } } if (++rounds > 30000) { printf("HANG\n"); exit(1); } }
}
}
#define threadIdx (Dim{(unsigned)emu::thread(), 0, 0})
#define blockIdx (Dim{(unsigned)(emu::first_block + emu::cta()), 0, 0})
#define gridDim_x emu::grid_x
inline void __syncthreads() { emu::syncthreads(); }
inline void __syncwarp() { emu::syncwarp(); }
inline float __shfl_xor_sync(unsigned, float v, int d) { uint32_t u; memcpy(&u, &v, 4); u = emu::exchange(u, (emu::cur & 31) ^ d); memcpy(&v, &u, 4); return v; }
inline int __shfl_xor_sync(unsigned, int v, int d) { return (int)emu::exchange((uint32_t)v, (emu::cur & 31) ^ d); }
inline float __shfl_down_sync(unsigned, float v, int d) { uint32_t u; memcpy(&u, &v, 4); int l = emu::cur & 31; u = emu::exchange(u, l + d < 32 ? l + d : l); memcpy(&v, &u, 4); return v; }
inline uint32_t __shfl_sync(unsigned, uint32_t v, int l) { return emu::exchange(v, l); }
inline int __shfl_sync(unsigned, int v, int l) { return (int)emu::exchange((uint32_t)v, l); }
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
inline uint32_t __funnelshift_r(uint32_t lo, uint32_t hi, int s) { return (uint32_t)(((uint64_t)hi << 32 | lo) >> (s & 31)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline float rsqrtf_(float v) { return 1.f / std::sqrt(v); }
#define rsqrtf rsqrtf_
inline float __expf_(float v) { return std::exp(v); }
#define __expf __expf_
inline float __fadd_rn_(float a, float b) { return a + b; }
#define __fadd_rn __fadd_rn_
inline float __fmul_rn_(float a, float b) { return a * b; }
#define __fmul_rn __fmul_rn_
inline float __fmaf_rn_(float a, float b, float c) { return std::fma(a, b, c); }
#define __fmaf_rn __fmaf_rn_
inline float __fdiv_rn_(float a, float b) { return a / b; }
#define __fdiv_rn __fdiv_rn_
using std::min; using std::max;
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) { uint64_t v = (uint64_t)b << 32 | a; unsigned r = 0; for (int i = 0; i < 4; i++) r |= (unsigned)(v >> 8 * (s >> 4 * i & 7) & 255) << 8 * i; return r; }
inline int __dp4a(int a, int b, int c) { for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i); return c; }
inline float __int2float_rn(int v) { return (float)v; }
inline float __uint_as_float(uint32_t v) { float f; memcpy(&f, &v, 4); return f; }
inline uint32_t __float_as_uint(float v) { uint32_t f; memcpy(&f, &v, 4); return f; }
#include <cuda_runtime.h>
#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __forceinline__
#define __forceinline__ inline
template <class... P, class... A>
cudaError_t emu_launch(const cudaLaunchConfig_t* c, void (*k)(P...), A&&... a) {
  emu::limit = c->dynamicSmemBytes; emu::N = c->blockDim.x;
  if (c->gridDim.y != 1) abort(); emu::grid_x = c->gridDim.x;
  for (unsigned x = 0; x < c->gridDim.x; x += emu::kCtas) emu::run_grid(x, std::min<unsigned>(emu::kCtas, c->gridDim.x - x), [&] { k(a...); });
  return cudaSuccess;
}
#define cudaLaunchKernelEx emu_launch
template <class... P> cudaError_t emu_attr(void (*)(P...), cudaFuncAttribute, int) { return cudaSuccess; }
#define cudaFuncSetAttribute emu_attr
template <class... P> cudaError_t emu_attrs(cudaFuncAttributes* a, void (*)(P...)) { memset((void*)a, 0, sizeof *a); a->numRegs = 80; return cudaSuccess; }
#define cudaFuncGetAttributes emu_attrs
