// Host side of skinny_gemm.cuh: path, shared memory, launches of at most eight rows.
#include "cuda/gemm/skinny/skinny_gemm.cuh"

#include <algorithm>

#include "cuda/runtime/device.h"
#include "cuda/runtime/kernel.h"

namespace exl2nb {
namespace {

constexpr const char* kSource = "gemm/skinny/skinny_gemm.cuh";
constexpr int kFusedNormTokens = 4;  // with more rows a separate kernel computes the norm

// By copy path, and whether activations are staged in shared memory.
const Kernel<GemmArgs> kernels[3][2] = {{{kSource, "skinny_gemm<0, false>"}, {kSource, "skinny_gemm<0, true>"}},
                                        {{kSource, "skinny_gemm<1, false>"}, {kSource, "skinny_gemm<1, true>"}},
                                        {{kSource, "skinny_gemm<2, false>"}, {kSource, "skinny_gemm<2, true>"}}};
}  // namespace

int copy_path(const Device& device) { return device.kernels_major >= 9 ? kBulk : device.kernels_major >= 8 ? kAsync : kPlain; }

int skinny_grid(const Device& device, const GemmArgs& a, Epilogue e) {
  return std::min(device.multiprocessors, e == kActivation && a.gated ? a.strips / 2 : a.strips);
}

int skinny_split(const Device& device, GemmArgs& a, Epilogue e) {
  a.epilogue = e, a.grid = skinny_grid(device, a, e);
  int per = 1;  // most strips of a part per CTA
  for (int p = 0; p < a.num_parts; p++) per = std::max(per, (a.part[p].strips + a.grid - 1) / a.grid);
  a.flush = std::max(1, std::min(per, 32 / a.tokens));
  assign_strips(a);
  return a.perms * a.tokens * a.x_stride * 2;
}

void set_weights(GemmArgs& a, const uint8_t* head, const uint8_t* blob) {
  const auto& h = header_of(head);
  const auto* parts = parts_of(head);
  a.head = head, a.num_parts = h.num_parts, a.strips = 0, a.items = h.num_items, a.units = h.num_units, a.image = blob + h.image;
  for (int p = 0; p < h.num_parts; p++) {
    const GpuPart& s = parts[p];
    a.part[p] = {blob + s.data, s.first_strip, s.strips, s.first_column, s.outputs, s.perm, 0, 0, 0, s.strip_bytes};
    a.strips += s.strips, a.part_units[p] = s.num_units;
  }
}

void set_input(MatrixInput& in, const uint8_t* head, const uint8_t* blob, half* x, int tokens) {
  const auto& h = header_of(head);
  in.x = x, in.group = 0, in.stride = input_stride(h), in.num_perms = std::max(1, h.num_perms), in.perm_stride = in.stride * tokens;
  for (int p = 0; p < kMaxPerms; p++)
    in.inverse[p] = h.perms && p < h.num_perms
                        ? reinterpret_cast<const int*>(blob + h.perms) + p * (static_cast<int64_t>(h.stored) + h.K) + h.stored
                        : nullptr;
}

// Sets grid, flush and staging for at most eight rows. Returns the bytes of shared memory.
static int skinny_prepare(const Device& device, GemmArgs& a, Epilogue e) {
  const int x_bytes = skinny_split(device, a, e), most = device.shared_per_block, flush = a.flush, path = copy_path(device);
  const int fixed = stages_of(path) * kWarps * kMaxItemBytes + num_bars(path) * 8 + padded_image(a);
  int own = fixed + SkinnySmem::bytes(a);
  const auto shrink = [&](int staged_bytes) {
    for (; a.flush > 1 && own + staged_bytes > most; own = fixed + SkinnySmem::bytes(a)) a.flush--;
  };
  if (own > most) {  // fewer strips per flush, so that the activations fit, or at least the rest
    shrink(x_bytes);
    if (own + x_bytes > most) a.flush = flush, own = fixed + SkinnySmem::bytes(a), shrink(0);
  }
  a.staged = own + x_bytes <= device.shared_per_multiprocessor - 1024 && own + x_bytes <= most;
  return own + (a.staged ? x_bytes : 0);
}
// Rows per launch: eight, or as many as shared memory allows.
static int skinny_tokens(const Device& device, GemmArgs a, Epilogue e) {
  int tokens = std::min(kSkinnyTokens, a.tokens);
  for (a.tokens = tokens; tokens > 1 && skinny_prepare(device, a, e) > device.shared_per_block; a.tokens = tokens) tokens--;
  return tokens;
}

bool skinny_fuses_norm(const Device& device, GemmArgs a, Epilogue e, int width) {
  if (a.tokens < 1 || a.tokens > kFusedNormTokens || width > kHeldWidth || width % 4) return false;
  skinny_prepare(device, a, e);
  return a.staged;
}

void skip_rows(GemmArgs& a, int first, int grid) {
  if (a.rows) {
    a.rows += first;
  } else {
    a.x += static_cast<size_t>(first) * a.x_stride;
    if (a.squares) a.squares += static_cast<size_t>(first) * a.squares_count;
  }
  if (a.out) a.out += first * a.out_stride;
  if (a.residual) a.residual += static_cast<size_t>(first) * a.residual_stride;
  if (a.next_squares) a.next_squares += static_cast<size_t>(first) * grid;
  if (a.router.out) a.router.out += static_cast<size_t>(first) * grid * a.router.size();
  if (a.next.x) a.next.x += static_cast<size_t>(first) * a.next.stride;
}

void plan_skinny(LaunchList& list, GemmArgs a, Epilogue e) {
  const Device& device = list.device;
  const int tokens = a.tokens, grid = skinny_grid(device, a, e);
  if (grid == 0 || tokens == 0) return;
  const int most = skinny_tokens(device, a, e);
  for (int first = 0; first < tokens; first += most) {
    GemmArgs b = a;
    b.tokens = std::min(most, tokens - first);
    skip_rows(b, first, grid);
    const int shared = skinny_prepare(device, b, e);
    if (shared > device.shared_per_block) return list.fail_shared("a row of the matrix", shared, device.shared_per_block);
    list.add(kernels[copy_path(device)][b.staged], {grid, kThreads, static_cast<size_t>(shared)}, b);
  }
}

}  // namespace exl2nb
