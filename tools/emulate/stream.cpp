#include "cuda/gemv.h"
#include "cuda/launch.h"
#include "cuda/layout.h"
#include "cuda/place.cuh"
#include "cuda/gemv.cuh"
#include "cuda/chain.h"
#include <random>
#include <string>
using namespace exl2nb;
std::mt19937 rng(1);
float gauss(float s) { return std::normal_distribution<float>(0, s)(rng); }
float r16(float v) { return __half2float(__float2half_rn(v)); }
uint16_t h16(float v) { half h = __float2half_rn(v); uint16_t b; memcpy(&b, &h, 2); return b; }
struct Part { int N; std::vector<float> w; PartPlan plan; std::vector<uint8_t> codes; std::vector<int> scale; std::vector<Group> groups; std::vector<float> gs, gz; bool gptq; };
struct Made { std::vector<Part> parts; BlobPlan out; uint8_t* d; std::vector<uint8_t> head; std::vector<int> perm; };
struct Case { const char* name; int K; std::vector<std::vector<Group>> groups; bool perm, gptq; int T; int N; };
Made make(const Case& c, float size = 1) {
  Made made; auto& parts = made.parts; std::vector<PartPlan> plans; auto& perm = made.perm; auto& out = made.out;
    if (c.perm) { perm.resize(c.K); for (int i = 0; i < c.K; i++) perm[i] = i; std::shuffle(perm.begin(), perm.end(), rng); }
    for (auto& gr : c.groups) {
      Part p; p.N = c.N; p.groups = gr; p.gptq = c.gptq; p.w.assign((size_t)c.K * c.N, 0); p.codes.resize((size_t)c.K * c.N);
      std::vector<uint16_t> max; std::vector<float> maxv;
      for (auto& g : gr) { float m = std::fabs(gauss(1)) + 0.5f; max.push_back(h16(m)); maxv.push_back(r16(m)); }
      const double prescale = size / 64;
      p.plan = c.gptq ? plan_gptq(gr, c.N, perm) : plan_exl2(gr, max, prescale, c.N, perm);
      p.scale.resize(gr.size() * c.N); p.gs.resize(gr.size() * c.N); p.gz.resize(gr.size() * c.N);
      int row = 0;
      for (size_t g = 0; g < gr.size(); g++) for (int n = 0; n < c.N; n++) { p.scale[g * c.N + n] = rng() % 16; p.gs[g * c.N + n] = r16(std::fabs(gauss(0.02f)) + 0.01f); p.gz[g * c.N + n] = rng() % (1 << gr[g].bits); }
      for (size_t g = 0; g < gr.size(); row += gr[g].rows, g++) for (int k = row; k < row + gr[g].rows; k++) for (int n = 0; n < c.N; n++) {
        int code = rng() % (1 << gr[g].bits); p.codes[(size_t)k * c.N + n] = code;
        float unit = r16((float)(maxv[g] * prescale / 256.0)); int s = p.scale[g * c.N + n];
        float step = r16((s + 1) * (s + 1) * unit);
        p.w[(size_t)k * c.N + n] = c.gptq ? (code - p.gz[g * c.N + n]) * p.gs[g * c.N + n] : (code - (1 << (gr[g].bits - 1))) * step; }
      plans.push_back(p.plan); parts.push_back(p);
    }
    auto e = plan_blob(c.K, plans, out); if (!e.empty()) { printf("%s\n", e.c_str()); exit(1); }
    uint8_t* d = made.d = (uint8_t*)aligned_alloc(256, (out.header.bytes + 255) / 256 * 256 + 256); memset(d, 0, out.header.bytes); memcpy(d, out.meta.data(), out.meta.size());
    for (size_t i = 0; i < parts.size(); i++) {
      auto& s = out.parts[i]; auto& p = parts[i]; const Item* items = (const Item*)(d + out.header.image) + s.first_item;
      std::vector<int> group_of(c.K / 32); { int r = 0; for (size_t g = 0; g < p.groups.size(); g++) for (int k = 0; k < p.groups[g].rows; k += 32) group_of[r++] = g; }
      for (int st = 0; st < s.strips; st++) for (int n = 0; n < s.num_items; n++) { const Item& it = items[n]; const int b = it.bits;
        for (int u = 0; u < it.units; u++) { const int block = it.block + 2 * u; const bool second = !it.lone && block + 1 < c.K / 32; uint8_t* to = d + s.data + st * s.strip_bytes + it.offset;
          for (int l = 0; l < 32; l++) { const int g = l >> 2, t = l & 3; uint32_t words[8] = {};
            for (int f = 0; f < 16; f++) for (int hw = 0; hw < 2; hw++) { const int k = f / 4 * 16 + 2 * t + (f >> 1 & 1) * 8 + hw, col = st * 16 + g + (f & 1) * 8;
              uint32_t code = 1u << (b - 1); if (col < p.N && (k < 32 || second)) code = p.codes[(size_t)(block * 32 + k) * p.N + col]; else if (c.gptq) code = 0;
              for (int q = 0; q < b; q++) { Bit bit = bit_of(b, f, q); if (bit.bit + 16 * hw > 31) { printf("bit\n"); exit(1); } uint32_t m = (code >> q & 1u) << (bit.bit + 16 * hw); if (words[bit.word] & (1u << (bit.bit + 16 * hw))) { printf("collision %d\n", b); exit(1); } words[bit.word] |= m; } }
            for (int w = 0; w < b; w++) *(uint32_t*)(to + u * b * 128 + plane(b, w, l)) = words[w];
          }
          for (int g = 0; g < 8; g++) for (int side = 0; side < 2; side++) { if (it.one && side) continue; const bool there = side == 0 || second;
            if (!c.gptq) { uint32_t code = 0; if (there) for (int h = 0; h < 2; h++) { int col = st * 16 + g + 8 * h; if (col < p.N) code |= p.scale[group_of[block + side] * p.N + col] << (4 * h); } to[it.units * b * 128 + (it.one ? u * 8 + g : u * 16 + g * 2 + side)] = code; }
            else { if (it.one && u % it.scales) continue; int set = it.one ? u / it.scales : 2 * u + side; half* hh = (half*)(to + it.units * b * 128 + set * kGptqSet + g * 8); for (int h = 0; h < 2; h++) { int col = st * 16 + g + 8 * h; bool ok = col < p.N && there; hh[h] = __float2half_rn(ok ? p.gs[group_of[block + side] * p.N + col] : 0); hh[2 + h] = __float2half_rn(ok ? p.gz[group_of[block + side] * p.N + col] : 0); } } }
        } }
    }
    made.head.resize(sizeof(GpuHeader) + out.parts.size() * sizeof(GpuPart)); memcpy(made.head.data(), d, made.head.size());
  return made;
}
void put(const MatrixInput& in, int m, int k, float v) { for (int p = 0; p < in.num_perms; p++) in.x[(size_t)p * in.perm_stride + (size_t)m * in.stride + fragment_place(in.inverse[p] ? in.inverse[p][k] : k)] = saturated(v); }
void chains();
int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what != "products") chains();
  if (what == "chains") return 0;
  auto rep = [](int rows, int bits, int n) { std::vector<Group> g; for (int i = 0; i < n; i++) g.push_back({bits, rows}); return g; };
  auto cat = [](std::vector<std::vector<Group>> v) { std::vector<Group> g; for (auto& x : v) g.insert(g.end(), x.begin(), x.end()); return g; };
  std::vector<Case> cases;
  for (int b : {2, 3, 4, 5, 6, 8}) cases.push_back({"width", 512, {rep(128, b, 4)}, false, false, 1, 48});
  for (int b : {2, 3, 4, 8}) cases.push_back({"gptq", 512, {rep(128, b, 4)}, false, true, 1 + b % 3, 48});
  cases.push_back({"gptq32", 288, {rep(32, 4, 9)}, true, true, 3, 40});
  cases.push_back({"mixed", 1024, {cat({rep(128, 6, 1), rep(128, 5, 2), rep(128, 4, 5)}), cat({rep(32, 8, 1), rep(32, 5, 2), rep(32, 3, 3), rep(64, 2, 13)})}, true, false, 2, 200});
  cases.push_back({"odd", 416, {cat({rep(32, 8, 1), rep(32, 6, 4), rep(32, 4, 2), rep(64, 3, 2), rep(32, 2, 2)})}, true, false, 4, 23});
  for (int T : {1, 5, 8}) cases.push_back({"demo", 704, {cat({rep(32, 8, 1), rep(32, 6, 1), rep(32, 5, 3), rep(32, 4, 2), rep(32, 3, 2), rep(32, 2, 13)})}, true, false, T, 256});
  for (int T : {1, 5, 8}) cases.push_back({"alllone", 352, {cat({rep(32, 8, 1), rep(32, 6, 2), rep(32, 5, 2), rep(32, 4, 2), rep(32, 3, 2), rep(32, 2, 2)})}, false, false, T, 256});
  for (int T : {3, 4, 5, 7, 8}) cases.push_back({"tokens", 640, {cat({rep(128, 5, 1), rep(128, 4, 4)})}, true, false, T, 64});
  for (int T : {1, 8}) cases.push_back({"strips", 128, {rep(64, 4, 2)}, true, false, T, 3328});
  for (int T : {1, 3, 8}) cases.push_back({"gates of many strips", 128, {rep(64, 4, 2), rep(64, 3, 2)}, true, false, T, 3328});
  cases.push_back({"long", 4096, {cat({rep(128, 5, 3), rep(128, 4, 29)})}, true, false, 1, 32});
  for (auto& c : cases) for (int turn = 0; turn < 2; turn++) {
    Made made = make(c); auto& parts = made.parts; auto& out = made.out; auto& head = made.head; auto& perm = made.perm; uint8_t* const d = made.d;
    const int T = c.T, N = out.header.N; MatrixInput in; size_t xb = (size_t)input_stride(out.header) * T * std::max(1, out.header.num_perms); half* x = (half*)aligned_alloc(256, (xb * 2 + 511) / 256 * 256); memset((void*)x, 0, xb * 2);
    set_input(in, head.data(), d, x, T);
    std::vector<float> xs(T * c.K);
    for (int m = 0; m < T; m++) for (int k = 0; k < c.K; k++) { float v = r16(gauss(k % 97 == 3 ? 20.f : 1.f)); xs[m * c.K + k] = v; put(in, m, k, v); }
    std::vector<float> y(T * N, NAN), bias(N); for (auto& v : bias) v = gauss(1);
    GemvArgs a{}; set_weights(a, head.data(), d); a.tokens = T, a.x = in.x, a.x_stride = in.stride, a.x_perm_stride = in.perm_stride, a.out = y.data(), a.out_stride = N, a.bias = bias.data();
    const char* wrong = gemv_launch(a, kStore, nullptr, false); if (wrong) { printf("%s: %s\n", c.name, wrong); return 1; }
    double err = 0, size = 0; int bad = 0;
    for (int m = 0; m < T; m++) for (size_t i = 0; i < parts.size(); i++) for (int n = 0; n < c.N; n++) { double v = bias[out.parts[i].first_column + n]; for (int k = 0; k < c.K; k++) { int f = perm.empty() ? k : perm[k]; v += (double)xs[m * c.K + f] * parts[i].w[(size_t)k * c.N + n]; } double got = y[m * N + out.parts[i].first_column + n]; if (!(std::fabs(got - v) < 1e30)) bad++; err += (got - v) * (got - v), size += v * v; }
    // residual, with the next matrix's input; then gate and up
    for (int kind = 0; kind < 2; kind++) {
      if (kind && parts.size() != 2) continue;
      const int W = kind ? c.N : N; const int np = 2; std::vector<std::vector<int>> inv(np, std::vector<int>(W)); for (auto& v : inv) { for (int i = 0; i < W; i++) v[i] = i; std::shuffle(v.begin(), v.end(), rng); }
      const int stride = (W + 63) / 64 * 64 + 32; half* nx = new half[(size_t)np * T * stride]; memset((void*)nx, 0, (size_t)np * T * stride * 2);
      float* res = new float[T * W]; float* old = new float[T * W]; for (int i = 0; i < T * W; i++) res[i] = old[i] = gauss(1);
      float* nn = new float[W]; for (int i = 0; i < W; i++) nn[i] = gauss(1);
      GemvArgs r{}; set_weights(r, head.data(), d); r.tokens = T, r.x = in.x, r.x_stride = in.stride, r.x_perm_stride = in.perm_stride, r.scale = 0.5f;
      r.next.x = nx, r.next.stride = stride, r.next.perm_stride = stride * T, r.next.num_perms = np; for (int p = 0; p < np; p++) r.next.inverse[p] = inv[p].data();
      const int count = 7; float* sq = new float[T * count]; for (int i = 0; i < T * count; i++) sq[i] = std::fabs(gauss(1)); r.squares = sq, r.squares_count = count, r.inverse_width = 1.f / 100, r.eps = 1e-5f;
      const int ctas = std::min(num_sms(), (N + 15) / 16); float* nsq = new float[T * ctas]; std::vector<float> b0(N); for (auto& v : b0) v = gauss(1); r.bias = b0.data();
      if (kind == 0 && parts.size() != 1) continue;
      if (kind == 0) r.residual = res, r.residual_stride = W, r.next_norm = nn, r.next_squares = nsq; else r.gated = true;
      const char* w2 = gemv_launch(r, kind ? kActivation : kResidual, nullptr, false); if (w2) { printf("%s\n", w2); return 1; }
      double worst = 0; for (int m = 0; m < T; m++) { double f = 0; for (int i = 0; i < count; i++) f += sq[m * count + i]; f = 1 / std::sqrt(f / 100 + 1e-5);
        auto dot = [&](int part, int n) { double v = 0; for (int k = 0; k < c.K; k++) v += (double)xs[m * c.K + (perm.empty() ? k : perm[k])] * parts[part].w[(size_t)k * c.N + n]; return v * f + b0[out.parts[part].first_column + n]; };
        double total = 0; for (int n = 0; n < W; n++) { double v; if (kind == 0) { v = old[m * W + n] + 0.5 * dot(0, n); worst = std::max(worst, std::fabs(v - res[m * W + n]) / (1 + std::fabs(v))); total += v * v; v *= nn[n]; } else { double g = dot(0, n), u = dot(1, n); v = g / (1 + std::exp(-g)) * u; }
          for (int p = 0; p < np; p++) worst = std::max(worst, std::fabs(v - __half2float(nx[p * stride * T + m * stride + fragment_place(inv[p][n])])) / (1 + std::fabs(v))); }
        if (kind == 0) { double s = 0; for (int i = 0; i < ctas; i++) s += nsq[m * ctas + i]; worst = std::max(worst, std::fabs(s - total) / total); } }
      printf("   %s: %.1e %s\n", kind ? "gates" : "residual", worst, worst < 2e-3 ? "ok" : "WRONG");
      delete[] nx; delete[] res; delete[] old; delete[] nn; delete[] sq; delete[] nsq;
    }
    printf("%s K %d N %d T %d bits %d turn %d: %.2e %s\n", c.name, c.K, N, T, c.groups[0][0].bits, turn, std::sqrt(err / size), bad || !(std::sqrt(err / size) < 5e-4) ? "WRONG" : "ok"); fflush(stdout);
  }
}

// Chains one after the other in one room, of different numbers of tokens: each its mathematics, every token's bits the same beside any others.
struct Chains {
  static constexpr int kMost = 8, I = 416, A = 320, Q = 144;
  const int count, H;
  Made O, G, D, V;
  MatrixInput io, iv;
  std::vector<float> x, old, residual, n1, n2, squares, qkv;
  uint8_t* room;

  static std::vector<Group> rep(int rows, int bits, int n) { return std::vector<Group>(n, Group{bits, rows}); }
  static std::vector<Group> cat(std::vector<std::vector<Group>> v) {
    std::vector<Group> g;
    for (auto& x : v) g.insert(g.end(), x.begin(), x.end());
    return g;
  }
  static MatrixInput input(Made& m) {
    const size_t n = (size_t)input_stride(m.out.header) * kMost * std::max(1, m.out.header.num_perms);
    half* x = (half*)aligned_alloc(256, (n * 2 + 511) / 256 * 256);
    memset((void*)x, 0, n * 2);
    MatrixInput in;
    set_input(in, m.head.data(), m.d, x, kMost);
    return in;
  }
  explicit Chains(int links)
      : count(links), H(links == 4 ? 256 : 64),
        O(make({"o", A, {cat({rep(128, 5, 1), rep(64, 4, 3)})}, true, false, kMost, H}, 0.05f)),
        G(make({"g", H, {cat({rep(32, 6, 1), rep(32, 4, H / 32 - 1)}), cat({rep(64, 3, H / 64)})}, true, false, kMost, I}, 0.2f)),
        D(make({"d", I, {cat({rep(32, 8, 1), rep(32, 5, 2), rep(64, 4, 5)})}, true, false, kMost, H}, 0.05f)),
        V(make({"q", H, {cat({rep(H / 2, 6, 1), rep(H / 2, 5, 1)}), rep(64, 4, H / 64), rep(32, 2, H / 32)}, true, false, kMost, Q}, 0.2f)),
        io(input(O)), iv(input(V)), x(kMost * A), old(kMost * H), n1(H), n2(H), squares(kMost * num_sms()), qkv(kMost * 3 * Q) {
    for (auto* n : {&n1, &n2})
      for (auto& v : *n) v = 1 + gauss(0.1f);
    for (int m = 0; m < kMost; m++)
      for (int k = 0; k < A; k++) put(io, m, k, x[m * A + k] = r16(gauss(1)));
    for (auto& v : old) v = gauss(1);
    room = (uint8_t*)aligned_alloc(256, (chain_bytes(H, I) + 255) / 256 * 256);
    memset(room, 0, chain_bytes(H, I));
  }
  void run(int tokens) {
    residual = old;
    std::fill(qkv.begin(), qkv.end(), NAN);
    ChainLink l[4];
    Made* const all[4] = {&O, &G, &D, &V};
    const Epilogue what[4] = {kResidual, kActivation, kResidual, kStore};
    for (int i = 0; i < 4; i++) {
      l[i] = {{}, all[i]->head.data(), all[i]->d, what[i]};
      set_weights(l[i].a, all[i]->head.data(), all[i]->d);
      l[i].a.tokens = tokens, l[i].a.scale = 1;
      if (what[i] == kResidual) l[i].a.residual = residual.data(), l[i].a.residual_stride = H, l[i].a.next_norm = (i ? n2 : n1).data();
      else l[i].a.inverse_width = 1.f / H, l[i].a.eps = 1e-5f;
      if (i < 3) set_input(l[i].a.next, all[i + 1]->head.data(), all[i + 1]->d, nullptr, kMost);
    }
    l[0].a.x = io.x, l[0].a.x_stride = io.stride, l[1].a.gated = true, l[3].a.out = qkv.data(), l[3].a.out_stride = 3 * Q;
    if (count == 3) l[2].a.next = iv, l[2].a.next_squares = squares.data();
    if (!chain_tokens(l, count)) printf("cannot be chained\n"), exit(1);
    if (const char* wrong = chain_launch(l, count, room, chain_bytes(H, I), nullptr, true)) printf("%s\n", wrong), exit(1);
  }
  static double times(Made& m, int part, const std::vector<double>& in, int n) {
    double v = 0;
    for (size_t k = 0; k < in.size(); k++) v += in[m.perm[k]] * m.parts[part].w[k * m.parts[part].N + n];
    return v;
  }
  // Largest relative error of what a token has written.
  double wrong(int m) {
    double worst = 0, off = 0, size = 0;
    std::vector<double> a(x.begin() + m * A, x.begin() + (m + 1) * A), r(H), u(I);
    const auto far = [&](double want, double got) { worst = std::max(worst, got == got ? std::fabs(want - got) / (1 + std::fabs(want)) : 1e9); };
    const auto norm = [&](std::vector<double> q, std::vector<float>& w) {
      double s = 0;
      for (double z : q) s += z * z / H;
      for (int n = 0; n < H; n++) q[n] *= w[n] / std::sqrt(s + 1e-5);
      return q;
    };
    for (int n = 0; n < H; n++) r[n] = old[m * H + n] + times(O, 0, a, n);
    const auto h = norm(r, n1);
    for (int i = 0; i < I; i++) { const double g = times(G, 0, h, i); u[i] = g / (1 + std::exp(-g)) * times(G, 1, h, i); }
    for (int n = 0; n < H; n++) far(r[n] += times(D, 0, u, n), residual[m * H + n]);
    const auto last = norm(r, n2);
    for (int p = 0; p < 3 && count == 4; p++)
      for (int n = 0; n < Q; n++) { const double z = times(V, p, last, n), d = z - qkv[m * 3 * Q + p * Q + n]; off += d * d, size += z * z; }
    for (int n = 0; n < H && count == 3; n++)
      for (int p = 0; p < iv.num_perms; p++)
        far(r[n] * n2[n], __half2float(iv.x[p * iv.perm_stride + m * iv.stride + fragment_place(iv.inverse[p] ? iv.inverse[p][n] : n)]));
    double sum = 0, want = 0;
    for (int i = 0; i < num_sms() && count == 3; i++) sum += squares[m * num_sms() + i];
    for (double z : r) want += z * z;
    if (count == 3) far(want, sum);
    return std::max(worst, !size ? 0 : off == off ? std::sqrt(off / size) : 1e9);
  }
};
void chains() {
  for (int count : {4, 3}) {
    Chains c(count);
    std::vector<float> residual, qkv;
    for (int tokens : {8, 1, 3, 8, 2, 4, 7, 5, 6, 1}) {
      c.run(tokens);
      double worst = 0;
      for (int m = 0; m < tokens; m++) worst = std::max(worst, c.wrong(m));
      if (residual.empty()) residual = c.residual, qkv = c.qkv;
      const bool same = !memcmp(residual.data(), c.residual.data(), tokens * c.H * 4) && (count == 3 || !memcmp(qkv.data(), c.qkv.data(), tokens * 3 * c.Q * 4));
      printf("chain of %d, %d tokens: %.1e, %s\n", count, tokens, worst, worst < 3e-3 ? same ? "ok" : "OTHER BITS" : "WRONG");
      fflush(stdout);
    }
  }
}
