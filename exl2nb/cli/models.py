"""What several commands need of a model directory: load it, and weigh its files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from exl2nb.core.progress import Sink

if TYPE_CHECKING:
    from exl2nb.model.model import Model

DEMO = "demo"


def locate(name: str, progress: Sink | None = None, *, revision: str | None = None) -> Path:
    """A model directory: "demo" is the packaged one, anything else a path or a hub id."""
    from exl2nb.io.hub import resolve

    place = locate_demo(name)
    return place if isinstance(place, Path) else resolve(name, revision, progress)


def locate_demo(name: str) -> str | Path:
    """The packaged model's directory for "demo", everything else as it is."""
    return demo_directory() if name == DEMO and not Path(name).is_dir() else name


def demo_directory() -> Path:
    """Directory of the packaged demo model."""
    return Path(__file__).resolve().parent.parent / "demo_model"


def add_model(parser: argparse.ArgumentParser, *, cache: str = "", revision: bool = False) -> None:
    """The argument `model`; `--revision` on request; `--cache` with this default, where there is one."""
    parser.add_argument("model", help="model directory, hub id, or `demo`")
    if revision:
        parser.add_argument("--revision", help="branch, tag or commit on the hub")
    if cache:
        add_cache_option(parser, cache)


def add_cache_option(parser: argparse.ArgumentParser, default: str) -> None:
    """--cache, checked before anything is loaded."""
    text = f"how K and V are stored: fp32, fp16, fp8, q8, q6 (K 8 bits, V 4), q4, or bits apart as k8v4 (default {default})"
    parser.add_argument("--cache", metavar="MODE", type=_cache_mode, default=default, help=text)


def _cache_mode(text: str) -> str:
    from exl2nb.cache.modes import parse_mode
    from exl2nb.core.errors import OptionError

    try:
        return parse_mode(text, where="--cache")
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
    return sum(path.stat().st_size for path in directory.glob("*.safetensors") if path.is_file())
