// How one pool of the KV cache stores its numbers: exl2nb/cache/FORMAT.md. Pure functions of sizes.
#pragma once
#include <cstdint>

namespace exl2nb {

enum PoolKind : int { kPoolF32 = 0, kPoolF16 = 1, kPoolQ8 = 2, kPoolQ4 = 3, kPoolFp8 = 4 };

constexpr int64_t kPoolPage = 256;  // tokens of a page of a coded pool

constexpr bool pool_is_coded(PoolKind kind) { return kind >= kPoolQ8; }
constexpr bool pool_is_rotated(PoolKind kind) { return kind == kPoolQ8 || kind == kPoolQ4; }
// Numbers that share a scale: 32, or the largest power of two that divides D when that is smaller.
constexpr int pool_group(int D) { return (D & -D) < 32 ? D & -D : 32; }
// Bytes of the codes of one token of one head.
constexpr int pool_code_bytes(PoolKind kind, int D) { return kind == kPoolQ4 ? D / 2 : D; }
// Bytes of the numbers of one token of one head, scales not counted.
constexpr int pool_token_bytes(PoolKind kind, int D) {
  return kind == kPoolF32 ? 4 * D : kind == kPoolF16 ? 2 * D : pool_code_bytes(kind, D);
}
// Bytes of one head of one page.
constexpr int64_t pool_row_bytes(PoolKind kind, int64_t page_size, int D) {
  if (!pool_is_coded(kind)) return page_size * D * (kind == kPoolF32 ? 4 : 2);
  return page_size * (pool_code_bytes(kind, D) + 2 * (D / pool_group(D)));
}

}  // namespace exl2nb
