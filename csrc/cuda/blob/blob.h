// The weight blob on the GPU: what `pack_*` makes there and the CUDA kernels read. Same idea as csrc/format/blob.h, another layout.
//
//   Header (64 bytes), Part[num_parts] (128 each), then the sections, each at a multiple of 256 bytes:
//     perms     per distinct permutation int32 (stored,) stored row -> feature, K for padding, then int32 (K,) feature -> stored row;
//               none for the identity
//     image     what every CTA copies into its shared memory, of all parts one after the other:
//                 items  Item[num_items] in order of rows; unit0 counts through all parts
//                 steps  half2 per unit: the largest step of its first and second 32 rows, already times 1/256; 0 where there are none;
//                        padded to 16 bytes after the last part
//                 ends   uint16 (kEnds,) per part: the items of warp w are ends[w] .. ends[w + 1] - 1, about equally many
//     strips    (strips, strip_bytes) per part
//
// A strip is 16 columns over all stored rows: its items one after the other. An item is at most kItemUnits units and then their scale
// codes, at most kSlot bytes: one bulk copy. A unit is 16 columns x 64 stored rows x b bits: b words per lane, the A fragments of four
// m16n8k16 products (dequant.cuh says which bits of a word are whose). Where the width changes after 32 rows the second half of a unit is
// empty. Scale codes: per unit and group of 8 lanes' columns g one byte (column g low nibble, g + 8 high); two bytes (first, second 32
// rows) where the halves belong to different groups, so not `one`. Dense fp16 units (16 bits) have none. GPTQ items have scale sets
// instead, 64 bytes: per g the fp16 scales of columns g and g + 8, then their zero points, fp16. A set serves two units of one group
// (`scales` 2) or one (1); where units are not `one` there are two sets per unit. Groups filled up to 32 rows: a padding row's code is the
// zero point, its feature in the permutation K.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define EXL2NB_BOTH __host__ __device__
#else
#define EXL2NB_BOTH
#endif

namespace exl2nb {

constexpr int64_t kGpuMagic = 0x3147424e324c5845;  // "EXL2NBG1"
constexpr int kGpuVersion = 1, kWarps = 16, kSlot = 2688, kEnds = 24, kMaxParts = 4, kMaxPerms = 3, kStripColumns = 16, kUnitRows = 64,
              kGptqSet = 64, kItemUnits = 10, kPairUnits = 2;

struct GpuHeader {
  int64_t magic;
  int32_t version, K, N, num_parts;
  int64_t bytes;
  int32_t num_perms, stored;  // stored: rows with padding, K where there is none
  int64_t perms;              // offset of the permutations, 0 = identity everywhere
  int64_t image;
  int32_t num_items, num_units;  // of all parts
};
// Units of a strip that follow one another and are alike: their width; halves: two groups a unit; scales as Item's.
struct GpuRun {
  uint16_t units;
  uint8_t bits, halves, scales, pad[3];
};
constexpr int kRuns = 7;
struct GpuPart {
  int32_t outputs, strips, first_column, first_strip, first_item, num_items, first_unit, num_units, perm, dense;
  int64_t strip_bytes, data;
  int32_t pieces, piece_items, piece_bytes;  // a strip in pieces for persistent_gemm.cuh: items of one, bytes of half of one, at most
  int32_t pairs;       // whether it is kWarps items of kPairUnits `one` units, each second the rows behind the first, alike
  GpuRun runs[kRuns];  // from the first row on; where there are more, the last one has the rest; units 0: none
};
struct Item {
  uint32_t offset;  // in the strip
  uint16_t block;   // first stored row / 32
  uint8_t bits, units;
  uint16_t bytes, unit0;  // unit0: index into steps
  uint8_t one, lone;      // one: a unit has one group, otherwise its halves have their own codes; lone: there is no second half
  uint8_t scales, pad;    // 0: codes (EXL2) or none (dense); GPTQ: units that share a scale set, 1 or 2
};
static_assert(sizeof(GpuHeader) == 64 && sizeof(GpuPart) == 128 && sizeof(Item) == 16, "blob layout");

EXL2NB_BOTH constexpr int image_steps(int items) { return items * 16; }  // offsets in the image
EXL2NB_BOTH constexpr int image_ends(int items, int units) { return items * 16 + (units + 3) / 4 * 16; }
EXL2NB_BOTH constexpr int image_bytes(int items, int units, int parts) { return image_ends(items, units) + parts * kEnds * 2; }
EXL2NB_BOTH constexpr int64_t align256(int64_t n) { return (n + 255) / 256 * 256; }

}  // namespace exl2nb
