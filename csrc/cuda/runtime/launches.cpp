#include "cuda/runtime/launches.h"

#include <algorithm>
#include <charconv>

#include "cuda/runtime/kernel.h"

namespace exl2nb {
namespace {

std::string hex(uint64_t value) {
  char text[16];
  return {text, std::to_chars(text, text + sizeof text, value, 16).ptr};
}

}  // namespace

const char* LaunchList::run(void* stream) {
  void* pointers[kMostArguments];
  for (PlannedLaunch& l : launches_) {
    if (failed_) break;
    for (uint32_t i = 0; i < l.count; i++) pointers[i] = bytes_.data() + arguments_[l.first + i].at;
    if (l.kernel) {
      l.how.stream = stream;
      failed_ = l.kernel->run(l.how, pointers);
    } else {
      const auto word = [&](int i) { return *static_cast<const uint64_t*>(pointers[i]); };
      failed_ = error_text(driver()->copy(word(0), word(1), word(2), static_cast<CudaStream>(stream)));
    }
  }
  launches_.clear(), arguments_.clear(), bytes_.clear();
  return failed_;
}

std::string LaunchList::text(const std::function<std::string(uint64_t)>& address) const {
  std::string out;
  const auto put = [&](const auto&... pieces) {
    const auto one = [&](const auto& piece) {
      if constexpr (std::is_integral_v<std::decay_t<decltype(piece)>>)
        out.append(std::to_string(piece));
      else
        out.append(piece);
    };
    (one(pieces), ...);
  };
  const auto put_dim = [&](const char* what, const Dim& d) {
    put(what, d.x);
    if (d.y * d.z > 1) put("x", d.y);
    if (d.z > 1) put("x", d.z);
  };
  for (const PlannedLaunch& l : launches_) {
    put(l.op, "\t", l.kernel ? l.kernel->name().c_str() : "copy", "\t");
    if (l.kernel) {
      put_dim("grid ", l.how.grid), put_dim(" threads ", l.how.threads), put(" shared ", l.how.shared_bytes);
      if (l.how.cluster > 1) put(" cluster ", l.how.cluster);
      if (l.how.pdl) put(" pdl");
    }
    for (uint32_t i = l.first; i < l.first + l.count; i++) {
      put(i > l.first ? " |" : "\t");
      for (uint32_t at = 0; at < arguments_[i].size; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, bytes_.data() + arguments_[i].at + at, std::min<uint32_t>(8, arguments_[i].size - at));
        if (!word) continue;
        const std::string name = address(word);
        put(" ", at, ":", name.empty() ? hex(word) : name);
      }
    }
    put("\n");
  }
  return out;
}

}  // namespace exl2nb
