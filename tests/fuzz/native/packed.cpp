// Packed matrices from anywhere, and several side by side: what check_blob accepts is read within its bounds.
#include "fuzz.h"

#include "cpu/engine.h"
#include "cpu/pack.h"

using namespace exl2nb;

namespace {

void read(const uint8_t* blob) {
  const BlobHeader& h = header(blob);
  if (int64_t(h.K) * h.N > 1 << 18) return;
  std::vector<float> weights(size_t(h.K) * h.N), x(size_t(h.K) * 3, 0.5f), out(size_t(h.N) * 3);
  unpack(blob, weights.data());
  for (int rows : {1, 3}) linear(x.data(), rows, blob, nullptr, out.data(), false);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<uint8_t> raw(data, data + size);
  if (!check_blob(raw.data(), int64_t(size))) read(raw.data());
  if (size < 4) return 0;
  FuzzedDataProvider in(data, size);  // the same bytes as a valid matrix
  std::vector<std::vector<uint8_t>> blobs;
  std::vector<const uint8_t*> each;
  const int64_t K = in.ConsumeIntegralInRange<int64_t>(1, 70);
  for (int parts = in.ConsumeIntegralInRange(1, 3); parts > 0; parts--) {
    const int64_t N = in.ConsumeIntegralInRange<int64_t>(1, 40);
    const int kind = in.ConsumeIntegralInRange<int>(kDenseF32, kDenseBF16);
    const auto weight = values<uint8_t>(in, size_t(K * N * (kind == kDenseF32 ? 4 : 2)));
    blobs.emplace_back(size_t(dense_blob_bytes(N, K, kind)));
    pack_dense(weight.data(), N, K, kind, blobs.back().data());
  }
  for (const auto& blob : blobs) {
    HOLDS(!check_blob(blob.data(), int64_t(blob.size())));
    each.push_back(blob.data());
  }
  std::vector<uint8_t> joined(size_t(concat_bytes(each)));
  pack_concat(each, joined.data());
  HOLDS(!check_blob(joined.data(), int64_t(joined.size())));
  read(joined.data());
  if (!joined.empty() && in.remaining_bytes()) {  // a valid matrix with a byte changed
    joined[in.ConsumeIntegralInRange<size_t>(0, joined.size() - 1)] ^= uint8_t(1 << in.ConsumeIntegralInRange(0, 7));
    if (!check_blob(joined.data(), int64_t(joined.size()))) read(joined.data());
  }
  return 0;
}
