// Exchanges between the ranks of a model, each with a GPU of its own: every rank writes its numbers into the buffers of all others (CUDA
// IPC), and polls its own buffer for theirs.
//
// A number travels with the number of its exchange in one store of 8 bytes, so no fence and no counter orders anything, and nothing is ever
// cleared. Exchanges alternate between two slots: a rank that begins exchange n + 2 has everyone's numbers of exchange n + 1, and those
// were sent after everyone had read exchange n. So every rank sends something in every exchange. Source: the protocol "LL" of NCCL.
//
//   buffer:  header (256 bytes): exchanges so far | slot 0: rank 0's numbers, rank 1's .. | slot 1: rank 0's numbers, ..
#pragma once
#include "cuda/runtime/types.h"

namespace exl2nb {

constexpr int kMaxRanks = 8, kPeerHeader = 256;
struct Peers {
  uint8_t* buffer[kMaxRanks];
  const int* stop;  // in host memory; not 0: a rank is gone, so whoever waits goes on with any numbers
  int64_t words;    // numbers per rank and slot
  int rank, size;   // size 0: there are no ranks
  int exchange;     // of this call or step
};
// Numbers of the ranks as int64, as Python writes them (exl2nb/ops/peers.py): then a column bound of every rank's part of the logits.
constexpr int kPeerWords = 4 + kMaxRanks + kMaxRanks + 1;
inline Peers read_peers(const int64_t* w) {
  Peers p{};
  p.rank = static_cast<int>(w[0]), p.size = static_cast<int>(w[1]), p.words = w[2], p.stop = reinterpret_cast<const int*>(w[3]);
  for (int r = 0; r < kMaxRanks; r++) p.buffer[r] = reinterpret_cast<uint8_t*>(w[4 + r]);
  return p;
}

#ifdef __CUDACC__
#ifndef EXL2NB_PEERS_ON_HOST  // tests/ops/peers_host.cpp
__device__ __forceinline__ void store_far(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint64_t load_far(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
#endif
// The number of the current exchange, which its data carry.
__device__ __forceinline__ unsigned exchange_number(const Peers& p) {
  return __ldcg(reinterpret_cast<const unsigned*>(p.buffer[p.rank])) + static_cast<unsigned>(p.exchange) + 1;
}
// Where rank `from` puts its number i in the buffer of rank `to`.
__device__ __forceinline__ uint64_t* peer_place(const Peers& p, int to, int from, unsigned number, int64_t i) {
  return reinterpret_cast<uint64_t*>(p.buffer[to] + kPeerHeader) + ((number & 1) * p.size + from) * p.words + i;
}
__device__ __forceinline__ void send(const Peers& p, unsigned number, int64_t i, float v) {
  const uint64_t word = static_cast<uint64_t>(number) << 32 | __float_as_uint(v);
  for (int to = 0; to < p.size; to++)
    if (to != p.rank) store_far(peer_place(p, to, p.rank, number, i), word);
}
__device__ __forceinline__ float take(const Peers& p, unsigned number, int from, int64_t i) {
  const uint64_t* const at = peer_place(p, p.rank, from, number, i);
  for (unsigned turn = 1;; turn++) {
    const uint64_t word = load_far(at);
    if (static_cast<unsigned>(word >> 32) == number) return __uint_as_float(static_cast<unsigned>(word));
    if (turn % 4096 == 0 && *reinterpret_cast<const volatile int*>(p.stop)) return 0.f;
  }
}
// The sum of all ranks' numbers i, added in their order: the same bits on every rank. own: this rank's, which it has sent.
__device__ __forceinline__ float take_sum(const Peers& p, unsigned number, int64_t i, float own) {
  float v = 0.f;
  for (int from = 0; from < p.size; from++) v += from == p.rank ? own : take(p, number, from, i);
  return v;
}
#endif

}  // namespace exl2nb
