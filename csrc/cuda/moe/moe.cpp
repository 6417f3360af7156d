#include "cuda/moe/moe.h"

#include <algorithm>
#include <cstring>

#include "cuda/moe/moe_gemm.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/kernel.h"
#include "cuda/runtime/launch.h"
#include "format/gpu_workspace.h"
#include "format/program.h"

namespace exl2nb {
namespace {

// What an op says of its experts and its router.
struct Routed {
  const RoutedOp& op;
  const ExpertTable& host(int kind) const { return *reinterpret_cast<const ExpertTable*>(op.table[2 * kind]); }
  const ExpertMatrix* device(int kind) const { return reinterpret_cast<const ExpertTable*>(op.table[2 * kind + 1])->matrices(); }
  int top_k() const { return static_cast<int>(op.top_k); }
  int pairs() const { return top_k() + (op.shared_up != nullptr); }  // of a token
  // Sums per output of router.cuh where the router is fused.
  int rows() const { return !op.norm || !op.layer_norm ? 1 : op.norm_bias ? 3 : 2; }
  static int parts(const Device& device, const GpuHeader& router) { return router_parts(router.K, device.multiprocessors); }
  // Offset of expert_up's outputs, after the router's partial sums.
  size_t inner(const Device& device, const GpuHeader& router, int tokens) const {
    return static_cast<size_t>(align256(router_bytes(tokens, router.K, router.N, rows(), device.multiprocessors)));
  }
};

// CTAs per pair, so that all have about equally many strips; more than one wave only if there are more pairs than SMs.
void assign_strips(const Device& device, ExpertUpArgs& e, const ExpertTable& table, int tokens) {
  const int chosen = table.matrices()[0].part[0].strips, last = table.matrices()[table.count - 1].part[0].strips;
  const bool shared = e.pairs > e.choice.top_k;
  const int total = tokens * (e.choice.top_k * chosen + (shared ? last : 0)), sms = device.multiprocessors;
  const auto parts = [](int strips, int per) { return (strips + per - 1) / per; };
  int per = std::max(1, parts(total, sms));
  while (per < std::max(chosen, last) && tokens * (e.choice.top_k * parts(chosen, per) + (shared ? parts(last, per) : 0)) > sms) per++;
  e.share = parts(chosen, per), e.shared_share = shared ? parts(last, per) : 0;
}

// Shared memory: the driver reserves kTaken of each CTA, static variables take at most kStatic.
constexpr int kTaken = 1024, kStatic = 512;
int block_limit(const Device& device) { return device.shared_per_block - kStatic; }

constexpr const char* kSource = "moe/moe_gemm.cuh";
// By copy path; expert_down also by whether activations are staged in shared memory.
const Kernel<ExpertUpArgs> up_kernels[] = {{kSource, "expert_up<0>"}, {kSource, "expert_up<1>"}, {kSource, "expert_up<2>"}};
const Kernel<ExpertDownArgs> down_kernels[3][2] = {{{kSource, "expert_down<0, false>"}, {kSource, "expert_down<0, true>"}},
                                                   {{kSource, "expert_down<1, false>"}, {kSource, "expert_down<1, true>"}},
                                                   {{kSource, "expert_down<2, false>"}, {kSource, "expert_down<2, true>"}}};

// Stages of the largest item that fit in `budget` beside `fixed` bytes, at most `useful`.
RingShape ring_shape(const Device& device, int item, int fixed, int budget, int useful) {
  RingShape r{(item + 15) / 16 * 16, stages_of(copy_path(device))};
  constexpr int kMaxStages = 8;
  if (copy_path(device) == kBulk) r.stages = std::clamp((budget - fixed) / (kWarps * r.stage_bytes), 2, std::clamp(useful, 2, kMaxStages));
  return r;
}

// About the most items of a warp in one part.
int items_of_warp(const ExpertMatrix& m) { return (m.items / m.num_parts + kWarps - 1) / kWarps; }

// Shared memory of expert_up. Two of its CTAs must not share an SM (double work), but an expert_down CTA beside one hides its start: so a
// little more than half.
int up_shared(const Device& device, ExpertUpArgs& e, const ExpertTable& table) {
  const int half = (device.shared_per_multiprocessor - 2 * kTaken) / 2, budget = std::min(block_limit(device), half + 4096);
  const int shared_strips = e.shared_share ? (e.representative[1].part[0].strips + e.shared_share - 1) / e.shared_share : 0;
  e.strips = std::max((e.representative[0].part[0].strips + e.share - 1) / e.share, shared_strips);
  e.flush = std::min(e.strips, 6);
  e.image = (table.image + 15) / 16 * 16, e.num_perms = table.num_perms, e.x_stride = table.stride;
  e.alike = table.alike >= e.choice.experts;
  e.ring_bytes = 0, e.ring = {};
  const int left = block_limit(device) - kWarps * stages_of(copy_path(device)) * (table.item + 8);
  while (e.flush > 1 && ExpertUpSmem::bytes(e) > left) e.flush--;
  const int fixed = ExpertUpSmem::bytes(e) + 8 * kWarps * 8;
  e.ring = ring_shape(device, table.item, fixed, budget,
                      2 * e.strips * std::max(items_of_warp(e.representative[0]), items_of_warp(e.representative[1])));
  const int most = std::max(e.ring.bytes(), budget - fixed);
  e.table_in_smem = e.table_bytes() <= most;
  const int before = e.table_in_smem ? e.table_bytes() : 0;
  e.sums_in_smem = before + e.choice.bytes() <= most;
  e.ring_bytes = (std::max(e.ring.bytes(), before + (e.sums_in_smem ? e.choice.bytes() : 0)) + 15) / 16 * 16;
  return std::max(ExpertUpSmem::bytes(e), copy_path(device) == kBulk ? half + 256 : 0);
}

// Returns its bytes of shared memory.
int plan_up(LaunchList& list, ExpertUpArgs e, const ExpertTable& table, int tokens) {
  const Device& device = list.device;
  if (e.from.norm.width > kHeldWidth || e.from.norm.width % 4) list.fail("experts have more inputs than a CTA holds");
  assign_strips(device, e, table, tokens);
  e.representative[0] = table.matrices()[0], e.representative[1] = table.matrices()[table.count - 1];
  const int shared = up_shared(device, e, table);
  if (shared > block_limit(device)) list.fail_shared("an expert's matrix", shared, block_limit(device));
  const Dim grid(static_cast<unsigned>(e.choice.top_k * e.share + e.shared_share), static_cast<unsigned>(tokens));
  list.add(up_kernels[copy_path(device)], {grid, kThreads, static_cast<size_t>(shared)}, e);
  return shared;
}

// up_bytes: shared memory of an expert_up CTA.
void plan_down(LaunchList& list, ExpertDownArgs d, const ExpertTable& table, int tokens, int up_bytes) {
  const Device& device = list.device;
  d.ring_bytes = 0, d.ring = {};
  const int x_bytes = d.pairs * d.out.x_stride * 2, most = block_limit(device);
  const int fixed = ExpertDownSmem::bytes(d) + 8 * kWarps * 8, least = kWarps * 2 * table.item;
  int useful = 0;
  for (int p = 0; p < d.pairs; p++) useful += table.matrices()[p < d.choice.top_k ? 0 : table.count - 1].items;
  useful = (useful + kWarps - 1) / kWarps * ((d.out.strips + d.out.grid - 1) / d.out.grid);
  int budget = device.shared_per_multiprocessor - 2 * (kTaken + kStatic) - up_bytes;
  const bool staged = fixed + x_bytes + least <= most;
  if (fixed + (staged ? x_bytes : 0) + least > budget) budget = std::min(most, fixed + (staged ? x_bytes : 0) + 2 * least);
  d.ring = ring_shape(device, table.item, fixed + (staged ? x_bytes : 0), budget, useful);
  d.sums_in_smem = d.choice.bytes() <= std::max(d.ring.bytes(), budget - fixed - (staged ? x_bytes : 0));
  d.ring_bytes = (std::max(d.ring.bytes(), d.sums_in_smem ? d.choice.bytes() : 0) + 15) / 16 * 16;
  const int shared = ExpertDownSmem::bytes(d) + (staged ? x_bytes : 0);
  if (shared > most) return list.fail_shared("a token with all its experts", shared, most);
  const Dim grid(static_cast<unsigned>(d.out.grid), static_cast<unsigned>(tokens));
  list.add(down_kernels[copy_path(device)][staged], {grid, kThreads, static_cast<size_t>(shared)}, d);
}

}  // namespace

const char* make_expert_table(const std::vector<const uint8_t*>& heads, const std::vector<std::vector<uint8_t>>& images, int parts,
                              std::vector<uint8_t>& table) {
  if (heads.empty() || images.size() != heads.size()) return "there are no experts";
  table.assign(sizeof(ExpertTable) + heads.size() * sizeof(ExpertMatrix), 0);
  ExpertTable t{};
  t.count = static_cast<int32_t>(heads.size());
  for (size_t i = 0; i < heads.size(); i++) {
    const uint8_t* head = heads[i] + 8;
    int64_t blob;
    std::memcpy(&blob, heads[i], 8);
    const auto& h = header_of(head);
    if (h.num_parts != parts || parts > 2) return "an expert's matrices are not [gate; up] in two parts and down in one";
    GemmArgs a{};
    set_weights(a, head, reinterpret_cast<const uint8_t*>(blob));
    MatrixInput in{};
    set_input(in, head, reinterpret_cast<const uint8_t*>(blob), nullptr, 1);
    if (in.num_perms > 2) return "an expert's matrix has more than two permutations";
    const int size = image_bytes(a.items, a.units, a.num_parts);
    if (images[i].size() < static_cast<size_t>(size)) return "an expert's image is too short";
    ExpertMatrix m{};
    for (int p = 0; p < 2; p++) m.part[p] = a.part[p], m.inverse[p] = in.inverse[p];
    m.image = a.image, m.num_parts = a.num_parts, m.strips = a.strips, m.items = a.items, m.units = a.units;
    m.num_perms = in.num_perms, m.inputs = h.K;
    std::memcpy(table.data() + sizeof(ExpertTable) + i * sizeof(ExpertMatrix), &m, sizeof m);
    t.num_perms = std::max(t.num_perms, in.num_perms), t.stride = std::max(t.stride, in.stride), t.outputs = std::max(t.outputs, h.N);
    t.image = std::max(t.image, size);
    const auto* const items = reinterpret_cast<const Item*>(images[i].data());
    for (int n = 0; n < a.items; n++) t.item = std::max<int32_t>(t.item, items[n].bytes);
    // Same items and warp split as the first matrix.
    const ExpertMatrix& first = *reinterpret_cast<const ExpertMatrix*>(table.data() + sizeof(ExpertTable));
    const auto same = [&](int from, int to) { return std::memcmp(images[i].data() + from, images[0].data() + from, to - from) == 0; };
    if (t.alike == static_cast<int32_t>(i) && m.items == first.items && m.units == first.units && same(0, image_steps(m.items)) &&
        same(image_ends(m.items, m.units), size))
      t.alike++;
  }
  std::memcpy(table.data(), &t, sizeof t);
  return nullptr;
}

size_t routed_bytes(const Device& device, const RoutedOp& op, const GpuHeader& router, int tokens) {
  const Routed r{op};
  return r.inner(device, router, tokens) + static_cast<size_t>(tokens) * r.pairs() * r.host(1).stride * 2;
}

GemmArgs routed_down(const RoutedOp& op) {
  const ExpertTable& down = Routed{op}.host(1);
  GemmArgs a{};
  a.part[0] = down.matrices()[0].part[0];  // strips and outputs are the same for all
  a.num_parts = 1, a.strips = a.part[0].strips, a.tokens = 1, a.scale = 1.f, a.x_stride = down.stride;
  return a;
}

bool router_tap(const RoutedOp& op, const uint8_t* head, const uint8_t* blob, float* out, RouterTap& tap) {
  const auto& h = header_of(head);
  const auto* const parts = parts_of(head);
  if (!op.norm || h.perms || h.num_parts > 2 || h.K % kStripColumns) return false;
  const Routed r{op};
  if (!op.layer_norm && op.norm_bias) return false;
  tap = {};
  for (int p = 0; p < h.num_parts; p++) {
    const GpuPart& s = parts[p];
    if (!s.dense) return false;
    tap.part[p] = {blob + s.data, s.strips, s.outputs, s.first_column, static_cast<int>(s.strip_bytes)};
    tap.strips += s.strips;
  }
  tap.stride = router_row(h.N), tap.rows = r.rows(), tap.bias = op.norm_bias, tap.out = out;
  return true;
}

int64_t router_stride(const GpuHeader& router) { return router_row(router.N) + 4; }

void plan_routed(LaunchList& list, const RoutedOp& op, const GpuHeader& router, bool tapped, const RowSource& from, uint8_t* workspace,
                 const GemmArgs& down, int tokens, int capacity) {
  const Device& device = list.device;
  const Routed r{op};
  auto* const inner = reinterpret_cast<half*>(workspace + r.inner(device, router, capacity));
  const ExpertTable &first = r.host(0), &second = r.host(1);
  RoutingArgs choice{};
  choice.sums = reinterpret_cast<const float*>(workspace), choice.parts = tapped ? Routed::parts(device, router) : 1;
  choice.stride = router_row(router.N), choice.rows = tapped ? r.rows() : 1;
  choice.experts = static_cast<int>(op.experts), choice.top_k = r.top_k(), choice.gate = op.shared_gate != nullptr;
  choice.renormalize = static_cast<float>(op.renormalize);
  choice.kind = tapped ? from.norm.kind : kNoNorm, choice.eps = from.norm.eps;
  choice.inverse_width = 1.f / static_cast<float>(from.norm.width);

  ExpertUpArgs e{};
  e.choice = choice, e.from = from, e.table = r.device(0), e.next_table = r.device(1), e.pairs = r.pairs();
  e.activation = static_cast<int>(op.activation), e.next = inner, e.next_stride = second.stride;
  const int up_bytes = plan_up(list, e, first, tokens);

  ExpertDownArgs d{};
  d.out = down, d.choice = choice, d.table = r.device(1), d.pairs = r.pairs(), d.image = (second.image + 15) / 16 * 16;
  skinny_split(device, d.out, static_cast<Epilogue>(down.epilogue));
  d.out.x = inner;
  plan_down(list, d, second, tokens, up_bytes);
}

}  // namespace exl2nb
