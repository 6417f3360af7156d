// Memory for what an op needs while it runs. Every thread keeps a few blocks that it has used: a decode step takes some hundred buffers of
// the same sizes again and again, and asking the system for them costs more than small products do.
#pragma once
#include <cstdint>

namespace exl2nb {

// 64-byte aligned, uninitialised; throws std::bad_alloc. bytes: the same number again when it is given back, by any thread.
void* take_memory(int64_t bytes);
void give_memory(void* memory, int64_t bytes) noexcept;

}  // namespace exl2nb
