// GPTQ checkpoints into the blob: rows sorted by group, so that act-order costs nothing after loading.
#include <algorithm>
#include <cstring>

#include "pack.h"
#include "parallel.h"
#include "units.h"

namespace exl2nb {
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
struct PackUnit {
  static void run(const uint32_t (*codes)[kTile], uint32_t* out) { pack_unit<B>(codes, out); }
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
  uint32_t codes[kUnit][kTile];
  for (int64_t g = 0; g < s.G; g++) {
    const int64_t from = g * s.N + column, to = g * kTile;
    if (s.wide)
      copy_columns(static_cast<const float*>(s.scales) + from, count, reinterpret_cast<float*>(tile) + to);
    else
      copy_columns(static_cast<const uint16_t*>(s.scales) + from, count, reinterpret_cast<uint16_t*>(tile) + to);
    if (s.zeros) copy_columns(s.zeros + from, count, zeros + to);
    const BlobGroup& group = groups[size_t(g)];
    auto* out = reinterpret_cast<uint32_t*>(tile + group.offset);
    for (int64_t row = group.first_row; row < group.first_row + group.rows; row += kUnit, out += s.bits * kTile) {
      for (int r = 0; r < kUnit; r++) by_width<Row>(s.bits, &s, s.perm ? int64_t(s.perm[row + r]) : row + r, column, count, codes[r]);
      by_width<PackUnit>(s.bits, codes, out);
    }
  }
}

}  // namespace

const char* read_groups(const GptqSource& s, std::vector<BlobGroup>& groups) {
  groups.clear();
  int64_t row = 0, offset = prefix_bytes(part_of(s));
  for (int64_t g = 0; g < s.G; g++) {
    if (s.rows[g] <= 0 || s.rows[g] % kUnit) return "rows of a group are no positive multiple of 32";
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
