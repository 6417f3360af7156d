// Low-rank adapters of a program as one int64 table, written by exl2nb/ops/lora_table.py: a header, then a LoraChange for each adapter and
// each op of the program, in order. An adapter of a request may be a blend of several; then its parts are those of all of them.
#pragma once
#include <cstdint>

namespace exl2nb {

constexpr int64_t kLoraMagic = 0x3141524f4c324558, kLoraVersion = 2;

// y[first : first + columns] += (scale * (x a)) b. Of the embedding, `a` has a row per token id, and the id chooses one.
struct LoraPart {
  const uint16_t *a, *b;  // f16 (K, width()), zero beyond the rank, and (rank, columns)
  const float* scale;     // (rank)
  int64_t rank, first, columns;
  int64_t width() const { return (rank + 15) / 16 * 16; }
};

// 16 ranks of a part, as products on Hopper take them: A fragments of m16n8k16 (16 rows of A x 16 columns: lane 4 g + t has rows g, g + 8,
// columns 2t, 2t + 1, then columns 2t + 8, 2t + 9).
struct LoraBlock {
  const uint16_t* a;             // f16 [stored rows / 16][lane][8]: A's rows are ranks, its columns the matrix's stored rows
  const uint16_t* b;             // f16 [strip][lane][8]: A's rows are columns of y, its columns ranks
  const float* scale;            // (ranks)
  uint16_t first_strip, strips;  // strips of y, counted over all parts of the matrix
  int32_t ranks;
  const uint16_t* rows;  // f16: the part's a from its first rank on
  int64_t stride;        // of rows
};

// What an adapter does to one op, null for nothing: its parts, then y += gain * y, then y += bias. norm, norm_bias: instead of the op's
// own.
constexpr int64_t kFirstA = 8;
struct LoraChange {
  const LoraPart* parts;
  int64_t num_parts, width;  // width: of all parts together
  const float *gain, *bias, *norm, *norm_bias;
  const LoraBlock* blocks;           // of all parts: width / 16; null: the stream-K GEMM does not take it
  const uint16_t* first_a[kFirstA];  // a of the first ones, so that less is loaded one after the other
  bool product() const { return num_parts || gain || bias; }
};

class LoraTable {
 public:
  struct Header {
    int64_t magic, version, words, adapters, ops, max_width;
  };
  LoraTable() = default;
  explicit LoraTable(const int64_t* words) : words_(words) {}
  explicit operator bool() const { return words_ != nullptr; }
  const Header& header() const { return *reinterpret_cast<const Header*>(words_); }
  // Whether `words` numbers are a table for a program of `ops` ops.
  bool fits(int64_t words, int64_t ops) const {
    if (words < int64_t(sizeof(Header) / 8) || header().magic != kLoraMagic || header().version != kLoraVersion) return false;
    const int64_t change = sizeof(LoraChange) / 8, most = words / change;
    return header().words == words && header().ops == ops && header().adapters >= 0 && header().adapters <= most &&
           words == int64_t(sizeof(Header) / 8) + header().adapters * ops * change;
  }
  // Of adapter -1: null.
  const LoraChange* change(int64_t adapter, int64_t op) const {
    if (adapter < 0) return nullptr;
    return reinterpret_cast<const LoraChange*>(words_ + sizeof(Header) / 8) + adapter * header().ops + op;
  }

 private:
  const int64_t* words_ = nullptr;
};

}  // namespace exl2nb
