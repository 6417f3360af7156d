// Products on the integer tensor cores (sm_80 and later, m16n8k32 u8 x s8): weight codes as bytes times activations as int16.
//
// An activation is an int16 times a step per 64 rows of a token. Its high and low byte are two columns of B, so four tokens fill the eight
// columns. Codes go in unsigned; zero point x sum of activations is subtracted afterwards. Integer sums are exact, so the result of a token
// does not depend on the tokens beside it.
#pragma once
#include "cuda/blob/item_mma.cuh"
#include "cuda/gemm/fragment.cuh"

namespace exl2nb {

// Specialisation for the weights of a launch: absent code paths cost nothing. kNarrow: EXL2 with few bits. kFromThree: EXL2 without 2 bits,
// whose long items are an eighth of the kernel.
enum WeightKind { kAnyWeights, kExl2, kNarrow, kFromThree };

#ifdef __CUDACC__

constexpr int kMaxQuantized = 32512;  // 127 * 256: both bytes stay in range

// A block of 64 quantised rows of a token: step, sum of all, of the first 32, of the last 32 integers (for zero points).
struct Int8Block {
  float step;
  int both, first, second;
};
static_assert(sizeof(Int8Block) == 16, "one 16-byte load");

// Rows 2t, 2t + 1, 2t + 8, 2t + 9 of a step as fp16 -> low and high bytes in the order of dequant.cuh; adds the integers to `sum`.
__device__ __forceinline__ void to_bytes(uint2 v, float inverse, uint32_t& low, uint32_t& high, int& sum) {
  const float2 a = __half22float2(*reinterpret_cast<half2*>(&v.x)), b = __half22float2(*reinterpret_cast<half2*>(&v.y));
  constexpr float kBase = 12582912.f + 128.f;  // 1.5 * 2^23: the whole number, plus 128, in the lowest bits
  const auto to_int = [&](float x) { return __float_as_uint(fmaf(x, inverse, kBase)); };
  const uint32_t first = __byte_perm(to_int(a.x), to_int(b.x), 0x5140), second = __byte_perm(to_int(a.y), to_int(b.y), 0x5140);
  low = __byte_perm(first, second, 0x5410) ^ each_byte(0x80);
  high = __byte_perm(first, second, 0x7632);
  sum = __dp4a(static_cast<int>(low), 0x01010101, sum) + 256 * __dp4a(static_cast<int>(high), 0x01010101, 0);
}

// Quantises 64 rows of a token (in fragment.cuh order) to bytes at `rows`: high bytes, then low bytes. LANES (8 or 4) neighbouring lanes t
// share a block, v: 16-byte pieces t (and t + 4); the whole warp must call; live: this lane group has a block.
template <int LANES>
__device__ __forceinline__ void quantize_block(const uint4 (&v)[8 / LANES], uint8_t* rows, Int8Block* block, int t, bool live) {
  constexpr int kPlaces = 8 / LANES;
  const auto h = [](uint32_t w) { return __habs2(*reinterpret_cast<half2*>(&w)); };
  half2 most = __float2half2_rn(0.f);
#pragma unroll
  for (int k = 0; k < kPlaces; k++) most = __hmax2(most, __hmax2(__hmax2(h(v[k].x), h(v[k].y)), __hmax2(h(v[k].z), h(v[k].w))));
  float m = fmaxf(__low2float(most), __high2float(most));
#pragma unroll
  for (int d = 1; d < LANES; d *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
  const float inverse = m > 0.f ? __fdividef(kMaxQuantized, m) : 0.f;
  uint2 low[kPlaces], high[kPlaces];
  int sum[kPlaces];
#pragma unroll
  for (int k = 0; k < kPlaces; k++) {
    sum[k] = 0;
    to_bytes(make_uint2(v[k].x, v[k].y), inverse, low[k].x, high[k].x, sum[k]);
    to_bytes(make_uint2(v[k].z, v[k].w), inverse, low[k].y, high[k].y, sum[k]);
#pragma unroll
    for (int d = 1; d <= 2; d *= 2) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], d);
  }
  if constexpr (LANES == 8) {
    const int other = __shfl_xor_sync(0xffffffffu, sum[0], 4);
    if (!live) return;
    uint8_t* const to = rows + (t & 3) * 16 + (t & 4) * 2;
    *reinterpret_cast<uint2*>(to) = high[0];
    *reinterpret_cast<uint2*>(to + 64) = low[0];
    if (t == 0) *block = {m * (1.f / kMaxQuantized), sum[0] + other, sum[0], other};
  } else {
    if (!live) return;
    uint8_t* const to = rows + t * 16;
    *reinterpret_cast<uint4*>(to) = make_uint4(high[0].x, high[0].y, high[1].x, high[1].y);
    *reinterpret_cast<uint4*>(to + 64) = make_uint4(low[0].x, low[0].y, low[1].x, low[1].y);
    if (t == 0) *block = {m * (1.f / kMaxQuantized), sum[0] + sum[1], sum[0], sum[1]};
  }
}

// c += A B; A unsigned bytes, B signed bytes.
__device__ __forceinline__ void mma_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Use of the eight columns of B: four pairs (high byte, low byte) for CHUNKS chunks of rows and 4 / CHUNKS tokens. The sums of four chunks
// are in four lanes t, so scaling runs for all of them at once.
template <int CHUNKS>
struct Int8Input {
  static constexpr int kTokens = 4 / CHUNKS;
  const uint8_t* bytes;     // of the token of column g
  const Int8Block* blocks;  // of the token of lane t
  int column_chunk, lane_chunk, g, tokens;
  bool live;  // column g belongs to an existing token

  __device__ __forceinline__ Int8Input(const uint8_t* all, const Int8Block* every, int num_blocks, int count, int lane) : tokens(count) {
    const int t = lane & 3;
    g = lane >> 2;
    const int column_token = (g >> 1) % kTokens, token = t % kTokens;
    column_chunk = (g >> 1) / kTokens, lane_chunk = t / kTokens;
    live = column_token < count;
    bytes = all + min(column_token, count - 1) * num_blocks * 128 + (g & 1) * 64 + t * 16;
    blocks = every + min(token, count - 1) * num_blocks;
  }
  __device__ __forceinline__ uint4 unit(int pair, bool there) const {
    return live && there ? *reinterpret_cast<const uint4*>(bytes + pair * 128) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ uint2 half_unit(int block, bool there) const {  // 32 stored rows
    return live && there ? *reinterpret_cast<const uint2*>(bytes + (block >> 1) * 128 + (block & 1) * 8) : make_uint2(0, 0);
  }
};
// Sums of columns g and g + 8, kept separate for chunks 0, 1, 2, 3 mod 4, so that the order of additions does not depend on the number of
// rows.
template <int CHUNKS>
struct Int8Sums {
  float y[4 / CHUNKS][2] = {};
  // To sums[token][16]; add: accumulate. PAIRS: two items (Int8Item) to the sums of both.
  template <bool PAIRS = false>
  __device__ __forceinline__ void put(float* sums, const Int8Input<CHUNKS>& in, int lane, bool add) const {
    const int t = lane & 3;
    const auto to = [&](int token, int column, float v) {
      float* const p = sums + token * 16 + column;
      if (token < in.tokens) *p = add ? *p + v : v;
    };
    if constexpr (CHUNKS == 1) {
#pragma unroll
      for (int i = 0; i < 2; i++) to(t, in.g + 8 * i, (y[0][i] + y[1][i]) + (y[2][i] + y[3][i]));
    } else if constexpr (CHUNKS == 2) {  // lanes t < 2: column g, the others: g + 8
      const bool second = t & 2;
      float v[2];
#pragma unroll
      for (int k = 0; k < 2; k++) v[k] = y[k][second] + __shfl_xor_sync(0xffffffffu, y[k][!second], 2);
      to(t & 1, in.g + 4 * (t & 2), v[0] + v[1]);
    } else {  // lane 0: column g, lane 1: g + 8
      const bool second = t & 1;
      float v = (second ? y[0][1] : y[0][0]) + __shfl_xor_sync(0xffffffffu, second ? y[0][0] : y[0][1], 1);
      if constexpr (PAIRS) {  // chunks 0 and 1 are one's, 2 and 3 the other's
        sums[in.g + 8 * t] = v;
        return;
      }
      v += __shfl_xor_sync(0xffffffffu, v, 2);
      if (t >= 2) return;
      float* const p = sums + in.g + 8 * t;  // one token: it exists
      *p = add ? *p + v : v;
    }
  }
};

// Half a unit: two k-steps, 32 rows.
template <int B, int FIRST>
__device__ __forceinline__ void mma_half_unit(int (&c)[4], const uint32_t* w, uint32_t b0, uint32_t b1) {
  uint32_t a[4];
  byte_fragments<B, FIRST>(w, a[0], a[1]);
  byte_fragments<B, FIRST + 1>(w, a[2], a[3]);
  mma_bytes(c, a[0], a[1], a[2], a[3], b0, b1);
}

// Most units of an item.
__host__ __device__ constexpr int max_units(int bits) {
  return kMaxItemBytes / (128 * bits) < kItemUnits ? kMaxItemBytes / (128 * bits) : kItemUnits;
}

// EXL2 item. A chunk is a unit of one group, or half a unit whose halves have groups of their own. Missing units meet zero activations
// (what is read in their place is in shared memory). With one row, everything that does not change from strip to strip stays in registers,
// and the next strip is loaded before the current one is finished. kPairedItems: two consecutive items of two units, one row. APART: with
// one row, each unit has its own accumulators and a lane picks its chunk; otherwise activations of other chunks are zero, which takes fewer
// registers.
enum Int8Form { kSplitUnits, kWholeUnits, kPairedItems };
template <int B, Int8Form FORM, int CHUNKS, bool APART>
struct Int8Item {
  static constexpr bool kOne = FORM != kSplitUnits, kPairs = FORM == kPairedItems, kApart = APART && kOne && CHUNKS == 4;
  static_assert(!kPairs || CHUNKS == 4, "a round");
  static constexpr int kUnits = kPairs ? 2 * kPairUnits : max_units(B), kParts = kOne ? kUnits : 2 * kUnits,
                       kRounds = (kParts + CHUNKS - 1) / CHUNKS, kWords = kOne ? 4 : 2;
  static constexpr int kZero = 1 << (B - 1), kShift = ByteForm<B>::shift;
  static constexpr int kHeld = CHUNKS < 4 ? 0 : !kOne ? 2 : B == 2 ? kRounds : 1;  // rounds
  static constexpr bool kAhead = CHUNKS == 4 && kOne;
  static constexpr int kAheadUnits = kUnits < 4 ? kUnits : 4, kSums = kApart ? 4 : 2;
  struct Round {
    uint32_t b[CHUNKS][kWords];
    int zero;    // the zero point times the sum of the activations
    float step;  // of the activations
    half unit;   // of the scales
    int code;    // offset
  } held[kHeld ? kHeld : 1];
  struct Words {
    uint32_t w[kAheadUnits][B], code;
  };
  static constexpr int kFirstUnits = kPairUnits * (128 * B), kGap = kPairs ? 8 * kPairUnits : 0;  // bytes; between two items' units
  int codes, parts, block;
  const half2* steps;
  const Int8Input<CHUNKS>& in;

  __device__ __forceinline__ Int8Item(const ItemDesc& it, const half2* all, const Int8Input<CHUNKS>& input)
      : block(it.block()), steps(all), in(input) {
    const int units = kPairs ? kUnits : it.units();
    parts = kOne ? units : 2 * units - it.lone();
    codes = units * (128 * B) + in.g * (kOne ? 1 : 2);
#pragma unroll
    for (int r = 0; r < kHeld; r++) held[r] = round(r);
    if constexpr (kPairs) {
      codes = kFirstUnits + in.g;
      if (in.lane_chunk >= 2) held[0].code += kFirstUnits;
    }
  }
  __device__ __forceinline__ Round round(int r) const {
    const int base = r * CHUNKS, own = min(base + in.lane_chunk, parts - 1), wanted = base + in.column_chunk;
    const Int8Block x0 = in.blocks[kOne ? (block >> 1) + own : (block + own) >> 1];
    Round to;
    to.zero = kZero * (kOne ? x0.both : (block + own) & 1 ? x0.second : x0.first);
    to.step = base + in.lane_chunk < parts ? x0.step : 0.f;
    if constexpr (kOne) {
      to.unit = __low2half(steps[own]), to.code = own * 8;
      const uint4 x = in.unit((block >> 1) + wanted, wanted < parts);
#pragma unroll
      for (int j = 0; j < CHUNKS; j++) {
        const bool mine = CHUNKS == 1 || kApart || in.column_chunk == j;
        to.b[j][0] = mine ? x.x : 0, to.b[j][1] = mine ? x.y : 0, to.b[j][2] = mine ? x.z : 0, to.b[j][3] = mine ? x.w : 0;
      }
    } else {
      to.unit = reinterpret_cast<const half*>(steps)[own], to.code = (own >> 1) * 16 + (own & 1);
      const uint2 x = in.half_unit(block + wanted, wanted < parts);
#pragma unroll
      for (int j = 0; j < CHUNKS; j++) {
        const bool mine = CHUNKS == 1 || in.column_chunk == j;
        to.b[j][0] = mine ? x.x : 0, to.b[j][1] = mine ? x.y : 0;
      }
    }
    return to;
  }
  __device__ __forceinline__ Round known(int r) const { return r < kHeld ? held[r < kHeld ? r : 0] : round(r); }
  __device__ __forceinline__ bool there(int r) const { return r == 0 || r * CHUNKS < parts; }

  // Products of one unit w in a round; j: its first chunk.
  __device__ __forceinline__ static void unit_products(int (&c)[kSums][4], const uint32_t (&w)[B], const Round& of, int r, int j) {
    int (&to)[4] = c[kApart ? j : CHUNKS > 1 && j >= CHUNKS / 2];
    if constexpr (kOne) {
      mma_half_unit<B, 0>(to, w, of.b[j][0], of.b[j][1]);
      mma_half_unit<B, 2>(to, w, of.b[j][2], of.b[j][3]);
    } else if constexpr (CHUNKS == 1) {
      if (r & 1)
        mma_half_unit<B, 2>(to, w, of.b[0][0], of.b[0][1]);
      else
        mma_half_unit<B, 0>(to, w, of.b[0][0], of.b[0][1]);
    } else {
      mma_half_unit<B, 0>(to, w, of.b[j][0], of.b[j][1]);
      mma_half_unit<B, 2>(to, w, of.b[j + 1][0], of.b[j + 1][1]);
    }
  }
  static constexpr int kStep = kOne || CHUNKS == 1 ? 1 : 2;  // chunks of a unit in a round
  __device__ __forceinline__ static constexpr int unit_of(int r, int j) { return kOne ? r * CHUNKS + j : (r * CHUNKS + j) / 2; }
  __device__ __forceinline__ void scale(const Round& of, const int (&c)[kSums][4], uint32_t code, float (&y)[2]) const {
    int s[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (kApart)
        s[i] = in.lane_chunk & 2 ? in.lane_chunk & 1 ? c[3][i] : c[2][i] : in.lane_chunk & 1 ? c[1][i] : c[0][i];
      else
        s[i] = CHUNKS > 1 ? c[0][i] + c[1][i] : c[0][i];
    }
    const int g = s[0] * 256 + s[1];
    int g8 = s[2] * 256 + s[3];
    if constexpr (ByteForm<B>::mixed) g8 -= g;
    const float2 f = __half22float2(steps_of(code, of.unit));
    y[0] = fmaf(__int2float_rn(g - of.zero), f.x * of.step, y[0]);
    y[1] = fmaf(__int2float_rn(g8 - (of.zero << kShift)), f.y * (of.step * (1.f / (1 << kShift))), y[1]);
  }

  // The unit to load for a chunk. A missing one may be of a stage that is being filled, which racecheck would report.
  __device__ __forceinline__ int loaded(int unit) const {
    return kWarpArrivals > 1 && !kPairs ? min(unit, (parts - 1) / (kOne ? 1 : 2)) : unit;
  }
  // st: the item in a strip. First round, split in load / products / finish.
  __device__ __forceinline__ void load(const uint8_t* st, int lane, Words& to) const {
#pragma unroll
    for (int u = 0; u < kAheadUnits; u++) load_unit<B>(st + loaded(u) * (128 * B) + (u < kPairUnits ? 0 : kGap), lane, to.w[u]);
    to.code = st[codes + held[0].code];
  }
  __device__ __forceinline__ void products(const Words& of, int (&c)[kSums][4]) const {
#pragma unroll
    for (int i = 0; i < 4 * kSums; i++) c[i / 4][i % 4] = 0;
#pragma unroll
    for (int j = 0; j < CHUNKS; j += kStep)
      if (unit_of(0, j) < kAheadUnits) unit_products(c, of.w[unit_of(0, j)], held[0], 0, j);
  }
  __device__ __forceinline__ void finish(uint32_t code, const int (&c)[kSums][4], Int8Sums<CHUNKS>& sums) const {
    scale(held[0], c, code, sums.y[0]);
  }
  // All rounds from `first` on. With several rows the rounds that one row finishes last (`finish`) also come last, so sums are added in one
  // order.
  __device__ __forceinline__ void multiply(const uint8_t* st, int lane, Int8Sums<CHUNKS>& sums, int first = 0) const {
    constexpr int kLast = kOne && CHUNKS < 4 ? 4 / CHUNKS : 0;  // rounds
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      const int r = kRounds > kLast ? (i + kLast) % kRounds : i;
      if (r < first || !there(r)) continue;
      const Round of = known(r);
      const uint32_t code = st[codes + of.code];
      int c[kSums][4] = {};
#pragma unroll
      for (int j = 0; j < CHUNKS; j += kStep) {
        if (unit_of(r, j) >= kUnits) break;
        uint32_t w[B];
        load_unit<B>(st + loaded(unit_of(r, j)) * (128 * B), lane, w);
        unit_products(c, w, of, r, j);
      }
      scale(of, c, code, sums.y[r % (4 / CHUNKS)]);
    }
  }
};

// GPTQ item, one chunk at a time.
template <int B, bool ONE, int CHUNKS>
struct Int8Gptq {
  static constexpr bool kAhead = false, kPairs = false;
  ItemDesc it;
  const Int8Input<CHUNKS>& in;
  __device__ __forceinline__ Int8Gptq(const ItemDesc& item, const half2*, const Int8Input<CHUNKS>& input) : it(item), in(input) {}

  __device__ __forceinline__ void add(float (&y)[2], const int (&c)[4], int sum, float step, const GptqSet& set) const {
    using Form = ByteForm<B>;
    const int g = c[0] * 256 + c[1];
    int g8 = c[2] * 256 + c[3];
    if constexpr (Form::mixed) g8 -= g;
    const float2 f = __half22float2(set.scale), z = __half22float2(set.zero);
    const float total = __int2float_rn(sum), own = in.lane_chunk ? 0.f : step;
    y[0] = fmaf(fmaf(-z.x, total, __int2float_rn(g)), f.x * own, y[0]);
    y[1] = fmaf(fmaf(-z.y, total, __int2float_rn(g8) * (1.f / (1 << Form::shift))), f.y * own, y[1]);
  }
  __device__ __forceinline__ void multiply(const uint8_t* st, int lane, Int8Sums<CHUNKS>& sums) const {
    const int units = it.units(), shift = it.scales() - 1;
    const uint8_t* const sets = st + units * (128 * B);
    const bool mine = in.column_chunk == 0;
#pragma unroll 1
    for (int i = 0; i < units; i++) {
      uint32_t w[B];
      load_unit<B>(st + i * (128 * B), lane, w);
      const GptqSet one = load_set(sets, ONE ? i >> shift : 2 * i, lane), other = ONE ? one : load_set(sets, 2 * i + 1, lane);
      const int at = it.block() + 2 * i, then = at + !it.lone();
      const uint2 xa = in.half_unit(at, mine), xb = in.half_unit(then, mine);
      const Int8Block a = in.blocks[at >> 1], b = in.blocks[then >> 1];
      int c[4] = {0, 0, 0, 0}, d[4] = {0, 0, 0, 0};
      mma_half_unit<B, 0>(c, w, xa.x, xa.y);
      mma_half_unit<B, 2>(d, w, xb.x, xb.y);
      add(sums.y[0], c, at & 1 ? a.second : a.first, a.step, one);
      add(sums.y[0], d, then & 1 ? b.second : b.first, b.step, other);
    }
  }
};

// Calls `with` with a null pointer of the type for the item (not dense). pairs: two items, where there is code for them (PAIRS).
template <int CHUNKS, WeightKind WEIGHTS, bool PAIRS, class F>
__device__ __forceinline__ void dispatch_item(const ItemDesc& it, bool pairs, const F& with) {
  constexpr bool kApart = WEIGHTS == kNarrow;
  const auto exl2 = [&](auto form) {
    const auto width = [&](auto b) { with(static_cast<Int8Item<decltype(b)::value, decltype(form)::value, CHUNKS, kApart>*>(nullptr)); };
    if constexpr (WEIGHTS == kFromThree)
      dispatch_bits<4, 3, 5, 6, 8>(it.bits(), width);
    else
      dispatch_bits<4, 3, 5, 2, 6, 8>(it.bits(), width);
  };
  if constexpr (CHUNKS == 4 && PAIRS)
    if (pairs) return exl2(std::integral_constant<Int8Form, kPairedItems>{});
  if constexpr (WEIGHTS == kAnyWeights) {
    const auto gptq = [&](auto one) {
      dispatch_bits<4, 3, 2, 8>(it.bits(),
                                [&](auto b) { with(static_cast<Int8Gptq<decltype(b)::value, decltype(one)::value, CHUNKS>*>(nullptr)); });
    };
    if (it.scales()) return it.one() ? gptq(std::true_type{}) : gptq(std::false_type{});
  }
  it.one() ? exl2(std::integral_constant<Int8Form, kWholeUnits>{}) : exl2(std::integral_constant<Int8Form, kSplitUnits>{});
}

#endif  // __CUDACC__

}  // namespace exl2nb
