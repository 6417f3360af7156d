// What attention costs a decode step: microseconds a layer by itself (graph of 32 launches with dependent launch, every layer its own
// pages), and beside two kernels that stand for the matrix products around it: their whole register file, their streams of weights (25 and
// 8 MB, so that nothing small stays in the L2 cache by itself), with attention between them and without.
// Built as kernels.cuh says. `attention_step fp16 32 32 128 1 100`.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.cuh"
#include "cuda/attention/cache_format.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/pdl.cuh"
#include "kernels.cuh"

using namespace exl2nb;

constexpr int kLayers = 32, kThreads = 512;

__device__ uint32_t mixed(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ x >> 16;
}
__global__ void fill_floats(float* p, size_t n, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    p[i] = (mixed(uint32_t(i)) * (1.f / 4294967296.f) - 0.5f) * scale;
}
// Pages: codes at random, fp16 numbers and scales of a sensible size.
__global__ void fill_pages(uint16_t* p, size_t halves, int page_halves, int code_halves, bool plain) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < halves; i += size_t(gridDim.x) * blockDim.x) {
    const uint32_t r = mixed(uint32_t(i) + 77u);
    const bool number = plain || int(i % page_halves) >= code_halves;
    p[i] = number ? __half_as_ushort(__float2half_rn(plain ? (r >> 8) * (1.f / 8388608.f) - 1.f : 0.05f + (r & 255) * 0.0004f))
                  : uint16_t(r & 0x7777);
  }
}

// Stands for a product: a CTA a multiprocessor, all its registers; half of its weights are on their way before it waits.
__global__ void __launch_bounds__(kThreads, 1) product(const uint4* weights, int vectors, float* out, int outputs, const float* in) {
  extern __shared__ uint4 held[];
  uint4 sum = make_uint4(0, 0, 0, 0);
  const int hop = gridDim.x * kThreads, at = blockIdx.x * kThreads + threadIdx.x;
  const auto read = [&](int from, int to) {
    int i = from + at;
    for (; i + 3 * hop < to; i += 4 * hop) {
      uint4 v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) v[j] = __ldcs(weights + i + j * hop);
#pragma unroll
      for (int j = 0; j < 4; j++) sum.x ^= v[j].x, sum.y += v[j].y, sum.z ^= v[j].z, sum.w += v[j].w;
    }
    for (; i < to; i += hop) sum.x ^= __ldcs(weights + i).x;
  };
  const int early = min(vectors, 4 * hop);
  read(0, early);
  held[threadIdx.x] = sum;
  pdl_launch_dependents();
  pdl_wait();
  float y = in[at % 64];
#pragma unroll 256
  for (int i = 0; i < 1024; i++) y = fmaf(y, 0.5f + (i & 255) * 1e-4f, 0.25f);  // machine code of a product's size
  read(early, vectors);
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 12345u) y += 1.f;
  for (int i = at; i < outputs; i += hop) out[i] = (mixed(i) * (1.f / 4294967296.f) - 0.5f) + y * 1e-9f + held[threadIdx.x].x * 1e-30f;
}

struct Setup {
  int Hq, Hkv, D, batch, context, k_format, v_format;
  int pages() const { return (context + 255) / 256; }
  double bytes() const {
    double a = 0;
    for (int f : {k_format, v_format}) a += double(batch) * context * Hkv * page_bytes(f, D) / 256;
    return a;
  }
};

template <class T>
T* room(size_t n) {
  T* p;
  CHECK(cudaMalloc(&p, n * sizeof(T)));
  CHECK(cudaMemset(p, 0, n * sizeof(T)));
  return p;
}

struct Bench {
  Setup s;
  int layers, sms;
  std::vector<uint8_t*> k, v;
  int *table, *bounds, *lens, *positions, *inverse;
  float *cos, *sin, *qkv, *hidden;
  half* x;
  void* workspace;
  size_t workspace_bytes;
  uint4* weights;
  static constexpr int kBefore = 25 << 16, kBehind = 8 << 16;  // vectors of 16 bytes
  cudaStream_t stream;

  explicit Bench(const Setup& setup) : s(setup) {
    int device = 0;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    CHECK(cudaStreamCreate(&stream));
    layers = int(std::max(2.0, std::min(double(kLayers), 12e9 / s.bytes())));
    for (int l = 0; l < layers; l++)
      for (int which = 0; which < 2; which++) {
        const int f = which ? s.v_format : s.k_format, page = page_bytes(f, s.D), codes = 256 * s.D * pool_bits(f) / 8;
        const size_t bytes = size_t(s.batch) * s.pages() * s.Hkv * page;
        auto* p = room<uint8_t>(bytes);
        fill_pages<<<1024, 256>>>(reinterpret_cast<uint16_t*>(p), bytes / 2, page / 2, codes / 2, f == kCacheF16);
        (which ? v : k).push_back(p);
      }
    const int rows = s.Hq + 2 * s.Hkv, n = s.batch * s.pages();
    std::vector<int> ids(n), cu(s.batch + 1), len(s.batch, s.context), pos(s.batch, s.context - 1), inv(s.Hq * s.D);
    for (int i = 0; i < n; i++) ids[i] = int((i * 7919ll) % n);
    if (n % 7919 == 0) std::sort(ids.begin(), ids.end());
    for (int i = 0; i <= s.batch; i++) cu[i] = i;
    for (size_t i = 0; i < inv.size(); i++) inv[i] = int((i * 97) % inv.size());
    const auto copy = [&](const std::vector<int>& h) {
      int* p = room<int>(h.size());
      CHECK(cudaMemcpy(p, h.data(), h.size() * 4, cudaMemcpyHostToDevice));
      return p;
    };
    table = copy(ids), bounds = copy(cu), lens = copy(len), positions = copy(pos), inverse = copy(inv);
    const size_t angles = size_t(s.context) * s.D / 2;
    cos = room<float>(angles), sin = room<float>(angles), qkv = room<float>(size_t(s.batch) * rows * s.D), hidden = room<float>(1 << 20);
    fill_floats<<<256, 256>>>(cos, angles, 2.f), fill_floats<<<256, 256>>>(sin, angles, 2.f);
    fill_floats<<<256, 256>>>(qkv, size_t(s.batch) * rows * s.D, 2.f);
    x = room<half>(size_t(s.batch) * s.Hq * s.D);
    workspace_bytes = attention_workspace_bytes(s.batch, s.Hq, s.Hkv, s.D);
    workspace = room<uint8_t>(workspace_bytes);
    weights = room<uint4>(size_t(kBefore + kBehind) * kLayers);
    fill_floats<<<1024, 256>>>(reinterpret_cast<float*>(weights), size_t(kBefore + kBehind) * kLayers * 4, 2.f);
    CHECK(cudaFuncSetAttribute(product, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    CHECK(cudaFuncSetAttribute(product, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
    CHECK(cudaDeviceSynchronize());
  }

  void attention(int layer, bool pdl) {
    AttentionArgs a{};
    a.cache = {k[layer % layers], v[layer % layers], s.k_format, s.v_format, table, bounds, lens, s.batch, s.pages(), s.Hq, s.Hkv, s.D};
    a.rope.cos = cos, a.rope.sin = sin, a.rope.half = s.D / 2, a.rope.positions = positions;
    a.to.x = x, a.to.stride = s.Hq * s.D, a.to.num_perms = 1, a.to.inverse[0] = inverse;
    a.large_chunks = s.batch > 8;
    a.qkv = qkv, a.tokens = s.batch, a.scale = 0.088f, a.workspace = workspace, a.workspace_bytes = workspace_bytes;
    LaunchList list(this_device(), pdl);
    plan_attention(list, a);
    if (const char* wrong = list.run(stream)) std::printf("%s\n", wrong), std::exit(1);
  }
  void stream_weights(int layer, bool before, bool pdl) {
    cudaLaunchConfig_t config = {};
    config.gridDim = sms, config.blockDim = kThreads, config.dynamicSmemBytes = 200 << 10, config.stream = stream;
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, attribute[0].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attribute, config.numAttrs = pdl;
    const uint4* w = weights + size_t(layer) * (kBefore + kBehind) + (before ? 0 : kBefore);
    const int outputs = before ? s.batch * (s.Hq + 2 * s.Hkv) * s.D : 4096;
    CHECK(cudaLaunchKernelEx(&config, product, w, before ? kBefore : kBehind, before ? qkv : hidden, outputs,
                             static_cast<const float*>(hidden)));
  }
  // Microseconds a layer.
  float time(bool products, bool with_attention, bool pdl) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int l = 0; l < kLayers; l++) {
      if (products) stream_weights(l, true, pdl && l);
      if (with_attention) attention(l, pdl && (products || l));
      if (products) stream_weights(l, false, pdl);
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> all;
    for (int i = 0; i < 22; i++) {
      CHECK(cudaEventRecord(begin, stream));
      CHECK(cudaGraphLaunch(exec, stream));
      CHECK(cudaEventRecord(end, stream));
      CHECK(cudaStreamSynchronize(stream));
      float ms = 0;
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (i > 1) all.push_back(ms * 1e3f / kLayers);
    }
    std::sort(all.begin(), all.end());
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    return all[all.size() / 2];
  }
  void release() {
    for (auto* list : {&k, &v})
      for (auto* p : *list) cudaFree(p);
    for (void* p : {static_cast<void*>(table), static_cast<void*>(bounds), static_cast<void*>(lens), static_cast<void*>(positions),
                    static_cast<void*>(inverse), static_cast<void*>(cos), static_cast<void*>(sin), static_cast<void*>(qkv),
                    static_cast<void*>(hidden), static_cast<void*>(x), workspace, static_cast<void*>(weights)})
      cudaFree(p);
    CHECK(cudaStreamDestroy(stream));
  }
};

int format_of(const std::string& name) {
  return name == "fp16" ? kCacheF16 : name == "q8" ? kCacheQ8 : name == "q4" ? kCacheQ4 : kCacheFp8;
}

int main(int count, char** words) {
  for (int i = 1; i + 5 < count; i += 6) {  // mode (fp16, q8, q6, q4, fp8), heads, KV heads, head dim, batch, context
    Setup s{std::atoi(words[i + 1]), std::atoi(words[i + 2]), std::atoi(words[i + 3]), std::atoi(words[i + 4]), std::atoi(words[i + 5])};
    const std::string mode = words[i];
    s.k_format = format_of(mode == "q6" ? "q8" : mode), s.v_format = format_of(mode == "q6" ? "q4" : mode);
    Bench b(s);
    const float alone = b.time(false, true, true), plain = b.time(false, true, false), floor_us = float(s.bytes() / 4559e3);
    const float with = b.time(true, true, true), without = b.time(true, false, true);
    std::printf(
        "%-5s %d/%d x %d batch %d context %d: alone %.2f us (without dependent launch %.2f), floor %.2f = %.0f %%; between products +%.2f "
        "(%.2f, %.2f)\n",
        mode.c_str(), s.Hq, s.Hkv, s.D, s.batch, s.context, alone, plain, floor_us, 100 * floor_us / alone, with - without, with, without);
    std::fflush(stdout);
    b.release();
  }
}
