#include "moe.h"

#include <algorithm>
#include <cstring>

#include "gemv.cuh"
#include "launch.h"

namespace exl2nb {
namespace {

constexpr int kRouteThreads = 512;

// Words of the op (csrc/cpu/step.h).
struct Routed {
  const int64_t* w;
  const int64_t* tables() const { return reinterpret_cast<const int64_t*>(w[4]); }
  const ExpertTable& host(int kind) const { return *reinterpret_cast<const ExpertTable*>(tables()[2 * kind]); }
  const ExpertMatrix* device(int kind) const { return reinterpret_cast<const ExpertTable*>(tables()[2 * kind + 1])->matrices(); }
  int experts() const { return static_cast<int>(w[5]); }
  int top_k() const { return static_cast<int>(w[6]); }
  bool shared() const { return w[11] != 0; }
  bool gate() const { return w[13] != 0; }
  int pairs() const { return top_k() + shared(); }  // of a token
  static float real(int64_t word) {
    double d;
    std::memcpy(&d, &word, 8);
    return static_cast<float>(d);
  }
};

// Where everything lies in an op's room.
struct Places {
  size_t numbers, weights, in, inner, out, bytes;
  Places(const Routed& r, int64_t router_outputs, int tokens, int hidden) {
    size_t at = 0;
    const auto take = [&](size_t n) {
      const size_t here = at;
      at = (at + n + 255) / 256 * 256;
      return here;
    };
    const size_t pairs = static_cast<size_t>(tokens) * r.pairs();
    take(static_cast<size_t>(tokens) * router_outputs * 4);
    numbers = take(pairs * 4), weights = take(pairs * 4);
    in = take(pairs * r.host(0).num_perms * r.host(0).stride * 2);
    inner = take(pairs * r.host(1).num_perms * r.host(1).stride * 2);
    out = take(pairs * hidden * 4);
    bytes = at;
  }
};

struct RouteArgs {
  const float* logits;
  int logit_stride, experts, top_k;
  float renormalize;
  bool gate;
  // The router's input, in fragment order, and the factor it still lacks (gemv.cuh).
  const half* h;
  int h_stride, width;
  const float* squares;
  int squares_count;
  float inverse_width, eps;
  const ExpertMatrix* table;
  int* numbers;
  float* weights;
  half* x;
  int x_stride, x_perm_stride;
};

// A CTA is a pair: place blockIdx.x of token blockIdx.y. Every CTA of a token makes the same choice: a softmax over all experts, of which
// the top_k largest stay, of equal ones the first; then it takes the one whose number is the blockIdx.x-th.
__global__ void __launch_bounds__(kRouteThreads) route_kernel(const __grid_constant__ RouteArgs a) {
  extern __shared__ float p[];  // (experts,), then the chosen by falling weight
  __shared__ float kept, factor;
  __shared__ int mine;
  pdl_launch_dependents();
  pdl_wait();
  int* const chosen = reinterpret_cast<int*>(p + a.experts);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.y, pair = token * gridDim.x + blockIdx.x;
  const float* const logits = a.logits + static_cast<size_t>(token) * a.logit_stride;
  if (warp == 0) {
    float top = -INFINITY, sum = 0.f;
    for (int e = lane; e < a.experts; e += 32) top = fmaxf(top, __ldcg(logits + e));
#pragma unroll
    for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    for (int e = lane; e < a.experts; e += 32) sum += p[e] = expf(__ldcg(logits + e) - top);
    sum = warp_sum(sum);
    for (int e = lane; e < a.experts; e += 32) p[e] /= sum;
  } else if (warp == 1) {
    float sum = 0.f;
    if (a.squares)
      for (int i = lane; i < a.squares_count; i += 32) sum += __ldcg(a.squares + static_cast<size_t>(token) * a.squares_count + i);
    sum = warp_sum(sum);
    if (lane == 0) factor = a.squares ? rsqrtf(sum * a.inverse_width + a.eps) : 1.f, mine = 0;
  }
  for (int r = threadIdx.x; r < a.top_k; r += kRouteThreads) chosen[r] = r;  // should a logit be no number
  __syncthreads();
  for (int e = threadIdx.x; e < a.experts; e += kRouteThreads) {
    int rank = 0;
    for (int j = 0; j < a.experts; j++) rank += p[j] > p[e] || (p[j] == p[e] && j < e);
    if (rank < a.top_k) chosen[rank] = e;
  }
  __syncthreads();
  const int place = blockIdx.x;
  const bool shared = place == a.top_k;
  for (int r = threadIdx.x; r < a.top_k; r += kRouteThreads) {
    int before = 0;
    for (int q = 0; q < a.top_k; q++) before += chosen[q] < chosen[r];
    if (before == place) mine = chosen[r];
  }
  if (threadIdx.x == 0) {
    float norm = 0.f;
    for (int r = 0; r < a.top_k && a.renormalize > 0.f; r++)
      norm += a.renormalize == 1.f ? p[chosen[r]] : powf(p[chosen[r]], a.renormalize);
    if (a.renormalize > 0.f && a.renormalize != 1.f) norm = powf(norm, 1.f / a.renormalize);
    kept = a.renormalize > 0.f ? norm : 1.f;
  }
  __syncthreads();
  const int number = shared ? a.experts : mine;
  if (threadIdx.x == 0) {
    a.numbers[pair] = number;
    a.weights[pair] = !shared ? p[number] / kept : a.gate ? 1.f / (1.f + expf(-__ldcg(logits + a.experts))) : 1.f;
  }
  const ExpertMatrix& m = a.table[number];
  const int perms = m.num_perms;
  const int *first = m.inverse[0], *second = m.inverse[1];
  const half* const h = a.h + static_cast<size_t>(token) * a.h_stride;
  half* const x = a.x + static_cast<size_t>(pair) * a.x_stride;
  constexpr int kTogether = 4;  // every load before the first store: one trip to memory for all of them
  for (int base = threadIdx.x; base < a.width; base += kTogether * kRouteThreads) {
    half v[kTogether];
    int row[kTogether], other[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const int i = base + j * kRouteThreads;
      if (i >= a.width) continue;
      v[j] = __ldcg(h + fragment_place(i));
      row[j] = first ? __ldg(first + i) : i;
      other[j] = perms > 1 && second ? __ldg(second + i) : i;
    }
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      if (base + j * kRouteThreads >= a.width) continue;
      const half scaled = saturated(__half2float(v[j]) * factor);
      x[fragment_place(row[j])] = scaled;
      if (perms > 1) x[a.x_perm_stride + fragment_place(other[j])] = scaled;
    }
  }
}

struct ExpertArgs {
  const ExpertMatrix* table;
  const int* numbers;
  // CTAs of a token: `share` for each of top_k pairs, then `shared_share` for the last one.
  int top_k, share, shared_share, pairs;
  int epilogue, activation;
  const half* x;  // [perm][pair][stride]
  int x_stride, x_perm_stride;
  // kActivation
  const ExpertMatrix* next_table;
  half* next;
  int next_stride, next_perm_stride;
  // kStore
  float* out;
  int out_stride;
};

// What the product needs to know of a matrix for one row, shared out among `share` CTAs.
EXL2NB_BOTH inline void set_matrix(GemvArgs& a, const ExpertMatrix& m, int epilogue, int share) {
  for (int p = 0; p < 2; p++) a.part[p] = m.part[p];
  a.image = m.image, a.num_parts = m.num_parts, a.strips = m.strips, a.items = m.items, a.units = m.units;
  a.epilogue = epilogue, a.tokens = 1, a.gated = epilogue == kActivation, a.scale = 1.f;
  a.grid = share < m.part[0].strips ? share : m.part[0].strips;
  const int per = (m.part[0].strips + a.grid - 1) / a.grid;
  a.flush = per < 32 ? per : 32;
}

template <int PATH, bool STAGED>
__global__ void __launch_bounds__(kThreads, 1) expert_kernel(const __grid_constant__ ExpertArgs E) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ GemvArgs A;
  pdl_launch_dependents();
  pdl_wait();
  const int token = blockIdx.y, chosen = E.top_k * E.share, at = static_cast<int>(blockIdx.x);
  const int place = at < chosen ? at / E.share : E.top_k, block = at < chosen ? at % E.share : at - chosen;
  const int pair = token * E.pairs + place;
  if (threadIdx.x == 0) {
    const int number = __ldcg(E.numbers + pair);
    set_matrix(A, E.table[number], E.epilogue, place < E.top_k ? E.share : E.shared_share);
    A.x = E.x + static_cast<size_t>(pair) * E.x_stride, A.x_stride = E.x_stride, A.x_perm_stride = E.x_perm_stride;
    A.rows = nullptr, A.squares = nullptr, A.bias = nullptr, A.residual = nullptr, A.next_norm = nullptr, A.next_squares = nullptr;
    A.next.x = nullptr, A.next.num_perms = 0, A.activation = E.activation, A.out = nullptr;
    if (E.epilogue == kActivation) {
      const ExpertMatrix& m = E.next_table[number];
      A.next.x = E.next + static_cast<size_t>(pair) * E.next_stride, A.next.stride = E.next_stride;
      A.next.perm_stride = E.next_perm_stride, A.next.num_perms = m.num_perms;
      for (int p = 0; p < 2; p++) A.next.inverse[p] = m.inverse[p];
    } else {
      A.out = E.out + static_cast<size_t>(pair) * E.out_stride, A.out_stride = E.out_stride;
    }
  }
  __syncthreads();
  if (block >= A.grid) return;
  run_gemv<PATH, STAGED>(A, shared, block, [] {});
}

// How many CTAs each pair gets, so that all have about the same number of strips; more than one wave only where there are more pairs.
void share_out(ExpertArgs& e, const ExpertTable& table, int tokens) {
  const int chosen = table.matrices()[0].part[0].strips, last = table.matrices()[table.count - 1].part[0].strips;
  const bool shared = e.pairs > e.top_k;
  const int total = tokens * (e.top_k * chosen + (shared ? last : 0)), sms = num_sms();
  const auto parts = [](int strips, int per) { return (strips + per - 1) / per; };
  int per = std::max(1, parts(total, sms));
  while (per < std::max(chosen, last) && tokens * (e.top_k * parts(chosen, per) + (shared ? parts(last, per) : 0)) > sms) per++;
  e.share = parts(chosen, per), e.shared_share = shared ? parts(last, per) : 0;
}

template <int PATH, bool STAGED>
cudaError_t launch(const ExpertArgs& e, int tokens, int shared, int most, cudaStream_t stream, bool pdl) {
  static const cudaError_t ready = [&] {
    cudaFuncSetAttribute(expert_kernel<PATH, STAGED>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    return cudaFuncSetAttribute(expert_kernel<PATH, STAGED>, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  }();
  if (ready != cudaSuccess) return ready;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(e.top_k * e.share + e.shared_share, tokens), config.blockDim = kThreads, config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute, config.numAttrs = pdl && PATH == kBulk ? 1 : 0;
  return cudaLaunchKernelEx(&config, expert_kernel<PATH, STAGED>, e);
}
template <int PATH>
cudaError_t dispatch(const ExpertArgs& e, bool staged, int tokens, int shared, int most, cudaStream_t stream, bool pdl) {
  return staged ? launch<PATH, true>(e, tokens, shared, most, stream, pdl) : launch<PATH, false>(e, tokens, shared, most, stream, pdl);
}

const char* experts_launch(ExpertArgs e, const ExpertTable& table, const ExpertTable* next, int tokens, cudaStream_t stream, bool pdl) {
  share_out(e, table, tokens);
  int own = 0;  // a CTA's memory beside ring, image and activations
  for (int i : {0, table.count - 1}) {
    GemvArgs a{};
    set_matrix(a, table.matrices()[i], e.epilogue, i == 0 ? e.share : std::max(1, e.shared_share));
    a.next.num_perms = next ? next->num_perms : 0;
    own = std::max(own, GemvShared::bytes(a));
    if (e.pairs == e.top_k) break;
  }
  int device = 0, block = 0, sm = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  const int most = block - static_cast<int>(sizeof(GemvArgs)) - 256;
  int shared = stages_of(gemv_path()) * kWarps * (kSlot + 8) + (table.image + 15) / 16 * 16 + own;
  const int x_bytes = table.num_perms * table.stride * 2;
  const bool staged = shared + x_bytes <= std::min(most, sm - 2048);
  if (staged) shared += x_bytes;
  if (shared > most) return "an expert's matrix needs more shared memory than the GPU has";
  cudaError_t error;
  switch (gemv_path()) {
    case kBulk:
      error = dispatch<kBulk>(e, staged, tokens, shared, most, stream, pdl);
      break;
    case kAsync:
      error = dispatch<kAsync>(e, staged, tokens, shared, most, stream, pdl);
      break;
    default:
      error = dispatch<kPlain>(e, staged, tokens, shared, most, stream, pdl);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* make_expert_table(const std::vector<const uint8_t*>& heads, int parts, std::vector<uint8_t>& table) {
  if (heads.empty()) return "there are no experts";
  table.assign(sizeof(ExpertTable) + heads.size() * sizeof(ExpertMatrix), 0);
  ExpertTable t{};
  t.count = static_cast<int32_t>(heads.size());
  for (size_t i = 0; i < heads.size(); i++) {
    const uint8_t* head = heads[i] + 8;
    int64_t blob;
    std::memcpy(&blob, heads[i], 8);
    const auto& h = *reinterpret_cast<const GpuHeader*>(head);
    if (h.num_parts != parts || parts > 2) return "an expert's matrices are not [gate; up] in two parts and down in one";
    GemvArgs a{};
    set_weights(a, head, reinterpret_cast<const uint8_t*>(blob));
    MatrixInput in{};
    set_input(in, head, reinterpret_cast<const uint8_t*>(blob), nullptr, 1);
    if (in.num_perms > 2) return "an expert's matrix has more than two permutations";
    ExpertMatrix m{};
    for (int p = 0; p < 2; p++) m.part[p] = a.part[p], m.inverse[p] = in.inverse[p];
    m.image = a.image, m.num_parts = a.num_parts, m.strips = a.strips, m.items = a.items, m.units = a.units;
    m.num_perms = in.num_perms, m.inputs = h.K;
    std::memcpy(table.data() + sizeof(ExpertTable) + i * sizeof(ExpertMatrix), &m, sizeof m);
    t.num_perms = std::max(t.num_perms, in.num_perms), t.stride = std::max(t.stride, in.stride), t.outputs = std::max(t.outputs, h.N);
    t.image = std::max(t.image, image_bytes(a.items, a.units, a.num_parts));
  }
  std::memcpy(table.data(), &t, sizeof t);
  return nullptr;
}

size_t routed_bytes(const int64_t* words, int64_t router_outputs, int tokens, int hidden) {
  return Places(Routed{words}, router_outputs, tokens, hidden).bytes;
}

const char* routed_launch(const int64_t* words, const GemvArgs& router, uint8_t* room, int capacity, float* x, int hidden,
                          const NormArgs& next_norm, const MatrixInput& next, cudaStream_t stream, bool pdl) {
  const Routed r{words};
  const int tokens = router.tokens, all = capacity * r.pairs();
  const Places at(r, router.out_stride, capacity, hidden);
  auto* numbers = reinterpret_cast<int*>(room + at.numbers);
  auto* weights = reinterpret_cast<float*>(room + at.weights);
  auto* in = reinterpret_cast<half*>(room + at.in);
  auto* inner = reinterpret_cast<half*>(room + at.inner);
  auto* out = reinterpret_cast<float*>(room + at.out);
  const ExpertTable &up = r.host(0), &down = r.host(1);

  RouteArgs route{};
  route.logits = reinterpret_cast<const float*>(room), route.logit_stride = static_cast<int>(router.out_stride);
  route.experts = r.experts(), route.top_k = r.top_k(), route.renormalize = Routed::real(words[7]), route.gate = r.gate();
  route.h = router.x, route.h_stride = router.x_stride, route.width = hidden;
  route.squares = router.squares, route.squares_count = router.squares_count;
  route.inverse_width = router.inverse_width, route.eps = router.eps;
  route.table = r.device(0), route.numbers = numbers, route.weights = weights;
  route.x = in, route.x_stride = up.stride, route.x_perm_stride = up.stride * all;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(r.pairs(), tokens), config.blockDim = kRouteThreads, config.stream = stream;
  config.dynamicSmemBytes = static_cast<size_t>(r.experts() + r.top_k()) * 4;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute, config.numAttrs = pdl && gemv_path() == kBulk ? 1 : 0;
  cudaFuncSetAttribute(route_kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (const cudaError_t error = cudaLaunchKernelEx(&config, route_kernel, route); error != cudaSuccess) return cudaGetErrorString(error);

  ExpertArgs e{};
  e.table = r.device(0), e.numbers = numbers, e.top_k = r.top_k(), e.pairs = r.pairs();
  e.epilogue = kActivation, e.activation = static_cast<int>(words[8]);
  e.x = in, e.x_stride = up.stride, e.x_perm_stride = up.stride * all;
  e.next_table = r.device(1), e.next = inner, e.next_stride = down.stride, e.next_perm_stride = down.stride * all;
  if (const char* wrong = experts_launch(e, up, &down, tokens, stream, pdl)) return wrong;

  ExpertArgs d{};
  d.table = r.device(1), d.numbers = numbers, d.top_k = r.top_k(), d.pairs = r.pairs();
  d.epilogue = kStore, d.x = inner, d.x_stride = down.stride, d.x_perm_stride = down.stride * all;
  d.out = out, d.out_stride = hidden;
  if (const char* wrong = experts_launch(d, down, nullptr, tokens, stream, pdl)) return wrong;

  CombineArgs c{};
  c.x = x, c.y = out, c.weights = weights, c.pairs = r.pairs(), c.width = hidden;
  c.post_norm = reinterpret_cast<const float*>(words[14]), c.post_eps = Routed::real(words[15]), c.scale = Routed::real(words[16]);
  c.norm = next_norm, c.next = next;
  return combine_launch(c, tokens, stream, pdl);
}

}  // namespace exl2nb
