"""Memory of large pages for the weights of a small model on the CPU. Knows no model.

A model that lies in the processor's cache is read anew in every step, and each 4 KiB of it then cost a walk through the page tables:
5,000 of them in the demo model, more than a processor remembers. Larger models wait for memory longer than for such walks.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from exl2nb.ops.large_pages import large_pages

MOST_BYTES = 64 << 20  # of a model's files: what may still lie in a cache
_PAGE = 2 << 20


def room_for(directory: str | os.PathLike[str], *, widened: bool) -> Tensor | None:
    """Memory for the packed weights of a small model; None for a larger one, whose matrices stay where they were packed.

    Args:
        directory: of the model.
        widened: 16-bit numbers become 32-bit ones.
    """
    size = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
    return large_pages((2 * size if widened else size) + size // 8 + _PAGE) if size <= MOST_BYTES else None
