// The reader and the checks of step programs and batches. Addresses in a program are Python's own and trusted; every number is not.
#include "fuzz.h"

#include "cpu/pack.h"
#include "cpu/step.h"

using namespace exl2nb;

namespace {

constexpr int64_t kHidden = 8;

const uint8_t* matrix(FuzzedDataProvider& in) {
  static const auto blobs = [] {
    std::vector<std::vector<uint8_t>> made;
    for (int64_t N : {8, 16, 24, 4}) {
      const std::vector<float> weight(size_t(kHidden * N), 0.5f);
      made.emplace_back(size_t(dense_blob_bytes(N, kHidden, kDenseF32)));
      pack_dense(weight.data(), N, kHidden, kDenseF32, made.back().data());
    }
    return made;
  }();
  const size_t one = in.ConsumeIntegralInRange<size_t>(0, blobs.size());
  return one < blobs.size() ? blobs[one].data() : nullptr;
}

int64_t number(FuzzedDataProvider& in) {
  return in.ConsumeIntegralInRange(0, 7) ? in.ConsumeIntegralInRange(-1, 9) : in.ConsumeIntegral<int64_t>();
}

// Every field of an op: addresses of matrices and nothing else, small numbers and large ones.
template <class T>
void fill(FuzzedDataProvider& in, T& op) {
  auto* words = reinterpret_cast<int64_t*>(&op);
  for (size_t i = 1; i < sizeof(T) / 8; i++) words[i] = number(in);
}
void clear_addresses(FuzzedDataProvider& in, Op* op) {
  visit(op, [&](const auto& one) {
    using T = std::decay_t<decltype(one)>;
    auto& own = const_cast<T&>(one);
    if constexpr (std::is_base_of_v<NormedOp, T>) own.norm = nullptr, own.norm_bias = nullptr, own.blob = matrix(in);
    if constexpr (std::is_same_v<T, EmbedOp>) own.table = own.position_table = nullptr;
    if constexpr (std::is_same_v<T, QkvOp>) own.bias = own.cos = own.sin = own.q_norm = own.k_norm = nullptr;
    if constexpr (std::is_same_v<T, ResidualOp>) own.blob = matrix(in), own.bias = own.norm = nullptr;
    if constexpr (std::is_same_v<T, GateUpOp> || std::is_same_v<T, HeadOp>) own.bias = nullptr;
    if constexpr (std::is_same_v<T, RoutedOp>)
      own.table = nullptr, own.shared_up = own.shared_down = own.shared_gate = nullptr, own.post_norm = nullptr;
  });
}

void walk(const Program& program) {
  int64_t ops = 0;
  for (const Op* op = program.first(); op; op = program.next(op)) {
    HOLDS(known_op(op->code));
    HOLDS(*op_name(op));
    ops++;
  }
  HOLDS(ops >= 2);
  HOLDS(!program.head() || program.head()->code == HeadOp::kCode);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<int64_t> raw = [&] {  // any words
    std::vector<int64_t> made(size / 8);
    if (!made.empty()) std::memcpy(made.data(), data, made.size() * 8);
    return made;
  }();
  const Program any(raw.data(), int64_t(raw.size()));
  if (!any.wrong()) walk(any);

  FuzzedDataProvider in(data, size);
  std::vector<int64_t> words{kProgramMagic, kProgramVersion, 0, 1, kHidden};
  for (int count = in.ConsumeIntegralInRange(0, 8), i = 0; i <= count + 1; i++) {
    const int64_t last = in.ConsumeIntegralInRange(0, 3) ? HeadOp::kCode : ResidualOutOp::kCode;
    int64_t code = i == 0 ? EmbedOp::kCode : i == count + 1 ? last : in.ConsumeIntegralInRange<int64_t>(2, 7);
    if (in.ConsumeIntegralInRange(0, 31) == 0) code = in.ConsumeIntegralInRange<int64_t>(0, 10);
    const Op probe{code};
    const size_t at = words.size(), length = known_op(code) ? size_t(op_bytes(&probe)) / 8 : 3;
    words.resize(at + length);
    words[at] = code;
    for (size_t field = 1; field < length; field++) words[at + field] = number(in);
    if (known_op(code)) clear_addresses(in, reinterpret_cast<Op*>(words.data() + at));
  }
  words[2] = in.ConsumeIntegralInRange(0, 15) ? int64_t(words.size()) : in.ConsumeIntegral<int64_t>();
  if (in.ConsumeIntegralInRange(0, 15) == 0) words.resize(in.ConsumeIntegralInRange<size_t>(0, words.size()));
  const Program program(words.data(), int64_t(words.size()));
  if (!program.wrong()) walk(program);

  StepBatch b{};
  b.T = in.ConsumeIntegralInRange(1, 4), b.R = in.ConsumeIntegralInRange<int64_t>(1, b.T);
  b.sequences = in.ConsumeIntegralInRange<int64_t>(1, b.T), b.max_pages = in.ConsumeIntegralInRange(1, 3);
  b.num_pages = in.ConsumeIntegralInRange(1, 4), b.page_size = 4, b.num_kv_heads = in.ConsumeIntegralInRange(1, 2), b.head_dim = 4;
  const auto some = [&](int64_t n) {
    std::vector<int32_t> made;
    for (int64_t i = 0; i < n; i++)
      made.push_back(in.ConsumeIntegralInRange(0, 7) ? in.ConsumeIntegralInRange(0, 4) : in.ConsumeIntegral<int32_t>());
    return made;
  };
  const auto ids = some(b.T), positions = some(b.T), slots = some(b.T), table = some(b.sequences * b.max_pages), cu = some(b.sequences + 1),
             lens = some(b.sequences), rows = some(b.R);
  b.ids = ids.data(), b.positions = positions.data(), b.slots = slots.data(), b.block_table = table.data(), b.cu_seqlens = cu.data();
  b.context_lens = lens.data(), b.logit_rows = rows.data();
  b.k_pools.resize(in.ConsumeIntegralInRange<size_t>(0, 2)), b.v_pools.resize(b.k_pools.size());
  if (check_step(program, b).empty()) {  // the numbers that the kernels index with
    HOLDS(cu[0] == 0 && cu[size_t(b.sequences)] == b.T);
    for (int64_t s = 0; s < b.sequences; s++)
      for (int64_t page = 0; page * b.page_size < lens[size_t(s)]; page++) {
        HOLDS(page < b.max_pages);
        HOLDS(table[size_t(s * b.max_pages + page)] >= 0 && table[size_t(s * b.max_pages + page)] < b.num_pages);
      }
    for (int32_t slot : slots) HOLDS(slot >= 0 && slot < b.num_pages * b.page_size);
    for (int32_t row : rows) HOLDS(row >= 0 && row < b.T);
  }
  return 0;
}
