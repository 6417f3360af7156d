// Stream-K GEMMs of 9 to 64 rows against a plain reference, then timed at Llama-3-8B's shapes, each alone and a layer in turn.
// `q`: no checks, `c`: only checks, `w`: cycles per unit of each width. Built as kernels.cuh says.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "check.cuh"
#include "cuda/blob/dequant.cuh"
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/gemm/stream_k/stream_k_gemm.cuh"
#include "cuda/runtime/device.h"
#include "fill.cuh"
#include "format/gpu_layout.h"
#include "kernels.cuh"

using namespace exl2nb;
static void ct(const char* e, int line) {
  if (e) {
    printf("launch line %d: %s\n", line, e);
    exit(1);
  }
}
#define CT(x) ct((x), __LINE__)
// Scale sets of GPTQ made finite.
__global__ void tame(uint8_t* data, int64_t strip_bytes, const Item* items, int n) {
  for (int i = 0; i < n; i++) {
    const Item it = items[i];
    if (!it.scales) continue;
    uint32_t* p = reinterpret_cast<uint32_t*>(data + blockIdx.x * strip_bytes + it.offset + it.units * 128 * it.bits);
    for (int k = threadIdx.x; k < (it.bytes - it.units * 128 * it.bits) / 4; k += blockDim.x) p[k] &= 0xB3FFB3FFu;
  }
}
// Weights of a part as fp16 (K rows stored + 64, N).
template <int B, bool G>
__device__ void unpack_unit(const uint8_t* st, const Item& it, const half2* steps, int i, int lane, half* W, int N, int col0) {
  EncodedUnit<B, G> c;
  c.load(st, it, i, lane);
  uint32_t h[16];
  c.decode(steps[it.unit0 + i], h);
  for (int f = 0; f < 16; f++)
    for (int k = 0; k < 2; k++) {
      const int row = it.block * 32 + i * 64 + (f >> 2) * 16 + (f >> 1 & 1) * 8 + 2 * (lane & 3) + k,
                col = col0 + (lane >> 2) + 8 * (f & 1);
      if (it.lone && f >= 8) continue;
      const half2 v = *reinterpret_cast<half2*>(h + f);
      if (col < N) W[(size_t)row * N + col] = k ? __high2half(v) : __low2half(v);
    }
}
// Of the item's width, which is one of B.
template <bool G, int... B>
__device__ void unpack_any(const uint8_t* st, const Item& it, const half2* steps, int i, int lane, half* W, int N, int col0) {
  ((it.bits == B ? unpack_unit<B, G>(st, it, steps, i, lane, W, N, col0) : void()), ...);
}
__global__ void unpack_part(const uint8_t* data, int64_t strip_bytes, const Item* items, const half2* steps, int n, half* W, int N) {
  for (int k = 0; k < n; k++) {
    const Item it = items[k];
    const uint8_t* st = data + blockIdx.x * strip_bytes + it.offset;
    for (int i = 0; i < it.units; i++)
      if (it.scales)
        unpack_any<true, 2, 3, 4, 8>(st, it, steps, i, threadIdx.x, W, N, blockIdx.x * 16);
      else
        unpack_any<false, 2, 3, 4, 5, 6, 8, 16>(st, it, steps, i, threadIdx.x, W, N, blockIdx.x * 16);
  }
}
__global__ void plain(const half* x, int group, int stride, const half* W, int rows, int N, int first, int NT, float* out) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
  if (col >= N) return;
  double s = 0;
  for (int r = 0; r < rows; r++)
    s += (double)__half2float(x[token_place(group, stride, token) + row_place(group, r)]) * (double)__half2float(W[(size_t)r * N + col]);
  out[(size_t)token * NT + first + col] = (float)s;
}
struct Mat {
  BlobLayout plan;
  uint8_t* blob;
  const uint8_t* head() const { return plan.meta.data(); }
  double bytes() const {
    double b = 0;
    for (auto& p : plan.parts) b += double(p.strips) * p.strip_bytes;
    return b;
  }
  double units() const {
    double b = 0;
    for (auto& p : plan.parts) b += double(p.strips) * p.num_units;
    return b;
  }
};
typedef std::vector<std::pair<int, std::pair<double, int>>> Mix;  // bits, share, group size
std::vector<Group> groups_of(int rows, const Mix& mix) {
  std::vector<Group> g;
  int left = rows;
  for (auto& m : mix) {
    int count = (int)std::ceil(std::min(rows * m.second.first, (double)left) / m.second.second - 1e-9);
    count = std::max(0, std::min(count, left / m.second.second));
    for (int i = 0; i < count; i++) g.push_back({m.first, m.second.second});
    left -= count * m.second.second;
  }
  g.back().rows += left;
  return g;
}
std::mt19937 rng(1);
std::vector<int> permutation(int K) {
  std::vector<int> p(K);
  for (int i = 0; i < K; i++) p[i] = i;
  std::shuffle(p.begin(), p.end(), rng);
  return p;
}
Mat finish(int K, const std::vector<PartLayout>& parts) {
  Mat m;
  std::string wrong = layout_blob(K, parts, m.plan);
  if (!wrong.empty()) {
    printf("plan: %s\n", wrong.c_str());
    exit(1);
  }
  CHECK(cudaMalloc(&m.blob, m.plan.header.bytes + 256));
  bool dense = false;
  for (auto& p : m.plan.parts) dense |= p.dense;
  fill<<<1024, 256>>>((uint32_t*)m.blob, m.plan.header.bytes / 4, rng(), dense ? 0xB7FFB7FFu : 0xffffffffu);
  CHECK(cudaMemcpy(m.blob, m.plan.meta.data(), m.plan.meta.size(), cudaMemcpyHostToDevice));
  for (auto& p : m.plan.parts)
    tame<<<p.strips, 32>>>(m.blob + p.data, p.strip_bytes, (const Item*)(m.blob + m.plan.header.image) + p.first_item, p.num_items);
  CHECK(cudaDeviceSynchronize());
  return m;
}
PartLayout exl2_part(int K, int N, const Mix& mix, const std::vector<int>& perm) {
  auto g = groups_of(K, mix);
  std::vector<uint16_t> sm;
  for (auto& e : g) {
    half h = __float2half(0.35f / (1 << e.bits));
    uint16_t v;
    memcpy(&v, &h, 2);
    sm.push_back(v);
  }
  return layout_exl2(g, sm, 1.0, N, perm);
}
Mat exl2(int K, const std::vector<int>& Ns, const std::vector<Mix>& mixes, bool own_perms = false) {
  auto perm = permutation(K);
  std::vector<PartLayout> parts;
  for (size_t i = 0; i < Ns.size(); i++) parts.push_back(exl2_part(K, Ns[i], mixes[i], own_perms && i ? permutation(K) : perm));
  return finish(K, parts);
}
struct Bench {
  const Mat* m;
  int T, group;
  int mode;  // 0 store, 1 residual, 2 gates
  const Mat* after;
  half *x, *next;
  float *out, *residual, *squares, *next_squares, *norm;
  int in_squares;
  GemmArgs a;
  MatrixInput in;
  void setup(const Mat& mat, int tokens, int how, const Mat* nxt) {
    m = &mat, T = tokens, mode = how, after = nxt, group = stream_k_group(T);
    const int room = stream_k_rows(T);
    const auto& h = mat.plan.header;
    size_t nx = (size_t)std::max(1, h.num_perms) * input_stride(h) * room;
    CHECK(cudaMalloc(&x, nx * 2));
    fill_half<<<256, 256>>>(x, nx, 7);
    CHECK(cudaMalloc(&out, (size_t)room * h.N * 4));
    CHECK(cudaMemset(out, 0, (size_t)room * h.N * 4));
    CHECK(cudaMalloc(&residual, (size_t)room * h.N * 4));
    fill_float<<<256, 256>>>(residual, (size_t)room * h.N, 0.5f);
    in_squares = 32;
    CHECK(cudaMalloc(&squares, (size_t)room * 132 * 4));
    fill_float<<<256, 256>>>(squares, (size_t)room * 132, h.K / 32.f);
    CHECK(cudaMalloc(&next_squares, (size_t)room * 2048 * 4));
    CHECK(cudaMalloc(&norm, h.N * 4));
    fill_float<<<256, 256>>>(norm, h.N, 1.f);
    set_input(in, mat.head(), mat.blob, x, room);
    in.group = group;
    a = GemmArgs{};
    set_weights(a, mat.head(), mat.blob);
    a.tokens = T, a.x = in.x, a.x_stride = in.stride, a.x_perm_stride = in.perm_stride, a.scale = 1.f;
    if (mode != 1) a.squares = squares, a.squares_count = in_squares, a.inverse_width = 1.f / h.K, a.eps = 1e-5f;
    if (mode == 0) a.out = out, a.out_stride = h.N;
    if (nxt) {
      const auto& nh = nxt->plan.header;
      size_t nn = (size_t)std::max(1, nh.num_perms) * input_stride(nh) * room;
      CHECK(cudaMalloc(&next, nn * 2));
      CHECK(cudaMemset(next, 0, nn * 2));
      set_input(a.next, nxt->head(), nxt->blob, next, room);
      a.next.group = group;
    }
    if (mode == 1) a.residual = residual, a.residual_stride = h.N, a.next_norm = norm, a.next_squares = next_squares;
    if (mode == 2) a.gated = true, a.activation = 0;
  }
  StreamKNext image() const {
    return {m->blob + m->plan.header.image,
            (image_bytes(m->plan.header.num_items, m->plan.header.num_units, m->plan.header.num_parts) + 15) / 16 * 16,
            {}};
  }
  void launch(cudaStream_t s, bool pdl, const StreamKNext& nxt = {}) const {
    static void* const workspace = [] {
      void* p;
      CHECK(cudaMalloc(&p, stream_k_workspace(this_device(), kStreamKTokens)));
      CHECK(cudaMemset(p, 0, stream_k_workspace(this_device(), kStreamKTokens)));
      return p;
    }();
    LaunchList list(this_device(), pdl);
    plan_stream_k(list, a, group, nxt, workspace);
    CT(list.run(s));
  }
};
template <class T>
std::vector<T> host(const T* p, size_t n) {
  std::vector<T> v(n);
  CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}
int bad = 0;
void check(const char* name, const Mat& m, int T, int mode, const Mat* nxt) {
  Bench b;
  b.setup(m, T, mode, nxt);
  const auto& h = m.plan.header;
  const int room = stream_k_rows(T);
  float* ref;
  CHECK(cudaMalloc(&ref, (size_t)room * h.N * 4));
  CHECK(cudaMemset(ref, 0, (size_t)room * h.N * 4));
  for (auto& p : m.plan.parts) {
    half* W;
    size_t rows = h.stored + 128;
    CHECK(cudaMalloc(&W, rows * p.outputs * 2));
    CHECK(cudaMemset(W, 0, rows * p.outputs * 2));
    const uint8_t* img = m.blob + h.image;
    unpack_part<<<p.strips, 32>>>(m.blob + p.data, p.strip_bytes, (const Item*)img + p.first_item,
                                  (const half2*)(img + image_steps(h.num_items)), p.num_items, W, p.outputs);
    plain<<<dim3((p.outputs + 127) / 128, T), 128>>>(b.x + (size_t)p.perm * b.in.perm_stride, b.group, b.in.stride, W, h.stored, p.outputs,
                                                     p.first_column, h.N, ref);
    CHECK(cudaDeviceSynchronize());
    cudaFree(W);
  }
  auto old = host(b.residual, (size_t)room * h.N);
  b.launch(0, false);
  CHECK(cudaDeviceSynchronize());
  auto r = host(ref, (size_t)room * h.N), sq = host(b.squares, (size_t)room * 132);
  auto factor = [&](int t) {
    if (mode == 1) return 1.0;
    double s = 0;
    for (int i = 0; i < 32; i++) s += sq[t * 32 + i];
    return 1 / std::sqrt(s / h.K + 1e-5);
  };
  double worst = 0, big = 0;
  auto place = [&](const MatrixInput& in, const std::vector<half>& v, const std::vector<std::vector<int>>& inv, int p, int t, int f) {
    int row = inv[p].empty() ? f : inv[p][f];
    return __half2float(v[(size_t)p * in.perm_stride + token_place(in.group, in.stride, t) + row_place(in.group, row)]);
  };
  std::vector<half> nx;
  std::vector<std::vector<int>> inv;
  if (nxt) {
    const auto& nh = nxt->plan.header;
    nx = host(b.next, (size_t)std::max(1, nh.num_perms) * input_stride(nh) * room);
    for (int p = 0; p < std::max(1, nh.num_perms); p++)
      inv.push_back(b.a.next.inverse[p] ? host(b.a.next.inverse[p], nh.K) : std::vector<int>());
  }
  auto see = [&](double got, double want) {
    if (!(std::fabs(got - want) <= worst)) worst = std::isnan(got) ? 1e9 : std::fabs(got - want);
    big = std::max(big, std::fabs(want));
  };
  double worst_next = 0;
  if (mode == 0) {
    auto o = host(b.out, (size_t)room * h.N);
    for (int t = 0; t < T; t++)
      for (int c = 0; c < h.N; c++) see(o[(size_t)t * h.N + c], r[(size_t)t * h.N + c] * factor(t));
  } else if (mode == 1) {
    auto o = host(b.residual, (size_t)room * h.N);
    auto nm = host(b.norm, h.N);
    const int count = stream_k_squares(h.N);
    auto ns = host(b.next_squares, (size_t)room * 2048);
    for (int t = 0; t < T; t++) {
      double s2 = 0, got = 0;
      for (int c = 0; c < h.N; c++) {
        double want = old[(size_t)t * h.N + c] + r[(size_t)t * h.N + c];
        see(o[(size_t)t * h.N + c], want), s2 += want * want;
        for (size_t p = 0; p < inv.size(); p++)
          worst_next = std::max(worst_next, std::fabs(place(b.a.next, nx, inv, p, t, c) - want * nm[c]) / (1 + std::fabs(want)));
      }
      for (int i = 0; i < count; i++) got += ns[t * count + i];
      worst_next = std::max(worst_next, std::fabs(got - s2) / s2);
    }
  } else {
    const int W = m.plan.parts[0].outputs;
    for (int t = 0; t < T; t++)
      for (int c = 0; c < W; c++) {
        double g = r[(size_t)t * h.N + c] * factor(t), u = r[(size_t)t * h.N + W + c] * factor(t), want = g / (1 + std::exp(-g)) * u;
        for (size_t p = 0; p < inv.size(); p++)
          worst_next = std::max(worst_next, std::fabs(place(b.a.next, nx, inv, p, t, c) - want) / (1 + std::fabs(want)));
      }
    big = 1;
  }
  // twice the same bits
  bool same = true;
  if (mode == 0) {
    auto o = host(b.out, (size_t)room * h.N);
    b.launch(0, false);
    CHECK(cudaDeviceSynchronize());
    auto o2 = host(b.out, (size_t)room * h.N);
    same = !memcmp(o.data(), o2.data(), (size_t)T * h.N * 4);
  }
  const bool fine = worst <= 2e-3 * std::max(1.0, big) && worst_next < 2e-3 && same;
  if (!fine) bad++;
  printf("%s %s T %d mode %d: worst %.2g of %.3g, next %.2g%s\n", fine ? "ok  " : "BAD ", name, T, mode, worst, big, worst_next,
         same ? "" : " DIFFERENT BITS");
  cudaFree(ref), cudaFree(b.x), cudaFree(b.out), cudaFree(b.residual), cudaFree(b.squares), cudaFree(b.next_squares), cudaFree(b.norm);
  if (nxt) cudaFree(b.next);
}
float time_graph(cudaStream_t s, const std::function<void()>& body, int launches) {
  cudaGraph_t g;
  cudaGraphExec_t e;
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  body();
  CHECK(cudaStreamEndCapture(s, &g));
  CHECK(cudaGraphInstantiate(&e, g, 0));
  cudaEvent_t a, b;
  cudaEventCreate(&a), cudaEventCreate(&b);
  std::vector<float> t;
  for (int i = 0; i < 9; i++) {
    CHECK(cudaEventRecord(a, s));
    CHECK(cudaGraphLaunch(e, s));
    CHECK(cudaEventRecord(b, s));
    CHECK(cudaStreamSynchronize(s));
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    if (i >= 2) t.push_back(ms);
  }
  std::sort(t.begin(), t.end());
  cudaGraphExecDestroy(e), cudaGraphDestroy(g);
  return t[t.size() / 2] * 1000 / launches;
}
int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);

  cudaStream_t s;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  const bool quick = argc > 1 && (argv[1][0] == 'q' || argv[1][0] == 'w');  // no checks
  const int H = 4096, I = 14336;
  const Mix four{{4, {1, 128}}}, four32{{4, {1, 32}}}, fivefour{{5, {.1, 128}}, {4, {.9, 128}}}, fourthree{{4, {.1, 32}}, {3, {.9, 32}}},
      fourthree25{{4, {.25, 32}}, {3, {.75, 32}}}, down{{8, {.05, 32}}, {4, {.95, 128}}}, head{{8, {.15, 128}}, {6, {.85, 128}}},
      two{{2, {1, 64}}};
  if (!quick) {
    std::vector<std::pair<const char*, Mat>> small;
    const Mix mix8{{8, {.1, 32}}, {6, {.2, 64}}, {5, {.2, 32}}, {4, {.2, 32}}, {3, {.2, 128}}, {2, {.1, 32}}};
    Mat nxt = exl2(512, {64}, {four}), nxt2 = exl2(512, {64, 64}, {four, four}, true);
    small.push_back({"mixed", exl2(512 + 32, {512}, {mix8})});
    small.push_back({"4 bits", exl2(1024, {512}, {four})});
    small.push_back({"down", exl2(1792, {512}, {down})});
    small.push_back({"2 bits", exl2(2048, {512}, {two})});
    small.push_back({"head", exl2(256, {512}, {head})});
    small.push_back({"short", exl2(32, {512}, {four32})});
    small.push_back({"dense", finish(192, {layout_dense(192, 512)})});
    small.push_back({"gptq", finish(512, {layout_gptq({{4, 128}, {4, 128}, {4, 128}, {4, 128}}, 512, {})})});
    small.push_back(
        {"gptq32", finish(256, {layout_gptq({{4, 32}, {4, 32}, {4, 32}, {4, 32}, {4, 32}, {4, 32}, {4, 64}}, 512, permutation(256))})});
    for (auto& e : small)
      for (int T : {9, 16, 27, 32, 40, 64}) {
        check(e.first, e.second, T, 0, nullptr);
        if (T == 16 || T == 27 || T == 64) check(e.first, e.second, T, 1, T == 64 ? &nxt2 : &nxt);
      }
    Mat odd = exl2(288, {1000 / 4 * 4, 36, 520}, {mix8, four32, two}), odd2 = exl2(288, {250, 37, 70}, {mix8, four32, two}, true),
        wide3 = exl2(320, {5001}, {fourthree});
    Mat pair = exl2(512, {512, 512}, {fourthree, fourthree25}), pair2 = exl2(544, {512, 512}, {mix8, four32}, true),
        pair3 = exl2(320, {1000, 1000}, {four, four32}), nxt3 = exl2(1000 / 32 * 32 + 32, {64}, {four});
    for (int T : {9, 16, 32, 64, 130}) {
      if (T <= 64) check("odd", odd, T, 0, nullptr), check("odd2", odd2, T, 0, nullptr), check("wide3", wide3, T, 0, nullptr);
      check("pair", pair, T, 2, &nxt), check("pair2", pair2, T, 2, &nxt2), check("pair3", pair3, T, 2, &nxt3);
    }
    Mat o = exl2(H, {H}, {four}), qkv = exl2(H, {H, 1024, 1024}, {fivefour, fivefour, four}),
        gu = exl2(H, {1408, 1408}, {fourthree, fourthree25}), dn = exl2(I, {1024}, {down});
    Mat n4 = exl2(H, {64}, {four}), n14 = exl2(1408, {64}, {four}), n1 = exl2(1024, {64}, {four});
    for (int T : {16, 64})
      check("O", o, T, 1, &n4), check("QKV", qkv, T, 0, nullptr), check("gate/up", gu, T, 2, &n14), check("down", dn, T, 1, &n1);
    printf("%s: %d bad\n", bad ? "FAILED" : "all right", bad);
    if (argc > 1 && argv[1][0] == 'c') return bad != 0;  // checks only
  }
  if (argc > 1 && argv[1][0] == 'w') {
    for (int rows : {128, 32})
      for (int bits : {2, 3, 4, 5, 6, 8}) {
        std::vector<Mat> mats;
        for (int i = 0; i < 3; i++) mats.push_back(exl2(H, {2 * I}, {Mix{{bits, {1, rows}}}}));
        for (int T : {16, 32, 64}) {
          std::vector<Bench> b(mats.size());
          for (size_t i = 0; i < b.size(); i++) b[i].setup(mats[i], T, 0, nullptr);
          b[0].launch(s, false);
          CHECK(cudaStreamSynchronize(s));
          const float us = time_graph(
              s,
              [&] {
                for (int i = 0; i < 12; i++) b[i % 3].launch(s, true, b[(i + 1) % 3].image());
              },
              12);
          printf("%d bits, groups of %d, T %d: %.2f us, %.0f cycles of a CTA a unit at 1.755 GHz\n", bits, rows, T, us,
                 us * 1755 / (mats[0].units() / 16 / 132));
        }
        for (auto& m : mats) cudaFree(m.blob);
      }
    return 0;
  }
  struct Op {
    const char* name;
    std::vector<Mat> mats;
    int mode;
    Mat* next;
  };
  std::vector<Op> ops(5);
  Mat mh = exl2(H, {128256}, {head}), mn4 = exl2(H, {64}, {four}), mn14 = exl2(I, {64}, {four});
  ops[0] = {"O", {}, 1, &mn4}, ops[1] = {"gate/up", {}, 2, &mn14}, ops[2] = {"down", {}, 1, &mn4}, ops[3] = {"QKV", {}, 0, nullptr},
  ops[4] = {"head", {mh}, 0, nullptr};
  for (int i = 0; i < 12; i++) ops[0].mats.push_back(exl2(H, {H}, {i & 1 ? fivefour : four}));
  for (int i = 0; i < 6; i++) ops[1].mats.push_back(i & 1 ? exl2(H, {I, I}, {four, four32}) : exl2(H, {I, I}, {fourthree, fourthree25}));
  for (int i = 0; i < 6; i++) ops[2].mats.push_back(exl2(I, {H}, {down}));
  for (int i = 0; i < 10; i++)
    ops[3].mats.push_back(i & 1 ? exl2(H, {H, 1024, 1024}, {four, four, four}) : exl2(H, {H, 1024, 1024}, {fivefour, fivefour, four}));
  ops[4].mats.push_back(mh);
  for (int T : {16, 64, 9, 32}) {
    double layer = 0;
    for (auto& op : ops) {
      std::vector<Bench> b(op.mats.size());
      for (size_t i = 0; i < b.size(); i++) b[i].setup(op.mats[i], T, op.mode, op.next);
      const int reps = op.name[0] == 'h' ? 2 : 24;
      auto body = [&] {
        for (int i = 0; i < reps; i++) b[i % b.size()].launch(s, true, b[(i + 1) % b.size()].image());
      };
      body();
      CHECK(cudaStreamSynchronize(s));
      const float us = time_graph(s, body, reps);
      double bytes = 0, units = 0;
      for (auto& m : op.mats) bytes += m.bytes() / op.mats.size(), units += m.units() / op.mats.size();
      const double mem = bytes / 4.6e6, cyc = us * 1755 / (units / 528);
      printf("T %d %-8s %7.2f us, %5.0f GB/s, memory %.1f us, %.0f cycles a unit at 1.755 GHz\n", T, op.name, us, bytes / us / 1e3, mem,
             cyc);
      if (op.name[0] != 'h') layer += us;
    }
    // two layers as a step has them
    std::vector<Bench> b;
    for (int l = 0; l < 6; l++)
      for (int k : {3, 0, 1, 2}) {
        b.emplace_back();
        b.back().setup(ops[k].mats[l], T, ops[k].mode, ops[k].next);
      }
    auto body = [&] {
      for (size_t i = 0; i < b.size(); i++) b[i].launch(s, true, b[(i + 1) % b.size()].image());
    };
    body();
    CHECK(cudaStreamSynchronize(s));
    const float us = time_graph(s, body, 6);
    printf("T %d layer: sum %.1f us, in turn %.1f us; 32 layers %.2f ms\n", T, layer, us, us * 32 / 1000);
  }
  CHECK(cudaDeviceSynchronize());
  return 0;
}
