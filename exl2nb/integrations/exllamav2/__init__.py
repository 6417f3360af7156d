"""exllamav2's public classes over our engine, for code that was written for it: `install()`, then `import exllamav2` as before.

docs/guide/exllamav2.md has the table of what is taken, what is ignored, and what is refused by name. Where the real exllamav2 is installed,
`install` leaves it alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from exl2nb.integrations.exllamav2.absent import refuse_import
from exl2nb.integrations.exllamav2.loading import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    ExLlamaV2Tokenizer,
    Timer,
)
from exl2nb.integrations.exllamav2.vision import ExLlamaV2MMEmbedding, ExLlamaV2VisionTower

__version__ = "0.3.2"  # the version whose interface this is

_MODULE_ALIASES = {
    "exllamav2": "exl2nb.integrations.exllamav2",
    "exllamav2.model": "exl2nb.integrations.exllamav2.loading",
    "exllamav2.config": "exl2nb.integrations.exllamav2.loading",
    "exllamav2.cache": "exl2nb.integrations.exllamav2.loading",
    "exllamav2.lora": "exl2nb.integrations.exllamav2.loading",
    "exllamav2.tokenizer": "exl2nb.integrations.exllamav2.loading",
    "exllamav2.vlm": "exl2nb.integrations.exllamav2.vision",
    "exllamav2.vlm.vision_tower": "exl2nb.integrations.exllamav2.vision",
    "exllamav2.util": "exl2nb.integrations.exllamav2.loading",
    "exllamav2.generator": "exl2nb.integrations.exllamav2.generator",
    "exllamav2.generator.base": "exl2nb.integrations.exllamav2.generator",
    "exllamav2.generator.dynamic": "exl2nb.integrations.exllamav2.generator",
    "exllamav2.generator.dynamic_async": "exl2nb.integrations.exllamav2.generator",
    "exllamav2.generator.streaming": "exl2nb.integrations.exllamav2.generator",
    "exllamav2.generator.filters": "exl2nb.integrations.exllamav2.token_filters",
    "exllamav2.generator.filters.base": "exl2nb.integrations.exllamav2.token_filters",
    "exllamav2.generator.sampler": "exl2nb.integrations.exllamav2.sampler",
    "exllamav2.generator.hooks": "exl2nb.integrations.exllamav2.sampler",
    "exllamav2.generator.dynamic_embeddings": "exl2nb.integrations.exllamav2.vision",
    "exllamav2.tokenizer.tokenizer": "exl2nb.integrations.exllamav2.loading",
    "exllamav2.version": "exl2nb.integrations.exllamav2",
}


def install() -> bool:
    """Make `import exllamav2` give these classes.

    Returns:
        True; False where the real exllamav2 is installed, which is then left in its place.

    Example:
        >>> install()
        True
        >>> from exllamav2 import ExLlamaV2Config
        >>> from exllamav2.generator import ExLlamaV2DynamicGenerator
        >>> uninstall()
    """
    present = sys.modules.get("exllamav2")
    if present is None and importlib.util.find_spec("exllamav2") is not None:
        return False
    if present is not None and present is not sys.modules[__name__]:
        return False
    for name, target in _MODULE_ALIASES.items():
        sys.modules[name] = importlib.import_module(target)
    return True


def __getattr__(name: str) -> Any:
    """Say why a name of exllamav2 is missing."""
    refuse_import("exllamav2", name)


def uninstall() -> None:
    """Undo `install`."""
    for name, target in _MODULE_ALIASES.items():
        if sys.modules.get(name) is sys.modules.get(target):
            sys.modules.pop(name, None)


__all__ = [
    "ExLlamaV2",
    "ExLlamaV2Cache",
    "ExLlamaV2CacheBase",
    "ExLlamaV2Cache_8bit",
    "ExLlamaV2Cache_Q4",
    "ExLlamaV2Cache_Q6",
    "ExLlamaV2Cache_Q8",
    "ExLlamaV2Cache_TP",
    "ExLlamaV2Config",
    "ExLlamaV2Lora",
    "ExLlamaV2MMEmbedding",
    "ExLlamaV2Tokenizer",
    "ExLlamaV2VisionTower",
    "Timer",
    "install",
    "uninstall",
]
