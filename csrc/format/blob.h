// The weight blob: what `pack_*` makes and the CPU kernels read. Little-endian, every section starts at a multiple of 64 bytes.
//
//   Header (64 bytes)          magic, version, K, N, num_parts, total bytes
//   Part[num_parts] (64 each)  kind, outputs, tiles, groups, first output, offsets of the sections below (from the start of the blob)
//   per part:
//     perm     int32 (S,)      stored row -> original input feature; offset 0 = identity. Parts with equal permutations share one.
//                              S = K; GPTQ: every group is padded to whole k-blocks, S is their sum, and a padding row's entry is K
//     groups   Group[G]        EXL2, GPTQ: bits, first stored row, rows, byte offset of the group's first k-block inside a tile
//     tables   float (G, 16)   EXL2 only: step size of scale index 0..15, already rounded as the format says: fp16(fp16((i+1)^2) * m)
//     tiles    (tiles, tile_bytes)
//
// A tile is 16 output columns over all stored rows.
//   dense: (K, 16) elements of the part's dtype, columns past the last output zero.
//   EXL2:  scale indices, 8 bytes per group (column c: nibble c, low first), padded to 64 bytes; then the k-blocks, groups in order.
//   GPTQ:  scales (G, 16) f16 or, with kWideScales, f32; with kZeros zeros (G, 16) u16; padded to 64 bytes; then the k-blocks.
// A k-block is 32 stored rows x 16 columns x b bits: b words per column, word w of column c at ((w * 16) + c) * 4.
// A word has two 16-bit halves: the low one belongs to even rows, the high one to odd rows. Pair p = rows (2p, 2p + 1), p = 0..15, so
// `(word >> shift) & mask` is the pair of codes as two int16, ready for pmaddwd. Inside a half (the same bits in both halves):
//
//   b=2  pair 8w+j at bit 2j      w 0..1  j 0..7
//   b=4  pair 4w+j at bit 4j      w 0..3  j 0..3
//   b=8  pair 2w+j at bit 8j      w 0..7  j 0..1
//   b=3  pair 5w+j at bit 3j      w 0..2  j 0..4    pair 15: its bit t is bit 15 of word t
//   b=5  pair 3w+j at bit 5j      w 0..4  j 0..2    pair 15: its bit t is bit 15 of word t
//   b=6  pair 2w+j at bit 6j      w 0..5  j 0..1    pair 12+i: bits 0-3 are bits 12-15 of word i,
//                                                   bits 4-5 are bits 12-13 (i even) or 14-15 (i odd) of word 4 + i/2
// Codes are offset binary: value = (code - 2^(b-1)) * table[g][index]; GPTQ: (code - zero[g]) * scale[g], the zero 2^(b-1) without kZeros.
#pragma once
#include <cstdint>

namespace exl2nb {

constexpr int64_t kBlobMagic = 0x3157424e324c5845;  // "EXL2NBW1"
constexpr int32_t kBlobVersion = 1;
constexpr int kTile = 16, kKBlockRows = 32, kAlign = 64, kScaleBytes = 8;

enum Kind : int32_t { kDenseF32 = 0, kDenseF16 = 1, kDenseBF16 = 2, kExl2 = 3, kGptq = 4 };
enum Flags : int32_t { kZeros = 1, kWideScales = 2 };  // of a GPTQ part; others have none

struct BlobHeader {
  int64_t magic;
  int32_t version, K, N, num_parts;
  int64_t bytes;
  int64_t reserved[4];
};
struct BlobPart {
  int32_t kind, outputs, tiles, num_groups, first_output, flags;
  int64_t perm, groups, tables, data, tile_bytes;
};
struct BlobGroup {
  int32_t bits, first_row, rows, offset;
};
static_assert(sizeof(BlobHeader) == 64 && sizeof(BlobPart) == 64 && sizeof(BlobGroup) == 16, "blob layout");

inline int64_t align64(int64_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

// Returns nullptr where the blob is consistent, otherwise what is wrong. Checks everything the kernels index with.
const char* check_blob(const uint8_t* blob, int64_t bytes);
inline const BlobHeader& header(const uint8_t* blob) { return *reinterpret_cast<const BlobHeader*>(blob); }
inline const BlobPart* parts(const uint8_t* blob) { return reinterpret_cast<const BlobPart*>(blob + sizeof(BlobHeader)); }
inline bool quantised(const BlobPart& p) { return p.kind == kExl2 || p.kind == kGptq; }
// Bytes at the start of a quantised tile, before its k-blocks.
inline int64_t prefix_bytes(const BlobPart& p) {
  const int64_t column = p.flags & kWideScales ? 4 : 2,
                group = p.kind == kExl2 ? kScaleBytes : kTile * (column + (p.flags & kZeros ? 2 : 0));
  return align64(p.num_groups * group);
}
// S of the drawing.
inline int32_t stored_rows(const uint8_t* blob, const BlobPart& p) {
  if (p.kind != kGptq) return header(blob).K;
  const auto& last = reinterpret_cast<const BlobGroup*>(blob + p.groups)[p.num_groups - 1];
  return last.first_row + last.rows;
}

}  // namespace exl2nb
