"""q8: rotated groups of 32, 256 levels; 8.5 bits a number, hardly to be told from fp16."""

import torch

from exl2nb.cache.storage.base import STORAGES, CodedStorage

STORAGES.register("q8")(CodedStorage(torch.uint8, 8))
