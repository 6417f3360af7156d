// Which kernels a step launches, in order and with every argument: a function of the program, the rows, the device and the adapters.
// Nothing is launched, and no memory of the device is read or written.
//
// Kernels of a layer where the norms are RMS norms in front of attention and MLP:
//   1 to 8 rows on Hopper, not deterministic: attention, and one persistent chain from its output to the next QKV (persistent_gemm.cuh).
//     Attention polls the sums of QKV while the chain still runs. Where layers are large only up to 3 rows: more run as 9 and more
//     (Planner::exceeds_chain). Where they are small up to 4 in one chain, up to 8 in two.
//   1 to 8 rows else: QKV, attention, O, gate/up, down, each GEMM a skinny one (skinny_gemm.cuh).
//   9 rows or more, where stream_k_from > 0 and the GPU takes every matrix: the same five with stream-K GEMMs (stream_k_gemm.cuh); the last
//     norm is a kernel of its own where not every row wants logits.
// The GEMM that adds to the residual also writes the next GEMM's input, times the norm's weights; the next one divides its sums by the root
// mean square. A LayerNorm, and a norm behind attention or MLP, need the whole row first: up to 4 rows every CTA of the next GEMM computes
// it (norm.cuh), else a small kernel. Experts: moe.h. A step with adapters has a launch for every product, which only stores, and the
// kernels of lora.h between them, or (lora_inside) the launches of a step without; it is captured as any other.
//
// exl2nb.ops.step_plan prints the plan of a model.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "cuda/runtime/launches.h"
#include "cuda/runtime/step.h"

namespace exl2nb {

// Adds the step's launches to an empty list. Returns what is wrong with the program or the step, or an empty text.
//   workspace, bytes: as in step_launch.
//   after_op: called when an op's launches have been added. It may run the list, so that the GPU works while later ops are planned.
std::string plan_step(LaunchList& list, const Program& program, const GpuStep& step, uint8_t* workspace, size_t bytes,
                      const std::function<void()>& after_op = {});

// What a step's kernels leave zero behind them, for the next step: to be cleared where a launch failed.
struct Zeros {
  void* at;
  size_t bytes;
};
std::vector<Zeros> step_zeros(const Device& device, const Program& program, const GpuStep& step, uint8_t* workspace);

}  // namespace exl2nb
