// What a step's workspace holds for a program, and where.
#pragma once
#include <algorithm>
#include <cstring>
#include <string>

#include "cuda/attention/attention.h"
#include "cuda/gemm/persistent/persistent_gemm.h"
#include "cuda/gemm/skinny/skinny_gemm.h"
#include "cuda/gemm/stream_k/stream_k_gemm.h"
#include "cuda/moe/moe.h"
#include "cuda/runtime/device.cuh"
#include "format/program.h"

namespace exl2nb {

struct Weight {
  const uint8_t *head, *blob;
  explicit Weight(int64_t word) : head(address<uint8_t>(word) + 8), blob(nullptr) {
    int64_t device;
    std::memcpy(&device, address<uint8_t>(word), 8);
    blob = address<uint8_t>(device);
  }
  const GpuHeader& header() const { return *reinterpret_cast<const GpuHeader*>(head); }
  int perms() const { return std::max(1, header().num_perms); }
};

// Pieces of the workspace.
struct Room {
  size_t at = 0;
  size_t take(size_t bytes) {
    const size_t here = at;
    at = (at + bytes + 255) / 256 * 256;
    return here;
  }
};
struct Layout {
  size_t residual[2], normed, qkv, act[2], sum, wide, squares, attention, routed, many, chain, persistent_bytes, bytes, attention_bytes;
  size_t early[2], early_bytes;  // QKV that announces itself (announced.cuh), by turns of layers; zeros between steps
};

inline size_t input_bytes(const Weight& w, int tokens) {
  return static_cast<size_t>(w.perms()) * input_stride(w.header()) * stream_k_rows(tokens) * 2;
}

// The op after `w` that reads what lies in buffer `side`.
inline const int64_t* reader(const int64_t* w, const int64_t* end, int64_t side) {
  for (w += kWords[w[0]]; w < end; w += kWords[w[0]])
    if (w[0] == kOpResidual && w[6] == side) return w;
  return nullptr;
}

inline std::string plan(const int64_t* code, int64_t words, int tokens, Layout& layout, int64_t& vocab) {
  if (words < kHeaderWords || code[0] != kProgramMagic || code[1] != kProgramVersion || code[2] != words)
    return "the program is not the code of a Program";
  const int64_t H = code[4];
  size_t normed = 0, qkv = 0, act[2] = {0, 0}, wide = 0, attention = 0, routed = 0, early = 0;
  const bool many = tokens > kSkinnyTokens;
  bool summed = many;
  int inner = 0;
  vocab = 0;
  const int64_t* end = code + words;
  for (const int64_t* w = code + kHeaderWords; w < end; w += kWords[w[0]]) {
    if (w[0] < kOpEmbed || w[0] > kOpRouted || w + kWords[w[0]] > end) return "the program holds an unknown op";
    if (vocab || (w == code + kHeaderWords) != (w[0] == kOpEmbed)) return "a program starts with embed and ends with norm_head";
    switch (w[0]) {
      case kOpQkv:
        normed = std::max(normed, input_bytes(Weight(w[3]), tokens));
        qkv = std::max(qkv, static_cast<size_t>(Weight(w[3]).header().N) * tokens * 4);
        early = std::max(early, static_cast<size_t>(Weight(w[3]).header().N) * kPersistentTokens * 4);
        attention = std::max(attention,
                             attention_workspace_bytes(tokens, static_cast<int>(w[9]), static_cast<int>(w[10]), static_cast<int>(w[11])));
        break;
      case kOpGateUp:
        normed = std::max(normed, input_bytes(Weight(w[3]), tokens));
        if (many) wide = std::max(wide, static_cast<size_t>(Weight(w[3]).header().N) * std::min(tokens, kStreamKTokens) * 4);
        if (!reader(w, end, w[9])) return "nothing reads the MLP's result";
        break;
      case kOpResidual:
        act[w[6]] = std::max(act[w[6]], input_bytes(Weight(w[1]), tokens));
        summed |= w[3] != 0;
        inner = std::max(inner, Weight(w[1]).header().K);
        break;
      case kOpRouted:
        normed = std::max(normed, input_bytes(Weight(w[3]), tokens));
        routed = std::max(routed, routed_bytes(w, Weight(w[3]).header(), tokens));
        summed |= w[14] != 0;
        break;
      case kOpHead:
        normed = std::max(normed, input_bytes(Weight(w[3]), tokens));
        vocab = Weight(w[3]).header().N;
        break;
      case kOpAttention:
        if (!reader(w, end, 0)) return "nothing reads what attention read out";
        break;
      default:
        break;
    }
  }
  if (!vocab) return "a program starts with embed and ends with norm_head";
  Room room;
  for (size_t& at : layout.residual) at = room.take(static_cast<size_t>(tokens) * H * 4);
  layout.normed = room.take(normed);
  layout.qkv = room.take(qkv);
  for (int i = 0; i < 2; i++) layout.act[i] = room.take(act[i]);
  layout.sum = room.take(summed ? static_cast<size_t>(tokens) * H * 4 : 0);
  layout.wide = room.take(wide);
  layout.squares = room.take(static_cast<size_t>(tokens) * std::max(multiprocessors(), stream_k_squares(static_cast<int>(H))) * 4);
  layout.attention = room.take(attention);
  layout.attention_bytes = attention;
  layout.routed = room.take(routed);
  layout.persistent_bytes = persistent_bytes(static_cast<int>(H), inner);
  layout.chain = room.take(layout.persistent_bytes);
  layout.many = room.take(stream_k_workspace(tokens));
  for (size_t& at : layout.early) at = room.take(early);
  layout.early_bytes = early;
  layout.bytes = room.at;
  return "";
}

}  // namespace exl2nb
