// Two warps of a chain's CTA (chain.cuh) that do not multiply: one fetches weights, one waits for the other CTAs.
#pragma once
#include "cuda/gemm/persistent/chain_args.cuh"
#include "cuda/gemm/persistent/chain_sync.cuh"

namespace exl2nb {

// What fetches weights: one thread.
__device__ __forceinline__ void fetch_pieces(const ChainArgs& C, uint8_t* shared, uint64_t* full, uint64_t* empty, int block) {
  const uint64_t policy = once();
  const int ahead = C.ahead + (block < C.busier ? C.more : 0);
  int slot = 0, old = 0, issued = 0;
  uint32_t phase = 1, old_phase = 0;
  const auto fetch = [&](const uint8_t* from, uint32_t bytes) {
    barrier_wait(empty + slot, phase);
    if (issued >= ahead) {  // no more than so many under way
      barrier_wait(full + old, old_phase);
      if (++old == C.room.pieces) old = 0, old_phase ^= 1;
    }
    issued++;
    barrier_expect(full + slot, bytes);
    if (bytes) copy_weights(shared + C.room.ring + slot * C.room.piece, from, bytes, full + slot, policy);
    if (++slot == C.room.pieces) slot = 0, phase ^= 1;
  };
#pragma unroll 1
  for (int q = 0; q < C.count; q++) {
    const ChainProduct& P = C.product[q];
    const GemvArgs& A = P.a;
    const ChainImage image(C, shared, q);
#pragma unroll 1
    for (int round = 0; round < P.rounds; round++)
#pragma unroll 1
      for (int p = 0; p < A.num_parts; p++) {
        const int strip0 = first_strip(A, block, p), count = chain_strips(P, p, strip0, round);
        const int64_t hop = A.grid * A.part[p].strip_bytes;
        const uint8_t* const begin = A.part[p].data + strip0 * A.part[p].strip_bytes + round * P.strips * hop;
#pragma unroll 1
        for (int pass = 0; pass < P.piece[p].passes; pass++) {
          const Piece piece(P, image, p, pass);
          const bool pairs = P.piece[p].pairs;
          const uint8_t* from[2];  // teams
          uint32_t bytes[2];
          int first[2];
#pragma unroll
          for (int team = 0; team < 2; team++) {
            const int n = piece.first + (pairs ? 0 : team * kTeam);
            const Item& end = image.items[min(n + (pairs ? kCrew : kTeam), piece.last) - 1];
            const uint32_t offset = n < piece.last ? image.items[n].offset : 0;
            first[team] = pairs ? ChainTurns(count, p, team).first : 0;
            from[team] = begin + offset + first[team] * hop, bytes[team] = n < piece.last ? end.offset + end.bytes - offset : 0;
          }
#pragma unroll 1
          for (int s = 0; s < count; s += 1 + pairs)
#pragma unroll
            for (int team = 0; team < 2; team++) {
              fetch(from[team], s + first[team] < count ? bytes[team] : 0);
              from[team] += pairs ? 2 * hop : hop;
            }
        }
      }
  }
}

// What waits for the other CTAs: a warp. Says when the activations are there, or on their way, and the factors. The counters only say when
// looking is worth while: what is written says so itself.
__device__ __forceinline__ void await_inputs(const ChainArgs& C, uint8_t* shared, uint64_t* bars, int block, int lane) {
  ChainShared& near = *reinterpret_cast<ChainShared*>(shared);
  unsigned before = 0;  // all counters, when this launch began
  int set = 0;          // bytes to what is this launch's
#pragma unroll 1
  for (int q = 0; q < C.count; q++) {
    const GemvArgs& A = C.product[q].a;
    if (q == 0) {
      pdl_wait();
    } else if (lane == 0) {
      barrier_wait(bars + kMine, (q - 1) & 1);
      while (static_cast<int>(load_now(C.meet + q - 1) - before - C.product[q - 1].enough) < 0) {
      }  // of the rest more is seen by looking at what they write
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(bars + kReady);
    // One product alone leaves counters and sets as they are: no CTA waits for another one there, so the first could have counted the
    // launch before the last has looked.
    if (q == 0 && C.count > 1) {
      if (lane == 0) before = load_now(C.meet + kChain - 1);  // the others' last cannot come before this CTA's first
      set = (load_now(C.meet + kChain) & 1) * C.set_bytes;
      uint4* const other = reinterpret_cast<uint4*>(C.set + C.set_bytes - set);  // of the next launch: nobody reads it now
      for (int i = block * 32 + lane; i < C.set_bytes / 16; i += C.grid * 32) other[i] = make_uint4(0, 0, 0, 0);
    }
    if (q == 0 && C.spent)
      for (int i = block * 32 + lane; i < C.spent_count; i += C.grid * 32) C.spent[i] = make_uint4(0, 0, 0, 0);
    if (q == 0 && lane == 0) near.set = set;
#pragma unroll 1
    for (int m = 0; m < A.tokens; m++) {
      float sum = 0.f;
      if (A.squares && q == 0) {  // another kernel's
        const float* const squares = A.squares + static_cast<size_t>(row_of(A, m)) * A.squares_count;
        for (int i = lane; i < A.squares_count; i += 32) sum += __ldcg(squares + i);
      } else if (A.squares) {
        constexpr int kSide = 5;  // loads side by side
        const float* const squares =
            reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(A.squares) + set) + static_cast<size_t>(m) * A.squares_count;
        float some[kSide] = {};
#pragma unroll
        for (int k = 0; k < kSide; k++)
          if (const int i = lane + 32 * k; i < A.squares_count) some[k] = load_now(squares + i);
#pragma unroll
        for (int k = 0; k < kSide; k++) {
          if (const int i = lane + 32 * k; i < A.squares_count && !is_there(some[k])) some[k] = await(squares + i);
          sum += some[k];
        }
        for (int i = lane + 32 * kSide; i < A.squares_count; i += 32) sum += await(squares + i);
      }
      sum = warp_sum(sum);
      if (lane == 0) near.factors[m] = A.squares ? rsqrtf(sum * A.inverse_width + A.eps) : 1.f;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(bars + kScaled);
  }
}

}  // namespace exl2nb
