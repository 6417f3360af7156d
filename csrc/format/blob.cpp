#include "blob.h"

namespace exl2nb {
namespace {

bool inside(int64_t offset, int64_t size, int64_t bytes) {
  return offset >= 0 && offset % kAlign == 0 && size >= 0 && offset <= bytes && size <= bytes - offset;
}

const char* check_quantised(const uint8_t* blob, int64_t bytes, int K, const BlobPart& p) {
  const bool exl2 = p.kind == kExl2;
  if (exl2 && K % kKBlockRows) return "K of an EXL2 part is no multiple of 32";
  if (p.flags & ~(exl2 ? 0 : kZeros | kWideScales)) return "a part has unknown flags";
  if (p.num_groups <= 0 || p.num_groups > (exl2 ? K / kKBlockRows : K)) return "number of groups is wrong";
  if (!inside(p.groups, int64_t(p.num_groups) * sizeof(BlobGroup), bytes)) return "group table is outside";
  if (exl2 && !inside(p.tables, int64_t(p.num_groups) * 64, bytes)) return "step tables are outside";
  const auto* groups = reinterpret_cast<const BlobGroup*>(blob + p.groups);
  const int64_t most = exl2 ? K : int64_t(K) * kKBlockRows;  // padding: at most a k-block per row
  int64_t row = 0, offset = prefix_bytes(p);
  for (int g = 0; g < p.num_groups; g++) {
    const BlobGroup& group = groups[g];
    const int b = group.bits;
    if (b < 2 || b > 8 || b == 7) return "a group's width is not 2, 3, 4, 5, 6 or 8";
    if (group.first_row != row || group.rows <= 0 || group.rows % kKBlockRows || group.offset != offset) return "group table is wrong";
    row += group.rows;
    offset += int64_t(group.rows) * b * 2;
    if (row > most || row > 0x7fffffff - kKBlockRows) return "groups hold more rows than K";
  }
  if (row < K) return "groups hold fewer rows than K";
  if (p.tile_bytes != offset) return "tile size is wrong";
  if (!p.perm && row != K) return "a padded part has no permutation";
  if (p.perm) {
    if (!inside(p.perm, row * 4, bytes)) return "permutation is outside";
    const auto* perm = reinterpret_cast<const int32_t*>(blob + p.perm);
    for (int64_t r = 0; r < row; r++)
      if (uint32_t(perm[r]) >= uint32_t(exl2 ? K : K + 1)) return "permutation holds an index outside 0..K-1";
  }
  return nullptr;
}

}  // namespace

const char* check_blob(const uint8_t* blob, int64_t bytes) {
  if (bytes < int64_t(sizeof(BlobHeader))) return "too short for a header";
  if (reinterpret_cast<uintptr_t>(blob) % 8) return "not aligned to 8 bytes";
  const BlobHeader& h = header(blob);
  if (h.magic != kBlobMagic || h.version != kBlobVersion) return "no valid header";
  if (h.bytes != bytes) return "size differs from the header";
  if (h.K <= 0 || h.N <= 0 || h.num_parts <= 0) return "empty";
  if (h.num_parts > 4096 || !inside(sizeof(BlobHeader), int64_t(h.num_parts) * sizeof(BlobPart), bytes)) return "part table is outside";
  int64_t first = 0;
  for (int i = 0; i < h.num_parts; i++) {
    const BlobPart& p = parts(blob)[i];
    if (p.kind < kDenseF32 || p.kind > kGptq) return "a part has an unknown kind";
    if (p.outputs <= 0 || p.first_output != first || p.tiles != (int64_t(p.outputs) + kTile - 1) / kTile) return "part table is wrong";
    first += p.outputs;
    if (quantised(p)) {
      if (const char* wrong = check_quantised(blob, bytes, h.K, p)) return wrong;
    } else if (p.tile_bytes != int64_t(h.K) * kTile * (p.kind == kDenseF32 ? 4 : 2) || p.perm) {
      return "tile size of a dense part is wrong";
    }
    if (p.tile_bytes > bytes || !inside(p.data, p.tile_bytes * p.tiles, bytes)) return "tiles are outside";
  }
  return first == h.N ? nullptr : "outputs of the parts do not sum to N";
}

}  // namespace exl2nb
