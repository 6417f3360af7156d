#include "cuda/gemm/lora.h"

#include <algorithm>

#include "cuda/runtime/device.h"
#include "cuda/runtime/kernel.h"

namespace exl2nb {
namespace {

constexpr int kShrinkSplit = 4;  // most CTAs that share the columns of a chunk: q, k and v of rank 16, or gate and up of rank 32, one each
constexpr int kShrinkCtas = 6;   // resident on an SM (40 registers); more would take turns, most of them without columns
const Kernel<LoraArgs> shrink{"gemm/lora.cu", "lora_shrink"}, shrink_all{"gemm/lora.cu", "lora_sums"},
    expand{"gemm/lora.cu", "lora_expand"};

Dim shrink_grid(const Device& device, const LoraArgs& a, int rows) {
  const auto chunks = static_cast<int>(lora_chunks(a.K)), resident = kShrinkCtas * device.multiprocessors / (chunks * rows);
  const int split = std::clamp(resident, 1, std::clamp(a.width / 16, 1, kShrinkSplit));
  return {static_cast<unsigned>(chunks), static_cast<unsigned>(split), static_cast<unsigned>(rows)};
}

}  // namespace

void plan_lora_shrink(LaunchList& list, const LoraArgs& a, int rows) {
  list.add(shrink_all, {shrink_grid(list.device, a, rows), kLoraThreads}, a);
}

void plan_lora(LaunchList& list, LoraArgs a, int rows) {
  const int columns = a.next.x && a.gated ? a.N / 2 : a.N;
  for (int left = rows; left > 0; left -= kLoraRows) {
    const unsigned now = std::min(left, kLoraRows);
    const Dim pieces((columns + kLoraThreads - 1) / kLoraThreads, now);
    if (!a.ids) list.add(shrink, {shrink_grid(list.device, a, static_cast<int>(now)), kLoraThreads}, a);
    list.add(expand, {pieces, kLoraThreads}, a);
    (a.of.rows ? a.of.rows : a.of.adapters) += kLoraRows;
    if (a.ids) a.ids += kLoraRows;
    if (a.x.x) a.x.x += static_cast<size_t>(kLoraRows) * a.x.stride;
    if (a.next.x) a.next.x += static_cast<size_t>(kLoraRows) * a.next.stride;
    a.y += kLoraRows * a.stride;
  }
}

}  // namespace exl2nb
