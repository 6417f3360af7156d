#include "pack.h"

#include <algorithm>
#include <cstring>

#include "../format/half.h"
#include "parallel.h"

namespace exl2nb {
namespace {

// ---------------------------------------------------------------- k-blocks of a quantised tile (the drawing in format/blob.h)
constexpr int64_t kFirstSection = sizeof(BlobHeader) + sizeof(BlobPart);

void write_header(uint8_t* blob, int64_t K, int64_t N, int64_t num_parts, int64_t bytes) {
  const BlobHeader h{kBlobMagic, kBlobVersion, int32_t(K), int32_t(N), int32_t(num_parts), bytes, {}};
  std::memcpy(blob, &h, sizeof h);
}

// Calls f(pair, low bit of the piece, width of the piece, word, bit in the half) for every piece of format/blob.h's drawing.
template <int B, class F>
void each_piece(const F& f) {
  constexpr int per = 16 / B;
  for (int p = 0; p < per * B; p++) f(p, 0, B, p / per, p % per * B);
  if (B == 3 || B == 5)
    for (int t = 0; t < B; t++) f(15, t, 1, t, 15);
  if (B == 6)
    for (int i = 0; i < 4; i++) {
      f(12 + i, 0, 4, i, 12);
      f(12 + i, 4, 2, 4 + i / 2, 12 + i % 2 * 2);
    }
}

// Codes of one k-block, one row of 16 columns after the other -> its words.
template <int B>
void pack_k_block(const uint32_t (*codes)[kTile], uint32_t* out) {
  std::memset(out, 0, sizeof(uint32_t) * B * kTile);
  each_piece<B>([&](int pair, int low, int width, int word, int bit) {
    const uint32_t mask = (1u << width) - 1;
    const uint32_t *even = codes[2 * pair], *odd = codes[2 * pair + 1];
    uint32_t* o = out + word * kTile;
    for (int c = 0; c < kTile; c++) o[c] |= (even[c] >> low & mask) << bit | (odd[c] >> low & mask) << (bit + 16);
  });
}

// The codes of one k-block of a tile.
template <int B>
void unpack_k_block(const uint32_t* w, uint32_t (*codes)[kTile]) {
  std::memset(codes, 0, sizeof(uint32_t) * kKBlockRows * kTile);
  each_piece<B>([&](int pair, int low, int width, int word, int bit) {
    const uint32_t mask = (1u << width) - 1;
    for (int c = 0; c < kTile; c++) {
      codes[2 * pair][c] |= (w[word * kTile + c] >> bit & mask) << low;
      codes[2 * pair + 1][c] |= (w[word * kTile + c] >> (bit + 16) & mask) << low;
    }
  });
}

template <template <int> class F, class... Args>
void by_width(int bits, Args... args) {
  switch (bits) {
    case 2:
      return F<2>::run(args...);
    case 3:
      return F<3>::run(args...);
    case 4:
      return F<4>::run(args...);
    case 5:
      return F<5>::run(args...);
    case 6:
      return F<6>::run(args...);
    default:
      return F<8>::run(args...);
  }
}
template <int B>
struct Unpack {
  static void run(const uint32_t* w, uint32_t (*codes)[kTile]) { unpack_k_block<B>(w, codes); }
};

// One k-block of 16 columns: the format's bit stream down each column -> codes, one row of 16 columns after the other.
template <int B>
void stream_to_codes(const uint32_t* w, int64_t stride, uint32_t (*codes)[kTile]) {
  for (int r = 0; r < kKBlockRows; r++) {
    const int at = r * B / 32, shift = r * B % 32;
    const uint32_t* low = w + at * stride;
    const uint32_t* high = w + (shift + B > 32 ? at + 1 : at) * stride;
    const int up = shift + B > 32 ? 32 - shift : 0;
    if (up)
      for (int c = 0; c < kTile; c++) codes[r][c] = (low[c] >> shift | high[c] << up) & ((1u << B) - 1);
    else
      for (int c = 0; c < kTile; c++) codes[r][c] = low[c] >> shift & ((1u << B) - 1);
  }
}

template <int B>
void pack_k_blocks(const uint32_t* w, int64_t stride, int k_blocks, uint32_t* out) {
  uint32_t codes[kKBlockRows][kTile];
  for (int u = 0; u < k_blocks; u++, w += B * stride, out += B * kTile) {
    stream_to_codes<B>(w, stride, codes);
    pack_k_block<B>(codes, out);
  }
}

template <int B>
struct Pack {
  static void run(const uint32_t* w, int64_t stride, int k_blocks, uint32_t* out) { pack_k_blocks<B>(w, stride, k_blocks, out); }
};
template <int B>
struct Stream {
  static void run(const uint32_t* w, int64_t stride, uint32_t (*codes)[kTile]) { stream_to_codes<B>(w, stride, codes); }
};

uint16_t step_bits(uint16_t scale_max, float prescale_256, int index) {
  const float m = half_to_float(float_to_half(half_to_float(scale_max) * prescale_256));
  return float_to_half(float((index + 1) * (index + 1)) * m);
}

int scale_index(const Exl2Source& s, int64_t g, int64_t column) {
  return int(s.q_scale[g * (s.N / 8) + column / 8] >> column % 8 * 4 & 15);
}

int64_t element(int kind) { return kind == kDenseF32 ? 4 : 2; }

}  // namespace

const char* read_groups(const Exl2Source& s, std::vector<BlobGroup>& groups) {
  groups.clear();
  if (s.G <= 0 || s.K <= 0 || s.K % kKBlockRows) return "K is not a positive multiple of 32 or there are no groups";
  int64_t row = 0, offset = align64(s.G * kScaleBytes);
  for (int64_t g = 0; g < s.G; g++) {
    const int bits = s.q_groups[2 * g];
    const int64_t first = uint16_t(s.q_groups[2 * g + 1]), end = g + 1 < s.G ? uint16_t(s.q_groups[2 * g + 3]) : s.R;
    if (bits < 2 || bits > 8 || bits == 7) return "a group's width is not 2, 3, 4, 5, 6 or 8";
    if (end <= first || end > s.R || (g == 0 && first != 0)) return "a group's first packed row is out of order";
    if ((end - first) % bits) return "a group's packed rows are no multiple of its width";
    const int64_t rows = (end - first) / bits * kKBlockRows;
    if (row + rows > s.K) return "the groups hold more rows than q_invperm";
    groups.push_back({bits, int32_t(row), int32_t(rows), int32_t(offset)});
    row += rows;
    offset += rows * bits * 2;
    if (offset > 0x7fffffff) return "the matrix is too large";
  }
  if (row != s.K) return "the groups hold fewer rows than q_invperm";
  std::vector<bool> seen(size_t(s.K), false);
  for (int64_t k = 0; k < s.K; k++) {
    const int32_t r = s.q_invperm[k];
    if (r < 0 || r >= s.K || seen[size_t(r)]) return "q_invperm is no permutation";
    seen[size_t(r)] = true;
  }
  return nullptr;
}

int64_t exl2_blob_bytes(const Exl2Source& s, const std::vector<BlobGroup>& groups, int64_t outputs) {
  const BlobGroup& last = groups.back();
  const int64_t tile_bytes = last.offset + int64_t(last.rows) * last.bits * 2, tiles = (outputs + kTile - 1) / kTile;
  return kFirstSection + align64(s.K * 4) + align64(s.G * int64_t(sizeof(BlobGroup))) + s.G * 64 + align64(tiles * tile_bytes);
}

void pack_exl2(const Exl2Source& s, const std::vector<BlobGroup>& groups, float prescale_256, int64_t outputs, uint8_t* blob) {
  const BlobGroup& last = groups.back();
  BlobPart part{};
  part.kind = kExl2;
  part.outputs = int32_t(outputs);
  part.tiles = int32_t((outputs + kTile - 1) / kTile);
  part.num_groups = int32_t(s.G);
  part.perm = kFirstSection;
  part.groups = part.perm + align64(s.K * 4);
  part.tables = part.groups + align64(s.G * int64_t(sizeof(BlobGroup)));
  part.data = part.tables + s.G * 64;
  part.tile_bytes = last.offset + int64_t(last.rows) * last.bits * 2;
  write_header(blob, s.K, outputs, 1, exl2_blob_bytes(s, groups, outputs));
  std::memcpy(blob + sizeof(BlobHeader), &part, sizeof part);
  std::memset(blob + part.perm, 0, size_t(part.data - part.perm));
  auto* perm = reinterpret_cast<int32_t*>(blob + part.perm);
  for (int64_t k = 0; k < s.K; k++) perm[s.q_invperm[k]] = int32_t(k);
  std::memcpy(blob + part.groups, groups.data(), groups.size() * sizeof(BlobGroup));
  auto* tables = reinterpret_cast<float*>(blob + part.tables);
  for (int64_t g = 0; g < s.G; g++)
    for (int i = 0; i < 16; i++) tables[16 * g + i] = half_to_float(step_bits(s.q_scale_max[g], prescale_256, i));
  for_each_task(part.tiles, s.K * outputs > 100'000, [&](int64_t t) {
    uint8_t* tile = blob + part.data + t * part.tile_bytes;
    std::memset(tile, 0, size_t(groups[0].offset));
    for (int64_t g = 0; g < s.G; g++) {
      std::memcpy(tile + kScaleBytes * g, s.q_scale + g * (s.N / 8) + 2 * t, kScaleBytes);  // 16 nibbles, low first, in both layouts
      const uint32_t* w = s.q_weight + int64_t(uint16_t(s.q_groups[2 * g + 1])) * s.N + t * kTile;
      by_width<Pack>(groups[size_t(g)].bits, w, s.N, groups[size_t(g)].rows / kKBlockRows,
                     reinterpret_cast<uint32_t*>(tile + groups[size_t(g)].offset));
    }
  });
}

void reconstruct(const Exl2Source& s, const std::vector<BlobGroup>& groups, uint16_t* out) {
  std::vector<int32_t> perm(size_t(s.K), 0);
  for (int64_t k = 0; k < s.K; k++) perm[size_t(s.q_invperm[k])] = int32_t(k);
  for_each_task(s.N / kTile, s.K * s.N > 50'000, [&](int64_t t) {
    uint32_t codes[kKBlockRows][kTile];
    for (int64_t g = 0; g < s.G; g++) {
      const BlobGroup& group = groups[size_t(g)];
      float step[kTile];
      for (int c = 0; c < kTile; c++) step[c] = half_to_float(step_bits(s.q_scale_max[g], 1.0f / 256, scale_index(s, g, t * kTile + c)));
      const uint32_t* w = s.q_weight + int64_t(uint16_t(s.q_groups[2 * g + 1])) * s.N + t * kTile;
      const float zero = float(1 << (group.bits - 1));
      for (int row = group.first_row; row < group.first_row + group.rows; row += kKBlockRows, w += group.bits * s.N) {
        by_width<Stream>(group.bits, w, s.N, codes);
        for (int r = 0; r < kKBlockRows; r++) {
          uint16_t* o = out + int64_t(perm[size_t(row + r)]) * s.N + t * kTile;
          for (int c = 0; c < kTile; c++) o[c] = float_to_half((float(codes[r][c]) - zero) * step[c]);
        }
      }
    }
  });
}

int64_t dense_blob_bytes(int64_t N, int64_t K, int kind) {
  return kFirstSection + align64((N + kTile - 1) / kTile * K * kTile * element(kind));
}

template <class T>
static void transpose_tiles(const T* weight, int64_t N, int64_t K, T* out) {
  for_each_task((N + kTile - 1) / kTile, N * K > 100'000, [&](int64_t t) {
    T* tile = out + t * K * kTile;
    for (int64_t c = 0; c < kTile; c++) {
      const bool real = t * kTile + c < N;
      const T* row = weight + (t * kTile + c) * K;
      for (int64_t k = 0; k < K; k++) tile[k * kTile + c] = real ? row[k] : T(0);
    }
  });
}

void pack_dense(const void* weight, int64_t N, int64_t K, int kind, uint8_t* blob) {
  BlobPart part{};
  part.kind = kind;
  part.outputs = int32_t(N);
  part.tiles = int32_t((N + kTile - 1) / kTile);
  part.data = kFirstSection;
  part.tile_bytes = K * kTile * element(kind);
  write_header(blob, K, N, 1, dense_blob_bytes(N, K, kind));
  std::memcpy(blob + sizeof(BlobHeader), &part, sizeof part);
  const int64_t used = part.data + part.tiles * part.tile_bytes, end = dense_blob_bytes(N, K, kind);
  std::memset(blob + used, 0, size_t(end - used));
  if (kind == kDenseF32)
    transpose_tiles(static_cast<const uint32_t*>(weight), N, K, reinterpret_cast<uint32_t*>(blob + part.data));
  else
    transpose_tiles(static_cast<const uint16_t*>(weight), N, K, reinterpret_cast<uint16_t*>(blob + part.data));
}

namespace {

// Where one section of a source blob goes; equal permutations go to one place.
struct Copy {
  const uint8_t* from;
  int64_t to, bytes;
};
struct Plan {
  std::vector<BlobPart> parts;
  std::vector<Copy> copies;
  int64_t K = 0, N = 0, bytes = 0;
};

Plan plan_concat(const std::vector<const uint8_t*>& blobs) {
  Plan plan;
  plan.K = header(blobs[0]).K;
  int64_t num_parts = 0;
  for (const uint8_t* b : blobs) num_parts += header(b).num_parts;
  int64_t at = sizeof(BlobHeader) + num_parts * int64_t(sizeof(BlobPart));
  auto put = [&](const uint8_t* from, int64_t bytes) {
    const int64_t to = at;
    plan.copies.push_back({from, to, bytes});
    at += align64(bytes);
    return to;
  };
  std::vector<Copy> perms;
  for (const uint8_t* b : blobs) {
    for (int i = 0; i < header(b).num_parts; i++) {
      BlobPart p = parts(b)[i];
      p.first_output = int32_t(plan.N);
      plan.N += p.outputs;
      if (p.perm) {
        const uint8_t* from = b + p.perm;
        const int64_t bytes = int64_t(stored_rows(b, parts(b)[i])) * 4;
        auto same = std::find_if(perms.begin(), perms.end(),
                                 [&](const Copy& c) { return c.bytes == bytes && !std::memcmp(c.from, from, size_t(bytes)); });
        if (same == perms.end()) {
          perms.push_back({from, put(from, bytes), bytes});
          same = perms.end() - 1;
        }
        p.perm = same->to;
      }
      if (quantised(p)) p.groups = put(b + p.groups, p.num_groups * int64_t(sizeof(BlobGroup)));
      if (p.kind == kExl2) p.tables = put(b + p.tables, p.num_groups * 64);
      p.data = put(b + p.data, p.tiles * p.tile_bytes);
      plan.parts.push_back(p);
    }
  }
  plan.bytes = at;
  return plan;
}

}  // namespace

// Zero point and step of a group's 16 columns.
static void column_values(const uint8_t* blob, const BlobPart& p, const uint8_t* tile, int g, float* zero, float* step) {
  const float middle = float(1 << (reinterpret_cast<const BlobGroup*>(blob + p.groups)[g].bits - 1));
  const bool wide = p.flags & kWideScales;
  for (int c = 0; c < kTile; c++) {
    const int64_t at = int64_t(g) * kTile + c;
    zero[c] = middle;
    if (p.kind == kExl2) {
      step[c] = reinterpret_cast<const float*>(blob + p.tables)[16 * g + (tile[kScaleBytes * g + c / 2] >> c % 2 * 4 & 15)];
      continue;
    }
    step[c] = wide ? reinterpret_cast<const float*>(tile)[at] : half_to_float(reinterpret_cast<const uint16_t*>(tile)[at]);
    if (p.flags & kZeros) zero[c] = reinterpret_cast<const uint16_t*>(tile + int64_t(p.num_groups) * kTile * (wide ? 4 : 2))[at];
  }
}

int64_t concat_bytes(const std::vector<const uint8_t*>& blobs) { return plan_concat(blobs).bytes; }

void pack_concat(const std::vector<const uint8_t*>& blobs, uint8_t* out) {
  const Plan plan = plan_concat(blobs);
  write_header(out, plan.K, plan.N, int64_t(plan.parts.size()), plan.bytes);
  std::memcpy(out + sizeof(BlobHeader), plan.parts.data(), plan.parts.size() * sizeof(BlobPart));
  for (const Copy& c : plan.copies) {
    std::memcpy(out + c.to, c.from, size_t(c.bytes));
    std::memset(out + c.to + c.bytes, 0, size_t(align64(c.bytes) - c.bytes));
  }
}

void unpack(const uint8_t* blob, float* out) {
  const BlobHeader& h = header(blob);
  const int64_t N = h.N;
  for (int i = 0; i < h.num_parts; i++) {
    const BlobPart& p = parts(blob)[i];
    for_each_task(p.tiles, int64_t(h.K) * p.outputs > 50'000, [&](int64_t t) {
      const uint8_t* tile = blob + p.data + t * p.tile_bytes;
      const int columns = std::min<int>(kTile, p.outputs - int(t) * kTile);
      float* to = out + p.first_output + t * kTile;
      if (!quantised(p)) {
        for (int64_t k = 0; k < h.K; k++)
          for (int c = 0; c < columns; c++) {
            const int64_t at = k * kTile + c;
            to[k * N + c] = p.kind == kDenseF32   ? reinterpret_cast<const float*>(tile)[at]
                            : p.kind == kDenseF16 ? half_to_float(reinterpret_cast<const uint16_t*>(tile)[at])
                                                  : bfloat_to_float(reinterpret_cast<const uint16_t*>(tile)[at]);
          }
        return;
      }
      const auto* groups = reinterpret_cast<const BlobGroup*>(blob + p.groups);
      const auto* perm = p.perm ? reinterpret_cast<const int32_t*>(blob + p.perm) : nullptr;
      uint32_t codes[kKBlockRows][kTile];
      for (int g = 0; g < p.num_groups; g++) {
        const auto* w = reinterpret_cast<const uint32_t*>(tile + groups[g].offset);
        float zero[kTile], step[kTile];
        column_values(blob, p, tile, g, zero, step);
        for (int row = groups[g].first_row; row < groups[g].first_row + groups[g].rows; row += kKBlockRows, w += groups[g].bits * kTile) {
          by_width<Unpack>(groups[g].bits, w, codes);
          for (int r = 0; r < kKBlockRows; r++) {
            const int64_t k = perm ? perm[row + r] : row + r;
            if (k == h.K) continue;  // padding
            for (int c = 0; c < columns; c++) to[k * N + c] = (float(codes[r][c]) - zero[c]) * step[c];
          }
        }
      }
    });
  }
}

// ---------------------------------------------------------------- GPTQ
namespace {

BlobPart part_of(const GptqSource& s) {
  BlobPart part{};
  part.kind = kGptq;
  part.flags = (s.zeros ? kZeros : 0) | (s.wide ? kWideScales : 0);
  part.outputs = int32_t(s.N);
  part.tiles = int32_t((s.N + kTile - 1) / kTile);
  part.num_groups = int32_t(s.G);
  part.perm = s.perm ? kFirstSection : 0;
  part.groups = kFirstSection + (s.perm ? align64(s.S * 4) : 0);
  part.data = part.groups + align64(s.G * int64_t(sizeof(BlobGroup)));
  return part;
}

// One stored row of 16 columns; columns past N and padding rows are zero.
template <int B>
struct Row {
  static void run(const GptqSource* source, int64_t row, int64_t column, int count, uint32_t* codes) {
    const GptqSource& s = *source;
    std::memset(codes, 0, sizeof(uint32_t) * kTile);
    if (row >= s.K) return;
    const int64_t at = row * B / 32, shift = row * B % 32;
    const uint32_t* low = s.qweight + at * s.N + column;
    const uint32_t* high = shift + B > 32 ? low + s.N : nullptr;
    for (int c = 0; c < count; c++) {
      const uint32_t bits = low[c] >> shift | (high ? high[c] << (32 - shift) : 0);
      codes[c] = bits & ((1u << B) - 1);
    }
  }
};

template <int B>
struct PackKBlock {
  static void run(const uint32_t (*codes)[kTile], uint32_t* out) { pack_k_block<B>(codes, out); }
};

// The columns of one group of a (G, N) array, zero past N.
template <class T>
void copy_columns(const T* from, int count, T* to) {
  std::memset(to, 0, sizeof(T) * kTile);
  std::memcpy(to, from, sizeof(T) * size_t(count));
}

void pack_tile(const GptqSource& s, const BlobPart& part, const std::vector<BlobGroup>& groups, int64_t t, uint8_t* tile) {
  const int64_t column = t * kTile;
  const int count = int(std::min<int64_t>(kTile, s.N - column));
  std::memset(tile, 0, size_t(prefix_bytes(part)));
  auto* zeros = reinterpret_cast<int16_t*>(tile + s.G * kTile * (s.wide ? 4 : 2));
  uint32_t codes[kKBlockRows][kTile];
  for (int64_t g = 0; g < s.G; g++) {
    const int64_t from = g * s.N + column, to = g * kTile;
    if (s.wide)
      copy_columns(static_cast<const float*>(s.scales) + from, count, reinterpret_cast<float*>(tile) + to);
    else
      copy_columns(static_cast<const uint16_t*>(s.scales) + from, count, reinterpret_cast<uint16_t*>(tile) + to);
    if (s.zeros) copy_columns(s.zeros + from, count, zeros + to);
    const BlobGroup& group = groups[size_t(g)];
    auto* out = reinterpret_cast<uint32_t*>(tile + group.offset);
    for (int64_t row = group.first_row; row < group.first_row + group.rows; row += kKBlockRows, out += s.bits * kTile) {
      for (int r = 0; r < kKBlockRows; r++) by_width<Row>(s.bits, &s, s.perm ? int64_t(s.perm[row + r]) : row + r, column, count, codes[r]);
      by_width<PackKBlock>(s.bits, codes, out);
    }
  }
}

}  // namespace

const char* read_groups(const GptqSource& s, std::vector<BlobGroup>& groups) {
  groups.clear();
  int64_t row = 0, offset = prefix_bytes(part_of(s));
  for (int64_t g = 0; g < s.G; g++) {
    if (s.rows[g] <= 0 || s.rows[g] % kKBlockRows) return "rows of a group are no positive multiple of 32";
    if (row + s.rows[g] > s.S) return "the groups hold more rows than are stored";
    groups.push_back({s.bits, int32_t(row), s.rows[g], int32_t(offset)});
    row += s.rows[g];
    offset += int64_t(s.rows[g]) * s.bits * 2;
    if (offset > 0x7fffffff) return "the matrix is too large";
  }
  if (row != s.S || row < s.K) return "the groups hold fewer rows than are stored";
  if (!s.perm) return s.S == s.K ? nullptr : "padding rows need a permutation";
  std::vector<bool> seen(size_t(s.K), false);
  int64_t found = 0;
  for (int64_t r = 0; r < s.S; r++) {
    const int32_t k = s.perm[r];
    if (k == s.K) continue;
    if (k < 0 || k > s.K || seen[size_t(k)]) return "perm does not name every row once";
    seen[size_t(k)] = true;
    found++;
  }
  return found == s.K ? nullptr : "perm does not name every row once";
}

int64_t gptq_blob_bytes(const GptqSource& s, const std::vector<BlobGroup>& groups) {
  const BlobGroup& last = groups.back();
  const BlobPart part = part_of(s);
  return part.data + align64(part.tiles * (last.offset + int64_t(last.rows) * last.bits * 2));
}

void pack_gptq(const GptqSource& s, const std::vector<BlobGroup>& groups, uint8_t* blob) {
  BlobPart part = part_of(s);
  const BlobGroup& last = groups.back();
  part.tile_bytes = last.offset + int64_t(last.rows) * last.bits * 2;
  const int64_t bytes = gptq_blob_bytes(s, groups), used = part.data + part.tiles * part.tile_bytes;
  write_header(blob, s.K, s.N, 1, bytes);
  std::memcpy(blob + sizeof(BlobHeader), &part, sizeof part);
  std::memset(blob + kFirstSection, 0, size_t(part.data - kFirstSection));
  std::memset(blob + used, 0, size_t(bytes - used));
  if (s.perm) std::memcpy(blob + part.perm, s.perm, size_t(s.S) * 4);
  std::memcpy(blob + part.groups, groups.data(), groups.size() * sizeof(BlobGroup));
  for_each_task(part.tiles, s.K * s.N > 100'000, [&](int64_t t) { pack_tile(s, part, groups, t, blob + part.data + t * part.tile_bytes); });
}

}  // namespace exl2nb
