// The decode kernels of one pair of storages; see attention_decode.cuh.
#include "cuda/attention/attention_decode.cuh"

namespace exl2nb {

DecodeKernel decode_kernel_q8q4(int head_dim, int rows) { return decode_kernel<kCacheQ8, kCacheQ4>(head_dim, rows); }

}  // namespace exl2nb
