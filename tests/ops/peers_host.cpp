// The exchange kernels of csrc/cuda/runtime run by threads of the processor: a rank is a thread, a launch one CUDA thread. Prints what is
// wrong.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cuda/runtime/types.h"

namespace exl2nb {
thread_local bool late = false;  // waits before every third look at a number
inline void store_far(uint64_t* p, uint64_t v) { std::atomic_ref<uint64_t>(*p).store(v, std::memory_order_relaxed); }
inline uint64_t load_far(const uint64_t* p) {
  thread_local int looks = 0;
  if (late && ++looks % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::yield();
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(p)).load(std::memory_order_relaxed);
}
}  // namespace exl2nb
#include "cuda/runtime/exchange.cu"

using namespace exl2nb;

float value(int rank, int row, int column, int turn) { return static_cast<float>((rank * 31 + row * 7 + column * 3 + turn) % 1000); }

// kind 0: sums; 1: parts of different widths, also into a matrix's input; 2: what rank 0 alone has.
int run(const Peers& peers, int turn) {
  ExchangeArgs a{};
  const int kind = turn % 3, parts = kind ? peers.size : 1;
  a.peers = peers, a.sum = !kind, a.rows = 1 + turn % 3;
  for (int i = 0; i < parts; i++) a.first[i + 1] = a.first[i] + (!kind ? 10 + turn % 9 : kind == 1 ? 4 + 3 * i : i ? 0 : 11);
  const int total = a.first[parts], mine = kind ? peers.rank : 0, own = a.first[mine + 1] - a.first[mine], stride = total + 32;
  std::vector<float> x(a.rows * own + 1), out(a.rows * total);
  std::vector<half> input(a.rows * stride * 2);
  std::vector<int> inverse(total);
  for (int i = 0; i < total; i++) inverse[i] = total - 1 - i;
  for (int i = 0; i < a.rows * own; i++) x[i] = value(peers.rank, i / own, a.first[mine] + i % own, turn);
  a.x = x.data(), a.x_stride = own, a.out = out.data(), a.out_stride = total;
  if (kind == 1) a.next.x = input.data(), a.next.stride = stride, a.next.num_perms = 1, a.next.inverse[0] = inverse.data();
  exchange_rows(a);
  count_exchanges(reinterpret_cast<unsigned*>(peers.buffer[peers.rank]), 1);
  int wrong = 0;
  for (int row = 0; row < a.rows; row++)
    for (int c = 0; c < total; c++) {
      float expected = 0.f;
      for (int r = 0; r < peers.size; r++)
        if (!kind || (c >= a.first[r] && c < a.first[r + 1])) expected += value(r, row, c, turn);
      wrong += out[row * total + c] != expected;
      if (kind == 1) wrong += input[row * stride + fragment_place(inverse[c])] != expected;
    }
  return wrong;
}

int main(int, char** words) {
  const int size = std::atoi(words[1]), turns = std::atoi(words[2]);
  const int64_t numbers = 1024;
  std::vector<std::vector<uint64_t>> memory(size, std::vector<uint64_t>(kPeerHeader / 8 + 2 * size * numbers));
  int stop = 0;
  std::atomic<int> wrong{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; rank++)
    ranks.emplace_back([&, rank] {
      Peers peers{};
      peers.rank = rank, peers.size = size, peers.words = numbers, peers.stop = &stop, late = rank == 1;
      for (int r = 0; r < size; r++) peers.buffer[r] = reinterpret_cast<uint8_t*>(memory[r].data());
      for (int turn = 0; turn < turns; turn++) wrong += run(peers, turn);
    });
  for (auto& rank : ranks) rank.join();
  std::printf("%d wrong\n", wrong.load());
}
