// The first products of a sparse MLP: a CTA's strips of gate and up of one expert that a token visits, and their activation.
//
// Which expert that is, every CTA works out for itself, from what the product before has left. What the choice does not change is fetched
// while that is on its way: the table of matrices and, where all experts are laid out alike, which items there are; so one trip to memory
// lies between the choice and the first product. The expert that every token visits does not wait for the choice at all. Bytes: strips of
// the chosen matrices once per token; per CTA the token's row and what its router left.
#pragma once
#include "cuda/moe/moe.h"
#include "cuda/moe/moe_stream.cuh"

namespace exl2nb {

struct UpArgs {
  Choice choice;
  RowSource from;
  const ExpertMatrix *table, *next_table;
  ExpertMatrix
      usual[2];  // one that may be chosen, and the one that every token visits: what is the same for all is known without the table
  // CTAs of a token: `share` for each of top_k pairs, then `shared_share` for the last one.
  int share, shared_share, pairs, activation, x_stride, num_perms;
  int image, strips, flush;  // bytes of the largest image; strips that a CTA has at most, and that are summed at once
  RingShape ring;
  int room;                           // bytes of the ring, or of what lies in its place before it
  bool alike, table_near, sums_near;  // layouts; whether the table, and the router's sums, have room where the ring will be
  half* next;                         // [pair][stride]
  int next_stride;

  // Of the near table: of first matrices, and the permutations of the second ones' inputs.
  EXL2NB_BOTH int table_bytes() const { return choice.experts * static_cast<int>(sizeof(ExpertMatrix)) + (choice.experts + 1) / 2 * 16; }
};

// Of the dynamic shared memory.
struct UpShared {
  uint8_t *ring, *image;
  uint64_t* bars;  // of the ring, then of what arrives before, then of the router's sums
  float* sums;
  uint8_t* choice;  // Chosen
  int* places;
  Segment* segments;
  ushort2* ranges;
  half* xs;

  static EXL2NB_BOTH int bytes(const UpArgs& E) {
    return E.room + 8 * bars_of(E) + E.image + sums_bytes(E) + Chosen::bytes(E.choice) + E.strips * 64 +
           2 * static_cast<int>(sizeof(Segment) + kWarps * sizeof(ushort2)) + E.num_perms * E.x_stride * 2;
  }
  static EXL2NB_BOTH int bars_of(const UpArgs& E) { return kWarps * E.ring.stages + 2; }
  static EXL2NB_BOTH int sums_bytes(const UpArgs& E) { return (E.strips > E.flush ? 2 : 1) * E.flush * 2 * kWarps * 16 * 4; }
  __device__ __forceinline__ UpShared(const UpArgs& E, uint8_t* at) {
    ring = at;
    bars = reinterpret_cast<uint64_t*>(at + E.room);
    image = reinterpret_cast<uint8_t*>(bars + bars_of(E));
    sums = reinterpret_cast<float*>(image + E.image);
    choice = image + E.image + sums_bytes(E);
    segments = reinterpret_cast<Segment*>(choice + Chosen::bytes(E.choice));
    ranges = reinterpret_cast<ushort2*>(segments + 2);
    xs = reinterpret_cast<half*>(ranges + 2 * kWarps);
    places = reinterpret_cast<int*>(xs + E.num_perms * E.x_stride);
  }
};

// Each warp's items of both parts.
__device__ __forceinline__ void share_items(const UpShared& S, int items, int units) {
  if (const int i = threadIdx.x; i < 2 * kWarps) {
    const auto* const ends = reinterpret_cast<const uint16_t*>(S.image + image_ends(items, units)) + i / kWarps * kEnds;
    S.ranges[i] = ushort2{ends[i % kWarps], ends[i % kWarps + 1]};
  }
}

// A row's sum and sum of squares, for a router that has left none. A barrier follows the call.
__device__ __forceinline__ Scale scale_of_row(const NormArgs& n, const float* x, float* shared) {
  float sum = 0.f, squares = 0.f;
#pragma unroll 1
  for (int i = threadIdx.x; i < n.width; i += kThreads) {
    const float v = __ldcg(x + i);
    sum += v, squares = fmaf(v, v, squares);
  }
  sum = warp_sum(sum), squares = warp_sum(squares);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = sum, shared[kWarps + (threadIdx.x >> 5)] = squares;
  __syncthreads();
  sum = squares = 0.f;
  for (int w = 0; w < kWarps; w++) sum += shared[w], squares += shared[kWarps + w];
  const float mean = n.kind == kLayerNorm ? sum / n.width : 0.f;
  return n.kind == kNoNorm ? Scale{0.f, 1.f} : Scale{mean, rsqrtf(fmaxf(squares / n.width - mean * mean, 0.f) + n.eps)};
}

// Code that runs once waits for its instructions, about ten cycles for each: so there is little of it, and no loop of it is unrolled.
template <int PATH>
__global__ void __launch_bounds__(kThreads, PATH == kBulk ? 2 : 1) up_kernel(const __grid_constant__ UpArgs E) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ const int* inverses[3];  // of the matrix's inputs, and of those of the one that reads what this CTA makes
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.y, top_k = E.choice.top_k;
  const int at = blockIdx.x, place = at < top_k * E.share ? at / E.share : top_k, block = at - place * E.share;
  const int grid = place < top_k ? E.share : E.shared_share;
  const bool chooses = place < top_k, known = E.alike || !chooses;
  const UpShared S(E, shared);
  const Chosen chosen(E.choice, S.choice);
  // Where the ring will be: the table and the router's sums.
  auto* const near_table = reinterpret_cast<ExpertMatrix*>(shared);
  auto** const near_inverses = reinterpret_cast<const int**>(near_table + E.choice.experts);
  auto* const near_sums = reinterpret_cast<float*>(shared + (E.table_near ? E.table_bytes() : 0));
  Arrivals<PATH> arrivals{S.bars + kWarps * E.ring.stages}, sums_arrival{arrivals.bar + 1};

  init_barriers<PATH>(S.bars, UpShared::bars_of(E));
  const ExpertMatrix& usual = E.usual[!chooses];
  const int near = chooses && E.table_near ? E.choice.experts : 0;
  for (int i = threadIdx.x; i < near; i += kThreads) near_inverses[i] = E.next_table[i].inverse[0];
#pragma unroll 1
  for (int v = threadIdx.x; v < E.num_perms * E.x_stride / 8; v += kThreads) reinterpret_cast<uint4*>(S.xs)[v] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  const int usual_image = known ? (image_bytes(usual.items, usual.units, 2) + 15) / 16 * 16 : 0;
  arrivals.begin(usual_image + near * static_cast<int>(sizeof(ExpertMatrix)));
  if (known) arrivals.copy(S.image, usual.image, usual_image);
  if (near) arrivals.copy(near_table, E.table, near * static_cast<int>(sizeof(ExpertMatrix)));

  const auto take = [&](const ExpertMatrix& m, const int* const* next_inverse) {
    if (const int p = threadIdx.x; p < 2) {
      const GemvPart& part = m.part[p];
      S.segments[p] = {part.data + block * part.strip_bytes,
                       reinterpret_cast<const Item*>(S.image),
                       reinterpret_cast<const half2*>(S.image + image_steps(m.items)),
                       S.xs + part.perm * E.x_stride,
                       static_cast<int>(part.strip_bytes) * grid,
                       1.f};
      inverses[p] = m.inverse[p];
      if (p == 0) inverses[2] = *next_inverse;
    }
    return m.num_perms;
  };
  const int strips = (usual.part[0].strips - block + grid - 1) / grid;  // all experts have as many
  const Stream stream{S.segments, S.ranges, S.ring, S.bars, E.ring, 2, strips};
  int perms = 0;
  if (!chooses) {
    arrivals.wait();
    share_items(S, usual.items, usual.units);
    perms = take(usual, &E.next_table[E.choice.experts].inverse[0]);
    __syncthreads();
  }
  Fetcher<PATH> fetch(stream, warp, lane, !chooses);
  if (!chooses) fetch.fill();
  pdl_wait();
  pdl_launch_dependents();  // now, so that what the next kernel finds is as old as what this one has found
  const bool sums_near = chooses && E.sums_near;
  if (sums_near) {
    sums_arrival.begin(E.choice.bytes());
    sums_arrival.copy(near_sums, reinterpret_cast<const uint8_t*>(E.choice.sums) + static_cast<size_t>(token) * E.choice.bytes(),
                      E.choice.bytes());
    sums_arrival.wait();
  }
  add_up(E.choice, chosen, sums_near ? near_sums : nullptr, token, chooses ? 0 : E.choice.rows * E.choice.stride);
  if (chooses) {
    arrivals.wait();
    if (known) share_items(S, usual.items, usual.units);
  }
  __syncthreads();
  const NormArgs& n = E.from.norm;
  const float* const x = E.from.x + static_cast<size_t>(token) * n.width;
  const Scale norm = E.choice.kind == n.kind ? scale_of(E.choice, chosen) : scale_of_row(n, x, S.sums);
  if (chooses) {
    rank(E.choice, chosen, E.choice.kind == n.kind ? norm : Scale{0.f, 1.f});
    const int number = chosen.ranked[place];
    const ExpertMatrix& m = E.table_near ? near_table[number] : E.table[number];
    perms = take(m, E.table_near ? near_inverses + number : &E.next_table[number].inverse[0]);
    const int first = E.alike ? image_steps(m.items) : 0;  // the scales' steps, or all
    const int bytes = E.alike ? image_ends(m.items, m.units) - first : (image_bytes(m.items, m.units, 2) + 15) / 16 * 16;
    arrivals.begin(bytes);
    arrivals.copy(S.image + first, m.image + first, bytes);
    if (!E.alike) {
      arrivals.wait();
      share_items(S, m.items, m.units);
    }
    if constexpr (PATH == kBulk) barrier_fence();  // what was read and written here, before bulk copies go there
    __syncthreads();
    fetch.next();
    fetch.fill();
  }
  // Where what this CTA makes goes; the first of a thread, which mostly is the only one, is under way while the row is scattered.
  const int outputs = usual.part[0].outputs;
  const int* const inverse = inverses[2];
  const auto column_of = [&](int i) { return (block + (i >> 4) * grid) * 16 + (i & 15); };
  const auto row_of_column = [&](int i) { return inverse && column_of(i) < outputs ? __ldg(inverse + column_of(i)) : column_of(i); };
  const int own = threadIdx.x < strips * 16 ? row_of_column(threadIdx.x) : 0;
#pragma unroll 1
  for (int i = Row::place(0); i < n.width; i += 4 * kThreads) {
    float4 v = written<false>(x, i, n.width);
    v.x = (v.x - norm.mean) * norm.factor, v.y = (v.y - norm.mean) * norm.factor;
    v.z = (v.z - norm.mean) * norm.factor, v.w = (v.w - norm.mean) * norm.factor;
    if (n.weight) {
      const float4 w = constant<false>(n.weight, i, n.width);
      v.x *= w.x, v.y *= w.y, v.z *= w.z, v.w *= w.w;
    }
    if (n.bias) {
      const float4 b = constant<false>(n.bias, i, n.width);
      v.x += b.x, v.y += b.y, v.z += b.z, v.w += b.w;
    }
    put_input<false>(S.xs, E.x_stride, perms, inverses, i, n.width, v);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < strips * 16; i += kThreads) S.places[i] = fragment_place(i < kThreads ? own : row_of_column(i));
  if (chooses && E.alike) arrivals.wait();
  __syncthreads();
  half* const next = E.next + static_cast<size_t>(token * E.pairs + place) * E.next_stride;
  run_stream<PATH, true, false>(stream, fetch, S.sums, E.flush, warp, lane, [&](const float* sums, int first, int count) {
#pragma unroll 1
    for (int s = warp; s < count; s += kWarps) {  // half a warp for the gate, half for what it lets pass
      float v = over_warps(sums + (s * 2 + (lane >> 4)) * kWarps * 16 + (lane & 15));
      const float up = __shfl_down_sync(0xffffffffu, v, 16);
      const int i = (first + s) * 16 + lane;
      if (lane < 16 && column_of(i) < outputs) next[S.places[i]] = saturated(activation(v, E.activation) * up);
    }
  });
}

}  // namespace exl2nb
