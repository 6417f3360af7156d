// More tokens than the decode path's product takes at once, up to 64, times a weight blob: every weight is decoded once for all of them.
//
// A CTA owns sixteen neighbouring strips, one a warp, over a share of the rows; the CTAs of a cluster share the rows and add their sums in
// order, so there are no atomics on numbers. Four more warps fetch (many_fetch.cuh): item by item all strips, and the activations that
// meet them, which lie together (fragment.cuh). What the weights are worth is applied to them in fp16, as unpacking does, so that nothing
// but products is left per token. sm_90 and later. Bytes: the strips once; 2 * K per token, tile of 256 columns and CTA from L2.
#pragma once
#include "coded.cuh"
#include "many_fetch.cuh"
#include "many_write.cuh"

namespace exl2nb {

// Products of a unit of a strip with the tokens of a stage.
template <int NB>
struct Fragments {
  uint32_t x;  // shared address of this lane's eight halves of the first sixteen rows and tokens
  __device__ __forceinline__ explicit Fragments(const void* ring, int lane = threadIdx.x & 31)
      : x(shared_address(ring) + ((lane >> 3 & 1) * NB * 8 + (lane >> 4) * 8 + (lane & 7)) * 16) {}
  __device__ __forceinline__ void operator()(const uint32_t (&h)[16], int slot, float (&y)[NB][4]) const {
#pragma unroll
    for (int s = 0; s < 4; s++) {  // 16 rows
#pragma unroll
      for (int n = 0; n < NB; n += 2) {
        uint32_t b[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(x + ((slot * 4 + s) * 2 * NB * 8 + n * 8) * 16)
                     : "memory");
        mma<kBulk, false>(y[n], h + s * 4, b[0], b[1]);
        mma<kBulk, false>(y[n + 1], h + s * 4, b[2], b[3]);
      }
    }
  }
};
// An item of a strip times the tokens, which lie in a ring of units; the next unit's words are fetched while one is multiplied.
template <int NB, int B, bool GPTQ, class Product>
__device__ __forceinline__ void multiply_coded(const uint8_t* st, const Item& it, const half2* steps, const Product& product, int slot,
                                               int begin, int end, int lane, float (&y)[NB][4]) {
  Coded<B, GPTQ> coded;
  constexpr bool kAhead = B < 16;  // for which there are registers
  coded.load(st, it, begin, lane);
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    uint32_t h[16];
    if (!kAhead) coded.load(st, it, i, lane);
    coded.decode(steps[i], h);
    if (kAhead) coded.load(st, it, min(i + 1, end - 1), lane);
    product(h, slot, y);
    if (++slot == many_ring(NB)) slot = 0;
  }
}
template <int NB, class Product>
__device__ __forceinline__ void multiply_item(const uint8_t* st, const Item& it, const half2* steps, const Product& product, int slot,
                                              int begin, int end, int lane, float (&y)[NB][4]) {
  if (it.scales) {
    switch (it.bits) {
      case 2:
        return multiply_coded<NB, 2, true>(st, it, steps, product, slot, begin, end, lane, y);
      case 3:
        return multiply_coded<NB, 3, true>(st, it, steps, product, slot, begin, end, lane, y);
      case 4:
        return multiply_coded<NB, 4, true>(st, it, steps, product, slot, begin, end, lane, y);
      default:
        return multiply_coded<NB, 8, true>(st, it, steps, product, slot, begin, end, lane, y);
    }
  }
  switch (it.bits) {
    case 2:
      return multiply_coded<NB, 2, false>(st, it, steps, product, slot, begin, end, lane, y);
    case 3:
      return multiply_coded<NB, 3, false>(st, it, steps, product, slot, begin, end, lane, y);
    case 4:
      return multiply_coded<NB, 4, false>(st, it, steps, product, slot, begin, end, lane, y);
    case 5:
      return multiply_coded<NB, 5, false>(st, it, steps, product, slot, begin, end, lane, y);
    case 6:
      return multiply_coded<NB, 6, false>(st, it, steps, product, slot, begin, end, lane, y);
    case 8:
      return multiply_coded<NB, 8, false>(st, it, steps, product, slot, begin, end, lane, y);
    default:
      return multiply_coded<NB, 16, false>(st, it, steps, product, slot, begin, end, lane, y);
  }
}

// What a warp does with an item. Product: of 64 rows of a strip with the activations in a place of the ring.
template <int NB, class Product>
struct Multiply {
  Product product;
  __device__ __forceinline__ explicit Multiply(const void* ring) : product(ring) {}
  __device__ __forceinline__ void operator()(const uint8_t* st, const Item& it, int begin, int end, const half2* steps, int slot,
                                             float (&y)[NB][4]) const {
    multiply_item<NB>(st, it, steps, product, slot, begin, end, threadIdx.x & 31, y);
  }
};

// A CTA's shared memory: stages, the ring of activations, barriers, factors, the image. Sums take the place of stages and ring.
template <int NB>
struct ManyShared {
  uint8_t *weights, *tokens;
  uint64_t *full, *empty;
  float* factors;
  const Item* items;
  const half2* steps;
  const uint16_t* ends;

  // By all threads: filled with what does not change, ready to be used.
  __device__ __forceinline__ ManyShared(const ManyArgs& A, uint8_t* shared) {
    weights = shared, tokens = shared + many_stages(NB) * kManyWeights;
    full = reinterpret_cast<uint64_t*>(shared + many_pool(A.paired, NB)), empty = full + kManyBars;
    factors = reinterpret_cast<float*>(empty + kManyBars);
    uint8_t* const image = reinterpret_cast<uint8_t*>(factors + kManyTokens);
    items = reinterpret_cast<const Item*>(image), steps = reinterpret_cast<const half2*>(image + image_steps(A.items));
    ends = reinterpret_cast<const uint16_t*>(image + image_ends(A.items, A.units));
    if (threadIdx.x < many_stages(NB)) {
      barrier_init(full + threadIdx.x, 1), barrier_init(empty + threadIdx.x, kManyWarps);
      barrier_fence();
    }
    for (int i = threadIdx.x; i < many_image(A) / 16; i += kManyThreads) reinterpret_cast<uint4*>(image)[i] = load_kept(A.image + i * 16);
    __syncthreads();
  }
};

// A warp's sums of its strip of a part; multiply(its bytes of a stage, item, first and last unit, its steps, activations' place, sums).
template <int NB, class Multiply>
__device__ __forceinline__ void multiply_share(const ManyArgs& A, const ManyShared<NB>& s, int part, ManyTurn<NB>& at, int warp, int lane,
                                               const Multiply& multiply, float (&y)[NB][4]) {
  ManyShare share(A, s.items, s.ends, part, blockIdx.x);
#pragma unroll 1
  while (share.more()) {
    int begin, end;
    const Item it = share.take(s.items, begin, end);
    barrier_wait(s.full + at.stage, at.phase);
    multiply(s.weights + at.stage * kManyWeights + warp * kSlot, it, begin, end, s.steps + it.unit0, at.slot, y);
    __syncwarp();
    if (lane == 0) barrier_arrive(s.empty + at.stage);
    at.next(end - begin);
  }
}

// The kernel.
template <int NB, bool PAIRED, class MakeMultiply>
__device__ __forceinline__ void run_many(const ManyArgs& A, uint8_t* shared, MakeMultiply make) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  constexpr bool kMost = PAIRED && NB == 8;
  pdl_launch_dependents();
  const ManyShared<NB> s(A, shared);
  if (warp >= kManyWarps) {
    fewer_registers<kMost>();
    ManyFetch<NB>{A, s.items, s.ends, s.weights, s.tokens, s.full, s.empty, warp - kManyWarps, lane}.run();
    return;
  }
  more_registers<kMost>();
  if (!A.out && threadIdx.x < kManyColumns / 4) touch_constants(A, ManyTile(A, blockIdx.y).first_strip * kStripColumns + threadIdx.x * 4);
  pdl_wait();
  load_factors(A, s.factors, warp, lane);
  const auto multiply = make(s.tokens);
  float* const sums = reinterpret_cast<float*>(shared);
  ManyTurn<NB> at;
#pragma unroll 1
  for (int number = blockIdx.y; number < A.tiles; number += gridDim.y) {
    const ManyTile tile(A, number);
    float y[NB][4] = {}, gate[NB][4];
#pragma unroll 1  // one loop for both: the gate's sums wait in registers while it runs
    for (int p = 0; p < (PAIRED ? 2 : 1); p++) {
      multiply_share(A, s, PAIRED ? p : tile.part, at, warp, lane, multiply, y);
      if constexpr (PAIRED) {
        if (p) break;
#pragma unroll
        for (int i = 0; i < NB * 4; i++) gate[i / 4][i % 4] = y[i / 4][i % 4], y[i / 4][i % 4] = 0.f;
      }
    }
    const bool alone = !PAIRED && A.out && A.splits == 1;
    if (!alone || number == blockIdx.y) workers_sync();  // the factors are there; nobody reads the stages any more
    if constexpr (PAIRED)
      write_gates<NB>(A, tile, s.factors, sums, warp, lane, gate, y);
    else if (alone)
      store_tile<NB>(A, tile, s.factors, warp, lane, y);
    else
      write_tile<NB>(A, tile, s.factors, sums, warp, lane, y);
  }
}

template <int NB, bool PAIRED>
__global__ void __launch_bounds__(kManyThreads, 1) many(const __grid_constant__ ManyArgs A) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  run_many<NB, PAIRED>(A, shared, [](const void* tokens) { return Multiply<NB, Fragments<NB>>(tokens); });
#endif
}

}  // namespace exl2nb
