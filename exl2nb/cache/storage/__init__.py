"""How K and V are stored: one file per mode; every file in this folder is read."""

import importlib
import pkgutil

from exl2nb.cache.storage.base import STORAGES, PlainStorage

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["STORAGES", "PlainStorage"]
