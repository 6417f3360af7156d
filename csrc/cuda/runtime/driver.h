// The part of the CUDA driver API that the engine uses, looked up in libcuda at run time: building needs no CUDA toolkit, and one library
// runs with every driver from CUDA 12 on. Source: CUDA Driver API 12.0 (signatures, structures and numbers are its ABI).
#pragma once
#include <cstddef>
#include <cstdint>

namespace exl2nb {

using CudaStream = struct CUstream_st*;
using CudaFunction = struct CUfunc_st*;
using CudaModule = struct CUmod_st*;
using CudaContext = struct CUctx_st*;

enum DeviceAttribute {
  kMultiprocessorCount = 16,
  kComputeMajor = 75,
  kComputeMinor = 76,
  kSharedPerMultiprocessor = 81,
  kSharedPerBlockOptin = 97
};
enum FunctionAttribute { kStaticShared = 1, kMaxDynamicShared = 8, kSharedCarveout = 9 };
enum LaunchAttributeId { kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };

struct LaunchAttribute {
  int id;
  alignas(8) union {
    char pad[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int allowed;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8, "CUlaunchAttribute");
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  CudaStream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(offsetof(LaunchConfig, stream) == 32 && sizeof(LaunchConfig) == 56, "CUlaunchConfig");

struct Driver {
  int (*init)(unsigned);
  int (*version)(int*);     // 1000 * major + 10 * minor
  int (*get_device)(int*);  // of the current context
  int (*device_attribute)(int*, int attribute, int device);
  int (*retain_context)(CudaContext*, int device);
  int (*set_context)(CudaContext);
  int (*load_module)(CudaModule*, const void* image);
  int (*get_function)(CudaFunction*, CudaModule, const char* name);
  int (*function_attribute)(int*, int attribute, CudaFunction);
  int (*set_function_attribute)(CudaFunction, int attribute, int value);
  int (*launch)(const LaunchConfig*, CudaFunction, void** parameters, void** extra);
  int (*copy)(uintptr_t to, uintptr_t from, size_t bytes, CudaStream);  // on devices
  int (*copy_to_host)(void* to, uintptr_t from, size_t bytes, CudaStream);
  int (*copy_to_device)(uintptr_t to, const void* from, size_t bytes, CudaStream);
  int (*fill)(uintptr_t to, unsigned char value, size_t bytes, CudaStream);
  int (*synchronize)(CudaStream);
  int (*host_address)(uintptr_t*, void* host, unsigned flags);
  int (*error_string)(int, const char**);
};
constexpr int kMaxDevices = 64;

// The driver, or null where there is none that is new enough.
const Driver* driver();
// nullptr, or what the driver says of an error.
const char* error_text(int error);
// Device of the calling thread; -1 without a GPU. A thread without a context gets the first device's: the CUDA runtime, which torch uses,
// makes another device's context current when it selects it.
int current_device();

}  // namespace exl2nb
