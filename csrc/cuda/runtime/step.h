// A whole step on the GPU: the program of exl2nb/ops/program.py (csrc/format/program.h) becomes a list of launches (plan.h), which is run.
// A blob's word in the program is the address of a host copy of its head: int64 address on the device, then header and parts (gpu_blob.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/attention/attention.h"
#include "cuda/gemm/lora.h"
#include "cuda/runtime/peers.cuh"
#include "format/program.h"

namespace exl2nb {

struct GpuStep {
  const int32_t *ids, *positions, *logit_rows;
  int tokens, logit_count;  // logit_rows null: every token's, so logit_count is tokens
  int capacity;             // tokens the workspace was made for
  bool prompts;             // sequences may have more than 8 tokens; no rank's
  CacheArgs cache;          // without pools and num_heads, which each layer has of its own
  void* const* k_pools;
  void* const* v_pools;
  int layers;
  float* logits;  // of a program without head: the residual stream of every token
  // Steps of at least so many tokens (9 or more) use stream-K, with other bits than fewer tokens get; fewer tokens do so where
  // `exceeds_chain` (plan.cpp) finds that faster. 0: neither it nor chains.
  int stream_k_from;
  // Adapters of the tokens, or none: `lora.changes` is a table (adapters, ops of the program), lora_sums has room for `lora_width`.
  LoraRows lora;
  float* lora_sums;
  int lora_width;
  // Persistent chains and stream-K GEMMs add the adapters themselves (lora_chain.cuh, lora_strips.cuh, lora_quads.cuh): those change only
  // matrices inside layers, by parts in columns of eights.
  bool lora_inside;
  // Of a rank: heads and channels are its own, attention's output matrix is whole; what it adds to the residual and its part of the logits,
  // columns vocab[rank] to vocab[rank + 1] - 1, are exchanged.
  Peers peers;
  int vocab[kMaxRanks + 1];
};

struct Device;  // device.h
// Floats of lora_sums, for any number of tokens: zeroed once.
int64_t lora_sums(const Program& program, int64_t width);
// Bytes of workspace for up to `capacity` tokens, or what is wrong with the program; width: numbers per row of what a step writes.
std::string step_workspace(const Device&, const Program& program, int capacity, size_t& bytes, int64_t& width);
// workspace: zeroed once by its owner, then used with one capacity only, by one step at a time. Steps in different streams of one device
// must not overlap where they have chains (persistent_gemm.cuh) or stream-K GEMMs. Captures into a graph: neither allocates nor
// waits.
std::string step_launch(const Program& program, const GpuStep& step, void* workspace, size_t bytes, void* stream, bool pdl);

}  // namespace exl2nb
