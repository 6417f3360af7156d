// Facts of a GPU.
#pragma once

namespace exl2nb {

// What the choice of kernels and their launches depends on.
struct Device {
  int major = 0, minor = 0;  // compute capability
  // Major number of the compute capability whose kernels run: EXL2NB_CUDA_PATH makes a newer GPU run as sm_80 to 89 (1) or sm_75 (2), in
  // code and in memory.
  int kernels_major = 0;
  int multiprocessors = 1;
  // Bytes of shared memory: what a kernel may ask for, and what the CTAs of a multiprocessor share. 0: the device does not tell.
  int shared_per_block = 0, shared_per_multiprocessor = 0;

  // Whether the GPU is of compute capability 9.0, whose own instructions no later one has.
  bool has_wgmma() const { return major == 9 && minor == 0; }
};
// Of the current GPU, and of a GPU by its number; defaults where there is none.
const Device& this_device();
const Device& device_facts(int device);

}  // namespace exl2nb
