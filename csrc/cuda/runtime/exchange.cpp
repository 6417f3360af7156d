#include "cuda/runtime/exchange.h"

#include <algorithm>

#include "cuda/runtime/kernel.h"

namespace exl2nb {
namespace {

constexpr const char* kSource = "runtime/exchange.cu";
const Kernel<ExchangeArgs> exchange_rows{kSource, "exchange_rows"};
const Kernel<unsigned*, int> count_exchanges{kSource, "count_exchanges"};
constexpr int kExchangeThreads = 256, kExchangeCtas = 128;

}  // namespace

void plan_exchange(LaunchList& list, const ExchangeArgs& a) {
  int widest = 0;
  for (int r = 0; r < (a.sum ? 1 : a.peers.size); r++) widest = std::max(widest, a.first[r + 1] - a.first[r]);
  const int64_t numbers = int64_t(a.rows) * widest;
  if (numbers > a.peers.words)
    return list.fail("the ranks exchange " + std::to_string(numbers) + " numbers; expected at most " + std::to_string(a.peers.words) +
                     ", the size of their buffers");
  if (numbers == 0) return;
  const auto ctas = std::min<int64_t>((numbers + kExchangeThreads - 1) / kExchangeThreads, kExchangeCtas);
  list.add(exchange_rows, {unsigned(ctas), kExchangeThreads}, a);
}
void plan_exchange_count(LaunchList& list, const Peers& p, int count) {
  list.add(count_exchanges, {1u, 1u}, reinterpret_cast<unsigned*>(p.buffer[p.rank]), count);
}

}  // namespace exl2nb
