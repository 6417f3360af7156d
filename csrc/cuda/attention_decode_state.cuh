// What a CTA of the decode kernel holds: the class whose methods stand in the files of the kernel's stages.
#pragma once
#include "attention_decode_items.cuh"
#include "attention_decode_math.cuh"

namespace exl2nb {

constexpr float kLowest = -1e30f;  // a maximum over nothing
constexpr float kLog2e = 1.4426950408889634f;

template <int KF, int VF, int D, int NT>
struct Decode {
  static constexpr int kSlots = (D + 31) / 32, kRows = 8 * NT, kTiles = bits_of(KF) * D <= 256 ? 2 : 1;
  static constexpr int kQStride = kSlots * 32 + 32;  // halves; lanes of a quarter warp read 16 bytes each from different banks
  static constexpr int kGroups = D / scale_group(D), kThreads = kWarps * 32, kPerThread = (kRows * D + kThreads - 1) / kThreads;
  using KeyShare = Share<KF, D, 4>;
  using ValueShare = Share<VF, D, 8>;
  using Key = KeyFragment<KF, D>;
  using Value = ValueFragment<VF, D>;

  struct Inputs {
    alignas(16) half q[kRows * kQStride];                                                    // in the order of KeyFragment::place
    alignas(16) uint8_t k[kMaxNew * D * bits_of(KF) / 8], v[kMaxNew * D * bits_of(VF) / 8];  // this step's rows as the cache holds them
    alignas(16) uint8_t k_scale[kMaxNew * kGroups * 2], v_scale[kMaxNew * kGroups * 2];
    float scratch[kWarps][D];
    float fresh[2 * kMaxNew][D];  // new keys, then new values, before they are stored
  };
  struct Shared {
    union {
      Inputs in;
      float o[kWarps][8][D];
    };
    float joined[kRows][D];
    float max[kWarps][kRows], sum[kWarps][kRows], inverse_sum[kRows];
    int token[kRows], head[kRows];
    bool last;
  };

  const DecodeParams& p;
  Shared& sh;
  Item it;
  int lane, warp, g, t;  // lane = 4 g + t: row and pair of columns of the tensor cores' fragments
  int q_per_kv, rows, first_row, chunk_start, chunk_end, first_new, old_end;
  int page_base, page_of_lane;  // 32 entries of the block table, one per lane
  int first_page, last_page;    // of the first and the last new token
  int position[NT][2];          // of this lane's queries
  uint32_t q[NT][(D + 31) / 32 * 2][2];
  KeyShare k[kTiles][2];
  ValueShare v[kTiles][4];
  float o[NT][D / 16][4], row_max[NT][2], row_sum[NT][2];

  __device__ __forceinline__ Decode(const DecodeParams& params, Shared& shared) : p(params), sh(shared) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    q_per_kv = p.q_per_kv;
  }

  // --- where things are ---
  __device__ __forceinline__ int token_of(int row) const {  // row / q_per_kv, without a division
    return q_per_kv == 1 ? row : static_cast<int>(__umulhi(static_cast<unsigned>(row), p.q_per_kv_inverse));
  }
  __device__ __forceinline__ int table(int page) const {
    return page < p.a.cache.max_pages ? p.a.cache.block_table[static_cast<int64_t>(it.b) * p.a.cache.max_pages + page] : 0;
  }
  __device__ __forceinline__ void fetch_pages(int token) {
    page_base = token / kPage;
    page_of_lane = (page_base + lane) * kPage < chunk_end ? table(page_base + lane) : 0;
  }
  __device__ __forceinline__ int64_t page_at(int token) const {
    return static_cast<int64_t>(__shfl_sync(kAll, page_of_lane, token / kPage - page_base)) * p.a.cache.num_kv_heads + it.kv_head;
  }
  __device__ __forceinline__ int tile_token(int step, int u) const { return chunk_start + (step * kTiles + u) * kUnit + warp * kTile; }
  __device__ __forceinline__ bool begin(int index);

  // --- the step's own rows: attention_decode_new.cuh ---
  __device__ __forceinline__ void make_rows(bool wait);
  template <int F>
  __device__ __forceinline__ void keep(const Coded& made, int i, int d, void* pool, uint8_t* codes, uint8_t* scales) const;
  __device__ __forceinline__ void fetch_queries();

  // --- codes of cached keys and values: attention_decode_tiles.cuh ---
  __device__ __forceinline__ void load_keys(int step);
  __device__ __forceinline__ void load_values(int step);
  template <int F, int LANES>
  __device__ __forceinline__ void take_new(Share<F, D, LANES>& share, const uint8_t* codes, const uint8_t* scales, int token,
                                           int part) const;

  // --- scores, softmax, values: attention_decode_keys.cuh ---
  __device__ __forceinline__ void clear();
  __device__ __forceinline__ void scores(int step, float (&s)[kTiles][NT][4]);
  __device__ __forceinline__ void shape(int token, float (&s)[NT][4]);
  __device__ __forceinline__ void softmax(float (&s)[kTiles][NT][4]);
  __device__ __forceinline__ void values(int step, const float (&s)[kTiles][NT][4]);

  // --- results of warps and chunks: attention_decode_join.cuh ---
  __device__ __forceinline__ int64_t part_row(int r) const;
  __device__ __forceinline__ float highest(int r) const;
  __device__ __forceinline__ void join_warps();
  __device__ __forceinline__ bool comes_last() const;
  __device__ __forceinline__ void join_row(int r, int n);
  __device__ __forceinline__ void finish();
  __device__ __forceinline__ void others(int64_t token, int feature, float x) const;

  __device__ __forceinline__ void walk(bool wait);
};

template <int KF, int VF, int D, int NT>
__device__ __forceinline__ bool Decode<KF, VF, D, NT>::begin(int index) {
  if (!find_item<NT>(p, index, it)) return false;
  rows = min(it.queries * q_per_kv - it.block * kRows, kRows);
  first_row = it.block * kRows;
  chunk_start = it.chunks.start + it.chunk * it.chunks.size;
  const int oldest_query = it.context - it.queries, newest = oldest_query + token_of(first_row + rows - 1);  // no row sees further
  chunk_end = min(chunk_start + it.chunks.size, newest + 1);
  first_new = p.a.q ? it.context : oldest_query;
  old_end = min(first_new, chunk_end);
  fetch_pages(chunk_start);
  if (!p.a.q) first_page = table(oldest_query / kPage), last_page = table((it.context - 1) / kPage);
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) position[n][j] = oldest_query + token_of(first_row + n * 8 + 2 * t + j);
  if (threadIdx.x < kRows) {
    const int r = first_row + threadIdx.x, i = token_of(r);
    sh.token[threadIdx.x] = it.first_token + i, sh.head[threadIdx.x] = it.kv_head * q_per_kv + r - i * q_per_kv;
  }
  return true;
}

}  // namespace exl2nb
