// Torch's current stream. The function lives in libtorch_cuda.so, which a CPU build of torch lacks, so it is looked up at first use.
#pragma once
#include <dlfcn.h>
#include <torch/csrc/stable/tensor.h>

namespace exl2nb {

inline void* stream_of(const torch::stable::Tensor& t) {
  using Get = AOTITorchError (*)(int32_t, void**);
  static const Get get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library ? reinterpret_cast<Get>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  STD_TORCH_CHECK(get, "this build of torch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get(t.get_device_index(), &stream));
  return stream;
}

}  // namespace exl2nb
