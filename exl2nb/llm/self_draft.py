"""draft="self": the model's own copy at few bits, which drafts for it; made once and kept. Knows no engine.

It pays where a step of the copy takes a fraction of one of the model: dense models, whose weights have six times the bytes.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from exl2nb.core import env
from exl2nb.core.errors import ConversionError, OptionError
from exl2nb.core.progress import Sink
from exl2nb.io import hub

DRAFT_BPW = 2.5


def copies_folder() -> Path:
    """Where copies are kept: $EXL2NB_DRAFTS, else the user's cache folder."""
    chosen = env.get("EXL2NB_DRAFTS", "")
    home = os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else os.environ.get("XDG_CACHE_HOME")
    return Path(chosen) if chosen else Path(home or Path.home() / ".cache") / "exl2nb" / "drafts"


def copy_of(folder: Path, *, device: str, progress: Sink | None) -> Path:
    """The copy of a dense model; it is converted now if it is not there. Another process that makes it at the same time does no harm.

    Args:
        folder: of the model. device: where to convert, as `ConversionJob` takes it. progress: takes the events of the conversion.

    Raises:
        OptionError: the model is quantised already. ConversionError: as `ConversionJob`.

    Cost: a conversion with effort "quick", the first time.
    """
    from exl2nb.converter.conversion_job import ConversionJob

    copy = copies_folder() / f"{folder.resolve().name}-{_digest(folder)}"
    if (copy / "config.json").is_file():
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        job = ConversionJob(folder, copy, bpw=DRAFT_BPW, effort="quick", device=device)
        job.run(progress)
    except ConversionError as error:
        if (copy / "config.json").is_file():  # another process has made it meanwhile
            return copy
        if "found an EXL2 model" in str(error):
            todo = f"convert the model it was made from to {DRAFT_BPW} bits per weight (`exl2nb convert`), and give that directory as draft"
            raise OptionError(f"load: draft is 'self' and {hub.label(folder)} is quantised already; {todo}") from error
        raise
    return copy


def _digest(folder: Path) -> str:
    """Of the model's config, and of the names, sizes and times of its weights."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        facts = file.stat()
        found.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns} {DRAFT_BPW}".encode())
    return found.hexdigest()[:16]
