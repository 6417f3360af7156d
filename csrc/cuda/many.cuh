// More tokens than the decode path's product takes at once, up to 64, times a weight blob: every weight is decoded once for all of them.
//
// A CTA owns sixteen neighbouring strips, two a warp, over a share of the rows; the CTAs of a cluster share the rows and add their sums in
// order, so there are no atomics. One warp more copies items and the activations that meet them into two stages of shared memory. What
// the weights are worth is applied to them in fp16, as unpacking does, so that nothing but products is left per token. sm_90 and later.
// Bytes: the strips once; 2 * K per token, tile of 256 columns and CTA from L2.
#pragma once
#include "blob.h"
#include "coded.cuh"
#include "many.h"
#include "norm.cuh"
#include "pdl.cuh"

namespace exl2nb {

constexpr int kManyStrips = 16, kManyWarps = 8, kManyStages = 2, kManyUnits = kSlot / 256, kManySplits = 8;
constexpr int kManyThreads = (kManyWarps + 1) * 32, kManyColumns = kManyStrips * kStripColumns;
// Halves of a token's activations beside an item: half a bank row more than the units have, so that two tokens lie in different banks.
EXL2NB_BOTH constexpr int many_pitch(int units) { return units * kUnitRows + 32; }
constexpr int kManyWeights = kManyStrips * kSlot;
// Bytes of a stage for 8 * NB tokens; up to 16 tokens two CTAs share a multiprocessor.
EXL2NB_BOTH constexpr int many_stage(int NB) { return kManyWeights + NB * 8 * many_pitch(kManyUnits) * 2; }
constexpr int kManySums = kManyColumns + 4;  // floats of a token in the tile that a cluster adds up
static_assert(kManyTokens * kManySums * 4 <= kManyStages * many_stage(kManyTokens / 8) && 16 * kManySums * 4 <= kManyStages * many_stage(2),
              "the tile replaces the stages");

struct ManyPart {
  const uint8_t* data;
  int strips, first_column, outputs, perm, tiles;
  int64_t strip_bytes;
};
struct ManyArgs {
  ManyPart part[kMaxParts];
  const uint8_t* image;
  int num_parts, items, units, splits, tokens;
  const half* x;  // [perm][token][stride], as fragment.cuh orders it
  int x_stride, x_perm_stride;
  const float* bias;
  float* out;  // [token][column], null: the residual takes the sums
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
};
EXL2NB_BOTH inline int many_image(const ManyArgs& a) { return (image_bytes(a.items, a.units, a.num_parts) + 15) / 16 * 16; }
EXL2NB_BOTH inline int many_shared(const ManyArgs& a, int NB) {
  return kManyStages * many_stage(NB) + 2 * kManyStages * 8 + kManyTokens * 4 + many_image(a);
}

// many_wide.cu: whether this build and this GPU have it; the launch, of any number of tokens up to 64.
bool many_wide_ready();
const char* many_wide_launch(const ManyArgs& a, int tiles, int most_shared, void* stream, bool pdl);

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(shared_address(b)) : "memory");
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
__device__ __forceinline__ void barrier_arrive(uint64_t*) {}
__device__ __forceinline__ void cluster_barrier() {}
__device__ __forceinline__ float4 read_peer(const float*, int) { return {}; }
#endif

// What a CTA works on: a tile of a part, and the items of its share.
struct ManyTile {
  int part, first_strip, live, first_item, end_item;
  __device__ __forceinline__ ManyTile(const ManyArgs& A, const uint16_t* ends, int tile, int split) {
    part = 0;
    while (part + 1 < A.num_parts && tile >= A.part[part].tiles) tile -= A.part[part++].tiles;
    first_strip = tile * kManyStrips, live = min(kManyStrips, A.part[part].strips - first_strip);
    const int warps = kWarps / A.splits;
    first_item = ends[part * kEnds + split * warps], end_item = ends[part * kEnds + (split + 1) * warps];
  }
};

// The stages, as the copying warp and the others see them.
struct ManyStages {
  uint8_t* memory;
  uint64_t *full, *empty;
  int size, stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ uint8_t* weights() const { return memory + stage * size; }
  __device__ __forceinline__ half* tokens() const { return reinterpret_cast<half*>(weights() + kManyWeights); }
  __device__ __forceinline__ void next() {
    if (++stage == kManyStages) stage = 0, phase ^= 1;
  }
};

// The copying warp. The first items' weights are on their way before the kernel waits for its predecessor. WIDE: how the input lies.
template <bool WIDE>
__device__ __forceinline__ void copy_items(const ManyArgs& A, const ManyTile& tile, const Item* items, ManyStages s, int lane) {
  const ManyPart& P = A.part[tile.part];
  const uint8_t* const strip = P.data + (tile.first_strip + lane) * P.strip_bytes;
  const half* const x = A.x + static_cast<size_t>(P.perm) * A.x_perm_stride;
  const auto weights = [&](const Item& it) {
    if (lane == 0) barrier_expect(s.full + s.stage, tile.live * it.bytes + (WIDE ? kWideTokens : A.tokens) * it.units * (kUnitRows * 2));
    __syncwarp();
    if (lane < tile.live) bulk_copy(s.weights() + lane * kSlot, strip + it.offset, it.bytes, s.full + s.stage);
  };
  const auto tokens = [&](const Item& it) {
    if constexpr (WIDE) {
      if (lane == 0)
        bulk_copy(s.tokens(), x + static_cast<size_t>(it.block) * 32 * kWideTokens, it.units * (kUnitRows * kWideTokens * 2), s.full + s.stage);
    } else {
      for (int m = lane; m < A.tokens; m += 32)
        bulk_copy(s.tokens() + m * many_pitch(it.units), x + static_cast<size_t>(m) * A.x_stride + it.block * 32, it.units * (kUnitRows * 2),
                  s.full + s.stage);
    }
  };
  const int ahead = min(tile.first_item + kManyStages, tile.end_item);
  const ManyStages begin = s;
  for (int n = tile.first_item; n < ahead; n++, s.next()) weights(items[n]);
  pdl_wait();
  s = begin;
  for (int n = tile.first_item; n < ahead; n++, s.next()) tokens(items[n]);
  for (int n = ahead; n < tile.end_item; n++, s.next()) {
    barrier_wait(s.empty + s.stage, s.phase ^ 1);
    const Item it = items[n];
    weights(it);
    tokens(it);
  }
}

// Products of a unit of two strips with tokens that lie as fragment.cuh orders them.
template <int NB>
struct Fragments {
  const half* x;  // this lane's activations of the item's first row
  int pitch;      // from token to token
  __device__ __forceinline__ void operator()(const uint32_t (&h)[2][16], int unit, float (&y)[2][NB][4]) const {
#pragma unroll
    for (int side = 0; side < 2; side++) {  // 32 rows
      uint4 b[NB];
#pragma unroll
      for (int n = 0; n < NB; n++) b[n] = *reinterpret_cast<const uint4*>(x + n * 8 * pitch + unit * kUnitRows + side * 32);
#pragma unroll
      for (int s = 0; s < 2; s++)
#pragma unroll
        for (int n = 0; n < NB; n++)
#pragma unroll
          for (int j = 0; j < 2; j++) mma<kBulk, false>(y[j][n], h[j] + side * 8 + s * 4, s ? b[n].z : b[n].x, s ? b[n].w : b[n].y);
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
// Four sums are added to a token's residual; what becomes of it goes to the next product. A warp has 128 neighbouring columns.
__device__ __forceinline__ void add_four(const ManyArgs& A, int token, int column, float factor, float4 sum, int lane) {
  float squares = 0.f;
  if (column < A.part[0].outputs) {  // a multiple of four
    float4 bias{0.f, 0.f, 0.f, 0.f};
    if (A.bias) bias = {__ldg(A.bias + column), __ldg(A.bias + column + 1), __ldg(A.bias + column + 2), __ldg(A.bias + column + 3)};
    float4* const at = reinterpret_cast<float4*>(A.residual + static_cast<size_t>(token) * A.residual_stride + column);
    float4 v = __ldcg(at);
    v.x += A.scale * fmaf(sum.x, factor, bias.x), v.y += A.scale * fmaf(sum.y, factor, bias.y);
    v.z += A.scale * fmaf(sum.z, factor, bias.z), v.w += A.scale * fmaf(sum.w, factor, bias.w);
    *at = v;
    squares = square_sum(v, 0.f);
    const float4 w = __ldg(reinterpret_cast<const float4*>(A.next_norm + column));
    put_input<false>(A.next, token, column, A.part[0].outputs, {v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w});
  }
  squares = warp_sum(squares);
  if (lane == 0) A.next_squares[static_cast<size_t>(token) * 2 * gridDim.y + blockIdx.y * 2 + column / 128 % 2] = squares;
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
    if (warp < kManyWarps) each(store);
    return;
  }
  if (warp < kManyWarps) each([&](int token, int column, float v) { sums[token * kManySums + column] = v; });
  cluster_barrier();
  for (int i = threadIdx.x + split * kManyThreads; i < A.tokens * (kManyColumns / 4); i += A.splits * kManyThreads) {
    const int token = i / (kManyColumns / 4), column = i % (kManyColumns / 4) * 4;
    float4 all{0.f, 0.f, 0.f, 0.f};
    for (int r = 0; r < A.splits; r++) {
      const float4 v = read_peer(sums + token * kManySums + column, r);
      all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
    }
    if (A.out)
      store(token, column, all.x), store(token, column + 1, all.y), store(token, column + 2, all.z), store(token, column + 3, all.w);
    else
      add_four(A, token, first + column, factors[token], all, lane);
  }
  cluster_barrier();  // nobody leaves while others read
}

// The kernel. multiply(bytes of this warp's items in a stage, item, its steps, tokens of the stage, sums): an item of a warp's two strips.
template <int NB, bool WIDE, class Multiply>
__device__ __forceinline__ void run_many(const ManyArgs& A, uint8_t* shared, Multiply multiply) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, split = blockIdx.x;
  uint64_t* const bars = reinterpret_cast<uint64_t*>(shared + kManyStages * many_stage(NB));
  float* const factors = reinterpret_cast<float*>(bars + 2 * kManyStages);
  uint8_t* const image = reinterpret_cast<uint8_t*>(factors + kManyTokens);
  pdl_launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kManyStages; i++) barrier_init(bars + i, 1), barrier_init(bars + kManyStages + i, kManyWarps);
    barrier_fence();
  }
  for (int i = threadIdx.x; i < many_image(A) / 16; i += kManyThreads)
    reinterpret_cast<uint4*>(image)[i] = __ldg(reinterpret_cast<const uint4*>(A.image) + i);
  __syncthreads();
  const auto* const items = reinterpret_cast<const Item*>(image);
  const auto* const steps = reinterpret_cast<const half2*>(image + image_steps(A.items));
  const ManyTile tile(A, reinterpret_cast<const uint16_t*>(image + image_ends(A.items, A.units)), blockIdx.y, split);
  ManyStages s{shared, bars, bars + kManyStages, many_stage(NB)};
  float y[2][NB][4] = {};
  if (warp == kManyWarps) {
    copy_items<WIDE>(A, tile, items, s, lane);
  } else {
    pdl_wait();
    load_factors(A, factors, warp, lane);
    for (int n = tile.first_item; n < tile.end_item; n++, s.next()) {
      const Item it = items[n];
      barrier_wait(s.full + s.stage, s.phase);
      multiply(s.weights() + warp * 2 * kSlot, it, steps + it.unit0, s.tokens(), y);
      __syncwarp();
      if (lane == 0) barrier_arrive(s.empty + s.stage);
    }
  }
  __syncthreads();  // nobody reads the stages any more, and the factors are there
  write_tile<NB>(A, tile, split, factors, reinterpret_cast<float*>(shared), warp, lane, y);
}

template <int NB>
__global__ void __launch_bounds__(kManyThreads, NB == 2 ? 2 : 1) many(const __grid_constant__ ManyArgs A) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x & 31;
  run_many<NB, false>(A, shared, [&](const uint8_t* st, const Item& it, const half2* steps, const half* x, float (&y)[2][NB][4]) {
    const Fragments<NB> product{x + (lane >> 2) * many_pitch(it.units) + (lane & 3) * 8, many_pitch(it.units)};
    multiply_item(st, it, steps, product, lane, y);
  });
#endif
}

}  // namespace exl2nb
