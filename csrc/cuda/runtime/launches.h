// A list of kernel launches as plain data: it can be run, or written as text on a machine without a GPU.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

namespace exl2nb {

class KernelBase;  // kernel.h
struct Dim {
  unsigned x = 1, y = 1, z = 1;
  Dim(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// pdl: may start before the kernel in front of it in the stream ends (sm_90 and later). cluster: CTAs that may read one another's shared
// memory.
struct Launch {
  Dim grid;
  Dim threads;
  size_t shared_bytes;
  void* stream;
  bool pdl = false;
  unsigned cluster = 1;
};

struct PlannedLaunch {
  const KernelBase* kernel;  // null: a copy on the device, whose arguments are two addresses and the number of bytes
  Launch how;                // without a stream
  int op;                    // number of the program's op that the launch belongs to
  uint32_t first, count;     // of the arguments in LaunchList
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
  int op = 0;  // of the launches added from now on

  template <class... Parameters>
  void add(const KernelBase* kernel, const Launch& how, const Parameters&... parameters) {
    launches_.push_back({kernel, how, op, static_cast<uint32_t>(sizes_.size()), sizeof...(parameters)});
    (put(parameters), ...);
  }
  const std::vector<PlannedLaunch>& launches() const { return launches_; }
  // A line for each launch, with tabs between: op number; kernel; grid, threads, shared bytes; the words of 8 bytes of its arguments that
  // are not 0, "offset:value". address: the name of a word that is an address, else an empty text.
  std::string text(const std::function<std::string(uint64_t)>& address) const;

 private:
  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>, "arguments of kernels are plain data");
    const size_t at = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
    starts_.push_back(static_cast<uint32_t>(at)), sizes_.push_back(sizeof(T));
  }

  std::vector<PlannedLaunch> launches_;
  std::vector<uint32_t> starts_, sizes_;  // of the arguments
  std::vector<uint8_t> bytes_;
};

// Launches of this thread go to `list` while this object lives, and nothing is launched.
class Recording {
 public:
  explicit Recording(LaunchList& list);
  ~Recording();
  static LaunchList* current();
};

}  // namespace exl2nb
