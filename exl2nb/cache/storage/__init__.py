"""How K and V are stored: one file per storage; every file in this folder is read. FORMAT.md describes the bytes."""

import importlib
import pkgutil

from exl2nb.cache.storage.base import STORAGES, CodedStorage, PlainStorage, Storage

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["STORAGES", "CodedStorage", "PlainStorage", "Storage"]
