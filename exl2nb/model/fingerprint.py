"""A short name for what decides the numbers of a KV cache besides the tokens: weights, device, positions. Reads headers and samples."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from exl2nb.model.model import Model
from exl2nb.model.rope import rope_tables

SAMPLES, SAMPLE_BYTES = 64, 4096  # per file, evenly spread; a quantisation changes every tensor, so a few places tell
ROPE_ROWS = 64


def fingerprint(directory: str | os.PathLike[str], model: Model) -> str:
    """32 hex digits: config.json, and of every `.safetensors` file its header, its size and samples; the kind of device; the RoPE tables.

    Equal for equal files, whatever the directory is called. Some RoPE types depend on the context that the model was loaded with.

    Cost: reads at most 256 KiB per file besides the header.
    """
    digest = blake2b(model.device.partition(":")[0].encode(), digest_size=16)
    config = model.config
    for kind in sorted({config.rope_kind(layer) for layer in range(config.num_layers)}):
        for table in rope_tables(config, ROPE_ROWS, context=model.context, kind=kind):
            digest.update(table.contiguous().numpy().tobytes())
    folder = Path(directory)
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            header = min(8 + int.from_bytes(file.read(8), "little"), size)
            file.seek(0)
            digest.update(size.to_bytes(8, "little") + file.read(header))
            for i in range(SAMPLES):
                file.seek(header + (size - header) * i // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
