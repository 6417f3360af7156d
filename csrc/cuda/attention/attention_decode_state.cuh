// What a CTA of the decode kernel holds: the class whose methods stand in the files of the kernel's stages.
#pragma once
#include "cuda/attention/attention_decode_items.cuh"
#include "cuda/attention/attention_decode_math.cuh"
#include "cuda/runtime/trace.cuh"

namespace exl2nb {

constexpr float kLowest = -1e30f;         // a maximum over nothing
constexpr float kWholeMost = 8159.f;      // 127 * 64 + 31
constexpr int kWholeBits = 0x4b400000;    // of the float 1.5 * 2^23: adding a whole number below 2^22 to either is the same
constexpr float kWholeBase = 12582912.f;  // that float
constexpr uint32_t kSeven = 0x80078007u;  // -7 times 2^-24, twice
constexpr float kLog2e = 1.4426950408889634f;

template <int KF, int VF, int D, int NT, bool RUNS>
struct Decode {
  static constexpr bool kPacked = is_packed(KF, VF, D);
  static constexpr int kMost = most_warps(D, NT), kSlots = (D + 31) / 32, kRows = rows_of(NT), kN = NT ? NT : 1, kColumns = NT ? 2 : 1,
                       kGroups = D / scale_group(D);
  static constexpr int kQStride = kSlots * 32 + 8;  // halves; lanes of a quarter warp read 16 bytes each
  static constexpr int kOStride = D + 4;            // floats; lanes that store together find different banks
  static constexpr bool kCoded = has_scales(KF) || has_scales(VF);
  static constexpr int kSubs = bits_of(KF) + bits_of(VF) <= 8 ? 2 : 1, kStep = kSubs * kTile;  // keys that a warp takes at a time
  using KeyTile = Tile<KF, D, true, kStep>;
  using ValueTile = Tile<VF, D, false, kStep>;
  using Key = KeyFragment<KF, D>;
  using Value = ValueFragment<VF, D>;
  static constexpr int kStageBytes = kPacked ? kStep * (D + 4 * kGroups) : KeyTile::kBytes + ValueTile::kBytes,
                       kResultBytes = kRows * kOStride * 4;
  static constexpr int kStages = kStageBytes > 6 << 10 ? 1 : 2;  // tiles that a warp fetches ahead

  struct Shared {                          // the warps' tiles follow, then in their place the warps' results
    alignas(16) half q[kRows * kQStride];  // in the order of KeyFragment::place
    alignas(16) uint8_t k[kMaxNew * KeyTile::kRow], v[kMaxNew * ValueTile::kRow];  // this step's rows as the cache holds them
    alignas(16) uint8_t k_scale[kMaxNew * kGroups * 2], v_scale[kMaxNew * kGroups * 2];
    float max[kMost][kRows], sum[kMost][kRows];
    int token[kRows], head[kRows];
    float unit[kRows];  // of queries that are whole numbers
    alignas(16) int4 fours[3];
    bool last;
    // Of runs: the CTA's last chunk, how many CTAs have chunks of these rows, whether it has several.
    int last_chunk, runs, several;
    alignas(16) float scratch[kMost][D];       // this and what follows only until rows are made
    float fresh[kCoded ? 2 * kMaxNew : 1][D];  // new keys, then new values, before they are coded
  };
  static constexpr int kSharedBytes = (sizeof(Shared) + 127) / 128 * 128;

  const DecodeParams& p;
  Shared& sh;
  Item it;
  int thread, lane, warp, warps, g, t;  // lane = 4 g + t: row and pair of columns of the tensor cores' fragments
  int q_per_kv, rows, first_row, chunk_start, chunk_end, first_new;
  int run_end;     // of the CTA's last chunk, if it may have several
  int plain_end;   // tiles before it need neither mask, nor cap, nor new rows
  int hop, ahead;  // from a tile of the warp to its next; to the one fetched behind it
  int page_row;    // of the tile fetched last: page and head
  static_assert(kPage == 256, "shifts");
  int page_base, page_of_lane;  // 32 entries of the block table, one per lane
  int first_page, last_page;    // of the first and the last new token
  int new_from, fresh;          // first and number of the chunks' own new tokens
  Turn<kSlots> turn;            // of the new token turn_of
  int turn_of;
  int position[kN][2];  // of this lane's queries
  uint8_t* tiles;       // of this warp
  uint32_t q[kN][kPacked ? kColumns * kGroups : kSlots * 2][2];
  float unit[kN][2];
  int begin_of_sums[4];
  uint32_t sevens[2][4];                                                           // -7 in the rows of one group, or of its neighbour
  int place, piece;                                                                // of the lane's 16 bytes in a tile: read, written
  float zero[kN][has_scales(KF) ? kPacked ? kColumns * kGroups : kGroups : 1][2];  // what a group's sum begins with
  float level[kN][(kGroups + 1) / 2][4];                                           // what zero points add to the dims of two groups
  float o[kN][D / 16][4], row_max[kN][2], row_sum[kN][2];

  __device__ __forceinline__ Decode(const DecodeParams& params, uint8_t* shared) : p(params), sh(*reinterpret_cast<Shared*>(shared)) {
    unsigned here;
    asm volatile("mov.u32 %0,%%tid.x;" : "=r"(here));  // once: the compiler would read it again and again
    thread = static_cast<int>(here & 1023);
    lane = thread % 32;
    if constexpr (kPacked) lane = __shfl_sync(kAll, lane, lane);  // once, really
    warp = uniform(thread / 32), warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    q_per_kv = p.q_per_kv, tiles = shared + tiles_at() + warp * p.warp_bytes;
    if constexpr (kPacked) place = swizzled<D>(lane % 16 * (D / 2) + (kGroups % 2 ? 0 : lane / 16 * 16)), piece = swizzled<D>(lane * 16);
  }

  // --- where things are ---
  __device__ __forceinline__ int row_of(int n, int j) const { return kPacked ? n * 8 + t + 4 * j : n * 8 + 2 * t + j; }  // of column 2t + j
  __device__ __forceinline__ int token_of(int row) const {  // row / q_per_kv, without a division
    return q_per_kv == 1 ? row : static_cast<int>(__umulhi(static_cast<unsigned>(row), p.q_per_kv_inverse));
  }
  __device__ __forceinline__ int tiles_at() const { return RUNS ? p.tiles_at : kSharedBytes; }
  __device__ __forceinline__ int last_end() const { return RUNS ? run_end : chunk_end; }  // nothing behind it is fetched
  __device__ __forceinline__ int table(int page) const {
    return page < p.a.cache.max_pages ? p.a.cache.block_table[static_cast<int64_t>(it.b) * p.a.cache.max_pages + page] : 0;
  }
  __device__ __forceinline__ void fetch_pages(int token) {
    page_base = token / kPage;
    page_of_lane = (page_base + lane) * kPage < last_end() ? table(page_base + lane) : 0;
  }
  __device__ __forceinline__ int page_at(int token) const {
    return __shfl_sync(kAll, page_of_lane, (token >> 8) - page_base) * p.a.cache.num_kv_heads + it.kv_head;
  }
  __device__ __forceinline__ float* results(int w) const {
    uint8_t* const from = reinterpret_cast<uint8_t*>(&sh);
    if (RUNS && sh.several) return reinterpret_cast<float*>(from + p.results_at + w * p.result_bytes);
    return reinterpret_cast<float*>(from + tiles_at() + w * p.warp_bytes);
  }
  __device__ __forceinline__ bool begin(int index);
  __device__ __forceinline__ bool next_chunk();

  // --- the step's own rows: attention_decode_new.cuh ---
  struct Place {
    bool is_query, is_key;  // or a value
    int i, head;            // new token, head
  };
  __device__ __forceinline__ Place place_of(int r) const;
  __device__ __forceinline__ const float* row_at(int r) const;
  __device__ __forceinline__ void load_turn(int r);
  __device__ __forceinline__ void make_rows(bool wait);
  template <int F>
  __device__ __forceinline__ void encode_row(int i, int slot, bool key);
  template <int F>
  __device__ __forceinline__ void keep(const Coded& made, int i, int d, bool key);
  __device__ __forceinline__ void fetch_queries();

  // --- cached keys and values on their way into shared memory: attention_decode_tiles.cuh ---
  template <int F, bool KEYS>
  __device__ __forceinline__ void fetch(uint8_t* to, int token);
  template <int F, bool KEYS>
  __device__ __forceinline__ void complete(uint8_t* at, int token) const;
  __device__ __forceinline__ void await() const;

  // --- scores, softmax, values: attention_decode_keys.cuh ---
  __device__ __forceinline__ void clear();
  __device__ __forceinline__ void scale_levels(int n, const float (&f)[2]) {
    if constexpr (scales_in_probs(VF, D)) {
#pragma unroll
      for (int i = 0; i < (kGroups + 1) / 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) level[n][i][j] *= f[j % 2];
    }
  }
  __device__ __forceinline__ void scores(const uint8_t* at, float (&s)[kSubs][kN][4]);
  __device__ __forceinline__ void shape(int token, float (&s)[kN][4]);
  __device__ __forceinline__ void softmax(float (&s)[kSubs][kN][4]);
  __device__ __forceinline__ void make_room(const uint8_t* scales, float (&s)[kSubs][kN][4]);
  __device__ __forceinline__ void values(const uint8_t* at, const uint8_t* scales, const float (&s)[kN][4]);

  // --- both of 4 bits: attention_decode_packed.cuh ---
  __device__ __forceinline__ void fetch_both(uint8_t* to, int token);
  __device__ __forceinline__ void complete_both(uint8_t* at, int token) const;
  __device__ __forceinline__ void keep_whole(int r, const float (&x)[kSlots]);
  __device__ __forceinline__ void fetch_whole_queries();
  __device__ __forceinline__ void whole_scores(const uint8_t* at, float (&s)[kSubs][kN][4]);
  template <int G, bool TURNED>
  __device__ __forceinline__ void load_codes(uint32_t (&both)[4], uint32_t (&w)[2], uint32_t row, int sub) const;
  __device__ __forceinline__ void scale_row(int n, int j, float f);
  __device__ __forceinline__ void whole_softmax(float (&s)[kSubs][kN][4]);
  __device__ __forceinline__ void make_room_by_row(const uint8_t* scales, float (&s)[kSubs][kN][4]);
  __device__ __forceinline__ void whole_values(const uint8_t* at, const uint8_t* scales, float (&s)[kSubs][kN][4]);
  template <bool PLAIN>
  __device__ __forceinline__ void take(uint8_t* at, int token);
  __device__ __forceinline__ void walk_packed(int& stage);

  // --- results of warps and chunks: attention_decode_join.cuh ---
  __device__ __forceinline__ int64_t part_row(int r) const;
  __device__ __forceinline__ void join_warps();
  __device__ __forceinline__ bool comes_last() const;
  __device__ __forceinline__ void join_chunks();
  __device__ __forceinline__ int4 places(int r, int d) const;
  __device__ __forceinline__ void write(int r, int d, float4 x, int4 place, bool inside) const;

  __device__ __forceinline__ void look_ahead() const;
  __device__ __forceinline__ void look_up_turns() const;
  __device__ __forceinline__ void fetch_ahead(bool others);
  __device__ __forceinline__ void start();
  __device__ __forceinline__ void walk(int& stage);
};

template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ bool Decode<KF, VF, D, NT, RUNS>::begin(int index) {
  if (!find_item<kRows, kStep, RUNS>(p, index, it)) return false;
  const int oldest_query = uniform(it.context - it.queries);
  first_row = uniform(it.block * kRows);
  rows = uniform(min(it.queries * q_per_kv - first_row, kRows));
  chunk_start = uniform(it.chunks.start + it.chunk * it.chunks.size);
  const int newest = oldest_query + token_of(first_row + rows - 1);  // no row sees further
  const int stop = chunk_start + (RUNS ? it.run : 1) * it.chunks.size;
  run_end = uniform(min(stop, newest + 1));
  chunk_end = RUNS ? uniform(min(chunk_start + it.chunks.size, run_end)) : run_end;
  first_new = p.a.q ? uniform(it.context) : oldest_query;
  plain_end = p.a.softcap > 0.f || p.a.window > 0 ? 0 : min(first_new, oldest_query + token_of(first_row) + 1);
  hop = uniform(warps * kStep), ahead = kStages * hop;
  fetch_pages(chunk_start);
  new_from = max(first_new, chunk_start), fresh = max(min(it.context, stop) - new_from, 0), turn_of = -1;
  if (!p.a.q) first_page = table(oldest_query / kPage), last_page = table((it.context - 1) / kPage);
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) position[n][j] = oldest_query + token_of(first_row + row_of(n, j));
  if (RUNS && thread == 0) sh.last_chunk = it.chunk + it.run - 1, sh.runs = it.runs, sh.several = it.run > 1;
  if (thread < kRows) {
    const int r = first_row + thread, i = token_of(r);
    sh.token[thread] = it.first_token + i, sh.head[thread] = it.kv_head * q_per_kv + r - i * q_per_kv;
  }
  return true;
}

// The next chunk of the same rows, if there is one; its first tiles have been asked for.
template <int KF, int VF, int D, int NT, bool RUNS>
__device__ __forceinline__ bool Decode<KF, VF, D, NT, RUNS>::next_chunk() {
  if (!RUNS || it.chunk == sh.last_chunk) return false;
  it.chunk++, chunk_start += it.chunks.size, chunk_end = min(chunk_start + it.chunks.size, run_end);
  return true;
}

}  // namespace exl2nb
