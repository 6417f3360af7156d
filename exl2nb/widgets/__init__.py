"""Floor 8: notebook widgets; the only room that imports Jupyter packages. Public classes load when they are first named."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exl2nb.widgets.attention import AttentionView as AttentionView
    from exl2nb.widgets.base import ExlWidget as ExlWidget
    from exl2nb.widgets.bitmap import BitMap as BitMap
    from exl2nb.widgets.caches import CacheExplorer as CacheExplorer
    from exl2nb.widgets.compare import Compare as Compare
    from exl2nb.widgets.errorflow import ErrorFlow as ErrorFlow
    from exl2nb.widgets.explorer import BitrateExplorer as BitrateExplorer
    from exl2nb.widgets.histogram import WeightHistogram as WeightHistogram
    from exl2nb.widgets.layerlens import LayerLens as LayerLens
    from exl2nb.widgets.lora import LoraExplorer as LoraExplorer
    from exl2nb.widgets.memory_plan import MemoryPlan as MemoryPlan
    from exl2nb.widgets.microscope import SamplerMicroscope as SamplerMicroscope
    from exl2nb.widgets.outliers import OutlierMap as OutlierMap
    from exl2nb.widgets.pagetable import PageTable as PageTable
    from exl2nb.widgets.playground import Playground as Playground
    from exl2nb.widgets.progress_view import ProgressView as ProgressView
    from exl2nb.widgets.servermonitor import ServerMonitor as ServerMonitor
    from exl2nb.widgets.speculation import Speculation as Speculation
    from exl2nb.widgets.weights import WeightBrowser as WeightBrowser

_PUBLIC = {
    "AttentionView": "exl2nb.widgets.attention",
    "BitMap": "exl2nb.widgets.bitmap",
    "BitrateExplorer": "exl2nb.widgets.explorer",
    "CacheExplorer": "exl2nb.widgets.caches",
    "Compare": "exl2nb.widgets.compare",
    "ErrorFlow": "exl2nb.widgets.errorflow",
    "ExlWidget": "exl2nb.widgets.base",
    "LayerLens": "exl2nb.widgets.layerlens",
    "LoraExplorer": "exl2nb.widgets.lora",
    "MemoryPlan": "exl2nb.widgets.memory_plan",
    "OutlierMap": "exl2nb.widgets.outliers",
    "PageTable": "exl2nb.widgets.pagetable",
    "Playground": "exl2nb.widgets.playground",
    "ProgressView": "exl2nb.widgets.progress_view",
    "SamplerMicroscope": "exl2nb.widgets.microscope",
    "ServerMonitor": "exl2nb.widgets.servermonitor",
    "Speculation": "exl2nb.widgets.speculation",
    "WeightBrowser": "exl2nb.widgets.weights",
    "WeightHistogram": "exl2nb.widgets.histogram",
}
__all__ = [*_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'exl2nb.widgets' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
