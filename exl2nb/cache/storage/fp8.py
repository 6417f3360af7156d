"""fp8: e4m3 with a scale per 32, not rotated; the bytes of q8 and less of its precision, in the number format that GPUs have."""

import torch

from exl2nb.cache.storage.base import STORAGES, CodedStorage

STORAGES.register("fp8")(CodedStorage(torch.float8_e4m3fn, 8))
