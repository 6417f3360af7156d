import re,shutil,sys,os
src,dst=sys.argv[1:3]
shutil.rmtree(dst,ignore_errors=True); shutil.copytree(src+'/csrc',dst)
c=dst+'/cuda/'
def sub(f,pairs):
    s=open(c+f).read()
    for a,b in pairs:
        n=re.sub(a,b,s,flags=re.S)
        assert n!=s,(f,a); s=n
    open(c+f,'w').write(s)
sub('fields.cuh',[(r'uint32_t r;\s*asm\("lop3[^;]*;[^;]*;\s*return r;', 'return (a & m) | e;')])
sub('whole.cuh',[(r'#if __CUDA_ARCH__ >= 800\n  asm volatile.*?#endif\n', '  emu_mma_bytes(c, a0, a1, a2, a3, b0, b1);\n')])
sub('chain_sync.cuh',[(r'#if __CUDA_ARCH__ >= 900\n__device__ __forceinline__ void crew_sync.*?once\(\) \{ return 0; \}\n#endif\n','''
inline void crew_sync() { emu::named(1, kCrewThreads); }
inline void some_sync(int n) { emu::named(2, n); }
inline void barrier_arrive(uint64_t* b) { emu::arrive(b); }
inline void meet_arrive(unsigned* c) { ++*c; }
inline unsigned meet_now(const unsigned* c) { emu::yield(); return *(volatile const unsigned*)c; }
inline uint4 load_shared_by_all(const void* p) { emu::yield(); return *(const uint4*)p; }
inline void store_for_all(half* p, half v) { *p = v; }
inline void store_for_all(float* p, float v) { *p = v; }
inline void copy_weights(void* to, const void* from, uint32_t n, uint64_t* b, uint64_t) { bulk_copy(to, from, n, b); }
inline uint64_t once() { return 0; }
''')])
sub('item.cuh',[(r'const float z0 = START.*?\n}\n', 'emu_mma(c, a, b0, b1, START);\n}\n')])
open(c+'pdl.cuh','w').write('''#pragma once
#include "emu.h"
#include <cuda_fp16.h>
namespace exl2nb {
inline void pdl_launch_dependents() {}
inline void pdl_wait() {}
inline uint32_t shared_address(const void*) { return 0; }
inline void barrier_init(uint64_t* b, int n) { emu::bars[b] = {}; emu::bars[b].count = n; }
inline void barrier_fence() {}
inline void barrier_expect(uint64_t* b, uint32_t n) { auto& x = emu::bars.at(b); if (x.arrived) { printf("double arrive\\n"); abort(); } x.arrived = true; x.expect = n; }
inline void bulk_copy(void* to, const void* from, uint32_t n, uint64_t* b) { if (n % 16 || (uintptr_t)to % 16 || (uintptr_t)from % 16) { printf("alignment %u %p %p\\n", n, to, from); abort(); }
  if ((uint8_t*)to < emu::shared_now() || (uint8_t*)to + n > emu::shared_now() + emu::limit) { printf("outside\\n"); abort(); }
  auto& x = emu::bars.at(b); x.got += n; x.copies.push_back({to, from, n}); }
inline void barrier_wait(uint64_t* b, uint32_t parity) {
  for (;;) { auto& x = emu::bars.at(b);
    if ((uint32_t)(x.phase & 1) != parity) return;
    if (x.arrived && x.got == x.expect) { for (auto& c : x.copies) memcpy(c.to, c.from, c.n); x.copies.clear(); x.arrived = false; x.got = 0; x.phase++; return; }
    emu::yield(); }
}
template <bool ASYNC> inline void copy16(void* to, const void* from) { memcpy(to, from, 16); }
inline void async_commit() {}
template <int N> inline void async_wait() {}
inline float warp_sum(float v) { for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d); return v; }
inline float activation(float v, int kind) {
  if (kind == 0) return v / (1.f + std::exp(-v));
  if (kind == 1) return 0.5f * v * (1.f + erff(v * 0.70710678118f));
  const float u = 0.7978845608f * (v + 0.044715f * v * v * v);
  return 0.5f * v * (1.f + tanhf(u));
}
inline void emu_mma_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int w = emu::cur / 32, l = emu::cur % 32; auto* buf = emu::wbuf[w];
  buf[l][0] = a0, buf[l][1] = a1, buf[l][2] = a2, buf[l][3] = a3, buf[l][4] = b0, buf[l][5] = b1;
  emu::syncwarp();
  const auto A = [&](int row, int k) { const int lane = (row & 7) * 4 + (k % 16) / 4, reg = (row >> 3) + 2 * (k / 16); return (int)(buf[lane][reg] >> 8 * (k & 3) & 255); };
  const auto B = [&](int k, int col) { const int lane = col * 4 + (k % 16) / 4; return (int)(int8_t)(buf[lane][4 + k / 16] >> 8 * (k & 3)); };
  const int g = l >> 2, t = l & 3;
  for (int i = 0; i < 4; i++) { const int row = g + 8 * (i >> 1), col = 2 * t + (i & 1); int v = c[i]; for (int k = 0; k < 32; k++) v += A(row, k) * B(k, col); c[i] = v; }
  emu::syncwarp();
}
inline void emu_mma(float (&c)[4], const uint32_t* a, uint32_t b0, uint32_t b1, bool start) {
  const int w = emu::cur / 32, l = emu::cur % 32; auto* buf = emu::wbuf[w];
  for (int i = 0; i < 4; i++) buf[l][i] = a[i];
  buf[l][4] = b0, buf[l][5] = b1;
  emu::syncwarp();
  const auto h = [](uint32_t v, int hi) { __half_raw r; r.x = (unsigned short)(v >> 16 * hi); return __half2float(__half(r)); };
  const auto A = [&](int row, int k) { const int lane = (row & 7) * 4 + ((k & 7) >> 1), reg = (row >> 3) + 2 * (k >> 3); return h(buf[lane][reg], k & 1); };
  const auto B = [&](int k, int col) { const int lane = col * 4 + ((k & 7) >> 1); return h(buf[lane][4 + (k >> 3)], k & 1); };
  const int g = l >> 2, t = l & 3;
  for (int i = 0; i < 4; i++) { const int row = g + 8 * (i >> 1), col = 2 * t + (i & 1); float v = start ? 0.f : c[i]; for (int k = 0; k < 16; k++) v += A(row, k) * B(k, col); c[i] = v; }
  emu::syncwarp();
}
}
''')
s=open(c+'gemv.cuh').read(); s=re.sub(r'asm volatile\("ld.global.nc.*?\);\n','none = 0;\n',s); open(c+'gemv.cuh','w').write(s)
for f in os.listdir(c):
    p=c+f
    if not f.endswith(('.cu','.cuh','.h')): continue
    s=open(p).read()
    s=re.sub(r'extern __shared__ __align__\(128\) uint8_t shared\[\];','uint8_t* const shared = emu::shared_now();',s)
    s=re.sub(r'#pragma unroll[^\n]*\n','',s)
    open(p,'w').write(s)
