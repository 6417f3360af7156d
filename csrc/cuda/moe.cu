#include "moe.h"

#include <algorithm>
#include <cstring>

#include "device.cuh"
#include "launch.h"
#include "moe_choice.cuh"
#include "moe_down.cuh"

namespace exl2nb {
namespace {

// Words of the op (csrc/cpu/step.h).
struct Routed {
  const int64_t* w;
  const int64_t* tables() const { return reinterpret_cast<const int64_t*>(w[4]); }
  const ExpertTable& host(int kind) const { return *reinterpret_cast<const ExpertTable*>(tables()[2 * kind]); }
  const ExpertMatrix* device(int kind) const { return reinterpret_cast<const ExpertTable*>(tables()[2 * kind + 1])->matrices(); }
  int experts() const { return static_cast<int>(w[5]); }
  int top_k() const { return static_cast<int>(w[6]); }
  int pairs() const { return top_k() + (w[11] != 0); }  // of a token
  float renormalize() const {
    double d;
    std::memcpy(&d, w + 7, 8);
    return static_cast<float>(d);
  }
  // Where what the first products leave begins in the op's room, behind the router's logits.
  static size_t inner(int64_t router_outputs, int tokens) {
    return (static_cast<size_t>(tokens) * static_cast<size_t>(router_outputs) * 4 + 255) / 256 * 256;
  }
};

struct UpArgs {
  Choice choice;
  RowSource from;
  const ExpertMatrix *table, *next_table;
  // CTAs of a token: `share` for each of top_k pairs, then `shared_share` for the last one.
  int share, shared_share, pairs, activation, x_stride;
  int near;    // matrices whose table entries are fetched before one of them is chosen; 0 where they are too many
  half* next;  // [pair][stride]
  int next_stride;
};

// What the product needs to know of a matrix for one row, shared out among `share` CTAs.
EXL2NB_BOTH inline void set_matrix(GemvArgs& a, const ExpertMatrix& m, int share) {
  for (int p = 0; p < 2; p++) a.part[p] = m.part[p];
  a.image = m.image, a.num_parts = m.num_parts, a.strips = m.strips, a.items = m.items, a.units = m.units;
  a.epilogue = kActivation, a.tokens = 1, a.gated = true;
  a.grid = share < m.part[0].strips ? share : m.part[0].strips;
  const int per = (m.part[0].strips + a.grid - 1) / a.grid;
  a.flush = per < 32 ? per : 32;
  share_out(a);
}

// The activations of a pair: its token's normed row, in the order of its expert's matrix.
struct ExpertInput {
  const Row& row;
  int width;
  __device__ __forceinline__ void before(const GemvArgs& A, const GemvShared& S) const { StagedInput::clear(A, S); }
  template <int PATH>
  __device__ __forceinline__ bool put(const GemvArgs& A, const GemvShared& S, int, uint64_t*) const {
#pragma unroll
    for (int j = 0; j < kHeld; j++)
      if (Row::place(j) < width) put_input<false>(S.xs, A.x_stride, A.perms, A.inverse, Row::place(j), width, row.v[j]);
    return false;
  }
};

// Into the L2 cache what a CTA reads first, while it finds out how that is laid out.
__device__ __forceinline__ void prefetch_strips(const GemvArgs& A, int block) {
#if __CUDA_ARCH__ >= 900
  constexpr int64_t kAhead = 128 << 10;
  const int mine = (A.part[0].strips - block + A.grid - 1) / A.grid, i = threadIdx.x, p = i >= mine;
  if (i >= 2 * mine || (i + 1) * A.part[p].strip_bytes > kAhead) return;
  const uint8_t* const from = A.part[p].data + (block + (i - p * mine) * A.grid) * A.part[p].strip_bytes;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(from), "r"(static_cast<uint32_t>(A.part[p].strip_bytes)) : "memory");
#endif
}

template <int PATH>
__global__ void __launch_bounds__(kThreads, 1) up_kernel(const __grid_constant__ UpArgs E) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ GemvArgs A;
  __shared__ RowSums sums;
  const int token = blockIdx.y, at = blockIdx.x, top_k = E.choice.top_k;
  const int place = at < top_k * E.share ? at / E.share : top_k, block = at - place * E.share, pair = token * E.pairs + place;
  // What is chosen, and from what, lies where the ring will be.
  const Chosen chosen(E.choice, shared);
  auto* const near = reinterpret_cast<ExpertMatrix*>(shared + Chosen::bytes(E.choice));
  auto** const inverses = reinterpret_cast<const int**>(near + E.near);
  constexpr int kVectors = sizeof(ExpertMatrix) / 16;
  for (int i = threadIdx.x; i < E.near * kVectors; i += kThreads)
    reinterpret_cast<uint4*>(near)[i] = __ldg(reinterpret_cast<const uint4*>(E.table) + i);
  for (int i = threadIdx.x; i < E.near; i += kThreads) inverses[i] = E.next_table[i].inverse[0];
  Row row;
  row.load<false>(E.from, token, false, sums);  // older than what this kernel waits for
  const NormArgs& n = E.from.norm;
  const Row::Scale scale = row.scale<false>(n, nullptr, sums);
#pragma unroll
  for (int j = 0; j < kHeld; j++)
    if (Row::place(j) < n.width) row.v[j] = Row::scaled<false>(scale, n, row.v[j], Row::place(j));
  pdl_wait();
  pdl_launch_dependents();  // now, so that what the next kernel finds is as old as what this one has found
  rank(E.choice, chosen, token);
  if (threadIdx.x == 0) {
    const int number = place < top_k ? chosen.ranked[place] : E.choice.experts;
    const ExpertMatrix& m = E.near ? near[number] : E.table[number];
    set_matrix(A, m, place < top_k ? E.share : E.shared_share);
    A.x_stride = E.x_stride, A.rows = nullptr, A.squares = nullptr, A.bias = nullptr, A.next_norm = nullptr, A.activation = E.activation;
    for (int p = 0; p < 2; p++) A.inverse[p] = m.inverse[p];
    A.next.x = E.next + static_cast<size_t>(pair) * E.next_stride, A.next.stride = E.next_stride, A.next.perm_stride = 0;
    A.next.num_perms = 1, A.next.inverse[0] = E.near ? inverses[number] : E.next_table[number].inverse[0];
  }
  if constexpr (PATH == kBulk) barrier_fence();  // what was read and written here, before bulk copies go there
  __syncthreads();
  if (block >= A.grid) return;
  prefetch_strips(A, block);
  run_gemv<PATH, true>(A, shared, block, [] {}, ExpertInput{row, n.width});
}

// How many CTAs each pair gets, so that all have about the same number of strips; more than one wave only where there are more pairs.
void share_out(UpArgs& e, const ExpertTable& table, int tokens) {
  const int chosen = table.matrices()[0].part[0].strips, last = table.matrices()[table.count - 1].part[0].strips;
  const bool shared = e.pairs > e.choice.top_k;
  const int total = tokens * (e.choice.top_k * chosen + (shared ? last : 0)), sms = num_sms();
  const auto parts = [](int strips, int per) { return (strips + per - 1) / per; };
  int per = std::max(1, parts(total, sms));
  while (per < std::max(chosen, last) && tokens * (e.choice.top_k * parts(chosen, per) + (shared ? parts(last, per) : 0)) > sms) per++;
  e.share = parts(chosen, per), e.shared_share = shared ? parts(last, per) : 0;
}

struct Limits {
  int block, most;  // shared memory that a CTA may have; and have beside what the system takes
};
Limits limits() {
  int device = 0, block = 0, sm = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  return {block, std::min(block, sm - 2048)};
}

template <auto kernel, class Args>
const char* launch(const Args& args, dim3 grid, int shared, cudaStream_t stream, bool pdl) {
  static const cudaError_t ready =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits().block - static_cast<int>(sizeof(GemvArgs)) - 256);
  if (ready != cudaSuccess) return error_text(ready);
  return launch_kernel(kernel, grid, kThreads, static_cast<size_t>(shared), stream, pdl, 1, args);
}

int ring_bytes() { return stages_of(gemv_path()) * kWarps * kSlot + num_bars(gemv_path()) * 8; }

const char* up_launch(UpArgs e, const ExpertTable& table, int tokens, cudaStream_t stream, bool pdl) {
  if (e.from.norm.width > kHeldWidth || e.from.norm.width % 4) return "experts have more inputs than a CTA holds";
  share_out(e, table, tokens);
  int own = 0;  // a CTA's memory beside ring, image and activations
  for (int i : {0, table.count - 1}) {
    GemvArgs a{};
    set_matrix(a, table.matrices()[i], i == 0 ? e.share : std::max(1, e.shared_share));
    a.next.num_perms = 1;
    own = std::max(own, GemvShared::bytes(a));
    if (e.pairs == e.choice.top_k) break;
  }
  const int near = Chosen::bytes(e.choice) + table.count * static_cast<int>(sizeof(ExpertMatrix) + sizeof(int*));
  e.near = near <= ring_bytes() ? table.count : 0;
  const int shared =
      std::max(Chosen::bytes(e.choice), ring_bytes() + (table.image + 15) / 16 * 16 + own + table.num_perms * table.stride * 2);
  if (shared > limits().block - static_cast<int>(sizeof(GemvArgs)) - 256)
    return "an expert's matrix needs more shared memory than the GPU has";
  const dim3 grid(static_cast<unsigned>(e.choice.top_k * e.share + e.shared_share), static_cast<unsigned>(tokens));
  switch (gemv_path()) {
    case kBulk:
      return launch<up_kernel<kBulk>>(e, grid, shared, stream, pdl);
    case kAsync:
      return launch<up_kernel<kAsync>>(e, grid, shared, stream, pdl);
    default:
      return launch<up_kernel<kPlain>>(e, grid, shared, stream, pdl);
  }
}

const char* down_launch(const DownArgs& d, int tokens, cudaStream_t stream, bool pdl) {
  int shared = ring_bytes() + DownShared::bytes(d);
  const int x_bytes = d.pairs * d.out.x_stride * 2;
  const bool staged = shared + x_bytes <= limits().most - static_cast<int>(sizeof(GemvArgs)) - 256;
  if (staged) shared += x_bytes;
  if (shared > limits().block - static_cast<int>(sizeof(GemvArgs)) - 256)
    return "the experts of a token need more shared memory than the GPU has";
  const dim3 grid(static_cast<unsigned>(d.out.grid), static_cast<unsigned>(tokens));
  switch (gemv_path()) {
    case kBulk:
      return staged ? launch<down_kernel<kBulk, true>>(d, grid, shared, stream, pdl)
                    : launch<down_kernel<kBulk, false>>(d, grid, shared, stream, pdl);
    case kAsync:
      return staged ? launch<down_kernel<kAsync, true>>(d, grid, shared, stream, pdl)
                    : launch<down_kernel<kAsync, false>>(d, grid, shared, stream, pdl);
    default:
      return staged ? launch<down_kernel<kPlain, true>>(d, grid, shared, stream, pdl)
                    : launch<down_kernel<kPlain, false>>(d, grid, shared, stream, pdl);
  }
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

size_t routed_bytes(const int64_t* words, int64_t router_outputs, int tokens) {
  const Routed r{words};
  return Routed::inner(router_outputs, tokens) + static_cast<size_t>(tokens) * r.pairs() * r.host(1).stride * 2;
}

GemvArgs routed_down(const int64_t* words) {
  const ExpertTable& down = Routed{words}.host(1);
  GemvArgs a{};
  a.part[0] = down.matrices()[0].part[0];  // strips and outputs, which all have
  a.num_parts = 1, a.strips = a.part[0].strips, a.tokens = 1, a.scale = 1.f, a.x_stride = down.stride;
  return a;
}

const char* routed_launch(const int64_t* words, const RowSource& from, const GemvArgs& router, const GemvArgs& down, int capacity,
                          cudaStream_t stream, bool pdl) {
  const Routed r{words};
  const int tokens = router.tokens;
  auto* const room = reinterpret_cast<uint8_t*>(router.out);
  auto* const inner = reinterpret_cast<half*>(room + Routed::inner(router.out_stride, capacity));
  const ExpertTable &first = r.host(0), &second = r.host(1);
  const Choice choice{router.out, static_cast<int>(router.out_stride), r.experts(), r.top_k(), words[13] != 0, r.renormalize()};

  UpArgs e{};
  e.choice = choice, e.from = from, e.table = r.device(0), e.next_table = r.device(1), e.pairs = r.pairs();
  e.activation = static_cast<int>(words[8]), e.x_stride = first.stride, e.next = inner, e.next_stride = second.stride;
  if (const char* wrong = up_launch(e, first, tokens, stream, pdl)) return wrong;

  DownArgs d{};
  d.out = down, d.choice = choice, d.table = r.device(1), d.pairs = r.pairs(), d.image = (second.image + 15) / 16 * 16;
  gemv_share(d.out, static_cast<Epilogue>(down.epilogue));
  d.out.x = inner;
  return down_launch(d, tokens, stream, pdl);
}

}  // namespace exl2nb
