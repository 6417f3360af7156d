// What becomes of a tile's sums (many.cuh): outputs, the residual and the next input, or gates.
#pragma once
#include "many_share.cuh"

namespace exl2nb {

// What the outputs of each token are multiplied by: four tokens a warp.
__device__ __forceinline__ void load_factors(const ManyArgs& A, float* factors, int warp, int lane) {
  float sum[kManyTokens / kManyWarps] = {};
  if (A.squares)
    for (int i = lane; i < A.squares_count; i += 32)
#pragma unroll
      for (int k = 0; k < kManyTokens / kManyWarps; k++)
        if (warp + k * kManyWarps < A.tokens) sum[k] += __ldcg(A.squares + (warp + k * kManyWarps) * A.squares_count + i);
#pragma unroll
  for (int k = 0; k < kManyTokens / kManyWarps; k++) {
    const float factor = A.squares ? rsqrtf(warp_sum(sum[k]) * A.inverse_width + A.eps) : 1.f;
    if (lane == 0) factors[warp + k * kManyWarps] = factor;
  }
}
// A CTA's sums of a tile in registers into memory: four of a lane together, [strip][eight tokens][lane].
template <int NB>
__device__ __forceinline__ void lay_down(float* sums, int warp, int lane, const float (&y)[NB][4]) {
#pragma unroll
  for (int n = 0; n < NB; n++)
    __stcg(reinterpret_cast<float4*>(sums + ((warp * NB + n) * 32 + lane) * 4), float4{y[n][0], y[n][1], y[n][2], y[n][3]});
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
// The squares of 32 columns from all lanes.
__device__ __forceinline__ void put_squares(const ManyArgs& A, int token, int column, float (&squares)[2], int lane) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) squares[k] += __shfl_xor_sync(~0u, squares[k], d);
    if (lane < 4 && token + k < A.tokens)
      A.next_squares[static_cast<size_t>(token + k) * A.tiles * (kManyColumns / 32) + column / 32] = squares[k];
  }
}

__device__ __forceinline__ void store_one(const ManyArgs& A, const ManyTile& tile, const float* factors, int token, int inside, float v) {
  const ManyPart& P = A.part[tile.part];
  const int column = tile.first_strip * kStripColumns + inside, at = P.first_column + column;
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
      store_one(A, tile, factors, n * 8 + 2 * (lane & 3) + (k & 1), warp * kStripColumns + (lane >> 2) + (k >> 1) * 8, y[n][k]);
}
// As activation(), but for a quicker division.
__device__ __forceinline__ float gate_of(float v, int kind) { return kind == 0 ? __fdividef(v, 1.f + __expf(-v)) : activation(v, kind); }

// The CTAs that have left sums of a tile, and where.
struct ManySources {
  int first, count;                  // of the tile; the first one has its beginning
  int from0, count0, from1, count1;  // of its parts, the second one only where paired
  __device__ __forceinline__ ManySources(const ManyArgs& A, const ManyTile& tile) {
    first = from0 = many_owner(A, tile.begin), count = many_owner(A, tile.end() - 1) - first + 1;
    count0 = count, from1 = first, count1 = 0;
    if (A.paired) {
      const int middle = tile.part_end(A, 0);
      count0 = many_owner(A, middle - 1) - first + 1, from1 = many_owner(A, middle), count1 = first + count - from1;
    }
  }
};

// What becomes of the sums of a tile's CTAs. By the warps that multiply, all of them.
//
// Where several CTAs share a tile, those whose share ends in it write it, a part each, once all have left their sums. So a CTA waits for
// one tile only, at its end. Who has waited too long, since the others may not even run, leaves its part to the CTA that comes last.
template <int NB>
struct ManyWrite {
  const ManyArgs& A;
  const float* factors;
  // Of its last tile and of its first one, if that ends here: [1], [0] the meeting as it came; [2], [3] whose parts this CTA writes.
  unsigned long long* todo;
  int warp, lane;
  static constexpr int kClerk = kManyWorkers - 32;  // the thread that meets the other CTAs, of the warp that has least to write

  // Where a CTA leaves its sums of a part; began: of a tile that begins in its share.
  __device__ __forceinline__ float* place(int cta, bool began, int p) const {
    return A.partial + static_cast<size_t>((cta * 2 + began) * (A.paired ? 2 : 1) + p) * many_sums(NB);
  }
  __device__ __forceinline__ bool direct(bool whole) const { return whole && A.out && !A.paired; }

  // This CTA's sums of a part of a tile, of which it has the whole or a share.
  __device__ __forceinline__ void leave(const ManyTile& tile, int p, bool whole, const float (&y)[NB][4]) const {
    if (direct(whole))
      store_tile<NB>(A, tile, factors, warp, lane, y);
    else
      lay_down<NB>(place(blockIdx.x, tile.begin >= many_begin(A, blockIdx.x), p), warp, lane, y);
  }
  // This CTA has left what it has of a tile, up to `to` in the line.
  __device__ __forceinline__ void arrive(const ManyTile& tile, int to, bool whole) const {
    if (direct(whole)) return;
    workers_sync();
    if (whole) {
      const ManySources sources(A, tile);
      write(tile, sources, 1, 0);
      workers_sync();  // nobody reads what is overwritten next
      return;
    }
    unsigned long long* const word = &A.meetings[many_owner(A, tile.begin)].word;
    const int mine = to == many_begin(A, blockIdx.x + 1);
    if (threadIdx.x == kClerk) __threadfence(), todo[mine] = atomicAdd(word, 1ull);
    __syncwarp();
  }
  // Writes what is to be written of the tiles that this CTA shares: of the last one, and of the first one what others have left to it.
  __device__ __forceinline__ void meet() const {
    const int from = many_begin(A, blockIdx.x), to = many_begin(A, blockIdx.x + 1);
#pragma unroll 1
    for (int k = 0; k < 2; k++) {
      const ManyTile tile(A, k ? from : to - 1);
      if (k && (tile.begin >= from || tile.end() >= to)) break;  // it begins here, or is the last one
      const ManySources sources(A, tile);
      const bool shares = tile.begin < from || tile.end() > to, clerk = shares && threadIdx.x == kClerk;
      const int writers = sources.count - (many_begin(A, sources.first + sources.count) > tile.end());
      ManyMeeting& meeting = A.meetings[sources.first];
      unsigned left = 0;
      if (clerk) {
        const unsigned long long own = k ? 0 : 1ull << (blockIdx.x - sources.first);
        todo[2 + k] = wait(meeting, todo[1 - k], sources.count, own);
        left = atomicInc(&meeting.left, sources.count - 1) + 1;
      }
      workers_sync();
#pragma unroll 1
      for (unsigned long long parts = shares ? todo[2 + k] : 0; parts; parts &= parts - 1)
        write(tile, sources, writers, __ffsll(parts) - 1);
      if (clerk && left == static_cast<unsigned>(sources.count)) meeting.word = 0;
    }
  }

 private:
  // Whose parts this CTA writes. old: the meeting as it came; own: its own part, which it waits for, if any.
  __device__ __forceinline__ unsigned long long wait(ManyMeeting& meeting, unsigned long long old, int count,
                                                     unsigned long long own) const {
    const auto complete = [&](unsigned long long word) { return static_cast<int>(word & 0xffff) == count; };
    __threadfence();
    if (complete(old + 1)) return own | old >> 16;  // the last to come
    if (!own) return 0;
    const long long start = clock64();
    while (!complete(load_acquired(&meeting.word)))
      if (clock64() - start > A.patience) {
        const unsigned long long word = atomicOr(&meeting.word, own << 16);
        __threadfence();
        return complete(word) ? own : 0;
      }
    return own;
  }
  // The part of a tile that belongs to one of its writers: two strips and eight tokens a warp at a time.
  __device__ __forceinline__ void write(const ManyTile& tile, const ManySources& sources, int writers, int rank) const {
    constexpr int kPairs = kManyStrips / 2;
    const int all = (A.tokens + 7) / 8 * kPairs;
#pragma unroll 1
    for (int i = warp * writers + rank; i < all; i += kManyWarps * writers) {
      const int pair = i % kPairs, n = i / kPairs, token = n * 8 + 2 * (lane & 3);
      int inside = pair * 2 * kStripColumns + (lane >> 2);
      const int first = tile.first_strip * kStripColumns;
      Quad q[2] = {}, second[2] = {};
      QuadColumns to[2];
      if (!A.out) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          to[j].load(A, first + inside + j * kStripColumns);
          if (!A.paired) old_residual(A, token, first + inside + j * kStripColumns, second[j]);
        }
      }
      sum(sources, ((pair * 2 * NB + n) * 32 + lane) * 4, q, second);
      float squares[2] = {0.f, 0.f};
#pragma unroll 1
      for (int j = 0; j < 2; j++, inside += kStripColumns) {
        if (A.paired) {
          gates(token, first + inside, q[0], second[0]);
          put_quad(A, token, first + inside, q[0], to[0]);
        } else if (A.out) {
#pragma unroll
          for (int k = 0; k < 4; k++) store_one(A, tile, factors, token + (k & 1), inside + (k >> 1) * 8, q[0].v[k]);
        } else {
          add_quad(A, token, first + inside, factors, q[0], second[0], to[0], squares);
        }
        q[0] = q[1], second[0] = second[1], to[0] = to[1];
      }
      if (!A.out && !A.paired) put_squares(A, token, first + inside - 2 * kStripColumns, squares, lane);
    }
  }
  // The sums of the CTAs, in order, of the first part and the second.
  __device__ __forceinline__ void sum(const ManySources& s, int at, Quad (&q)[2], Quad (&second)[2]) const {
    constexpr int kTogether = 5;
    const int parts = A.paired ? 2 : 1;
#pragma unroll 1
    for (int p = 0; p < parts; p++) {
      const int from = p ? s.from1 : s.from0, count = p ? s.count1 : s.count0;
      const float* next = place(from, from == s.first, p) + at;
      const float* const others = place(from, false, p) + at;
      const size_t stride = static_cast<size_t>(many_sums(NB)) * 2 * parts;
#pragma unroll 1
      for (int base = 0; base < count; base += kTogether) {
        float4 part[kTogether][2];
#pragma unroll
        for (int r = 0; r < kTogether; r++) {
#pragma unroll
          for (int j = 0; j < 2; j++)
            part[r][j] = base + r < count ? __ldcg(reinterpret_cast<const float4*>(next + j * (NB * 128))) : float4{0, 0, 0, 0};
          next = others + (base + r + 1) * stride;
        }
#pragma unroll
        for (int r = 0; r < kTogether; r++)
#pragma unroll
          for (int j = 0; j < 2; j++) q[j].add(part[r][j]);
      }
      if (p + 1 < parts) second[0] = q[0], second[1] = q[1], q[0] = {}, q[1] = {};
    }
  }
  // q: of the second part, and then the gated product; g: of the first.
  __device__ __forceinline__ void gates(int token, int column, Quad& q, const Quad& g) const {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int t = token + (k & 1), c = column + (k >> 1) * 8;
      if (c >= A.part[0].outputs) continue;
      const float bias = A.bias ? __ldg(A.bias + c) : 0.f, bias_up = A.bias ? __ldg(A.bias + A.part[1].first_column + c) : 0.f;
      q.v[k] = gate_of(fmaf(g.v[k], factors[t], bias), A.activation) * fmaf(q.v[k], factors[t], bias_up);
    }
  }
};

}  // namespace exl2nb
