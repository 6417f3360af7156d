"""fp16: half the memory of fp32; the default."""

import torch

from exl2nb.cache.storage.base import STORAGES, PlainStorage

STORAGES.register("fp16")(PlainStorage(torch.float16))
