#include "cuda/gemm/prefill.h"

#include <algorithm>

#include "cuda/runtime/kernel.h"
#include "cuda/runtime/types.h"

namespace exl2nb {
namespace {

constexpr const char* kSource = "gemm/prefill.cu";
const Kernel<NormRowsArgs> norm_rows{kSource, "norm_rows<4>", false}, norm_long_rows{kSource, "norm_rows<8>", false};
const Kernel<const half*, int64_t, int, bool, int, half*> gate_rows{kSource, "gate_rows<1>", false},
    gate_eights{kSource, "gate_rows<8>", false};
const Kernel<RotateRowsArgs> rotate_rows{kSource, "rotate_rows", false};

}  // namespace

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

}  // namespace exl2nb
