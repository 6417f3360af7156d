"""One file per family, one frozen declaration per architecture; every file in this folder is imported."""

import importlib
import pkgutil

from exl2nb.model.archs.architecture import ARCHS, Architecture, parse_config

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["ARCHS", "Architecture", "parse_config"]
