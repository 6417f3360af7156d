// Decode kernel: tiles of 16 or 32 cached keys or values on their way from memory to a warp's shared memory, past the registers (sm_80 up).
#pragma once
#include "cuda/attention/attention_decode_state.cuh"

namespace exl2nb {

// Starts copying what is old of the tile at `token`, if anything. Every call is one group of copies.
template <int KF, int VF, int D, int NT, bool RUNS>
template <int F, bool KEYS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::fetch(uint8_t* to, int token) {
  using T = Tile<F, D, KEYS, kStep>;
  if (token < last_end()) {
    if constexpr (KEYS) {  // the values come next, of the same page
      if ((token >> 8) - page_base > 31) fetch_pages(token);
      page_row = page_at(token);
    }
    const int inside = token & (kPage - 1), old = first_new - token;
    const uint8_t* const page =
        static_cast<const uint8_t*>(KEYS ? p.a.cache.k_pool : p.a.cache.v_pool) + static_cast<int64_t>(page_row) * page_bytes(F, D);
    const uint8_t *const from = page + (inside * T::kRow + lane * 16), *const scales =
                                                                           page + (kPage * T::kRow + inside * T::kScaleRow + lane * 16);
    constexpr bool kEven = kStep * T::kRow % 512 == 0 && (512 % T::kRow == 0 || !T::kPad);  // a step of 512 bytes is whole rows
    if (kEven && old >= kStep) {
      uint8_t* const rows_to = to + (lane * 16 + lane * 16 / T::kRow * T::kPad);
#pragma unroll
      for (int first = 0; first < kStep * T::kRow; first += 512) copy16<true>(rows_to + first + first / T::kRow * T::kPad, from + first);
      if (kStep * T::kScaleRow > 0 && lane * 16 < kStep * T::kScaleRow) copy16<true>(to + T::kScalesAt + lane * 16, scales);
      if constexpr (kStep * T::kScaleRow > 512)
        if (lane * 16 + 512 < kStep * T::kScaleRow) copy16<true>(to + T::kScalesAt + lane * 16 + 512, scales + 512);
    } else {
      const int fill = min(max(old, 0), kStep);  // zeros behind them: finite numbers under a probability of 0
#pragma unroll 1
      for (int b = lane * 16; b < kStep * T::kRow; b += 512)
        copy16_part(to + b + b / T::kRow * T::kPad, from + (b - lane * 16), min(max(fill * T::kRow - b, 0), 16));
#pragma unroll 1
      for (int b = lane * 16; b < kStep * T::kScaleRow; b += 512)
        copy16_part(to + T::kScalesAt + b, scales + (b - lane * 16), min(max(fill * T::kScaleRow - b, 0), 16));
    }
  }
  async_commit();
}

// Rows from..to of a tile. The largest pieces that fit.
template <int BYTES, int STRIDE>
__device__ __forceinline__ void put_rows(uint8_t* at, const uint8_t* rows, int from, int to, int lane) {
  using Unit = std::conditional_t<BYTES % 16 == 0, uint4, std::conditional_t<BYTES % 8 == 0, uint2, uint16_t>>;
  constexpr int kUnits = BYTES / sizeof(Unit);
#pragma unroll 1
  for (int i = from * kUnits + lane; i < to * kUnits; i += 32)
    reinterpret_cast<Unit*>(at + i / kUnits * STRIDE)[i % kUnits] = reinterpret_cast<const Unit*>(rows)[i];
}

// Puts what is new into a tile that has arrived.
template <int KF, int VF, int D, int NT, bool RUNS>
template <int F, bool KEYS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::complete(uint8_t* at, int token) const {
  using T = Tile<F, D, KEYS, kStep>;
  const int from = max(first_new - token, 0), to = min(it.context - token, kStep), skip = token - first_new;
  if (from >= to) return;
  put_rows<T::kRow, T::kStride>(at, (KEYS ? sh.k : sh.v) + skip * T::kRow, from, to, lane);
  if constexpr (has_scales(F))
    put_rows<T::kScaleRow, T::kScaleRow>(at + T::kScalesAt, (KEYS ? sh.k_scale : sh.v_scale) + skip * T::kScaleRow, from, to, lane);
  __syncwarp();
}

// Until the oldest group of copies under way is complete, of two for every stage.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ void Decode<KF, VF, D, NT, RUNS>::await() const {
  async_wait<2 * kStages - 1>();
  __syncwarp();
}

}  // namespace exl2nb
