// More tokens than the decode path's product takes at once, up to 64, times a weight blob: every weight is decoded once for all of them.
//
// A CTA owns sixteen neighbouring strips, two a warp, over a share of the rows; the CTAs of a cluster share the rows and add their sums in
// order, so there are no atomics on numbers. A warp copies its own items into two stages of shared memory, item by item; the activations
// that meet an item, for all warps and in one piece since they lie in groups (fragment.cuh), are copied by whichever warp was the last to be
// through with what lay there. What the weights are worth is applied to them in fp16, as unpacking does, so that nothing but products is left
// per token. sm_90 and later. Bytes: the strips once; 2 * K per token, tile of 256 columns and CTA from L2.
#pragma once
#include "blob.h"
#include "coded.cuh"
#include "many.h"
#include "norm.cuh"
#include "pdl.cuh"

namespace exl2nb {

constexpr int kManyStrips = 16, kManyWarps = 8, kManyStages = 2, kManyUnits = kSlot / 256, kManySplits = 8;
constexpr int kManyThreads = kManyWarps * 32, kManyColumns = kManyStrips * kStripColumns;
constexpr int kManyWeights = kManyStrips * kSlot;  // of a stage
// Bytes of the activations of a stage for 8 * NB tokens; up to 16 tokens two CTAs share a multiprocessor.
EXL2NB_BOTH constexpr int many_tokens(int NB) { return kManyUnits * kUnitRows * NB * 8 * 2; }
constexpr int kManySums = kManyColumns + 4;  // floats of a token in the tile that a cluster adds up
static_assert(2 * 16 * kManySums * 4 <= kManyStages * (kManyWeights + many_tokens(2)) &&
                  2 * kManyTokens * kManySums * 4 <= kManyStages * (kManyWeights + many_tokens(kManyTokens / 8)),
              "two tiles replace the stages");

struct ManyPart {
  const uint8_t* data;
  int strips, first_column, outputs, perm, tiles;
  int64_t strip_bytes;
};
struct ManyArgs {
  ManyPart part[kMaxParts];
  const uint8_t* image;
  int num_parts, items, units, splits, tokens;
  const half* x;  // in groups of 8 * NB tokens
  int x_stride, x_perm_stride;
  const float* bias;
  float* out;  // [token][column], null: the residual takes the sums, or `paired`
  int64_t out_stride;
  // As in GemvArgs: what the outputs are multiplied by; the residual, then the next product's input and partial squares, two of a tile.
  const float* squares;
  int squares_count;
  float inverse_width, eps;
  float* residual;
  int residual_stride;
  float scale;
  MatrixInput next;
  const float* next_norm;
  float* next_squares;
  // Gate and up in one: the second part's outputs times the activation of the first's, alike in number, into the next product's input.
  bool paired;
  int activation;
  const uint8_t* next_image;  // of the next product, null: unknown
  int next_image_bytes;
};
EXL2NB_BOTH inline int many_image(const ManyArgs& a) { return (image_bytes(a.items, a.units, a.num_parts) + 15) / 16 * 16; }
// The stages' barriers, the counts of warps that are through, the factors.
constexpr int kManyBars = kManyStages * (kManyWarps + 1) * 8, kManyFixed = kManyBars + 16 + kManyTokens * 4;
EXL2NB_BOTH inline int many_shared(const ManyArgs& a, int NB) {
  return kManyStages * (kManyWeights + many_tokens(NB)) + kManyFixed + many_image(a);
}

// many_wide.cu: whether this build and this GPU have it; the launch, of any number of tokens up to 64.
bool many_wide_ready();
const char* many_wide_launch(const ManyArgs& a, int tiles, int most_shared, void* stream, bool pdl);

#if __CUDA_ARCH__ >= 900
// Weights pass through the L2 cache once; what every CTA reads first, of this product and the next one, ought to stay there.
__device__ __forceinline__ void copy_once(void* to, const void* from, uint32_t bytes, uint64_t* b) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy)
               : "memory");
}
__device__ __forceinline__ uint4 load_kept(const void* from) {
  uint64_t policy;
  uint4 v;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));
  asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0,%1,%2,%3},[%4],%5;" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from), "l"(policy));
  return v;
}
__device__ __forceinline__ void prefetch(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(from), "r"(bytes) : "memory");
}
// One more at a counter in shared memory; what this warp has read is read, and seen by who comes after.
__device__ __forceinline__ int count_up(int* counter) {
  int before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.s32 %0,[%1],1;" : "=r"(before) : "r"(shared_address(counter)) : "memory");
  return before;
}
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ float4 read_peer(const float* mine, int rank) {
  uint32_t there;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(there) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(there) : "memory");
  return v;
}
#else
__device__ __forceinline__ void copy_once(void*, const void*, uint32_t, uint64_t*) {}
__device__ __forceinline__ uint4 load_kept(const void*) { return {}; }
__device__ __forceinline__ void prefetch(const void*, uint32_t) {}
__device__ __forceinline__ int count_up(int*) { return 0; }
__device__ __forceinline__ void cluster_barrier() {}
__device__ __forceinline__ float4 read_peer(const float*, int) { return {}; }
#endif

// What a CTA works on: a tile of a part, and the items of its share.
struct ManyTile {
  int part, first_strip, live, first_item, end_item, second_item, count;  // second_item: the first one of part 1; count: of both parts
  __device__ __forceinline__ ManyTile(const ManyArgs& A, const uint16_t* ends, int tile, int split) {
    part = 0;
    while (part + 1 < A.num_parts && tile >= A.part[part].tiles) tile -= A.part[part++].tiles;
    first_strip = tile * kManyStrips, live = min(kManyStrips, A.part[part].strips - first_strip);
    const int warps = kWarps / A.splits;
    first_item = ends[part * kEnds + split * warps], end_item = ends[part * kEnds + (split + 1) * warps];
    second_item = A.paired ? ends[kEnds + split * warps] : 0;
    count = end_item - first_item + (A.paired ? ends[kEnds + (split + 1) * warps] - second_item : 0);
  }
  __device__ __forceinline__ bool second(int n) const { return n >= end_item - first_item; }
  __device__ __forceinline__ int item(int n) const { return second(n) ? second_item + n - (end_item - first_item) : first_item + n; }
};

// Two stages of weights, each warp's with a barrier of its own, and of activations, and who fills them.
struct ManyStages {
  uint8_t *weights, *tokens;
  uint64_t *weights_full, *tokens_full;  // [stage][warp], [stage]
  int* through;                          // [stage] warps that need the activations no more
  int tokens_size, group, warp;
  int live;  // strips of this warp

  __device__ __forceinline__ uint8_t* own(int stage) const { return weights + stage * kManyWeights + warp * 2 * kSlot; }
  __device__ __forceinline__ uint64_t* own_full(int stage) const { return weights_full + stage * kManyWarps + warp; }
  // first: the CTA's first strip of the item's part.
  __device__ __forceinline__ void fetch_weights(const Item& it, const ManyPart& part, int first, int stage) const {
    const uint8_t* const strip = part.data + (first + warp * 2) * part.strip_bytes + it.offset;
    barrier_expect(own_full(stage), live * it.bytes);
    for (int j = 0; j < live; j++) copy_once(own(stage) + j * kSlot, strip + j * part.strip_bytes, it.bytes, own_full(stage));
  }
  __device__ __forceinline__ void fetch_tokens(const Item& it, const half* x, int stage) const {
    const int bytes = it.units * (kUnitRows * 2) * group;
    barrier_expect(tokens_full + stage, bytes);
    bulk_copy(tokens + stage * tokens_size, x + static_cast<size_t>(it.block) * 32 * group, bytes, tokens_full + stage);
  }
};

// Products of a unit of two strips with the tokens of a stage.
template <int NB>
struct Fragments {
  uint32_t x;  // shared address of this lane's eight halves of the first sixteen rows and tokens
  __device__ __forceinline__ Fragments(const void* tokens, int lane)
      : x(shared_address(tokens) + ((lane >> 3 & 1) * NB * 8 + (lane >> 4) * 8 + (lane & 7)) * 16) {}
  __device__ __forceinline__ void operator()(const uint32_t (&h)[2][16], int unit, float (&y)[2][NB][4]) const {
#pragma unroll
    for (int s = 0; s < 4; s++) {  // 16 rows
#pragma unroll
      for (int n = 0; n < NB; n += 2) {
        uint32_t b[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(x + ((unit * 4 + s) * 2 * NB * 8 + n * 8) * 16)
                     : "memory");
#pragma unroll
        for (int j = 0; j < 2; j++) {
          mma<kBulk, false>(y[j][n], h[j] + s * 4, b[0], b[1]);
          mma<kBulk, false>(y[j][n + 1], h[j] + s * 4, b[2], b[3]);
        }
      }
    }
  }
};
// An item of two strips times the tokens; the next unit's words are fetched while one is multiplied.
template <int NB, int B, bool GPTQ, class Product>
__device__ __forceinline__ void multiply_coded(const uint8_t* st, const Item& it, const half2* steps, const Product& product, int lane,
                                               float (&y)[2][NB][4]) {
  Coded<B, GPTQ> coded[2];
  const auto load = [&](int i) {
#pragma unroll
    for (int j = 0; j < 2; j++) coded[j].load(st + j * kSlot, it, i, lane);
  };
  constexpr bool kAhead = B < 16;  // for which there are registers
  load(0);
#pragma unroll 1
  for (int i = 0; i < it.units; i++) {
    uint32_t h[2][16];
    if (!kAhead) load(i);
#pragma unroll
    for (int j = 0; j < 2; j++) coded[j].decode(steps[i], h[j]);
    if (kAhead) load(min(i + 1, it.units - 1));
    product(h, i, y);
  }
}
template <int NB, class Product>
__device__ __forceinline__ void multiply_item(const uint8_t* st, const Item& it, const half2* steps, const Product& product, int lane,
                                              float (&y)[2][NB][4]) {
  if (it.scales) {
    switch (it.bits) {
      case 2:
        return multiply_coded<NB, 2, true>(st, it, steps, product, lane, y);
      case 3:
        return multiply_coded<NB, 3, true>(st, it, steps, product, lane, y);
      case 4:
        return multiply_coded<NB, 4, true>(st, it, steps, product, lane, y);
      default:
        return multiply_coded<NB, 8, true>(st, it, steps, product, lane, y);
    }
  }
  switch (it.bits) {
    case 2:
      return multiply_coded<NB, 2, false>(st, it, steps, product, lane, y);
    case 3:
      return multiply_coded<NB, 3, false>(st, it, steps, product, lane, y);
    case 4:
      return multiply_coded<NB, 4, false>(st, it, steps, product, lane, y);
    case 5:
      return multiply_coded<NB, 5, false>(st, it, steps, product, lane, y);
    case 6:
      return multiply_coded<NB, 6, false>(st, it, steps, product, lane, y);
    case 8:
      return multiply_coded<NB, 8, false>(st, it, steps, product, lane, y);
    default:
      return multiply_coded<NB, 16, false>(st, it, steps, product, lane, y);
  }
}

// What the outputs of each token are multiplied by.
__device__ __forceinline__ void load_factors(const ManyArgs& A, float* factors, int warp, int lane) {
  for (int token = warp; token < kManyTokens; token += kManyWarps) {
    float sum = 0.f;
    if (A.squares && token < A.tokens)
      for (int i = lane; i < A.squares_count; i += 32) sum += __ldcg(A.squares + token * A.squares_count + i);
    const float factor = A.squares ? rsqrtf(warp_sum(sum) * A.inverse_width + A.eps) : 1.f;
    if (lane == 0) factors[token] = factor;
  }
}
// Into the cache: what add_four reads and no kernel writes.
__device__ __forceinline__ void touch_constants(const ManyArgs& A, int column) {
  if (column >= A.part[0].outputs) return;
  if (A.bias) prefetch_line(A.bias + column);
  if (A.next_norm) prefetch_line(A.next_norm + column);
  for (int p = 0; p < A.next.num_perms; p++)
    if (A.next.inverse[p]) prefetch_line(A.next.inverse[p] + column);
}
__device__ __forceinline__ float4 old_residual(const ManyArgs& A, int token, int column) {
  if (A.out || token >= A.tokens || column >= A.part[0].outputs) return {0.f, 0.f, 0.f, 0.f};
  return __ldcg(reinterpret_cast<const float4*>(A.residual + static_cast<size_t>(token) * A.residual_stride + column));
}
// Four sums are added to a token's residual v; what becomes of it goes to the next product. A warp has 128 neighbouring columns.
__device__ __forceinline__ void add_four(const ManyArgs& A, int token, int column, float factor, float4 sum, float4 v, int lane) {
  float squares = 0.f;
  if (column < A.part[0].outputs) {  // a multiple of four
    float4 bias{0.f, 0.f, 0.f, 0.f};
    if (A.bias) bias = {__ldg(A.bias + column), __ldg(A.bias + column + 1), __ldg(A.bias + column + 2), __ldg(A.bias + column + 3)};
    v.x += A.scale * fmaf(sum.x, factor, bias.x), v.y += A.scale * fmaf(sum.y, factor, bias.y);
    v.z += A.scale * fmaf(sum.z, factor, bias.z), v.w += A.scale * fmaf(sum.w, factor, bias.w);
    *reinterpret_cast<float4*>(A.residual + static_cast<size_t>(token) * A.residual_stride + column) = v;
    squares = square_sum(v, 0.f);
    const float4 w = __ldg(reinterpret_cast<const float4*>(A.next_norm + column));
    put_input<false>(A.next, token, column, A.part[0].outputs, {v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w});
  }
  squares = warp_sum(squares);
  if (lane == 0) A.next_squares[static_cast<size_t>(token) * 2 * gridDim.y + blockIdx.y * 2 + column / 128 % 2] = squares;
}

// This CTA's sums of a tile in registers into shared memory.
template <int NB>
__device__ __forceinline__ void lay_down(float* sums, int warp, int lane, const float (&y)[2][NB][4]) {
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        sums[(n * 8 + 2 * (lane & 3) + (k & 1)) * kManySums + (warp * 2 + j) * kStripColumns + (lane >> 2) + (k >> 1) * 8] = y[j][n][k];
}
// The sums of the cluster's CTAs, in order.
__device__ __forceinline__ float4 all_sums(const ManyArgs& A, const float* at) {
  float4 part[kManySplits], all{0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int r = 0; r < kManySplits; r++)
    if (r < A.splits) part[r] = read_peer(at, r);
#pragma unroll
  for (int r = 0; r < kManySplits; r++)
    if (r < A.splits) all.x += part[r].x, all.y += part[r].y, all.z += part[r].z, all.w += part[r].w;
  return all;
}
// Sums of a tile in registers: to memory, or through the shared memory of the cluster.
template <int NB>
__device__ __forceinline__ void write_tile(const ManyArgs& A, const ManyTile& tile, int split, const float* factors, float* sums, int warp,
                                           int lane, const float (&y)[2][NB][4]) {
  const ManyPart& P = A.part[tile.part];
  const int g = lane >> 2, t = lane & 3, first = tile.first_strip * kStripColumns;
  const auto each = [&](auto put) {
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int n = 0; n < NB; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) put(n * 8 + 2 * t + (k & 1), (warp * 2 + j) * kStripColumns + g + (k >> 1) * 8, y[j][n][k]);
  };
  const auto store = [&](int token, int column, float v) {
    if (token < A.tokens && first + column < P.outputs) {
      const int at = P.first_column + first + column;
      A.out[token * A.out_stride + at] = v * factors[token] + (A.bias ? __ldg(A.bias + at) : 0.f);
    }
  };
  if (A.splits == 1 && A.out) {
    each(store);
    return;
  }
  lay_down<NB>(sums, warp, lane, y);
  const int mine = threadIdx.x + split * kManyThreads;  // four sums of a token
  const float4 old = old_residual(A, mine / (kManyColumns / 4), first + mine % (kManyColumns / 4) * 4);
  cluster_barrier();
  for (int i = mine; i < A.tokens * (kManyColumns / 4); i += A.splits * kManyThreads) {
    const int token = i / (kManyColumns / 4), column = i % (kManyColumns / 4) * 4;
    const float4 all = all_sums(A, sums + token * kManySums + column);
    if (A.out)
      store(token, column, all.x), store(token, column + 1, all.y), store(token, column + 2, all.z), store(token, column + 3, all.w);
    else
      add_four(A, token, first + column, factors[token], all, i < mine + A.splits * kManyThreads ? old : old_residual(A, token, first + column), lane);
  }
  cluster_barrier();  // nobody leaves while others read
}

// Gates: both tiles through the shared memory of the cluster.
template <int NB>
__device__ __forceinline__ void write_gates(const ManyArgs& A, const ManyTile& tile, int split, const float* factors, float* sums, int warp,
                                            int lane, const float (&gate)[2][NB][4], const float (&up)[2][NB][4]) {
  float* const second = sums + NB * 8 * kManySums;
  lay_down<NB>(sums, warp, lane, gate);
  lay_down<NB>(second, warp, lane, up);
  cluster_barrier();
  const int width = A.part[0].outputs;
  for (int i = threadIdx.x + split * kManyThreads; i < A.tokens * (kManyColumns / 4); i += A.splits * kManyThreads) {
    const int token = i / (kManyColumns / 4), inside = i % (kManyColumns / 4) * 4, column = tile.first_strip * kStripColumns + inside;
    if (column >= width) continue;  // a multiple of four
    const float4 g = all_sums(A, sums + token * kManySums + inside), u = all_sums(A, second + token * kManySums + inside);
    const auto one = [&](float a, float b, int k) {
      const float bias = A.bias ? __ldg(A.bias + column + k) : 0.f, bias_up = A.bias ? __ldg(A.bias + A.part[1].first_column + column + k) : 0.f;
      return activation(fmaf(a, factors[token], bias), A.activation) * fmaf(b, factors[token], bias_up);
    };
    put_input<false>(A.next, token, column, width, {one(g.x, u.x, 0), one(g.y, u.y, 1), one(g.z, u.z, 2), one(g.w, u.w, 3)});
  }
  cluster_barrier();  // nobody leaves while others read
}

// The kernel. multiply(bytes of this warp's items in a stage, item, its steps, tokens of the stage, sums): an item of a warp's two strips.
template <int NB, bool PAIRED, class Multiply>
__device__ __forceinline__ void run_many(const ManyArgs& A, uint8_t* shared, Multiply multiply) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, split = blockIdx.x;
  uint8_t* const tokens = shared + kManyStages * kManyWeights;
  uint64_t* const bars = reinterpret_cast<uint64_t*>(tokens + kManyStages * many_tokens(NB));
  int* const through = reinterpret_cast<int*>(bars + kManyStages * (kManyWarps + 1));
  float* const factors = reinterpret_cast<float*>(through + 4);
  uint8_t* const image = reinterpret_cast<uint8_t*>(factors + kManyTokens);
  pdl_launch_dependents();
  if (threadIdx.x < kManyStages * (kManyWarps + 1)) {
    barrier_init(bars + threadIdx.x, 1);
    barrier_fence();
    if (threadIdx.x < kManyStages) through[threadIdx.x] = 0;
  }
  for (int i = threadIdx.x; i < many_image(A) / 16; i += kManyThreads)
    reinterpret_cast<uint4*>(image)[i] = load_kept(A.image + i * 16);
  __syncthreads();
  const auto* const items = reinterpret_cast<const Item*>(image);
  const auto* const steps = reinterpret_cast<const half2*>(image + image_steps(A.items));
  const ManyTile tile(A, reinterpret_cast<const uint16_t*>(image + image_ends(A.items, A.units)), blockIdx.y, split);
  const ManyStages s{shared,
                     tokens,
                     bars,
                     bars + kManyStages * kManyWarps,
                     through,
                     many_tokens(NB),
                     NB * 8,
                     warp,
                     min(max(tile.live - warp * 2, 0), 2)};
  const auto part_of = [&](int n) -> const ManyPart& { return A.part[tile.second(n) ? tile.part + 1 : tile.part]; };
  const auto fetch_weights = [&](int n, int stage) { s.fetch_weights(items[tile.item(n)], part_of(n), tile.first_strip, stage); };
  const auto fetch_tokens = [&](int n, int stage) {
    s.fetch_tokens(items[tile.item(n)], A.x + static_cast<size_t>(part_of(n).perm) * A.x_perm_stride, stage);
  };
  const int ahead = min(kManyStages, tile.count);
  if (lane == 0)
    for (int n = 0; n < ahead; n++) fetch_weights(n, n);
  if (!A.out && threadIdx.x < kManyColumns / 4) touch_constants(A, tile.first_strip * kStripColumns + threadIdx.x * 4);
  pdl_wait();
  if (threadIdx.x == 0)
    for (int n = 0; n < ahead; n++) fetch_tokens(n, n);
  load_factors(A, factors, warp, lane);
  if (A.next_image && threadIdx.x == kManyThreads - 1) prefetch(A.next_image, A.next_image_bytes);
  float y[2][NB][4] = {}, gate[2][NB][4];
  const auto set_aside = [&] {
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int n = 0; n < NB; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) gate[j][n][k] = y[j][n][k], y[j][n][k] = 0.f;
  };
  const int gates = tile.end_item - tile.first_item;  // items of the gate
  int stage = 0;
  uint32_t phase = 0;
  for (int n = 0; n < tile.count; n++) {
    const Item it = items[tile.item(n)];
    if (PAIRED && n == gates) set_aside();
    barrier_wait(s.own_full(stage), phase);
    barrier_wait(s.tokens_full + stage, phase);
    multiply(s.own(stage), it, steps + it.unit0, s.tokens + stage * s.tokens_size, y);
    __syncwarp();
    if (lane == 0 && n + kManyStages < tile.count) {
      fetch_weights(n + kManyStages, stage);
      if (count_up(through + stage) == kManyWarps - 1) {
        through[stage] = 0;
        fetch_tokens(n + kManyStages, stage);
      }
    }
    if (++stage == kManyStages) stage = 0, phase ^= 1;
  }
  if (PAIRED && tile.count == gates) set_aside();
  __syncthreads();  // nobody reads the stages any more, and the factors are there
  if constexpr (PAIRED)
    write_gates<NB>(A, tile, split, factors, reinterpret_cast<float*>(shared), warp, lane, gate, y);
  else
    write_tile<NB>(A, tile, split, factors, reinterpret_cast<float*>(shared), warp, lane, y);
}

template <int NB, bool PAIRED>
__global__ void __launch_bounds__(kManyThreads, NB == 2 ? 2 : 1) many(const __grid_constant__ ManyArgs A) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x & 31;
  run_many<NB, PAIRED>(A, shared, [&](const uint8_t* st, const Item& it, const half2* steps, const uint8_t* tokens, float (&y)[2][NB][4]) {
    multiply_item(st, it, steps, Fragments<NB>(tokens, lane), lane, y);
  });
#endif
}

}  // namespace exl2nb
