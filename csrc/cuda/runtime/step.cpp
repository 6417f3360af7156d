#include "cuda/runtime/step.h"

#include "cuda/runtime/device.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/plan.h"

namespace exl2nb {

std::string step_launch(const Program& program, const GpuStep& step, void* workspace, size_t bytes, void* stream, bool pdl) {
  auto* const memory = static_cast<uint8_t*>(workspace);
  LaunchList list(this_device(), pdl);
  // Op by op: planning a step of an 8B model takes about as long as launching it, and the GPU need not wait for all of it.
  const std::string wrong = plan_step(list, program, step, memory, bytes, [&] { list.run(stream); });
  if (list.failed())
    for (const Zeros& zeros : step_zeros(list.device, program, step, memory))
      driver()->fill(reinterpret_cast<uintptr_t>(zeros.at), 0, zeros.bytes, static_cast<CudaStream>(stream));
  return wrong;
}

}  // namespace exl2nb
