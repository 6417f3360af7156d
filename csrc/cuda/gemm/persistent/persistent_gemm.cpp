// Host side of persistent_gemm.cuh: shared-memory layout, strip assignment, buffers between GEMMs, launch.
#include "cuda/gemm/persistent/persistent_gemm.cuh"

#include <algorithm>

#include "cuda/runtime/device.h"
#include "cuda/runtime/kernel.h"

namespace exl2nb {
namespace {

constexpr size_t kCounterBytes = 256;
constexpr int kPartialBytes = 24 * 1024;
static_assert(kPartialBytes / 64 <= kConsumerThreads && kPartialBytes / 4 < PersistentOutput::kNone,
              "one thread per output; offsets of partial sums are 16 bits");
// Tuned on an H200, 2026-11-22, with benchmarks/cuda/persistent_gemm.cu and whole steps (benchmarks/RESULTS.md).
constexpr int kMaxExtraRows = 20000;  // extra rows of strips per CTA that an earlier start of attention is worth: 7B 674 to 692 tok/s
constexpr int kCheapPollBlocks = 32;  // blocks of 64 rows; up to this width failed polls are cheap
constexpr int kMaxMissingCtas = 8;    // CTAs that may be missing when polling wider rows starts: 8B 38.7 to 36.7 us per chain
constexpr int kExtraInFlight = 2;     // more stages in flight for CTAs with more strips: 7B 35.9 to 33.9 us per chain of 116 CTAs
constexpr int kNarrowBitsTimesTwo =
    7;  // below 3.5 bits three stages in flight instead of two: 70B 97.8 to 94.9 us; at 4 bits 7B 33.4 to 34.1
constexpr int kOverreadBytes = 3 * 5 * 128;  // items with fewer units are over-read: at most three units of five bits

bool narrow(const GemmPart& part, int width) {
  return 2 * 8 * part.strip_bytes < static_cast<int64_t>(kNarrowBitsTimesTwo) * kStripColumns * width;
}
// Ring stages that a GEMM's weights take.
int ring_stages(const PersistentGemm& p) {
  int n = 0;
  for (int i = 0; i < p.a.num_parts; i++) {
    const int strips = p.a.part[i].per_cta + (p.a.part[i].rest ? 1 : 0);
    n += p.passes[i].pairs ? (strips + 1) / 2 * 2 : 2 * strips * p.passes[i].count;
  }
  return n;
}
// Assigns strips to CTAs; sets rounds so that the partial sums of a round fit in kPartialBytes.
void share(PersistentGemm& p, const uint8_t* head, Epilogue e, int grid, bool pairs) {
  GemmArgs& a = p.a;
  a.epilogue = e, a.grid = grid;
  const auto* const parts = parts_of(head);
  int per = 1;
  for (int i = 0; i < a.num_parts; i++) {
    per = std::max(per, (a.part[i].strips + a.grid - 1) / a.grid);
    p.passes[i] = {parts[i].passes, parts[i].pass_items, pairs && a.tokens == 1 && parts[i].pairs};
  }
  const int most = e == kResidual ? per : std::max(1, kPartialBytes / (a.num_parts * kConsumerWarps * 64 * a.tokens));
  p.rounds = (per + most - 1) / most, p.strips = (per + p.rounds - 1) / p.rounds;
  p.outputs = e == kResidual ? 0 : p.strips * (e == kStore ? a.num_parts : 1) * 16;
  assign_strips(a);
}
PersistentSmem smem_layout(const Device& device, const PersistentArgs& c, const PersistentOp* ops, LoraChain* lora) {
  PersistentSmem r{};
  int partial = 0, at = 0;
  for (int q = 0; q < c.count; q++)
    partial = std::max(partial, c.gemm[q].a.num_parts * c.gemm[q].strips * kConsumerWarps * 64 * c.gemm[q].a.tokens);
  const auto take = [&](int bytes) {
    const int here = at;
    at = (at + bytes + 127) / 128 * 128;
    return here;
  };
  take(kPartialsOffset + partial);
  int blocks = 0, work_items = 0, outputs = 0;
  for (int q = 0; q < c.count; q++) {
    const GemmArgs& a = c.gemm[q].a;
    const auto* const parts = parts_of(ops[q].head);
    r.image[q] = take(padded_image(a));
    blocks = std::max(blocks, c.gemm[q].blocks);
    work_items = std::max(work_items, c.gemm[q].work_items);
    outputs = std::max(outputs, c.gemm[q].outputs);
    for (int i = 0; i < a.num_parts; i++) {
      const int bytes = c.gemm[q].passes[i].pairs ? static_cast<int>(parts[i].strip_bytes) : parts[i].pass_bytes;
      r.stage_bytes = std::max(r.stage_bytes, (bytes + 127) / 128 * 128);
    }
  }
  const int tokens = c.gemm[0].a.tokens;
  r.work_items = take(kConsumerWarps * work_items * static_cast<int>(sizeof(WorkItem))), r.blocks = take(tokens * blocks * 16);
  r.outputs = take(outputs * static_cast<int>(sizeof(PersistentOutput)));
  r.xs = take(tokens * blocks * 128);
  int tiles = 0;  // of a block of a that a CTA takes, at most
  if (lora) {
    const int chunks = c.gemm[0].width / 32;
    lora->per_cta = chunks / c.grid, lora->rest = chunks % c.grid;
    int all = 0;  // strips of a CTA, of all parts
    tiles = 2 * ((chunks + c.grid - 1) / c.grid);
    for (int q = 0; q < c.count; q++) {
      const PersistentGemm& p = c.gemm[q];
      tiles = std::max(tiles, p.rounds * p.strips), all = std::max(all, p.rounds * p.strips * p.a.num_parts);
    }
    lora->args = take(static_cast<int>(sizeof(PersistentArgs))), lora->blocks = take(lora_blocks_bytes(tokens, lora->width)),
    lora->scales = take(tokens * lora->width * 4), lora->low = take(tokens * lora->width * 4);
    lora->adds = take(all * 64 * tokens), lora->outputs = take(tiles * 32 * tokens);
    lora->list = take(kLoraChainCache / kLoraTile * static_cast<int>(sizeof(LoraTile))), lora->cache = at,
    at += (tiles + 1) * kLoraTile;  // grows below
  }
  r.stages = std::min(kMaxStages, (device.shared_per_block - kOverreadBytes - at) / r.stage_bytes / 2 * 2);
  if (lora) {
    const int rest = device.shared_per_block - kOverreadBytes - at - r.stages * r.stage_bytes;
    const int more = std::max(0, std::min(rest, kLoraChainCache - (tiles + 1) * kLoraTile) / kLoraTile);
    lora->a_tiles = tiles + more / 3, lora->b_tiles = 1 + more - more / 3, at += more * kLoraTile;
  }
  r.ring = take(r.stages * r.stage_bytes + kOverreadBytes);
  r.bytes = r.stages >= 2 ? at : device.shared_per_block + 1;
  return r;
}
// Halves of a row between GEMMs.
size_t padded_row(int width) { return (static_cast<size_t>(width) + 127) / 128 * 128; }
size_t squares_bytes(const Device& device) {
  return (static_cast<size_t>(kPersistentTokens * device.multiprocessors) * sizeof(float) + 255) / 256 * 256;
}

// Buffers between GEMMs belong to the chain: in shared buffers, rows of one GEMM could overlap rows that a later launch with another M
// still reads. There are two sets; launches alternate.
size_t set_bytes(const Device& device, int width, int inner) {
  return kPersistentTokens * (2 * padded_row(width) + padded_row(inner)) * sizeof(half) + 2 * squares_bytes(device);
}
void connect(const Device& device, PersistentArgs& c, const PersistentOp* ops, uint8_t* workspace, size_t bytes) {
  c.counters = reinterpret_cast<unsigned*>(workspace), workspace += kCounterBytes;
  c.set = workspace, c.set_bytes = static_cast<int>((bytes - kCounterBytes) / 2);
  for (int q = 0; q + 1 < c.count; q++) {
    PersistentGemm &from = c.gemm[q], &to = c.gemm[q + 1];
    const size_t row = padded_row(to.width);
    set_input(from.a.next, ops[q + 1].head, ops[q + 1].blob, reinterpret_cast<half*>(workspace), kPersistentTokens);
    to.a.x = from.a.next.x, to.a.x_stride = from.a.next.stride = static_cast<int>(row);
    workspace += kPersistentTokens * row * sizeof(half);
    to.a.squares = from.a.next_squares = from.a.next_norm ? reinterpret_cast<float*>(workspace) : nullptr, to.a.squares_count = c.grid;
    if (from.a.next_norm) workspace += squares_bytes(device);
  }
}
// Kernel arguments for rows [first, first + tokens). made: what ops->lora becomes.
PersistentArgs arguments(const Device& device, const PersistentOp* ops, int count, uint8_t* workspace, size_t bytes, int first, int tokens,
                         LoraChain* made = nullptr) {
  LoraChain unused;
  LoraChain* const lora = !ops->lora ? nullptr : made ? made : &unused;
  if (lora) *lora = *ops->lora;
  PersistentArgs c{};
  c.count = count, c.grid = persistent_ctas(device, ops, count);
  c.clear = static_cast<uint4*>(ops->clear), c.clear_count = ops->clear_count, c.lamport = ops[count - 1].lamport;
  if (count > 2) c.peers = ops[2].peers, c.first_row = first;
  for (int q = 0; q < count; q++) {
    PersistentGemm& p = c.gemm[q];
    p.a = ops[q].a;
    p.a.tokens = tokens;
    skip_rows(p.a, first, c.grid);  // x and squares of later GEMMs are set by connect()
    share(p, ops[q].head, ops[q].epilogue, c.grid, !lora);
    const auto& h = header_of(ops[q].head);
    p.width = h.K, p.blocks = (h.stored + 63) / 64;
    p.work_items = 0;
    for (int i = 0; i < p.a.num_parts; i++) p.work_items += p.passes[i].count;
  }
  // More stages in flight than needed delay the inputs of other CTAs. Narrow weights take longer to multiply than to load.
  const PersistentGemm& largest = c.gemm[count > 1];
  c.ahead = narrow(largest.a.part[0], largest.width) ? 3 : 2;
  for (int q = 0; q < count; q++) {
    const int rest = c.gemm[q].a.part[0].rest;
    if (ops[q].epilogue != kStore && rest < c.grid / 2) c.heavy_ctas = std::max(c.heavy_ctas, rest);
  }
  connect(device, c, ops, workspace, bytes);
  if (lora) lora->adapters += first;
  c.smem = smem_layout(device, c, ops, lora);
  c.ahead = std::min(c.ahead, c.smem.stages),
  c.extra = std::min(kExtraInFlight, c.smem.stages - c.ahead);  // the oldest stage must not be overwritten
  // Polling starts when half of the CTAs with the most strips have arrived; while weights are still loading and rows are wide (failed polls
  // are expensive), when nearly all have.
  const bool fetched = ring_stages(largest) <= c.smem.stages;
  for (int q = 0; q + 1 < count; q++) {
    const GemmPart& part = c.gemm[q].a.part[0];
    const int half = (part.rest ? part.rest : c.grid) / 2;
    c.gemm[q].min_arrivals = c.grid - (fetched || c.gemm[q + 1].blocks <= kCheapPollBlocks ? half : std::min(kMaxMissingCtas, half));
  }
  return c;
}
// All CTAs must be resident at once. Other kernels end by themselves, but another chain could hold part of the GPU and wait as this one
// does: ops/gpu.py keeps launches of different streams apart. A cooperative launch would also work but starts only when every SM is
// free: 3 us more per chain.
constexpr const char* kSource = "gemm/persistent/persistent_gemm.cuh";
const Kernel<PersistentArgs>
    two_rows[] = {{kSource, "persistent_gemm<2, exl2nb::kAnyWeights, false>"}, {kSource, "persistent_gemm<2, exl2nb::kAnyWeights, true>"}},
    four_rows[] = {{kSource, "persistent_gemm<1, exl2nb::kAnyWeights, false>"}, {kSource, "persistent_gemm<1, exl2nb::kAnyWeights, true>"}},
    one_row[][2] = {
        {{kSource, "persistent_gemm<4, exl2nb::kAnyWeights, false>"}, {kSource, "persistent_gemm<4, exl2nb::kAnyWeights, true>"}},
        {{kSource, "persistent_gemm<4, exl2nb::kExl2, false>"}, {kSource, "persistent_gemm<4, exl2nb::kExl2, true>"}},
        {{kSource, "persistent_gemm<4, exl2nb::kNarrow, false>"}, {kSource, "persistent_gemm<4, exl2nb::kNarrow, true>"}}};
const Kernel<PersistentArgs, LoraChain> lora_rows[] = {{kSource, "persistent_lora<4, exl2nb::kAnyWeights>"},
                                                       {kSource, "persistent_lora<2, exl2nb::kAnyWeights>"},
                                                       {kSource, "persistent_lora<1, exl2nb::kAnyWeights>"}},
                                        lora_row[] = {{kSource, "persistent_lora<4, exl2nb::kExl2>"},
                                                      {kSource, "persistent_lora<4, exl2nb::kFromThree>"}};

// Specialisation for one row. Separate sums (kNarrow) pay where the weights of the largest GEMM are narrow and an item has more than four
// units (70B 87.9 to 86.0 us per chain), not elsewhere (8B 36.5 to 37.3, TinyLlama at 3 bits 17.6 to 18.2).
WeightKind weight_kind(const PersistentOp* ops, int count) {
  for (int q = 0; q < count; q++) {
    const auto* const parts = parts_of(ops[q].head);
    for (int i = 0; i < ops[q].a.num_parts; i++)
      if (parts[i].runs[0].scales) return kAnyWeights;
  }
  const PersistentOp& largest = ops[count > 1];
  const int width = header_of(largest.head).K;
  return narrow(largest.a.part[0], width) && width > kWarps * 4 * kUnitRows ? kNarrow : kExl2;
}

}  // namespace

int persistent_ctas(const Device& device, const PersistentOp* ops, int count) {
  const int all = device.multiprocessors;
  const auto most = [&](int grid) {  // most rows of strips of one CTA
    int n = 0;
    for (int q = 0; q < count; q++) {
      const GemmArgs& a = ops[q].a;
      const int strips = ops[q].epilogue == kActivation ? a.part[0].strips : a.strips;
      const int own = (strips + grid - 1) / grid;
      n += own * header_of(ops[q].head).K;
      if (ops[q].epilogue == kResidual && own > kMaxOwnedStrips) n += 1 << 28;  // no chain
    }
    return n;
  };
  const int fewer = all - ops->attention_sms;
  return fewer > all / 2 && most(fewer) <= most(all) + kMaxExtraRows ? fewer : all;
}

size_t persistent_bytes(const Device& device, int width, int inner) { return kCounterBytes + 2 * set_bytes(device, width, inner); }

int persistent_tokens(const Device& device, const PersistentOp* ops, int count) {
  if ((count < 3 && (count != 1 || ops->epilogue != kStore)) || count > kMaxGemms || device.kernels_major != 9) return 0;
  const int grid = persistent_ctas(device, ops, count);
  for (int q = 0; q < count; q++) {
    const GemmArgs& a = ops[q].a;
    const auto& h = header_of(ops[q].head);
    const auto* const parts = parts_of(ops[q].head);
    int passes = 0;
    for (int p = 0; p < h.num_parts; p++) {
      if (parts[p].dense) return 0;
      passes += parts[p].passes;
    }
    if (passes > kMaxWorkItems) return 0;
    if (h.num_perms != 1 || h.K % 32 || h.stored != h.K || a.from.x || a.router.out) return 0;
    if (ops[q].epilogue == kResidual && (a.strips + grid - 1) / grid > kMaxOwnedStrips) return 0;
  }
  const auto layout = [&](int tokens) { return arguments(device, ops, count, nullptr, 0, 0, tokens).smem; };
  if (layout(1).bytes > device.shared_per_block) return 0;
  for (int tokens = kPersistentTokens; tokens > 1; tokens--)
    if (const PersistentSmem s = layout(tokens); s.bytes <= device.shared_per_block && s.stages >= kRowsStages) return tokens;
  return 1;
}

void plan_persistent(LaunchList& list, const PersistentOp* ops, int count, uint8_t* workspace, size_t bytes) {
  const int all = ops[0].a.tokens, most = persistent_tokens(list.device, ops, count);
  if (!most) return list.fail("these GEMMs cannot run as a persistent chain");
  for (int first = 0; first < all; first += most) {
    LoraChain lora;
    const PersistentArgs c = arguments(list.device, ops, count, workspace, bytes, first, std::min(most, all - first), &lora);
    const int tokens = c.gemm[0].a.tokens;
    if (ops->lora && c.peers.size) return list.fail("adapters inside a persistent chain are not for ranks");
    const int kind = tokens == 1 ? weight_kind(ops, count) : kAnyWeights;
    const unsigned threads = kPersistentThreads + (ops->lora ? kLoraChainWarps * 32 : 0);
    const Launch how{unsigned(c.grid), threads, static_cast<size_t>(c.smem.bytes)};
    const auto* const kernels = tokens == 2 ? two_rows : tokens > 2 ? four_rows : one_row[kind];
    const auto& adapted = kind == kAnyWeights ? lora_rows[std::min(tokens, 3) - 1] : lora_row[ops->fewest_bits > 2];
    if (ops->lora)
      list.add(adapted, how, c, lora);
    else
      list.add(kernels[c.peers.size > 0], how, c);
  }
}

}  // namespace exl2nb
