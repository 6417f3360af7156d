// Exchanges of whole rows between ranks: a thread sends its numbers, then polls for those of the others in its places. CTAs of one rank
// need not be resident at once: all of a CTA's numbers are on their way before it waits. Bytes: 8 per number and receiver.
#include "cuda/runtime/exchange.h"
#include "cuda/runtime/pdl.cuh"

namespace exl2nb {

__global__ void __launch_bounds__(256) exchange_rows(const __grid_constant__ ExchangeArgs a) {
  pdl_launch_dependents();
  pdl_wait();
  const Peers& p = a.peers;
  const unsigned number = exchange_number(p);
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  const int mine = a.sum ? 0 : p.rank, own = a.first[mine + 1] - a.first[mine];
  if (first == 0 && own == 0) send(p, number, 0, 0.f);  // every rank waits for every other: see peers.cuh
  for (int i = first; i < a.rows * own; i += step) send(p, number, i, __ldcg(a.x + i / own * a.x_stride + i % own));
  for (int from = 0; from < (a.sum ? 1 : p.size); from++) {
    const int width = a.first[from + 1] - a.first[from];
    if (first == 0 && width == 0 && from != p.rank) take(p, number, from, 0);
    for (int i = first; i < a.rows * width; i += step) {
      const int row = i / width, column = a.first[from] + i % width;
      const bool here = a.sum || from == p.rank;
      float v = here ? __ldcg(a.x + row * a.x_stride + i % width) : take(p, number, from, i);
      if (a.sum) v = take_sum(p, number, i, v);
      if (a.out) a.out[row * a.out_stride + column] = v;
      if (a.next.x)
        for (int copy = 0; copy < a.next.num_perms; copy++) {
          const int place = a.next.inverse[copy] ? __ldg(a.next.inverse[copy] + column) : column;
          a.next.x[static_cast<size_t>(copy) * a.next.perm_stride + token_place(a.next.group, a.next.stride, row) +
                   row_place(a.next.group, place)] = saturated(v);
        }
    }
  }
}

__global__ void count_exchanges(unsigned* count, int more) {
  pdl_wait();
  *count += static_cast<unsigned>(more);
}

}  // namespace exl2nb
