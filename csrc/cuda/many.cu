// Launches of many.cuh: how the rows are shared out, which number of tokens.
#include "many.cuh"

#include <algorithm>

#include "device.cuh"
#include "many.h"

namespace exl2nb {
namespace {

int shared_limit() {
  static const int limit = shared_per_block();
  return limit;
}

template <int NB, bool PAIRED>
const char* launch(const ManyArgs& a, int tiles, cudaStream_t stream, bool pdl) {
  static const cudaError_t ready = cudaFuncSetAttribute(many<NB, PAIRED>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit());
  if (ready != cudaSuccess) return cudaGetErrorString(ready);
  return launch_kernel(many<NB, PAIRED>, dim3(static_cast<unsigned>(a.splits), static_cast<unsigned>(tiles)), kManyThreads,
                       static_cast<size_t>(many_shared(a, NB)), stream, pdl, static_cast<unsigned>(a.splits), a);
}
template <int NB>
const char* launch(const ManyArgs& a, int tiles, cudaStream_t stream, bool pdl) {
  return a.paired ? launch<NB, true>(a, tiles, stream, pdl) : launch<NB, false>(a, tiles, stream, pdl);
}

// CTAs that share a tile's rows: so that a product ends soonest, by a CTA's items and what comes before and after them. room: CTAs that a
// multiprocessor takes at a time; two are slower than one, but quicker than one after the other.
int splits_of(int tiles, int items, int room) {
  constexpr float kStart = 1.5f, kSum = 0.5f, kBeside = 1.3f;  // in items
  const auto time = [&](int splits) {
    const int whole = splits == 1 ? multiprocessors() : multiprocessors() / kManySplits * kManySplits;
    const int rounds = (tiles * splits + room * whole - 1) / (room * whole);
    const float item = room > 1 && tiles * splits > whole ? kBeside : 1.f;
    return static_cast<float>(rounds) *
           (kStart + (splits > 1 ? kSum : 0.f) + static_cast<float>(items) * item / static_cast<float>(splits));
  };
  int best = 1;
  for (int splits = 2; splits <= kManySplits; splits *= 2)
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

int many_squares(const GemvArgs& a) {
  const bool fours = a.part[0].outputs % 4 == 0 && a.residual_stride % 4 == 0;
  const int count = (a.part[0].strips + kManyStrips - 1) / kManyStrips * 2;
  return fours && a.num_parts == 1 && count <= num_sms() ? count : 0;
}

const char* many_launch(const GemvArgs& a, int group, ManyImage next, cudaStream_t stream, bool pdl) {
  ManyArgs m{};
  m.image = a.image, m.num_parts = a.num_parts, m.items = a.items, m.units = a.units;
  m.x_stride = a.x_stride, m.x_perm_stride = a.x_perm_stride, m.bias = a.bias, m.out_stride = a.out_stride;
  m.squares_count = a.squares_count, m.inverse_width = a.inverse_width, m.eps = a.eps;
  m.residual_stride = a.residual_stride, m.scale = a.scale, m.next = a.next, m.next_norm = a.next_norm;
  m.next_image = next.data, m.next_image_bytes = next.bytes;
  m.paired = !a.out && !a.residual, m.activation = a.activation;
  int tiles = 0;
  for (int p = 0; p < a.num_parts; p++) {
    const GemvPart& from = a.part[p];
    const int count = (from.strips + kManyStrips - 1) / kManyStrips;
    m.part[p] = {from.data, from.strips, from.first_column, from.outputs, from.perm, count, from.strip_bytes};
    if (p == 0 || !m.paired) tiles += count;
  }
  const bool wide = many_wide_ready();
  m.splits = splits_of(tiles, m.paired ? a.items : a.items / std::max(1, a.num_parts), group == 16 ? 2 : 1);
  for (int first = 0; first < a.tokens; first += kManyTokens) {
    m.tokens = std::min(kManyTokens, a.tokens - first);
    const auto from = static_cast<size_t>(first);
    m.x = a.x + from * a.x_stride, m.out = a.out ? a.out + from * a.out_stride : nullptr;
    m.squares = a.squares ? a.squares + from * a.squares_count : nullptr;
    m.residual = a.residual + from * a.residual_stride, m.next.x = a.next.x + from * a.next.stride;
    m.next_squares = a.next_squares + from * 2 * tiles;
    const char* wrong = group == 16   ? launch<2>(m, tiles, stream, pdl)
                        : group == 32 ? launch<4>(m, tiles, stream, pdl)
                        : wide        ? many_wide_launch(m, tiles, shared_limit(), stream, pdl)
                                      : launch<8>(m, tiles, stream, pdl);
    if (wrong) return wrong;
  }
  return nullptr;
}

}  // namespace exl2nb
