// Launches of many.cuh: how the rows are shared out, which number of tokens.
#include "cuda/gemm/stream_k/many.cuh"

#include <algorithm>

#include "cuda/gemm/stream_k/many.h"
#include "cuda/gemm/stream_k/many_cost.h"
#include "cuda/runtime/device.cuh"

namespace exl2nb {
#ifdef EXL2NB_CLOCKS
long long* many_clocks = nullptr;
#endif
namespace {

int shared_limit() {
  static const int limit = shared_per_block();
  return limit;
}

template <int NB>
const char* launch(const ManyArgs& a, int grid, cudaStream_t stream, bool pdl) {
  static const cudaError_t ready = cudaFuncSetAttribute(many<NB>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit());
  if (ready != cudaSuccess) return cudaGetErrorString(ready);
  return launch_kernel(many<NB>, dim3(static_cast<unsigned>(grid)), kManyThreads, static_cast<size_t>(many_shared(a, NB)), stream, pdl, 1,
                       a);
}

// CTAs: one a multiprocessor, none with less than a few units, no more to a tile than may meet.
int grid_of(const ManyArgs& m, int work) {
  constexpr int kLeast = 4;
  int meet = 0;
  for (int p = 0; p < m.num_parts; p++) meet = std::max(meet, m.part[p].units);
  if (m.paired) meet = m.part[0].units + m.part[1].units;
  const int share = std::max(kLeast, (meet + kManyMeet - 3) / (kManyMeet - 2));
  return std::max(1, std::min(std::min(multiprocessors(), kManyMost), work / share));
}

}  // namespace

size_t many_workspace(int tokens) {
  if (tokens <= kFewTokens || gemv_path() != kBulk || many_pool(kManyTokens / 8) > shared_limit()) return 0;
  return static_cast<size_t>(multiprocessors()) * 4 * many_sums(many_group(tokens) / 8) * sizeof(float);
}

bool many_takes(const GemvArgs& a) {
  constexpr int kLine = 1 << 20;  // units of all tiles, for many_divide
  ManyArgs m{};
  m.items = a.items, m.units = a.units, m.num_parts = a.num_parts;
  return a.tokens > kFewTokens && gemv_path() == kBulk && !a.rows && !a.from.x && many_shared(m, kManyTokens / 8) <= shared_limit() &&
         static_cast<int64_t>(a.strips / kManyStrips + a.num_parts) * a.units < kLine;
}

bool many_pairs(const GemvArgs& a) {
  return a.gated && a.num_parts == 2 && a.part[0].outputs == a.part[1].outputs && a.part[0].outputs % 4 == 0;
}

bool many_adds(const GemvArgs& a) { return a.num_parts == 1; }

const char* many_launch(const GemvArgs& a, int group, const ManyNext& next, void* workspace, cudaStream_t stream, bool pdl) {
  if (a.squares && a.squares_count % 4) return "partial squares of many tokens come by fours";
  ManyArgs m{};
  m.image = a.image, m.num_parts = a.num_parts, m.items = a.items, m.units = a.units;
  m.x_stride = a.x_stride, m.x_perm_stride = a.x_perm_stride, m.bias = a.bias, m.out_stride = a.out_stride;
  m.squares_count = a.squares_count, m.inverse_width = a.inverse_width, m.eps = a.eps;
  m.residual_stride = a.residual_stride, m.scale = a.scale, m.next = a.next, m.next_norm = a.next_norm;
  m.next_image = next.image, m.next_image_bytes = next.bytes, m.keys = next.keys;
  m.paired = !a.out && !a.residual, m.activation = a.activation;
  int work = 0;
  for (int p = 0; p < a.num_parts; p++) {
    const GemvPart& from = a.part[p];
    const int count = (from.strips + kManyStrips - 1) / kManyStrips;
    m.part[p] = {from.data, from.strips, from.first_column, from.outputs, from.perm, count, a.part_units[p], from.strip_bytes};
    if (p == 0 || !m.paired) m.tiles += count;
    work += count * a.part_units[p];
  }
  m.partial = static_cast<float*>(workspace);
  const int grid = grid_of(m, work);
  many_share_out(m, reinterpret_cast<const GpuPart*>(a.head + sizeof(GpuHeader)), grid, work, group);
#ifdef EXL2NB_CLOCKS
  m.clocks = many_clocks;
#endif
  const bool wide = group > kManyNarrow && many_wide_ready();
  for (int first = 0; first < a.tokens; first += kManyTokens) {
    m.tokens = std::min(kManyTokens, a.tokens - first);
    const auto from = static_cast<size_t>(first);
    m.x = a.x + from * a.x_stride, m.out = a.out ? a.out + from * a.out_stride : nullptr;
    m.squares = a.squares ? a.squares + from * a.squares_count : nullptr;
    m.residual = a.residual + from * a.residual_stride, m.next.x = a.next.x + from * a.next.stride;
    m.next_squares = a.next_squares + from * kManyStrips * m.tiles;
    const char* wrong = wide          ? many_wide_launch(m, grid, group, shared_limit(), stream, pdl)
                        : group == 16 ? launch<2>(m, grid, stream, pdl)
                        : group == 32 ? launch<4>(m, grid, stream, pdl)
                                      : launch<8>(m, grid, stream, pdl);
    if (wrong) return wrong;
  }
  return nullptr;
}

}  // namespace exl2nb
