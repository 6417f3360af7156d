#include "cuda/gemm/elementwise.h"

#include <algorithm>

#include "cuda/runtime/kernel.h"

namespace exl2nb {
namespace {

constexpr const char *kSource = "gemm/elementwise.cu", *kPrefill = "gemm/prefill.cu";
const Kernel<EmbedArgs> embed_kernel{kSource, "embed_kernel"};
const Kernel<RowsArgs> rows_kernel{kSource, "rows_kernel"};
const Kernel<GatesArgs> gates_kernel{kSource, "gates_kernel"};

const Kernel<NormRowsArgs> norm_rows{kPrefill, "norm_rows<4>", false}, norm_long_rows{kPrefill, "norm_rows<8>", false};
const Kernel<const half*, int64_t, int, bool, int, half*> gate_rows{kPrefill, "gate_rows<1>", false},
    gate_eights{kPrefill, "gate_rows<8>", false};
const Kernel<RotateRowsArgs> rotate_rows{kPrefill, "rotate_rows", false};
const Kernel<MergePartsArgs> merge_parts{kPrefill, "merge_parts", false};

}  // namespace

void plan_embed(LaunchList& list, const EmbedArgs& a, int tokens) {
  if (tokens) list.add(embed_kernel, {unsigned(tokens), kRowThreads}, a);
}
void plan_gates(LaunchList& list, const GatesArgs& a, int tokens) {
  const Dim grid((a.width + 4 * kRowThreads - 1) / (4 * kRowThreads), tokens);
  if (tokens) list.add(gates_kernel, {grid, kRowThreads}, a);
}
void plan_rows(LaunchList& list, const RowsArgs& a, int rows) {
  if (rows) list.add(rows_kernel, {unsigned(rows), kRowThreads}, a);
}

const char* norm_rows_launch(const NormRowsArgs& a, void* stream) {
  if (a.tokens == 0) return nullptr;
  const auto& kernel = a.width <= 4 * 4 * kNormThreads ? norm_rows : norm_long_rows;
  return kernel({unsigned(a.tokens), kNormThreads, 0, stream}, a);
}

const char* gate_rows_launch(const void* y, int64_t tokens, int width, bool gated, int kind, void* out, void* stream) {
  if (tokens == 0) return nullptr;
  const bool eights = ((reinterpret_cast<uintptr_t>(y) | reinterpret_cast<uintptr_t>(out)) & 15) == 0 && width % 8 == 0;
  const int per = kGateThreads * (eights ? 8 : 1);
  const Dim grid((width + per - 1) / per, unsigned(std::min<int64_t>(tokens, 65535)));
  return (eights ? gate_eights : gate_rows)({grid, kGateThreads, 0, stream}, static_cast<const half*>(y), tokens, width, gated, kind,
                                            static_cast<half*>(out));
}

const char* rotate_rows_launch(const RotateRowsArgs& a, void* stream) {
  if (a.tokens == 0) return nullptr;
  const int64_t threads = a.tokens * (a.num_heads + 2 * a.num_kv_heads) * (a.head_dim / 16);
  return rotate_rows({unsigned((threads + kGateThreads - 1) / kGateThreads), kGateThreads, 0, stream}, a);
}

const char* merge_parts_launch(const MergePartsArgs& a, void* stream) {
  const int64_t threads = a.tokens * a.heads * (a.head_dim / 8);
  return threads == 0 ? nullptr : merge_parts({unsigned((threads + kGateThreads - 1) / kGateThreads), kGateThreads, 0, stream}, a);
}

}  // namespace exl2nb
