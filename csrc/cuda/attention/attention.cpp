// Host side of attention: checks, choice of the decode kernel, shared-memory and workspace layout, launches.
#include <algorithm>
#include <type_traits>

#include "cuda/attention/split_kv.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/kernel.h"

namespace exl2nb {
namespace {

constexpr const char *kDecode = "attention/decode.cuh", *kGeneric = "attention/generic.cu";
const Kernel<RopeAppendArgs> rope_append_rows{kGeneric, "rope_append_rows"};
const Kernel<CacheArgs, const int*, int, half*, half*> gather_rows{kGeneric, "gather_rows"};
const Kernel<AttentionArgs> attention_any{kGeneric, "attention_any"};
const Kernel<RopeArgs, float*, int, int, int> norm_whole_rows{kGeneric, "norm_whole_rows"};

// What is known of a decode kernel. No kernel: null.
struct DecodeKernel {
  const Kernel<DecodeParams>*kernel, *kernel_runs;                                // kernel_runs: compiled with RUNS; may be null
  int warps, ctas_per_sm, shared_bytes, warp_bytes, rows, row_bytes, results_at;  // row_bytes: of a warp's result
};

// Whether a cache mode has this pair. Other pairs have no kernels for 16 query rows and none with runs.
constexpr bool is_mode(int k_format, int v_format) { return k_format == v_format || (k_format == kCacheQ8 && v_format == kCacheQ4); }

std::string name_of(int k_format, int v_format, int head_dim, int nt, bool runs) {
  const auto number = [](int n) { return std::to_string(n) + ", "; };
  return "attention_decode<" + number(k_format) + number(v_format) + number(head_dim) + number(nt) + (runs ? "true>" : "false>");
}

template <int KF, int VF, int D, int NT>
struct Decoder {
  using Shape = DecodeShape<KF, VF, D, NT>;
  static constexpr bool kHasRuns = is_mode(KF, VF) && (D == 64 || D == 128) && NT <= 1;
  static inline const Kernel<DecodeParams> kernel{kDecode, name_of(KF, VF, D, NT, false)};
  // A kernel of its own: RUNS costs registers, so a single chunk takes longer.
  static const Kernel<DecodeParams>* with_runs() {
    if constexpr (kHasRuns) {
      static const Kernel<DecodeParams> runs{kDecode, name_of(KF, VF, D, NT, true)};
      return &runs;
    }
    return nullptr;
  }
  static DecodeKernel describe() {
    return {&kernel,
            with_runs(),
            warps_of(D),
            ctas_per_sm(D, NT),
            Shape::kSharedBytes,
            std::max(Shape::kStages * Shape::kStageBytes, Shape::kResultBytes),
            Shape::kRows,
            Shape::kOStride * 4,
            static_cast<int>(offsetof(typename Shape::Shared, scratch))};
  }
};
// For `rows` query rows per sequence and KV head.
template <int KF, int VF, int D>
DecodeKernel decode_kernel(int rows) {
  constexpr int kLargest = is_mode(KF, VF) && (D == 64 || D == 128) ? 2 : 1;
  if constexpr (is_q4(KF, VF, D))
    if (rows <= rows_of(0)) return Decoder<KF, VF, D, 0>::describe();
  return rows > rows_of(1) ? Decoder<KF, VF, D, kLargest>::describe() : Decoder<KF, VF, D, 1>::describe();
}

// Calls f(K format, V format, head dim) for all that attention_decode is compiled for; others run in generic.cu.
template <int N>
using Int = std::integral_constant<int, N>;
template <class F>
void each_variant(const F& f) {
  const auto pair = [&](auto k, auto v) {
    f(k, v, Int<64>{}), f(k, v, Int<80>{}), f(k, v, Int<96>{}), f(k, v, Int<128>{}), f(k, v, Int<256>{});
  };
  const auto with_keys = [&](auto k) { pair(k, Int<kCacheF16>{}), pair(k, Int<kCacheQ8>{}), pair(k, Int<kCacheQ4>{}); };
  with_keys(Int<kCacheF16>{}), with_keys(Int<kCacheQ8>{}), with_keys(Int<kCacheQ4>{});
  pair(Int<kCacheFp8>{}, Int<kCacheFp8>{});
}
DecodeKernel find_kernel(const CacheArgs& c, int rows) {
  DecodeKernel found{};
  each_variant([&](auto k, auto v, auto d) {
    if (c.k_format == k && c.v_format == v && c.head_dim == d) found = decode_kernel<k, v, d>(rows);
  });
  return found;
}
// Names every variant when the library is loaded.
[[maybe_unused]] const bool named = [] {
  each_variant([](auto k, auto v, auto d) {
    for (const int rows : {1, rows_of(1), rows_of(2)}) decode_kernel<k, v, d>(rows);
  });
  return true;
}();

// Shared memory of a CTA. Halves the warps until it fits the device; 0 if it never does.
size_t layout_shared(const Device& device, DecodeKernel& k, DecodeParams& p) {
  p.warp_bytes = (k.warp_bytes + 127) / 128 * 128, p.tiles_at = k.shared_bytes;
  for (; k.warps; k.warps /= 2) {
    const size_t bytes = static_cast<size_t>(k.shared_bytes) + k.warps * p.warp_bytes;
    if (bytes <= static_cast<size_t>(device.shared_per_block)) return bytes;
  }
  return 0;
}

// Switches to the kernel with runs if as many CTAs per SM still fit with separate memory for results. They overlay members of Shared that
// are free after the rows are prepared, and more behind them.
size_t layout_runs(const Device& device, DecodeKernel& k, DecodeParams& p, size_t bytes, int64_t rows) {
  const int most = static_cast<int>(std::min<int64_t>(rows, k.rows)), each = (most * k.row_bytes + 127) / 128 * 128;
  const int more = std::max(0, (k.results_at + k.warps * each + 127) / 128 * 128 - k.shared_bytes);
  const size_t with = bytes + more;
  if (!k.kernel_runs || with > static_cast<size_t>(device.shared_per_block) ||
      k.ctas_per_sm * (with + 1024) > static_cast<size_t>(device.shared_per_multiprocessor))
    return bytes;
  k.kernel = k.kernel_runs, p.tiles_at += more, p.result_rows = most, p.result_bytes = each, p.results_at = k.results_at;
  return with;
}

// Whether one CTA gets all warps of an SM: a KV head's queries and its new key and value are more rows than a CTA has warps. Then no warp
// prepares two rows, and half as many chunks are merged. Depends on the model alone, as bits depend on it. TinyLlama's shape (32 heads, 4
// KV heads, D 64) on an H200, 2026-11-23: 3.5 us a layer instead of 4.8. Larger heads have kernels with twice the rows in a CTA.
bool wide(int num_heads, int num_kv_heads, int head_dim) { return head_dim == 64 && num_heads / num_kv_heads + 2 > warps_of(head_dim); }
void widen(DecodeKernel& k, DecodeParams& p) {
  k.warps *= k.ctas_per_sm, k.ctas_per_sm = 1;
  p.max_splits = max_splits(2 * p.a.cache.num_kv_heads);
}

// Many sequences: fewer and larger chunks. items: of one chunk each. As many CTAs per SM as needed, up to 4, so that each takes one item.
void widen_chunks(const Device& device, DecodeKernel& k, DecodeParams& p, int64_t items) {
  const int all = k.warps * k.ctas_per_sm;
  int ctas = 1;
  while (ctas < 4 && all / (2 * ctas) > 1 && items > int64_t(device.multiprocessors) * ctas) ctas *= 2;
  const size_t bytes = ctas * (k.shared_bytes + static_cast<size_t>(all / ctas) * ((k.warp_bytes + 127) / 128 * 128) + 1024);
  if (bytes <= static_cast<size_t>(device.shared_per_multiprocessor)) k.warps = all / ctas, k.ctas_per_sm = ctas;
  const int64_t slots = int64_t(device.multiprocessors) * k.ctas_per_sm;
  p.wanted = static_cast<int>(slots < items ? 1 : slots / items);
}

const char* check_cache(const CacheArgs& c) {
  if (c.head_dim < 8 || c.head_dim > kMaxHeadDim || c.head_dim % 8) return "head_dim is not a multiple of 8 from 8 to 256";
  if (c.num_heads < 1 || c.num_kv_heads < 1 || c.num_heads % c.num_kv_heads) return "the heads are not a multiple of the KV heads";
  for (int format : {c.k_format, c.v_format})
    if (format < kCacheF16 || format > kCacheFp8) return "an unknown cache format";
  if (!c.k_pool || !c.v_pool) return "a pool is missing";
  return nullptr;
}

const char* check_rope(const RopeArgs& r, int head_dim) {
  if (r.half < 0 || 2 * r.half > head_dim) return "more dims rotate than a head has";
  if (r.cos && !r.sin) return "cos without sin";
  return nullptr;
}

int max_chunks(const CacheArgs& c, int key_bytes, int most) {
  const int units = c.max_pages * (kPage / kChunkStep), least = min_chunk_steps(key_bytes, most);
  return std::min((units + least - 1) / least, most);
}

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

struct Workspace {
  size_t part, part_ml, count;
  Workspace(int64_t rows, int num_heads, int num_kv_heads, int head_dim) {
    const int64_t pairs = rows * num_heads * max_splits(num_kv_heads), per_token = (num_heads / num_kv_heads + 3) / 4;
    count = aligned(rows * per_token * num_kv_heads * sizeof(unsigned));
    part_ml = aligned(pairs * sizeof(float2));
    part = aligned(pairs * head_dim * sizeof(float));
  }
  size_t bytes() const { return part + part_ml + count; }
};

// A warp per row of q, k or v.
Launch rows_of_heads(int64_t rows) { return {unsigned((rows + kGenericWarps - 1) / kGenericWarps), kGenericWarps * 32}; }

void norm_all_heads(LaunchList& list, const RopeArgs& rope, float* qkv, const CacheArgs& c, int tokens) {
  list.add(norm_whole_rows, {Dim(tokens, 3), kWholeNormThreads}, rope, qkv, c.num_heads, c.num_kv_heads, c.head_dim);
}

}  // namespace

size_t attention_workspace_bytes(int tokens, int num_heads, int num_kv_heads, int head_dim) {
  return Workspace(tokens, num_heads, num_kv_heads, head_dim).bytes();
}

bool attention_polls(const Device& device, const AttentionArgs& a) {
  if (a.q || a.rope.norm_whole || !a.cache.sequences || check_cache(a.cache)) return false;
  const int per_sequence = (a.tokens + a.cache.sequences - 1) / a.cache.sequences;
  DecodeKernel kernel = find_kernel(a.cache, per_sequence * (a.cache.num_heads / a.cache.num_kv_heads));
  DecodeParams params{};
  return kernel.kernel && layout_shared(device, kernel, params);
}

int attention_sms(int num_heads, int num_kv_heads, int head_dim) {
  return wide(num_heads, num_kv_heads, head_dim) ? num_kv_heads : (num_kv_heads + 1) / 2;
}

void plan_rope_append(LaunchList& list, const RopeAppendArgs& args) {
  if (auto* wrong = check_cache(args.cache)) return list.fail(wrong);
  if (auto* wrong = check_rope(args.rope, args.cache.head_dim)) return list.fail(wrong);
  if (!args.qkv || args.tokens < 0) return list.fail("no qkv");
  if (!args.rope.positions && !args.cache.context_lens) return list.fail("neither positions nor context_lens");
  if (!args.slots && !args.cache.block_table) return list.fail("neither slots nor a block table");
  if (!args.tokens) return;
  if (args.rope.norm_whole) norm_all_heads(list, args.rope, args.qkv, args.cache, args.tokens);
  const int64_t rows = int64_t(args.tokens) * (args.cache.num_heads + 2 * args.cache.num_kv_heads);
  list.add(rope_append_rows, rows_of_heads(rows), args);
}

const char* gather_launch(const CacheArgs& cache, const int* pages, int length, void* k, void* v, void* stream) {
  if (auto* wrong = check_cache(cache)) return wrong;
  if (length < 1) return length ? "a negative length" : nullptr;
  const int64_t rows = 2 * int64_t(length) * cache.num_kv_heads;
  Launch how = rows_of_heads(rows);
  how.stream = stream;
  return gather_rows(how, cache, pages, length, static_cast<half*>(k), static_cast<half*>(v));
}

void plan_attention(LaunchList& list, const AttentionArgs& args) {
  const Device& device = list.device;
  const CacheArgs& c = args.cache;
  if (auto* wrong = check_cache(c)) return list.fail(wrong);
  if (auto* wrong = check_rope(args.rope, c.head_dim)) return list.fail(wrong);
  if (!args.q == !args.qkv) return list.fail("expected one of q and qkv");
  if (args.tokens < 0 || c.sequences < 0 || !c.block_table || !c.cu_seqlens || !c.context_lens) return list.fail("the batch is incomplete");
  if (args.to.num_perms < 0 || args.to.num_perms > AttentionOut::kMaxPerms || (args.to.num_perms && !args.to.x))
    return list.fail("bad output copies");
  if (!args.tokens || !c.sequences) return;
  const int q_per_kv = c.num_heads / c.num_kv_heads;
  const int64_t rows = args.tokens < int64_t(kMaxNew) * c.sequences ? args.tokens : int64_t(kMaxNew) * c.sequences;
  const Workspace sizes(rows, c.num_heads, c.num_kv_heads, c.head_dim);
  if (args.workspace_bytes < sizes.bytes() || !args.workspace)
    return list.fail("the workspace of attention has " + std::to_string(args.workspace_bytes) + " bytes; expected at least " +
                     std::to_string(sizes.bytes()));
  AttentionArgs a = args;
  if (!a.q && a.rope.norm_whole) norm_all_heads(list, a.rope, a.qkv, c, a.tokens);
  const int per_sequence = (a.tokens + c.sequences - 1) / c.sequences;
  // Counters are at the end, where launches with other numbers of tokens have counters too: they stay 0 between launches.
  char* const at = static_cast<char*>(a.workspace);
  char* const end = at + a.workspace_bytes / sizeof(unsigned) * sizeof(unsigned);
  DecodeParams params{};
  params.a = a, params.q_per_kv = q_per_kv, params.blocks_per_token = (q_per_kv + 3) / 4, params.max_splits = max_splits(c.num_kv_heads);
  params.part_ml = reinterpret_cast<float2*>(at), params.part = reinterpret_cast<float*>(at + sizes.part_ml);
  params.count = reinterpret_cast<unsigned*>(end - sizes.count);
  params.q_per_kv_inverse = unsigned((0x100000000ull + q_per_kv - 1) / q_per_kv);
  params.key_bytes = (page_bytes(c.k_format, c.head_dim) + page_bytes(c.v_format, c.head_dim)) / kPage;
  DecodeKernel kernel = find_kernel(c, per_sequence * q_per_kv);
  if (kernel.kernel && a.large_chunks && per_sequence <= kMaxNew)
    widen_chunks(device, kernel, params,
                 int64_t(c.sequences) * c.num_kv_heads * ((int64_t(per_sequence) * q_per_kv + kernel.rows - 1) / kernel.rows));
  else if (kernel.kernel && wide(c.num_heads, c.num_kv_heads, c.head_dim))
    widen(kernel, params);
  if (size_t shared = kernel.kernel ? layout_shared(device, kernel, params) : 0) {
    const int64_t blocks = (int64_t(per_sequence) * q_per_kv + kernel.rows - 1) / kernel.rows,
                  items = blocks * c.sequences * c.num_kv_heads * max_chunks(c, params.key_bytes, params.max_splits);
    const int64_t slots = int64_t(device.multiprocessors) * kernel.ctas_per_sm;
    if (items > slots && !params.wanted && c.sequences <= 32)
      shared = layout_runs(device, kernel, params, shared, int64_t(per_sequence) * q_per_kv);
    return list.add(*kernel.kernel, {unsigned(items < slots ? items : slots), unsigned(kernel.warps * 32), shared}, params);
  }
  // Fallback for other shapes and formats: first the new keys and values, then one warp per query.
  if (!a.q) {
    float* const q = params.part;
    RopeAppendArgs append{a.cache, a.rope, a.qkv, nullptr, a.tokens, q, nullptr, nullptr, nullptr};
    append.rope.norm_whole = false;
    if (a.rope.norm_whole) append.rope.clip = 0.f, append.rope.q_norm = append.rope.k_norm = nullptr;
    plan_rope_append(list, append);
    params.a.q = q;
  }
  list.add(attention_any, rows_of_heads(int64_t(a.tokens) * c.num_heads), params.a);
}

}  // namespace exl2nb
