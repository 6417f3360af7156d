// From logits to the next step's input on the device: plain launch functions without a torch header. Each returns nullptr, or what went
// wrong. Capturable like attention.h; `pdl` as there.
#pragma once
#include <cstddef>
#include <cstdint>

namespace exl2nb {

// One row's settings and stream of random numbers; an array of them is on the device. The kernel adds 1 to `counter`.
struct SampleRow {
  float temperature;                          // 0 = greedy
  float top_p, min_p;                         // 1 and 0 = off
  float repetition_penalty;                   // 1 = off
  float presence_penalty, frequency_penalty;  // 0 = off
  int32_t top_k;                              // 0 = off
  uint32_t top : 8;                           // most probable tokens to report, at most 20
  uint32_t columns : 24;                      // ids from here on are never drawn; 0 = off
  uint64_t seed, counter;                     // random number: sampling/draw.py, uniform(seed, counter)
};
static_assert(sizeof(SampleRow) == 48, "the host packs these bytes");

// What was drawn, one per row. Log probability and rank are those of the raw logits.
struct SampleResult {
  int32_t id;    // -1: the row's largest logit is not finite (the token given to the next step is 0 then)
  int32_t rank;  // 1 = most probable
  float logprob;
  int32_t step;  // of `step` below, so that a reader sees when the row is written
};
static_assert(sizeof(SampleResult) == 16, "the host unpacks these bytes");

// The next step's inputs, updated in place; every pointer may be null. Row r is sequence r.
struct AdvanceArgs {
  int32_t* ids;                // (rows,) = the token
  int32_t* positions;          // (rows,) += 1
  int32_t* context_lens;       // (rows,) += 1 where it is more than 0
  int32_t* slots;              // (rows,) = slot of the new position (page * 256 + offset)
  const int32_t* block_table;  // (rows, max_pages)
  int32_t max_pages;
};

struct SampleArgs {
  const float* logits;  // f32 (rows, vocab), row_stride floats apart
  int64_t row_stride;
  int rows, vocab;
  SampleRow* params;      // (rows,)
  uint16_t* counts;       // (rows, vocab) or null: low 15 bits how often the token was generated, top bit: it is in the prompt.
                          // The drawn token is counted. Penalties need it
  const float* bias;      // f32 (rows, vocab) or null: added to logits after penalties; -inf takes a token out
  SampleResult* results;  // (ring, rows); step s is written to results[s % ring]. May be pinned host memory
  int ring;
  int32_t* step;        // (rows,) device counters, += 1; null = always 0
  int32_t* top_ids;     // (rows, 20) or null
  float* top_logprobs;  // (rows, 20) or null
  AdvanceArgs advance;
};

constexpr int kSampleThreads = 512, kSampleWarps = kSampleThreads / 32, kMaxCluster = 8, kBins = 2048, kMaxTop = 20, kPartBits = 14;

struct Summary {           // of a slice
  float raw_max, raw_sum;  // sum of exp(raw - raw_max)
  uint64_t best;           // rating of the best penalised logit
  int bad;                 // a NaN
};
struct SampleShared {
  uint32_t bins[2][3][kBins];
  uint64_t scan[kSampleWarps];
  uint64_t reduce[kSampleWarps];
  Summary warps[kSampleWarps], summary;
  float listed[kSampleThreads], all[kSampleThreads];  // logits of the bin that was hit: of the slice, of all slices
  uint64_t all_weight[kSampleThreads];
  int num_listed;
  uint64_t weight, top[kMaxTop];
  int token, above, bin;
  float value;
  uint64_t before;
};

// Where kernels find pinned memory of the host; null: it is not pinned.
void* pinned(void* host);

// Draws every row: penalties, bias, temperature, top_k, top_p, min_p, then the inverse of the cumulative distribution in order of ids. A
// row's result does not depend on the other rows.
const char* sample_launch(const SampleArgs& args, void* stream, bool pdl);

}  // namespace exl2nb
