// Host side of stream_k_gemm.cuh: work split by cost, grid, dispatch on the row group.
#include "cuda/gemm/stream_k/stream_k_gemm.cuh"

#include <algorithm>

#include "cuda/runtime/device.h"
#include "cuda/runtime/kernel.h"

namespace exl2nb {
namespace {

// Cycles per unit of a CTA's 16 strips, about (benchmarks/cuda/stream_k_gemm.cu w); tokens: of a group. H200, 2026-11.
float stream_k_unit_cost(const GpuRun& run, int tokens) {
  const float narrow[17] = {0, 0, 650, 690, 675, 770, 865, 0, 920, 0, 0, 0, 0, 0, 0, 0, 1000};
  return narrow[run.bits] + (run.halves && run.bits < 8 ? 50.f : 0.f) + (tokens <= kStreamKMmaTokens ? 0.f : tokens <= 32 ? 100.f : 200.f);
}
// And per tile.
float stream_k_tile_cost(int tokens) { return tokens <= kStreamKMmaTokens ? 1100.f : 1800.f; }

// Fills `begin`: the first unit of each CTA's share, so that shares take equally long. parts: of the blob. The tile cost precedes the
// tile's first unit: a share that would end in it ends there.
void split_units(StreamKArgs& m, const GpuPart* parts, int grid, int work, int tokens) {
  const int lines = m.paired ? 1 : m.num_parts, together = m.paired ? 2 : 1;  // parts per tile
  const auto cost_of = [&](const GpuRun& run) { return static_cast<double>(run.units) * stream_k_unit_cost(run, tokens); };
  double cost[kMaxParts] = {}, all = 0;  // per tile
  int units[kMaxParts] = {};
  for (int line = 0; line < lines; line++) {
    cost[line] = stream_k_tile_cost(tokens);
    for (int p = line; p < line + together; p++) {
      for (const GpuRun& run : parts[p].runs) cost[line] += cost_of(run);
      units[line] += m.part[p].units;
    }
    all += m.part[line].tiles * cost[line];
  }
  // Number of first units of a tile that cost `rest`.
  const auto units_for = [&](int line, double rest) {
    int n = 0;
    rest -= stream_k_tile_cost(tokens);
    for (int p = line; p < line + together; p++)
      for (const GpuRun& run : parts[p].runs) {
        if (rest <= 0) return n;
        const double part = std::min(1.0, rest / std::max(1.0, cost_of(run)));
        n += static_cast<int>(part * run.units + 0.5), rest -= cost_of(run);
      }
    return n;
  };
  m.begin[0] = 0, m.begin[grid] = work, m.density = static_cast<float>(grid) / static_cast<float>(work);
  int line = 0, before = 0;  // units of earlier parts
  double spent = 0;
  for (int cta = 1; cta < grid; cta++) {
    const double target = all * cta / grid;
    while (line + 1 < lines && target >= spent + m.part[line].tiles * cost[line])
      spent += m.part[line].tiles * cost[line], before += m.part[line].tiles * units[line], line++;
    const int tile = std::min(static_cast<int>((target - spent) / cost[line]), m.part[line].tiles - 1);
    const int at = before + tile * units[line] + units_for(line, target - spent - tile * cost[line]);
    m.begin[cta] = std::min(std::max(at, m.begin[cta - 1] + 1), work - grid + cta);
  }
}

// By rows of a group: 16, 32, 64. wgmma: Hopper alone.
constexpr const char *kSource = "gemm/stream_k/stream_k_gemm.cuh", *kWgmmaSource = "gemm/stream_k/stream_k_wgmma.cu";
const Kernel<StreamKArgs> mma_kernels[] = {{kSource, "stream_k_gemm<2>"}, {kSource, "stream_k_gemm<4>"}, {kSource, "stream_k_gemm<8>"}},
                          wgmma_kernels[] = {{kWgmmaSource, "stream_k_wgmma<2>"},
                                             {kWgmmaSource, "stream_k_wgmma<4>"},
                                             {kWgmmaSource, "stream_k_wgmma<8>"}};
const Kernel<StreamKArgs, StreamKLora> lora_kernels[] = {{kSource, "stream_k_lora<2>"},
                                                         {kSource, "stream_k_lora<4>"},
                                                         {kSource, "stream_k_lora<8>"}},
                                       wgmma_lora_kernels[] = {{kWgmmaSource, "stream_k_wgmma_lora<2>"},
                                                               {kWgmmaSource, "stream_k_wgmma_lora<4>"},
                                                               {kWgmmaSource, "stream_k_wgmma_lora<8>"}};

// CTAs: one per SM, at least a few units each, at most kStreamKMaxSharers per tile.
int grid_of(const Device& device, const StreamKArgs& m, int work) {
  constexpr int kLeast = 4;
  int sharers = 0;
  for (int p = 0; p < m.num_parts; p++) sharers = std::max(sharers, m.part[p].units);
  if (m.paired) sharers = m.part[0].units + m.part[1].units;
  const int share = std::max(kLeast, (sharers + kStreamKMaxSharers - 3) / (kStreamKMaxSharers - 2));
  return std::max(1, std::min(std::min(device.multiprocessors, kStreamKMaxCtas), work / share));
}

}  // namespace

size_t stream_k_workspace(const Device& device, int tokens) {
  if (tokens == 1 || copy_path(device) != kBulk || stream_k_pool(kStreamKTokens / 8) > device.shared_per_block) return 0;
  return static_cast<size_t>(stream_k_bytes(tokens, device.multiprocessors));
}

bool stream_k_takes(const Device& device, const GemmArgs& a) {
  constexpr int kLine = 1 << 20;  // units of all tiles, for divide_small
  StreamKArgs m{};
  m.items = a.items, m.units = a.units, m.num_parts = a.num_parts;
  return a.tokens > 1 && copy_path(device) == kBulk && !a.rows && !a.from.x &&
         stream_k_shared(m, kStreamKTokens / 8) <= device.shared_per_block &&
         static_cast<int64_t>(a.strips / kStreamKStrips + a.num_parts) * a.units < kLine;
}

bool stream_k_fuses_gate(const GemmArgs& a) {
  return a.gated && a.num_parts == 2 && a.part[0].outputs == a.part[1].outputs && a.part[0].outputs % 4 == 0;
}

void plan_stream_k(LaunchList& list, const GemmArgs& a, int group, const StreamKNext& next, void* workspace, const StreamKLora* lora) {
  if (a.squares && a.squares_count % 4) return list.fail("squares_count must be a multiple of 4 for stream-K");
  StreamKArgs m{};
  m.image = a.image, m.num_parts = a.num_parts, m.items = a.items, m.units = a.units;
  m.x_stride = a.x_stride, m.x_perm_stride = a.x_perm_stride, m.bias = a.bias, m.out_stride = a.out_stride;
  m.squares_count = a.squares_count, m.inverse_width = a.inverse_width, m.eps = a.eps;
  m.residual_stride = a.residual_stride, m.scale = a.scale, m.next = a.next, m.next_norm = a.next_norm;
  m.next_image = next.image, m.next_image_bytes = next.bytes, m.keys = next.keys;
  m.paired = !a.out && !a.residual, m.activation = a.activation;
  int work = 0;
  for (int p = 0; p < a.num_parts; p++) {
    const GemmPart& from = a.part[p];
    const int count = (from.strips + kStreamKStrips - 1) / kStreamKStrips;
    m.part[p] = {from.data, from.strips, from.first_column, from.outputs, from.perm, count, a.part_units[p], from.strip_bytes};
    if (p == 0 || !m.paired) m.tiles += count;
    work += count * a.part_units[p];
  }
  m.partial = static_cast<float*>(workspace);
  const int grid = grid_of(list.device, m, work);
  split_units(m, parts_of(a.head), grid, work, group);
  const bool wide = group > kStreamKMmaTokens && list.device.has_wgmma(), inside = lora && group <= kLoraStripRows;
  StreamKLora adapters{};
  if (lora) {
    adapters = *lora;
    for (int p = 0; p < a.num_parts; p++) adapters.first_strip[p] = parts_of(a.head)[p].first_strip;
  }
  for (int first = 0; first < a.tokens; first += kStreamKTokens) {
    m.tokens = std::min(kStreamKTokens, a.tokens - first);
    const auto from = static_cast<size_t>(first);
    m.x = a.x + from * a.x_stride, m.out = a.out ? a.out + from * a.out_stride : nullptr;
    m.squares = a.squares ? a.squares + from * a.squares_count : nullptr;
    m.residual = a.residual + from * a.residual_stride, m.next.x = a.next.x + from * a.next.stride;
    m.next_squares = a.next_squares + from * kStreamKStrips * m.tiles;
    const int size = group == 16 ? 0 : group == 32 ? 1 : 2;
    const int bytes = stream_k_shared(m, group / 8) + (inside ? kLoraStripBytes : 0);
    const Launch how{unsigned(grid), kStreamKThreads, static_cast<size_t>(bytes)};
    if (lora)
      list.add((wide ? wgmma_lora_kernels : lora_kernels)[size], how, m, adapters);
    else
      list.add((wide ? wgmma_kernels : mma_kernels)[size], how, m);
  }
}

}  // namespace exl2nb
