// Memory for what an op needs while it runs. Every thread keeps a few blocks that it has used: a decode step takes some hundred buffers of
// the same sizes again and again, and asking the system for them costs more than small products do.
#pragma once
#include <cstdint>

namespace exl2nb {

// 64-byte aligned, uninitialised; throws std::bad_alloc. bytes: the same number again when it is given back, by any thread.
void* take_memory(int64_t bytes);
void give_memory(void* memory, int64_t bytes) noexcept;

// Uninitialised memory, 64-byte aligned.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n) : bytes_(n * int64_t(sizeof(T)) + 64), p_(static_cast<T*>(take_memory(bytes_))) {}
  Buffer(Buffer&& other) noexcept : bytes_(other.bytes_), p_(other.p_) { other.p_ = nullptr; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (p_) give_memory(p_, bytes_);
  }
  T* get() const { return p_; }
  operator T*() const { return p_; }

 private:
  int64_t bytes_;
  T* p_;
};

}  // namespace exl2nb
