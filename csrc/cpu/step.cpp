#include "step.h"

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include <algorithm>
#include <cstring>
#include <string>

#include "../format/program.h"
#include "engine.h"
#include "moe.h"
#include "parallel.h"
#include "together.h"

namespace exl2nb {
namespace {

constexpr int64_t kLeastTogether = 2;         // rows
constexpr int64_t kWorkTogether = 1'000'000;  // multiply-adds of a step that are worth waking a thread
constexpr int64_t kUsualCache = int64_t(16) << 20, kMostCache = int64_t(64) << 20;

std::string number(int64_t n) { return std::to_string(n); }

// K and N of the blob behind an address, or a message. The blob itself was checked when its op was added.
std::string check_weight(int64_t word, int64_t K, int64_t N) {
  if (!word) return "a weight is missing";
  const BlobHeader& h = header(address<uint8_t>(word));
  if (h.magic != kBlobMagic || h.version != kBlobVersion) return "a weight is no blob";
  if (h.K != K || (N && h.N != N))
    return "a weight is (" + number(h.K) + ", " + number(h.N) + "); expected (" + number(K) + ", " + number(N) + ")";
  return "";
}

// act: width of what lies in the two buffers, 0 for nothing, -Hq while q waits for its attention.
std::string check_op(const int64_t* w, const StepBatch& b, int64_t H, int64_t* act) {
  const int64_t layers = int64_t(b.k_pools.size());
  switch (w[0]) {
    case kOpEmbed:
      if (w[4] != H) return "the table's width is not the hidden size";
      if (w[6]) {
        const std::string wrong = check_range("a position", b.positions, b.T, w[8]);
        if (!wrong.empty()) return wrong;
      }
      return check_range("a token id", b.ids, b.T, w[3]);
    case kOpQkv: {
      if (w[9] <= 0 || w[10] <= 0 || w[9] % w[10]) return "num_heads is no multiple of num_kv_heads";
      if (w[10] != b.num_kv_heads || w[11] != b.head_dim)
        return "the pools hold " + number(b.num_kv_heads) + " heads of " + number(b.head_dim) + "; expected " + number(w[10]) + " of " +
               number(w[11]);
      if (w[16] < 0 || w[16] >= layers) return "there are " + number(layers) + " pools; the program wants layer " + number(w[16]);
      if (w[8] < 0 || 2 * w[8] > w[11]) return "rotary_dim is larger than head_dim";
      const std::string wrong = check_weight(w[3], H, (w[9] + 2 * w[10]) * w[11]);
      if (!wrong.empty()) return wrong;
      act[0] = -w[9];  // q is there; its width follows from ATTENTION
      return check_range("a position", b.positions, b.T, w[7]);
    }
    case kOpAttention:
      if (act[0] >= 0) return "attention without q";
      if (w[4] < 0 || w[4] >= layers) return "there are " + number(layers) + " pools; the program wants layer " + number(w[4]);
      act[0] = -act[0] * b.head_dim;
      return "";
    case kOpResidual:
      if (w[6] < 0 || w[6] > 1 || act[w[6]] <= 0) return "nothing to add to the residual";
      return check_weight(w[1], act[w[6]], H);
    case kOpGateUp: {
      const std::string wrong = check_weight(w[3], H, 0);
      if (!wrong.empty()) return wrong;
      if (w[5] < 0 || w[5] > 2) return "unknown activation";
      if (w[9] < 0 || w[9] > 1) return "unknown buffer";
      act[w[9]] = header(address<uint8_t>(w[3])).N / (w[8] ? 2 : 1);
      return "";
    }
    case kOpRouted: {  // every expert was checked when the op was added: reading 100 headers a layer would cost more than the sums
      if (!w[4] || w[5] < 1 || w[6] < 1 || w[6] > w[5]) return "top_k is " + number(w[6]) + "; expected 1 to " + number(w[5]) + " experts";
      if (w[8] < 0 || w[8] > 2) return "unknown activation";
      return check_weight(w[3], H, w[5]);
    }
    default:
      return check_weight(w[3], H, 0);
  }
}

}  // namespace

std::string check_range(const char* what, const int32_t* values, int64_t n, int64_t limit) {
  for (int64_t i = 0; i < n; i++)
    if (values[i] < 0 || values[i] >= limit) return std::string(what) + " is " + number(values[i]) + "; expected 0 to " + number(limit - 1);
  return "";
}

std::string check_sequences(const int32_t* block_table, const int32_t* cu_seqlens, const int32_t* context_lens, int64_t sequences,
                            int64_t max_pages, int64_t page_size, int64_t num_pages, int64_t T) {
  if (cu_seqlens[0] != 0 || cu_seqlens[sequences] != T) return "cu_seqlens must start at 0 and end at " + number(T) + " (the queries)";
  for (int64_t s = 0; s < sequences; s++) {
    const int64_t n = int64_t(cu_seqlens[s + 1]) - cu_seqlens[s], context = context_lens[s], pages = (context + page_size - 1) / page_size;
    if (n < 0) return "cu_seqlens must not fall";
    if (context < n || context < 0)
      return "context_lens is " + number(context) + " for a sequence with " + number(n) + " queries; expected at least that";
    if (pages > max_pages)
      return "context_lens is " + number(context) + "; expected at most " + number(max_pages * page_size) + " (the pages of block_table)";
    const std::string wrong = check_range("a page of block_table", block_table + s * max_pages, pages, num_pages);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

int64_t step_head_dim(const int64_t* code, int64_t words) {
  if (words < kHeaderWords || code[0] != kProgramMagic) return 0;
  for (int64_t at = kHeaderWords; at < words && code[at] >= kOpEmbed && code[at] <= kOpHead && at + kWords[code[at]] <= words;
       at += kWords[code[at]])
    if (code[at] == kOpQkv) return code[at + 11];
  return 0;
}

std::string check_step(const int64_t* code, int64_t words, const StepBatch& batch, int64_t& vocab) {
  if (words < kHeaderWords || code[0] != kProgramMagic || code[1] != kProgramVersion || code[2] != words)
    return "the program is not the code of a Program";
  const int64_t H = code[4];
  int64_t act[2] = {0, 0}, last = 0;
  vocab = 0;
  for (int64_t at = kHeaderWords; at < words; at += kWords[last]) {
    const int64_t* w = code + at;
    if (w[0] < kOpEmbed || w[0] > kOpRouted || at + kWords[w[0]] > words) return "the program holds an unknown op";
    if (vocab || (at == kHeaderWords) != (w[0] == kOpEmbed)) return "a program starts with embed and ends with norm_head";
    const std::string wrong = check_op(w, batch, H, act);
    if (!wrong.empty()) return wrong;
    last = w[0];
    if (last == kOpHead) vocab = header(address<uint8_t>(w[3])).N;
  }
  if (!vocab) return "a program starts with embed and ends with norm_head";
  std::string wrong = check_range("a slot", batch.slots, batch.T, batch.num_pages * batch.page_size);
  if (wrong.empty()) wrong = check_range("a row of logit_rows", batch.logit_rows, batch.R, batch.T);
  if (wrong.empty())
    wrong = check_sequences(batch.block_table, batch.cu_seqlens, batch.context_lens, batch.sequences, batch.max_pages, batch.page_size,
                            batch.num_pages, batch.T);
  return wrong;
}

const uint8_t* step_matrix(const int64_t* w) {
  constexpr int word[] = {0, 0, 3, 0, 1, 3, 3, 3};
  return word[w[0]] ? address<uint8_t>(w[word[w[0]]]) : nullptr;
}

Norm step_norm(const int64_t* w) {
  constexpr int bias[] = {0, 0, 17, 0, 0, 6, 5, 9};
  const bool layer = w[0] == kOpQkv ? w[18] & 1 : w[bias[w[0]] + 1] != 0;
  return {address<float>(w[1]), real(w[2]), address<float>(w[bias[w[0]]]), layer};
}

Heads step_heads(const int64_t* w, const StepBatch& b) {
  Heads heads{int(w[9]), int(w[10]), int(w[11]), int(w[8]), b.page_size, b.k_kind, b.v_kind, address<float>(w[12]), address<float>(w[14]),
              w[13],     w[15],      real(w[2])};
  const int64_t flags = w[18];
  heads.layer_norm = flags & 1;
  heads.interleaved = flags & 2;
  heads.q_full = flags & 4;
  heads.k_full = flags & 8;
  return heads;
}

Rope step_rope(const int64_t* w, const StepBatch& b) {
  return {address<float>(w[5]), address<float>(w[6]), b.positions, b.slots, real(w[19])};
}

Attention step_attention(const int64_t* w, const StepBatch& b, int num_heads) {
  const size_t layer = size_t(w[4]);
  return {b.k_pools[layer], b.v_pools[layer],    b.block_table,   b.cu_seqlens, b.context_lens, b.sequences, b.max_pages, b.page_size, w[2],
          num_heads,        int(b.num_kv_heads), int(b.head_dim), real(w[1]),   real(w[3]),     b.k_kind,    b.v_kind};
}

void step_embed(const int64_t* w, const StepBatch& b, int H, float* x) {
  embed(address<void>(w[1]), int(w[2]), H, b.ids, int(b.T), real(w[5]), {address<void>(w[6]), int(w[7]), b.positions}, x);
}

namespace {

// The matrix of the next op that has one, or null.
const uint8_t* next_matrix(const int64_t* code, int64_t words, int64_t at) {
  for (at += kWords[code[at]]; at < words; at += kWords[code[at]])
    if (const uint8_t* blob = step_matrix(code + at)) return blob;
  return nullptr;
}

// Every op for all rows of the batch.
void run_ops(const int64_t* code, int64_t words, const StepBatch& b, float* logits) {
  const int64_t H = code[4], T = b.T;
  int64_t widest = 1, aside = 0;
  int num_heads = 0;
  for (int64_t at = kHeaderWords; at < words; at += kWords[code[at]]) {
    const int64_t* w = code + at;
    const int64_t width = w[0] == kOpQkv ? w[9] * w[11] : w[0] == kOpGateUp ? header(address<uint8_t>(w[3])).N / (w[8] ? 2 : 1) : 0;
    if (width > widest) widest = width;
    if (w[0] == kOpGateUp && w[9] && width > aside) aside = width;
  }
  Buffer<float> x(T * H), q(T * widest), act(T * widest), side(T * aside);
  for (int64_t at = kHeaderWords; at < words; at += kWords[code[at]]) {
    const int64_t* w = code + at;
    const uint8_t* then = next_matrix(code, words, at);
    switch (w[0]) {
      case kOpEmbed:
        step_embed(w, b, int(H), x);
        break;
      case kOpQkv: {
        const size_t layer = size_t(w[16]);
        num_heads = int(w[9]);
        norm_qkv_rope(x, int(T), step_norm(w), address<uint8_t>(w[3]), address<float>(w[4]), step_rope(w, b), step_heads(w, b), q,
                      b.k_pools[layer], b.v_pools[layer], then);
        break;
      }
      case kOpAttention:
        paged_attention(q, step_attention(w, b, num_heads), act);
        break;
      case kOpResidual:
        linear_residual(w[6] ? side : act, int(T), address<uint8_t>(w[1]), address<float>(w[2]), {address<float>(w[3]), real(w[4])},
                        real(w[5]), x, then);
        break;
      case kOpGateUp:
        norm_gate_up(x, int(T), step_norm(w), address<uint8_t>(w[3]), address<float>(w[4]), int(w[5]), w[8] != 0, w[9] ? side : act, then);
        break;
      case kOpRouted: {
        Buffer<int32_t> chosen(T * w[6]);
        const Experts experts{address<uint8_t>(w[3]),
                              address<int64_t>(w[4]),
                              int(w[5]),
                              int(w[6]),
                              real(w[7]),
                              int(w[8]),
                              address<uint8_t>(w[11]),
                              address<uint8_t>(w[12]),
                              address<uint8_t>(w[13]),
                              {address<float>(w[14]), real(w[15])},
                              real(w[16])};
        routed_mlp(x, int(T), step_norm(w), experts, chosen);
        break;
      }
      default: {
        Buffer<float> rows(b.R * H);
        for (int64_t r = 0; r < b.R; r++) std::memcpy(rows + r * H, x + b.logit_rows[r] * H, size_t(H) * sizeof(float));
        norm_linear(rows, int(b.R), step_norm(w), address<uint8_t>(w[3]), address<float>(w[4]), logits);
      }
    }
  }
}

// Bytes of all matrices, and multiply-adds of one row. Experts are not for the cache: a sparse model counts as too large.
struct Weights {
  int64_t bytes = 0, work = 0;
};
Weights weights_of(const int64_t* code, int64_t words) {
  Weights sum;
  for (int64_t at = kHeaderWords; at < words; at += kWords[code[at]]) {
    const uint8_t* blob = step_matrix(code + at);
    if (!blob) continue;
    const BlobHeader& h = header(blob);
    sum.bytes += code[at] == kOpRouted ? kMostCache + 1 : h.bytes;
    sum.work += int64_t(h.K) * h.N;
  }
  return sum;
}

// Bytes that the last level of cache holds; a virtual machine may be told of more than it has.
int64_t cache_bytes() {
  static const int64_t bytes = [] {
    int64_t found = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
    found = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return found > 0 ? std::min(found, kMostCache) : kUsualCache;
  }();
  return bytes;
}

// Whether the threads should work on every matrix together and meet between them only: then what a step waits for is no wake-up, and where
// the cache holds all weights each core finds its own columns there.
bool suits_together(const int64_t* code, int64_t words, const StepBatch& b) {
  if (threads_to_share() < 2 || b.T < kLeastTogether || b.T > kMostTogether || b.R > kMostTogether) return false;
  const Weights weights = weights_of(code, words);
  return weights.bytes <= cache_bytes() && weights.work * b.T >= kWorkTogether;
}

}  // namespace

void run_step(const int64_t* code, int64_t words, const StepBatch& b, float* logits) {
  if (!suits_together(code, words, b)) return run_ops(code, words, b, logits);
  Together together(code, words, b, logits, {}, threads_to_share());
  together.run_on_all(0);
}

}  // namespace exl2nb
