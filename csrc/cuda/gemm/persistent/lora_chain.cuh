// Adapters inside the persistent chain: y += (scale * (x a)) b without a launch of its own. Two warps more in every CTA do it while the
// consumers multiply: A adds x a to sums, B multiplies the sums by b.
//
// x a, where x is what the GEMM before has made: every CTA multiplies the columns that it owns, which the epilogue leaves in shared memory,
// as soon as they are stored. In the first GEMM, whose x another kernel has made: task = 64 stored rows, 16 columns of a, one row of the
// step; each CTA has few, from the last CTA on, as the first own more strips.
// Exchange: sums[gemm][row][width] as whole numbers of 64 bits that count what was added (LoraSum). Three sets: launches of several GEMMs
// take the first two by turns and clear the others; a launch of one GEMM takes the third. Then every CTA's warp B multiplies the sums by
// the columns of b of its CTA. The results are in shared memory before kFactorsReady; the epilogue adds them to its sums, ahead of the norm
// factor, as x is not scaled either.
// The consumers wait for these warps, and a warp by itself takes ten to forty cycles an instruction: instructions and constants come from
// memory, which weights keep busy. So there are few instructions between inputs and results: both products run on the tensor cores, tile
// by tile from lists. What a tile is, where its inputs are and where its sums go was written down when it was fetched, during the GEMM
// before. Where the tiles of a GEMM have no room beside the ring, a warp fetches and multiplies them in turns.
// Bytes: a and b once per row of the step; 8 * width per row and CTA from L2. Limits: LoraTable.fits_inside of ops/lora.py.
#pragma once
#include "cuda/gemm/lora.h"
#include "cuda/gemm/skinny/skinny_gemm.cuh"
#include "cuda/runtime/lamport.cuh"
#include "cuda/runtime/mma.cuh"

namespace exl2nb {

constexpr int kLoraChainWarps = 2;                                              // of a CTA, for adapters
constexpr int kLoraChainGemms = 4, kLoraChainParts = 6, kLoraChainWidth = 256;  // of a chain; most of a change, in all parts
constexpr int kLoraChainRows = 4, kLoraChainHead = 64;                          // of a launch; floats in front of the sums
constexpr int kLoraChainSets = 3;
constexpr int kLoraChainTask = 64, kLoraTile = 512;     // stored rows; bytes of 16 x 16 numbers of a or b
constexpr int kLoraList = 64, kLoraTogether = 4;        // most tiles of a list, and most sums; tiles whose loads are in flight
constexpr int kLoraStrips = kLoraList - kLoraTogether;  // most that a CTA owns
constexpr int kLoraChainCache = 24 * 1024;              // most bytes of tiles in shared memory

// A tile in shared memory: addresses of it and of the 16 numbers that it is multiplied by; the sum, of those that the tensor cores hold, to
// which the products are added; whether these sums are then complete.
struct LoraTile {
  uint32_t tile, from;
  int sum, last;
};
EXL2NB_BOTH constexpr int lora_list_bytes() { return kLoraList * static_cast<int>(sizeof(LoraTile)) + (kLoraList + 8) * 4; }
// Least bytes for tiles: one of zeros, those of a task or of so many strips of a, and those of one strip of b.
EXL2NB_BOTH constexpr int lora_least_a(int strips) { return strips > kLoraChainTask / 16 ? strips : kLoraChainTask / 16; }
EXL2NB_BOTH constexpr int lora_least_cache(int width, int strips) { return (1 + lora_least_a(strips) + width / 16) * kLoraTile; }

struct LoraChain {
  const LoraChange* changes[kLoraChainGemms];  // of adapter 0, as in LoraRows
  const int* features;                         // of stored rows of the first GEMM; null: the same
  int64_t ops;
  const int* adapters;  // by row, -1 for none
  unsigned long long* sums;
  unsigned* launches;
  int width, set;                                                                   // stride of the sums: widest change; numbers of a set
  int args, parts, scales, low, adds, outputs, lists, cache, cache_bytes, a_tiles;  // offsets in shared memory; tiles of a there
};
// Numbers of a set.
inline int64_t lora_chain_set(int64_t width) { return kLoraChainGemms * kLoraChainRows * width; }
// Bytes of shared memory for the parts of so many rows, and places in them.
EXL2NB_BOTH constexpr int lora_counts_bytes(int rows) { return (kLoraChainGemms * rows * 8 + 15) / 16 * 16; }
EXL2NB_BOTH constexpr int lora_parts_bytes(int rows) {
  return lora_counts_bytes(rows) + kLoraChainGemms * rows * kLoraChainParts * static_cast<int>(sizeof(LoraPart));
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

// 8 bytes of shared memory.
__device__ __forceinline__ uint2 load_pair(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

// A warp. Args: PersistentArgs, whose copy in shared memory it reads: constants that are not in the constant cache take as long as memory,
// one after the other.
template <class Args>
struct LoraWarp {
  static constexpr int kSumsA = 8, kSumsB = 4;  // that the tensor cores hold at once: of b in two halves each
  static constexpr float kLow = 1.f / 16;       // of x a between the products, where it is two halves
  const Args& C;
  const LoraChain& L;
  uint8_t* shared;
  int rows, width, block, lane;
  unsigned long long* sums;  // of this launch
  int tiles, done;           // what has been fetched: tiles in the list, sums since the GEMM began
  bool all;                  // whether that is all of the GEMM
  const half* x;             // this lane's numbers of the task's x; null: zeros

  __device__ __forceinline__ LoraWarp(const Args& args, int tokens, const LoraChain& lora, uint8_t* smem, int cta, int thread)
      : C(args), L(lora), shared(smem), rows(tokens), width(lora.width), block(cta), lane(thread), sums(nullptr) {}

  // Number of parts of a row's change, and its width.
  __device__ __forceinline__ int2& count(int q, int row) const { return reinterpret_cast<int2*>(shared + L.parts)[q * rows + row]; }
  __device__ __forceinline__ LoraPart* parts(int q, int row) const {
    return reinterpret_cast<LoraPart*>(shared + L.parts + lora_counts_bytes(rows)) + (q * rows + row) * kLoraChainParts;
  }
  __device__ __forceinline__ float* scales(int row) const { return reinterpret_cast<float*>(shared + L.scales) + row * width; }
  // x a of 16 numbers: high halves, then low ones.
  __device__ __forceinline__ half* low(int row, int tile) const {
    return reinterpret_cast<half*>(shared + L.low) + (row * (width / 16) + tile) * 32;
  }
  __device__ __forceinline__ LoraTile* list(bool of_b) const {
    return reinterpret_cast<LoraTile*>(shared + L.lists + (of_b ? lora_list_bytes() : 0));
  }
  // Where the sums of a list's tiles go; -1 behind the last.
  __device__ __forceinline__ int* places(bool of_b) const { return reinterpret_cast<int*>(list(of_b) + kLoraList); }
  static __device__ __forceinline__ int padded(const LoraPart& p) { return static_cast<int>(p.rank + 15) & ~15; }
  __device__ __forceinline__ int chunks() const { return (C.gemm[0].width + kLoraChainTask - 1) / kLoraChainTask; }
  __device__ __forceinline__ int own_strips(const GemmArgs& A, int p) const {
    return A.part[p].per_cta + (first_strip(A, block, p) < A.part[p].rest ? 1 : 0);
  }
  // Place of a strip's first column among the CTA's outputs of GEMM q.
  __device__ __forceinline__ int place(int q, int p, int strip) const {
    const auto& P = C.gemm[q];
    const int round = P.rounds > 1 ? strip / P.strips : 0;
    return ((round * P.a.num_parts + p) * P.strips + strip - round * P.strips) * 16;
  }
  __device__ __forceinline__ uint8_t* slot(int n) const { return shared + L.cache + n * kLoraTile; }

  // The warp that adds to the sums. Barriers: the consumers have left what they stored; the epilogue may leave more.
  template <class State>
  __device__ __forceinline__ void run_a(State& state, const Args& parameters, uint64_t* stored, uint64_t* ready) {
    fetch_parts(state, parameters);
#pragma unroll 1
    for (int q = 0; q < C.count; q++) {
      done = q ? 0 : C.grid - 1 - block;
      if (q == 1) clear();
#pragma unroll 1
      for (bool more = false;; more = true) {
        fill_a(q);
        async_commit();
        async_wait<0>();
        if (!more) {
          if (q == 0)
            pdl_wait();
          else if (kWarpArrivals > 1 || lane == 0)
            barrier_wait(stored, (q - 1) & 1);
        }
        if (q == 0) {
          uint4 v = make_uint4(0, 0, 0, 0);
          if (tiles && x) v = ld_relaxed(x);
          take_set();  // behind x, not in front
          if (tiles && lane < kLoraChainTask / 8) reinterpret_cast<uint4*>(shared + L.outputs)[lane] = v;
        }
        __syncwarp();
        add_sums();
        __syncwarp();
        if (all) break;
      }
      warp_arrive(ready, lane);
    }
  }
  // The warp that multiplies the sums. Barriers: polling for the inputs may start; the consumers have read what they add; what the epilogue
  // needs is there.
  __device__ __forceinline__ void run_b(uint64_t* inputs, uint64_t* stored, uint64_t* ready) {
    pair_sync();
#pragma unroll 1
    for (int q = 0; q < C.count; q++) {
      done = 0;
#pragma unroll 1
      for (bool more = false;; more = true) {
        fill_b(q);
        if (!more) fetch_scales(q);
        async_commit(), async_wait<0>();
        if (!more) {
          if (q == 0) {
            pdl_wait();
            take_set();
          } else if (kWarpArrivals > 1 || lane == 0) {
            barrier_wait(stored, (q - 1) & 1), barrier_wait(inputs, q & 1);
          }
        }
        __syncwarp();
#pragma unroll 1
        for (int row = 0; !more && row < rows; row++) gather(q, row);
        __syncwarp();
        expand();
        __syncwarp();
        if (all) break;
      }
      warp_arrive(ready, lane);
    }
  }
  static __device__ __forceinline__ void pair_sync() { asm volatile("bar.sync 2,64;" ::: "memory"); }
  // Behind griddepcontrol.wait, by every CTA before any finishes the launch.
  __device__ __forceinline__ void take_set() { sums = L.sums + (C.count == 1 ? 2 : ld_relaxed(L.launches) & 1) * L.set; }
  // The kernel's arguments, and the parts of all rows and GEMMs, for both warps.
  template <class State>
  __device__ __forceinline__ void fetch_parts(State& state, const Args& parameters) {
    constexpr int kPieces = sizeof(Args) / 8, kEach = (kPieces + 31) / 32;
    const void* argument = &parameters;
    asm volatile("" : "+l"(argument));  // by ordinary loads, all at once
    uint2 pieces[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (lane + 32 * i < kPieces) pieces[i] = static_cast<const uint2*>(argument)[lane + 32 * i];
    const int all = parameters.count * rows;
    const uint8_t* from = nullptr;
    int n = 0;
    if (lane < all) {
      const int q = lane / rows, row = lane - q * rows, adapter = __ldg(L.adapters + row);
      int of_all = 0;
      if (adapter >= 0) {
        const auto* const change = reinterpret_cast<const long long*>(L.changes[q] + adapter * L.ops);
        from = reinterpret_cast<const uint8_t*>(__ldg(change));
        n = min(static_cast<int>(__ldg(change + 1)), kLoraChainParts), of_all = static_cast<int>(__ldg(change + 2));
      }
      count(q, row) = make_int2(n, n ? of_all : 0);
    }
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (lane + 32 * i < kPieces) reinterpret_cast<uint2*>(shared + L.args)[lane + 32 * i] = pieces[i];
    reinterpret_cast<uint4*>(slot(0))[lane] = make_uint4(0, 0, 0, 0);
    if (lane == 0) state.lora_adds = L.adds, state.lora_outputs = L.outputs;  // not from the parameters, where the epilogue would stall
#pragma unroll 1
    for (int i = 0; i < all; i++) {
      const auto* const part = reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(from), i));
      const int bytes = __shfl_sync(~0u, n, i) * static_cast<int>(sizeof(LoraPart));
      auto* const to = reinterpret_cast<uint8_t*>(parts(0, 0) + i * kLoraChainParts);
      for (int at = lane * 8; at < bytes; at += 32 * 8) copy_word<8>(to + at, part + at);
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
      if (L.sums + set * L.set != sums)
        for (int i = block * 32 + lane; i < L.set / 2; i += C.grid * 32) other[i] = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void fetch_scales(int q) const {
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
      float* to = scales(row);
#pragma unroll 1
      for (int i = 0; i < count(q, row).x; i++) {
        const LoraPart& part = parts(q, row)[i];
        for (int r = lane; r < padded(part); r += 32)
          copy_word<4>(to + r, r < part.rank ? part.scale + r : part.scale, r < part.rank ? 4 : 0);
        to += padded(part);
      }
    }
  }
  // The part that has the so-manieth tile of a row's change, which becomes the tile of the part.
  __device__ __forceinline__ const LoraPart& part_of(int q, int row, int& tile) const {
    const LoraPart* part = parts(q, row);
#pragma unroll 1
    for (; tile >= padded(*part) / 16; part++) tile -= padded(*part) / 16;
    return *part;
  }

  // The next tiles of a, as many as there is room for. The first GEMM: of the next task (done: its number). Later: for each row and 16
  // columns of a (done: how many) the strips that this CTA owns, two lanes a tile.
  __device__ __forceinline__ void fill_a(int q) {
    int own_sums = 0;
    tiles = 0;
    if (q == 0)
      all = fetch(own_sums);
    else
      all = fill_strips(q, own_sums);
    const int padding = -tiles & (kLoraTogether - 1);
    __syncwarp();
    if (lane < padding) list(false)[tiles + lane] = {shared_address(slot(0)), shared_address(slot(0)), 0, lane == padding - 1};
    if (padding == 0 && tiles && lane == 0) list(false)[tiles - 1].last = 1;
    if (lane < kSumsA) places(false)[own_sums + lane] = -1;
    tiles += padding;
    __syncwarp();
  }
  __device__ __forceinline__ bool fill_strips(int q, int& own_sums) {
    const GemmArgs& A = C.gemm[q - 1].a;
    const int strip0 = first_strip(A, block, 0), own = own_strips(A, 0), hop = A.grid * 16, half_tile = lane & 1;
    if (own == 0) return true;
    const int most = min(L.a_tiles, kLoraStrips) / own;  // sums in the list
    int number = 0;
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
      const int in_row = count(q, row).y / 16, first = max(done - number, 0), now = min(in_row - first, most - own_sums);
      number += in_row;
      if (first >= in_row) continue;
#pragma unroll 1
      for (int base = 0; base < now * own; base += 16) {
        const int item = base + (lane >> 1), n = item / own, s = item - n * own, sum = own_sums + n;
        if (item >= now * own) continue;
        int tile = first + n;
        if (half_tile == 0 && s == 0) places(false)[sum] = (q * kLoraChainRows + row) * width + tile * 16;
        const LoraPart& part = part_of(q, row, tile);
        uint8_t* const to = slot(1 + tiles + item) + half_tile * 16;
        const uint16_t* from = part.a + static_cast<int64_t>(strip0 * 16 + s * hop) * padded(part) + tile * 16 + 8 * half_tile;
#pragma unroll 4
        for (int k = 0; k < 16; k++, from += padded(part)) copy16_part(to + k * 32, from, 16);
        if (half_tile == 0)
          list(false)[tiles + item] = {shared_address(to), shared_address(shared + L.outputs) + (s * rows + row) * 32, sum & (kSumsA - 1),
                                       s == own - 1 && (sum & (kSumsA - 1)) == kSumsA - 1};
      }
      tiles += now * own, own_sums += now, done += now;
      if (now < in_row - first) return false;
    }
    return true;
  }
  // Tiles of the next task of the first GEMM, in the order in which x is in memory (fragment.cuh). Returns whether there is none after it.
  __device__ __forceinline__ bool fetch(int& own_sums) {
    int most = 0, m = 0, tile = 0, chunk = 0;
    for (int row = 0; row < rows; row++) most = max(most, count(0, row).y);
    const int tasks = most / 16 * rows * chunks();
    for (;; done += C.grid) {
      if (done >= tasks) return true;
      const int of_rows = done / chunks();
      chunk = done - of_rows * chunks(), m = of_rows % rows, tile = of_rows / rows;
      if (tile < count(0, m).y / 16) break;
    }
    done += C.grid;
    if (lane == 0) places(false)[0] = m * width + tile * 16;
    const LoraPart& part = part_of(0, m, tile);
    constexpr int kTiles = kLoraChainTask / 16;
    int stored[kTiles], feature[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      const int eight = 2 * i + (lane >> 4), j = lane >> 1 & 7;
      stored[i] = chunk * kLoraChainTask + (eight >> 2) * 32 + 2 * (eight & 3) + (j & 1) + (j >> 1 & 1) * 8 + (j >> 2) * 16;
      feature[i] = L.features && stored[i] < C.gemm[0].width ? __ldg(L.features + stored[i]) : stored[i];
    }
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      const bool has = stored[i] < C.gemm[0].width;
      copy16_part(slot(1 + i) + lane * 16,
                  part.a + (has ? static_cast<int64_t>(feature[i]) * padded(part) : 0) + tile * 16 + 8 * (lane & 1), has ? 16 : 0);
    }
    if (lane < kTiles) list(false)[lane] = {shared_address(slot(1 + lane)), shared_address(shared + L.outputs) + lane * 32, 0, 0};
    tiles = kTiles, own_sums = 1;
    // Rows come in 32s.
    const bool has = lane < kLoraChainTask / 8 && chunk * kLoraChainTask + (lane >> 2) * 32 < C.gemm[0].width;
    x = has ? C.gemm[0].a.x + static_cast<size_t>(m) * C.gemm[0].a.x_stride + chunk * kLoraChainTask + lane * 8 : nullptr;
    return done >= tasks;
  }
  // The next tiles of b, as many as there is room for: for each row of the step and strip of this CTA (done: how many) those of the parts
  // that change its columns. Two lanes a strip; four strips are together in the tensor cores.
  __device__ __forceinline__ void fill_b(int q) {
    int used = 1 + L.a_tiles, own_sums = 0;
    tiles = 0;
    all = fill_columns(q, used, own_sums);
    __syncwarp();
  }
  __device__ __forceinline__ bool fill_columns(int q, int& used, int& own_sums) {
    const GemmArgs& A = C.gemm[q].a;
    const int slots = L.cache_bytes / kLoraTile, half_strip = 8 * (lane & 1), local = lane >> 1, group = lane >> 3;
    int strips = 0, number = 0;
    for (int p = 0; p < A.num_parts; p++) strips += own_strips(A, p);
#pragma unroll 1
    for (int row = 0; row < rows; row++, number += strips) {
      const int2 n = count(q, row);
#pragma unroll 1
      for (int base = max(done - number, 0); base < strips; base += 16) {
        // This lane's strip, and its tiles.
        int s = base + local, p = 0, mine = 0;
        bool live = s < strips;
#pragma unroll 1
        for (; live && s >= own_strips(A, p); p++) s -= own_strips(A, p);
        const int column = A.part[p].first_column + (first_strip(A, block, p) + s * A.grid) * 16, to = (place(q, p, s) * rows + row) * 4;
#pragma unroll 1
        for (int i = 0; i < n.x; i++) mine += live ? tiles_of(parts(q, row)[i], column) : 0;
        // Tiles of the strips up to it; what there is room for; where the list has the tiles of its group.
        int before = mine;
#pragma unroll
        for (int d = 2; d < 32; d *= 2) {
          const int other = __shfl_up_sync(~0u, before, d);
          if (lane >= d) before += other;
        }
        live = live && used + before <= slots && tiles + before + kLoraTogether * (group + 1) <= kLoraList && own_sums + local < kLoraList;
        const int taken = __popc(__ballot_sync(~0u, live)) / 2, through = __shfl_sync(~0u, before, max(2 * taken - 1, 0));
        const int all_before = taken ? through : 0, behind = __shfl_sync(~0u, before, max(8 * group - 1, 0)), at_group = group ? behind : 0;
        const int of_group = min(__shfl_sync(~0u, before, 8 * group + 7), all_before) - at_group;
        const int padded_group = max((of_group + kLoraTogether - 1) & -kLoraTogether, kLoraTogether);
        int start = tiles, end = tiles;
#pragma unroll
        for (int g = 0; g < 4; g++) {
          const int size = __shfl_sync(~0u, padded_group, 8 * g);
          if (g < group) start += size;
          if (4 * g < taken) end += size;
        }
        const int first = before - mine;  // tile of the pass
        if (local < ((taken + kSumsB - 1) & -kSumsB)) {
          if ((lane & 1) == 0) places(true)[own_sums + local] = live ? L.adds + to : -1;
          if (const int pad = of_group + (lane & 7); pad < padded_group)
            list(true)[start + pad] = {shared_address(slot(0)), shared_address(slot(0)), 0, 0};
        }
        if (live) {
          int i = -1, left = 0, tile = 0, part_first = 0;
#pragma unroll 1
          for (int t = 0; t < mine; t++, tile++, left--) {
            if (left == 0) {
              if (i >= 0) part_first += padded(parts(q, row)[i]) / 16;
              for (i++; (left = tiles_of(parts(q, row)[i], column)) == 0; i++) part_first += padded(parts(q, row)[i]) / 16;
              tile = 0;
            }
            const LoraPart& part = parts(q, row)[i];
            const int64_t in_part = column + half_strip - part.first, stride = part.columns;
            const bool has = in_part >= 0 && in_part < stride;
            const int ranks = has ? min(static_cast<int>(part.rank) - tile * 16, 16) : 0;
            const uint16_t* from = part.b + (has ? tile * 16 * stride + in_part : 0);
            uint8_t* const tile_at = slot(used + first + t);
#pragma unroll 4
            for (int r = 0; r < 16; r++) {
              copy16_part(tile_at + r * 32 + 2 * half_strip, from, r < ranks ? 16 : 0);
              if (r + 1 < ranks) from += stride;
            }
            if ((lane & 1) == 0)
              list(true)[start + before - mine - at_group + t] = {shared_address(tile_at), shared_address(low(row, part_first + tile)),
                                                                  local & (kSumsB - 1), 0};
          }
        }
        __syncwarp();
        if ((lane & 7) == 0 && 4 * group < taken) list(true)[start + padded_group - 1].last = 1;
        used += all_before, tiles = end, own_sums += (taken + kSumsB - 1) & -kSumsB, done += taken;
        if (taken < min(16, strips - base)) return false;
      }
    }
    return true;
  }
  // Tiles of a part that change 16 columns from `column` on.
  static __device__ __forceinline__ int tiles_of(const LoraPart& part, int column) {
    const int64_t at = column - part.first;
    return at > -16 && at < part.columns ? padded(part) / 16 : 0;
  }

  // Products of a list's tiles, 16 columns of a or b each. A sum has a column of the tensor cores' B and of their results, two of b: for
  // the high and low halves that it is multiplied by. done(y, places): y as in an MMA, places of the sums.
  template <bool OF_B, class Done>
  __device__ __forceinline__ void multiply(Done&& done) const {
    // Rows of a tile in an order that makes what a lane multiplies by four neighbours.
    const uint32_t row = (4 * (lane >> 1 & 3) + (lane & 1) + 2 * (lane >> 4)) * 32 + (lane >> 3 & 1) * 16;
    const uint32_t from = (lane & 3) * 8 + (OF_B ? (lane >> 2 & 1) * 32 : 0);
    const int mine = lane >> (OF_B ? 3 : 2);
    const LoraTile* const all = list(OF_B);
    const int* to = places(OF_B);
    float y[4] = {};
#pragma unroll 1
    for (int n = 0; n < tiles; n += kLoraTogether) {
      LoraTile tile[kLoraTogether];
      uint32_t a[kLoraTogether][4];
      uint2 b[kLoraTogether];
#pragma unroll
      for (int j = 0; j < kLoraTogether; j++) {
        const uint4 words = *reinterpret_cast<const uint4*>(all + n + j);
        tile[j] = {words.x, words.y, static_cast<int>(words.z), static_cast<int>(words.w)};
      }
#pragma unroll
      for (int j = 0; j < kLoraTogether; j++) {
        load_matrices<true>(a[j], tile[j].tile + row);
        b[j] = make_uint2(0, 0);
        if (tile[j].sum == mine) b[j] = load_pair(tile[j].from + from);
      }
#pragma unroll
      for (int j = 0; j < kLoraTogether; j++) mma16816(y, a[j][0], a[j][1], a[j][2], a[j][3], b[j].x, b[j].y);
      if (!tile[kLoraTogether - 1].last) continue;
      done(y, to);
      to += OF_B ? kSumsB : kSumsA;
      y[0] = y[1] = y[2] = y[3] = 0.f;
    }
  }
  // Adds x a of the tiles of a in shared memory.
  __device__ __forceinline__ void add_sums() const {
    multiply<false>([&](const float (&y)[4], const int* places) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (const int to = places[2 * (lane & 3) + i]; to >= 0) {
          LoraSum::add(sums + to + (lane >> 2), y[i]);
          LoraSum::add(sums + to + (lane >> 2) + 8, y[i + 2]);
        }
    });
  }
  // What the epilogue adds, into shared memory.
  __device__ __forceinline__ void expand() const {
    multiply<true>([&](const float (&y)[4], const int* places) {
      if (const int to = places[lane & 3]; to >= 0) {
        auto* const add = reinterpret_cast<float*>(shared + to) + (lane >> 2) * rows;
        add[0] = (y[0] + y[1]) * (1.f / kLow), add[8 * rows] = (y[2] + y[3]) * (1.f / kLow);
      }
    });
  }
  // The sums of a row, scaled.
  __device__ __forceinline__ void gather(int q, int row) const {
    const unsigned long long* const from = sums + (q * kLoraChainRows + row) * width;
    const int numbers = count(q, row).y;
    const unsigned adding = q ? min(C.grid, C.gemm[q - 1].a.part[0].strips) : chunks();  // CTAs or tasks
#pragma unroll 1
    for (int c = lane; c < numbers; c += 64) {
      unsigned long long v[2];
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (c + 32 * j < numbers) v[j] = ld_relaxed(from + c + 32 * j);
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (const int at = c + 32 * j; at < numbers) {
          while (!LoraSum::has(v[j], adding)) v[j] = ld_relaxed(from + at);
          const float value = LoraSum::of(v[j]) * (scales(row)[at] * kLow);
          const half high = saturated(value);
          half* const to = low(row, at / 16) + at % 16;
          to[0] = high, to[16] = saturated(value - __half2float(high));
        }
    }
  }
};

// What a kernel is made with: adapters, or none, which is no code at all. Adds: what the epilogue adds, [output of the CTA][row], and where
// it leaves what it stores, [16 outputs][row][16]; `first` of each for this round. kArrivals: at kFactorsReady.
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
    LoraWarp<Args> mine(*reinterpret_cast<const Args*>(shared + L.args), C.gemm[0].a.tokens, L, shared, block, lane);
    if (warp == 0)
      mine.run_a(state, C, stored, ready);
    else
      mine.run_b(inputs, stored, ready);
  }
  __device__ __forceinline__ void count() const { asm volatile("red.relaxed.gpu.global.add.u32 [%0],1;" ::"l"(L.launches) : "memory"); }
};
struct NoLora {
  struct Adds {
    __device__ __forceinline__ float to(float v, int) const { return v; }
    __device__ __forceinline__ void keep(half, int, int, int) const {}
  };
  static constexpr int kArrivals = 1;
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
