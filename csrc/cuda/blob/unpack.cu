// Unpacks a blob to a dense fp16 matrix (K, N) in original row order, for prefill GEMMs. A warp decodes a unit of four neighbouring strips
// into shared memory, transposed by movmatrix, and writes full 128-byte lines; a CTA writes 512 bytes side by side. Bytes: the blob once, 2
// * K * N written.
#include "cuda/blob/blob.h"
#include "cuda/blob/dequant.cuh"
#include "cuda/runtime/mma.cuh"

namespace exl2nb {

constexpr int kPitch = kStrips * 16 + 8;  // halves per row in shared memory: eight rows in different banks

// Item of unit u: the last one that begins at or before it. One item per lane: one round trip to memory.
__device__ __forceinline__ int item_of(const UnpackPart& P, int u, int lane) {
  int before = 0;
  for (int first = 0; first < P.num_items; first += 32) {
    const bool begun = first + lane < P.num_items && P.items[first + lane].unit0 <= u;
    before += __popc(__ballot_sync(0xffffffffu, begun));
  }
  return before - 1;
}

// Decodes unit i of `live` strips. from: the first strip's item.
template <int B, bool GPTQ>
__device__ __forceinline__ void decode_strips(const UnpackPart& P, const Item& it, const uint8_t* from, int live, int i, half2 unit,
                                              int lane, half (*tile)[kPitch]) {
  const int g = lane >> 2, t = lane & 3;
  if (lane / 8 < live && lane % 8 < B)  // one round trip for all strips
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + lane / 8 * P.strip_bytes + i * (128 * B) + lane % 8 * 128));
#pragma unroll 1
  for (int j = 0; j < live; j++) {
    EncodedUnit<B, GPTQ> coded;
    coded.load(from + j * P.strip_bytes, it, i, lane);
    uint32_t h[16];
    coded.decode(unit, h);
#pragma unroll
    for (int f = 0; f < 16; f++)
      *reinterpret_cast<uint32_t*>(&tile[(f >> 2) * 16 + (f >> 1 & 1) * 8 + g][j * 16 + (f & 1) * 8 + 2 * t]) = transposed(h[f]);
  }
}
static_assert(kStrips * 8 <= 32, "one lane per 128-byte line");

__device__ __forceinline__ void decode_unit(const UnpackPart& P, const Item& it, const uint8_t* from, int live, int u, int lane,
                                            half (*tile)[kPitch]) {
  const half2 unit = P.steps[u];
  const int i = u - it.unit0;
  const auto decode = [&](auto b, auto gptq) {
    decode_strips<decltype(b)::value, decltype(gptq)::value>(P, it, from, live, i, unit, lane, tile);
  };
  if (it.scales)
    dispatch_bits<2, 3, 4, 8>(it.bits, [&](auto b) { decode(b, std::true_type{}); });
  else
    dispatch_bits<2, 3, 4, 5, 6, 8, 16>(it.bits, [&](auto b) { decode(b, std::false_type{}); });
}

// Grid: strips, units, parts. Padding rows are not written.
__global__ void __launch_bounds__(kUnpackWarps * 32, 6)
    unpack_kernel(const __grid_constant__ UnpackParts sources, int K, int64_t N, half* out) {
  __shared__ __align__(16) half tiles[kUnpackWarps][64][kPitch];
  const UnpackPart& P = sources.part[blockIdx.z];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, strip = (blockIdx.x * kUnpackWarps + warp) * kStrips;
  if (strip >= P.strips || static_cast<int>(blockIdx.y) * kUnitsPerWarp >= P.num_units) return;
  half(*const tile)[kPitch] = tiles[warp];
  const uint8_t* const data = P.data + strip * P.strip_bytes;
  const int live = min(kStrips, P.strips - strip), columns = min(kStrips * 16, P.outputs - strip * 16);
  const int begin = P.first_unit + blockIdx.y * kUnitsPerWarp, end = min(begin + kUnitsPerWarp, P.first_unit + P.num_units);
  int at = item_of(P, begin, lane);
  for (int u = begin; u < end; u++) {
    if (P.items[at].unit0 + P.items[at].units <= u) at++;
    const Item it = P.items[at];
    const int stored = (it.block + 2 * (u - it.unit0)) * 32, rows = it.lone ? 32 : 64;
    int row[2];  // of stored rows lane and 32 + lane; none: K
#pragma unroll
    for (int side = 0; side < 2; side++) {
      const int s = stored + side * 32 + lane;
      row[side] = s >= P.stored ? K : P.perm ? __ldg(P.perm + s) : s;
    }
    __syncwarp();
    decode_unit(P, it, data + it.offset, live, u, lane, tile);
    __syncwarp();
    half* const to = out + P.first_column + strip * 16 + (lane & 7) * 8;
    const int left = columns - (lane & 7) * 8;
#pragma unroll
    for (int side = 0; side < 2; side++) {
      if (side * 32 >= rows) break;
#pragma unroll 4
      for (int k = 0; k < 32; k += 4) {
        const int r = k + (lane >> 3), original = __shfl_sync(0xffffffffu, row[side], r);
        if (original >= K || left <= 0) continue;
        half* const place = to + original * N;
        const half* const from = &tile[side * 32 + r][(lane & 7) * 8];
        if (P.whole && left >= 8)
          *reinterpret_cast<uint4*>(place) = *reinterpret_cast<const uint4*>(from);
        else
          for (int c = 0; c < min(left, 8); c++) place[c] = from[c];
      }
    }
  }
}

}  // namespace exl2nb
