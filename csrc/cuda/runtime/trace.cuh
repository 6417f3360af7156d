// Clocks of the decode kernel's stages, for benchmarks/cuda/attention_step.cu: behind the workspace, 16 of every CTA, 12 to 14 the time in
// ns at stages 2, 6 and 10. Nothing where EXL2NB_TRACE is not defined.
#pragma once

#ifdef EXL2NB_TRACE
#define EXL2NB_MARK(a, i)                                                                                                                 \
  do {                                                                                                                                    \
    if (threadIdx.x == 0) {                                                                                                               \
      long long* const clocks_ = reinterpret_cast<long long*>(static_cast<char*>((a).workspace) + (a).workspace_bytes) + blockIdx.x * 16; \
      clocks_[i] = clock64();                                                                                                             \
      if ((i) == 2 || (i) == 6 || (i) == 10)                                                                                              \
        asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(clocks_[(i) == 2 ? 12 : (i) == 6 ? 13 : 14]));                                    \
    }                                                                                                                                     \
  } while (0)
#else
#define EXL2NB_MARK(a, i) static_cast<void>(0)
#endif
