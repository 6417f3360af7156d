// Host side of the blob's kernels: EXL2 tensors to fp16 (reconstruct.cu), tensors to blobs (pack.cu), blobs to fp16 (unpack.cu), copies.
#include <algorithm>

#include "cuda/blob/blob.h"
#include "cuda/runtime/kernel.h"
#include "cuda/runtime/launch.h"

namespace exl2nb {
namespace {

const Kernel<const uint32_t*, int, const uint32_t*, const half*, const int16_t*, int, const int32_t*, int, int, half*> reconstruct_rows{
    "blob/reconstruct.cu", "reconstruct_rows", false};
constexpr const char* kPack = "blob/pack.cu";
const Kernel<PackSource, PackTarget> pack_units{kPack, "pack_units", false};
const Kernel<const void*, int, int, PackTarget> pack_dense_units[] = {
    {kPack, "pack_dense_units<float>", false}, {kPack, "pack_dense_units<half>", false}, {kPack, "pack_dense_units<exl2nb::Bf16>", false}};
const Kernel<GptqPacking, PackTarget> pack_gptq_units{kPack, "pack_gptq_units", false};
const Kernel<UnpackParts, int, int64_t, half*> unpack_kernel{"blob/unpack.cu", "unpack_kernel", false};

constexpr unsigned kThreads = 256;

uintptr_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }
// Starts a copy; wait: until it is done.
template <class Copy>
const char* run_copy(const Copy& copy, void* stream, bool wait) {
  const Driver* const d = driver();
  if (!d) return "no CUDA driver was found that supports CUDA 12";
  const auto queue = static_cast<CudaStream>(stream);
  const int error = copy(*d, queue);
  return error_text(error || !wait ? error : d->synchronize(queue));
}

}  // namespace

const char* reconstruct_launch(const int32_t* q_weight, int64_t R, const int32_t* q_scale, const void* q_scale_max, const int16_t* q_groups,
                               int64_t G, const int32_t* q_invperm, int64_t K, int64_t N, void* out, void* stream) {
  return reconstruct_rows({unsigned(K), kThreads, 0, stream}, reinterpret_cast<const uint32_t*>(q_weight), int(R),
                          reinterpret_cast<const uint32_t*>(q_scale), static_cast<const half*>(q_scale_max), q_groups, int(G), q_invperm,
                          int(K), int(N), static_cast<half*>(out));
}

const char* pack_exl2_launch(const PackSource& source, const PackTarget& to, void* stream) {
  return pack_units({unsigned(to.strips), kThreads, 0, stream}, source, to);
}
const char* pack_gptq_launch(const GptqPacking& source, const PackTarget& to, void* stream) {
  return pack_gptq_units({unsigned(to.strips), kThreads, 0, stream}, source, to);
}
const char* pack_dense_launch(const void* weight, int dtype, int N, int K, const PackTarget& to, void* stream) {
  return pack_dense_units[dtype]({unsigned(to.strips), kThreads, 0, stream}, weight, N, K, to);
}

const char* unpack_launch(const uint8_t* head, const uint8_t* blob, void* out, void* stream) {
  const auto& h = header_of(head);
  const auto* parts = parts_of(head);
  UnpackParts sources{};
  Dim grid(1, 1, h.num_parts);
  for (int p = 0; p < h.num_parts; p++) {
    const GpuPart& s = parts[p];
    UnpackPart& to = sources.part[p];
    to.data = blob + s.data, to.steps = reinterpret_cast<const half2*>(blob + h.image + image_steps(h.num_items));
    to.items = reinterpret_cast<const Item*>(blob + h.image) + s.first_item;
    to.perm =
        h.perms && !s.dense ? reinterpret_cast<const int*>(blob + h.perms) + s.perm * (static_cast<int64_t>(h.stored) + h.K) : nullptr;
    to.num_items = s.num_items, to.first_unit = s.first_unit, to.num_units = s.num_units, to.strips = s.strips;
    to.first_column = s.first_column, to.outputs = s.outputs, to.stored = to.perm ? h.stored : h.K, to.strip_bytes = s.strip_bytes;
    to.whole = h.N % 8 == 0 && s.first_column % 8 == 0 && (reinterpret_cast<uintptr_t>(out) & 15) == 0;
    constexpr int kPerCta = kStrips * kUnpackWarps;
    grid.x = std::max<unsigned>(grid.x, (s.strips + kPerCta - 1) / kPerCta);
    grid.y = std::max<unsigned>(grid.y, (s.num_units + kUnitsPerWarp - 1) / kUnitsPerWarp);
  }
  return unpack_kernel({grid, kUnpackWarps * 32, 0, stream}, sources, h.K, h.N, static_cast<half*>(out));
}

const char* copy_out(void* host, const void* device, int64_t bytes, void* stream) {
  return run_copy([&](const Driver& d, CudaStream s) { return d.copy_to_host(host, address(device), size_t(bytes), s); }, stream, true);
}
const char* copy_in(void* device, const void* host, int64_t bytes, void* stream) {
  return run_copy([&](const Driver& d, CudaStream s) { return d.copy_to_device(address(device), host, size_t(bytes), s); }, stream, true);
}
const char* copy_within(void* to, const void* from, int64_t bytes, void* stream) {
  return run_copy([&](const Driver& d, CudaStream s) { return d.copy(address(to), address(from), size_t(bytes), s); }, stream, false);
}

}  // namespace exl2nb

// Why kernels cannot run on the thread's device; null where they can. For ops/kernel_code.py.
extern "C" __attribute__((visibility("default"))) const char* exl2nb_kernel_problem() { return exl2nb::reconstruct_rows.problem(); }
