// The decode kernels of one pair of storages; see attention_decode.cuh.
#include "attention_decode.cuh"

namespace exl2nb {

DecodeKernel decode_kernel_f16q4(int head_dim, bool wide) { return decode_kernel<kCacheF16, kCacheQ4>(head_dim, wide); }

}  // namespace exl2nb
