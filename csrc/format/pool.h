// How one pool, K or V of one layer of the KV cache, stores its numbers: exl2nb/cache/FORMAT.md. Pure functions of sizes, for CPU, CUDA and
// torch. exl2nb/ops/kv_codes.py has the same list of formats; they are compared when the library is loaded.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define EXL2NB_BOTH __host__ __device__
#else
#define EXL2NB_BOTH
#endif

namespace exl2nb {

// Constant, number, name in Python. What must change with a new one: docs/internals/adding.md.
#define EXL2NB_CACHE_FORMATS(F) F(kCacheF16, 0, fp16) F(kCacheF32, 1, fp32) F(kCacheQ8, 2, q8) F(kCacheQ4, 3, q4) F(kCacheFp8, 4, fp8)
#define EXL2NB_FORMAT(constant, number, name) constant = number,
enum CacheFormat : int { EXL2NB_CACHE_FORMATS(EXL2NB_FORMAT) };
#undef EXL2NB_FORMAT

constexpr int kPage = 256;  // tokens of a page of a coded pool, and of any pool on the GPU

// The formats after F32 hold codes with scales.
EXL2NB_BOTH constexpr bool pool_is_coded(int format) { return format >= kCacheQ8; }
EXL2NB_BOTH constexpr bool pool_is_rotated(int format) { return format == kCacheQ8 || format == kCacheQ4; }
EXL2NB_BOTH constexpr int pool_bits(int format) { return format == kCacheF32 ? 32 : format == kCacheF16 ? 16 : format == kCacheQ4 ? 4 : 8; }
// Numbers that share a scale, D a multiple of 8.
EXL2NB_BOTH constexpr int pool_group(int D) { return D % 32 == 0 ? 32 : D % 16 == 0 ? 16 : 8; }
// Bytes of the numbers or codes of one token of one head, scales not counted.
EXL2NB_BOTH constexpr int pool_token_bytes(int format, int D) { return D * pool_bits(format) / 8; }
// Bytes of one head of one page.
template <class Int>
EXL2NB_BOTH constexpr Int pool_row_bytes(int format, Int page_size, int D) {
  return page_size * D *
             (format == kCacheF32   ? 32
              : format == kCacheF16 ? 16
              : format == kCacheQ4  ? 4
                                    : 8) /
             8 +
         (format >= kCacheQ8 ? 2 * page_size * D / pool_group(D) : 0);
}

}  // namespace exl2nb
