// Chains of products at real shapes: time per chain, with a small kernel between them in the place of attention.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>
#include <random>
#include <algorithm>
#include "chain.h"
#include "gemv.h"
#include "layout.h"
using namespace exl2nb;
#define CK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); exit(1); } } while (0)
std::mt19937 rng(1);
struct Mix { int bits; double share; int group; };
std::vector<Group> groups(int K, std::vector<Mix> m) {
  std::vector<Group> g; int row = 0;
  for (size_t i = 0; i < m.size(); i++) { int rows = i + 1 == m.size() ? K - row : int(K * m[i].share / m[i].group + 0.999) * m[i].group; for (int r = 0; r < rows; r += m[i].group) g.push_back({m[i].bits, std::min(m[i].group, rows - r)}); row += rows; }
  return g;
}
__global__ void fill(uint32_t* p, size_t n, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) { uint32_t h = uint32_t(i) * 2654435761u + seed; h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16; p[i] = h; }
}
struct M { std::vector<uint8_t> head; uint8_t* blob; BlobPlan plan; size_t bytes; };
M make(int K, std::vector<std::pair<int, std::vector<Mix>>> parts, bool permuted = true) {
  std::vector<PartPlan> plans; std::vector<int> perm(K); for (int i = 0; i < K; i++) perm[i] = i; if (permuted) std::shuffle(perm.begin(), perm.end(), rng);
  for (auto& p : parts) { auto g = groups(K, p.second); std::vector<uint16_t> mx(g.size(), 0x3c00); plans.push_back(plan_exl2(g, mx, 0.002, p.first, perm)); }
  M m; auto e = plan_blob(K, plans, m.plan); if (!e.empty()) { printf("%s\n", e.c_str()); exit(1); }
  CK(cudaMalloc(&m.blob, m.plan.header.bytes)); fill<<<1320, 256>>>((uint32_t*)m.blob, m.plan.header.bytes / 4, rng()); CK(cudaMemcpy(m.blob, m.plan.meta.data(), m.plan.meta.size(), cudaMemcpyHostToDevice));
  m.head.resize(sizeof(GpuHeader) + m.plan.parts.size() * sizeof(GpuPart)); memcpy(m.head.data(), m.plan.meta.data(), m.head.size()); m.bytes = m.plan.header.bytes - m.plan.meta.size(); return m;
}
// Stands for attention: reads the sums of QKV, writes the input of O.
__global__ void between(const float* qkv, int stride, half* x, int xs, int n, int tokens) {
  asm volatile("griddepcontrol.launch_dependents;"); asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int m = 0; m < tokens; m++) for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) { float v = __ldcg(qkv + size_t(m) * stride + i); x[size_t(m) * xs + i] = __float2half(v / (1 + fabsf(v))); }
}
#ifdef CLOCKS
void chain_report(double);
#endif
int main(int argc, char** argv) {
  struct Shape { const char* name; int H, I, kv, layers; bool tiny70; } shapes[] = {{"7b", 4096, 11008, 4096, 32, false}, {"tiny", 2048, 5632, 256, 22, false}, {"8b", 4096, 14336, 1024, 32, false}, {"70b", 8192, 28672, 1024, 12, true}};
  for (auto& s : shapes) {
    if (argc > 1 && !strstr(argv[1], s.name)) continue;
    std::vector<Mix> a{{5, .1, 128}, {4, .9, 128}}, v{{5, .1, 64}, {4, .9, 64}}, g{{4, 1, 128}}, u{{4, 1, 32}}, d{{8, .05, 32}, {4, .95, 128}};
    if (s.tiny70) a = {{3, .05, 64}, {2, .95, 64}}, v = a, g = a, u = a, d = {{6, .05, 32}, {3, .2, 64}, {2, .75, 64}};
    struct L { M q, o, g, d; }; std::vector<L> layers; size_t bytes = 0;
    for (int i = 0; i < s.layers; i++) { L l{make(s.H, {{s.H, a}, {s.kv, a}, {s.kv, v}}), make(s.H, {{s.H, a}}), make(s.H, {{s.I, g}, {s.I, u}}), make(s.I, {{s.H, d}})}; bytes += l.q.bytes + l.o.bytes + l.g.bytes + l.d.bytes; layers.push_back(l); }
    int all = 8; half *xo, *xn, *xa; float *res, *qkv, *norm; uint8_t* between_products; const int N = s.H + 2 * s.kv;
    auto room = [&](auto** p, size_t n) { CK(cudaMalloc((void**)p, n)); CK(cudaMemset(*p, 0, n)); };
    room(&xo, all * (s.H + 128) * 2); room(&xn, all * (s.H + 128) * 2); room(&xa, all * (s.I + 128) * 2); room(&res, all * s.H * 4); room(&qkv, all * N * 4); room(&norm, s.H * 4); room(&between_products, chain_bytes(s.H, s.I));
    std::vector<float> ones(s.H, 1.f), r0(all * s.H); for (int m = 0; m < all; m++) for (int i = 0; i < s.H; i++) r0[m * s.H + i] = std::sin(i * 0.7f); CK(cudaMemcpy(norm, ones.data(), s.H * 4, cudaMemcpyHostToDevice));
    cudaStream_t st; CK(cudaStreamCreate(&st));
    for (int T : {1, 2, 4, 8}) {
      if (argc > 2 && T > atoi(argv[2])) continue;
      auto step = [&](bool pdl) {
        for (int i = 0; i < s.layers; i++) {
          cudaLaunchConfig_t c = {}; c.gridDim = 32, c.blockDim = 256, c.stream = st; cudaLaunchAttribute at[1]; at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization; at[0].val.programmaticStreamSerializationAllowed = 1; c.attrs = at, c.numAttrs = pdl;
          L &l = layers[i], &n = layers[(i + 1) % s.layers];
          MatrixInput io, ig, id, iq; set_input(io, l.o.head.data(), l.o.blob, xo, all); set_input(ig, l.g.head.data(), l.g.blob, xn, all); set_input(id, l.d.head.data(), l.d.blob, xa, all); set_input(iq, n.q.head.data(), n.q.blob, xn, all);
          CK(cudaLaunchKernelEx(&c, between, (const float*)qkv, N, xo, io.stride, s.H, T));
          auto mat = [&](M& m, MatrixInput& in) { GemvArgs a{}; set_weights(a, m.head.data(), m.blob); a.tokens = T, a.x = in.x, a.x_stride = in.stride, a.x_perm_stride = in.perm_stride, a.scale = 1; return a; };
          ChainLink k[4] = {{mat(l.o, io), l.o.head.data(), l.o.blob, kResidual}, {mat(l.g, ig), l.g.head.data(), l.g.blob, kActivation}, {mat(l.d, id), l.d.head.data(), l.d.blob, kResidual}, {mat(n.q, iq), n.q.head.data(), n.q.blob, kStore}};
          auto adds = [&](GemvArgs& a, MatrixInput to) { a.residual = res, a.residual_stride = s.H, a.next = to, a.next.num_perms = 1, a.next_norm = norm; };
          adds(k[0].a, ig), adds(k[2].a, iq); k[1].a.gated = true, k[1].a.next = id, k[1].a.next.num_perms = 1; k[3].a.out = qkv, k[3].a.out_stride = N;
          for (int j : {1, 3}) k[j].a.inverse_width = 1.f / s.H, k[j].a.eps = 1e-5f;
          if (i == 0 && !chain_tokens(k, 4)) { printf("no chain\n"); exit(1); }
          if (const char* w = chain_launch(k, 4, between_products, st, pdl)) { printf("%s\n", w); exit(1); }
        }
      };
      double sums[2];
      for (int pdl = 0; pdl < 2; pdl++) {
        CK(cudaMemcpy(res, r0.data(), r0.size() * 4, cudaMemcpyHostToDevice)); CK(cudaMemset(qkv, 0, all * N * 4));
        step(pdl); CK(cudaStreamSynchronize(st)); std::vector<float> h(all * s.H); CK(cudaMemcpy(h.data(), res, h.size() * 4, cudaMemcpyDeviceToHost)); double z = 0, y = 0; for (int i = 0; i < T * s.H; i++) z += h[i] * std::cos(i % s.H), y += std::fabs(h[i]); sums[pdl] = z / T; if (!pdl) printf("mean %.3g ", y / T / s.H);
        cudaGraph_t graph; cudaGraphExec_t exec; CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal)); step(pdl); CK(cudaStreamEndCapture(st, &graph)); CK(cudaGraphInstantiate(&exec, graph, 0));
        cudaEvent_t a, b; CK(cudaEventCreate(&a)); CK(cudaEventCreate(&b)); float ms[5]; for (int i = 0; i < 3; i++) CK(cudaGraphLaunch(exec, st));
        for (float& v : ms) { CK(cudaEventRecord(a, st)); for (int i = 0; i < 8; i++) CK(cudaGraphLaunch(exec, st)); CK(cudaEventRecord(b, st)); CK(cudaStreamSynchronize(st)); CK(cudaEventElapsedTime(&v, a, b)); v /= 8; }
        std::sort(ms, ms + 5); const double us = ms[2] * 1e3 / s.layers; printf("%s T %d %s: %.2f us a chain (weights alone %.2f), %.0f GB/s; ", s.name, T, pdl ? "pdl" : "plain", us, bytes / 4.6e6 / s.layers, bytes / (ms[2] * 1e6));
      }
      
#ifdef CLOCKS
      printf("\n"); chain_report(88.0 * s.layers);
#endif
      printf("sum %.9g %.9g\n", sums[0], sums[1]); fflush(stdout);
    }
    for (auto& l : layers) for (M* m : {&l.q, &l.o, &l.g, &l.d}) cudaFree(m->blob);
  }
}
