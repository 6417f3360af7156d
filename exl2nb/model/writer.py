"""Writes a model directory, which appears under its name whole or not at all. Knows nothing of how codes are chosen."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from exl2nb.core.errors import ConversionError, FormatError
from exl2nb.io.atomic import sibling, sync_directory, sync_file, write_errors
from exl2nb.io.safetensors import Writer, stream
from exl2nb.io.shards import TensorStore
from exl2nb.quant.exl2 import EXL2_SUFFIXES, check_headers, parse_groups

SHARD_BYTES = 8 << 30
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")  # other weights, and the index of the source's shards


def write_model(
    dst: str | os.PathLike[str],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    config: Mapping[str, Any],
    source_dir: str | os.PathLike[str] | None = None,
    quantization_config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    extra: Mapping[str, bytes] | None = None,
) -> Path:
    """Write `output.safetensors` (or `output-00001-of-0000n.safetensors` ...), config.json and the source's other files.

    Everything is written into a hidden folder next to `dst`, checked, and renamed at the end; on any error, an interrupt included, that
    folder is removed and `dst` is what it was before.

    Args:
        dst: the directory to make.
        tensors: (name, tensor) in any order, consumed once; one tensor is in memory at a time. EXL2 matrices as
            `Exl2Tensors.tensors(module key)` gives them, other tensors by the module's canonical names.
        config: the source's config.json.
        source_dir: its top-level files are copied, weights and their index excepted (tokenizer, templates, licence).
        quantization_config: put into config.json; None leaves `config` as it is.
        shard_bytes: data bytes per file; a larger single tensor gets a file of its own.
        overwrite: replace a directory that exists, once the new one is complete.
        extra: further files by name; they replace copied ones.

    Returns:
        `dst`.

    Raises:
        ConversionError: `dst` exists, the disk is full, or it cannot be written there.
        FormatError: a name twice, or an EXL2 matrix that breaks a rule of the format's table, dtypes or shapes.
    """
    dst = Path(dst)
    if dst.exists() and not overwrite and (not dst.is_dir() or any(dst.iterdir())):
        raise ConversionError(f"{dst}: exists already; choose another directory or remove it (write_model: overwrite=True)")
    temporary = sibling(dst.absolute())
    with write_errors(dst):
        try:
            temporary.mkdir()
        except OSError as error:
            raise ConversionError(
                f"{dst}: cannot be made ({error.strerror}); choose a directory that exists and that you may write to"
            ) from error
        try:
            _write_shards(temporary, tensors, shard_bytes)
            _check(temporary)
            if source_dir is not None:
                _copy_files(Path(source_dir), temporary)
            _write_config(temporary / "config.json", config, quantization_config)
            for name, content in (extra or {}).items():
                (temporary / name).write_bytes(content)
            for path in temporary.iterdir():
                sync_file(path)
            sync_directory(temporary)
            _put(temporary, dst.absolute())
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return dst


def _write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], limit: int) -> None:
    seen: set[str] = set()
    paths: list[Path] = []
    with ExitStack() as stack:
        writer: Writer | None = None
        for name, tensor in tensors:
            if name in seen:
                raise FormatError(f"tensor {name!r}: found it twice, expected each name once")
            seen.add(name)
            if writer is None or (writer.nbytes and writer.nbytes + tensor.nbytes > limit):
                stack.close()  # finishes the shard before
                paths.append(directory / f"shard-{len(paths):05d}.safetensors")
                writer = stack.enter_context(stream(paths[-1]))
            writer.add(name, tensor)
    if not paths:
        raise FormatError(f"{directory}: found no tensors to write, expected at least one")
    for number, path in enumerate(paths, start=1):
        path.rename(directory / (f"output-{number:05d}-of-{len(paths):05d}.safetensors" if len(paths) > 1 else "output.safetensors"))


def _check(directory: Path) -> None:
    """Read back headers and group tables: what a loader would refuse is refused here, before the directory gets its name."""
    with TensorStore(directory) as store:
        for name in store.names():
            if not name.endswith(".q_weight"):
                continue
            prefix = name.removesuffix(".q_weight")
            infos = {suffix: store.info(f"{prefix}.{suffix}") for suffix in EXL2_SUFFIXES}
            if f"{prefix}.bias" in store:
                infos["bias"] = store.info(f"{prefix}.bias")
            check_headers(infos, prefix, file=infos["q_weight"].path)
            parse_groups(store.read(f"{prefix}.q_groups").tolist(), infos["q_weight"].shape[0], prefix, file=infos["q_groups"].path)


def _copy_files(source: Path, target: Path) -> None:
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        if entry.is_file() and not entry.name.endswith(_NOT_COPIED) and entry.name != "config.json":
            shutil.copyfile(entry.path, target / entry.name)


def _write_config(path: Path, config: Mapping[str, Any], quantization_config: Mapping[str, Any] | None) -> None:
    value = dict(config) if quantization_config is None else {**config, "quantization_config": dict(quantization_config)}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=4, ensure_ascii=False)


def _put(temporary: Path, dst: Path) -> None:
    """Rename the finished folder to its final name; an older one is set aside first and removed afterwards."""
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        aside = sibling(dst)
        dst.rename(aside)
        try:
            temporary.rename(dst)
        except BaseException:
            aside.rename(dst)
            raise
        sync_directory(dst.parent)  # the older one is removed when the new one is sure to be there
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink()
    else:
        temporary.rename(dst)
    sync_directory(dst.parent)
