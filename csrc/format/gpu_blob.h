// Weight blob on the GPU: written by `pack_*`, read by the CUDA kernels. csrc/format/blob.h is its CPU counterpart with another layout.
//
//   Header (64 bytes), Part[num_parts] (128 each), then sections, each at a multiple of 256 bytes:
//     perms     per distinct permutation: int32 (stored,) stored row -> feature, K for padding; int32 (K,) feature -> stored row;
//               absent for the identity
//     image     copied by every CTA into shared memory; all parts one after the other:
//                 items  Item[num_items] by rows; unit0 counts over all parts
//                 steps  half2 per unit: scale unit of its first and second 32 rows, times 1/256; 0 where missing;
//                        padded to 16 bytes after the last part
//                 ends   uint16 (kEnds,) per part: warp w has items ends[w] .. ends[w + 1] - 1, about equally many
//     strips    (strips, strip_bytes) per part
//
// Strip: 16 columns x all stored rows, its items in order. Item: at most kItemUnits units, then their scale codes; at most kMaxItemBytes
// bytes; one bulk copy. Unit: 16 columns x 64 stored rows x b bits = b words per lane, the A fragments of four m16n8k16 steps (dequant.cuh
// lists the bits). Where the width changes after 32 rows, the second half of a unit is empty. Scale codes (EXL2): one byte per unit and
// lane group g (column g low nibble, g + 8 high); two bytes (first, second 32 rows) if the halves belong to different groups (not `one`).
// Dense fp16 units (16 bits) have none. GPTQ items have scale sets of 64 bytes: per g fp16 scales of columns g and g + 8, then their zero
// points. A set serves two units of a group (`scales` 2) or one (1); if not `one`, two sets per unit. Groups are padded to 32 rows: a
// padding row's code is the zero point, its feature in the permutation is K.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define EXL2NB_BOTH __host__ __device__
#else
#define EXL2NB_BOTH
#endif

namespace exl2nb {

constexpr int64_t kGpuMagic = 0x3147424e324c5845;  // "EXL2NBG1"
constexpr int kGpuVersion = 1, kWarps = 16, kMaxItemBytes = 2688, kEnds = 24, kMaxParts = 4, kMaxPerms = 3, kStripColumns = 16,
              kUnitRows = 64, kGptqSet = 64, kItemUnits = 10, kPairUnits = 2;

struct GpuHeader {
  int64_t magic;
  int32_t version, K, N, num_parts;
  int64_t bytes;
  int32_t num_perms, stored;  // stored: rows including padding
  int64_t perms;              // offset of the permutations, 0 = identity everywhere
  int64_t image;
  int32_t num_items, num_units;  // of all parts
};
// Consecutive units of a strip that are alike: width; halves: two groups per unit; scales as in Item.
struct GpuRun {
  uint16_t units;
  uint8_t bits, halves, scales, pad[3];
};
constexpr int kRuns = 7;
struct GpuPart {
  int32_t outputs, strips, first_column, first_strip, first_item, num_items, first_unit, num_units, perm, dense;
  int64_t strip_bytes, data;
  int32_t passes, pass_items, pass_bytes;  // passes of a strip in persistent_gemm.cuh; items of a pass; largest half of a pass in bytes
  int32_t pairs;                           // kWarps equal items of kPairUnits `one` units, in consecutive pairs
  GpuRun runs[kRuns];                      // in row order; the last one holds the rest; units 0: none
};
struct Item {
  uint32_t offset;  // in the strip
  uint16_t block;   // first stored row / 32
  uint8_t bits, units;
  uint16_t bytes, unit0;  // unit0: index into steps
  uint8_t one, lone;      // one: one group per unit, else per half; lone: no second half
  uint8_t scales, pad;    // 0: EXL2 or dense; GPTQ: units per scale set, 1 or 2
};
static_assert(sizeof(GpuHeader) == 64 && sizeof(GpuPart) == 128 && sizeof(Item) == 16, "blob layout");

// Header and parts from a host copy of a blob's head.
inline const GpuHeader& header_of(const uint8_t* head) { return *reinterpret_cast<const GpuHeader*>(head); }
inline const GpuPart* parts_of(const uint8_t* head) { return reinterpret_cast<const GpuPart*>(head + sizeof(GpuHeader)); }
// The fewest bits that a weight may have: 2 where the last run is of several widths, perhaps.
inline int fewest_bits(const uint8_t* head) {
  int fewest = 16;
  for (const GpuPart* part = parts_of(head); part < parts_of(head) + header_of(head).num_parts; part++) {
    if (part->runs[kRuns - 1].units) return 2;
    for (const GpuRun& run : part->runs)
      if (run.units && run.bits < fewest) fewest = run.bits;
  }
  return fewest;
}

EXL2NB_BOTH constexpr int image_steps(int items) { return items * 16; }  // offsets in the image
EXL2NB_BOTH constexpr int image_ends(int items, int units) { return items * 16 + (units + 3) / 4 * 16; }
EXL2NB_BOTH constexpr int image_bytes(int items, int units, int parts) { return image_ends(items, units) + parts * kEnds * 2; }
EXL2NB_BOTH constexpr int64_t align256(int64_t n) { return (n + 255) / 256 * 256; }

}  // namespace exl2nb
