#include "cuda/runtime/kernel.h"

#include <memory>
#include <set>

#include "cuda/runtime/device.h"

namespace exl2nb {

namespace {

// Kernels that this thread has asked for since exl2nb_note_launches, "source\tname\n" each; null: kernels are launched, not noted.
thread_local std::unique_ptr<std::string> noted;

std::atomic<KernelCode> code_source{nullptr};

}  // namespace

const char* kept(const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string> texts;
  const std::lock_guard<std::mutex> lock(mutex);
  return texts.insert(text).first->c_str();
}

// Every kernel that host code names, "source\tname\n" each.
std::string& all_kernels() {
  static std::string lines;
  return lines;
}

KernelBase::KernelBase(const char* source, std::string name, bool carveout) : source_(source), name_(std::move(name)), carveout_(carveout) {
  all_kernels() += std::string(source_) + "\t" + name_ + "\n";
}

void set_kernel_code(KernelCode source) { code_source = source; }

const char* KernelBase::load(int device, CudaFunction& function) const {
  function = functions_[device].load(std::memory_order_acquire);
  if (function) return nullptr;
  // Locked only for the module: the source of code takes Python's lock, whose holder may be waiting for this kernel.
  const KernelCode find = code_source.load();
  if (!find) return "nothing gives the machine code of kernels: exl2nb.ops has not been loaded";
  const void* code = nullptr;
  const char* text = nullptr;
  if (find(source_, name_.c_str(), device_facts(device).major, device_facts(device).minor, &code, &text))
    return kept(std::string(text ? text : "no machine code") + " (kernel " + name_ + " of " + source_ + ")");
  const std::lock_guard<std::mutex> lock(loading_);
  function = functions_[device].load(std::memory_order_acquire);
  if (function) return nullptr;
  const Driver& d = *driver();
  CudaModule module = nullptr;
  const auto failed = [&](const char* what, int error) {
    return kept(std::string(what) + ": " + error_text(error) + " (kernel " + name_ + " of " + source_ + ")");
  };
  if (const int error = d.load_module(&module, code)) return failed("the driver does not take the machine code", error);
  if (const int error = d.get_function(&function, module, text)) return failed("the machine code lacks the kernel", error);
  int fixed = 0;
  if (const int error = d.function_attribute(&fixed, kStaticShared, function)) return failed("no attributes", error);
  if (carveout_) d.set_function_attribute(function, kSharedCarveout, 100);
  if (const int error = d.set_function_attribute(function, kMaxDynamicShared, device_facts(device).shared_per_block - fixed))
    return failed("the limit of shared memory cannot be raised", error);
  functions_[device].store(function, std::memory_order_release);
  return nullptr;
}

const char* KernelBase::problem() const {
  CudaFunction function = nullptr;
  return find(function);
}
int KernelBase::static_shared() const {
  CudaFunction function = nullptr;
  int bytes = -1;
  if (!find(function)) driver()->function_attribute(&bytes, kStaticShared, function);
  return bytes;
}

// The kernel on the current device.
const char* KernelBase::find(CudaFunction& function) const {
  const int device = current_device();
  if (device < 0) return "no GPU was found, or its driver does not support CUDA 12";
  if (device >= kMaxDevices) return "more GPUs than the engine knows";
  return load(device, function);
}

const char* KernelBase::run(const Launch& how, void** arguments) const {
  if (noted) {
    const std::string line = std::string(source_) + "\t" + name_ + "\n";
    if (noted->find(line) == std::string::npos) *noted += line;
    return nullptr;
  }
  CudaFunction function = nullptr;
  if (const char* wrong = find(function)) return wrong;
  LaunchAttribute attributes[2];
  LaunchConfig config{{how.grid.x, how.grid.y, how.grid.z},
                      {how.threads.x, how.threads.y, how.threads.z},
                      static_cast<unsigned>(how.shared_bytes),
                      static_cast<CudaStream>(how.stream),
                      attributes,
                      0};
  if (how.pdl && this_device().kernels_major >= 9) {
    attributes[config.num_attributes].id = kProgrammaticStreamSerialization;
    attributes[config.num_attributes++].value.allowed = 1;
  }
  if (how.cluster > 1) {
    attributes[config.num_attributes].id = kClusterDimension;
    attributes[config.num_attributes++].value.cluster = {how.cluster, 1, 1};
  }
  return error_text(driver()->launch(&config, function, arguments, nullptr));
}

}  // namespace exl2nb

// What ops/kernel_code.py calls. Notes are of the calling thread.
#define EXL2NB_EXPORT extern "C" __attribute__((visibility("default")))
EXL2NB_EXPORT void exl2nb_set_kernel_code(exl2nb::KernelCode source) { exl2nb::set_kernel_code(source); }
EXL2NB_EXPORT const char* exl2nb_all_kernels() { return exl2nb::all_kernels().c_str(); }
EXL2NB_EXPORT int exl2nb_driver_version() {
  int version = 0;
  return exl2nb::driver() && exl2nb::driver()->version(&version) == 0 ? version : 0;
}
EXL2NB_EXPORT void exl2nb_note_launches() { exl2nb::noted = std::make_unique<std::string>(); }
// Ends noting. The text is valid until the thread's next call.
EXL2NB_EXPORT const char* exl2nb_noted_launches() {
  thread_local std::string lines;
  lines = exl2nb::noted ? *exl2nb::noted : "";
  exl2nb::noted.reset();
  return lines.c_str();
}
