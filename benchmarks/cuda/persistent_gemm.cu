// Persistent GEMM chains at the shapes of five models, with a small kernel in place of attention between them; and large single GEMMs
// ("head").
// `persistent_gemm 7b 4 32`: models whose name contains 7b, up to 4 rows, chains that leave 32 SMs to attention
// (PersistentOp::attention_sms). The number after the times is a checksum of row 0, for comparison between versions and numbers of rows.
// Built as kernels.cuh says.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.cuh"
#include "cuda/gemm/persistent/persistent_gemm.cuh"
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/runtime/device.h"
#include "format/gpu_layout.h"
#include "kernels.cuh"

using namespace exl2nb;

static const char* launch(const PersistentOp* ops, int count, uint8_t* workspace, size_t bytes, void* stream, bool pdl) {
  LaunchList list(this_device(), pdl);
  plan_persistent(list, ops, count, workspace, bytes);
  return list.run(stream);
}
static void check(const char* wrong) {
  if (!wrong) return;
  std::printf("%s\n", wrong);
  std::exit(1);
}

struct Mix {
  int bits;
  double share;
  int group;
};
using Mixes = std::vector<Mix>;

static std::vector<Group> groups(int K, const Mixes& mixes) {
  std::vector<Group> all;
  int row = 0;
  for (size_t i = 0; i < mixes.size(); i++) {
    const Mix& m = mixes[i];
    const int rows = i + 1 == mixes.size() ? K - row : static_cast<int>(K * m.share / m.group + 0.999) * m.group;
    for (int r = 0; r < rows; r += m.group) all.push_back({m.bits, std::min(m.group, rows - r)});
    row += rows;
  }
  return all;
}

__global__ void fill(uint32_t* p, size_t n, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    uint32_t h = uint32_t(i) * 2654435761u + seed;
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
    p[i] = h;
  }
}
// Stands for attention: reads the sums of QKV, writes the input of O.
__global__ void between(const float* qkv, int stride, half* x, int x_stride, int n, int tokens) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int m = 0; m < tokens; m++)
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
      const float v = __ldcg(qkv + size_t(m) * stride + i);
      x[size_t(m) * x_stride + i] = __float2half(v / (1 + fabsf(v)));
    }
}
// Random codes of some matrices side by side, one permutation.
struct Matrix {
  std::vector<uint8_t> head;
  uint8_t* blob;
  size_t bytes;

  Matrix(int K, const std::vector<std::pair<int, Mixes>>& parts, std::mt19937& random) {
    std::vector<int> order(static_cast<size_t>(K));
    for (int i = 0; i < K; i++) order[static_cast<size_t>(i)] = i;
    std::shuffle(order.begin(), order.end(), random);
    std::vector<PartLayout> plans;
    for (const auto& [outputs, mixes] : parts) {
      const auto g = groups(K, mixes);
      plans.push_back(layout_exl2(g, std::vector<uint16_t>(g.size(), 0x3c00), 0.002, outputs, order));
    }
    BlobLayout plan;
    if (const std::string wrong = layout_blob(K, plans, plan); !wrong.empty()) check(wrong.c_str());
    CHECK(cudaMalloc(&blob, plan.header.bytes));
    fill<<<1320, 256>>>(reinterpret_cast<uint32_t*>(blob), plan.header.bytes / 4, random());
    CHECK(cudaMemcpy(blob, plan.meta.data(), plan.meta.size(), cudaMemcpyHostToDevice));
    head.assign(plan.meta.begin(), plan.meta.begin() + static_cast<long>(sizeof(GpuHeader) + plan.parts.size() * sizeof(GpuPart)));
    bytes = static_cast<size_t>(plan.header.bytes) - plan.meta.size();
  }
  GemmArgs product(int tokens) const {
    GemmArgs a{};
    set_weights(a, head.data(), blob);
    a.tokens = tokens, a.scale = 1;
    return a;
  }
};

// The matrices' options of a layer, from make_random_model.py's menu.
struct Options {
  Mixes q, v, o, gate, up, down;
};
static const Options kAbout2 = {{{3, .05, 64}, {2, .95, 64}}, {{3, .05, 64}, {2, .95, 64}}, {{3, .05, 64}, {2, .95, 64}},
                                {{3, .05, 64}, {2, .95, 64}}, {{3, .05, 64}, {2, .95, 64}}, {{6, .05, 32}, {3, .2, 64}, {2, .75, 64}}};
static const Options kBetween = {{{3, .1, 64}, {2, .9, 64}}, {{4, .1, 128}, {3, .9, 128}}, {{4, .1, 128}, {3, .9, 128}},
                                 {{3, .1, 64}, {2, .9, 64}}, {{3, .3, 64}, {2, .7, 64}},   {{5, .05, 32}, {4, .95, 32}}};
static const Options kAbout3 = {{{4, .1, 128}, {3, .9, 128}}, {{4, .1, 64}, {3, .9, 64}},     {{4, .1, 128}, {3, .9, 128}},
                                {{4, .1, 128}, {3, .9, 128}}, {{4, .25, 128}, {3, .75, 128}}, {{8, .05, 32}, {4, .1, 128}, {3, .85, 128}}};
static const Options kAbout4 = {
    {{5, .1, 128}, {4, .9, 128}}, {{5, .1, 64}, {4, .9, 64}}, {{5, .1, 128}, {4, .9, 128}}, {{4, 1, 128}}, {{4, 1, 32}},
    {{8, .05, 32}, {4, .95, 128}}};

struct Shape {
  const char* name;
  int H, I, kv, layers;
  const Options *even, *odd;  // layers
};
static const Shape kShapes[] = {{"7b", 4096, 11008, 4096, 32, &kAbout4, &kAbout4},
                                {"tiny", 2048, 5632, 256, 22, &kAbout4, &kAbout4},
                                {"tiny3", 2048, 5632, 256, 22, &kBetween, &kAbout3},
                                {"8b", 4096, 14336, 1024, 32, &kAbout4, &kAbout4},
                                {"70b", 8192, 28672, 1024, 12, &kAbout2, &kBetween}};

// The layers of a model and what a step works with.
struct Engine {
  static constexpr int kMost = 8;
  struct Layer {
    Matrix qkv, o, up, down;
  };
  Shape s;
  int N, beside;
  std::vector<Layer> layers;
  size_t bytes = 0;
  half* x;
  float *residual, *qkv, *norm;
  uint8_t* room;
  std::vector<float> begin;
  cudaStream_t stream;

  Engine(const Shape& shape, unsigned seed, int attention) : s(shape), N(shape.H + 2 * shape.kv), beside(attention) {
    std::mt19937 random(seed);
    for (int i = 0; i < s.layers; i++) {
      const Options& of = i % 2 ? *s.odd : *s.even;
      layers.push_back({{s.H, {{s.H, of.q}, {s.kv, of.q}, {s.kv, of.v}}, random},
                        {s.H, {{s.H, of.o}}, random},
                        {s.H, {{s.I, of.gate}, {s.I, of.up}}, random},
                        {s.I, {{s.H, of.down}}, random}});
      for (const Matrix* m : {&layers.back().qkv, &layers.back().o, &layers.back().up, &layers.back().down}) bytes += m->bytes;
    }
    const auto take = [](auto** p, size_t n) {
      CHECK(cudaMalloc(reinterpret_cast<void**>(p), n));
      CHECK(cudaMemset(*p, 0, n));
    };
    take(&x, kMost * size_t(s.H + 128) * 2), take(&residual, kMost * size_t(s.H) * 4), take(&qkv, kMost * size_t(N) * 4);
    take(&norm, size_t(s.H) * 4), take(&room, persistent_bytes(this_device(), s.H, s.I));
    const std::vector<float> ones(static_cast<size_t>(s.H), 1.f);
    CHECK(cudaMemcpy(norm, ones.data(), ones.size() * 4, cudaMemcpyHostToDevice));
    for (int i = 0; i < kMost * s.H; i++) begin.push_back(std::sin(static_cast<float>(i % s.H) * 0.7f));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaDeviceSynchronize());
  }
  void step(int tokens, bool pdl) {
    for (size_t i = 0; i < layers.size(); i++) {
      const Layer &l = layers[i], &next = layers[(i + 1) % layers.size()];
      MatrixInput in;
      set_input(in, l.o.head.data(), l.o.blob, x, kMost);
      cudaLaunchConfig_t c = {};
      cudaLaunchAttribute dependent;
      dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization, dependent.val.programmaticStreamSerializationAllowed = 1;
      c.gridDim = 32, c.blockDim = 256, c.stream = stream, c.attrs = &dependent, c.numAttrs = pdl;
      CHECK(cudaLaunchKernelEx(&c, between, static_cast<const float*>(qkv), N, x, in.stride, s.H, tokens));
      PersistentOp k[4];
      const Matrix* const of[4] = {&l.o, &l.up, &l.down, &next.qkv};
      const Epilogue what[4] = {kResidual, kActivation, kResidual, kStore};
      for (int j = 0; j < 4; j++) k[j] = {of[j]->product(tokens), of[j]->head.data(), of[j]->blob, what[j]};
      k[0].attention_sms = beside, k[0].a.x = x, k[0].a.x_stride = in.stride, k[1].a.gated = true, k[3].a.out = qkv, k[3].a.out_stride = N;
      for (int j : {0, 2}) k[j].a.residual = residual, k[j].a.residual_stride = s.H, k[j].a.next_norm = norm;
      for (int j : {1, 3}) k[j].a.inverse_width = 1.f / static_cast<float>(s.H), k[j].a.eps = 1e-5f;
      if (!persistent_tokens(this_device(), k, 4)) check("these GEMMs cannot run as a persistent chain");
      check(launch(k, 4, room, persistent_bytes(this_device(), s.H, s.I), stream, pdl));
    }
  }
  cudaGraphExec_t graph(int tokens, bool pdl) {
    cudaGraph_t made;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    step(tokens, pdl);
    CHECK(cudaStreamEndCapture(stream, &made));
    CHECK(cudaGraphInstantiate(&exec, made, 0));
    return exec;
  }
  void rewind() {
    CHECK(cudaMemcpyAsync(residual, begin.data(), begin.size() * 4, cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemsetAsync(qkv, 0, kMost * size_t(N) * 4, stream));
  }
  std::vector<float> result(int tokens) {
    std::vector<float> v(static_cast<size_t>(tokens * s.H));
    CHECK(cudaMemcpyAsync(v.data(), residual, v.size() * 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    return v;
  }
};

static void time(Engine& e, int tokens) {
  std::vector<float> results[2];
  for (const bool pdl : {false, true}) {
    e.rewind(), e.step(tokens, pdl);
    results[pdl] = e.result(tokens);
    const cudaGraphExec_t exec = e.graph(tokens, pdl);
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    float ms[5];
    for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(exec, e.stream));
    for (float& v : ms) {
      CHECK(cudaEventRecord(a, e.stream));
      for (int i = 0; i < 8; i++) CHECK(cudaGraphLaunch(exec, e.stream));
      CHECK(cudaEventRecord(b, e.stream));
      CHECK(cudaStreamSynchronize(e.stream));
      CHECK(cudaEventElapsedTime(&v, a, b));
    }
    std::sort(ms, ms + 5);
    const double us = ms[2] / 8 * 1e3 / e.s.layers;
    std::printf("%s %d tokens, %s: %.2f us a chain (its weights at 4.6 TB/s %.2f), %.0f GB/s; ", e.s.name, tokens,
                pdl ? "dependent" : "plain", us, static_cast<double>(e.bytes) / 4.6e6 / e.s.layers,
                static_cast<double>(e.bytes) / e.s.layers / us / 1e3);
  }
  bool same = !std::memcmp(results[0].data(), results[1].data(), results[0].size() * 4);
  for (int m = 1; m < tokens; m++) same &= !std::memcmp(results[0].data(), results[0].data() + m * e.s.H, static_cast<size_t>(e.s.H) * 4);
  uint64_t bits = 0;
  for (int i = 0; i < e.s.H; i++) {
    uint32_t word;
    std::memcpy(&word, &results[0][static_cast<size_t>(i)], 4);
    bits = bits * 1099511628211ull + word;
  }
  std::printf("%016llx, %s\n", static_cast<unsigned long long>(bits), same ? "every token the same bits" : "BITS DIFFER");
}

// One GEMM that stores its sums, one row, repeated; larger than L2.
static void time_alone(int K, int N, int bits) {
  std::mt19937 random(3);
  const Matrix m(K, {{N, {{bits, 1, 128}}}}, random);
  const auto zeros = [](auto** p, size_t n) {
    CHECK(cudaMalloc(reinterpret_cast<void**>(p), n));
    CHECK(cudaMemset(*p, 0, n));
  };
  half* x;
  float *out, *squares;
  uint8_t* room;
  const size_t bytes = persistent_bytes(this_device(), K, K);
  zeros(&x, size_t(K) * 2 + 256), zeros(&out, size_t(N) * 4), zeros(&squares, 4096), zeros(&room, bytes);
  cudaStream_t stream;
  cudaEvent_t a, b;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  PersistentOp link{m.product(1), m.head.data(), m.blob, kStore};
  link.a.x = x, link.a.x_stride = K + 128, link.a.out = out, link.a.out_stride = N;
  link.a.squares = squares, link.a.squares_count = this_device().multiprocessors, link.a.inverse_width = 1.f / static_cast<float>(K),
  link.a.eps = 1e-5f;
  if (!persistent_tokens(this_device(), &link, 1)) check("this product cannot be one of a chain");
  constexpr int kTimes = 20;
  float best = 1e9f, ms;
  for (int i = 0; i < 6; i++) {
    CHECK(cudaEventRecord(a, stream));
    for (int k = 0; k < kTimes; k++) check(launch(&link, 1, room, bytes, stream, true));
    CHECK(cudaEventRecord(b, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaEventElapsedTime(&ms, a, b));
    best = std::min(best, ms);
  }
  const double us = best / kTimes * 1e3;
  std::printf("%d x %d of %d bits alone: %.2f us, %.0f GB/s\n", K, N, bits, us, static_cast<double>(m.bytes) / us / 1e3);
  CHECK(cudaFree(x));
  CHECK(cudaFree(out));
  CHECK(cudaFree(squares));
  CHECK(cudaFree(room));
  CHECK(cudaFree(m.blob));
}

int main(int count, char** words) {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  if (count < 2 || std::strstr(words[1], "head"))
    for (int bits : {4, 6}) time_alone(4096, 128256, bits), time_alone(4096, 32000, bits), time_alone(8192, 32000, bits);
  for (const Shape& s : kShapes) {
    if (count > 1 && !std::strstr(words[1], s.name)) continue;
    Engine e(s, 1, count > 3 ? std::atoi(words[3]) : 0);
    for (int tokens : {1, 2, 4, 8})
      if (count < 3 || tokens <= std::atoi(words[2])) time(e, tokens);
    for (const auto& l : e.layers)
      for (const Matrix* m : {&l.qkv, &l.o, &l.up, &l.down}) CHECK(cudaFree(m->blob));
  }
}
