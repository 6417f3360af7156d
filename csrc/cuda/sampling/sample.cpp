#include "cuda/sampling/sample.h"

#include "cuda/runtime/device.h"
#include "cuda/runtime/kernel.h"

namespace exl2nb {
namespace {

const Kernel<SampleArgs, bool> sample_rows{"sampling/sample.cu", "sample_rows"};

}  // namespace

void* pinned(void* host) {
  uintptr_t here = 0;
  return driver() && driver()->host_address(&here, host, 0) == 0 ? reinterpret_cast<void*>(here) : nullptr;
}

const char* sample_launch(const SampleArgs& args, void* stream, bool pdl) {
  if (!args.logits || !args.params || args.rows < 0 || args.vocab < 1 || args.row_stride < args.vocab) return "the logits are incomplete";
  if (args.results && args.ring < 1) return "a ring of no steps";
  if (!args.rows) return nullptr;
  const Device& device = this_device();
  const int most = device.shared_per_block;
  const unsigned cluster =
      device.kernels_major >= 9 && args.vocab > 4096 ? kMaxCluster : 1;  // of the vocabulary alone, so that bits depend on nothing else
  const int64_t per = (int64_t(args.vocab) + cluster - 1) / cluster + 4;
  if (per > int64_t(1) << 17) return "the vocabulary is too large";
  const size_t fixed = (sizeof(SampleShared) + 15) / 16 * 16, all = fixed + size_t(per) * sizeof(float);
  // Where there are more CTAs than multiprocessors, two at a time read their logits again for a draw rather than one keeps them.
  const bool keep =
      all <= size_t(most) && (fixed * 2 > size_t(device.shared_per_multiprocessor) || args.rows * int(cluster) <= device.multiprocessors);
  const size_t shared = keep ? all : fixed;
  return sample_rows({Dim(cluster, unsigned(args.rows)), kSampleThreads, shared, stream, pdl, cluster}, args, keep);
}

}  // namespace exl2nb
