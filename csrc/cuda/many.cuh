// More tokens than the decode path's product takes at once, up to 64, times a weight blob: every weight is decoded once for all of them.
//
// A CTA owns sixteen neighbouring strips, two a warp, over a share of the rows; the CTAs of a cluster share the rows and add their sums in
// order, so there are no atomics on numbers. A warp copies its own items into two stages of shared memory, item by item; the activations
// that meet an item, for all warps and in one piece since they lie in groups (fragment.cuh), are copied by whichever warp was the last to
// be through with what lay there. What the weights are worth is applied to them in fp16, as unpacking does, so that nothing but products is
// left per token. sm_90 and later. Bytes: the strips once; 2 * K per token, tile of 256 columns and CTA from L2.
#pragma once
#include "coded.cuh"
#include "many_args.cuh"
#include "many_write.cuh"

namespace exl2nb {

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
  for (int i = threadIdx.x; i < many_image(A) / 16; i += kManyThreads) reinterpret_cast<uint4*>(image)[i] = load_kept(A.image + i * 16);
  __syncthreads();
  const auto* const items = reinterpret_cast<const Item*>(image);
  const auto* const steps = reinterpret_cast<const half2*>(image + image_steps(A.items));
  const ManyTile tile(A, reinterpret_cast<const uint16_t*>(image + image_ends(A.items, A.units)), blockIdx.y, split);
  const ManyStages s{shared,          tokens, bars, bars + kManyStages * kManyWarps,     through,
                     many_tokens(NB), NB * 8, warp, min(max(tile.live - warp * 2, 0), 2)};
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
    if (n + kManyStages < tile.count) {
      int before = 0;
      if (lane == 0) fetch_weights(n + kManyStages, stage), before = count_up(through + stage);
      if (__shfl_sync(~0u, before, 0) == kManyWarps - 1) {
        all_through(stage);
        if (lane == 0) through[stage] = 0, fetch_tokens(n + kManyStages, stage);
      } else {
        one_through(stage);
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
