#include "cuda/runtime/elementwise.h"

#include "cuda/runtime/kernel.h"

namespace exl2nb {
namespace {

constexpr const char* kSource = "runtime/elementwise.cu";
const Kernel<EmbedArgs> embed_kernel{kSource, "embed_kernel"};
const Kernel<RowsArgs> rows_kernel{kSource, "rows_kernel"};
const Kernel<GatesArgs> gates_kernel{kSource, "gates_kernel"};

}  // namespace

const char* embed_launch(const EmbedArgs& a, int tokens, void* stream, bool pdl) {
  return tokens == 0 ? nullptr : embed_kernel({unsigned(tokens), kRowThreads, 0, stream, pdl}, a);
}
const char* gates_launch(const GatesArgs& a, int tokens, void* stream, bool pdl) {
  const Dim grid((a.width + 4 * kRowThreads - 1) / (4 * kRowThreads), tokens);
  return tokens == 0 ? nullptr : gates_kernel({grid, kRowThreads, 0, stream, pdl}, a);
}
const char* rows_launch(const RowsArgs& a, int rows, void* stream, bool pdl) {
  return rows == 0 ? nullptr : rows_kernel({unsigned(rows), kRowThreads, 0, stream, pdl}, a);
}

}  // namespace exl2nb
