#include "cuda/runtime/driver.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace exl2nb {
namespace {

void* symbol_of(const char* name) {
#ifdef _WIN32
  static HMODULE library = LoadLibraryA("nvcuda.dll");
  return library ? reinterpret_cast<void*>(GetProcAddress(library, name)) : nullptr;
#else
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return library ? dlsym(library, name) : nullptr;
#endif
}

template <class F>
bool find(F& function, const char* name) {
  function = reinterpret_cast<F>(symbol_of(name));
  return function != nullptr;
}

}  // namespace

const Driver* driver() {
  static Driver d{};
  static const bool found =
      find(d.init, "cuInit") && find(d.version, "cuDriverGetVersion") && find(d.get_device, "cuCtxGetDevice") &&
      find(d.device_attribute, "cuDeviceGetAttribute") && find(d.retain_context, "cuDevicePrimaryCtxRetain") &&
      find(d.set_context, "cuCtxSetCurrent") && find(d.load_module, "cuModuleLoadData") && find(d.get_function, "cuModuleGetFunction") &&
      find(d.function_attribute, "cuFuncGetAttribute") && find(d.set_function_attribute, "cuFuncSetAttribute") &&
      find(d.launch, "cuLaunchKernelEx") && find(d.copy, "cuMemcpyDtoDAsync_v2") && find(d.copy_to_host, "cuMemcpyDtoHAsync_v2") &&
      find(d.copy_to_device, "cuMemcpyHtoDAsync_v2") && find(d.fill, "cuMemsetD8Async") && find(d.synchronize, "cuStreamSynchronize") &&
      find(d.host_address, "cuMemHostGetDevicePointer_v2") && find(d.error_string, "cuGetErrorString") && d.init(0) == 0;
  return found ? &d : nullptr;
}

const char* error_text(int error) {
  if (error == 0) return nullptr;
  const char* text = nullptr;
  if (driver() && driver()->error_string(error, &text) == 0 && text) return text;
  return "an unknown CUDA error";
}

int current_device() {
  const Driver* const d = driver();
  int device = -1;
  if (!d || d->get_device(&device) == 0) return device;
  static CudaContext first = nullptr;
  static const int error = d->retain_context(&first, 0);
  return error == 0 && d->set_context(first) == 0 ? 0 : -1;
}

}  // namespace exl2nb
