#include "format/gpu_layout.h"

#include <algorithm>
#include <cstring>

#include "format/half.h"

namespace exl2nb {
namespace {

// Smallest chunk of an item: a unit, or the two units of a scale set.
struct Chunk {
  int block, bits, units;
  bool one, lone;
  int scales = 0;
  // Bytes of scale codes or scale sets of n chunks.
  int extra(int n) const {
    if (bits == 16) return 0;
    return scales ? n * (one ? 1 : 2) * kGptqSet : (n * (one ? 8 : 16) + 15) / 16 * 16;
  }
  int bytes(int n) const { return n * units * bits * 128 + extra(n); }
  bool like(const Chunk& p) const { return bits == p.bits && units == p.units && one == p.one && scales == p.scales && !lone && !p.lone; }
};

// Consecutive equal chunks.
struct Run {
  const Chunk* first;
  int chunks, max_chunks, items;                                            // max_chunks: of an item
  int bytes() const { return first->bytes((chunks + items - 1) / items); }  // of its largest item
};
std::vector<Run> runs_of(const std::vector<Chunk>& chunks) {
  std::vector<Run> runs;
  for (const Chunk& p : chunks) {
    if (!runs.empty() && p.like(*runs.back().first)) {
      runs.back().chunks++;
      continue;
    }
    int most = 1;
    while ((most + 1) * p.units <= kItemUnits && p.bytes(most + 1) <= kMaxItemBytes) most++;
    runs.push_back({&p, 1, most, 1});
  }
  return runs;
}

// Smallest multiple of kWarps items that holds all chunks, of similar size where possible; equal counts per warp.
void make_items(PartLayout& p, const std::vector<Chunk>& chunks) {
  std::vector<Run> runs = runs_of(chunks);
  int items = 0, unit = 0;
  for (Run& r : runs) items += r.items = (r.chunks + r.max_chunks - 1) / r.max_chunks;
  for (const int wanted = (items + kWarps - 1) / kWarps * kWarps; items < wanted; items++) {
    const auto can = [](const Run& r) { return r.items < r.chunks; };
    const auto largest =
        std::max_element(runs.begin(), runs.end(), [&](const Run& a, const Run& b) { return can(a) * a.bytes() < can(b) * b.bytes(); });
    if (!can(*largest)) break;
    largest->items++;
  }
  for (const Run& r : runs)
    for (int i = 0, from = 0; i < r.items; i++) {
      const int end = (i + 1) * r.chunks / r.items, n = end - from;
      const Chunk& first = r.first[from];
      Item it{};
      it.offset = static_cast<uint32_t>(p.strip_bytes), it.block = static_cast<uint16_t>(first.block);
      it.bits = static_cast<uint8_t>(first.bits), it.units = static_cast<uint8_t>(n * first.units), it.one = first.one,
      it.lone = first.lone;
      it.scales = static_cast<uint8_t>(first.scales), it.unit0 = static_cast<uint16_t>(unit),
      it.bytes = static_cast<uint16_t>(first.bytes(n));
      p.strip_bytes += it.bytes;
      p.items.push_back(it);
      unit += it.units, from = end;
    }
  for (int w = 0; w <= kWarps; w++) p.ends.push_back(static_cast<uint16_t>(w * items / kWarps));
}

struct Block {  // of 32 rows
  int bits, group;
};
std::vector<Block> blocks_of(const std::vector<Group>& groups) {
  std::vector<Block> blocks;
  for (size_t g = 0; g < groups.size(); g++)
    for (int r = 0; r < groups[g].rows; r += 32) blocks.push_back({groups[g].bits, static_cast<int>(g)});
  return blocks;
}

}  // namespace

std::string read_groups(const std::vector<uint16_t>& table, int64_t R, int64_t K, std::vector<Group>& groups) {
  int64_t rows = 0, expected = 0;
  groups.clear();
  for (size_t g = 0; 2 * g < table.size(); g++) {
    const std::string name = "group " + std::to_string(g);
    const int64_t b = table[2 * g], first = table[2 * g + 1], end = 2 * g + 3 < table.size() ? table[2 * g + 3] : R;
    if (b < 2 || b > 8 || b == 7) return name + " has " + std::to_string(b) + " bits; expected 2, 3, 4, 5, 6 or 8";
    if (first != expected || end <= first || end > R || (end - first) % b)
      return name + " covers packed rows " + std::to_string(first) + " to " + std::to_string(end) +
             "; expected whole units that follow one another up to " + std::to_string(R);
    groups.push_back({int(b), int((end - first) * 32 / b)});
    rows += groups.back().rows, expected = end;
  }
  if (rows != K) return "the groups have " + std::to_string(rows) + " rows; expected " + std::to_string(K) + ", those of q_invperm";
  return "";
}

PartLayout layout_exl2(const std::vector<Group>& groups, const std::vector<uint16_t>& scale_max, double prescale, int outputs,
                       std::vector<int> perm) {
  PartLayout p;
  p.outputs = outputs, p.perm = std::move(perm);
  std::vector<uint16_t> step;
  for (size_t g = 0; g < groups.size(); g++)
    step.push_back(float_to_half(static_cast<float>(static_cast<double>(half_to_float(scale_max[g])) * prescale / 256.0)));
  const std::vector<Block> blocks = blocks_of(groups);
  std::vector<Chunk> units;
  for (size_t b = 0; b < blocks.size();) {
    const bool lone = b + 1 == blocks.size() || blocks[b + 1].bits != blocks[b].bits;
    const bool one = !lone && b % 2 == 0 && blocks[b + 1].group == blocks[b].group;
    units.push_back({static_cast<int>(b), blocks[b].bits, 1, one, lone});
    p.steps.push_back(step[blocks[b].group] | (lone ? 0u : static_cast<uint32_t>(step[blocks[b + 1].group]) << 16));
    b += lone ? 1 : 2;
  }
  make_items(p, units);
  return p;
}

PartLayout layout_gptq(const std::vector<Group>& groups, int outputs, std::vector<int> perm) {
  PartLayout p;
  p.outputs = outputs, p.perm = std::move(perm);
  const std::vector<Block> blocks = blocks_of(groups);
  const auto same = [&](size_t first, size_t count) {
    return first + count <= blocks.size() && blocks[first + count - 1].group == blocks[first].group;
  };
  std::vector<Chunk> chunks;
  size_t units = 0;
  for (size_t b = 0; b < blocks.size();) {
    Chunk chunk{static_cast<int>(b), blocks[b].bits, 1, same(b, 2), b + 1 == blocks.size(), 1};
    if (same(b, 4)) chunk.units = chunk.scales = 2;
    chunks.push_back(chunk);
    units += static_cast<size_t>(chunk.units), b += static_cast<size_t>(2 * chunk.units);
  }
  p.steps.assign(units, 0);
  make_items(p, chunks);
  return p;
}

PartLayout layout_dense(int K, int outputs) {
  PartLayout p;
  p.outputs = outputs, p.dense = 1;
  const int units = (K + 63) / 64;
  p.steps.assign(static_cast<size_t>(units), 0x3c003c00u);
  std::vector<Chunk> list;
  for (int u = 0; u < units; u++) list.push_back({2 * u, 16, 1, true, false});
  make_items(p, list);
  return p;
}

namespace {

// Permutations and their inverses; the identity is written out; short ones are padded with K.
std::vector<int> permutation_table(const std::vector<std::vector<int>>& perms, int K, size_t rows) {
  std::vector<int> table;
  for (auto perm : perms) {
    if (perm.empty())
      for (int i = 0; i < K; i++) perm.push_back(i);
    perm.resize(rows, K);
    std::vector<int> inverse(static_cast<size_t>(K));
    for (size_t i = 0; i < rows; i++)
      if (perm[i] < K) inverse[static_cast<size_t>(perm[i])] = static_cast<int>(i);
    table.insert(table.end(), perm.begin(), perm.end());
    table.insert(table.end(), inverse.begin(), inverse.end());
  }
  return table;
}

// The image: items, scale units and warp ends of all parts.
struct Image {
  std::vector<Item> items;
  std::vector<uint32_t> steps;
  std::vector<uint16_t> ends;

  void add(const PartLayout& p, GpuPart& s) {
    s.first_item = static_cast<int>(items.size()), s.num_items = static_cast<int>(p.items.size());
    s.first_unit = static_cast<int>(steps.size()), s.num_units = static_cast<int>(p.steps.size());
    for (size_t w = 0; w < kEnds; w++) ends.push_back(static_cast<uint16_t>(s.first_item + p.ends[std::min(w, p.ends.size() - 1)]));
    for (Item it : p.items) {
      it.unit0 = static_cast<uint16_t>(it.unit0 + s.first_unit);
      items.push_back(it);
    }
    steps.insert(steps.end(), p.steps.begin(), p.steps.end());
  }
  std::vector<uint8_t> bytes(int num_parts) const {
    const int num_items = static_cast<int>(items.size()), num_units = static_cast<int>(steps.size());
    std::vector<uint8_t> image(static_cast<size_t>(image_bytes(num_items, num_units, num_parts)), 0);
    std::memcpy(image.data(), items.data(), items.size() * sizeof(Item));
    std::memcpy(image.data() + image_steps(num_items), steps.data(), steps.size() * 4);
    std::memcpy(image.data() + image_ends(num_items, num_units), ends.data(), ends.size() * 2);
    return image;
  }
};

// Whether a strip is kWarps small items that can be processed in pairs.
bool in_pairs(const PartLayout& p) {
  if (p.dense || p.items.size() != kWarps) return false;
  for (size_t i = 0; i < p.items.size(); i++) {
    const Item &it = p.items[i], &first = p.items[i & ~size_t{1}];
    if (!it.one || it.scales || it.units != kPairUnits || it.bits != first.bits || it.block != first.block + 2 * kPairUnits * (i & 1))
      return false;
  }
  return true;
}

// Fewest passes of at most kWarps items, of about equal size.
void set_passes(const PartLayout& p, GpuPart& s) {
  const int items = static_cast<int>(p.items.size());
  s.pairs = in_pairs(p);
  s.passes = (items + kWarps - 1) / kWarps, s.pass_items = (items + s.passes - 1) / s.passes;
  for (int i = 0; i < items; i += s.pass_items)
    for (int half = i; half < std::min(i + s.pass_items, items); half += kWarps / 2) {
      const Item& last = p.items[static_cast<size_t>(std::min({half + kWarps / 2, i + s.pass_items, items}) - 1)];
      s.pass_bytes = std::max(s.pass_bytes, static_cast<int32_t>(last.offset + last.bytes - p.items[static_cast<size_t>(half)].offset));
    }
}

// Runs of equal units, for work splits by cost.
void set_runs(const PartLayout& p, GpuPart& s) {
  int n = 0;
  for (const Item& it : p.items) {
    const GpuRun like{it.units, it.bits, static_cast<uint8_t>(!it.one), it.scales, {}};
    GpuRun& run = s.runs[n];
    const bool same = run.bits == like.bits && run.halves == like.halves && run.scales == like.scales;
    if (run.units && (same || n + 1 == kRuns))
      run.units = static_cast<uint16_t>(run.units + like.units);
    else
      s.runs[n += run.units != 0] = like;
  }
}

int strips_of(const PartLayout& p) { return (p.outputs + kStripColumns - 1) / kStripColumns; }

// Offsets of a blob's sections. perms: 0 = none is stored.
struct Sections {
  int64_t perms = 0, image, end;
  std::vector<int64_t> strips;  // of each part
};
Sections sections_of(int K, int64_t stored, int perms, const std::vector<PartLayout>& parts) {
  Sections s;
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t from = at;
    at = align256(at + bytes);
    return from;
  };
  take(sizeof(GpuHeader) + parts.size() * sizeof(GpuPart));
  if (perms) s.perms = take(perms * (stored + K) * 4);
  size_t items = 0, units = 0;
  for (const PartLayout& p : parts) items += p.items.size(), units += p.steps.size();
  s.image = take(image_bytes(static_cast<int>(items), static_cast<int>(units), static_cast<int>(parts.size())));
  for (const PartLayout& p : parts) s.strips.push_back(take(strips_of(p) * p.strip_bytes));
  s.end = at;
  return s;
}

}  // namespace

std::string layout_blob(int K, const std::vector<PartLayout>& parts, BlobLayout& out) {
  if (parts.empty() || parts.size() > kMaxParts) return "a blob has 1 to " + std::to_string(kMaxParts) + " parts";
  std::vector<std::vector<int>> perms;  // distinct; the identity only if there are others
  std::vector<int> which;
  for (const auto& p : parts) {
    auto found = std::find(perms.begin(), perms.end(), p.perm);
    which.push_back(static_cast<int>(found - perms.begin()));
    if (found == perms.end()) perms.push_back(p.perm);
  }
  if (perms.size() > kMaxPerms) return "the parts have more than " + std::to_string(kMaxPerms) + " different permutations";
  size_t rows = static_cast<size_t>(K);
  for (const auto& perm : perms) rows = std::max(rows, perm.size());
  GpuHeader& h = out.header;
  h = {};
  h.magic = kGpuMagic, h.version = kGpuVersion, h.K = K, h.num_parts = static_cast<int>(parts.size()),
  h.num_perms = static_cast<int>(perms.size()), h.stored = static_cast<int>(rows);
  const bool identity = perms.size() == 1 && perms[0].empty();
  const Sections at = sections_of(K, static_cast<int64_t>(rows), identity ? 0 : h.num_perms, parts);
  out.parts.assign(parts.size(), {});
  int columns = 0, strips = 0;
  Image image;
  for (size_t i = 0; i < parts.size(); i++) {
    const PartLayout& p = parts[i];
    GpuPart& s = out.parts[i];
    s.outputs = p.outputs, s.strips = strips_of(p), s.first_column = columns, s.first_strip = strips;
    s.perm = which[i], s.dense = p.dense, s.strip_bytes = p.strip_bytes, s.data = at.strips[i];
    image.add(p, s);
    set_passes(p, s);
    set_runs(p, s);
    columns += s.outputs, strips += s.strips;
  }
  if (image.steps.size() > 65535) return "the blob has too many rows";
  h.num_items = static_cast<int>(image.items.size()), h.num_units = static_cast<int>(image.steps.size());
  h.N = columns, h.perms = at.perms, h.image = at.image, h.bytes = at.end;
  out.meta.assign(static_cast<size_t>(at.strips[0]), 0);
  const auto put = [&](int64_t to, const auto& v) { std::memcpy(out.meta.data() + to, v.data(), v.size() * sizeof(v[0])); };
  std::memcpy(out.meta.data(), &h, sizeof(h));
  put(sizeof(h), out.parts);
  if (at.perms) put(at.perms, permutation_table(perms, K, rows));
  put(at.image, image.bytes(h.num_parts));
  return "";
}

int64_t gpu_blob_bytes(int K, const std::vector<MatrixShape>& matrices) {
  std::vector<PartLayout> parts;
  int64_t stored = K;
  bool coded = false;
  for (const MatrixShape& m : matrices) {
    int64_t rows = 0;
    for (const Group& group : m.groups) rows += (group.rows + 31) / 32 * 32;
    stored = std::max(stored, rows), coded |= rows > 0;
    parts.push_back(m.format == "exl2"   ? layout_exl2(m.groups, std::vector<uint16_t>(m.groups.size()), 1., m.outputs, {})
                    : m.format == "gptq" ? layout_gptq(m.groups, m.outputs, {})
                                         : layout_dense(K, m.outputs));
  }
  return sections_of(K, stored, coded ? static_cast<int>(parts.size()) : 0, parts).end;
}

std::vector<PartLayout> read_parts(const std::vector<uint8_t>& meta) {
  const auto& h = header_of(meta.data());
  const auto* parts = parts_of(meta.data());
  std::vector<PartLayout> plans;
  for (int i = 0; i < h.num_parts; i++) {
    const GpuPart& s = parts[i];
    PartLayout p;
    const uint8_t* image = meta.data() + h.image;
    const auto* items = reinterpret_cast<const Item*>(image) + s.first_item;
    const auto* steps = reinterpret_cast<const uint32_t*>(image + image_steps(h.num_items)) + s.first_unit;
    const auto* ends = reinterpret_cast<const uint16_t*>(image + image_ends(h.num_items, h.num_units)) + i * kEnds;
    p.items.assign(items, items + s.num_items);
    for (Item& it : p.items) it.unit0 = static_cast<uint16_t>(it.unit0 - s.first_unit);
    for (int w = 0; w <= kWarps; w++) p.ends.push_back(static_cast<uint16_t>(ends[w] - s.first_item));
    p.steps.assign(steps, steps + s.num_units);
    p.strip_bytes = s.strip_bytes, p.outputs = s.outputs, p.dense = s.dense;
    if (h.perms) {
      const int* perm = reinterpret_cast<const int*>(meta.data() + h.perms) + static_cast<int64_t>(s.perm) * (h.stored + h.K);
      int rows = h.stored;
      while (rows > h.K && std::all_of(perm + rows - 32, perm + rows, [&](int k) { return k == h.K; }))
        rows -= 32;  // padding of another part
      p.perm.assign(perm, perm + rows);
      bool identity = rows == h.K;
      for (int k = 0; k < h.K && identity; k++) identity = perm[k] == k;
      if (identity) p.perm.clear();
    }
    plans.push_back(std::move(p));
  }
  return plans;
}

}  // namespace exl2nb
