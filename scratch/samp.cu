#include "../csrc/cuda/sample.cu"
#include <cstdio>
#include <vector>
#include <algorithm>
using namespace exl2nb;
int main() {
  const int V[2] = {32000, 128256};
  cudaStream_t s; cudaStreamCreate(&s);
  float* logits; cudaMalloc(&logits, size_t(128) * 128256 * 4);
  std::vector<float> h(size_t(128) * 128256); unsigned x = 1; for (auto& v : h) x = x * 1664525u + 1013904223u, v = (x >> 8) * 1e-6f;
  cudaMemcpy(logits, h.data(), h.size() * 4, cudaMemcpyHostToDevice);
  SampleRow* p; cudaMalloc(&p, 128 * sizeof(SampleRow));
  std::vector<SampleRow> rows(128); for (auto& r : rows) r = {0.f, 1.f, 0.f, 1.f, 0.f, 0.f, 0, 0, 0, 0};
  cudaMemcpy(p, rows.data(), 128 * sizeof(SampleRow), cudaMemcpyHostToDevice);
  SampleResult* res; cudaMalloc(&res, 4 * 128 * 16); int* st; cudaMalloc(&st, 128 * 4 * 8); cudaMemset(st, 0, 128 * 4 * 8);
  for (int keep = 0; keep < 2; keep++) {
    const size_t fixed = (sizeof(SampleShared) + 15) / 16 * 16, sh = keep ? fixed + 16036 * 4 : fixed;
    cudaFuncSetAttribute(sample_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sh));
    cudaFuncSetAttribute(sample_rows, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
    for (int cl : {1, 2, 4, 8}) {
      cudaLaunchConfig_t c = {}; c.gridDim = dim3(cl, 64); c.blockDim = 512; c.dynamicSmemBytes = sh;
      cudaLaunchAttribute a[1]; a[0].id = cudaLaunchAttributeClusterDimension; a[0].val.clusterDim = {unsigned(cl), 1, 1}; c.attrs = a; c.numAttrs = 1;
      int n = 0; cudaError_t e = cudaOccupancyMaxActiveClusters(&n, sample_rows, &c);
      std::printf("shared %zu cluster %d: %d active clusters (%s)\n", sh, cl, n, cudaGetErrorString(e));
    }
  }
  for (int v : V)
    for (int R : {1, 2, 4, 8, 16, 24, 32, 33, 40, 48, 64, 128}) {
      cudaGraph_t g; cudaGraphExec_t ge; cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
      for (int i = 0; i < 20; i++) {
        SampleArgs a{}; a.logits = logits; a.row_stride = v; a.rows = R; a.vocab = v; a.params = p; a.results = res; a.ring = 4; a.step = st;
        a.advance.ids = st + 128; a.advance.positions = st + 256; a.advance.context_lens = st + 384;
        if (auto* w = sample_launch(a, s, false)) std::printf("%s\n", w);
      }
      cudaStreamEndCapture(s, &g); cudaGraphInstantiate(&ge, g, 0);
      cudaEvent_t b, e; cudaEventCreate(&b); cudaEventCreate(&e); std::vector<float> t;
      for (int i = 0; i < 9; i++) { cudaEventRecord(b, s); cudaGraphLaunch(ge, s); cudaEventRecord(e, s); cudaStreamSynchronize(s); float ms; cudaEventElapsedTime(&ms, b, e); t.push_back(ms * 50); }
      std::sort(t.begin(), t.end()); std::printf("vocab %d rows %d: %.2f us\n", v, R, t[4]);
    }
  std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
