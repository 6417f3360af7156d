#include "cuda/runtime/launches.h"

#include <algorithm>
#include <charconv>

#include "cuda/runtime/kernel.h"

namespace exl2nb {
namespace {

thread_local LaunchList* recording = nullptr;

std::string hex(uint64_t value) {
  char text[16];
  return {text, std::to_chars(text, text + sizeof text, value, 16).ptr};
}

}  // namespace

Recording::Recording(LaunchList& list) { recording = &list; }
Recording::~Recording() { recording = nullptr; }
LaunchList* Recording::current() { return recording; }

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
      for (uint32_t at = 0; at < sizes_[i]; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, bytes_.data() + starts_[i] + at, std::min<uint32_t>(8, sizes_[i] - at));
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
