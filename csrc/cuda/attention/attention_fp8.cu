// The decode kernels of one pair of storages; see attention_decode.cuh.
#include "cuda/attention/attention_decode.cuh"

namespace exl2nb {

DecodeKernel decode_kernel_fp8(int head_dim, int rows) { return decode_kernel<kCacheFp8, kCacheFp8>(head_dim, rows); }

}  // namespace exl2nb
