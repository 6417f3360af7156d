// A whole step of a model as a program: int64 words of op codes, sizes and addresses, made by exl2nb/ops/program.py.
//
//   header     magic, version, length in words, id, hidden size
//   EMBED      1, table, kind, V, H, scale, positions table, its kind, its rows
//   QKV        2, norm, eps, blob, bias, cos, sin, max_pos, half, Hq, Hkv, D, q_norm, q_norm stride, k_norm, k_norm stride, layer,
//              norm bias, flags (1 layer norm, 2 interleaved, 4 q_norm over all heads, 8 k_norm over all heads), clip
//   ATTENTION  3, scale, window, softcap, layer
//   RESIDUAL   4, blob, bias, norm, eps, scale, side
//   GATE_UP    5, norm, eps, blob, bias, activation, norm bias, layer norm, gated, side
//   ROUTED     7, norm, eps, router, table, experts, top_k, renormalize, activation, norm bias, layer norm, shared up, shared down, shared
//              gate, post norm, its eps, scale; table: int64 (experts, 2), the addresses of each one's [gate; up] and down
//   HEAD       6, norm, eps, blob, bias, norm bias, layer norm
// Floats are the bits of a double; address 0 = none. side 1: the result lies in (comes from) a buffer of its own, so that attention and MLP
// can both be computed before either is added.
#pragma once
#include <cstdint>
#include <cstring>

namespace exl2nb {

constexpr int64_t kProgramMagic = 0x3147525032584558, kProgramVersion = 2, kHeaderWords = 5;
enum Op : int64_t { kOpEmbed = 1, kOpQkv = 2, kOpAttention = 3, kOpResidual = 4, kOpGateUp = 5, kOpHead = 6, kOpRouted = 7 };
constexpr const char* kOpNames[] = {"",          "embed",     "norm_qkv_rope", "paged_attention", "linear_residual", "norm_gate_up",
                                    "norm_head", "routed_mlp"};
constexpr int kWords[] = {0, 9, 20, 5, 7, 10, 7, 17};  // of an op, its code included

template <class T>
const T* address(int64_t word) {
  return reinterpret_cast<const T*>(word);
}
inline float real(int64_t word) {
  double d;
  std::memcpy(&d, &word, 8);
  return static_cast<float>(d);
}

}  // namespace exl2nb
