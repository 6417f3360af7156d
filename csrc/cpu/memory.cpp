#include "memory.h"

#include <cstddef>
#include <new>

namespace exl2nb {
namespace {

constexpr int kClasses = 13;                  // blocks of 1 KiB, 2 KiB ... 4 MiB
constexpr int kSmallest = 10, kMaxKept = 32;  // log2 of the smallest; blocks kept of one class at most
constexpr int64_t kKept = int64_t(1) << 20;   // bytes kept of one class at most, or one block

int class_of(int64_t bytes) {
  int c = 0;
  while (c < kClasses && (int64_t(1) << (kSmallest + c)) < bytes) c++;
  return c;
}

void free_block(void* memory) noexcept { ::operator delete(memory, std::align_val_t(64)); }

// A list of free blocks per class; a block's first bytes point to the next one.
struct Blocks {
  struct Free {
    Free* next;
  };
  Free* first[kClasses] = {};
  int count[kClasses] = {};
  ~Blocks() {
    for (Free* block : first)
      while (block) {
        Free* next = block->next;
        free_block(block);
        block = next;
      }
  }
};
thread_local Blocks mine;

}  // namespace

void* take_memory(int64_t bytes) {
  const int c = class_of(bytes);
  if (c < kClasses && mine.first[c]) {
    Blocks::Free* block = mine.first[c];
    mine.first[c] = block->next;
    mine.count[c]--;
    return block;
  }
  const int64_t whole = c < kClasses ? int64_t(1) << (kSmallest + c) : (bytes + 63) / 64 * 64;
  return ::operator new(std::size_t(whole), std::align_val_t(64));
}

void give_memory(void* memory, int64_t bytes) noexcept {
  const int c = class_of(bytes);
  const int64_t size = int64_t(1) << (kSmallest + c);
  if (c >= kClasses || mine.count[c] >= kMaxKept || (mine.count[c] + 1) * size > (size > kKept ? size : kKept)) return free_block(memory);
  mine.first[c] = new (memory) Blocks::Free{mine.first[c]};
  mine.count[c]++;
}

}  // namespace exl2nb
