#include "kernels.inc"

namespace exl2nb {
const Kernels* kernels_avx512() {
  static const Kernels table = {rms_norm, layer_norm, quantize, gemm, activate, rope_store, to_float, attention, read};
  return &table;
}
}  // namespace exl2nb
