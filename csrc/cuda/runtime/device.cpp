#include "cuda/runtime/device.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "cuda/runtime/driver.h"

namespace exl2nb {
namespace {

constexpr int kMost = 64;

int pretended() {
  static const int path = [] {
    const char* const text = std::getenv("EXL2NB_CUDA_PATH");
    return text ? std::clamp(std::atoi(text), 0, 2) : 0;
  }();
  return path;
}

// An attribute of a device, asked for once; `otherwise` where there is no answer.
int attribute(std::atomic<int> (&known)[kMost], DeviceAttribute which, int device, int otherwise) {
  const Driver* const d = driver();
  if (!d || device < 0 || device >= kMost) return otherwise;
  int value = known[device].load(std::memory_order_relaxed);
  if (!value && d->device_attribute(&value, which, device) == 0) known[device].store(value, std::memory_order_relaxed);
  return value ? value : otherwise;
}

}  // namespace

ComputeCapability compute_capability(int device) {
  static std::atomic<int> major[kMost];
  int minor = 0;
  if (driver()) driver()->device_attribute(&minor, kComputeMinor, device);
  return {attribute(major, kComputeMajor, device, 0), minor};
}
int multiprocessors() {
  static std::atomic<int> count[kMost];
  return attribute(count, kMultiprocessorCount, current_device(), 1);
}
int compute_major() {
  const int major = compute_capability(current_device()).major;
  return pretended() ? std::min(major, 9 - pretended()) : major;
}
bool has_wgmma() {
  const ComputeCapability c = compute_capability(current_device());
  return c.major == 9 && c.minor == 0;
}
int shared_per_block() {
  static std::atomic<int> bytes[kMost];
  const int all = attribute(bytes, kSharedPerBlockOptin, current_device(), 0);
  return pretended() ? std::min(all, pretended() == 1 ? 99 << 10 : 64 << 10) : all;
}
int shared_per_multiprocessor() {
  static std::atomic<int> bytes[kMost];
  const int all = attribute(bytes, kSharedPerMultiprocessor, current_device(), 0);
  return pretended() ? std::min(all, pretended() == 1 ? 100 << 10 : 64 << 10) : all;
}

}  // namespace exl2nb
