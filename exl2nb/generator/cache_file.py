"""Cached pages in a file: what they hold and the texts they belong to, checked whole before the first byte is used. Knows no threads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl2nb.cache.pool import KVCache
from exl2nb.cache.prefix import Entry, chain_key
from exl2nb.core.errors import FormatError, OptionError
from exl2nb.core.options import check_path
from exl2nb.generator.pager import Pager
from exl2nb.io import safetensors

FORMAT = "exl2nb cache 1"


@dataclass(frozen=True, kw_only=True)
class CacheFile:
    """What was saved or loaded. skipped: pages that were there already, or for which the cache has no room."""

    path: Path
    pages: int
    tokens: int
    skipped: int = 0

    def __str__(self) -> str:
        more = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.tokens} tokens in {self.pages} pages ({self.path.name}{more})"


def save(path: str | os.PathLike[str], pager: Pager, cache: KVCache, *, model: str) -> CacheFile:
    """Write every published page whose whole text is there.

    Args:
        path: the file; it appears under its name when it is complete.
        pager: what the pages hold. cache: their numbers.
        model: fingerprint of the model.

    Raises:
        OptionError: nothing is cached; `path` is no path. ConversionError: the disk is full or the directory cannot be written.
    """
    check_path("cache.save: path", path)
    path = Path(path)
    salts, order, parents = _order(pager)
    if not order:
        raise OptionError("cache.save: no page holds anything that could be used again; generate something first")
    entries = [_entry(pager, page) for page in order]
    tokens = torch.zeros(len(order), pager.page_size, dtype=torch.int32)
    for row, entry in zip(tokens, entries):
        row[: len(entry.tokens)] = torch.from_numpy(np.array(entry.tokens))
    where = torch.tensor(order)
    tensors = {name: pool[where.to(pool.device)] for name, pool in _pools(cache).items()}
    tensors["tokens"] = tokens
    tensors["lengths"] = torch.tensor([len(entry.tokens) for entry in entries], dtype=torch.int32)
    tensors["parents"] = torch.tensor(parents, dtype=torch.int32)
    head = {"format": FORMAT, "model": model, "spec": json.dumps(_spec(cache)), "salts": json.dumps(salts)}
    safetensors.save(path, tensors, head)
    return CacheFile(path=path, pages=len(order), tokens=sum(len(entry.tokens) for entry in entries))


def load(path: str | os.PathLike[str], pager: Pager, cache: KVCache, *, model: str, vocab_size: int | None) -> CacheFile:
    """Add the pages of a file to the cached ones, as far as free pages go; the beginnings of texts come first.

    Args:
        path: made by `save`.
        pager, cache: of this model.
        model: fingerprint of the model.
        vocab_size: of the model; None = not checked.

    Raises:
        FormatError: the file is damaged, or no cache file. OptionError: it belongs to another model or another kind of cache; `path` is no
            path.
        ModelNotFound: there is no such file.
    """
    check_path("cache.load: path", path)
    path = Path(path)
    with safetensors.SafetensorsFile(path) as file:
        salts = _check_head(path, file.metadata or {}, cache, model)
        texts = _read_texts(path, file, pager.page_size, vocab_size, len(salts))
        pools = _pools(cache)
        for name, pool in pools.items():
            info, shape = file.info(name), (len(texts), *pool.shape[1:])
            if info.dtype != pool.dtype or info.shape != shape:
                raise FormatError(f"{path}: tensor {name!r}: found {info.dtype} {info.shape}, expected {pool.dtype} {shape}")
        places = _place(pager, texts, salts)
        try:
            rows = torch.tensor([row for row, _ in places], dtype=torch.int64)
            targets = torch.tensor([page for _, page in places], dtype=torch.int64)
            for name, pool in pools.items() if places else ():
                data = file.read(name)[rows]
                if data.is_floating_point() and data.dtype.itemsize > 1 and not torch.isfinite(data).all():
                    raise FormatError(f"{path}: tensor {name!r}: found numbers that are not finite, expected none: the file is damaged")
                pool[targets.to(pool.device)] = data.to(pool.device)
        except BaseException:
            for _, page in places:
                pager.index.forget(page)
            raise
        finally:
            pager.table.free([page for _, page in places])
    count = sum(len(texts[row][0]) for row, _ in places)
    return CacheFile(path=path, pages=len(places), tokens=count, skipped=len(texts) - len(places))


def _order(pager: Pager) -> tuple[list[str], list[int], list[int]]:
    """Salts, pages with parents first, and for each page its parent's row, or -1 - i for the beginning of a text under salt i."""
    salts = list(pager.roots)
    known = {key: -1 - i for i, key in enumerate(pager.roots.values())}
    order: list[int] = []
    parents: list[int] = []
    left = [page for page in range(pager.table.num_pages) if pager.index.entry(page)]
    while True:
        later = []
        for page in left:
            entry = _entry(pager, page)
            if entry.parent not in known:
                later.append(page)
                continue
            if entry.key is not None:
                known[entry.key] = len(order)
            order.append(page)
            parents.append(known[entry.parent])
        if len(later) == len(left):
            return salts, order, parents
        left = later


def _entry(pager: Pager, page: int) -> Entry:
    entry = pager.index.entry(page)
    assert entry is not None, f"page {page} is not published"
    return entry


def _check_head(path: Path, head: Mapping[str, str], cache: KVCache, model: str) -> list[str]:
    if head.get("format") != FORMAT:
        raise FormatError(f"{path}: found format {head.get('format')!r}, expected {FORMAT!r}; the file was not made by cache.save")
    if head.get("model") != model:
        raise OptionError(
            f"{path}: the pages were computed by another model (fingerprint {str(head.get('model'))[:12]}, this one has {model[:12]}): "
            "load the file with the model that saved it, on the same kind of device"
        )
    spec, salts = _json(path, head, "spec"), _json(path, head, "salts")
    mine = _spec(cache)
    if spec != mine:
        theirs = spec if isinstance(spec, dict) else {}
        differing = [name for name in mine if theirs.get(name) != mine[name]]
        found = ", ".join(f"{name} {theirs.get(name)!r} (here {mine[name]!r})" for name in differing) or repr(spec)[:80]
        raise OptionError(f"{path}: the file's cache is of another kind: {found}; load the model with the same cache options")
    if not isinstance(salts, list) or not all(isinstance(salt, str) for salt in salts):
        raise FormatError(f"{path}: salts are {str(salts)[:80]}, expected a list of texts")
    return salts


def _json(path: Path, head: Mapping[str, str], name: str) -> Any:
    try:
        return json.loads(head.get(name, ""))
    except ValueError as error:
        raise FormatError(f"{path}: {name} in the header is {head.get(name)!r:.80}, expected JSON") from error


def _read_texts(
    path: Path, file: safetensors.SafetensorsFile, size: int, vocab_size: int | None, num_salts: int
) -> list[tuple[np.ndarray, int]]:
    """For each page of the file its tokens and its parent's row; everything checked."""
    for name in ("tokens", "lengths", "parents"):
        info, rank = file.info(name), 2 if name == "tokens" else 1
        if info.dtype != torch.int32 or len(info.shape) != rank or (rank == 2 and info.shape[1] != size):
            raise FormatError(f"{path}: tensor {name!r}: found {info.dtype} {info.shape}, expected int32 of pages of {size} tokens")
    tokens, lengths, parents = (file.read(name).numpy() for name in ("tokens", "lengths", "parents"))
    if not len(tokens) == len(lengths) == len(parents):
        raise FormatError(f"{path}: found {len(tokens)} pages, {len(lengths)} lengths and {len(parents)} parents, expected equal numbers")
    texts: list[tuple[np.ndarray, int]] = []
    for row, (ids, length, parent) in enumerate(zip(tokens, lengths.tolist(), parents.tolist())):
        if not 1 <= length <= size:
            raise FormatError(f"{path}: page {row} has {length} tokens, expected 1 to {size}")
        if not -num_salts <= parent < row or (parent >= 0 and len(texts[parent][0]) != size):
            raise FormatError(f"{path}: page {row} follows page {parent}, expected a full page before it, or the beginning of a text")
        if ids[:length].min() < 0 or (vocab_size is not None and ids[:length].max() >= vocab_size):
            raise FormatError(f"{path}: page {row} holds ids outside 0 to {vocab_size}, expected tokens of the model")
        texts.append((ids[:length].copy(), parent))
    return texts


def _place(pager: Pager, texts: list[tuple[np.ndarray, int]], salts: list[str]) -> list[tuple[int, int]]:
    """Publish what is new, as far as there are free pages; returns (row of the file, page), each page held once."""
    keys: dict[int, bytes] = {}
    places: list[tuple[int, int]] = []
    for row, (tokens, parent) in enumerate(texts):
        before = keys.get(parent) if parent >= 0 else pager.root(salts[-1 - parent])
        if before is None:
            continue  # the page before it found no room
        full = len(tokens) == pager.page_size
        key = chain_key(before, tokens) if full else None
        known = pager.index.find(key) is not None if key else pager.index.match_partial(tokens.tolist(), before)[1] == len(tokens)
        if not known:
            if not pager.table.num_free:
                continue
            (page,) = pager.table.allocate(1)
            pager.index.publish(page, before, tokens, key)
            places.append((row, page))
        if key is not None:
            keys[row] = key
    return places


def _pools(cache: KVCache) -> dict[str, Tensor]:
    """Every tensor of the cache by name; the first dimension is the page."""
    found: dict[str, Tensor] = {}
    for kind, pools in (("k", cache.k), ("v", cache.v)):
        for layer, pool in enumerate(pools):
            assert pool.shape[0] == cache.spec.num_pages, "the first dimension of a pool is the page"
            found[f"{kind}.{layer}"] = pool
    return found


def _spec(cache: KVCache) -> dict[str, Any]:
    return {name: value for name, value in asdict(cache.spec).items() if name != "num_pages"}
