// Launches of many.cuh: how the rows are shared out, which number of tokens.
#include "many.cuh"

#include <algorithm>
#include <atomic>

#include "device.cuh"
#include "many.h"

namespace exl2nb {
namespace {

int shared_limit() {
  static const int limit = shared_per_block();
  return limit;
}

template <int NB, bool PAIRED>
const char* launch(const ManyArgs& a, cudaStream_t stream, bool pdl) {
  static const cudaError_t ready = cudaFuncSetAttribute(many<NB, PAIRED>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit());
  if (ready != cudaSuccess) return cudaGetErrorString(ready);
  return launch_kernel(many<NB, PAIRED>, many_grid(a), kManyThreads, static_cast<size_t>(many_shared(a, NB)), stream, pdl,
                       static_cast<unsigned>(a.splits), a);
}
template <int NB>
const char* launch(const ManyArgs& a, cudaStream_t stream, bool pdl) {
  return a.paired ? launch<NB, true>(a, stream, pdl) : launch<NB, false>(a, stream, pdl);
}

// Clusters of so many CTAs that run at a time, one CTA on a multiprocessor.
int clusters(int size) {
  static std::atomic<int> known[kManySplits + 1] = {};
  int count = known[size];
  if (!count) {
    cudaFuncSetAttribute(many<2, false>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit());
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(size), 256), config.blockDim = dim3(kManyThreads);
    config.dynamicSmemBytes = static_cast<size_t>(shared_limit());
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension, attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    config.attrs = &attribute, config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&count, many<2, false>, &config) != cudaSuccess) cudaGetLastError();
    known[size] = count = std::max(1, count);
  }
  return count;
}
// CTAs that share a tile's rows: so that a product ends soonest, by a CTA's units and what comes before and after them.
int splits_of(int tiles, int units) {
  constexpr float kStart = 4.f, kSum = 4.f;  // in units
  const auto time = [&](int splits) {
    const int at_a_time = splits == 1 ? multiprocessors() : clusters(splits), rounds = (tiles + at_a_time - 1) / at_a_time;
    return static_cast<float>(rounds) * (kStart + (splits > 1 ? kSum : 0.f) + static_cast<float>((units + splits - 1) / splits));
  };
  int best = 1;
  for (int splits = 2; splits <= kManySplits; splits++)
    if (time(splits) < time(best)) best = splits;
  return best;
}

}  // namespace

bool many_takes(const GemvArgs& a) {
  ManyArgs m{};
  m.items = a.items, m.units = a.units, m.num_parts = a.num_parts;
  return a.tokens > kFewTokens && gemv_path() == kBulk && !a.rows && !a.from.x && many_shared(m, kManyTokens / 8) <= shared_limit();
}

bool many_pairs(const GemvArgs& a) {
  return a.gated && a.num_parts == 2 && a.part[0].outputs == a.part[1].outputs && a.part[0].outputs % 4 == 0;
}

bool many_adds(const GemvArgs& a) { return a.num_parts == 1; }

const char* many_launch(const GemvArgs& a, int group, ManyImage next, cudaStream_t stream, bool pdl) {
  ManyArgs m{};
  m.image = a.image, m.num_parts = a.num_parts, m.items = a.items, m.units = a.units;
  m.x_stride = a.x_stride, m.x_perm_stride = a.x_perm_stride, m.bias = a.bias, m.out_stride = a.out_stride;
  m.squares_count = a.squares_count, m.inverse_width = a.inverse_width, m.eps = a.eps;
  m.residual_stride = a.residual_stride, m.scale = a.scale, m.next = a.next, m.next_norm = a.next_norm;
  m.next_image = next.data, m.next_image_bytes = next.bytes;
  m.paired = !a.out && !a.residual, m.activation = a.activation;
  for (int p = 0; p < a.num_parts; p++) {
    const GemvPart& from = a.part[p];
    const int count = (from.strips + kManyStrips - 1) / kManyStrips;
    m.part[p] = {from.data, from.strips, from.first_column, from.outputs, from.perm, count, from.strip_bytes};
    if (p == 0 || !m.paired) m.tiles += count;
  }
  const bool wide = many_wide_ready();
  m.splits = splits_of(m.tiles, m.paired ? a.units : a.units / std::max(1, a.num_parts));
  for (int first = 0; first < a.tokens; first += kManyTokens) {
    m.tokens = std::min(kManyTokens, a.tokens - first);
    const auto from = static_cast<size_t>(first);
    m.x = a.x + from * a.x_stride, m.out = a.out ? a.out + from * a.out_stride : nullptr;
    m.squares = a.squares ? a.squares + from * a.squares_count : nullptr;
    m.residual = a.residual + from * a.residual_stride, m.next.x = a.next.x + from * a.next.stride;
    m.next_squares = a.next_squares + from * (kManyColumns / 32) * m.tiles;
    const char* wrong = wide          ? many_wide_launch(m, group, shared_limit(), stream, pdl)
                        : group == 16 ? launch<2>(m, stream, pdl)
                        : group == 32 ? launch<4>(m, stream, pdl)
                                      : launch<8>(m, stream, pdl);
    if (wrong) return wrong;
  }
  return nullptr;
}

}  // namespace exl2nb
