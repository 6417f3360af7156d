// Skinny GEMM: 1 to 8 rows times a weight blob, every width in one kernel, with the epilogue fused.
//
// CTA (16 warps): whole strips of 16 columns; its warps split K by items, so no column is shared between CTAs: no atomics, and a row's bits
// depend neither on timing nor on other rows. Each warp streams its items (about 2 KB) through its own shared-memory ring, which is filled
// before griddepcontrol.wait (PDL), so loads run while the previous kernel ends. Activations come permuted, fp16, in fragment order
// (fragment.cuh) from the kernel that produced them; with few rows and a norm that cannot be fused into the previous GEMM, every CTA
// computes them from the residual (norm.cuh).
// Bytes: the strips once; 2 * K per row and CTA from L2, 4 * K where the CTA computes the norm. Paths: bulk copies (sm_90 and later),
// cp.async (sm_80), plain loads (sm_75).
#pragma once
#include "cuda/blob/item_mma.cuh"
#include "cuda/gemm/fragment.cuh"
#include "cuda/gemm/norm.cuh"
#include "cuda/moe/router.cuh"
#include "cuda/runtime/pdl.cuh"
#include "format/gpu_blob.h"

namespace exl2nb {

// Stages of a warp's ring; without asynchronous copies (sm_75, 64 KB of shared memory) prefetching gains nothing.
EXL2NB_BOTH constexpr int stages_of(int path) { return path == kPlain ? 1 : 2; }
EXL2NB_BOTH constexpr int num_bars(int path) { return stages_of(path) * kWarps + 2; }  // ring stages, activations, image
constexpr int kThreads = kWarps * 32, kSkinnyTokens = 8;
static_assert(kSkinnyTokens <= kWarps, "one warp per row of the residual");
static_assert(kThreads == kRowThreads, "norm.cuh assumes this CTA size");

struct GemmPart {
  const uint8_t* data;
  int first_strip, strips, first_column, outputs, perm;
  int shift, per_cta,
      rest;  // CTA b owns strip (b - shift) mod grid and every grid-th after it: `per_cta`, the first `rest` of them one more
  int64_t strip_bytes;
};

enum Epilogue { kStore = 0, kResidual = 1, kActivation = 2 };

struct GemmArgs {
  GemmPart part[kMaxParts];
  const uint8_t* head;                  // host copy of header and parts (gpu_blob.h)
  const uint8_t* image;                 // items, scale units and warp ends of all parts
  int num_parts, strips, items, units;  // sums over the parts
  int part_units[kMaxParts];
  int epilogue;   // Epilogue
  int tokens;     // 1 to 8
  int grid;       // CTAs
  int owned;      // columns of part 0 per CTA that need smem state
  int perms;      // permuted copies of the activations
  const half* x;  // [perm][row][stride]
  int x_stride, x_perm_stride;
  // Row m reads row min(rows[m], last_row) of x and squares; null: row m.
  const int* rows;
  int last_row;
  bool staged;  // activations are staged in shared memory
  // If from.x (then staged): activations are computed from these rows; inverse: as in MatrixInput.
  RowSource from;
  const int* inverse[MatrixInput::kMaxPerms];
  bool late;  // trigger the next kernel only after this one's wait, so that its predecessors are complete
  // Norm factor per row: 1 / sqrt(mean square + eps) from partial sums of squares [row][squares_count]; null: 1.
  const float* squares;
  int squares_count;
  float inverse_width, eps;
  const float* bias;
  int flush;  // strips per flush of partial sums
  // kStore: out[row][column].
  float* out;
  int64_t out_stride;
  // kResidual: residual[row][column] += scale * (y + bias); next.x: residual * next_norm goes there, with partial squares.
  float* residual;
  int residual_stride;
  float scale;
  const float* next_norm;
  float* next_squares;
  RouterTap router;  // router fused into the epilogue, with next_norm
  // kActivation: act(gate) * up (parts 0 and 1), or act(y) ungated, goes to next.
  MatrixInput next;
  int activation;
  bool gated;
};

EXL2NB_BOTH inline int padded_image(const GemmArgs& A) { return (image_bytes(A.items, A.units, A.num_parts) + 15) / 16 * 16; }

// A blob's image (gpu_blob.h) in shared memory.
struct BlobImage {
  const Item* items;
  const half2* steps;    // scale units
  const uint16_t* ends;  // first item of each warp, per part
  __device__ __forceinline__ BlobImage(const uint8_t* image, int num_items, int num_units)
      : items(reinterpret_cast<const Item*>(image)),
        steps(reinterpret_cast<const half2*>(image + image_steps(num_items))),
        ends(reinterpret_cast<const uint16_t*>(image + image_ends(num_items, num_units))) {}
};

// Position of a warp: part, strip, item.
struct ItemCursor {
  int part, item, first, end, left;  // left: strips of this part, including this one
};

// Assigns strips to CTAs: parts follow one another around the grid; strips of gate and up meet in one CTA. All divisions are done here, on
// the host.
EXL2NB_BOTH inline void assign_strips(GemmArgs& A) {
  const bool paired = A.epilogue == kActivation && A.gated;
  A.perms = 1;
  for (int p = 0; p < A.num_parts; p++) {
    GemmPart& P = A.part[p];
    P.shift = paired ? 0 : P.first_strip % A.grid, P.per_cta = P.strips / A.grid, P.rest = P.strips % A.grid;
    A.perms = P.perm < A.perms ? A.perms : P.perm + 1;
  }
  A.owned = A.epilogue == kStore ? 0 : (A.part[0].strips + A.grid - 1) / A.grid * 16;
}

// Host side (skinny_gemm.cpp).
struct Device;     // runtime/device.h
class LaunchList;  // runtime/launches.h
// Halves per row of a matrix's input: whole units plus 32, which the missing half of a last unit reads (finite numbers times zero weights)
// and which put rows into different shared-memory banks.
inline int input_stride(const GpuHeader& h) { return (h.stored + 63) / 64 * 64 + 32; }
void set_weights(GemmArgs& a, const uint8_t* head, const uint8_t* blob);
// Input buffer of a blob: x is half[num_perms][rows][input_stride], not grouped.
void set_input(MatrixInput& in, const uint8_t* head, const uint8_t* blob, half* x, int tokens);
int skinny_grid(const Device&, const GemmArgs& a, Epilogue e);
// Sets epilogue, grid and flush for at most eight rows. Returns the bytes of staged activations.
int skinny_split(const Device&, GemmArgs& a, Epilogue e);
// Whether the GEMM may compute its inputs from rows of `width` numbers itself (GemmArgs::from).
bool skinny_fuses_norm(const Device&, GemmArgs a, Epilogue e, int width);
int copy_path(const Device&);
// Moves all row pointers of `a` by `first` rows. grid: CTAs of the launch.
void skip_rows(GemmArgs& a, int first, int grid);
// Any number of rows, in launches of at most eight.
void plan_skinny(LaunchList&, GemmArgs a, Epilogue e);

// Shared memory beside the ring: the image, and work space at `at`.
struct SkinnySmem : BlobImage {
  float* factors;
  float* partial;  // double buffer: one barrier per flush
  // Per owned output of part 0: gate activations or old residuals; norm weights; places in the next input.
  float *kept, *norms;
  int* places;
  uint8_t* router;
  half* xs;
  int partial_size, owned;

  // Bytes before xs.
  static EXL2NB_BOTH int bytes(const GemmArgs& A) {
    const int n = (kSkinnyTokens + 2 * A.flush * kWarps * 16 * A.tokens + A.owned * (A.tokens + 1 + A.next.num_perms)) * 4;
    return (n + 15) / 16 * 16 + A.router.bytes(A.owned);
  }
  __device__ __forceinline__ SkinnySmem(const GemmArgs& A, const uint8_t* image, uint8_t* at) : BlobImage(image, A.items, A.units) {
    partial_size = A.flush * kWarps * 16 * A.tokens, owned = A.owned;
    factors = reinterpret_cast<float*>(at);
    partial = factors + kSkinnyTokens;
    kept = partial + 2 * partial_size;
    norms = kept + owned * A.tokens;
    places = reinterpret_cast<int*>(norms + owned);
    xs = reinterpret_cast<half*>(at + bytes(A));
    router = reinterpret_cast<uint8_t*>(xs) - A.router.bytes(owned);
  }
};

#ifdef __CUDACC__
// First strip of part p of CTA `block`.
__device__ __forceinline__ int first_strip(const GemmArgs& A, int block, int p) {
  const int s = block - A.part[p].shift;
  return s < 0 ? s + A.grid : s;
}
// Moves to part w.part, or the next part of which the CTA has strips; first item of this warp.
__device__ __forceinline__ void enter_part(const GemmArgs& A, const uint16_t* ends, int block, int warp, ItemCursor& w) {
#pragma unroll 1
  for (; w.part < A.num_parts; w.part++) {
    const GemmPart& P = A.part[w.part];
    w.left = P.per_cta + (first_strip(A, block, w.part) < P.rest ? 1 : 0);
    if (w.left == 0) continue;
    w.first = w.item = ends[w.part * kEnds + warp];
    w.end = ends[w.part * kEnds + warp + 1];
    return;
  }
}

// Constants of the owned outputs. Code that runs once is not unrolled, here and below: the first pass stalls on instruction fetch, about
// ten cycles per instruction.
__device__ __forceinline__ void load_owned(const GemmArgs& A, const SkinnySmem& S, int block) {
#pragma unroll 1
  for (int i = threadIdx.x; i < S.owned; i += kThreads) {
    const int column = (block + (i >> 4) * A.grid) * 16 + (i & 15);
    if (column >= A.part[0].outputs) continue;
    const float norm = A.next_norm ? __ldg(A.next_norm + column) : 0.f;
    int row[kMaxPerms];  // loads before stores: one round trip
#pragma unroll
    for (int p = 0; p < kMaxPerms; p++) row[p] = p < A.next.num_perms && A.next.inverse[p] ? __ldg(A.next.inverse[p] + column) : column;
    if (A.next_norm) S.norms[i] = norm;
#pragma unroll
    for (int p = 0; p < kMaxPerms; p++)
      if (p < A.next.num_perms) S.places[p * S.owned + i] = fragment_place(row[p]);
  }
}

// Strips of part 0 of CTA `block`, where part 0 starts at CTA 0.
__device__ __forceinline__ int owned_strips(const GemmArgs& A, int block) { return A.part[0].per_cta + (block < A.part[0].rest ? 1 : 0); }

__device__ __forceinline__ int row_of(const GemmArgs& A, int m) { return A.rows ? min(max(__ldcg(A.rows + m), 0), A.last_row) : m; }

// Activations in shared memory: copied, or computed from residual rows. before(): what depends on no earlier kernel. put(): true if bulk
// copies are in flight, counted by `bar`.
struct StagedInput {
  static __device__ __forceinline__ void before(const GemmArgs& A, const SkinnySmem& S) {
    if (!A.from.x) return;
    const int vectors = A.perms * A.tokens * A.x_stride / 8;
    for (int v = threadIdx.x; v < vectors; v += kThreads) reinterpret_cast<uint4*>(S.xs)[v] = make_uint4(0, 0, 0, 0);
    const auto touch = [&](const void* p) {  // prefetch
      if (p)
        for (int i = Row::place(0); i < A.from.norm.width; i += 4 * kThreads) prefetch_word(static_cast<const uint32_t*>(p) + i);
    };
    touch(A.from.norm.weight), touch(A.from.norm.bias), touch(A.from.post_norm);
    for (int p = 0; p < MatrixInput::kMaxPerms; p++) touch(A.inverse[p]);
  }
  template <int PATH>
  static __device__ __forceinline__ bool put(const GemmArgs& A, const SkinnySmem& S, int block, [[maybe_unused]] uint64_t* bar) {
    const int M = A.tokens, rows = A.perms * M;
    if (A.from.x) {
      auto& sums = *reinterpret_cast<RowSums*>(S.partial);
      Row row;
      for (int m = 0; m < M; m++) {
        row.load<false>(A.from, row_of(A, m), A.from.to && block == 0, sums);
        row.norm<false>(A.from.norm, nullptr, sums, [&](int i, float4 v) {
          put_input<false>(S.xs + m * A.x_stride, M * A.x_stride, A.perms, A.inverse, i, A.from.norm.width, v);
        });
      }
      return false;
    }
    const auto row = [&](int r) {
      const int perm = M == 1 ? r : r / M;
      return A.x + static_cast<size_t>(perm) * A.x_perm_stride + static_cast<size_t>(row_of(A, r - perm * M)) * A.x_stride;
    };
    if constexpr (PATH == kBulk) {
      static_assert(kMaxPerms * kSkinnyTokens <= 32, "one lane per row");
      if (threadIdx.x < 32) {
        if (threadIdx.x == 0) barrier_expect(bar, rows * A.x_stride * 2);
        __syncwarp();
        if (threadIdx.x < rows) bulk_copy(S.xs + threadIdx.x * A.x_stride, row(threadIdx.x), A.x_stride * 2, bar);
      }
      return true;
    } else {
#pragma unroll 1
      for (int r = 0; r < rows; r++) {
        const auto* from = reinterpret_cast<const uint4*>(row(r));
        auto* to = reinterpret_cast<uint4*>(S.xs + r * A.x_stride);
        for (int v = threadIdx.x; v < A.x_stride / 8; v += kThreads) to[v] = __ldcg(from + v);
      }
      return false;
    }
  }
};

// Old residuals and norm factors, written by earlier kernels; visible after the barrier of the first flush.
__device__ __forceinline__ void load_inputs(const GemmArgs& A, const SkinnySmem& S, int block, int warp, int lane) {
  if (warp >= A.tokens) return;
  float sum = 0.f;
  if (A.squares) {
    const float* const squares = A.squares + static_cast<size_t>(row_of(A, warp)) * A.squares_count;
    for (int i = lane; i < A.squares_count; i += 32) sum += __ldcg(squares + i);
  }
  if (A.epilogue == kResidual) {
#pragma unroll 1
    for (int i = lane; i < S.owned; i += 32) {
      const int column = (block + (i >> 4) * A.grid) * 16 + (i & 15);
      if (column < A.part[0].outputs)
        S.kept[warp * S.owned + i] = __ldcg(A.residual + static_cast<size_t>(warp) * A.residual_stride + column);
    }
  }
  const float factor = A.squares ? rsqrtf(warp_sum(sum) * A.inverse_width + A.eps) : 1.f;
  if (lane == 0) S.factors[warp] = factor;
}

// A warp's ring of items.
struct Ring {
  uint8_t* base;
  uint64_t* bars;
  int stages, stage;
  uint32_t phase;
};

// Consumer and epilogue. fetch refills a stage: called by lane 0 (kBulk) or by the whole warp.
template <int PATH, bool STAGED, class Fetch>
__device__ __forceinline__ void multiply(const GemmArgs& A, const SkinnySmem& S, Ring& ring, int block, int warp, int lane, Fetch fetch) {
  const int M = A.tokens, grid = A.grid, owned = S.owned;
  const bool paired = A.epilogue == kActivation && A.gated;
  const int g = lane >> 2, t = lane & 3;
  const bool live = g < M;
  const int row = !STAGED && live ? row_of(A, g) : g;
  const half* const x_lane = STAGED ? S.xs + g * A.x_stride + t * 8 : A.x + static_cast<size_t>(row) * A.x_stride + t * 8;
  ItemCursor c;
  c.part = 0;
  float squares = 0.f;
  float* sums = S.partial;
  for (enter_part(A, S.ends, block, warp, c); c.part < A.num_parts; c.part++, enter_part(A, S.ends, block, warp, c)) {
    const half* const x_part = x_lane + static_cast<size_t>(A.part[c.part].perm) * (STAGED ? M * A.x_stride : A.x_perm_stride);
    const int count = c.left, strip0 = first_strip(A, block, c.part);
    int before = 0, done = 0;  // strips done in this part; in this flush
    ItemDesc it(S.items[c.first < c.end ? c.first : 0]);
    for (int s = 0; s < count; s++) {
      float y[4] = {0, 0, 0, 0};
      for (int n = c.first; n < c.end; n++) {
        const uint8_t* st = ring.base + ring.stage * kMaxItemBytes;
        const half* x = x_part + it.block() * 32;
        const half2* u = S.steps + it.unit0();
        const ItemDesc next(S.items[n + 1 < c.end ? n + 1 : c.first]);
        if constexpr (PATH == kBulk) barrier_wait(ring.bars + ring.stage, ring.phase);
        if constexpr (PATH == kAsync) async_wait<stages_of(PATH) - 1>();
        if constexpr (PATH != kBulk) __syncwarp();
        compute_item<PATH, STAGED>(it, st, u, x, live, lane, y);
        __syncwarp();
        if (PATH != kBulk || lane == 0) fetch();
        if (++ring.stage == ring.stages) {
          ring.stage = 0;
          ring.phase ^= 1;
        }
        it = next;
      }
      float* p = sums + (done * kWarps + warp) * 16 * M;
      if (2 * t < M) p[2 * t * 16 + g] = y[0], p[2 * t * 16 + g + 8] = y[2];
      if (2 * t + 1 < M) p[(2 * t + 1) * 16 + g] = y[1], p[(2 * t + 1) * 16 + g + 8] = y[3];
      if (++done < A.flush && s + 1 < count) continue;
      __syncthreads();
      auto total = [&](int q, int m, int n) {  // strip q of this flush, row m, column n: warps in fixed order
        float v = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; w++) v += sums[((q * kWarps + w) * M + m) * 16 + n];
        return v * S.factors[m];
      };
      auto put = [&](int m, int i, float v) {  // into the next input; i: owned output
        const half h = saturated(v);
#pragma unroll 1
        for (int p = 0; p < A.next.num_perms; p++)
          A.next.x[static_cast<size_t>(p) * A.next.perm_stride + static_cast<size_t>(m) * A.next.stride + S.places[p * owned + i]] = h;
      };
      const GemmPart& P = A.part[c.part];
      if (A.epilogue == kResidual) {
        if (warp < M) {
#pragma unroll 1
          for (int r = lane; r < done * 16; r += 32) {
            const int i = before * 16 + r, column = (strip0 + (before + (r >> 4)) * grid) * 16 + (r & 15);
            if (column < P.outputs) {
              const float v = S.kept[warp * owned + i] + A.scale * (total(r >> 4, warp, r & 15) + (A.bias ? A.bias[column] : 0.f));
              A.residual[static_cast<size_t>(warp) * A.residual_stride + column] = v;
              S.kept[warp * owned + i] = v;
              squares = fmaf(v, v, squares);
              if (A.next_norm) put(warp, i, v * S.norms[i]);
            }
          }
        }
      } else {
#pragma unroll 1
        for (int e = threadIdx.x; e < done * 16 * M; e += kThreads) {
          const int m = e / (done * 16), r = e - m * done * 16, i = before * 16 + r;
          const int column = (strip0 + (before + (r >> 4)) * grid) * 16 + (r & 15);
          if (column >= P.outputs) continue;
          const float v = total(r >> 4, m, r & 15) + (A.bias ? A.bias[P.first_column + column] : 0.f);
          if (A.epilogue == kStore)
            A.out[m * A.out_stride + P.first_column + column] = v;
          else if (paired && c.part == 0)
            S.kept[m * owned + i] = activation(v, A.activation);
          else
            put(m, i, paired ? S.kept[m * owned + i] * v : activation(v, A.activation));
        }
      }
      before += done, done = 0;
      sums = sums == S.partial ? S.partial + S.partial_size : S.partial;
    }
  }
  if (A.epilogue == kResidual) {
    if (warp < M && A.next_norm) {
      squares = warp_sum(squares);
      if (lane == 0) A.next_squares[warp * grid + block] = squares;
    }
    if (A.router.out) tap_router<PATH>(A.router, S.kept, S.norms, S.router, M, owned, owned_strips(A, block), block, grid, warp, lane);
  }
}

// One kernel for all epilogues: its code stays in the instruction caches from one GEMM to the next. Before griddepcontrol.wait only data
// of no earlier kernel is touched.
template <int PATH, bool STAGED>
__global__ void __launch_bounds__(kThreads, 1) skinny_gemm(const __grid_constant__ GemmArgs A) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int block = blockIdx.x;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  constexpr int kStages = stages_of(PATH);
  uint8_t* const image = shared + kStages * kWarps * kMaxItemBytes;
  const int image_size = padded_image(A);
  uint64_t* const bars = reinterpret_cast<uint64_t*>(image + image_size);
  uint64_t *const x_bar = bars + kWarps * kStages, *const image_bar = x_bar + 1;
  const SkinnySmem S(A, image, reinterpret_cast<uint8_t*>(bars + num_bars(PATH)));
  Ring ring{shared + warp * kStages * kMaxItemBytes, bars + warp * kStages, kStages, 0, 0};

  if constexpr (PATH == kBulk) {
    if (threadIdx.x == 0) {
      barrier_init(x_bar, 1), barrier_init(image_bar, 1);
      barrier_fence();
      barrier_expect(image_bar, image_size);
      bulk_copy(image, A.image, image_size, image_bar);
    } else if (const int i = static_cast<int>(threadIdx.x) - 32; i >= 0 && i < kWarps * kStages) {
      barrier_init(bars + i, 1);
      barrier_fence();
    }
  } else {
    for (int i = threadIdx.x; i < image_size / 16; i += kThreads)
      reinterpret_cast<uint4*>(image)[i] = __ldg(reinterpret_cast<const uint4*>(A.image) + i);
  }
  load_owned(A, S, block);
  if (A.router.out) fetch_router<PATH>(A.router, S.router, owned_strips(A, block), block, A.grid);
  if constexpr (STAGED) StagedInput::before(A, S);
  __syncthreads();
  if constexpr (PATH == kBulk) barrier_wait(image_bar, 0);
  ItemCursor f;
  f.part = 0, f.left = 0;
  const uint8_t* f_strip = nullptr;
  int64_t f_hop = 0;
  auto f_enter = [&]() {
    for (enter_part(A, S.ends, block, warp, f); f.part < A.num_parts && f.first == f.end; f.part++, enter_part(A, S.ends, block, warp, f)) {
    }
    if (f.part < A.num_parts) {
      f_hop = A.grid * A.part[f.part].strip_bytes;
      f_strip = A.part[f.part].data + first_strip(A, block, f.part) * A.part[f.part].strip_bytes;
    }
  };
  f_enter();
  int f_stage = 0;
  auto fetch = [&]() {
    if (f.part < A.num_parts) {
      const Item it = S.items[f.item];
      fetch_item<PATH>(ring.base + f_stage * kMaxItemBytes, f_strip + it.offset, it.bytes, lane, ring.bars + f_stage);
      f_stage = f_stage + 1 == kStages ? 0 : f_stage + 1;
      if (++f.item == f.end) {
        f.item = f.first;
        f_strip += f_hop;
        if (--f.left == 0) {
          f.part++;
          f_enter();
        }
      }
    }
    if constexpr (PATH == kAsync) async_commit();
  };
  if (PATH != kBulk || lane == 0)
    for (int i = 0; i < kStages; i++) fetch();
  if (!A.late) pdl_launch_dependents();
  pdl_wait();
  if (A.late) pdl_launch_dependents();
  bool copying = false;
  if constexpr (STAGED) copying = StagedInput::put<PATH>(A, S, block, x_bar);
  load_inputs(A, S, block, warp, lane);
  if (copying)
    barrier_wait(x_bar, 0);
  else if constexpr (STAGED)
    __syncthreads();
  multiply<PATH, STAGED>(A, S, ring, block, warp, lane, fetch);
}

#endif  // __CUDACC__

}  // namespace exl2nb
