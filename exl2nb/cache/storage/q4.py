"""q4: rotated groups of 32, 16 levels, the scale of least squared error; 4.5 bits a number."""

import torch

from exl2nb.cache.storage.base import STORAGES, CodedStorage

STORAGES.register("q4")(CodedStorage(torch.uint8, 4))
