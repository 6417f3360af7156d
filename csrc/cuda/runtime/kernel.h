// Kernels by name: their machine code is compiled, or read from a cache, when they are first launched on a device (ops/kernel_code.py).
// Host code names a kernel's file and template arguments; it is compiled without a CUDA compiler.
#pragma once
#include <atomic>
#include <mutex>
#include <string>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/launches.h"

namespace exl2nb {

// Gives the machine code of a kernel for a GPU of compute capability major.minor: 0, or 1 and the reason in `text`. `code` and `text` stay
// valid for the life of the process. name: as in Kernel; text: the kernel's symbol in the code.
using KernelCode = int (*)(const char* source, const char* name, int major, int minor, const void** code, const char** text);
void set_kernel_code(KernelCode source);

class KernelBase {
 public:
  const char* source() const { return source_; }
  const std::string& name() const { return name_; }
  // Static shared memory, bytes; negative: the kernel cannot be loaded, and problem() says why.
  int static_shared() const;
  const char* problem() const;

  // nullptr, or what went wrong.
  const char* run(const Launch& how, void** arguments) const;

 protected:
  KernelBase(const char* source, std::string name, bool carveout);

 private:
  const char* find(CudaFunction& function) const;
  const char* load(int device, CudaFunction& function) const;

  const char* source_;
  std::string name_;
  bool carveout_;
  mutable std::mutex loading_;
  mutable std::atomic<CudaFunction> functions_[kMaxDevices] = {};
};

// source: a file below csrc/cuda. name: "kernel" or "kernel<arguments>", in namespace exl2nb. carveout: the largest share of L1 becomes
// shared memory, as for every kernel of a step: a change of the share between two kernels drains the multiprocessors.
template <class... Parameters>
class Kernel : public KernelBase {
 public:
  Kernel(const char* source, std::string name, bool carveout = true) : KernelBase(source, std::move(name), carveout) {}
  // nullptr, or what went wrong.
  const char* operator()(const Launch& how, const Parameters&... parameters) const {
    void* arguments[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
    return run(how, arguments);
  }
};

}  // namespace exl2nb
