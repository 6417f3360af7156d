// One token from each row of logits, without a torch header: greedy, or temperature, top_k, top_p, min_p and one draw by the inverse of the
// cumulative distribution in order of ids. A bit mask says which tokens may be chosen; it is read as it is, no row is made of it.
//
// Algorithm: weights exp((x - max) / T) once, with the largest logit of every 64 and the sum of every 512 on the way. Cuts first collect
// the few tokens above a floor that is certainly low enough (min_p's own; the k-th largest of the blocks' maxima; weights whose sum stays
// below 1 - top_p), then work on those alone. Bytes: the logits two or three times, the weights once or twice, the mask twice.
//
// Sums have a fixed order of 16 lanes and nothing depends on another row, so every instruction set gives the same bits and a request the
// same token whatever runs beside it. Weights below e^-87 are 0.
#pragma once
#include <cstdint>

namespace exl2nb::draw {

constexpr int kMaxBlock = 64, kSumBlock = 512;  // logits whose largest, and whose weights' sum, is kept

struct RowScan {
  float highest, allowed;  // the largest logit, and the largest that the mask allows
  bool bad;                // a NaN or +inf
};

struct Kernels {
  // most: (n / kMaxBlock, rounded up), the largest allowed logit of every block. bits: or null.
  RowScan (*scan)(const float* x, const uint32_t* bits, int64_t n, float* most);
  // w: weights exp((x - highest) / heat), 0 where not allowed, room for whole blocks; sums: of every kSumBlock; both or neither. Returns
  // all.
  double (*weigh)(const float* x, const uint32_t* bits, int64_t n, float highest, float heat, float* w, double* sums);
  int64_t (*above)(const float* x, int64_t n, float value);                  // how many are larger
  int64_t (*collect)(const float* w, int64_t n, float floor, int32_t* ids);  // places of those of at least `floor`, in order
  void (*best)(const float* x, int64_t n, int64_t top, float* values,
               int32_t* ids);  // the `top` largest, falling; equals in order of place
};
const Kernels& kernels();  // of this processor

struct Settings {
  double temperature;  // 0: greedy
  double top_k;        // 0: off
  double top_p;        // 1: off
  double min_p;        // 0: off
  double uniform;      // in [0, 1)
};

struct Drawn {
  double id;       // -1: the largest logit is not finite; -2: no token may be chosen
  double logprob;  // of the raw row, as is rank
  double rank;     // 1 = the most probable
  double choices;  // tokens that the mask allows
};

// One row of n logits: `Drawn`, then id and log probability of the `top` <= n most probable tokens; -1 in place of these if nothing could
// be drawn. columns: 1 to n. The token is one of the first `columns`; log probabilities and ranks count all n. out: 4 + 2 * top numbers.
void draw_into(const float* x, const uint32_t* bits, int64_t n, int64_t columns, const Settings& s, int64_t top, double* out);
// The probability at which each of n tokens is drawn, -1 for a removed token; false if nothing can be drawn. probs: n numbers.
bool probabilities_into(const float* x, int64_t n, const Settings& s, double* probs);
// Whether the settings are within their ranges.
bool valid(const Settings& s);

// out[i] = bit i of `bits` (word i / 32, low bit first) ? logits[i] : -infinity, for one row of V logits.
void mask_row(const float* logits, const uint32_t* bits, int64_t V, float* out);

}  // namespace exl2nb::draw
