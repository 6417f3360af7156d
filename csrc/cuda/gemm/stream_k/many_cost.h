// What the work of many.cuh costs, so that CTAs get shares that take equally long.
#pragma once
#include <algorithm>

#include "cuda/gemm/stream_k/many_args.cuh"

namespace exl2nb {

// Cycles that a CTA takes for a unit of its sixteen strips, about (benchmarks/cuda/many_products.cu w); tokens: of a group.
inline float many_unit_cost(const GpuRun& run, int tokens) {
  const float narrow[17] = {0, 0, 650, 690, 675, 770, 865, 0, 920, 0, 0, 0, 0, 0, 0, 0, 1000};
  return narrow[run.bits] + (run.halves && run.bits < 8 ? 50.f : 0.f) + (tokens <= kManyNarrow ? 0.f : tokens <= 32 ? 100.f : 200.f);
}
// And for beginning with another tile.
inline float many_tile_cost(int tokens) { return tokens <= kManyNarrow ? 1100.f : 1800.f; }

// Fills `begin`: where in the line of units each of `grid` CTAs begins. parts: of the blob. The cost of beginning a tile lies before its
// first unit: where a share would end in it, it ends there.
inline void many_share_out(ManyArgs& m, const GpuPart* parts, int grid, int work, int tokens) {
  const int lines = m.paired ? 1 : m.num_parts, together = m.paired ? 2 : 1;  // parts of a tile
  const auto cost_of = [&](const GpuRun& run) { return static_cast<double>(run.units) * many_unit_cost(run, tokens); };
  double cost[kMaxParts] = {}, all = 0;  // of a tile
  int units[kMaxParts] = {};
  for (int line = 0; line < lines; line++) {
    cost[line] = many_tile_cost(tokens);
    for (int p = line; p < line + together; p++) {
      for (const GpuRun& run : parts[p].runs) cost[line] += cost_of(run);
      units[line] += m.part[p].units;
    }
    all += m.part[line].tiles * cost[line];
  }
  // Units of a tile's beginning that cost so much.
  const auto units_for = [&](int line, double rest) {
    int n = 0;
    rest -= many_tile_cost(tokens);
    for (int p = line; p < line + together; p++)
      for (const GpuRun& run : parts[p].runs) {
        if (rest <= 0) return n;
        const double part = std::min(1.0, rest / std::max(1.0, cost_of(run)));
        n += static_cast<int>(part * run.units + 0.5), rest -= cost_of(run);
      }
    return n;
  };
  m.begin[0] = 0, m.begin[grid] = work, m.density = static_cast<float>(grid) / static_cast<float>(work);
  int line = 0, before = 0;  // units of the lines before
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

}  // namespace exl2nb
