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

using Facts = DeviceFacts;
thread_local const Facts* assumed = nullptr;
// Asked for once per device; the defaults where there is no answer.
const Facts& facts_of(int device) {
  if (assumed) return *assumed;
  static Facts known[kMaxDevices];
  static std::once_flag asked[kMaxDevices];
  static const Facts none;
  const Driver* const d = driver();
  if (!d || device < 0 || device >= kMaxDevices) return none;
  Facts& f = known[device];
  std::call_once(asked[device], [&] {
    d->device_attribute(&f.major, kComputeMajor, device), d->device_attribute(&f.minor, kComputeMinor, device);
    d->device_attribute(&f.multiprocessors, kMultiprocessorCount, device);
    d->device_attribute(&f.shared_per_block, kSharedPerBlockOptin, device);
    d->device_attribute(&f.shared_per_multiprocessor, kSharedPerMultiprocessor, device);
  });
  return f;
}

}  // namespace

AssumedDevice::AssumedDevice(const DeviceFacts& facts) { assumed = &facts; }
AssumedDevice::~AssumedDevice() { assumed = nullptr; }
ComputeCapability compute_capability(int device) { return {facts_of(device).major, facts_of(device).minor}; }
int multiprocessors() { return facts_of(current_device()).multiprocessors; }
int compute_major() {
  const int major = compute_capability(current_device()).major;
  return emulated() ? std::min(major, 9 - emulated()) : major;
}
bool has_wgmma() {
  const ComputeCapability c = compute_capability(current_device());
  return c.major == 9 && c.minor == 0;
}
int shared_per_block() {
  const int all = facts_of(current_device()).shared_per_block;
  return emulated() ? std::min(all, emulated() == 1 ? 99 << 10 : 64 << 10) : all;
}
int shared_per_multiprocessor() {
  const int all = facts_of(current_device()).shared_per_multiprocessor;
  return emulated() ? std::min(all, emulated() == 1 ? 100 << 10 : 64 << 10) : all;
}

}  // namespace exl2nb
