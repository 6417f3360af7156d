// Weights as bytes times activations as whole numbers: exact sums on the integer tensor cores (sm_80 up).
//
// An activation is a number of 16 bits times a step, one step for every 64 stored rows of a token: its high and its low byte are two
// columns of B, so four tokens fill the eight columns of m16n8k32. Codes go in as they are, unsigned, their zero point times the sum of the
// activations comes off behind. Everything up to there is exact, so a token's result does not depend on the tokens beside it.
#pragma once
#include "fragment.cuh"
#include "item.cuh"

namespace exl2nb {

constexpr int kLargest = 32512;  // of an activation: 127 * 256, so that both bytes stay in range

// Of 64 stored rows of a token: the step, the sum of the whole numbers, that of the first 32, of the second.
struct WholeBlock {
  float step;
  int both, first, second;
};
static_assert(sizeof(WholeBlock) == 16, "one load");

// Rows 2t, 2t + 1, 2t + 8, 2t + 9 of a step as fp16 -> their low and high bytes in the order of fields.cuh; adds them to `sum`.
__device__ __forceinline__ void to_bytes(uint2 v, float inverse, uint32_t& low, uint32_t& high, int& sum) {
  const float2 a = __half22float2(*reinterpret_cast<half2*>(&v.x)), b = __half22float2(*reinterpret_cast<half2*>(&v.y));
  constexpr float kBase = 12582912.f + 128.f;  // 1.5 * 2^23: the whole number, plus 128, in the lowest bits
  const auto whole = [&](float x) { return __float_as_uint(fmaf(x, inverse, kBase)); };
  const uint32_t first = __byte_perm(whole(a.x), whole(b.x), 0x5140), second = __byte_perm(whole(a.y), whole(b.y), 0x5140);
  low = __byte_perm(first, second, 0x5410) ^ each_byte(0x80);
  high = __byte_perm(first, second, 0x7632);
  sum = __dp4a(static_cast<int>(low), 0x01010101, sum) + 256 * __dp4a(static_cast<int>(high), 0x01010101, 0);
}

// 64 stored rows of a token as fragment.cuh orders them, to bytes at `rows`: the high ones, then the low ones. Eight neighbouring lanes
// work on it, all lanes of the warp must come; v: places 8 * (lane & 3) on of the first (lane & 4: second) 32 rows; live: whether there is
// something to do.
__device__ __forceinline__ void to_whole(uint4 v, uint8_t* rows, WholeBlock* block, int lane, bool live) {
  const auto h = [](uint32_t w) { return __habs2(*reinterpret_cast<half2*>(&w)); };
  const half2 most = __hmax2(__hmax2(h(v.x), h(v.y)), __hmax2(h(v.z), h(v.w)));
  float m = fmaxf(__low2float(most), __high2float(most));
#pragma unroll
  for (int d = 1; d <= 4; d *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
  const float inverse = m > 0.f ? __fdividef(kLargest, m) : 0.f;
  uint2 low, high;
  int sum = 0;
  to_bytes(make_uint2(v.x, v.y), inverse, low.x, high.x, sum);
  to_bytes(make_uint2(v.z, v.w), inverse, low.y, high.y, sum);
#pragma unroll
  for (int d = 1; d <= 2; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  const int other = __shfl_xor_sync(0xffffffffu, sum, 4);
  if (!live) return;
  uint8_t* const to = rows + (lane & 3) * 16 + (lane & 4) * 2;
  *reinterpret_cast<uint2*>(to) = high;
  *reinterpret_cast<uint2*>(to + 64) = low;
  if ((lane & 7) == 0) *block = {m * (1.f / kLargest), sum + other, sum, other};
}

// c += A B, A of unsigned bytes, B of signed ones.
__device__ __forceinline__ void mma_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// How the eight columns of B are used: four pairs, the high and the low byte, of `chunks` chunks of rows and 4 / chunks tokens. So the sums
// of four chunks lie in four lanes t, and what follows a sum is done for all of them at once.
template <int CHUNKS>
struct WholeInput {
  static constexpr int kTokens = 4 / CHUNKS, kSums = 4 / CHUNKS;
  const uint8_t* bytes;      // of the token of column g
  const WholeBlock* blocks;  // of the token of lane t
  int column_chunk, lane_chunk, g;
  bool live;   // column g is of a token that is there
  bool first;  // a lane whose sums, joined, are a token's
  int token;   // of lane t

  __device__ __forceinline__ WholeInput(const uint8_t* xs, const WholeBlock* all, int num_blocks, int tokens, int lane) {
    const int t = lane & 3;
    g = lane >> 2;
    const int column_token = (g >> 1) % kTokens;
    token = t % kTokens, column_chunk = (g >> 1) / kTokens, lane_chunk = t / kTokens;
    live = column_token < tokens, first = lane_chunk == 0 && token < tokens;
    bytes = xs + min(column_token, tokens - 1) * num_blocks * 128 + (g & 1) * 64 + t * 16;
    blocks = all + min(token, tokens - 1) * num_blocks;
  }
  __device__ __forceinline__ uint4 unit(int pair, bool there) const {
    return live && there ? *reinterpret_cast<const uint4*>(bytes + pair * 128) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ uint2 half_unit(int block, bool there) const {  // 32 stored rows
    return live && there ? *reinterpret_cast<const uint2*>(bytes + (block >> 1) * 128 + (block & 1) * 8) : make_uint2(0, 0);
  }
};
// Sums of columns g and g + 8, of chunks 0, 1, 2, 3 mod 4 apart, so that they are joined in one order however many tokens there are.
template <int CHUNKS>
struct WholeSums {
  float y[4 / CHUNKS][2] = {};
  __device__ __forceinline__ float joined(int i) const {
    if constexpr (CHUNKS == 1) return (y[0][i] + y[1][i]) + (y[2][i] + y[3][i]);
    if constexpr (CHUNKS == 2) {
      const float a = y[0][i] + __shfl_xor_sync(0xffffffffu, y[0][i], 2), b = y[1][i] + __shfl_xor_sync(0xffffffffu, y[1][i], 2);
      return a + b;
    }
    const float a = y[0][i] + __shfl_xor_sync(0xffffffffu, y[0][i], 1);
    return a + __shfl_xor_sync(0xffffffffu, a, 2);
  }
};

// Adds sums c of codes with a zero point, over activations whose sum is `sum`: y of columns g and g + 8.
template <int B>
__device__ __forceinline__ void add_codes(float (&y)[2], const int (&c)[4], int sum, float step, half2 steps) {
  using Form = ByteForm<B>;
  constexpr int kZero = 1 << (B - 1);
  const int g = c[0] * 256 + c[1];
  int g8 = c[2] * 256 + c[3];
  if constexpr (Form::mixed) g8 -= g;
  const float2 f = __half22float2(steps);
  y[0] = fmaf(__int2float_rn(g - kZero * sum), f.x * step, y[0]);
  y[1] = fmaf(__int2float_rn(g8 - (kZero << Form::shift) * sum), f.y * (step * (1.f / (1 << Form::shift))), y[1]);
}
template <int B>
__device__ __forceinline__ void add_gptq(float (&y)[2], const int (&c)[4], int sum, float step, const GptqSet& set) {
  using Form = ByteForm<B>;
  const int g = c[0] * 256 + c[1];
  int g8 = c[2] * 256 + c[3];
  if constexpr (Form::mixed) g8 -= g;
  const float2 f = __half22float2(set.scale), z = __half22float2(set.zero);
  const float total = __int2float_rn(sum);
  y[0] = fmaf(fmaf(-z.x, total, __int2float_rn(g)), f.x * step, y[0]);
  y[1] = fmaf(fmaf(-z.y, total, __int2float_rn(g8) * (1.f / (1 << Form::shift))), f.y * step, y[1]);
}

// Two steps of a unit, 32 rows.
template <int B, int FIRST>
__device__ __forceinline__ void multiply_half(int (&c)[4], const uint32_t* w, uint32_t b0, uint32_t b1) {
  uint32_t a[4];
  bytes_of<B, FIRST>(w, a[0], a[1]);
  bytes_of<B, FIRST + 1>(w, a[2], a[3]);
  mma_bytes(c, a[0], a[1], a[2], a[3], b0, b1);
}

// N units with one group each, chunks. st: of the first; codes: of the first and column g; pair: its aligned 64 rows.
template <int B, int CHUNKS, int N>
__device__ __forceinline__ void whole_ones(const uint8_t* st, const uint8_t* codes, const half2* steps, int pair,
                                           const WholeInput<CHUNKS>& in, int lane, WholeSums<CHUNKS>& sums) {
  uint32_t w[N][B];
#pragma unroll
  for (int k = 0; k < N; k++) load_unit<B>(st + k * (128 * B), lane, w[k]);
#pragma unroll
  for (int base = 0; base < N; base += CHUNKS) {
    const int own = min(base + in.lane_chunk, N - 1);
    const uint32_t code = codes[own * 8];
    const half unit = __low2half(steps[own]);
    const WholeBlock block = in.blocks[pair + own];
    const uint4 x = in.unit(pair + base + in.column_chunk, base + in.column_chunk < N);
    int c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < CHUNKS && base + j < N; j++) {
      const bool mine = CHUNKS == 1 || in.column_chunk == j;
      multiply_half<B, 0>(c, w[base + j], mine ? x.x : 0, mine ? x.y : 0);
      multiply_half<B, 2>(c, w[base + j], mine ? x.z : 0, mine ? x.w : 0);
    }
    add_codes<B>(sums.y[base / CHUNKS], c, block.both, base + in.lane_chunk < N ? block.step : 0.f, steps_of(code, unit));
  }
}
// N units, one or two, whose halves have groups of their own, chunks. block: the first 32 rows; rows: there, of 32, counted from it.
template <int B, int CHUNKS, int N>
__device__ __forceinline__ void whole_halves(const uint8_t* st, const uint8_t* codes, const half2* steps, int block, int rows,
                                             const WholeInput<CHUNKS>& in, int lane, WholeSums<CHUNKS>& sums) {
  uint32_t w[N][B];
#pragma unroll
  for (int k = 0; k < N; k++) load_unit<B>(st + k * (128 * B), lane, w[k]);
#pragma unroll
  for (int base = 0; base < 2 * N; base += CHUNKS) {
    const int own = min(base + in.lane_chunk, rows - 1), wanted = base + in.column_chunk;
    const uint32_t code = codes[(own >> 1) * 16 + (own & 1)];
    const half unit = reinterpret_cast<const half*>(steps)[own];
    const WholeBlock b = in.blocks[(block + own) >> 1];
    const uint2 x = in.half_unit(block + wanted, wanted < rows);
    int c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < CHUNKS && base + j < 2 * N; j++) {
      const bool mine = CHUNKS == 1 || in.column_chunk == j;
      if ((base + j) & 1)
        multiply_half<B, 2>(c, w[(base + j) / 2], mine ? x.x : 0, mine ? x.y : 0);
      else
        multiply_half<B, 0>(c, w[(base + j) / 2], mine ? x.x : 0, mine ? x.y : 0);
    }
    add_codes<B>(sums.y[base / CHUNKS], c, (block + own) & 1 ? b.second : b.first, base + in.lane_chunk < rows ? b.step : 0.f,
                 steps_of(code, unit));
  }
}

// What a warp needs to know of an item.
struct Brief {
  uint32_t kind, rest;  // its second and fourth word (blob.h)
  int unit0;
  __device__ __forceinline__ int block() const { return kind & 0xffff; }
  __device__ __forceinline__ int bits() const { return kind >> 16 & 0xff; }
  __device__ __forceinline__ int units() const { return kind >> 24; }
  __device__ __forceinline__ bool one() const { return rest & 0xff; }
  __device__ __forceinline__ bool lone() const { return rest >> 8 & 0xff; }
  __device__ __forceinline__ int scales() const { return rest >> 16 & 0xff; }
};

template <int B, bool ONE, int CHUNKS>
__device__ __forceinline__ void whole_exl2(const Brief& it, const uint8_t* st, const half2* steps, const WholeInput<CHUNKS>& in, int lane,
                                           WholeSums<CHUNKS>& sums) {
  const int units = it.units();
  const uint8_t* const codes = st + units * (128 * B) + in.g * (ONE ? 1 : 2);
  if constexpr (ONE) {
    const int pair = it.block() >> 1;
#pragma unroll 1
    for (int i = 0; i < units; i += 4) {
      const uint8_t* const at = st + i * (128 * B);
      const int left = units - i;
      if constexpr (B <= 4)
        if (left >= 4) {
          whole_ones<B, CHUNKS, 4>(at, codes + i * 8, steps + i, pair + i, in, lane, sums);
          continue;
        }
      if constexpr (B <= 5)
        if (left == 3) {
          whole_ones<B, CHUNKS, 3>(at, codes + i * 8, steps + i, pair + i, in, lane, sums);
          continue;
        }
      if (left == 2)
        whole_ones<B, CHUNKS, 2>(at, codes + i * 8, steps + i, pair + i, in, lane, sums);
      else
        whole_ones<B, CHUNKS, 1>(at, codes + i * 8, steps + i, pair + i, in, lane, sums);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < units; i += 2) {
      const uint8_t* const at = st + i * (128 * B);
      const int block = it.block() + 2 * i;
      if (i + 2 <= units)
        whole_halves<B, CHUNKS, 2>(at, codes + i * 16, steps + i, block, 4, in, lane, sums);
      else
        whole_halves<B, CHUNKS, 1>(at, codes + i * 16, steps + i, block, it.lone() ? 1 : 2, in, lane, sums);
    }
  }
}
template <int B, bool ONE, int CHUNKS>
__device__ __forceinline__ void whole_gptq(const Brief& it, const uint8_t* st, const WholeInput<CHUNKS>& in, int lane,
                                           WholeSums<CHUNKS>& sums) {
  const int block = it.block(), units = it.units(), shift = it.scales() - 1;
  const uint8_t* const sets = st + units * (128 * B);
  const bool mine = in.column_chunk == 0;  // one chunk at a time
#pragma unroll 1
  for (int i = 0; i < units; i++) {
    uint32_t w[B];
    load_unit<B>(st + i * (128 * B), lane, w);
    const GptqSet first = load_set(sets, ONE ? i >> shift : 2 * i, lane), second = ONE ? first : load_set(sets, 2 * i + 1, lane);
    const int at = block + 2 * i, then = at + !it.lone();
    const uint2 xa = in.half_unit(at, mine), xb = in.half_unit(then, mine);
    const WholeBlock a = in.blocks[at >> 1], b = in.blocks[then >> 1];
    int c[4] = {0, 0, 0, 0}, d[4] = {0, 0, 0, 0};
    multiply_half<B, 0>(c, w, xa.x, xa.y);
    multiply_half<B, 2>(d, w, xb.x, xb.y);
    add_gptq<B>(sums.y[0], c, at & 1 ? a.second : a.first, in.lane_chunk ? 0.f : a.step, first);
    add_gptq<B>(sums.y[0], d, then & 1 ? b.second : b.first, in.lane_chunk ? 0.f : b.step, second);
  }
}

// Any item but a dense one. st: its bytes; steps: of its matrix.
template <int CHUNKS>
__device__ __forceinline__ void whole_item(const Brief& it, const uint8_t* st, const half2* steps, const WholeInput<CHUNKS>& in, int lane,
                                           WholeSums<CHUNKS>& sums) {
  const half2* const own = steps + it.unit0;
  const auto exl2 = [&](auto form) {
    constexpr bool kOne = decltype(form)::value;
    switch (it.bits()) {
      case 4:
        return whole_exl2<4, kOne>(it, st, own, in, lane, sums);
      case 3:
        return whole_exl2<3, kOne>(it, st, own, in, lane, sums);
      case 5:
        return whole_exl2<5, kOne>(it, st, own, in, lane, sums);
      case 2:
        return whole_exl2<2, kOne>(it, st, own, in, lane, sums);
      case 6:
        return whole_exl2<6, kOne>(it, st, own, in, lane, sums);
      default:
        return whole_exl2<8, kOne>(it, st, own, in, lane, sums);
    }
  };
  const auto gptq = [&](auto form) {
    constexpr bool kOne = decltype(form)::value;
    switch (it.bits()) {
      case 4:
        return whole_gptq<4, kOne>(it, st, in, lane, sums);
      case 3:
        return whole_gptq<3, kOne>(it, st, in, lane, sums);
      case 2:
        return whole_gptq<2, kOne>(it, st, in, lane, sums);
      default:
        return whole_gptq<8, kOne>(it, st, in, lane, sums);
    }
  };
  if (it.scales() == 0)
    it.one() ? exl2(std::true_type{}) : exl2(std::false_type{});
  else
    it.one() ? gptq(std::true_type{}) : gptq(std::false_type{});
}

}  // namespace exl2nb
