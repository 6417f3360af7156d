"""`llm.cache`: the pages as a snapshot, saved to a file and loaded again, and the object that callers hold."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl2nb.cache.pages import PageContent, chain_key
from exl2nb.cache.pool import KVCache
from exl2nb.core.errors import FormatError, OptionError
from exl2nb.core.options import check_flag, check_path
from exl2nb.core.show import facts
from exl2nb.generator.engine import Engine
from exl2nb.generator.pager import Pager
from exl2nb.generator.scheduler import Scheduler
from exl2nb.generator.sequence import RunningRequest
from exl2nb.io import safetensors

_PER_LINE = 64
_STATE_MARKS = {"free": "·", "cached": "o"}
_STATE_TINTS = {"free": "transparent", "cached": "rgba(120,140,160,.35)", "used": "rgba(214,120,40,.55)", "shared": "rgba(60,130,200,.6)"}


@dataclass(frozen=True, kw_only=True)
class PageView:
    """One page.

    state: "used" (requests refer to it), "cached" (none does; its content may be used again) or "free". owners: numbers of those requests,
    in order. count: references. tokens: of its slots that hold something. full: all do. key: hash of its tokens and all before them, as
    hex; None while it is not full or not published. parent: the key before it. last_use: the table's clock when it was last taken or
    given up.
    """

    page: int
    state: str
    owners: tuple[int, ...]
    count: int
    tokens: int
    full: bool
    key: str | None
    parent: str | None
    last_use: int


@dataclass(frozen=True, kw_only=True)
class RequestView:
    """One request that runs or waits.

    tokens: of prompt and answer so far. computed: of them in the cache. reused: of the prompt, found in the cache.
    """

    number: int
    state: str
    priority: int
    tokens: int
    computed: int
    reused: int
    pages: tuple[int, ...]
    preemptions: int


@dataclass(frozen=True, kw_only=True)
class CacheSnapshot:
    """The whole page table.

    clock: what `last_use` counts. evictions: cached pages that were given away so far. preemptions: of requests so far.
    """

    page_size: int
    pages: tuple[PageView, ...]
    requests: tuple[RequestView, ...]
    clock: int
    evictions: int
    preemptions: int

    def num(self, state: str) -> int:
        """Pages in a state: "used", "cached", "free"; or "shared", used by more than one."""
        if state == "shared":
            return sum(page.count > 1 for page in self.pages)
        return sum(page.state == state for page in self.pages)

    def chains(self) -> list[tuple[int, ...]]:
        """Full pages in the order of their text: one tuple of page ids for every text that ends there; shared beginnings repeat."""
        by_key = {page.key: page for page in self.pages if page.key}
        parents = {page.parent for page in by_key.values()}
        found = []
        for page in by_key.values():
            if page.key in parents:
                continue
            chain = [page]
            while chain[-1].parent in by_key:
                chain.append(by_key[chain[-1].parent])
            found.append(tuple(one.page for one in reversed(chain)))
        return found

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per page."""
        import pandas

        names = [f.name for f in fields(PageView)]
        return pandas.DataFrame([[getattr(page, name) for name in names] for page in self.pages], columns=names)

    def __str__(self) -> str:
        marks = "".join(_STATE_MARKS.get(page.state) or ("#" if page.count > 1 else "x") for page in self.pages)
        lines = [marks[at : at + _PER_LINE] for at in range(0, len(marks), _PER_LINE)]
        for one in self.requests:
            where = f"{one.computed} in {len(one.pages)} pages, {one.reused} found in the cache"
            lines.append(f"request {one.number}: {one.state}, {one.tokens} tokens, {where}")
        return "\n".join([self._title(), *lines, "x used  # shared  o cached  · free"])

    def __repr__(self) -> str:
        return f"CacheSnapshot({self._title()})"

    def _repr_html_(self) -> str:
        cells = "".join(map(_page_cell, self.pages))
        rows = "".join(
            f"<tr><td>{one.number}</td><td>{one.state}</td><td>{one.priority}</td><td>{one.tokens}</td><td>{one.computed}</td>"
            f"<td>{one.reused}</td><td>{len(one.pages)}</td></tr>"
            for one in self.requests
        )
        heads = "".join(f"<th>{name}</th>" for name in ("request", "state", "priority", "tokens", "in cache", "reused", "pages"))
        table = f"<table><tr>{heads}</tr>{rows}</table>" if rows else ""
        return (
            f'<div>{html.escape(self._title())}</div><div style="display:flex;flex-wrap:wrap;gap:2px;max-width:52em">{cells}</div>{table}'
        )

    def _title(self) -> str:
        return (
            f"{len(self.pages)} pages of {self.page_size} tokens: {self.num('used')} used ({self.num('shared')} shared), "
            f"{self.num('cached')} cached, {self.num('free')} free; {self.evictions} evicted, {self.preemptions} preempted"
        )


def _page_cell(page: PageView) -> str:
    owners = f", requests {', '.join(map(str, page.owners))}" if page.owners else ""
    title = f"page {page.page}: {page.state}, {page.tokens} tokens{owners}" + (f", {page.key[:8]}" if page.key else "")
    tint = _STATE_TINTS["shared" if page.count > 1 else page.state]
    return (
        f'<span title="{html.escape(title)}" style="width:14px;height:14px;border:1px solid rgba(128,128,128,.6);background:{tint}"></span>'
    )


def take_snapshot(pager: Pager, scheduler: Scheduler) -> CacheSnapshot:
    """A view of every page and request. Nothing may change meanwhile."""
    table, size = pager.table, pager.page_size
    owners: dict[int, list[int]] = {}
    filled: dict[int, int] = {}
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    for sequence in running:
        for i, page in enumerate(sequence.pages):
            owners.setdefault(page, []).append(sequence.number)
            filled[page] = max(filled.get(page, 0), min(size, max(0, sequence.computed - i * size)))
    pages = []
    for page in range(table.num_pages):
        entry = pager.index.entry(page)
        tokens = max(filled.get(page, 0), pager.index.filled(page))
        pages.append(
            PageView(
                page=page,
                state=table.state(page),
                owners=tuple(owners.get(page, ())),
                count=table.count(page),
                tokens=tokens,
                full=tokens == size,
                key=entry.key.hex() if entry and entry.key else None,
                parent=entry.parent.hex() if entry else None,
                last_use=table.last_use(page),
            )
        )
    views = [_request_view(s, "running") for s in running] + [_request_view(s, "waiting") for s in waiting]
    return CacheSnapshot(
        page_size=size,
        pages=tuple(pages),
        requests=tuple(views),
        clock=table.clock,
        evictions=table.evictions,
        preemptions=scheduler.preemptions,
    )


def _request_view(sequence: RunningRequest, state: str) -> RequestView:
    return RequestView(
        number=sequence.number,
        state=state,
        priority=sequence.request.priority,
        tokens=len(sequence.ids),
        computed=sequence.computed,
        reused=sequence.reused_tokens,
        pages=tuple(sequence.pages),
        preemptions=sequence.preemptions,
    )


# ---- Cached pages in a file: their content and their tokens, checked whole before the first byte is used. Knows no threads.

SNAPSHOT_FORMAT = "exl2nb cache 1"


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


def save_pages(path: str | os.PathLike[str], pager: Pager, cache: KVCache, *, model: str) -> CacheFile:
    """Write every published page whose whole text is there.

    Args:
        path: the file; it appears under its name when it is complete.
        pager: what the pages hold. cache: their numbers.

    Raises:
        OptionError: nothing is cached; `path` is no path. ConversionError: the disk is full or the directory cannot be written.
    """
    _check_undivided(cache)
    check_path("cache.save: path", path)
    path = Path(path)
    salts, order, parents = _order_pages(pager)
    if not order:
        raise OptionError("cache.save: no page holds anything that could be used again; generate something first")
    entries = [_page_content(pager, page) for page in order]
    tokens = torch.zeros(len(order), pager.page_size, dtype=torch.int32)
    for row, entry in zip(tokens, entries):
        row[: len(entry.tokens)] = torch.from_numpy(np.array(entry.tokens))
    where = torch.tensor(order)
    tensors = {name: pool[where.to(pool.device)] for name, pool in _named_pools(cache).items()}
    tensors["tokens"] = tokens
    tensors["lengths"] = torch.tensor([len(entry.tokens) for entry in entries], dtype=torch.int32)
    tensors["parents"] = torch.tensor(parents, dtype=torch.int32)
    head = {"format": SNAPSHOT_FORMAT, "model": model, "spec": json.dumps(_spec_fields(cache)), "salts": json.dumps(salts)}
    safetensors.save(path, tensors, head)
    return CacheFile(path=path, pages=len(order), tokens=sum(len(entry.tokens) for entry in entries))


def load_pages(path: str | os.PathLike[str], pager: Pager, cache: KVCache, *, model: str, vocab_size: int | None) -> CacheFile:
    """Add the pages of a file to the cached ones, as far as free pages go; the beginnings of texts come first.

    Args:
        path: made by `save`.
        vocab_size: of the model; None = not checked.

    Raises:
        FormatError: the file is damaged, or no cache file. OptionError: it belongs to another model or another kind of cache; `path` is no
            path.
        ModelNotFound: there is no such file.
    """
    _check_undivided(cache)
    check_path("cache.load: path", path)
    path = Path(path)
    with safetensors.SafetensorsFile(path) as file:
        salts = _check_head(path, file.metadata or {}, cache, model)
        texts = _read_texts(path, file, pager.page_size, vocab_size, len(salts))
        pools = _named_pools(cache)
        for name, pool in pools.items():
            info, shape = file.info(name), (len(texts), *pool.shape[1:])
            if info.dtype != pool.dtype or info.shape != shape:
                raise FormatError(f"{path}: tensor {name!r}: found {info.dtype} {info.shape}, expected {pool.dtype} {shape}")
        places = _publish_pages(pager, texts, salts)
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


def _check_undivided(cache: KVCache) -> None:
    if not cache.whole:
        raise OptionError("cache: the model runs as several ranks, each with some of the heads; saved pages need it on one device")


def _order_pages(pager: Pager) -> tuple[list[str], list[int], list[int]]:
    """Salts, pages with parents first, and for each page its parent's row, or -1 - i for the beginning of a text under salt i."""
    salts = list(pager.roots)
    known = {key: -1 - i for i, key in enumerate(pager.roots.values())}
    order: list[int] = []
    parents: list[int] = []
    left = [page for page in range(pager.table.num_pages) if pager.index.entry(page)]
    while True:
        later = []
        for page in left:
            entry = _page_content(pager, page)
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


def _page_content(pager: Pager, page: int) -> PageContent:
    entry = pager.index.entry(page)
    assert entry is not None, f"page {page} is not published"
    return entry


def _check_head(path: Path, head: Mapping[str, str], cache: KVCache, model: str) -> list[str]:
    if head.get("format") != SNAPSHOT_FORMAT:
        raise FormatError(f"{path}: found format {head.get('format')!r}, expected {SNAPSHOT_FORMAT!r}; the file was not made by cache.save")
    if head.get("model") != model:
        raise OptionError(
            f"{path}: the pages were computed by another model (fingerprint {str(head.get('model'))[:12]}, this one has {model[:12]}): "
            "load the file with the model that saved it, on the same kind of device"
        )
    spec, salts = _read_json_field(path, head, "spec"), _read_json_field(path, head, "salts")
    mine = _spec_fields(cache)
    if spec != mine:
        theirs = spec if isinstance(spec, dict) else {}
        differing = [name for name in mine if theirs.get(name) != mine[name]]
        found = ", ".join(f"{name} {theirs.get(name)!r} (here {mine[name]!r})" for name in differing) or repr(spec)[:80]
        raise OptionError(f"{path}: the file's cache is of another kind: {found}; load the model with the same cache options")
    if not isinstance(salts, list) or not all(isinstance(salt, str) for salt in salts):
        raise FormatError(f"{path}: salts are {str(salts)[:80]}, expected a list of texts")
    return salts


def _read_json_field(path: Path, head: Mapping[str, str], name: str) -> Any:
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
        if vocab_size is not None and ids[:length].max() >= vocab_size:  # negative ones are numbers of pictures
            raise FormatError(f"{path}: page {row} holds ids of {vocab_size} and more, expected tokens of the model")
        texts.append((ids[:length].copy(), parent))
    return texts


def _publish_pages(pager: Pager, texts: list[tuple[np.ndarray, int]], salts: list[str]) -> list[tuple[int, int]]:
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


def _named_pools(cache: KVCache) -> dict[str, Tensor]:
    """Every tensor of the cache by name; the first dimension is the page."""
    found: dict[str, Tensor] = {}
    for kind, pools in (("k", cache.k), ("v", cache.v)):
        for layer, pool in enumerate(pools):
            assert pool.shape[0] == cache.spec.num_pages, "the first dimension of a pool is the page"
            found[f"{kind}.{layer}"] = pool
    return found


def _spec_fields(cache: KVCache) -> dict[str, Any]:
    return {name: value for name, value in asdict(cache.spec).items() if name != "num_pages"}


# ---- `llm.cache`: for callers, on any thread.


class PromptCache:
    """The pages of one model, whose content is kept across requests and, in files, across sessions.

    What a request has computed stays in the cache until the room is needed. A request whose prompt begins like an earlier one does not
    compute that beginning again (`completion.timings.reused_tokens` says how much), and gets the same bits.

    Args:
        engine: whose pages.
        fingerprint: names what the pages depend on; called when a file is saved or loaded.

    Example: a prompt is computed once, in this session and in the next.
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     prompt = "The rain fell on the old town and its harbour. " * 30
        ...     first, again = (llm.generate(prompt, max_tokens=1, temperature=0).timings for _ in range(2))
        ...     kept, forgotten = llm.cache.save("town.cache"), llm.cache.clear()
        ...     restored = llm.cache.load("town.cache")
        >>> first.reused_tokens, again.reused_tokens == again.prompt_tokens - 1, restored.tokens >= again.prompt_tokens - 1
        (0, True, True)
    """

    def __init__(self, engine: Engine, fingerprint: Callable[[], str]) -> None:
        self._engine, self._fingerprint = engine, fingerprint

    @property
    def reuse(self) -> bool:
        """Whether beginnings are reused; set it to False to compute every prompt in full. What is cached stays."""
        return self._engine.pager.reuse

    @reuse.setter
    def reuse(self, on: bool) -> None:
        check_flag("cache.reuse", on)
        self._engine.call(partial(setattr, self._engine.pager, "reuse", on))

    def snapshot(self) -> CacheSnapshot:
        """Every page and every request at this moment; waits for the engine's current step.

        Raises:
            EngineClosed: the model was closed.
        """
        return self._engine.call(partial(take_snapshot, self._engine.pager, self._engine.loop.scheduler))

    def save(self, path: str | os.PathLike[str]) -> CacheFile:
        """Write the cached pages to a safetensors file, so that another session can go on from them.

        Raises:
            OptionError: nothing is cached. ConversionError: the disk is full or the directory cannot be written.
        """
        engine, name = self._engine, self._fingerprint()
        return engine.call(partial(save_pages, path, engine.pager, engine.cache, model=name))

    def load(self, path: str | os.PathLike[str]) -> CacheFile:
        """Add the pages of a file to the cache, as far as pages are free.

        Raises:
            FormatError: the file is damaged. OptionError: it belongs to another model or another kind of cache. ModelNotFound: no file.
        """
        engine, name = self._engine, self._fingerprint()
        return engine.call(partial(load_pages, path, engine.pager, engine.cache, model=name, vocab_size=engine.vocab_size))

    def clear(self) -> int:
        """Forget what is cached; returns the number of pages. Pages of running requests stay with them."""
        return self._engine.call(self._engine.pager.clear)

    def _repr_html_(self) -> str:
        spec, pages = self._engine.spec, self._engine.pages
        rows = {
            "room": f"{spec.num_tokens} tokens in {pages.num_pages} pages, {spec.mode}, {spec.total_bytes / 2**20:.1f} MiB",
            "used": f"{pages.num_pages - pages.num_free} pages",
            "kept for later": f"{pages.num_cached} pages",
            "free": f"{pages.num_free - pages.num_cached} pages",
            "evicted so far": f"{pages.evictions} pages",
        }
        return facts(f"prompt cache{'' if self.reuse else ', reuse off'}{' (closed)' if self._engine.closed else ''}", rows)

    def __repr__(self) -> str:
        spec, pages = self._engine.spec, self._engine.pages
        return (
            f"PromptCache({spec.num_tokens} tokens, {pages.num_pages - pages.num_free} pages used, {pages.num_cached} cached, "
            f"{pages.num_free - pages.num_cached} free, {pages.evictions} evicted{'' if self.reuse else ', reuse off'})"
        )
