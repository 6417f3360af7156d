"""Floor 3: params, filters and the chain from logits to a token.

`exl2nb.sampling.explain(logits, top_p=0.9)` shows what each filter does, `Replay` every choice of an answer;
`SamplingParams` are the settings.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time `__getattr__` below does it
    from exl2nb.sampling.defaults import SamplingDefaults as SamplingDefaults
    from exl2nb.sampling.explanation import Explanation as Explanation
    from exl2nb.sampling.filters import CHAIN as CHAIN
    from exl2nb.sampling.params import SamplingParams as SamplingParams
    from exl2nb.sampling.replay import Draw as Draw
    from exl2nb.sampling.replay import Replay as Replay
    from exl2nb.sampling.replay import explain as explain

_PUBLIC = {
    "CHAIN": "filters",
    "Draw": "replay",
    "Explanation": "explanation",
    "Replay": "replay",
    "SamplingDefaults": "defaults",
    "SamplingParams": "params",
    "explain": "replay",
}
__all__ = ["CHAIN", "Draw", "Explanation", "Replay", "SamplingDefaults", "SamplingParams", "explain"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'exl2nb.sampling' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(f"exl2nb.sampling.{_PUBLIC[name]}"), name)
