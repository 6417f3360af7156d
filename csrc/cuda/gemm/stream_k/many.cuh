// More tokens than the decode path's product takes at once, up to 64, times a weight blob: every weight is decoded once for all of them.
//
// A tile is sixteen neighbouring strips, one a warp. Every CTA has a share of all tiles' units that takes equally long (many_share.cuh);
// where several have parts of a tile, each leaves its sums in memory, and each adds up a part of the tile in their order as they come
// (many_write.cuh): no atomics. Four more warps fetch (many_fetch.cuh): item by item all strips, and the activations that meet them, which
// lie together (fragment.cuh). What the weights are worth is applied to them in fp16, as unpacking does, so that nothing but products is
// left per token. sm_90 and later. Bytes: the strips once; 2 * K per token, tile of 256 columns and CTA from L2. All CTAs must be there
// together, as those of a chain (chain.cuh).
//
// What decides a warp's way through its loops must be seen to be alike in all lanes by the compiler: a branch of one thread with arithmetic
// in it, or a loop that ends by lane, before them, and it takes nothing for alike any more (`R2UR` before every product, 4 to 20 % slower).
#pragma once
#include "cuda/blob/coded.cuh"
#include "cuda/gemm/stream_k/many_fetch.cuh"
#include "cuda/gemm/stream_k/many_write.cuh"

namespace exl2nb {

// Products of half a unit of a strip, 32 rows, with the tokens in a place of the ring: start() begins with them, settle<N>() ends when of
// all that have been begun no more than N are not done.
template <int NB>
struct Fragments {
  uint32_t x;  // shared address of this lane's eight halves of the first sixteen rows and tokens
  __device__ __forceinline__ explicit Fragments(const void* ring, int lane = threadIdx.x & 31)
      : x(shared_address(ring) + ((lane >> 3 & 1) * NB * 8 + (lane >> 4) * 8 + (lane & 7)) * 16) {}
  __device__ __forceinline__ void start(const uint32_t (&h)[8], int slot, int half, float (&y)[NB][4]) const {
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int n = 0; n < NB; n += 2) {
        uint32_t b[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(x + ((slot * 4 + half * 2 + k) * 2 * NB * 8 + n * 8) * 16)
                     : "memory");
        mma<kBulk, false>(y[n], h + 4 * k, b[0], b[1]);
        mma<kBulk, false>(y[n + 1], h + 4 * k, b[2], b[3]);
      }
  }
  template <int N>
  __device__ __forceinline__ void settle(float (&)[NB][4]) const {}
};

// A CTA's shared memory: stages, the ring of activations, barriers, what is to be written at the end, factors, the image.
template <int NB>
struct ManyShared {
  uint8_t *weights, *tokens;
  uint64_t *full, *empty;
  ManySources* last;
  float* factors;
  uint64_t* ready;  // these two
  const Item* items;
  const half2* steps;
  const uint16_t* ends;

  // By all threads: filled with what does not change, ready to be used.
  __device__ __forceinline__ ManyShared(const ManyArgs& A, uint8_t* shared) {
    weights = shared, tokens = shared + many_stages(NB) * kManyWeights;
    full = reinterpret_cast<uint64_t*>(shared + many_pool(NB)), empty = full + kManyBars;
    ready = full + kManyBars - 1, last = reinterpret_cast<ManySources*>(empty + kManyBars);
    factors = reinterpret_cast<float*>(last + 1);
    uint8_t* const image = reinterpret_cast<uint8_t*>(factors + kManyTokens);
    items = reinterpret_cast<const Item*>(image), steps = reinterpret_cast<const half2*>(image + image_steps(A.items));
    ends = reinterpret_cast<const uint16_t*>(image + image_ends(A.items, A.units));
    if (threadIdx.x < many_stages(NB)) {
      barrier_init(full + threadIdx.x, 1), barrier_init(empty + threadIdx.x, kManyWarps * kWarpArrivals);
      barrier_fence();
    }
    if (threadIdx.x == many_stages(NB)) barrier_init(ready, (kManyWarps + 1) * kWarpArrivals), barrier_fence();
    for (int i = threadIdx.x; i < many_image(A) / 16; i += kManyThreads) reinterpret_cast<uint4*>(image)[i] = load_kept(A.image + i * 16);
    __syncthreads();
  }
};

// A warp's way through the items of its strip of a tile.
template <int NB, class Product>
struct ManyRun {
  const ManyShared<NB>& s;
  const Product& product;
  ManyShare share;
  ManyTurn<NB>& at;
  const uint8_t* own;  // this warp's strip of the first stage
  int lane;
  Item it;
  int begin, end;
  bool live;

  __device__ __forceinline__ bool next() {
    live = share.more();
    if (live) it = share.take(s.items, begin, end);
    return live;
  }
  // Items of one kind, as long as they follow one another: the next unit's words are fetched while one is multiplied.
  template <int B, bool GPTQ, Halves HALVES>
  __device__ __forceinline__ void multiply(float (&y)[NB][4]) {
    Coded<B, GPTQ> coded;
#pragma unroll 1
    do {
      const uint8_t *words = own + at.stage * kManyWeights, *const behind = words + it.units * (128 * B);
      words += begin * (128 * B);
      const half2* steps = s.steps + it.unit0 + begin;
      int slot = at.slot;
      half2 unit = *steps;
      barrier_wait(s.full + at.stage, at.phase);
      coded.template load<HALVES>(words, behind, it, begin, lane);
#pragma unroll 1
      for (int i = begin; i < end;) {
        uint32_t first[8], second[8];  // one is decoded while products of the other are under way
        coded.template decode_half<HALVES, 0>(unit, first);
        product.start(first, slot, 0, y);
        coded.template decode_half<HALVES, 1>(unit, second);
        product.start(second, slot, 1, y);
        if (++i < end) {
          unit = *++steps, words += 128 * B;
          coded.template load<HALVES>(words, behind, it, i, lane);
        }
        if (++slot == many_ring(NB)) slot = 0;
        product.template settle<0>(y);
      }
      __syncwarp();
      warp_arrive(s.empty + at.stage, lane);
      at.next(end - begin);
    } while (next() && it.bits == B && (it.scales != 0) == GPTQ && (HALVES == kAnyHalves || it.one == (HALVES == kOneGroup)));
  }
  template <Halves HALVES>
  __device__ __forceinline__ void multiply_exl2(float (&y)[NB][4]) {
    switch (it.bits) {
      case 2:
        return multiply<2, false, HALVES>(y);
      case 3:
        return multiply<3, false, HALVES>(y);
      case 4:
        return multiply<4, false, HALVES>(y);
      case 5:
        return multiply<5, false, HALVES>(y);
      case 6:
        return multiply<6, false, HALVES>(y);
      default:
        return multiply<8, false, HALVES>(y);
    }
  }
  __device__ __forceinline__ void multiply_gptq(float (&y)[NB][4]) {
    switch (it.bits) {
      case 2:
        return multiply<2, true, kAnyHalves>(y);
      case 3:
        return multiply<3, true, kAnyHalves>(y);
      case 4:
        return multiply<4, true, kAnyHalves>(y);
      default:
        return multiply<8, true, kAnyHalves>(y);
    }
  }
  __device__ __forceinline__ void run(float (&y)[NB][4]) {
    next();
    while (live) {
      if (it.scales)
        multiply_gptq(y);
      else if (it.bits == 16)
        multiply<16, false, kAnyHalves>(y);
      else if (it.one)
        multiply_exl2<kOneGroup>(y);
      else
        multiply_exl2<kTwoGroups>(y);
    }
  }
};

// The kernel. Product: of a warp, or a warp group.
template <int NB, class Product>
__device__ __forceinline__ void run_many(const ManyArgs& A, uint8_t* shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) EXL2NB_CLOCK(A, 0);
  pdl_launch_dependents();
  const ManyShared<NB> s(A, shared);
  if (warp >= kManyWarps) {
    fewer_registers();
    if (warp == kManyWarps + kManyBearers) {
      const ManySources last(A, ManyTile(A, many_begin(A, blockIdx.x + 1) - 1));
      if (lane == 0) *s.last = last;
      warp_arrive(s.ready, lane);
    }
    ManyFetch<NB>{A, s.items, s.ends, s.weights, s.tokens, s.full, s.empty, warp - kManyWarps, lane}.run();
    return;
  }
  more_registers();
  if (threadIdx.x == 0) EXL2NB_CLOCK(A, 1);
  const ManyFactors<NB> factors(A, warp, lane);
  pdl_wait();
  if (threadIdx.x == 0) EXL2NB_CLOCK(A, 2);
  factors.load(s.factors, warp, lane);
  __syncwarp();
  warp_arrive(s.ready, lane);
  if (threadIdx.x == 0) EXL2NB_CLOCK(A, 3);
  const Product product(s.tokens);
  const ManyWrite<NB> write{A, s.factors, s.last, s.ready, {s.weights + warp * kSlot}, warp, lane};
  ManyTurn<NB> at;
  each_tile(A, [&](const ManyTile& tile, int from, int to) {
    const bool whole = to - from == tile.units;
#pragma unroll 1
    for (int p = 0; p <= (A.paired ? 1 : 0); p++) {
      float y[NB][4] = {};
      ManyRun<NB, Product> run{s, product, ManyShare(A, s.items, s.ends, tile, p, from, to), at, s.weights + warp * kSlot, lane, {}, 0,
                               0, false};
      if (run.share.more()) {
        run.run(y);
        write.leave(tile, p, to, whole, y);
      }
    }
    if (from == many_begin(A, blockIdx.x) && threadIdx.x == 0) EXL2NB_CLOCK(A, 4);
    write.finish(tile, whole);
  });
  if (threadIdx.x == 0) EXL2NB_CLOCK(A, 5);
  write.meet();
  if (threadIdx.x == 0) EXL2NB_CLOCK(A, 6);
}

template <int NB>
__global__ void __launch_bounds__(kManyThreads, 1) many(const __grid_constant__ ManyArgs A) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  run_many<NB, Fragments<NB>>(A, shared);
#endif
}

}  // namespace exl2nb
