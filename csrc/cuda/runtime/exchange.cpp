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

const char* exchange_launch(const ExchangeArgs& a, void* stream, bool pdl) {
  int widest = 0;
  for (int r = 0; r < (a.sum ? 1 : a.peers.size); r++) widest = std::max(widest, a.first[r + 1] - a.first[r]);
  const int64_t numbers = int64_t(a.rows) * widest;
  if (numbers > a.peers.words) return "the buffers of the ranks are too small";
  if (numbers == 0) return nullptr;
  const auto ctas = std::min<int64_t>((numbers + kExchangeThreads - 1) / kExchangeThreads, kExchangeCtas);
  return exchange_rows({unsigned(ctas), kExchangeThreads, 0, stream, pdl}, a);
}
const char* exchanges_done(const Peers& p, int count, void* stream, bool pdl) {
  return count_exchanges({1u, 1u, 0, stream, pdl}, reinterpret_cast<unsigned*>(p.buffer[p.rank]), count);
}

}  // namespace exl2nb
