// A blob back to a dense fp16 matrix (K, N), rows in original order: what prefill multiplies by.
//
// Eight warps decode the same unit of eight neighbouring strips and write, per row, 32 bytes each: 256 bytes in a row together.
// Bytes: the blob once, 2 * K * N written.
#include <algorithm>

#include "blob.h"
#include "fields.cuh"
#include "item.cuh"
#include "launch.h"

namespace exl2nb {
namespace {

constexpr int kStrips = 8, kUnitsPerCta = 4;

struct Source {
  const uint8_t* data;
  const half2* steps;  // of all parts
  const Item* items;   // of this part
  int num_items, first_unit, num_units, strips, first_column, outputs;
  int64_t strip_bytes;
};

template <int B>
__device__ __forceinline__ void decode(const uint8_t* st, const Item& it, int i, half2 unit, int lane, half (*to)[16]) {
  uint32_t w[B], h[16];
  load_unit<B>(st + i * (128 * B), lane, w);
  dq<B>(w, h);
  const int g = lane >> 2, t = lane & 3;
  const uint8_t* codes = st + it.units * (128 * B);
  half2 step[2];
  if (it.scales) {
    const GptqSet first = load_set(codes, it.one ? i / it.scales : 2 * i, lane), second = it.one ? first : load_set(codes, 2 * i + 1, lane);
    take_zeros<B>(h, first.zero, second.zero);
    step[0] = first.scale, step[1] = second.scale;
  } else {
    take_offsets<B>(h);
    step[0] = steps_of(codes[it.one ? i * 8 + g : i * 16 + 2 * g], __low2half(unit));
    step[1] = it.one ? step[0] : steps_of(codes[i * 16 + 2 * g + 1], __high2half(unit));
  }
#pragma unroll
  for (int f = 0; f < 16; f++) {
    const int row = (f >> 2) * 16 + 2 * t + ((f >> 1) & 1) * 8, column = g + (f & 1) * 8;
    const half s = f & 1 ? __high2half(step[f >> 3]) : __low2half(step[f >> 3]);
    const half2 v = __hmul2(*reinterpret_cast<half2*>(h + f), __half2half2(s));
    to[row][column] = __low2half(v);
    to[row + 1][column] = __high2half(v);
  }
}

// A dense unit: fp16 as the fragments hold it.
__device__ __forceinline__ void copy_dense(const uint8_t* codes, int lane, half (*to)[16]) {
  const int g = lane >> 2, t = lane & 3;
  for (int f = 0; f < 16; f++) {
    const half2 v = reinterpret_cast<const half2*>(codes + (f >> 2) * 512 + lane * 16)[f & 3];
    const int row = (f >> 2) * 16 + 2 * t + ((f >> 1) & 1) * 8, column = g + (f & 1) * 8;
    to[row][column] = __low2half(v);
    to[row + 1][column] = __high2half(v);
  }
}

__device__ __forceinline__ void decode_unit(const uint8_t* st, const Item& it, int i, half2 unit, int lane, half (*to)[16]) {
  switch (it.bits) {
    case 2:
      return decode<2>(st, it, i, unit, lane, to);
    case 3:
      return decode<3>(st, it, i, unit, lane, to);
    case 4:
      return decode<4>(st, it, i, unit, lane, to);
    case 5:
      return decode<5>(st, it, i, unit, lane, to);
    case 6:
      return decode<6>(st, it, i, unit, lane, to);
    case 8:
      return decode<8>(st, it, i, unit, lane, to);
    default:
      return copy_dense(st + i * 2048, lane, to);
  }
}

// The item that holds unit u.
__device__ __forceinline__ int item_of(const Source& P, int u) {
  int at = 0, high = P.num_items;
  while (high - at > 1) {
    const int middle = (at + high) / 2;
    if (P.items[middle].unit0 <= u)
      at = middle;
    else
      high = middle;
  }
  return at;
}

__device__ __forceinline__ void write_row(const half* from, half* to, int columns) {
  if (columns == 16 && (reinterpret_cast<uintptr_t>(to) & 15) == 0) {
    reinterpret_cast<uint4*>(to)[0] = reinterpret_cast<const uint4*>(from)[0];
    reinterpret_cast<uint4*>(to)[1] = reinterpret_cast<const uint4*>(from)[1];
  } else {
    for (int c = 0; c < columns; c++) to[c] = from[c];
  }
}

// perm: of `stored` rows, or null. Padding rows are not written.
__global__ void __launch_bounds__(kStrips * 32) unpack_kernel(Source P, const int* perm, int stored_rows, int K, int64_t N, half* out) {
  __shared__ half tile[kStrips][64][16];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, strip = blockIdx.x * kStrips + warp;
  if (strip >= P.strips) return;
  const uint8_t* data = P.data + strip * P.strip_bytes;
  const int columns = min(16, P.outputs - strip * 16);
  int at = 0;
  const int last = P.first_unit + min(P.num_units, static_cast<int>(blockIdx.y + 1) * kUnitsPerCta);
  for (int u = P.first_unit + blockIdx.y * kUnitsPerCta; u < last; u++) {
    if (at == 0) at = item_of(P, u);
    while (P.items[at].unit0 + P.items[at].units <= u) at++;
    const Item it = P.items[at];
    const int i = u - it.unit0;
    const half2 unit = P.steps[u];
    __syncwarp();
    decode_unit(data + it.offset, it, i, unit, lane, tile[warp]);
    __syncwarp();
    for (int side = 0; side < (it.lone ? 1 : 2); side++) {
      const int local = side * 32 + lane, stored = (it.block + 2 * i) * 32 + local;
      if (stored >= stored_rows) continue;
      const int row = perm ? perm[stored] : stored;
      if (row < K) write_row(tile[warp][local], out + row * N + P.first_column + strip * 16, columns);
    }
  }
}

}  // namespace

const char* unpack_launch(const uint8_t* head, const uint8_t* blob, void* out, void* stream) {
  const auto& h = *reinterpret_cast<const GpuHeader*>(head);
  const auto* parts = reinterpret_cast<const GpuPart*>(head + sizeof(GpuHeader));
  for (int p = 0; p < h.num_parts; p++) {
    const GpuPart& s = parts[p];
    const auto* items = reinterpret_cast<const Item*>(blob + h.image) + s.first_item;
    const auto* steps = reinterpret_cast<const half2*>(blob + h.image + image_steps(h.num_items));
    const Source part{blob + s.data, steps,    items,          s.num_items, s.first_unit,
                      s.num_units,   s.strips, s.first_column, s.outputs,   s.strip_bytes};
    const int* perm =
        h.perms && !s.dense ? reinterpret_cast<const int*>(blob + h.perms) + s.perm * (static_cast<int64_t>(h.stored) + h.K) : nullptr;
    const dim3 grid((s.strips + kStrips - 1) / kStrips, (s.num_units + kUnitsPerCta - 1) / kUnitsPerCta);
    unpack_kernel<<<grid, kStrips * 32, 0, static_cast<cudaStream_t>(stream)>>>(part, perm, perm ? h.stored : h.K, h.K, h.N,
                                                                                static_cast<half*>(out));
    if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return cudaGetErrorString(e);
  }
  return nullptr;
}

}  // namespace exl2nb
