// Adapters inside the persistent chain: y += (scale * (x a)) b without a launch of its own. Two warps more in every CTA do it while the
// consumers multiply: A adds x a to sums, B multiplies the sums by b.
//
// x a, where x is what the GEMM before has made: every CTA multiplies the columns that it owns, which the epilogue leaves in shared memory,
// as soon as they are stored. In the first GEMM, whose x another kernel has made: 32 stored rows and all of a, from the last CTA on, as the
// first own more strips.
// Exchange: sums[gemm][row][width] as whole numbers of 64 bits that count what was added (LoraSum). Three sets: launches of several GEMMs
// take the first two by turns and clear the others; a launch of one GEMM takes the third. Then every CTA's warp B multiplies the sums by
// the columns of b of its CTA. The results are in shared memory before kFactorsReady; the epilogue adds them to its sums, ahead of the norm
// factor, as x is not scaled either.
// Both products run on the tensor cores, 16 ranks (LoraBlock) times 16 inputs or columns at a time. These tiles are fetched before the
// inputs are there, as many as there is room for beside the ring, else in turns. A list says what each tile of b is multiplied by and where
// the results go.
// Trap: instructions are the cost. A warp beside the consumers takes ten to forty cycles an instruction, what runs once per GEMM comes from
// behind the instruction cache (128 KiB: 8192 instructions), and all code of a layer should stay in it. So there are short loops, one copy
// of each, hardly anything unrolled, and whatever can be found before the sums are there is in lists. Bytes: a and b once per row of the
// step; 8 * width per row and CTA from L2. Limits: LoraTable.fits_inside of ops/lora_table.py.
#pragma once
#include "cuda/gemm/lora.h"
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/runtime/lamport.cuh"
#include "cuda/runtime/mma.cuh"

namespace exl2nb {

constexpr int kLoraChainWarps = 2;                         // of a CTA, for adapters
constexpr int kLoraChainGemms = 4;                         // of a chain
constexpr int kLoraChainParts = 6, kLoraChainWidth = 256;  // most of a change, in all parts
constexpr int kLoraChainRows = 4, kLoraChainHead = 64;     // of a launch; floats in front of the sums
constexpr int kLoraChainSets = 3;
constexpr int kLoraTile = 512;              // bytes of 16 x 16 numbers of a or b
constexpr int kLoraChainCache = 24 * 1024;  // most bytes of tiles in shared memory

// A tile of b: 16 columns times 16 ranks, what they are multiplied by (a row's block), the place of the first column among what the
// epilogue adds, and whether an earlier tile has these columns, too.
struct LoraTile {
  const uint16_t* b;
  uint16_t low, place;
  uint32_t again;
};

struct LoraChain {
  const LoraChange* changes[kLoraChainGemms];  // of adapter 0, as in LoraRows
  int64_t ops;
  const int* adapters;  // by row, -1 for none
  unsigned long long* sums;
  unsigned* launches;
  int width, set;     // stride of the sums: widest change; numbers of a set
  int per_cta, rest;  // 32 stored rows of the first GEMM that every CTA has; the last `rest` CTAs have 32 more
  int args, blocks, scales, low, adds, outputs, list, cache, a_tiles, b_tiles;  // offsets in shared memory; tiles of a and b there
};
// Numbers of a set.
inline int64_t lora_chain_set(int64_t width) { return kLoraChainGemms * kLoraChainRows * width; }
// Bytes of shared memory for the blocks of so many rows: their numbers, then themselves.
EXL2NB_BOTH constexpr int lora_counts_bytes(int rows) { return (kLoraChainGemms * rows * 4 + 15) / 16 * 16; }
EXL2NB_BOTH constexpr int lora_blocks_bytes(int rows, int width) {
  return lora_counts_bytes(rows) + kLoraChainGemms * rows * (width / 16) * static_cast<int>(sizeof(LoraBlock));
}

#if __CUDA_ARCH__ >= 900
// A sum of x a: a whole number of 64 bits, whose lowest ones count what was added. So one atomic addition is data, sum
// and flag, and the order of additions does not change a bit. At most 2047 additions, each clamped to 32768.
struct LoraSum {
  static constexpr int kCount = 11;
  static constexpr float kOne = 1 << 26, kMost = 1 << 15;  // of one addition: the sum of all stays in 53 bits
  static __device__ __forceinline__ void add(unsigned long long* to, float v) {
    const auto whole = static_cast<unsigned long long>(__float2ll_rn(fminf(fmaxf(v, -kMost), kMost) * kOne));
    asm volatile("red.relaxed.gpu.global.add.u64 [%0],%1;" ::"l"(to), "l"((whole << kCount) + 1) : "memory");
  }
  // Whether so many have been added.
  static __device__ __forceinline__ bool has(unsigned long long v, unsigned count) { return (v & ((1 << kCount) - 1)) == count; }
  static __device__ __forceinline__ float of(unsigned long long v) {
    return __ll2float_rn(static_cast<long long>(v) >> kCount) * (1.f / kOne);
  }
};
// 4 or 8 bytes from global to shared memory in the background; the first `bytes` of them and zeros.
template <int BYTES>
__device__ __forceinline__ void copy_word(void* to, const void* from, int bytes = BYTES) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],%2,%3;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
}

// A warp. Args: PersistentArgs, whose copy in shared memory it reads: constants that are not in the constant cache take as long as memory,
// one after the other.
template <class Args>
struct LoraWarp {
  static constexpr float kLow = 1.f / 16;  // of x a between the products, where it is two halves
  static constexpr int kTogether = 2;      // tiles of b whose loads are in flight
  const Args& C;
  const LoraChain& L;
  uint8_t* shared;
  int rows, block, lane;
  unsigned long long* sums = nullptr;  // of this launch

  // Number of blocks of a row's change, and the blocks.
  __device__ __forceinline__ int& count(int q, int row) const { return reinterpret_cast<int*>(shared + L.blocks)[q * rows + row]; }
  __device__ __forceinline__ LoraBlock* blocks(int q, int row) const {
    return reinterpret_cast<LoraBlock*>(shared + L.blocks + lora_counts_bytes(rows)) + (q * rows + row) * (L.width / 16);
  }
  __device__ __forceinline__ float* scales(int row) const { return reinterpret_cast<float*>(shared + L.scales) + row * L.width; }
  // x a of a block's 16 ranks: high halves, then low ones.
  __device__ __forceinline__ uint8_t* low(int row, int i) const { return shared + L.low + (row * (L.width / 16) + i) * 64; }
  // This CTA's outputs of the GEMM before, or x of the first one: 16 numbers of a tile and row.
  __device__ __forceinline__ uint8_t* outputs(int tile, int row) const { return shared + L.outputs + (tile * rows + row) * 32; }
  __device__ __forceinline__ uint8_t* slot(int n) const { return shared + L.cache + n * kLoraTile; }
  __device__ __forceinline__ int chunks() const { return C.gemm[0].width / 32; }
  __device__ __forceinline__ int own_strips(const GemmArgs& A, int p) const {
    return A.part[p].per_cta + (first_strip(A, block, p) < A.part[p].rest ? 1 : 0);
  }
  // Tiles of a block of a that this CTA multiplies: strips, or two for each 32 stored rows of the first GEMM.
  __device__ __forceinline__ int own_tiles(int q) const {
    if (q) return own_strips(C.gemm[q - 1].a, 0);
    return 2 * (L.per_cta + (C.grid - 1 - block < L.rest ? 1 : 0));
  }

  // The warp that adds to the sums. Barriers: the consumers have left what they stored; the epilogue may leave more.
  template <class State>
  __device__ __forceinline__ void run_a(State& state, uint64_t* stored, uint64_t* ready) {
    fetch_blocks(state);
#pragma unroll 1
    for (int q = 0; q < C.count; q++) {
      const int own = own_tiles(q), most = most_blocks(own);
      if (q == 1) clear();
#pragma unroll 1
      for (int done = 0;;) {
        const int all = fetch_a(q, own, most, done);
        async_commit();
        async_wait<0>();
        if (done == 0) {
          if (q == 0) {
            pdl_wait();
            take_x(own);
          } else if (kWarpArrivals > 1 || lane == 0) {
            barrier_wait(stored, (q - 1) & 1);
          }
        }
        __syncwarp();
        add_sums(q, own, most, done);
        __syncwarp();
        if ((done += most) >= all) break;
      }
      warp_arrive(ready, lane);
    }
  }
  // The warp that multiplies the sums. Barriers: polling for the inputs may start; the consumers have read what they add; what the epilogue
  // needs is there.
  __device__ __forceinline__ void run_b(const Args& parameters, uint64_t* inputs, uint64_t* stored, uint64_t* ready) {
    fetch_args(parameters);
#pragma unroll 1
    for (int q = 0; q < C.count; q++) {
#pragma unroll 1
      for (int done = 0;;) {
        const int all = fetch_b(q, done);
        async_commit();
        async_wait<0>();
        if (done == 0) {
          if (q && (kWarpArrivals > 1 || lane == 0)) barrier_wait(stored, (q - 1) & 1);
          __syncwarp();
          clear_adds(q);
          if (q == 0) {
            pdl_wait();
            take_set();
          } else if (kWarpArrivals > 1 || lane == 0) {
            barrier_wait(inputs, q & 1);
          }
          __syncwarp();
          gather(q);
        }
        __syncwarp();
        expand(min(all - done, L.b_tiles));
        __syncwarp();
        if ((done += L.b_tiles) >= all) break;
      }
      warp_arrive(ready, lane);
    }
  }
  static __device__ __forceinline__ void pair_sync() { asm volatile("bar.sync 2,64;" ::: "memory"); }
  // Behind griddepcontrol.wait, by every CTA before any finishes the launch.
  __device__ __forceinline__ void take_set() { sums = L.sums + (C.count == 1 ? 2 : ld_relaxed(L.launches) & 1) * L.set; }
  // The kernel's arguments, for both warps.
  __device__ __forceinline__ void fetch_args(const Args& parameters) const {
    constexpr int kPieces = sizeof(Args) / 8, kEach = (kPieces + 31) / 32;
    const void* argument = &parameters;
    asm volatile("" : "+l"(argument));  // by ordinary loads, all at once
    uint2 pieces[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (lane + 32 * i < kPieces) pieces[i] = static_cast<const uint2*>(argument)[lane + 32 * i];
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (lane + 32 * i < kPieces) reinterpret_cast<uint2*>(shared + L.args)[lane + 32 * i] = pieces[i];
    pair_sync();
  }
  // The blocks of all rows and GEMMs, for both warps.
  template <class State>
  __device__ __forceinline__ void fetch_blocks(State& state) const {
    const int all = kLoraChainGemms * rows;
    const uint8_t* from = nullptr;
    int n = 0;
    if (lane < all) {
      const int q = lane / rows, row = lane - q * rows, adapter = L.changes[q] ? __ldg(L.adapters + row) : -1;
      if (adapter >= 0) {
        const LoraChange* const change = L.changes[q] + adapter * L.ops;
        n = min(static_cast<int>(__ldg(reinterpret_cast<const long long*>(&change->width))), L.width) / 16;
        from = reinterpret_cast<const uint8_t*>(__ldg(reinterpret_cast<const unsigned long long*>(&change->blocks)));
      }
      count(q, row) = n;
    }
    if (lane == 0) state.lora_adds = L.adds, state.lora_outputs = L.outputs;  // not from the parameters, where the epilogue would stall
#pragma unroll 1
    for (int i = 0; i < all; i++) {
      const auto* const block = reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(from), i));
      const int bytes = __shfl_sync(~0u, n, i) * static_cast<int>(sizeof(LoraBlock));
      auto* const to = reinterpret_cast<uint8_t*>(blocks(0, i));
#pragma unroll 1
      for (int at = lane * 8; at < bytes; at += 32 * 8) copy_word<8>(to + at, block + at);
    }
    async_commit();
    async_wait<0>();
    pair_sync();
  }
  // The other sets become zero.
  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (int set = 0; set < kLoraChainSets; set++) {
      auto* const other = reinterpret_cast<uint4*>(L.sums + set * L.set);
#pragma unroll 1
      for (int i = block * 32 + lane; L.sums + set * L.set != sums && i < L.set / 2; i += C.grid * 32) other[i] = make_uint4(0, 0, 0, 0);
    }
  }

  // Blocks of a that are multiplied together: a column of the tensor cores' B each.
  __device__ __forceinline__ int most_blocks(int own) const {
    int n = 1;
#pragma unroll 1
    while (n < 8 && (n + 1) * own <= L.a_tiles) n++;
    return n;
  }
  // Calls f(n, row, number of the block) for each block of all rows, from `done` on as many as are multiplied together: n = 0, 1, ...
  // Returns how many there are.
  template <class F>
  __device__ __forceinline__ int each_block(int q, int most, int done, const F& f) const {
    int n = -done;
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
      const int blocks = count(q, row);
#pragma unroll 1
      for (int i = 0; i < blocks; i++, n++)
        if (n >= 0 && n < most) f(n, row, i);
    }
    return n + done;
  }
  __device__ __forceinline__ int fetch_a(int q, int own, int most, int done) const {
    // Rows of a are 16 columns of the GEMM before; of the first GEMM, stored rows in the order of MMA fragments.
    const int first = q ? first_strip(C.gemm[q - 1].a, block, 0) * 16 + (lane >> 1) : (C.grid - 1 - block) * 2;
    return each_block(q, most, done, [&](int n, int row, int i) {
      const LoraBlock& of = blocks(q, row)[i];
      const uint16_t* from = q ? of.rows + first * of.stride + 8 * (lane & 1) : of.a + first * 256 + lane * 8;
      const int64_t hop = q ? C.grid * 16 * of.stride : (C.grid * 2 - 1) * 256;
#pragma unroll 1
      for (int t = 0; t < own; t++) {
        copy16<true>(slot(n * own + t) + lane * 16, from);
        from += q || t & 1 ? hop : 256;
      }
    });
  }
  // The first GEMM's x of this CTA's tiles, 16 bytes a lane: of all rows at once.
  __device__ __forceinline__ void take_x(int own) {
    const int pieces = max(own * 2, 1), all = rows * own * 2;
#pragma unroll 1
    for (int n = lane; n - lane == 0 || n - lane < all; n += 32) {
      const int row = n / pieces, piece = n - row * pieces;
      uint4 v;
      if (n < all)
        v = ld_relaxed(C.gemm[0].a.x + static_cast<size_t>(row) * C.gemm[0].a.x_stride + (C.grid - 1 - block + (piece >> 2) * C.grid) * 32 +
                       (piece & 3) * 8);
      if (n == lane) take_set();  // behind x, not in front
      if (n < all) {
        auto* const to = reinterpret_cast<uint32_t*>(outputs(piece >> 2 << 1, row)) + (piece & 3);
        to[0] = v.x, to[4] = v.y, to[8 * rows] = v.z, to[8 * rows + 4] = v.w;
      }
    }
  }
  // Adds x a of the tiles of a in shared memory.
  __device__ __forceinline__ void add_sums(int q, int own, int most, int done) const {
    const int a_at = q ? ((lane & 7) + 8 * (lane >> 4)) * 32 + (lane >> 3 & 1) * 16 : lane * 16;
    float y[4] = {};
    int mine = -1;  // lane n: where the sums of block n go
    each_block(q, most, done, [&](int n, int row, int i) {
      if (lane == n) mine = (q * kLoraChainRows + row) * L.width + i * 16;
#pragma unroll 2
      for (int t = 0; t < own; t++) {
        uint32_t a[4], x[2] = {};
        const uint8_t* const tile = slot(n * own + t) + a_at;
        if (q)
          load_matrices<true>(a, shared_address(tile));
        else
          load_bytes<16>(tile, a);
        const auto* const from = reinterpret_cast<const uint32_t*>(outputs(t, row)) + (lane & 3);
        if (lane >> 2 == n) x[0] = from[0], x[1] = from[4];
        mma16816(y, a[0], a[1], a[2], a[3], x[0], x[1]);
      }
    });
#pragma unroll 1
    for (int n = 0; n < 2; n++) {
      const int to = __shfl_sync(~0u, mine, 2 * (lane & 3) + n);
      if (to < 0 || own == 0) continue;
      LoraSum::add(sums + to + (lane >> 2), n ? y[1] : y[0]);
      LoraSum::add(sums + to + (lane >> 2) + 8, n ? y[3] : y[2]);
    }
  }

  __device__ __forceinline__ LoraTile* list() const { return reinterpret_cast<LoraTile*>(shared + L.list); }
  // The next tiles of b that change strips of this CTA, from `done` on as many as there is room for; with the first ones the scales.
  // Returns how many tiles there are. A lane finds the tiles of a strip.
  __device__ __forceinline__ int fetch_b(int q, int done) const {
    const auto& P = C.gemm[q];
    int at = -done;
#pragma unroll 1
    for (int base = 0;; base += 32) {
      int s = base + lane, p = 0, strip = -(1 << 20), place = 0;
#pragma unroll 1
      for (int own; p < P.a.num_parts && s >= (own = own_strips(P.a, p)); p++) s -= own;
      const bool live = p < P.a.num_parts;
      if (!__any_sync(~0u, live)) break;
      if (live) {
        const int round = P.rounds > 1 ? s / P.strips : 0;
        strip = P.a.part[p].first_strip + first_strip(P.a, block, p) + s * C.grid;
        place = ((round * P.a.num_parts + p) * P.strips + s - round * P.strips) * 16 * rows;
      }
#pragma unroll 1
      for (int row = 0; row < rows; row++) {
        bool again = false;
        const int blocks_of_row = count(q, row);
#pragma unroll 1
        for (int i = 0; i < blocks_of_row; i++) {
          const LoraBlock& of = blocks(q, row)[i];
          const int in_block = strip - of.first_strip;
          const bool has = in_block >= 0 && in_block < of.strips;
          const unsigned having = __ballot_sync(~0u, has);
          const int n = at + __popc(having & ((1u << lane) - 1));
          if (has && n >= 0 && n < L.b_tiles)
            list()[n] = {of.b + in_block * 256, static_cast<uint16_t>(row * (L.width / 16) + i), static_cast<uint16_t>(place + row), again};
          again = again || has, at += __popc(having);
        }
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int n = 0; n < min(at, L.b_tiles); n++) copy16<true>(slot(L.a_tiles + n) + lane * 16, list()[n].b + lane * 8);
#pragma unroll 1
    for (int row = 0; row < rows; row++)
#pragma unroll 1
      for (int r = lane; r < count(q, row) * 16; r += 32) {
        const LoraBlock& of = blocks(q, row)[r >> 4];
        const bool has = (r & 15) < of.ranks;
        copy_word<4>(scales(row) + r, of.scale + (has ? r & 15 : 0), has ? 4 : 0);
      }
    return at + done;
  }
  // What the epilogue adds becomes zero.
  __device__ __forceinline__ void clear_adds(int q) const {
    const auto& P = C.gemm[q];
    auto* const adds = reinterpret_cast<float*>(shared + L.adds);
#pragma unroll 1
    for (int i = lane; i < P.rounds * P.strips * P.a.num_parts * 16 * rows; i += 32) adds[i] = 0.f;
  }
  // The sums, scaled.
  __device__ __forceinline__ void gather(int q) const {
    const unsigned adding = min(C.grid, q ? C.gemm[q - 1].a.part[0].strips : chunks());  // CTAs
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
      const unsigned long long* const from = sums + (q * kLoraChainRows + row) * L.width;
      const int numbers = count(q, row) * 16;
#pragma unroll 1
      for (int first = lane; first < numbers; first += 64) {
        unsigned long long v[2];
#pragma unroll
        for (int j = 0; j < 2; j++)
          if (first + 32 * j < numbers) v[j] = ld_relaxed(from + first + 32 * j);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int r = first + 32 * j;
          if (r >= numbers) break;
          while (!LoraSum::has(v[j], adding)) v[j] = ld_relaxed(from + r);
          const float value = LoraSum::of(v[j]) * (scales(row)[r] * kLow);
          const half high = saturated(value);
          half* const to = reinterpret_cast<half*>(low(row, r >> 4)) + (r & 15);
          to[0] = high, to[16] = saturated(value - __half2float(high));
        }
      }
    }
  }
  // What the epilogue adds, into shared memory, of so many tiles. High and low halves: two columns of the tensor cores' B.
  __device__ __forceinline__ void expand(int tiles) const {
#pragma unroll 1
    for (int first = 0; first < tiles; first += kTogether) {
      float y[kTogether][4];
      float* to[kTogether];
      bool again[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; j++) {
        const int n = min(first + j, tiles - 1);
        const uint2 words = *reinterpret_cast<const uint2*>(&list()[n].low);
        uint32_t b[4], x[2] = {};
        load_bytes<16>(slot(L.a_tiles + n) + lane * 16, b);
        const auto* const from = reinterpret_cast<const uint32_t*>(shared + L.low + (words.x & 0xffff) * 64) + (lane >> 2) * 8 + (lane & 3);
        if (lane < 8) x[0] = from[0], x[1] = from[4];
        y[j][0] = y[j][1] = y[j][2] = y[j][3] = 0.f;
        mma16816(y[j], b[0], b[1], b[2], b[3], x[0], x[1]);
        to[j] = reinterpret_cast<float*>(shared + L.adds) + (words.x >> 16) + (lane >> 2) * rows, again[j] = words.y;
      }
#pragma unroll
      for (int j = 0; j < kTogether; j++) {
        if (first + j >= tiles || lane & 3) continue;
        to[j][0] = (again[j] ? to[j][0] : 0.f) + (y[j][0] + y[j][1]) * (1.f / kLow);
        to[j][8 * rows] = (again[j] ? to[j][8 * rows] : 0.f) + (y[j][2] + y[j][3]) * (1.f / kLow);
      }
    }
  }
};

// What a kernel is made with: adapters, or none, which is no code at all. Adds: what the epilogue adds, [output of the CTA][row], and where
// it leaves what it stores, [16 outputs][row][16]; `first` of each for this round. kArrivals: at kFactorsReady. kPairs: code for paired
// items.
struct WithLora {
  struct Adds {
    const float* at;
    half* outputs;
    __device__ __forceinline__ float to(float v, int place) const { return v + at[place]; }
    __device__ __forceinline__ void keep(half stored, int output, int row, int rows) const {
      outputs[((output >> 4) * rows + row) * 16 + (output & 15)] = stored;
    }
  };
  static constexpr int kArrivals = 1 + kLoraChainWarps * kWarpArrivals;
  static constexpr bool kPairs = false;
  const LoraChain& L;
  template <class State>
  __device__ __forceinline__ Adds adds(uint8_t* shared, const State& state, int first, int first_output) const {
    return {reinterpret_cast<const float*>(shared + state.lora_adds) + first,
            reinterpret_cast<half*>(shared + state.lora_outputs) + first_output};
  }
  template <class Args, class State>
  __device__ __forceinline__ void run(const Args& C, State& state, int warp, uint64_t* inputs, uint64_t* stored, uint64_t* ready, int block,
                                      int lane) const {
    auto* const shared = reinterpret_cast<uint8_t*>(&state);
    LoraWarp<Args> mine{*reinterpret_cast<const Args*>(shared + L.args), L, shared, C.gemm[0].a.tokens, block, lane};
    if (warp == 0)
      mine.run_a(state, stored, ready);
    else
      mine.run_b(C, inputs, stored, ready);
  }
  __device__ __forceinline__ void count() const { asm volatile("red.relaxed.gpu.global.add.u32 [%0],1;" ::"l"(L.launches) : "memory"); }
};
struct NoLora {
  struct Adds {
    __device__ __forceinline__ float to(float v, int) const { return v; }
    __device__ __forceinline__ void keep(half, int, int, int) const {}
  };
  static constexpr int kArrivals = 1;
  static constexpr bool kPairs = true;
  template <class State>
  __device__ __forceinline__ Adds adds(uint8_t*, const State&, int, int) const {
    return {};
  }
  template <class Args, class State>
  __device__ __forceinline__ void run(const Args&, State&, int, uint64_t*, uint64_t*, uint64_t*, int, int) const {}
  __device__ __forceinline__ void count() const {}
};
#endif

}  // namespace exl2nb
