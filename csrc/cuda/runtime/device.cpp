#include "cuda/runtime/device.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "cuda/runtime/driver.h"

namespace exl2nb {
namespace {

// EXL2NB_CUDA_PATH, 1 or 2; else 0.
int emulated() {
  static const int path = [] {
    const char* const text = std::getenv("EXL2NB_CUDA_PATH");
    return text ? std::clamp(std::atoi(text), 0, 2) : 0;
  }();
  return path;
}

}  // namespace

// Asked for once per device.
const Device& device_facts(int device) {
  static Device known[kMaxDevices];
  static std::once_flag asked[kMaxDevices];
  static const Device none;
  const Driver* const d = driver();
  if (!d || device < 0 || device >= kMaxDevices) return none;
  Device& f = known[device];
  std::call_once(asked[device], [&] {
    d->device_attribute(&f.major, kComputeMajor, device), d->device_attribute(&f.minor, kComputeMinor, device);
    d->device_attribute(&f.multiprocessors, kMultiprocessorCount, device);
    d->device_attribute(&f.shared_per_block, kSharedPerBlockOptin, device);
    d->device_attribute(&f.shared_per_multiprocessor, kSharedPerMultiprocessor, device);
    f.kernels_major = f.major;
    if (!emulated()) return;
    f.kernels_major = std::min(f.major, 9 - emulated());
    f.shared_per_block = std::min(f.shared_per_block, emulated() == 1 ? 99 << 10 : 64 << 10);
    f.shared_per_multiprocessor = std::min(f.shared_per_multiprocessor, emulated() == 1 ? 100 << 10 : 64 << 10);
  });
  return f;
}
const Device& this_device() { return device_facts(current_device()); }

}  // namespace exl2nb
