// A list of kernel launches as plain data: it can be run, or written as text on a machine without a GPU.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

namespace exl2nb {

struct Device;     // device.h
class KernelBase;  // kernel.h
template <class... Parameters>
class Kernel;
// An error text as a plain pointer: each distinct one is kept.
const char* kept(const std::string& text);

struct Dim {
  unsigned x = 1, y = 1, z = 1;
  Dim(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// pdl: may start before the kernel in front of it in the stream ends (sm_90 and later). cluster: CTAs that may read one another's shared
// memory.
struct Launch {
  Dim grid;
  Dim threads;
  size_t shared_bytes = 0;
  void* stream = nullptr;
  bool pdl = false;
  unsigned cluster = 1;
};

struct PlannedLaunch {
  const KernelBase* kernel;  // null: a copy on the device, whose arguments are two addresses and the number of bytes
  Launch how;                // without a stream
  int op;                    // number of the program's op that the launch belongs to
  uint32_t first, count;     // of its arguments in LaunchList
};

// A T whose padding is zero too, so that equal arguments have equal bytes.
template <class T>
T zeroed() {
  T value;
  std::memset(static_cast<void*>(&value), 0, sizeof(T));
  return value;
}

class LaunchList {
 public:
  // pdl: kernels may start before the kernel in front of them ends.
  LaunchList(const Device& device, bool pdl) : device(device), pdl(pdl) {}

  const Device& device;
  bool pdl;
  int op = 0;  // of the launches added from now on

  template <class... Parameters>
  void add(const Kernel<Parameters...>& kernel, const Launch& how, const std::type_identity_t<Parameters>&... parameters) {
    put(&kernel, how, parameters...);
  }
  void add_copy(void* to, const void* from, size_t bytes) { put(nullptr, {1u, 1u}, to, from, bytes); }
  // The list cannot be run; the first reason counts.
  void fail(const std::string& text) {
    if (!failed_) failed_ = kept(text);
  }
  void fail_shared(const std::string& what, int bytes, int most) {
    fail(what + " needs " + std::to_string(bytes) + " bytes of shared memory; the GPU has " + std::to_string(most));
  }
  const char* failed() const { return failed_; }  // nullptr, or why

  const std::vector<PlannedLaunch>& launches() const { return launches_; }
  // Launches all of it and empties the list: nullptr, or what went wrong.
  const char* run(void* stream);
  // A line for each launch, with tabs between: op number; kernel; grid, threads, shared bytes; the words of 8 bytes of its arguments that
  // are not 0, "offset:value". address: the name of a word that is an address, else an empty text.
  std::string text(const std::function<std::string(uint64_t)>& address) const;

 private:
  static constexpr uint32_t kMostArguments = 8;  // of a kernel

  template <class... Parameters>
  void put(const KernelBase* kernel, const Launch& how, const Parameters&... parameters) {
    static_assert(sizeof...(parameters) <= kMostArguments && (std::is_trivially_copyable_v<Parameters> && ...),
                  "few arguments, plain data");
    launches_.push_back({kernel, how, op, static_cast<uint32_t>(arguments_.size()), sizeof...(parameters)});
    launches_.back().how.pdl = pdl && kernel;
    (put_argument(&parameters, sizeof(parameters)), ...);
  }
  void put_argument(const void* value, size_t size) {
    const size_t at = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(at + size);
    std::memcpy(bytes_.data() + at, value, size);
    arguments_.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(size)});
  }

  struct Argument {
    uint32_t at, size;
  };
  std::vector<PlannedLaunch> launches_;
  std::vector<Argument> arguments_;
  std::vector<uint8_t> bytes_;
  const char* failed_ = nullptr;
};

}  // namespace exl2nb
