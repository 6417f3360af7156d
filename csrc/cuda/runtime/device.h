// Facts of the current GPU.
#pragma once

namespace exl2nb {

struct ComputeCapability {
  int major, minor;
};
struct DeviceFacts {
  int major = 0, minor = 0, multiprocessors = 1, shared_per_block = 0, shared_per_multiprocessor = 0;  // shared memory in bytes
};
// The facts that this thread gets in place of the current GPU's while this object lives.
class AssumedDevice {
 public:
  explicit AssumedDevice(const DeviceFacts& facts);
  ~AssumedDevice();
};
ComputeCapability compute_capability(int device);
int multiprocessors();
// Compute capability whose kernels run: EXL2NB_CUDA_PATH makes a newer GPU run as sm_80 to 89 (1) or sm_75 (2), in code and in memory.
int compute_major();
// Whether the GPU is of compute capability 9.0, whose own instructions no later one has.
bool has_wgmma();
// Bytes of shared memory: what a kernel may ask for, and what the CTAs of a multiprocessor share. 0: the device does not tell.
int shared_per_block();
int shared_per_multiprocessor();

}  // namespace exl2nb
