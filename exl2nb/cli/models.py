"""What several commands need of a model directory: load it, and weigh its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from exl2nb.core.progress import Sink

if TYPE_CHECKING:
    from exl2nb.model.model import Model

DEMO = "demo"


def locate(name: str, progress: Sink | None = None) -> Path:
    """A model directory: "demo" is the packaged one, anything else a path or a hub id."""
    from exl2nb.io.hub import resolve

    return demo_directory() if name == DEMO and not Path(name).is_dir() else resolve(name, progress=progress)


def demo_directory() -> Path:
    """Where the packaged demo model lies."""
    return Path(__file__).resolve().parent.parent / "demo_model"


@contextmanager
def loaded(directory: Path, progress: Sink | None = None) -> Iterator[Model]:
    """A model for the length of a `with`."""
    from exl2nb.model.loader import load_model

    model = load_model(directory, progress=progress)
    try:
        yield model
    finally:
        model.close()


def file_bytes(directory: Path) -> int:
    """Bytes of all .safetensors files of a model."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
