// One row times quantised tiles with AMX.
#pragma once
#include "kernels.h"

namespace exl2nb::amx {
bool one_row(const uint8_t* blob, const BlobPart& part, const Rows& rows, int tile, int end, const Output& out);
bool allowed();  // by processor and system
}  // namespace exl2nb::amx
