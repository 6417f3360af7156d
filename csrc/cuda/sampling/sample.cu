// Sampling's launch function: how many CTAs share a row, and whether its logits fit into their memory.
#include "cuda/runtime/device.cuh"
#include "cuda/sampling/sample.cuh"

namespace exl2nb {

void* pinned(void* host) {
  void* here = nullptr;
  if (cudaHostGetDevicePointer(&here, host, 0) == cudaSuccess) return here;
  cudaGetLastError();  // else the next launch would report it
  return nullptr;
}

const char* sample_launch(const SampleArgs& args, void* stream, bool pdl) {
  if (!args.logits || !args.params || args.rows < 0 || args.vocab < 1 || args.row_stride < args.vocab) return "the logits are incomplete";
  if (args.results && args.ring < 1) return "a ring of no steps";
  if (!args.rows) return nullptr;
  const int room = shared_per_block();
  const unsigned team =
      compute_major() >= 9 && args.vocab > 4096 ? kMaxTeam : 1;  // of the vocabulary alone, so that bits depend on nothing else
  const int64_t per = (int64_t(args.vocab) + team - 1) / team + 4;
  if (per > int64_t(1) << 17) return "the vocabulary is too large";
  const size_t fixed = (sizeof(SampleShared) + 15) / 16 * 16, all = fixed + size_t(per) * sizeof(float);
  // Where there are more CTAs than multiprocessors, two at a time read their logits again for a draw rather than one keeps them.
  const bool keep = all <= size_t(room) && (fixed * 2 > size_t(shared_per_multiprocessor()) || args.rows * int(team) <= multiprocessors());
  const size_t shared = keep ? all : fixed;
  if (auto* wrong = error_text(cudaFuncSetAttribute(sample_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)))) return wrong;
  return launch_kernel(sample_rows, dim3(team, unsigned(args.rows)), kSampleThreads, shared, stream, pdl, team, args, keep);
}

}  // namespace exl2nb
