// The CPU engine for a page in a browser: one model, one sequence, one thread. tools/wasm.py compiles csrc/cpu and this file with SIMD and
// writes the model's file: a program of format/program.h with offsets in place of addresses, and all that they point to.
//
//   Header, program words, relocations (indexes of the words that are addresses), then what the offsets lead to, each at a multiple of 64.
//
// Functions that can fail return a message, or null. The file is checked before anything in it is used.
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/draw.h"
#include "cpu/parallel.h"
#include "cpu/step.h"
#include "format/blob.h"
#include "format/pool.h"
#include "format/program.h"

// Nothing ends in a page but the page: what is kept for each thread is never destroyed.
extern "C" int __cxa_thread_atexit(void (*)(void*), void*, void*) { return 0; }

namespace exl2nb {

// One thread: no pool to wake, nothing to wait for.
int64_t num_threads() { return 1; }
void run_on_threads(int64_t, void (*body)(void*, int64_t), void* context) { body(context, 0); }
void spin_wait(int) {}

namespace {

constexpr int64_t kMagic = 0x314d534157324c45, kVersion = 1;  // "EL2WASM1"
constexpr int64_t kMaxLayers = 1024, kMaxContext = 1 << 20;

struct Header {
  int64_t magic, version, bytes, words, relocations, layers, num_kv_heads, head_dim, context;
};

struct Model {
  std::vector<uint64_t> file;  // words of 8 bytes; 64-byte alignment is the file's, from `start`
  uint8_t* start = nullptr;
  int64_t bytes = 0;
  Header header{};
  std::vector<uint8_t> pools;
  std::vector<int32_t> pages, ids;
  std::vector<float> logits;
  std::vector<double> drawn;
  std::string message;
  bool open = false;

  const int64_t* words() const { return reinterpret_cast<const int64_t*>(start + sizeof(Header)); }
  Program program() const { return Program(words(), header.words); }
};
Model& model() {
  static Model one;
  return one;
}

const char* say(std::string text) {
  model().message = std::move(text);
  return model().message.empty() ? nullptr : model().message.c_str();
}

// What is wrong with the file, or empty; addresses are in place afterwards.
std::string relocate(Model& m) {
  if (m.bytes < int64_t(sizeof(Header))) return "the file is too short";
  std::memcpy(&m.header, m.start, sizeof(Header));
  const Header& h = m.header;
  if (h.magic != kMagic || h.version != kVersion) return "the file is no model for the browser, or of another version";
  if (h.bytes != m.bytes) return "the file has " + std::to_string(m.bytes) + " bytes; expected " + std::to_string(h.bytes);
  const int64_t room = (m.bytes - int64_t(sizeof(Header))) / 8;
  if (h.words < 0 || h.relocations < 0 || h.words > room || h.relocations > room - h.words) return "the program is longer than the file";
  if (h.layers < 1 || h.layers > kMaxLayers || h.num_kv_heads < 1 || h.num_kv_heads > kMaxLayers || h.head_dim < 8 || h.head_dim % 8 ||
      h.head_dim > kMaxHeadDim || h.context < 1 || h.context > kMaxContext)
    return "the shape of the cache is out of range";
  auto* words = reinterpret_cast<int64_t*>(m.start + sizeof(Header));
  const int64_t* places = words + h.words;
  for (int64_t i = 0; i < h.relocations; i++) {
    if (places[i] < 0 || places[i] >= h.words) return "a relocation is outside of the program";
    int64_t& word = words[places[i]];
    if (word == 0) continue;
    if (word % 64 || word < 0 || word >= m.bytes) return "an offset is outside of the file";
    word = int64_t(reinterpret_cast<intptr_t>(m.start + word));
  }
  return "";
}

// Checks that every op's arrays lie within the file.
class Bounds {
 public:
  explicit Bounds(const Model& m) : m_(m) {}
  void operator()(const EmbedOp& op) {
    width_ = op.width;
    array(op.table, op.vocab * op.width * (op.dtype == 0 ? 4 : 2), "the embedding");
    if (op.position_table) array(op.position_table, op.max_positions * op.width * (op.position_dtype == 0 ? 4 : 2), "the positions");
    if (op.dtype < 0 || op.dtype > 2 || op.vocab < 1 || op.width < 1) wrong = "the embedding's type or shape is unknown";
  }
  void operator()(const QkvOp& op) {
    const int64_t heads = op.num_heads + 2 * op.num_kv_heads;
    normed(op);
    array(op.bias, op.bias ? heads * op.head_dim * 4 : 0, "a bias");
    array(op.cos, op.max_positions * op.rope_half * 4, "cos");
    array(op.sin, op.max_positions * op.rope_half * 4, "sin");
    if (op.q_norm) array(op.q_norm, (op.q_norm_stride || op.q_norm_whole ? op.num_heads : 1) * op.head_dim * 4, "a norm");
    if (op.k_norm) array(op.k_norm, (op.k_norm_stride || op.k_norm_whole ? op.num_kv_heads : 1) * op.head_dim * 4, "a norm");
  }
  void operator()(const AttentionOp&) {}
  void operator()(const ResidualOp& op) {
    blob(op.blob);
    if (op.bias) array(op.bias, width_ * 4, "a bias");
    if (op.norm) array(op.norm, width_ * 4, "a norm");
  }
  void operator()(const GateUpOp& op) {
    normed(op);
    if (op.bias && wrong.empty()) array(op.bias, int64_t(exl2nb::header(op.blob).N) * 4, "a bias");
  }
  void operator()(const HeadOp& op) {
    normed(op);
    if (op.bias && wrong.empty()) array(op.bias, int64_t(exl2nb::header(op.blob).N) * 4, "a bias");
  }
  void operator()(const RoutedOp&) { wrong = "mixtures of experts do not run in the browser"; }
  void operator()(const exl2nb::Op& op) { wrong = std::string(exl2nb::op_name(&op)) + " does not run in the browser"; }
  void operator()(const ResidualOutOp&) { wrong = "the program has no head"; }
  std::string wrong;

 private:
  void array(const void* p, int64_t bytes, const char* what) {
    const int64_t at = int64_t(reinterpret_cast<intptr_t>(p)) - int64_t(reinterpret_cast<intptr_t>(m_.start));
    if (wrong.empty() && bytes && (!p || bytes < 0 || at < 0 || at > m_.bytes || bytes > m_.bytes - at))
      wrong = std::string(what) + " is outside of the file";
  }
  void blob(const uint8_t* p) {
    array(p, int64_t(sizeof(BlobHeader)), "a matrix");
    if (!wrong.empty()) return;
    const int64_t bytes = exl2nb::header(p).bytes;
    array(p, bytes, "a matrix");
    if (const char* problem = wrong.empty() ? check_blob(p, bytes) : nullptr) wrong = problem;
  }
  void normed(const NormedOp& op) {
    if (op.norm) array(op.norm, width_ * 4, "a norm");
    if (op.norm_bias) array(op.norm_bias, width_ * 4, "a norm");
    blob(op.blob);
  }
  const Model& m_;
  int64_t width_ = 0;
};

}  // namespace
}  // namespace exl2nb

#define EXL2NB_EXPORT(name) extern "C" __attribute__((export_name(#name), visibility("default")))
using namespace exl2nb;

// Room for a file of so many bytes; the page writes it there. A model that was open is closed.
EXL2NB_EXPORT(reserve) uint8_t* reserve(int32_t bytes) {
  Model& m = model();
  m = Model{};
  m.file.resize((size_t(bytes) + 71) / 8 + 8);
  m.start = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(m.file.data()) + 63) / 64 * 64);
  m.bytes = bytes;
  return m.start;
}

EXL2NB_EXPORT(open_model) const char* open_model() {
  Model& m = model();
  std::string wrong = relocate(m);
  if (!wrong.empty()) return say(wrong);
  const Program program = m.program();
  if (const char* problem = program.wrong()) return say(problem);
  Bounds bounds(m);
  for (const Op* op = program.first(); op && bounds.wrong.empty(); op = program.next(op)) visit(op, bounds);
  if (!bounds.wrong.empty()) return say(bounds.wrong);
  const int64_t pages = (m.header.context + kPage - 1) / kPage;
  m.pages.resize(size_t(pages));
  for (int64_t i = 0; i < pages; i++) m.pages[size_t(i)] = int32_t(i);
  m.pools.assign(
      size_t(2 * m.header.layers * pages * m.header.num_kv_heads * pool_row_bytes(kCacheF16, int64_t(kPage), int(m.header.head_dim))), 0);
  m.logits.resize(size_t(output_width(program)));
  m.ids.resize(size_t(m.header.context));
  m.open = true;
  return nullptr;
}

EXL2NB_EXPORT(vocab) int32_t vocab() { return int32_t(model().logits.size()); }
EXL2NB_EXPORT(context) int32_t context() { return int32_t(model().header.context); }
EXL2NB_EXPORT(logits) float* logits() { return model().logits.data(); }

// Where the page writes the ids of the next step, at most context() of them.
EXL2NB_EXPORT(ids) int32_t* ids() { return model().ids.data(); }

// Reads `count` tokens of ids() that follow `position` earlier ones; the logits of the last one are in logits().
EXL2NB_EXPORT(step) const char* step(int32_t count, int32_t position) {
  Model& m = model();
  if (!m.open) return say("no model is open");
  if (count < 1 || position < 0 || position > m.header.context - count) return say("the context is full");
  std::vector<int32_t> positions(static_cast<size_t>(count)), slots;
  for (int32_t i = 0; i < count; i++) positions[size_t(i)] = position + i;
  slots = positions;  // page i holds the tokens from 256 * i on
  const int32_t ends[2] = {0, count}, context_len = position + count, last = count - 1;
  StepBatch batch{m.ids.data(),
                  positions.data(),
                  slots.data(),
                  m.pages.data(),
                  ends,
                  &context_len,
                  &last,
                  count,
                  1,
                  1,
                  int64_t(m.pages.size()),
                  {},
                  {},
                  int64_t(m.pages.size()),
                  m.header.num_kv_heads,
                  kPage,
                  m.header.head_dim,
                  kCacheF16,
                  kCacheF16};
  const int64_t pool = int64_t(m.pages.size()) * m.header.num_kv_heads * pool_row_bytes(kCacheF16, int64_t(kPage), int(m.header.head_dim));
  for (int64_t layer = 0; layer < m.header.layers; layer++) {
    batch.k_pools.push_back(m.pools.data() + 2 * layer * pool);
    batch.v_pools.push_back(m.pools.data() + (2 * layer + 1) * pool);
  }
  const Program program = m.program();
  const std::string wrong = check_step(program, batch);
  if (!wrong.empty()) return say(wrong);
  run_step(program, batch, m.logits.data());
  return nullptr;
}

// What the settings leave: for each token its probability, -1 if it is removed; or null as in draw_token.
EXL2NB_EXPORT(probabilities)
const double* probabilities(double temperature, double top_k, double top_p, double min_p) {
  Model& m = model();
  const draw::Settings settings{temperature, top_k, top_p, min_p, 0};
  if (!m.open || !draw::valid(settings)) return nullptr;
  m.drawn.resize(m.logits.size());
  return draw::probabilities_into(m.logits.data(), int64_t(m.logits.size()), settings, m.drawn.data()) ? m.drawn.data() : nullptr;
}

// Draws from the logits. Four numbers, id, log probability, rank and choices, then pairs of id and log probability of the `top` best; or
// null: the settings are out of range, or nothing can be drawn.
EXL2NB_EXPORT(draw_token)
const double* draw_token(double temperature, double top_k, double top_p, double min_p, double uniform, int32_t top) {
  Model& m = model();
  const draw::Settings settings{temperature, top_k, top_p, min_p, uniform};
  if (!m.open || !draw::valid(settings) || top < 0 || size_t(top) > m.logits.size()) return nullptr;
  m.drawn.assign(size_t(4 + 2 * top), 0.0);
  const auto vocab = int64_t(m.logits.size());
  draw::draw_into(m.logits.data(), nullptr, vocab, vocab, settings, top, m.drawn.data());
  return m.drawn[0] < 0 ? nullptr : m.drawn.data();
}
