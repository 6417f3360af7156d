"""fp32: no rounding of K and V; for references and measurements."""

import torch

from exl2nb.cache.storage.base import STORAGES, PlainStorage

STORAGES.register("fp32")(PlainStorage(torch.float32))
