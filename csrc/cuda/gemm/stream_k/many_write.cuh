// What becomes of a tile's sums (many.cuh): outputs, the residual and the next input, or gates.
#pragma once
#include "cuda/gemm/stream_k/many_share.cuh"

namespace exl2nb {

// What the outputs of each token are multiplied by: up to four tokens a warp. Of many tokens the squares are asked for before the first
// activations, behind which they would come as late as they all do; where they lie is known before they are there.
template <int NB>
struct ManyFactors {
  static constexpr int kEach = NB * 8 / kManyWarps;
  const ManyArgs& A;
  const float* from[kEach];
  __device__ __forceinline__ ManyFactors(const ManyArgs& args, int warp, int lane) : A(args) {
#pragma unroll
    for (int k = 0; k < kEach; k++) {
      from[k] = A.squares + min(warp + k * kManyWarps, A.tokens - 1) * A.squares_count + lane * 4;
      asm volatile("" : "+l"(from[k]));
    }
  }
  __device__ __forceinline__ void load(float* factors, int warp, int lane) const {
    float sum[kEach] = {};
    if (A.squares)
#pragma unroll 1
      for (int base = 0; base < A.squares_count; base += 256) {
        const bool one = base + lane * 4 < A.squares_count, two = base + lane * 4 + 128 < A.squares_count;
        float4 v[kEach][2];
#pragma unroll
        for (int k = 0; k < kEach; k++)
          v[k][0] = one ? load_four(from[k] + base) : float4{0.f, 0.f, 0.f, 0.f},
          v[k][1] = two ? load_four(from[k] + base + 128) : float4{0.f, 0.f, 0.f, 0.f};
        if (NB > 2 && base + 256 >= A.squares_count) squares_asked();
#pragma unroll
        for (int k = 0; k < kEach; k++)
          sum[k] += ((v[k][0].x + v[k][0].y) + (v[k][0].z + v[k][0].w)) + ((v[k][1].x + v[k][1].y) + (v[k][1].z + v[k][1].w));
      }
#pragma unroll
    for (int k = 0; k < kEach; k++) {
      const float factor = A.squares ? rsqrtf(warp_sum(sum[k]) * A.inverse_width + A.eps) : 1.f;
      if (lane == 0) factors[warp + k * kManyWarps] = factor;
    }
  }
};
// What a warp keeps of its own sums: in the places of its strip's weights, once these are used up.
struct ManyKept {
  uint8_t* slot;  // of the first stage
  __device__ __forceinline__ float4* place(int k, int lane) const {
    constexpr int kEach = kSlot / 512;
    return reinterpret_cast<float4*>(slot + k / kEach * kManyWeights + k % kEach * 512) + lane;
  }
  __device__ __forceinline__ void put(int k, int lane, const float (&y)[4]) const {
    asm volatile("st.shared.v4.f32 [%0],{%1,%2,%3,%4};" ::"r"(shared_address(place(k, lane))), "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3])
                 : "memory");
  }
};

// A CTA's sums of a tile go to others through memory that is zero before and after: of four numbers that are written together the first
// is +0 where they are not written yet, and -0 where it is zero. Who reads them puts the zero back.
__device__ __forceinline__ float not_zero(float v) {  // in C++ it would cost the products of warp groups their overlap
  float w;
  asm volatile("{\n.reg .pred p;\nsetp.eq.f32 p,%1,0f00000000;\nselp.f32 %0,0f80000000,%1,p;\n}" : "=f"(w) : "f"(v));
  return w;
}
// The sums in registers into memory, of the tokens that there are: four of a lane together, [strip][eight tokens][lane]. But every
// `writers`-th eight tokens from `rank` on stay in the warp's own shared memory, where there is some; writers 0: none.
template <int NB>
__device__ __forceinline__ void lay_down(float* sums, int tokens, int warp, int lane, const float (&y)[NB][4], const ManyKept& kept,
                                         int writers, int rank) {
  int next = writers ? rank : NB, k = 0;
#pragma unroll
  for (int n = 0; n < NB; n++)
    if (n * 8 < tokens) {
      if (NB == 8 && n == next)
        kept.put(k++, lane, y[n]), next += writers;
      else
        store_for_all(sums + ((warp * NB + n) * 32 + lane) * 4, float4{not_zero(y[n][0]), y[n][1], y[n][2], y[n][3]});
    }
}
// What a lane has of a strip and eight tokens: v[k] is of column lane / 4 + 8 * (k / 2) and token 2 * (lane % 4) + k % 2. What is done with
// it runs once in a kernel, and then waits for its instructions: so strip by strip, in loops.
struct Quad {
  float v[4];
  __device__ __forceinline__ void add(float4 part) { v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w; }
};
// What is needed of a lane's two columns of a strip and no kernel writes: of the first copy of the next input the rows.
struct QuadColumns {
  int rows[2];
  float norm[2];
  __device__ __forceinline__ void load(const ManyArgs& A, int column) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int c = min(column + i * 8, A.part[0].outputs - 1);
      rows[i] = A.next.inverse[0] ? __ldg(A.next.inverse[0] + c) : c;
      norm[i] = A.next_norm ? __ldg(A.next_norm + c) : 1.f;
    }
  }
};
// Two tokens' numbers of the lane's columns into the next product's input.
__device__ __forceinline__ void put_quad(const ManyArgs& A, int token, int column, const Quad& q, const QuadColumns& to) {
  const MatrixInput& in = A.next;
  half* const x = in.x + token_place(in.group, in.stride, token);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int c = column + i * 8;
    if (c >= A.part[0].outputs) continue;
    const half2 v = __halves2half2(saturated(q.v[i * 2]), saturated(q.v[i * 2 + 1]));
    *reinterpret_cast<half2*>(x + row_place(in.group, to.rows[i])) = v;
#pragma unroll 1
    for (int p = 1; p < in.num_perms; p++)
      *reinterpret_cast<half2*>(x + static_cast<size_t>(p) * in.perm_stride +
                                row_place(in.group, in.inverse[p] ? __ldg(in.inverse[p] + c) : c)) = v;
  }
}
__device__ __forceinline__ void old_residual(const ManyArgs& A, int token, int column, Quad& old) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int t = token + (k & 1), c = column + (k >> 1) * 8;
    old.v[k] = t < A.tokens && c < A.part[0].outputs ? __ldcg(A.residual + static_cast<size_t>(t) * A.residual_stride + c) : 0.f;
  }
}
// Sums are added to the residual; what becomes of it goes to the next product.
__device__ __forceinline__ void add_quad(const ManyArgs& A, int token, int column, const float* factors, Quad& q, const Quad& old,
                                         const QuadColumns& to, float (&squares)[2]) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int t = token + (k & 1), c = column + (k >> 1) * 8;
    float v = 0.f;
    if (c < A.part[0].outputs) {
      v = old.v[k] + A.scale * fmaf(q.v[k], factors[t], A.bias ? __ldg(A.bias + c) : 0.f);
      if (t < A.tokens) A.residual[static_cast<size_t>(t) * A.residual_stride + c] = v;
      q.v[k] = v * to.norm[k >> 1];
    }
    squares[k & 1] = fmaf(v, v, squares[k & 1]);
  }
  put_quad(A, token, column, q, to);
}
// The squares of a strip's columns from all lanes.
__device__ __forceinline__ void put_squares(const ManyArgs& A, int token, int strip, float (&squares)[2], int lane) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) squares[k] += __shfl_xor_sync(~0u, squares[k], d);
    if (lane < 4 && token + k < A.tokens) A.next_squares[static_cast<size_t>(token + k) * A.tiles * kManyStrips + strip] = squares[k];
  }
}

__device__ __forceinline__ void store_one(const ManyArgs& A, int part, const float* factors, int token, int column, float v) {
  const ManyPart& P = A.part[part];
  const int at = P.first_column + column;
  if (token < A.tokens && column < P.outputs) A.out[token * A.out_stride + at] = v * factors[token] + (A.bias ? __ldg(A.bias + at) : 0.f);
}
// A tile that no other CTA shares, from registers to memory.
template <int NB>
__device__ __forceinline__ void store_tile(const ManyArgs& A, const ManyTile& tile, const float* factors, int warp, int lane,
                                           const float (&y)[NB][4]) {
#pragma unroll
  for (int n = 0; n < NB; n++)
#pragma unroll
    for (int k = 0; k < 4; k++)
      store_one(A, tile.part, factors, n * 8 + 2 * (lane & 3) + (k & 1),
                (tile.first_strip + warp) * kStripColumns + (lane >> 2) + (k >> 1) * 8, y[n][k]);
}

// The CTAs that have left sums of a tile, and which of them write it.
struct alignas(16) ManySources {
  int part, first_strip;  // the tile
  int first, count0;      // the CTAs: the first one has its beginning; how many have sums of its first part
  int from1, count1;      // of its second part, only where paired
  int writers, rank;      // writers 0: this CTA has nothing to write
  int own;                // of which part this CTA comes last to its sums of
  __device__ __forceinline__ ManySources(const ManyArgs& A, const ManyTile& tile) {
    part = tile.part, first_strip = tile.first_strip;
    first = from1 = many_owner(A, tile.begin), count0 = many_owner(A, tile.end() - 1) - first + 1, count1 = 0;
    writers = count0 - (many_begin(A, first + count0) > tile.end()), rank = static_cast<int>(blockIdx.x) - first;
    if (rank >= writers || count0 == 1) writers = 0;
    own = 0;
    if (A.paired) {
      const int middle = tile.part_end(A, 0), last = first + count0;
      count0 = many_owner(A, middle - 1) - first + 1, from1 = many_owner(A, middle), count1 = last - from1;
      own = many_begin(A, blockIdx.x + 1) > middle;
    }
  }
};

static_assert(sizeof(ManySources) == kManySources, "room in shared memory");

// What becomes of the sums of a tile's CTAs. By the warps that multiply, all of them.
//
// Where several CTAs share a tile, those whose share ends in it write it, a part each, as the sums of all come. So a CTA waits for one tile
// only, at its end. All CTAs must be there together, as those of a chain (chain.cuh). What runs once waits for its instructions, so what is
// to be done at the end is found out at the beginning, and lies in shared memory.
template <int NB>
struct ManyWrite {
  const ManyArgs& A;
  const float* factors;
  const ManySources* last;  // of this CTA's last tile
  uint64_t* ready;          // whether these two are there
  ManyKept kept;
  int warp, lane;

  // Where a CTA leaves its sums of a part; began: of a tile that begins in its share.
  __device__ __forceinline__ float* place(int cta, bool began, int p) const {
    return A.partial + static_cast<size_t>((cta * 2 + began) * (A.paired ? 2 : 1) + p) * many_sums(NB);
  }
  __device__ __forceinline__ bool direct(bool whole) const { return whole && A.out && !A.paired; }

  // This CTA's sums of a part of a tile, of which it has the whole or a share, up to `to` in the line.
  __device__ __forceinline__ void leave(const ManyTile& tile, int p, int to, bool whole, const float (&y)[NB][4]) const {
    if (direct(whole)) {
      barrier_wait(ready, 0);
      store_tile<NB>(A, tile, factors, warp, lane, y);
    } else {
      int writers = 0, rank = 0;
      if (NB == 8 && !whole && to == many_begin(A, blockIdx.x + 1)) {
        barrier_wait(ready, 0);
        if (p == last->own) writers = last->writers, rank = last->rank;
      }
      lay_down<NB>(place(blockIdx.x, tile.begin >= many_begin(A, blockIdx.x), p), A.tokens, warp, lane, y, kept, writers, rank);
    }
  }
  // What no other CTA shares goes on where it was left.
  __device__ __forceinline__ void finish(const ManyTile& tile, bool whole) const {
    if (!whole || direct(whole)) return;
    ManySources own(A, tile);
    own.writers = 1, own.own = -1;
    write(own);
    workers_sync();  // nobody reads what is overwritten next
  }
  // Writes what is to be written of the last tile.
  __device__ __forceinline__ void meet() const {
    barrier_wait(ready, 0);
    const ManySources s = *last;
    if (s.writers) write(s);
  }

 private:
  // The part of a tile that belongs to one of its writers: a strip and eight tokens a warp at a time. Of many tokens a warp has its own
  // strip, so that it need not ask for what it has summed itself; of few, strips are dealt to all, so that all write.
  __device__ __forceinline__ void write(const ManySources& s) const {
    const int all = (A.tokens + 7) / 8 * kManyStrips;
    const int from = NB == 8 ? s.rank * kManyStrips + warp : warp * s.writers + s.rank, step = kManyWarps * s.writers;
    barrier_wait(ready, 0);
    int k = 0;
#pragma unroll 1
    for (int i = from; i < all; i += step, k++) {
      const int strip = i % kManyStrips, n = i / kManyStrips, token = n * 8 + 2 * (lane & 3);
      const int column = (s.first_strip + strip) * kStripColumns + (lane >> 2);
      Quad q = {}, first = {}, old = {};
      QuadColumns to;
      if (!A.out) {
        to.load(A, column);
        if (!A.paired) old_residual(A, token, column, old);
      }
      sum(s, ((strip * NB + n) * 32 + lane) * 4, k, q, first);
      if (A.paired) {
        gates(token, column, q, first);
        put_quad(A, token, column, q, to);
      } else if (A.out) {
#pragma unroll
        for (int k = 0; k < 4; k++) store_one(A, s.part, factors, token + (k & 1), column + (k >> 1) * 8, q.v[k]);
      } else {
        float squares[2] = {0.f, 0.f};
        add_quad(A, token, column, factors, q, old, to, squares);
        put_squares(A, token, s.first_strip + strip, squares, lane);
      }
    }
  }
  // The sums of the CTAs, in order; where paired, of the second part, and of the first one.
  __device__ __forceinline__ void sum(const ManySources& s, int at, int k, Quad& q, Quad& first) const {
    constexpr int kTogether = 5;
    const int parts = A.paired ? 2 : 1;
    const size_t stride = static_cast<size_t>(many_sums(NB)) * 2 * parts;
#pragma unroll 1
    for (int p = 0; p < parts; p++) {
      const int from = p ? s.from1 : s.first, count = p ? s.count1 : s.count0;
      float* next = place(from, false, p) + at;
      const size_t ahead = from == s.first ? many_sums(NB) * parts : 0;  // of the one that has the tile's beginning
      first = q, q = {};
      const int own = NB == 8 && p == s.own ? static_cast<int>(blockIdx.x) - from : -1;  // the one that is kept here
#pragma unroll 1
      for (int base = 0; base < count; base += kTogether) {
        float4 part[kTogether];
#pragma unroll
        for (int r = 0; r < kTogether; r++)
          if (base + r < count)
            part[r] = base + r == own ? *kept.place(k, lane) : load_together(next + r * stride + (base + r ? 0 : ahead));
#pragma unroll
        for (int r = 0; r < kTogether; r++)
          if (base + r < count) {
            float* const from = next + r * stride + (base + r ? 0 : ahead);
            if (base + r != own) {
              while (!is_there(part[r])) part[r] = load_together(from);
              store_for_all(from, float4{0.f, 0.f, 0.f, 0.f});  // whole sectors are quicker than the one number
            }
            q.add(part[r]);
          }
        next += kTogether * stride;
      }
    }
  }
  // q: of the second part, and then the gated product; g: of the first.
  __device__ __forceinline__ void gates(int token, int column, Quad& q, const Quad& g) const {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int t = token + (k & 1), c = column + (k >> 1) * 8;
      if (c >= A.part[0].outputs) continue;
      const float bias = A.bias ? __ldg(A.bias + c) : 0.f, bias_up = A.bias ? __ldg(A.bias + A.part[1].first_column + c) : 0.f;
      q.v[k] = activation(fmaf(g.v[k], factors[t], bias), A.activation) * fmaf(q.v[k], factors[t], bias_up);
    }
  }
};

}  // namespace exl2nb
