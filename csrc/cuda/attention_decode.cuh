// Attention of a few queries per sequence over a paged cache, split over the keys (flash-decoding, Dao et al. 2023), in one kernel.
//
// A work item is (sequence, KV head, block of 8 * NT query rows, chunk of keys); a query row is (token, head of the KV head's group). A CTA
// of 4 warps takes items in turns. It prepares the item's query rows (norm, rotation, fp16) in shared memory, and the new keys and values
// that fall into its chunk, which it also writes to the cache. Then every warp walks tiles of 16 keys: S' = K Q' and O' += V' P' on tensor
// cores (m16n8k16), with the keys, then the dims, as rows, so that 8 queries fill the columns. K and V go from memory straight to fragment
// registers (cache_format.cuh); the loads of the next tiles are in flight while one is computed. Old keys are fetched before the kernel
// waits for its predecessor. The warps' results are joined in warp order, the chunks' by the CTA that arrives last, in chunk order: no
// float atomics, and chunk boundaries depend on the sequence's own context length only, so a result's bits depend on nothing else.
// Bytes: K and V of the context once per block of query rows, partial results 4 * (D + 2) per (row, chunk).
// Limits: D a multiple of 16, at most 256; at most 8 new tokens per sequence (any number when q comes ready).
// Files: _items how work is cut, _state the class, _new the step's own rows, _tiles loads, _keys scores to values, _join results.
#pragma once
#include "attention_decode_join.cuh"
#include "attention_decode_keys.cuh"
#include "attention_decode_new.cuh"
#include "attention_decode_tiles.cuh"

namespace exl2nb {

template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::walk(bool wait) {
  load_keys(0);
  load_values(0);
  make_rows(wait);
  fetch_queries();
  clear();
#pragma unroll 1
  for (int step = 0; tile_token(step, 0) < chunk_end; step++) {
    float s[kTiles][NT][4];
    const bool more = tile_token(step + 1, 0) < chunk_end;
    scores(step, s);
    if (more) load_keys(step + 1);
    softmax(s);
    values(step, s);
    if (more) load_values(step + 1);
  }
}

template <int KF, int D, int NT>
__host__ __device__ constexpr int ctas_per_sm() {
  return D > 128 || NT > 1 ? 2 : KF == kCacheQ4 || D < 96 ? 4 : 3;
}

template <int KF, int VF, int D, int NT>
__global__ void __launch_bounds__(kWarps * 32, (ctas_per_sm<KF, D, NT>())) attention_decode(const __grid_constant__ DecodeParams params) {
  using Kernel = Decode<KF, VF, D, NT>;
  __shared__ typename Kernel::Shared shared;
  Kernel kernel(params, shared);
  let_successor_start();
  bool wait = true;
  if (params.a.q) {  // then this step's keys are the predecessor's too
    wait_for_predecessor();
    wait = false;
  }
  for (int index = blockIdx.x; kernel.begin(index); index += gridDim.x) {
    kernel.walk(wait);
    wait = false;
    kernel.join_warps();
    kernel.finish();
    __syncthreads();
  }
  if (wait && blockIdx.x == 0) wait_for_predecessor();  // this kernel must not end before its predecessor
}

// Pairs of the modes that have a name; the others (k16v4, say) do without wide kernels, which take time to compile.
template <int KF, int VF>
constexpr bool kOften = KF == VF || (KF == kCacheQ8 && VF == kCacheQ4);

using DecodeKernel = void (*)(DecodeParams);
// The kernel of a pair of formats for head dims 64, 80, 96, 128, 256; null for others. `wide` is a wish.
template <int KF, int VF>
DecodeKernel decode_kernel(int D, bool wide) {
  constexpr int kWide = kOften<KF, VF> ? 2 : 1;
  switch (D) {
    case 64:
      return wide ? attention_decode<KF, VF, 64, kWide> : attention_decode<KF, VF, 64, 1>;
    case 80:
      return attention_decode<KF, VF, 80, 1>;
    case 96:
      return attention_decode<KF, VF, 96, 1>;
    case 128:
      return wide ? attention_decode<KF, VF, 128, kWide> : attention_decode<KF, VF, 128, 1>;
    case 256:
      return attention_decode<KF, VF, 256, 1>;
    default:
      return nullptr;
  }
}
constexpr bool has_wide(int D) { return D == 64 || D == 128; }

}  // namespace exl2nb
